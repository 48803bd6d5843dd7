"""Tests of exported runs: the listed files only, without internal information."""

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
def site_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a data folder whose path and site names are confidential."""
    folder = tmp_path_factory.mktemp("home") / "dr-who" / "ward7"
    declaration = write_declaration(
        make_image_folder(folder, ("tardis", "gallifrey"), per_class=23), sites=()
    )
    content = declaration.read_text().replace("[sizes]", 'person = "patient"\n\n[sizes]')
    declaration.write_text(content)
    return folder


@pytest.fixture(scope="module")
def share(site_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a synthetic data set of this folder."""
    out = tmp_path_factory.mktemp("out")
    base = {**TINY, "data": {"folder": str(site_folder)}, "report": {"sites": "Mitte,Nord"}}
    settings = owner_settings(base)
    synthesize(settings, out / "share", runs=out / "runs")
    return out / "share"


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_export_has_listed_files(share: Path) -> None:
    """A broken version would export a config, a ledger, a model or a partition."""
    images = [
        f"images/{name}/{row:05d}.png"
        for name, rows in (("00-ill", (0, 1)), ("01-well", (2, 3)))
        for row in rows
    ]
    assert files(share) == sorted(
        ["README.md", "SHA256SUMS", "croissant.json", *images, *REPORTS, "synthetic.safetensors"]
    )
    assert {(share / name).stat().st_mode & 0o777 for name in files(share)} == {0o644}
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=share, check=True)


def check_no_internal_information(share: Path, site_folder: Path) -> None:
    """Checks that no file contains a path, a name of a site or person, or the number of images."""
    import getpass

    names = ["dr-who", "ward7", "tardis", "gallifrey", "A. Keller", "fedsynth-ledger", str(share)]
    names += [str(site_folder.parent), f"/{getpass.getuser()}/"]
    for name in files(share):
        content = (share / name).read_bytes()
        assert [word for word in names if word.encode() in content] == [], name
    ignored = r"[0-9a-f]{32,}|\d{8}-\d{6}|\d+:\d+(:\d+)?"  # hashes, the run's name, times of day
    for name in ("README.md", "privacy_report.md"):
        text = re.sub(ignored, "", (share / name).read_text())
        assert re.findall(r"(?<![\d.])(92|46)(?![\d.])", text) == []


def test_exported_report_lists_files(share: Path, site_folder: Path, tmp_path: Path) -> None:
    """The hash of config.toml would allow guesses of the paths in it."""
    (run,) = (share.parent / "runs").iterdir()
    with_model = export_run(run, tmp_path / "share", with_model=True)
    check_no_internal_information(share, site_folder)
    check_no_internal_information(with_model, site_folder)
    for folder, extra in ((share, []), (with_model, ["model.safetensors"])):
        lines = (folder / "SHA256SUMS").read_text().splitlines()
        sums = {line[66:]: line[:64] for line in lines}
        listed = json.loads((folder / "privacy_report.json").read_text())["files"]
        data = ["README.md", "croissant.json", "synthetic.safetensors"]
        assert sorted(listed) == sorted([*data, *extra])
        assert all(sums[name] == digest for name, digest in listed.items())
        text = (folder / "privacy_report.md").read_text()
        assert "These files were exported together with this report" in text
        assert "| sites | Mitte, Nord (client-000) |" in text
        assert "## A patient with several examples" in text
        assert all(digest in text for digest in listed.values())
        for name in REPORTS:
            assert file_hash(run / "config.toml") not in (folder / name).read_text()
    assert verify_run(run).problems == []


def test_exported_tensors_are_in_pixel_units(share: Path) -> None:
    """Regression: exported images were normalised, and recipients normalised them again."""
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
    uploaded = load_file(run / "synthetic.safetensors")["images"]
    loaded = load_synthetic(share)
    assert torch.allclose(loaded.normalised(), uploaded, atol=1e-5)
    assert torch.allclose(loaded.images, uploaded * 0.25 + 0.5, atol=1e-6)
    report = json.loads((share / "privacy_report.json").read_text())
    assert loaded.epsilon == report["guarantee"]["epsilon"] <= 8
    assert (loaded.delta, loaded.spec.class_names) == (1e-5, ("ill", "well"))
    assert (loaded.soft_labels, loaded.clients) == (None, None)
    readme = (share / "README.md").read_text()
    assert f"ε = {format_epsilon(loaded.epsilon)} at" in readme


