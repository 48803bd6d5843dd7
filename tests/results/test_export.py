"""Tests of exported sets (also in the library datasets and the format Croissant) and ONNX files."""

from __future__ import annotations

import getpass
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import fedsynth as fs
from fedsynth import DatasetSpec, errors
from fedsynth.data.files import read_tensors
from fedsynth.data.images import normalise
from fedsynth.data.shared_set import SharedSet, write_hashes
from fedsynth.errors import PrivacyError, PrivacySettingError
from fedsynth.files import file_hash, plain_files
from fedsynth.formatting import format_epsilon
from fedsynth.results.verification import verify_run
from fedsynth.sharing.export import Share, _write
from fedsynth.sharing.onnx_export import _checked_program
from tests.quick_runs import folder_of, quick_sections
from tests.raising import raises
from tests.results.test_tampering import changed
from tests.user_files import CLASSES, make_image_folder, write_declaration

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
    make_image_folder(folder, ("tardis", "gallifrey"), per_class=23)
    declaration = write_declaration(folder, sites=())
    content = declaration.read_text().replace("[sizes]", 'person = "patient"\n\n[sizes]')
    declaration.write_text(content)
    return folder


@pytest.fixture(scope="module")
def share(site_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    base = {**TINY, "data": {"folder": str(site_folder)}, "report": {"sites": "Mitte,Nord"}}
    fs.synthesize(fs.owner_settings(base), out / "share", runs=out / "runs")
    return out / "share"


def test_export_has_only_listed_files(share: Path, site_folder: Path, tmp_path: Path) -> None:
    """A broken version would export a config, a ledger, a model or a partition, a path, a name of a
    site or person, or the number of images. The hash of config.toml would allow guesses of the
    paths in it."""
    names = ["dr-who", "ward7", "tardis", "gallifrey", "A. Keller", "fedsynth-ledger"]
    names += [str(site_folder.parent), f"/{getpass.getuser()}/"]
    ignored = r"[0-9a-f]{12,}|\d{8}-\d{6}|\d+:\d+(:\d+)?"  # hashes, the run's name, times of day
    (run,) = (share.parent / "runs").iterdir()
    with_model = fs.export_run(run, tmp_path / "share", with_model=True)
    images = [f"images/{n // 2:02d}-{CLASSES[n // 2]}/{n:05d}.png" for n in range(4)]
    for folder, extra in ((share, []), (with_model, ["model.safetensors"])):
        data = ["README.md", "croissant.json", "synthetic.safetensors", *extra]
        files = plain_files(folder)
        assert files == sorted(["SHA256SUMS", *data, *images, *REPORTS])
        assert {(folder / name).stat().st_mode & 0o777 for name in files} == {0o644}
        subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
        for name in files:
            content = (folder / name).read_bytes()
            assert [word for word in (*names, str(folder)) if word.encode() in content] == [], name
        for name in ("README.md", "privacy_report.md"):
            text = re.sub(ignored, "", (folder / name).read_text())
            assert re.findall(r"(?<![\d.])(92|46)(?![\d.])", text) == []
        listed = json.loads((folder / "privacy_report.json").read_text())["files"]
        assert listed == {name: file_hash(folder / name) for name in data}
        text = (folder / "privacy_report.md").read_text()
        assert "These files were exported together with this report" in text
        assert "| sites | Mitte, Nord |" in text
        assert "## A patient with several examples" in text
        assert all(digest in text for digest in listed.values())
        for name in REPORTS:
            assert file_hash(run / "config.toml") not in (folder / name).read_text()
    assert verify_run(run).problems == []


def test_exported_tensors_are_in_pixel_units(share: Path) -> None:
    """Regression: exported images were normalised, and recipients normalised them again."""
    file = share / "synthetic.safetensors"
    tensors, facts = read_tensors(file)
    assert sorted(tensors) == ["images", "labels"]
    images = tensors["images"]
    assert (images.dtype, list(images.shape)) == (torch.float32, [4, 1, 16, 16])
    assert tensors["labels"].tolist() == [0, 0, 1, 1]
    assert facts["pixels"].startswith("float32; 0 is black, 1 is white")
    drawn = np.asarray(Image.open(share / "images" / "01-well" / "00003.png"))
    assert np.array_equal(drawn, np.clip(np.rint(images[3, 0].numpy() * 255), 0, 255))
    (run,) = (share.parent / "runs").iterdir()
    uploaded = read_tensors(run / "synthetic.safetensors")[0]["images"]
    loaded = fs.load_synthetic(share)
    assert torch.allclose(loaded.normalised(), uploaded, atol=1e-5)
    assert torch.allclose(loaded.images, uploaded * 0.25 + 0.5, atol=1e-6)
    report = json.loads((share / "privacy_report.json").read_text())
    assert loaded.epsilon == report["guarantee"]["epsilon"] <= 8
    assert (loaded.delta, loaded.spec.class_names) == (1e-5, ("ill", "well"))
    assert (loaded.soft_labels, loaded.clients) == (None, None)


def test_readme_states_epsilon_and_code_that_trains_a_model(share: Path) -> None:
    readme = (share / "README.md").read_text()
    assert f"ε = {format_epsilon(fs.load_synthetic(share).epsilon)} at" in readme
    code = re.search(r"```python\n(.*?)```", readme, re.S)
    assert code is not None
    assert "fedsynth" not in code[1]
    process = subprocess.run(
        [sys.executable, "-c", code[1]], cwd=share, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert float(process.stdout.split()[-1]) > 0.9  # accuracy on four images


def test_changed_files_are_rejected(share: Path, tmp_path: Path) -> None:
    for name in ("privacy_report.json", "synthetic.safetensors", "more.txt", "images/link"):
        folder = Path(shutil.copytree(share, tmp_path / Path(name).name))
        if name == "images/link":
            (folder / name).symlink_to(share / "images")
        else:
            (folder / name).write_bytes(b" ")
        with pytest.raises(errors.DataFilesCorruptError, match=name):
            fs.load_synthetic(folder)
    folder = Path(shutil.copytree(share, tmp_path / "gone"))
    (folder / "README.md").unlink()
    with raises(errors.DataFilesMissingError, "data.missing"):
        fs.load_synthetic(folder)
    (folder / "SHA256SUMS").write_text("0 ../../etc/passwd\n")
    with pytest.raises(errors.DataFilesCorruptError, match="contains the invalid line"):
        fs.load_synthetic(folder)


HALVES = torch.full((3, 2), 0.5)
IMAGES = torch.rand(3, 1, 16, 16)
EMPTY = {"images": IMAGES[:0], "labels": torch.zeros(0, dtype=torch.int64)}


def replace_last(tensor: Tensor, row: Any) -> Tensor:
    return torch.cat([tensor, torch.as_tensor(row).expand_as(tensor[:1])])


def test_invalid_values_are_rejected(share: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Tensor], dict[str, str], str]] = [
        ({"images": replace_last(IMAGES, float("nan"))}, {}, "are not finite"),
        ({"images": replace_last(IMAGES, 1e38)}, {}, "outside ±1e\\+06"),
        ({"images": replace_last(IMAGES, 0.5).to(torch.complex64)}, {}, "torch.complex64"),
        (EMPTY, {}, "no images"),
        ({"images": IMAGES}, {}, "labels must contain one"),
        ({"labels": torch.tensor([0, 0, 1, 2])}, {}, "labels are outside"),
        ({"client": torch.tensor([0, 1])}, {}, "client must contain one"),
        ({"other": torch.rand(4)}, {}, "'other'"),
        ({"soft_labels": replace_last(HALVES, [-0.5, 1.5])}, {}, "negative, or do not sum to 1"),
        ({"soft_labels": replace_last(HALVES, [0.5, 0.6])}, {}, "negative, or do not sum to 1"),
        ({"soft_labels": torch.full((4, 3), 1 / 3)}, {}, r"floating point \[4, 2\]"),
        ({}, {"std": "[1e-300]"}, "are not finite"),
        ({}, {"mean": "[" * 50_000}, "recursion limit"),
        ({}, {"class_names": "3"}, "class_names is invalid: Input should be a valid list"),
        ({}, {"delta": "null"}, "only one of ε and δ"),
    ]
    for number, (tensors, stated, message) in enumerate(cases):
        folder = Path(shutil.copytree(share, tmp_path / f"{number}"))
        file = folder / "synthetic.safetensors"
        valid, facts = read_tensors(file)
        save_file({**valid, **tensors}, file, metadata={**facts, **stated})
        write_hashes(folder)
        with pytest.raises(errors.DataFilesCorruptError, match=message) as caught:
            fs.load_synthetic(folder)
        assert "\n" not in str(caught.value)


