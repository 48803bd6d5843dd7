"""Folders of a user's images: layouts, sizes, modes, manifests, declarations and damaged files."""

from __future__ import annotations

import itertools
import os
import tomllib
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsynth import FolderSettings, load_records
from fedsynth.data.declaration import read_declaration
from fedsynth.data.describe import describe_folder
from fedsynth.data.records import site_names
from fedsynth.errors import DataError, DataFilesCorruptError, FedsynthError, SettingError
from tests.data.conftest import png
from tests.raising import raises
from tests.user_files import make_image_folder, write_declaration, write_image


def test_sites_become_clients_with_unchanged_pixels(tmp_path: Path) -> None:
    loaded = load_records(make_image_folder(tmp_path, per_class=2))
    assert loaded.names == ("north", "south")
    assert [part.tolist() for part in loaded.sites] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loaded.train.labels.tolist() == [0, 0, 1, 1] * 2
    assert loaded.train.spec.class_names == ("ill", "well")
    expected = np.asarray(Image.open(tmp_path / "south" / "ill" / "01.png"))
    assert np.array_equal(loaded.train.images[5, 0].numpy(), expected)
    assert (loaded.test, loaded.test_kind) == (None, "none")
    for name in ("2", "10", "1"):  # class 10 comes after class 2
        write_image(tmp_path / "classes" / name / "a.png", 1)
    loaded = load_records(tmp_path / "classes")
    assert (loaded.train.spec.class_names, loaded.sites) == (("1", "2", "10"), None)


def test_mixed_sizes_are_rejected_and_mixed_modes_become_rgb(tmp_path: Path) -> None:
    make_image_folder(tmp_path)
    write_image(tmp_path / "north" / "ill" / "tall.png", 9, (40, 20), mode="RGB")
    with raises(DataError, "data.sizes"):
        load_records(tmp_path)
    images = load_records(tmp_path, image_size="12x10").train.images
    assert list(images.shape[1:]) == [3, 12, 10]
    assert bool((images[0, 0] == images[0, 2]).all())  # a grey image: three equal channels
    assert load_records(tmp_path, image_size=16, channels=1).train.images.shape[1] == 1


def test_damaged_files_are_named_and_skipped_on_request(tmp_path: Path) -> None:
    make_image_folder(tmp_path)
    damaged, pipe = tmp_path / "north/well/03.png", tmp_path / "south/ill/00.png"
    damaged.write_bytes(damaged.read_bytes()[:60])
    pipe.write_bytes(b"not at all")
    message = r"2 of 24 files .*north/well/03.png .*, south/ill/00.png .*data.skip_corrupt=True"
    with pytest.raises(DataFilesCorruptError, match=message):
        load_records(tmp_path, image_size=16)
    with pytest.warns(UserWarning, match=r"skipped in (.|\n)*north/well/03.png"):
        loaded = load_records(tmp_path, image_size=16, skip_corrupt=True)
    assert loaded.skipped == ("north/well/03.png", "south/ill/00.png")
    assert [len(part) for part in loaded.sites] == [11, 11]
    assert loaded.train.labels[loaded.sites[1]].tolist() == [0] * 5 + [1] * 6
    damaged.write_bytes(png(9_000, 9_000))  # is not decoded
    pipe.unlink()
    os.mkfifo(pipe)  # does not block
    message = r"9000×9000, above .*/ill/00.png \(the path is a folder, pipe"
    with pytest.raises(FedsynthError, match=message):
        load_records(tmp_path, image_size=16)
    pipe.unlink()
    for image in tmp_path.rglob("*.png"):
        image.write_bytes(b"")
    with raises(DataFilesCorruptError, "data.unreadable_images"):
        load_records(tmp_path, image_size=8, skip_corrupt=True)


