"""What leaves the house of a run: these files and no others, and nothing in them that does not
belong there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, safe_open, save_file
from torch import Tensor

from fedsynth import export_run, load_synthetic, owner_settings, resolve, simulate, synthesize
from fedsynth.data.registry import DatasetSpec
from fedsynth.data.shared_set import SharedSet, write_hashes
from fedsynth.errors import (
    DataError,
    DataFilesCorruptError,
    DataFilesMissingError,
    OutputError,
    SettingError,
)
from fedsynth.privacy.errors import PrivacyError, PrivacySettingError
from fedsynth.privacy.files import file_hash
from fedsynth.privacy.report.formatting import format_epsilon
from fedsynth.results.export import Share, readme
from fedsynth.results.run_record import RunResult
from fedsynth.results.verification import verify_run
from tests.image_folders import make_image_folder, write_declaration
from tests.quick_settings import quick_settings

TINY = {
    "run": {"rounds": 1, "device": "cpu"},
    "method": {"ipc": 2, "iterations": 2, "server_epochs": 1, "min_examples": 1},
    "model": {"width": 4, "depth": 2},
    "privacy": {"epsilon": 8.0},
}
REPORTS = ["privacy_report.html", "privacy_report.json", "privacy_report.md"]


@pytest.fixture(scope="module")
def secret_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sites whose names, and whose path, nobody may see."""
    place = tmp_path_factory.mktemp("home") / "dr-who" / "ward7"
    declaration = write_declaration(
        make_image_folder(place, ("tardis", "gallifrey"), per_class=23), sites=()
    )
    words = declaration.read_text().replace("[sizes]", 'person = "patient"\n\n[sizes]')
    declaration.write_text(words)
    return place


@pytest.fixture(scope="module")
def share(secret_place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One owner's synthetic set of it."""
    out = tmp_path_factory.mktemp("out")
    given = {**TINY, "data": {"folder": str(secret_place)}, "report": {"sites": "Mitte,Nord"}}
    settings = owner_settings(given)
    synthesize(settings, out / "share", runs=out / "runs")
    return out / "share"


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_exactly_these_files(share: Path) -> None:
    """Catches: a config, a ledger, a model, a picture of who has what."""
    images = [
        f"images/{name}/{row:05d}.png"
        for name, rows in (("00-ill", (0, 1)), ("01-well", (2, 3)))
        for row in rows
    ]
    assert files(share) == sorted(
        ["README.md", "SHA256SUMS", *images, *REPORTS, "synthetic.safetensors"]
    )
    assert {(share / name).stat().st_mode & 0o777 for name in files(share)} == {0o644}
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=share, check=True)


def check_house(share: Path, secret_place: Path) -> None:
    """Catches: a path, a site's or a person's name, the true number of images."""
    import getpass

    names = ["dr-who", "ward7", "tardis", "gallifrey", "A. Keller", "fedsynth-ledger", str(share)]
    names += [str(secret_place.parent), f"/{getpass.getuser()}/"]
    for name in files(share):
        content = (share / name).read_bytes()
        assert [one for one in names if one.encode() in content] == [], name
    by_chance = r"[0-9a-f]{32,}|\d{8}-\d{6}|\d+:\d+(:\d+)?"  # hashes, the run's name, times of day
    for name in ("README.md", "privacy_report.md"):
        text = re.sub(by_chance, "", (share / name).read_text())
        assert re.findall(r"(?<![\d.])(92|46)(?![\d.])", text) == []