def digits_run(tmp_path: Path, method: str = "feddm", **privacy: Any) -> tuple[Path, fs.RunResult]:
    clients = {"clients": 2, "subset": 1.0}
    sections = quick_sections(method, run={"rounds": 1}, partition=clients, privacy=privacy)
    run = fs.simulate(fs.resolve(sections), output=tmp_path / "runs", quiet=True)
    return folder_of(run), run


def test_soft_labels_and_clients_are_exported_with_images(tmp_path: Path) -> None:
    """Broken versions would omit R of FedAF, or treat uint8 images as normalised."""
    folder, run = digits_run(tmp_path, "fedaf", noise_multiplier=3.0)
    out = fs.export_run(folder, tmp_path / "share")
    loaded = fs.load_synthetic(out)
    assert loaded.clients is not None
    assert loaded.soft_labels is not None
    assert sorted(set(loaded.clients.tolist())) == [0, 1]
    uploads: Any = run.uploads
    assert torch.allclose(loaded.images[loaded.clients == 1], uploads[1].images / 255, atol=1e-6)
    assert torch.allclose(loaded.soft_labels.sum(1), torch.ones(len(loaded.labels)), atol=1e-5)
    first = loaded.labels[0]
    expected = uploads[0].soft[first] if uploads[0].present[first] else torch.eye(10)[first]
    assert torch.allclose(loaded.soft_labels[0], expected)
    assert 'data["soft_labels"]' in (out / "README.md").read_text()