def test_skipped_files_determine_nothing(tmp_path: Path) -> None:
    """A damaged colour file is the only one of its site and class, and has another size."""
    make_image_folder(tmp_path)
    damaged = tmp_path / "west/unsure/1.png"
    write_image(damaged, 1, (40, 40), mode="RGB")
    damaged.write_bytes(damaged.read_bytes()[:200])
    with pytest.warns(UserWarning, match="west/unsure/1.png"):
        loaded = load_records(tmp_path, skip_corrupt=True)
    toml = describe_folder(FolderSettings(str(tmp_path), skip_corrupt=True), print).toml
    assert loaded.train.spec.image_shape == (1, 16, 16)
    assert (loaded.train.spec.class_names, loaded.names) == (("ill", "well"), ("north", "south"))
    assert tomllib.loads(toml)["images"]["sites"] == ["north", "south"]


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (("ill/1.png", "north/ill/2.png"), "data.layout"),
        (("a/b/c/1.png",), "data.layout"),
        (("1.png",), "data.layout"),
        (("ill/1.png", "Ill/2.png"), "data.names"),
        (("a/train/1.png", "a/test/2.png"), "data.splits"),
        (("Test_set/x/1.png", "Train_set/x/2.png", "z/x/1.png"), "data.splits"),
        (("a/1.mha", "b/2.mha"), "data.no_image"),
    ],
)
def test_invalid_layouts_raise_one_line_errors(
    tmp_path: Path, files: tuple[str, ...], text: str
) -> None:
    for path in map(tmp_path.joinpath, files):
        write_image(path.with_suffix(".png"), 1)
        path.with_suffix(".png").rename(path)
    with raises(DataError, text) as caught:
        load_records(tmp_path)
    assert "\n" not in str(caught.value)


def test_files_of_unknown_types_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bank.json").write_text('[{"age": 50, "label": 1}]')
    with raises(DataError, "data.file_type"):
        load_records(tmp_path / "bank.json")


# --------------------------------------------------------------------------------- other files
def damages(root: Path) -> dict[str, tuple[Callable[[], object], str | None]]:
    """Returns changes of a folder of images at root/scans, and the count in the error of each."""
    scans, image = root / "scans", root / "scans/north/ill/00.png"
    unsure = scans / "north/unsure"
    return {
        "broken link": (lambda: (scans / "south").symlink_to(root / "gone"), "broken links: 1"),
        "loop": (lambda: (scans / "loop").symlink_to(scans / "loop"), "broken links: 1"),
        "empty class": (unsure.mkdir, r"empty folders: 1 \(north/unsure\)"),
        "empty site": (lambda: (scans / "south").symlink_to(root / "empty"), r"empty.* \(south\)"),
        "hidden": ((scans / "north/.x.png").mkdir, None),
        "ending": (lambda: image.rename(image.with_suffix(".mha")), r"\.mha: 1 \(north/ill/00.mha"),
        "no ending": (lambda: (scans / "notes").write_text("x"), r"no extension: 1 \(notes\)"),
    }


@pytest.mark.parametrize("name", damages(Path()))
def test_non_image_files_are_counted_and_rejected(tmp_path: Path, name: str) -> None:
    """An incomplete archive must not lose a site or a class with one warning."""
    make_image_folder(tmp_path / "scans", ("north",))
    (tmp_path / "empty").mkdir()
    damage, message = damages(tmp_path)[name]
    damage()
    if message is not None:
        with raises(DataError, "data.other_files") as caught:
            load_records(tmp_path / "scans")
        assert "\n" not in str(caught.value)
    with pytest.warns(UserWarning, match=message or "hidden: 1"):
        loaded = load_records(tmp_path / "scans", skip_other=True)
    assert len(loaded.train) == 12 - (name == "ending")
    assert (loaded.left_out == "") == (message is None)


