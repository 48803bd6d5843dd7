"""Folders of a user's own images: layouts, sizes, modes, manifests, files that are damaged."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsynth import FolderSettings, load_folder
from fedsynth.data.declaration import coarse, read_declaration
from fedsynth.data.describe import describe_folder
from fedsynth.data.load_folder import site_names
from fedsynth.errors import (
    DataError,
    DataFilesCorruptError,
    DataFilesMissingError,
    FedsynthError,
    SettingError,
)
from tests.own_images import declare, make_folder, write_image


def test_sites_are_clients_and_pixels_are_the_files(tmp_path: Path) -> None:
    """Catches: images under another label or at another site than their folders say."""
    found = load_folder(make_folder(tmp_path, each=2))
    assert found.names == ("north", "south")
    assert found.sites is not None
    assert [part.tolist() for part in found.sites] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found.train.labels.tolist() == [0, 0, 1, 1] * 2
    assert found.train.spec.class_names == ("ill", "well")
    expected = np.asarray(Image.open(tmp_path / "south" / "ill" / "01.png"))
    assert np.array_equal(found.train.images[5, 0].numpy(), expected)
    assert (found.test, found.test_kind) == (None, "none")


def test_classes_alone_have_no_sites(tmp_path: Path) -> None:
    found = load_folder(make_folder(tmp_path, sites=()))
    assert (found.sites, found.names, len(found.train)) == (None, None, 12)


def test_classes_that_are_numbers_are_in_their_order(tmp_path: Path) -> None:
    """Catches: class 10 before class 2."""
    for name in ("2", "10", "1"):
        write_image(tmp_path / name / "a.png", 1)
    assert load_folder(tmp_path).train.spec.class_names == ("1", "2", "10")


def test_sizes_that_differ_ask_for_one(tmp_path: Path) -> None:
    make_folder(tmp_path)
    write_image(tmp_path / "north" / "ill" / "tall.png", 9, (40, 20))
    with pytest.raises(DataError, match=r"2 sizes \(16×16, 40×20, …\).*data.image_size=64"):
        load_folder(tmp_path)
    found = load_folder(tmp_path, image_size="12x10")
    assert list(found.train.images.shape[1:]) == [1, 12, 10]


def test_one_image_in_colour_makes_all_so_unless_said(tmp_path: Path) -> None:
    make_folder(tmp_path)
    write_image(tmp_path / "north" / "ill" / "colour.png", 9, mode="RGB")
    found = load_folder(tmp_path).train.images
    assert found.shape[1] == 3
    assert bool((found[0, 0] == found[0, 2]).all())  # a grey one: three equal channels
    assert load_folder(tmp_path, channels=1).train.images.shape[1] == 1


def test_of_16_bits_the_upper_8_are_kept(tmp_path: Path) -> None:
    """Catches: Pillow's own conversion, which makes all above 255 white."""
    levels = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(levels).save(tmp_path / name / "deep.png")
    found = load_folder(tmp_path).train.images[0, 0]
    assert found.flatten().tolist() == list(range(256))


def test_photographs_stand_upright(tmp_path: Path) -> None:
    """Catches: an image on its side, as the camera wrote it."""
    picture = np.zeros((16, 24, 3), np.uint8)
    picture[:, :8] = 255  # a bright left third
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned right by 90°: left comes up
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(picture).save(tmp_path / name / "p.png", exif=exif)
    found = load_folder(tmp_path).train
    assert list(found.images.shape[2:]) == [24, 16]
    rows = found.images[0].float().mean(dim=(0, 2))
    assert rows[:8].min() > 200 > 50 > rows[8:].max()


def test_damaged_files_are_named_and_skipped_on_request(tmp_path: Path) -> None:
    make_folder(tmp_path)
    bad = tmp_path / "north" / "well" / "03.png"
    bad.write_bytes(bad.read_bytes()[:60])
    (tmp_path / "south" / "ill" / "00.png").write_bytes(b"not at all")
    with pytest.raises(
        DataFilesCorruptError,
        match=r"2 of 24 files .* cannot be read: north/well/03.png .*; south/ill/00.png \(it is no "
        r"JPEG.*data.skip_corrupt=True",
    ):
        load_folder(tmp_path, image_size=16)
    with pytest.warns(UserWarning, match=r"2 of 24 files(.|\n)*north/well/03.png"):
        found = load_folder(tmp_path, image_size=16, skip_corrupt=True)
    assert found.skipped == ("north/well/03.png", "south/ill/00.png")
    assert found.sites is not None
    assert [len(part) for part in found.sites] == [11, 11]
    assert found.train.labels[found.sites[1]].tolist() == [0] * 5 + [1] * 6