def test_unprotected_export_requires_option(tmp_path: Path) -> None:
    paper = {"noise_multiplier": 3.0, "mechanism": "paper"}
    for number, privacy in enumerate(({}, paper)):
        folder, _ = digits_run(tmp_path / f"{number}", **privacy)
        out = tmp_path / f"share-{number}"
        with raises(errors.OutputError, "export.no_guarantee"):
            fs.export_run(folder, out)
        fs.export_run(folder, out, unprotected=True)
        assert all((out / name).exists() is bool(privacy) for name in REPORTS)
        reason = "guarantee" if privacy else "differential privacy."
        assert f"**There is no {reason}**" in (out / "README.md").read_text()
        assert fs.load_synthetic(out).epsilon is None


def test_invalid_exports_are_rejected(tmp_path: Path) -> None:
    models, _ = digits_run(tmp_path, "fedavg", noise_multiplier=3.0)
    folder, _ = digits_run(tmp_path, noise_multiplier=3.0)
    out = tmp_path / "share"
    with pytest.raises(errors.OutputError, match="contains no images, because fedavg makes none"):
        fs.export_run(models, out)
    (tmp_path / "x.incomplete").mkdir()
    with pytest.raises(errors.OutputError, match="Name a finished run's folder"):
        fs.export_run(tmp_path / "x.incomplete", out)
    assert not out.exists()
    out.mkdir()
    (out / "existing").write_text("x")
    with pytest.raises(errors.OutputError, match="already exists"):
        fs.export_run(folder, out)
    assert plain_files(out) == ["existing"]
    changed("privacy_report.json", "guarantee/epsilon", 0.1)(folder)
    with raises(PrivacyError, "export.report"):
        fs.export_run(folder, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_invalid_settings_are_rejected_before_charge(site_folder: Path, tmp_path: Path) -> None:
    make_image_folder(tmp_path / "undeclared")
    no_images = {"ipc": 0, "drawn_ipc": 0}
    cases: dict[str, dict[str, Any]] = {
        "privacy.epsilon": {"privacy": {}},
        "run.method": {"run": {"method": "fedavg"}, "method": {}},
        "method.ipc": {"run": {"method": "fedstats"}, "method": no_images},
        "files.output": {},
        "declaration.missing": {"data": {"folder": str(tmp_path / "undeclared")}},
        "data.missing": {"data": {"folder": str(tmp_path / "mistyped")}},
    }
    for message, sections in cases.items():
        settings = {**TINY, "data": {"folder": str(site_folder)}, **sections}
        share = tmp_path / ("share" if sections else "undeclared")
        with raises((errors.FedsynthError, PrivacySettingError), message):
            fs.synthesize(fs.owner_settings(settings), share, runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


LABELS = torch.tensor([1, 0, 1, 0, 2, 0])


def export(
    folder: Path,
    shape: tuple[int, int, int],
    seed: int = 0,
    labels: torch.Tensor = LABELS,
    **more: Any,
) -> SharedSet:
    images = torch.rand(6, *shape, generator=torch.Generator().manual_seed(seed)) * 1.5 - 0.25
    names = ("<b>a/b</b>", 'c|"d"', "*e*: f")
    spec = DatasetSpec(
        "[x]: (y)", *shape, 3, 6, 6, (0.5,) * shape[0], (0.2,) * shape[0], names, "", **more
    )
    soft = torch.eye(3)[labels] * 0.7 + 0.1
    synthetic = SharedSet(images, labels, soft, None, spec, 1.5, 1e-5)
    folder.mkdir(parents=True)
    _write(Share(synthetic, "fedsynth", None, None, False, None, False), folder)
    return synthetic


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the library without a network."""
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return library


def card_of(folder: Path) -> Any:
    """Returns the Croissant card, after checking its files against the folder."""
    card = json.loads((folder / "croissant.json").read_text())
    assert card["@type"] == "sc:Dataset"
    assert card["conformsTo"] == "http://mlcommons.org/croissant/1.0"
    assert "ε = 1.5 at δ = 1e-05" in card["description"]
    for entry in card["distribution"]:
        if entry["@type"] == "cr:FileObject":
            assert entry["sha256"] == file_hash(folder / entry["contentUrl"])
        else:
            assert len(list(folder.glob(entry["includes"]))) == 6
    identifiers = {entry["@id"] for entry in card["distribution"]}
    for field in card["recordSet"][0]["field"]:
        (source,) = (value for key, value in field["source"].items() if key.startswith("file"))
        assert source["@id"] in identifiers
    return card


def test_exported_images_load_with_datasets(datasets: Any, tmp_path: Path) -> None:
    synthetic = export(tmp_path / "share", (3, 5, 4))
    rows = datasets.load_dataset(str(tmp_path / "share"))["train"]
    order = LABELS.argsort(stable=True)
    assert rows["label"] == LABELS[order].tolist()
    expected = (synthetic.images[order].permute(0, 2, 3, 1) * 255).round().clamp(0, 255)
    for row, image in zip(rows, expected, strict=True):
        assert np.array_equal(np.asarray(row["image"]), image)
    image, label = card_of(tmp_path / "share")["recordSet"][0]["field"]
    assert image["source"]["extract"] == {"fileProperty": "content"}
    regex = label["source"]["transform"]["regex"]
    paths = sorted((tmp_path / "share" / "images").rglob("*.png"))
    assert [int(re.match(regex, str(path))[1]) for path in paths] == rows["label"]
    text = (tmp_path / "share" / "README.md").read_text()
    for escaped in (r"| 0 | \<b\>a/b\</b\> |", r'| 1 | c\|"d" |', r"images of \[x\]: (y)"):
        assert escaped in text


def test_datasets_tells_equally_named_folders_apart(datasets: Any, tmp_path: Path) -> None:
    """Regression: its cache returned the set of another folder `share`, or of an older export."""
    cache = str(tmp_path / "cache")
    for shape in ((3, 5, 4), (1, 1, 7)):
        rows = []
        for number, seed in enumerate((0, 1)):
            folder = tmp_path / f"{shape}" / str(number) / "share"
            export(folder, shape, seed=seed)
            rows.append([*datasets.load_dataset(str(folder), split="train", cache_dir=cache)])
        assert rows[0] != rows[1]


def test_images_of_one_class_have_labels_in_datasets(datasets: Any, tmp_path: Path) -> None:
    export(tmp_path / "share", (3, 5, 4), labels=torch.zeros_like(LABELS))
    rows = datasets.load_dataset(str(tmp_path / "share"))["train"]
    assert set(rows["label"]) == {0}


def test_exported_vectors_load_with_datasets(datasets: Any, tmp_path: Path) -> None:
    """A broken version would write scaled values, or lose digits of float32."""
    synthetic = export(tmp_path / "share", (1, 1, 7), bounds=(-4.0, 4.0))
    rows = datasets.load_dataset(str(tmp_path / "share"))["train"].with_format("numpy")
    assert rows["label"][:].tolist() == LABELS.tolist()
    values = np.stack([rows[f"x{column}"][:] for column in range(7)], axis=1)
    original = synthetic.images.flatten(1).numpy() * np.float32(8) - np.float32(4)
    assert values.astype(np.float32) == pytest.approx(original, abs=1e-6)
    assert np.array_equal(values.astype(np.float32), synthetic.values().flatten(1).numpy())
    soft = np.stack([rows[f"p{label}"][:] for label in range(3)], axis=1)
    assert np.array_equal(soft.astype(np.float32), synthetic.soft_labels.numpy())
    fields = card_of(tmp_path / "share")["recordSet"][0]["field"]
    assert [field["source"]["extract"]["column"] for field in fields] == rows.column_names


def model_run(method: Any, place: Path) -> fs.RunResult:
    model = fs.ModelSettings("linear" if isinstance(method, fs.FedAvg) else "convnet")
    privacy = fs.PrivacySettings(epsilon=20.0)
    settings = fs.RunSettings(method, rounds=3, model=model, privacy=privacy)
    return fs.simulate(settings, output=place / "runs", quiet=True)


def logits(file: Path, values: np.ndarray) -> Any:
    onnx.checker.check_model(onnx.load(file), full_check=True)
    return ReferenceEvaluator(str(file)).run(None, {"images": values})[0]


@pytest.mark.parametrize(
    "method",
    [
        fs.FedAvg(local_steps=1),
        fs.FedStats(features="pixels"),
        fs.FedStats(features="pixels", drawn_ipc=2),  # its model shortens some directions
    ],
)
def test_onnx_model_matches_pytorch_on_pixels(method: Any, tmp_path: Path) -> None:
    """Broken versions omit the normalisation, fix the batch, or store paths of the machine."""
    result = model_run(method, tmp_path)
    file = fs.export_onnx(str(result.folder), tmp_path / "new" / "model.onnx")
    _, test = fs.load_dataset("digits")
    expected = result.model.eval()(normalise(test.images[:7], test.spec)).detach().numpy()
    pixels = test.images[:7].float().numpy() / 255
    assert logits(file, pixels) == pytest.approx(expected, abs=1e-4)
    assert logits(file, pixels[:1]) == pytest.approx(expected[:1], abs=1e-4)
    facts = {entry.key: entry.value for entry in onnx.load(file).metadata_props}
    assert json.loads(facts["epsilon"]) == result.summary["differential_privacy"]["epsilon"]
    assert json.loads(facts["class_names"]) == list(test.spec.class_names)
    words = ["def forward", "return self", ".py", str(tmp_path), sys.prefix, "stack_trace"]
    assert [word for word in words if word.encode() in file.read_bytes()] == []


def test_onnx_model_takes_vectors_in_their_units(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors, labels = rng.normal(size=(200, 6)) * 3, np.arange(200) % 3
    facts = ((0.5,), (0.25,), ("a", "b", "c"), "test")
    spec = DatasetSpec("x", 1, 1, 6, 3, 200, 200, *facts, bounds=(-4.0, 4.0))
    data = fs.from_arrays(vectors, labels, spec)
    settings = fs.RunSettings(fs.FedAvg(), rounds=1, model=fs.ModelSettings("linear"))
    result = fs.simulate(settings, data=(data, data), output=tmp_path, quiet=True)
    with raises(errors.OutputError, "export.no_guarantee"):
        fs.export_onnx(str(result.folder), tmp_path / "model.onnx")
    file = fs.export_onnx(str(result.folder), tmp_path / "model.onnx", unprotected=True)
    expected = result.model(normalise(data.images, spec)).detach().numpy()
    values = vectors.astype(np.float32).reshape(200, 1, 1, 6)
    assert np.abs(values).max() > 4
    assert logits(file, values) == pytest.approx(expected, abs=1e-4)
    loaded = fs.load_model(folder_of(result))
    assert np.array_equal(loaded(normalise(data.images, spec)).detach(), expected)
    (folder_of(result) / "model.safetensors").write_bytes(b"no tensors")
    with raises(errors.OutputError, "files.output"):
        fs.load_model(folder_of(result))


def test_models_without_onnx_form_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(model_run(fs.FedStats(), tmp_path).folder)
    with raises(errors.OutputError, "onnx.operation"):
        fs.export_onnx(folder, tmp_path / "model.onnx")
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()
    spec = fs.load_dataset("digits")[1].spec
    _checked_program(network, spec)
    network.forward = lambda x: network[1](x.reshape(len(x), 64))  # type: ignore[method-assign]
    with pytest.raises(errors.OutputError, match="fixed batch size"):
        _checked_program(network, spec)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(errors.OutputError, match=r"pip install 'fedsynth\[onnx\]'"):
        fs.export_onnx(folder, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def test_onnxruntime_checks_pooling_that_onnx_computes_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The layers of GoogLeNet. Its reference evaluator pads the 8×8 pixels to 10×10."""
    pooling = nn.MaxPool2d(3, 1, padding=1, ceil_mode=True)
    network = nn.Sequential(pooling, nn.Flatten(), nn.Linear(64, 10)).eval()
    spec = fs.load_dataset("digits")[1].spec
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(errors.OutputError, match=r"evaluator of onnx .* Run pip install onnxr"):
        _checked_program(network, spec)
    error = 0.0

    def run(self: Any, names: None, inputs: dict[str, Any]) -> Any:
        return [network(torch.tensor(inputs["images"])).detach().numpy() + error]

    session = type(
        "InferenceSession", (), {"__init__": lambda self, model, providers: None, "run": run}
    )
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace(InferenceSession=session))
    _checked_program(network, spec)
    error = 0.1
    with pytest.raises(errors.OutputError, match="onnxruntime does not reproduce"):
        _checked_program(network, spec)