def test_an_exported_folder_has_a_report_of_its_files(
    share: Path, secret_place: Path, tmp_path: Path
) -> None:
    """config.toml has paths, which its hash would let somebody guess who knows the rest."""
    (run,) = (share.parent / "runs").iterdir()
    with_model = export_run(run, tmp_path / "share", with_model=True)
    check_house(share, secret_place)
    check_house(with_model, secret_place)
    for folder, more in ((share, []), (with_model, ["model.safetensors"])):
        lines = (folder / "SHA256SUMS").read_text().splitlines()
        sums = {line[66:]: line[:64] for line in lines}
        listed = json.loads((folder / "privacy_report.json").read_text())["files"]
        assert sorted(listed) == sorted(["README.md", "synthetic.safetensors", *more])
        assert all(sums[name] == digest for name, digest in listed.items())
        text = (folder / "privacy_report.md").read_text()
        assert "These files were exported together with this report" in text
        assert "| sites | Mitte, Nord (client-000) |" in text
        assert "## A patient with several examples" in text
        assert all(digest in text for digest in listed.values())
        for name in REPORTS:
            assert file_hash(run / "config.toml") not in (folder / name).read_text()
    assert verify_run(run).problems == []


def test_tensors_are_in_pixel_units_with_their_promise(share: Path) -> None:
    """Catches: normalised images, which a recipient would normalise again."""
    file = share / "synthetic.safetensors"
    tensors = load_file(file)
    assert sorted(tensors) == ["images", "labels"]
    images = tensors["images"]
    assert (images.dtype, list(images.shape)) == (torch.float32, [4, 1, 16, 16])
    assert tensors["labels"].tolist() == [0, 0, 1, 1]
    with safe_open(file, framework="pt") as opened:
        facts = opened.metadata()
    assert facts["pixels"].startswith("float32; 0 is black, 1 is white")
    drawn = np.asarray(Image.open(share / "images" / "01-well" / "00003.png"))
    assert np.array_equal(drawn, np.clip(np.rint(images[3, 0].numpy() * 255), 0, 255))
    (run,) = (share.parent / "runs").iterdir()
    sent = load_file(run / "synthetic.safetensors")["images"]
    found = load_synthetic(share)
    assert torch.allclose(found.normalised(), sent, atol=1e-5)
    assert torch.allclose(found.images, sent * 0.25 + 0.5, atol=1e-6)
    report = json.loads((share / "privacy_report.json").read_text())
    assert found.epsilon == report["guarantee"]["epsilon"] <= 8
    assert (found.delta, found.spec.class_names) == (1e-5, ("ill", "well"))
    assert (found.soft_labels, found.clients) == (None, None)
    readme = (share / "README.md").read_text()
    assert f"ε = {format_epsilon(found.epsilon)} at" in readme