def test_linked_folders_and_files_are_followed(tmp_path: Path) -> None:
    """A site on another disk is included by a link."""
    make_image_folder(tmp_path / "disk", ("south",))
    make_image_folder(tmp_path / "scans", ("north",))
    (tmp_path / "scans/south").symlink_to(tmp_path / "disk/south")
    (tmp_path / "scans/north/ill/99.png").symlink_to(tmp_path / "disk/south/well/00.png")
    loaded = load_records(tmp_path / "scans")
    assert (loaded.names, len(loaded.train)) == (("north", "south"), 25)
    (tmp_path / "scans/north/ill/98.png").hardlink_to(tmp_path / "scans/north/ill/00.png")
    message = r"14 of 26 images .* links to, or copies .* as north/ill/98.png of north/ill/00.png"
    with pytest.warns(UserWarning, match=message):
        load_records(tmp_path / "scans")
    link = tmp_path / "scans" / "west"
    for target in ("disk/south", "scans"):  # a site twice, a loop
        link.symlink_to(tmp_path / target)
        with raises(DataFilesCorruptError, "data.links"):
            load_records(tmp_path / "scans")
        link.unlink()


def test_ledgers_and_hidden_files_are_not_images(tmp_path: Path) -> None:
    write_declaration(make_image_folder(tmp_path), ledger="kept/here")
    for place in ("fedsynth-ledger/north.jsonl", "kept/here/north.jsonl", ".git/config"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text("x")
    (tmp_path / "north" / "ill" / "._00.png").write_bytes(b"of a Macintosh")
    for image in (tmp_path / "south" / "ill").iterdir():  # a site may lack a class
        image.unlink()
    with pytest.warns(match=r"empty folders: 1 \(south/ill\).*hidden: 2|hidden: 2.*empty"):
        assert len(load_records(tmp_path).train) == 18


# -------------------------------------------------------------------- training and test images
def test_images_of_both_splits_are_rejected(tmp_path: Path) -> None:
    """`--data N5`, where N5 contains train/ and test/, would train on the test images."""
    folder = make_image_folder(tmp_path, ("train", "test"))
    with raises(DataError, "data.splits"):
        load_records(folder, test_folder=folder / "test")
    assert len(load_records(folder / "train", test_folder=folder / "test").test) == 12
    (tmp_path / "scans").mkdir()
    for site, split in (("north", "train"), ("south", "test")):
        (folder / split).rename(tmp_path / "scans" / site)
    (tmp_path / "link").symlink_to(tmp_path / "scans" / "south")
    for test in ("scans", "link"):
        with raises(DataError, "data.shared_images"):
            load_records(tmp_path / "scans", test_folder=tmp_path / test)


# ---------------------------------------------------------------------------------- manifests
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("path,user\na.png,Ada\na.png,Bob\n", "line 3 of .* second user for the image a.png"),
        ("path,user\nscans/a.png,Ada\n", "does not list the image a/a.png. Add"),
        ("\udcff", "is not UTF-8 text. Save it as CSV UTF-8"),
        ("", "is empty. Add a header line with the columns path and"),
        ("name,label\na.png,ill\n", "line 1 of .* must contain the columns path and label"),
        ("path,label,site\na.png,ill,\n", "line 2 of .* empty cell in the column site"),
        ("path,label\n../a.png,ill\n", "leads out of the list"),
        ("path,label\na.png,ill\na.png,well\n", "repeats an earlier line's path a.png"),
        ("path,label\n", "lists no image"),
        ("path,label\nnorth\\a.png,ill\n", "no image that .*manifest.csv lists exists"),
        ("path,label\na.png,ill\nb.png,ill\n", r"\(the file does not exist\)"),
        ("path,label\na.png,ill\nempty.png,ill\n", r"1 of 2 files .*\(the file is empty\)"),
        ("path,label,patient,PatientID\na.png,ill,1,2\n", "two user columns"),
        ("sep=;\n\npath;label\n\na.png;\n", "line 5 of .* empty cell in the column label"),
    ],
)
def test_invalid_tables_raise_one_line_errors(tmp_path: Path, text: str, error: str) -> None:
    name = "users.csv" if "user" in text else "manifest.csv"
    write_image(tmp_path / ("a/a.png" if "user" in text else "a.png"), 1)
    if "user" not in text:
        (tmp_path / "empty.png").touch()
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    for size in (None, 8):  # the same error, with and without the search for sizes
        with pytest.raises(DataError, match=error) as caught:
            load_records(tmp_path, image_size=size)
        assert "\n" not in str(caught.value)