def test_a_folder_of_damaged_files_alone_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(b"")
    with pytest.raises(DataFilesCorruptError, match="2 of 2 files"):
        load_folder(tmp_path, image_size=8, skip_corrupt=True)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (("ill/1.png", "north/ill/2.png"), "has north/ill/2.png beside ill/1.png; expected SITE"),
        (("a/b/c/1.png",), "has a/b/c/1.png; expected SITE/CLASS/files"),
        (("1.png",), "has 1.png; expected"),
        (("ill/1.png", "Ill/2.png"), "two classes are called 'Ill' and 'ill'"),
        (("a/1.dcm", "b/2.dcm"), r"no image .*\(there are files of .dcm: 2\)"),
    ],
)
def test_other_layouts_are_one_line(tmp_path: Path, files: tuple[str, ...], text: str) -> None:
    for name in files:
        write_image(tmp_path / Path(name).with_suffix(".png"), 1)
        (tmp_path / Path(name).with_suffix(".png")).rename(tmp_path / name)
    with pytest.raises((DataError), match=text) as caught:
        load_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_is_no_image_is_said_and_hidden_files_are_not(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / ".DS_Store").write_text("x")
    write_image(tmp_path / ".thumbnails" / "ill" / "1.png", 1)
    with pytest.warns(UserWarning, match=r"no images by their endings: .txt: 1$"):
        assert len(load_folder(tmp_path).train) == 24


# ---------------------------------------------------------------------------------- manifests
def manifest(folder: Path, text: str) -> Path:
    (folder / "manifest.csv").write_text(text, encoding="utf-8")
    return folder


def test_a_manifest_says_label_site_and_user(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "deep/down/c.png"):
        write_image(tmp_path / name, 1)
    manifest(
        tmp_path,
        "user;path;site;label\nMüller;b.png;north;ill\nOtt;a.png;south;well\n"
        "Müller;deep/down/c.png;north;well\n",
    )
    for place in (tmp_path, tmp_path / "manifest.csv"):
        found = load_folder(place)
        assert found.train.labels.tolist() == [1, 0, 1]  # a, b, c
        assert found.train.groups is not None
        assert found.train.groups.tolist() == [1, 0, 0]
        assert found.names == ("north", "south")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("file,label\na.png,ill\n", "must name the columns path and label"),
        ("path,label,site\na.png,ill,\n", "line 2: site is empty"),
        ("path,label\n../a.png,ill\n", "must be a path below"),
        ("path,label\n/etc/a.png,ill\n", "must be a path below"),
        ("path,label\na.png,ill\na.png,well\n", "lists a.png twice"),
        ("path,label\n", "lists no image"),
        ("path,label\nb.png,ill\n", r"b.png \(there is no such file\)"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_one_line(tmp_path: Path, text: str, error: str) -> None:
    write_image(tmp_path / "a.png", 1)
    with pytest.raises(DataError, match=error) as caught:
        load_folder(manifest(tmp_path, text), image_size=8)
    assert "\n" not in str(caught.value)


def test_users_csv_says_whose_images_are(tmp_path: Path) -> None:
    make_folder(tmp_path, each=1)
    rows = [
        f"{p.relative_to(tmp_path).as_posix()},P{n // 2}"
        for n, p in enumerate(sorted(tmp_path.rglob("*.png")))
    ]
    (tmp_path / "users.csv").write_text("path,user\n" + "\n".join(rows))
    groups = load_folder(tmp_path).train.groups
    assert groups is not None
    assert groups.tolist() == [0, 0, 1, 1]


# -------------------------------------------------------------------------------- declarations
def test_a_declaration_decides_what_images_are(tmp_path: Path) -> None:
    declare(make_folder(tmp_path))
    found = load_folder(tmp_path)
    assert found.train.spec.name == "clinic"
    assert found.train.spec.train_size == 50  # declared, and not the 24 that there are
    assert found.declaration is not None
    assert found.declaration.signed_by == "A. Keller, 2026-11-22"
    assert found.declaration.ledger == tmp_path / "fedsynth-ledger"
    with pytest.raises(SettingError, match=r"data.image_size is another than"):
        load_folder(tmp_path, image_size=8)


def test_what_is_not_declared_is_refused(tmp_path: Path) -> None:
    declare(make_folder(tmp_path))
    write_image(tmp_path / "north" / "unsure" / "1.png", 1)
    with pytest.raises(DataError, match=r"has a class 'unsure' that .* does not declare"):
        load_folder(tmp_path)
    other = tmp_path / "other"
    declare(make_folder(other, sites=("north", "west")))
    with pytest.raises(DataError, match="has a site 'west'"):
        load_folder(other)
    declare(other, sites=("north", "west", "east"))
    with pytest.raises(DataError, match="no image of the site 'east'"):
        load_folder(other)


def test_more_images_than_declared_are_refused(tmp_path: Path) -> None:
    """Catches: δ checked against a bound that does not hold."""
    declare(make_folder(tmp_path, each=26))
    with pytest.raises(DataError, match=r"more images than .*sizes.most_images"):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("images = 50", "images = 0", "sizes.images"),
        ("images = 50", "images = 5000", "must not be below sizes.images"),
        ('source = "a test"', 'sauce = "a test"', "images.source|images.sauce"),
        ("mean = [0.5]", "mean = [0.5, 0.5]", "mean"),
        ("height = 16", 'height = "16"', "images.height"),
        ('date = "2026-11-22"', 'date = "22.11.2026"', "signed_off.date.*such as 2026-11-23"),
        ("[sizes]", "[sizes", "no valid TOML|is not valid TOML"),
    ],
)
def test_a_damaged_declaration_names_the_key(
    tmp_path: Path, old: str, new: str, error: str
) -> None:
    path = declare(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DataFilesCorruptError, match=error) as caught:
        read_declaration(path)
    assert "\n" not in str(caught.value)