def test_the_readme_trains_in_ten_lines(share: Path) -> None:
    """Runs the README's code as a recipient would, without fedsynth."""
    code = re.search(r"```python\n(.*?)```", (share / "README.md").read_text(), re.S)
    assert code is not None
    assert "fedsynth" not in code[1]
    done = subprocess.run(
        [sys.executable, "-c", code[1]], cwd=share, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 0.9  # the accuracy on four images


def test_changed_files_are_refused(share: Path, tmp_path: Path) -> None:
    for name in ("privacy_report.json", "synthetic.safetensors", "more.txt"):
        folder = Path(shutil.copytree(share, tmp_path / name))
        with (folder / name).open("ab") as file:
            file.write(b" ")
        with pytest.raises(DataFilesCorruptError, match=name):
            load_synthetic(folder)
    folder = Path(shutil.copytree(share, tmp_path / "link"))
    (folder / "images" / "link").symlink_to(share / "images")
    with pytest.raises(DataFilesCorruptError, match="images/link is neither a plain file"):
        load_synthetic(folder)
    folder = Path(shutil.copytree(share, tmp_path / "gone"))
    (folder / "README.md").unlink()
    with pytest.raises(DataFilesMissingError, match=r"README.md is missing"):
        load_synthetic(folder)
    (folder / "SHA256SUMS").write_text("0 ../../etc/passwd\n")
    with pytest.raises(DataFilesCorruptError, match="has a bad line"):
        load_synthetic(folder)


def remade(share: Path, to: Path, tensors: dict[str, Tensor], **stated: str) -> Path:
    """The set with other tensors or metadata, and the hashes of its new files."""
    folder = Path(shutil.copytree(share, to / "copy"))
    file = folder / "synthetic.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = {**opened.metadata(), **stated}
    save_file({**load_file(file), **tensors}, file, metadata=metadata)
    write_hashes(folder)
    return folder


HALVES = torch.full((3, 2), 0.5)
IMAGES = torch.rand(3, 1, 16, 16)
EMPTY = {"images": IMAGES[:0], "labels": torch.zeros(0, dtype=torch.int64)}


def with_row(some: Tensor, row: Any) -> Tensor:
    return torch.cat([some, torch.as_tensor(row).expand_as(some[:1])])


UNSOUND: list[tuple[dict[str, Tensor], dict[str, str], str]] = [
    ({"images": with_row(IMAGES, float("nan"))}, {}, "must be finite"),
    ({"images": with_row(IMAGES, 1e38)}, {}, "within ±1e\\+06"),
    ({"images": with_row(IMAGES, 0.5).to(torch.complex64)}, {}, "torch.complex64"),
    (EMPTY, {}, "no images"),
    ({"images": IMAGES}, {}, "labels must have one"),
    ({"labels": torch.tensor([0, 0, 1, 2])}, {}, "labels must be in"),
    ({"client": torch.tensor([0, 1])}, {}, "client must have one"),
    ({"other": torch.rand(4)}, {}, "'other'"),
    ({"soft_labels": with_row(HALVES, [-0.5, 1.5])}, {}, "at least 0 and sum to 1"),
    ({"soft_labels": with_row(HALVES, [0.5, 0.6])}, {}, "at least 0 and sum to 1"),
    ({"soft_labels": torch.full((4, 3), 1 / 3)}, {}, "one probability for each class"),
    ({}, {"std": "[1e-300]"}, "must be finite"),
    ({}, {"mean": "[" * 50_000}, "recursion limit"),
    ({}, {"class_names": "3"}, "class_names: Input should be a valid list"),
    ({}, {"delta": "null"}, "both ε and δ, or neither"),
]


@pytest.mark.parametrize(("tensors", "stated", "why"), UNSOUND)
def test_values_that_no_set_has_are_refused(
    share: Path, tmp_path: Path, tensors: dict[str, Tensor], stated: dict[str, str], why: str
) -> None:
    with pytest.raises(DataFilesCorruptError, match=why) as caught:
        load_synthetic(remade(share, tmp_path, tensors, **stated))
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------ a run's result
def digits_run(tmp_path: Path, method: str = "feddm", **privacy: Any) -> tuple[Path, RunResult]:
    given = {
        "run": {"method": method, "rounds": 1, "device": "cpu"},
        "partition": {"clients": 2},
        "method": {**quick_settings(method), "ipc": 1} if method != "fedavg" else {},
        "model": {"width": 4, "depth": 2},
        "privacy": privacy,
    }
    run = simulate(resolve(given), output=tmp_path / "runs", quiet=True)
    assert run.folder is not None
    return run.folder, run


def test_the_client_of_each_image_is_stored(tmp_path: Path) -> None:
    folder, run = digits_run(tmp_path, noise_multiplier=3.0)
    found = load_synthetic(export_run(folder, tmp_path / "share"))
    assert found.clients is not None
    assert sorted(set(found.clients.tolist())) == [0, 1]
    sent: Any = run.uploads[1]
    assert torch.allclose(found.normalised()[found.clients == 1], sent.images, atol=1e-4)


def test_soft_labels_go_with_their_images(tmp_path: Path) -> None:
    """Catches: FedAF's images without R; rows that do not sum to one; uint8 taken for
    normalised."""
    folder, run = digits_run(tmp_path, "fedaf", noise_multiplier=3.0)
    out = export_run(folder, tmp_path / "share")
    found = load_synthetic(out)
    assert found.soft_labels is not None
    assert torch.allclose(found.soft_labels.sum(1), torch.ones(len(found.labels)), atol=1e-5)
    sent: Any = run.uploads[0]
    first = found.labels[0]
    expected = sent.soft[first] if sent.present[first] else torch.eye(10)[first]
    assert torch.allclose(found.soft_labels[0], expected)
    assert 0 <= found.images.min() <= found.images.max() <= 1
    assert 'data["soft_labels"]' in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({}, "**There is no differential privacy.**"),
        ({"noise_multiplier": 3.0, "mechanism": "paper"}, "**There is no guarantee**"),
    ],
)
def test_what_guarantees_nothing_needs_a_word(
    privacy: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Catches: real images that leave the house as if they were protected."""
    folder, _ = digits_run(tmp_path, **privacy)
    with pytest.raises(OutputError, match=r"no privacy guarantee.*unprotected=True"):
        export_run(folder, tmp_path / "share")
    out = export_run(folder, tmp_path / "share", unprotected=True)
    assert all((out / name).exists() is bool(privacy) for name in REPORTS)
    assert words in (out / "README.md").read_text()
    assert load_synthetic(out).epsilon is None


def test_what_is_not_exported(tmp_path: Path) -> None:
    """Catches: an ε that somebody wrote into the report; a folder that is overwritten."""
    models, _ = digits_run(tmp_path, "fedavg", noise_multiplier=3.0)
    folder, _ = digits_run(tmp_path, noise_multiplier=3.0)
    out = tmp_path / "share"
    with pytest.raises(
        OutputError, match="has no synthetic images, because fedavg makes no images"
    ):
        export_run(models, out)
    (tmp_path / "x.incomplete").mkdir()
    with pytest.raises(OutputError, match="is not the folder of a finished run"):
        export_run(tmp_path / "x.incomplete", out)
    assert not out.exists()
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(OutputError, match="already exists"):
        export_run(folder, out)
    assert files(out) == ["mine"]
    path = folder / "privacy_report.json"
    report = json.loads(path.read_text())
    report["guarantee"]["epsilon"] = 0.1
    path.write_text(json.dumps(report))
    with pytest.raises(PrivacyError, match="does not follow from its settings"):
        export_run(folder, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_mistakes_are_said_before_anything_is_spent(secret_place: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    make_image_folder(tmp_path / "undeclared")
    none = {"ipc": 0, "drawn_ipc": 0}
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (PrivacySettingError, "privacy.epsilon", {"privacy": {}}),
        (SettingError, "run.method", {"run": {"method": "fedavg"}, "method": {}}),
        (SettingError, "method.ipc", {"run": {"method": "fedstats"}, "method": none}),
        (OutputError, "already exists", {}),
        (DataError, "data describe", {"data": {"folder": str(tmp_path / "undeclared")}}),
        (DataFilesMissingError, "not exist", {"data": {"folder": str(tmp_path / "mistyped")}}),
    ]
    for error, words, sections in wrong:
        given = {**TINY, "data": {"folder": str(secret_place)}, **sections}
        share = tmp_path / ("full" if error is OutputError else "share")
        with pytest.raises(error, match=words):
            synthesize(owner_settings(given), share, runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_names_of_a_stranger_stay_text_in_the_readme() -> None:
    """Catches: a class that is called like a table's cell or like HTML."""
    images = torch.rand(2, 1, 8, 8)
    names = ("<b>ill</b>", "a|b", "*well*")
    spec = DatasetSpec("[x](y)", 1, 8, 8, 3, 2, 1, (0.5,), (0.25,), names, "x")
    found = SharedSet(images, torch.tensor([0, 1]), None, None, spec, None, None)
    text = readme(Share(found, "fedsynth", None, None, False, None, False))
    assert r"| 0 | \<b\>ill\</b\> |" in text
    assert r"| 1 | a\|b |" in text
    assert r"# Synthetic images of \[x\](y)" in text