FORMS: list[Callable[[str], bytes]] = [
    lambda text: text.replace(",", ";").encode("utf-8-sig"),  # Excel, in German
    lambda text: f"sep=;\r\n{text.replace(',', ';')}".encode(),
    lambda text: text.replace(",", "\t").replace("\n", "\r\n").encode(),
    lambda text: text.upper().replace(".PNG", ".png").encode(),
    lambda text: "".join(f'"{cell}"\n' for cell in text.replace(",", '","').split()).encode(),
]


@pytest.mark.parametrize("encode", FORMS)
@pytest.mark.parametrize("name", ["users.csv", "manifest.csv"])
def test_spreadsheets_are_read(tmp_path: Path, encode: Callable[[str], bytes], name: str) -> None:
    """Both readers accept the same tables. A Macintosh may store a name's accents separately."""
    text = "Image,Label,Patient,Site\n"
    for label, number in itertools.product("AB", (1, 2)):
        path = f"KÖLN/{label}/{number}.png"
        write_image(tmp_path / unicodedata.normalize("NFD", path), 1)
        text += f"{path},{label},P{label},S{number}\n"
    (tmp_path / name).write_bytes(encode(text))
    loaded = load_records(tmp_path)
    assert loaded.train.groups.tolist() == [0, 0, 1, 1]
    assert loaded.train.labels.tolist() == [0, 0, 1, 1]
    assert name == "users.csv" or loaded.names == ("S1", "S2")


@pytest.mark.parametrize("heading", ["patient_id", "PatientID", "subject", "Patient No."])
def test_people_are_known_and_other_columns_are_noted(tmp_path: Path, heading: str) -> None:
    """A spreadsheet removes zeros: 1 and 01 are one person, so that neither counts as two. Images
    that are not in the folder may be of another split."""
    rows = [f"path,label,{heading},age,split"]
    for number, user in enumerate(("1", "01", "2")):
        write_image(tmp_path / "é" / f"{number}ü.png", number)
        name = f"{unicodedata.normalize('NFD', 'é')}/{number}ü.png"  # letters in both forms
        rows.append(f"{name},{number},{user},70,train")
    for name, other, unused in (
        ("manifest", "", "age"),
        ("users", "\nx,1,3,70,test", "label, age"),
    ):
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join(rows) + other)
        with pytest.warns(
            UserWarning, match=rf"columns of .*{name}.csv that are not used: {unused}$"
        ):
            assert load_records(tmp_path).train.groups.tolist() == [0, 0, 1]
        path.write_text(path.read_text().replace("train", "test", 1))
        with raises(DataError, "data.splits"):
            load_records(tmp_path)
        path.unlink()


# -------------------------------------------------------------------------------- declarations
def test_declaration_determines_image_spec(tmp_path: Path) -> None:
    write_declaration(make_image_folder(tmp_path))
    loaded = load_records(tmp_path)
    assert loaded.train.spec.name == "clinic"
    assert loaded.train.spec.train_size == 50  # declared, not the 24 of the folder
    assert loaded.declaration.signed_by == "A. Keller, 2026-11-22"
    assert loaded.declaration.ledger == tmp_path / "fedsynth-ledger"
    with raises(SettingError, "data.image_size"):
        load_records(tmp_path, image_size=8)
    path = tmp_path / "fedsynth.toml"
    path.write_text(path.read_text().replace("channels = 1", "channels = 3"))
    assert load_records(tmp_path).train.spec.mean == (0.5,) * 3  # one constant for all channels