def test_a_proposal_has_round_numbers_and_is_not_signed(tmp_path: Path) -> None:
    """Catches: the exact number of images in a file that is to be public."""
    make_folder(tmp_path, each=23)
    found = describe_folder(FolderSettings(str(tmp_path)), lambda text: None)
    facts = tomllib.loads(found.toml)
    assert facts["sizes"] == {"images": 100, "most_images": 200, "users": 0}
    assert facts["images"]["sites"] == ["north", "south"]
    assert "92" not in found.toml.replace("192", "")
    assert "46" in found.table  # the owner sees what there is
    assert found.path == tmp_path / "fedsynth.toml"
    found.path.write_text(found.toml)
    assert not read_declaration(found.path).signed
    assert load_folder(tmp_path).train.spec.class_names == ("ill", "well")


@pytest.mark.parametrize(
    ("count", "near", "above"), [(1, 1, 1), (3, 2, 5), (92, 100, 100), (570, 500, 1000)]
)
def test_coarse_numbers(count: int, near: int, above: int) -> None:
    assert (coarse(count), coarse(count, up=True)) == (near, above)


def test_names_of_sites_are_names_of_ledgers() -> None:
    first, second, third = site_names(("St. Mary", "St_ Mary", "north"))
    assert first.startswith("St._Mary-")
    assert second.startswith("St__Mary-")
    assert third == "north"
    assert len(set(map(str.casefold, site_names(("a b", "a_b", "A_B"))))) == 3
    # a site that comes later takes nobody's ledger
    assert site_names(("Süd",))[0] == site_names(("Söd", "Süd"))[1]


@pytest.mark.parametrize(
    "values",
    [
        {"folder": ""},
        {"folder": "x", "image_size": "0"},
        {"folder": "x", "image_size": "big"},
        {"folder": "x", "image_size": "5000"},
        {"folder": "x", "channels": 2},
        {"folder": "x", "test": "secret"},
        {"folder": "x", "test": "public"},  # of what?
    ],
)
def test_settings_that_cannot_be(values: dict[str, object]) -> None:
    with pytest.raises(SettingError, match=r"^data\."):
        FolderSettings(**values)  # type: ignore[arg-type]


def test_no_folder_is_said() -> None:
    with pytest.raises(DataFilesMissingError, match="there is no folder"):
        load_folder("/no/such/place")


def test_hostile_files_are_no_tracebacks(tmp_path: Path) -> None:
    """Catches: a bomb that is decoded, a pipe that is waited for, a class named by a line break."""
    import os
    import struct
    import zlib

    make_folder(tmp_path)

    def chunk(kind: bytes, content: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + crc

    header = struct.pack(">IIBBBBB", 9_000, 9_000, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(9_001))
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels)
    (tmp_path / "north" / "ill" / "bomb.png").write_bytes(bomb)
    os.mkfifo(tmp_path / "north" / "ill" / "pipe.png")
    with pytest.raises(FedsynthError, match=r"9000×9000, more than .*/pipe.png \(it is no reg"):
        load_folder(tmp_path, image_size=16)