def test_readme_code_trains_model(share: Path) -> None:
    """Runs the README's code without fedsynth."""
    code = re.search(r"```python\n(.*?)```", (share / "README.md").read_text(), re.S)
    assert code is not None
    assert "fedsynth" not in code[1]
    process = subprocess.run(
        [sys.executable, "-c", code[1]], cwd=share, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert float(process.stdout.split()[-1]) > 0.9  # accuracy on four images


def test_changed_files_are_rejected(share: Path, tmp_path: Path) -> None:
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


def changed_copy(share: Path, target: Path, tensors: dict[str, Tensor], **changes: str) -> Path:
    """Returns a copy of the set with changed tensors or metadata, and matching hashes."""
    folder = Path(shutil.copytree(share, target / "copy"))
    file = folder / "synthetic.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = {**opened.metadata(), **changes}
    save_file({**load_file(file), **tensors}, file, metadata=metadata)
    write_hashes(folder)
    return folder


HALVES = torch.full((3, 2), 0.5)
IMAGES = torch.rand(3, 1, 16, 16)
EMPTY = {"images": IMAGES[:0], "labels": torch.zeros(0, dtype=torch.int64)}


def replace_last(tensor: Tensor, row: Any) -> Tensor:
    return torch.cat([tensor, torch.as_tensor(row).expand_as(tensor[:1])])


INVALID_VALUES: list[tuple[dict[str, Tensor], dict[str, str], str]] = [
    ({"images": replace_last(IMAGES, float("nan"))}, {}, "must be finite"),
    ({"images": replace_last(IMAGES, 1e38)}, {}, "within ±1e\\+06"),
    ({"images": replace_last(IMAGES, 0.5).to(torch.complex64)}, {}, "torch.complex64"),
    (EMPTY, {}, "no images"),
    ({"images": IMAGES}, {}, "labels must have one"),
    ({"labels": torch.tensor([0, 0, 1, 2])}, {}, "labels must be in"),
    ({"client": torch.tensor([0, 1])}, {}, "client must have one"),
    ({"other": torch.rand(4)}, {}, "'other'"),
    ({"soft_labels": replace_last(HALVES, [-0.5, 1.5])}, {}, "at least 0 and sum to 1"),
    ({"soft_labels": replace_last(HALVES, [0.5, 0.6])}, {}, "at least 0 and sum to 1"),
    ({"soft_labels": torch.full((4, 3), 1 / 3)}, {}, "one probability for each class"),
    ({}, {"std": "[1e-300]"}, "must be finite"),
    ({}, {"mean": "[" * 50_000}, "recursion limit"),
    ({}, {"class_names": "3"}, "class_names: Input should be a valid list"),
    ({}, {"delta": "null"}, "both ε and δ, or neither"),
]


@pytest.mark.parametrize(("tensors", "metadata", "message"), INVALID_VALUES)
def test_invalid_values_are_rejected(
    share: Path, tmp_path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], message: str
) -> None:
    with pytest.raises(DataFilesCorruptError, match=message) as caught:
        load_synthetic(changed_copy(share, tmp_path, tensors, **metadata))
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------ a run's result
def digits_run(tmp_path: Path, method: str = "feddm", **privacy: Any) -> tuple[Path, RunResult]:
    base = {
        "run": {"method": method, "rounds": 1, "device": "cpu"},
        "partition": {"clients": 2},
        "method": {**quick_settings(method), "ipc": 1} if method != "fedavg" else {},
        "model": {"width": 4, "depth": 2},
        "privacy": privacy,
    }
    run = simulate(resolve(base), output=tmp_path / "runs", quiet=True)
    assert run.folder is not None
    return run.folder, run


def test_client_of_images_is_exported(tmp_path: Path) -> None:
    folder, run = digits_run(tmp_path, noise_multiplier=3.0)
    loaded = load_synthetic(export_run(folder, tmp_path / "share"))
    assert loaded.clients is not None
    assert sorted(set(loaded.clients.tolist())) == [0, 1]
    upload: Any = run.uploads[1]
    assert torch.allclose(loaded.normalised()[loaded.clients == 1], upload.images, atol=1e-4)