@pytest.mark.parametrize(
    ("sites", "folders", "error"),
    [
        (("north",), ("north/ill", "north/well", "north/x"), "declaration.undeclared"),
        (("north",), ("north/ill", "west/well"), "declaration.undeclared"),
        (("north", "east"), ("north/ill", "north/well"), "declaration.absent"),
        (("north",), ("north/ill",), "declaration.absent"),
    ],
)
def test_undeclared_sites_and_classes_are_rejected(
    tmp_path: Path, sites: tuple[str, ...], folders: tuple[str, ...], error: str
) -> None:
    for folder in folders:
        write_image(tmp_path / folder / "1.png", 1)
    write_declaration(tmp_path, sites)
    with raises(DataError, error):
        load_records(tmp_path)


def test_wrong_declared_counts_are_rejected(tmp_path: Path) -> None:
    """δ is checked against the declared bound, and a low count indicates an incomplete archive."""
    write_declaration(make_image_folder(tmp_path / "many", per_class=26))
    with raises(DataError, "declaration.most_images"):
        load_records(tmp_path / "many")
    write_declaration(make_image_folder(tmp_path / "few", per_class=3))
    with raises(DataError, "declaration.sizes"):
        load_records(tmp_path / "few")
    write_declaration(make_image_folder(tmp_path / "one"), users=20)
    rows = [f"{p.relative_to(tmp_path / 'one').as_posix()},A" for p in tmp_path.rglob("one/*/*/*")]
    (tmp_path / "one" / "users.csv").write_text("path,user\n" + "\n".join(rows))
    with raises(DataError, "declaration.sizes"):
        load_records(tmp_path / "one")


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("images = 50", "images = 0", "sizes.images"),
        ("images = 50", "images = 5000", "most_images=100 in .* is below sizes.images=5000"),
        ('source = "a test"', 'sauce = "a test"', "images.source|images.sauce"),
        ("mean = [0.5]", "mean = [0.5, 0.5]", "mean"),
        ("height = 16", 'height = "16"', "images.height"),
        ('date = "2026-11-22"', 'date = "22.11.2026"', "signed_off.date"),
        ("[sizes]", "[sizes", "no valid TOML|is not valid TOML"),
        ('"ill", "well"', '"ill", "ill "', "images.class_names"),
    ],
)
def test_damaged_declarations_name_key(tmp_path: Path, old: str, new: str, error: str) -> None:
    path = write_declaration(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DataFilesCorruptError, match=error) as caught:
        read_declaration(path)
    assert "\n" not in str(caught.value)


def test_proposals_have_rounded_counts_and_no_signature(tmp_path: Path) -> None:
    """The file becomes public, so it must not contain the exact number of images."""
    make_image_folder(tmp_path, per_class=23)
    proposal = describe_folder(FolderSettings(str(tmp_path)), lambda text: None)
    facts = tomllib.loads(proposal.toml)
    assert facts["sizes"] == {"images": 100, "most_images": 200, "users": 0}
    assert facts["images"]["sites"] == ["north", "south"]
    assert "92" not in proposal.toml.replace("192", "")
    assert "46" in proposal.table  # the owner sees the exact counts
    assert proposal.path == tmp_path / "fedsynth.toml"
    proposal.path.write_text(proposal.toml)
    assert not read_declaration(proposal.path).signed_by
    assert load_records(tmp_path).train.spec.class_names == ("ill", "well")


def test_site_names_are_unique_ledger_names() -> None:
    first, second, third = site_names(("St. Mary", "St_ Mary", "north"))
    assert first.startswith("St._Mary-")
    assert second.startswith("St__Mary-")
    assert third == "north"
    assert len(set(map(str.casefold, site_names(("a b", "a_b", "A_B"))))) == 3
    # a new site does not take another site's ledger
    assert site_names(("Süd",))[0] == site_names(("Söd", "Süd"))[1]


def test_invalid_folder_settings_are_rejected() -> None:
    for values in ({"image_size": "5000"}, {"channels": 2}, {"test": "secret"}, {"test": "public"}):
        with pytest.raises(FedsynthError, match=r"^data\."):
            FolderSettings(**{"folder": "x", **values})  # type: ignore[arg-type]
    with raises(FedsynthError, "data.folder"):
        FolderSettings("")