def test_soft_labels_are_exported_with_images(tmp_path: Path) -> None:
    """Broken versions would omit R of FedAF, or treat uint8 images as normalised."""
    folder, run = digits_run(tmp_path, "fedaf", noise_multiplier=3.0)
    out = export_run(folder, tmp_path / "share")
    loaded = load_synthetic(out)
    assert loaded.soft_labels is not None
    assert torch.allclose(loaded.soft_labels.sum(1), torch.ones(len(loaded.labels)), atol=1e-5)
    upload: Any = run.uploads[0]
    first = loaded.labels[0]
    expected = upload.soft[first] if upload.present[first] else torch.eye(10)[first]
    assert torch.allclose(loaded.soft_labels[0], expected)
    assert 0 <= loaded.images.min() <= loaded.images.max() <= 1
    assert 'data["soft_labels"]' in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("privacy", "message"),
    [
        ({}, "**There is no differential privacy.**"),
        ({"noise_multiplier": 3.0, "mechanism": "paper"}, "**There is no guarantee**"),
    ],
)
def test_unprotected_export_requires_option(
    privacy: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A broken version would export real images as protected."""
    folder, _ = digits_run(tmp_path, **privacy)
    with pytest.raises(OutputError, match=r"no privacy guarantee.*unprotected=True"):
        export_run(folder, tmp_path / "share")
    out = export_run(folder, tmp_path / "share", unprotected=True)
    assert all((out / name).exists() is bool(privacy) for name in REPORTS)
    assert message in (out / "README.md").read_text()
    assert load_synthetic(out).epsilon is None


def test_invalid_exports_are_rejected(tmp_path: Path) -> None:
    """Broken versions would export a changed ε, or overwrite a folder."""
    models, _ = digits_run(tmp_path, "fedavg", noise_multiplier=3.0)
    folder, _ = digits_run(tmp_path, noise_multiplier=3.0)
    out = tmp_path / "share"
    with pytest.raises(OutputError, match="has no images, because fedavg makes none"):
        export_run(models, out)
    (tmp_path / "x.incomplete").mkdir()
    with pytest.raises(OutputError, match="is not a finished run's folder"):
        export_run(tmp_path / "x.incomplete", out)
    assert not out.exists()
    out.mkdir()
    (out / "existing").write_text("x")
    with pytest.raises(OutputError, match="already exists"):
        export_run(folder, out)
    assert files(out) == ["existing"]
    path = folder / "privacy_report.json"
    report = json.loads(path.read_text())
    report["guarantee"]["epsilon"] = 0.1
    path.write_text(json.dumps(report))
    with pytest.raises(PrivacyError, match="does not follow from its settings"):
        export_run(folder, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_invalid_settings_are_rejected_before_charge(site_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    make_image_folder(tmp_path / "undeclared")
    no_images = {"ipc": 0, "drawn_ipc": 0}
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (PrivacySettingError, "privacy.epsilon", {"privacy": {}}),
        (SettingError, "run.method", {"run": {"method": "fedavg"}, "method": {}}),
        (SettingError, "method.ipc", {"run": {"method": "fedstats"}, "method": no_images}),
        (OutputError, "already exists", {}),
        (DataError, "data describe", {"data": {"folder": str(tmp_path / "undeclared")}}),
        (DataFilesMissingError, "not exist", {"data": {"folder": str(tmp_path / "mistyped")}}),
    ]
    for error, message, sections in cases:
        changed = {**TINY, "data": {"folder": str(site_folder)}, **sections}
        share = tmp_path / ("full" if error is OutputError else "share")
        with pytest.raises(error, match=message):
            synthesize(owner_settings(changed), share, runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_names_are_escaped_in_readme() -> None:
    """Regression: class names with HTML or table syntax were not escaped."""
    images = torch.rand(2, 1, 8, 8)
    names = ("<b>ill</b>", "a|b", "*well*")
    spec = DatasetSpec("[x](y)", 1, 8, 8, 3, 2, 1, (0.5,), (0.25,), names, "x")
    synthetic = SharedSet(images, torch.tensor([0, 1]), None, None, spec, None, None)
    text = readme(Share(synthetic, "fedsynth", None, None, False, None, False))
    assert r"| 0 | \<b\>ill\</b\> |" in text
    assert r"| 1 | a\|b |" in text
    assert r"# Synthetic images of \[x\](y)" in text
