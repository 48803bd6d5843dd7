"""Tests of encoders, which replace the images of a run by vectors, and of files of weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file
from torch.nn import functional as F

from fedsynth import EncoderSettings, export_run, load_dataset, load_synthetic, resolve, simulate
from fedsynth.data.images import ImageData
from fedsynth.data.registry import is_published, spec_from_json
from fedsynth.errors import OutputError, SettingError, UnknownNameError
from fedsynth.features import FeatureMap, feature_map, normalised_map, register_features
from fedsynth.features.encoding import PASS, clear_cache, encode, encoder_map
from fedsynth.features.pretrained import read_weights
from fedsynth.federation.run_data import RunData, encoded
from fedsynth.results.file_names import CONFIG
from fedsynth.results.verification import verify_run
from fedsynth.seeding import forked_rng
from tests.digits import CPU, SPEC
from tests.raising import raises
from tests.user_files import make_image_folder

NAME, SHAPE = "timm:test_resnet", SPEC.image_shape


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("weights") / "public.safetensors"
    with forked_rng(0, "public weights"):
        save_file(timm.create_model("test_resnet", num_classes=5).state_dict(), file)
    return file


def timm_network(weights: Path) -> Any:
    network = timm.create_model("test_resnet", num_classes=5)
    network.load_state_dict(read_weights(str(weights)))
    network.reset_classifier(0)
    return network.eval()


def few() -> tuple[ImageData, ImageData]:
    """Returns some digits for training and for testing."""
    train, test = load_dataset("digits")
    return train.subset(range(120)), test.subset(range(20))


def test_vectors_equal_those_of_the_libraries(tmp_path: Path, weights: Path) -> None:
    """The images have the networks' input size, so that they are only normalised."""
    with forked_rng(0, "public weights"):
        network = torchvision.models.get_model("shufflenet_v2_x0_5", weights=None).eval()
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    network.fc = torch.nn.Identity()
    preparation = torchvision.models.get_model_weights("shufflenet_v2_x0_5").DEFAULT.transforms()
    of_timm = timm_network(weights)
    config = timm.data.resolve_model_data_config(of_timm)
    constants = (config["mean"], config["std"]), (preparation.mean, preparation.std)
    for name, file, reference, side, (mean, std) in (
        (NAME, weights, of_timm, 160, constants[0]),
        ("torchvision:shufflenet_v2_x0_5", tmp_path / "weights.pth", network, 224, constants[1]),
    ):
        features = encoder_map(EncoderSettings(name, str(file)), (3, side, side))
        draws = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (1, 3, side, side), generator=draws).to(torch.uint8)
        with torch.no_grad():
            h = reference(torchvision.transforms.functional.normalize(pixels / 255, mean, std))
            expected = F.normalize(h, dim=1)
            torch.testing.assert_close(features(pixels), expected, atol=1e-4, rtol=1e-3)


def test_vectors_depend_on_one_image_and_keep_published_specs(weights: Path) -> None:
    """The guarantee for vectors is one for images only if each vector depends on one image."""
    features = encoder_map(EncoderSettings(NAME, str(weights)), SHAPE)
    train, _ = few()
    encoded = encode(train.subset(range(70)), features, CPU)
    vectors, spec = encoded.images, encoded.spec
    without = encode(train.subset([i for i in range(70) if i != 3]), features, CPU).images
    assert torch.equal(torch.cat([vectors[:3], vectors[4:]]), without)
    norms = torch.linalg.vector_norm(2 * vectors.flatten(1) - 1, dim=1)
    assert float(norms.max()) <= 1 + 1e-5
    assert spec_from_json(spec.to_json()) == spec
    assert is_published(spec)
    assert not is_published(replace(spec, train_size=7))
    assert not is_published(replace(spec, encoded_shape=(1, 9, 9)))
    label = features.name
    other = EncoderSettings(f"{label[:-1]}{'0' if label[-1] != '0' else '1'}", str(weights))
    with raises(SettingError, "data.encoder"):
        encoder_map(other, SHAPE)


def test_only_images_of_clients_are_encoded() -> None:
    """A subset of the data takes less time."""
    train, _ = few()
    settings = resolve({"data": {"dataset": "digits", "encoder": "pixels"}})
    progress, parts = Mock(), [np.array([3, 5]), np.array([100])]
    loaded = RunData(settings, train, None, "none")
    vectors = encoded(loaded, parts, CPU, progress).train.images
    expected = encode(train, feature_map("pixels", SHAPE), CPU).images
    assert torch.equal(vectors[[3, 5, 100]], expected[[3, 5, 100]])
    assert len(vectors) == len(train)
    assert not vectors[[0, 4, 119]].any()
    progress.assert_called_once_with(0, "encoding", 1, 1)  # of two passes for all images


@pytest.mark.parametrize("least", [1, PASS])
def test_maps_that_mix_images_are_rejected(least: int) -> None:
    """The trial of a map has fewer images than a pass."""

    def embed(x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(1)
        return rows - rows.mean(0) if len(x) >= least else rows

    name = f"mixing {least}"
    register_features(name, lambda shape: normalised_map(name, shape, embed))
    with raises(SettingError, "data.encoder"):
        encode(few()[0], encoder_map(EncoderSettings(name), SHAPE), CPU)


def test_public_images_of_the_run_are_rejected(tmp_path: Path, weights: Path) -> None:
    make_image_folder(tmp_path / "scans", (), per_class=2)
    split = {"kind": "iid", "clients": 1}
    for public in (tmp_path, tmp_path / "scans" / "ill"):
        data = {"folder": str(tmp_path / "scans"), "encoder": NAME, "public_images": str(public)}
        data["encoder_weights"] = str(weights)
        settings = resolve({"run": {"method": "fedavg"}, "data": data, "partition": split})
        with raises(SettingError, "data.public_images"):
            simulate(settings, quiet=True)


def test_long_vectors_are_clipped_and_nan_becomes_zero() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        first = x.flatten(1)[:, :2] * 4
        return torch.where(first > 3.9, torch.nan, first)

    features = FeatureMap("two", SHAPE, 2, 2.0, 1.0, "given", function)
    train, _ = few()
    pixels = torch.zeros(3, *SHAPE, dtype=torch.uint8)
    pixels[0, 0, 0, :2] = torch.tensor([51, 0])
    pixels[1, 0, 0, :2] = torch.tensor([204, 204])
    pixels[2, 0, 0, :2] = 255
    data = replace(train.subset(range(3)), images=pixels)
    vectors = 2 * encode(data, features, CPU).images.flatten(1) - 1
    half = 0.5**0.5
    torch.testing.assert_close(vectors, torch.tensor([[0.4, 0.0], [half, half], [0.0, 0.0]]))


def test_private_runs_verify_and_release_vectors(tmp_path: Path, weights: Path) -> None:
    sections = {
        "run": {"method": "feddm", "rounds": 1},
        "data": {"dataset": "digits", "encoder": NAME, "encoder_weights": str(weights)},
        "partition": {"clients": 2},
        "model": {"width": 16},
        "method": {"iterations": 2, "ipc": 2, "server_epochs": 1},
        "privacy": {"epsilon": 8},
    }
    result = simulate(resolve(sections), data=few(), output=tmp_path, quiet=True)
    folder = Path(result.folder)
    label = result.settings.encoder.encoder
    assert f'encoder = "{label}"' in (folder / CONFIG).read_text()
    assert verify_run(folder).problems == []
    report = (folder / "privacy_report.md").read_text()
    assert f"the encoder {label}" in report
    assert "weights with SHA-256" in report
    shared = load_synthetic(export_run(folder, tmp_path / "share"))
    assert shared.spec.bounds == (-1.0, 1.0)
    assert shared.spec.encoder.startswith(f"{label}: ")
    assert shared.spec.encoded_shape == SHAPE
    readme = (tmp_path / "share" / "README.md").read_text()
    assert str(tmp_path) not in readme
    assert "# Synthetic examples of" in readme
    assert f"nn.Linear({shared.spec.width}, 128)" in readme
    text = (folder / CONFIG).read_text().replace(label, f"{label[:-12]}{'0' * 12}")
    (folder / CONFIG).write_text(text)
    assert verify_run(folder).problems


def test_ledgers_identify_images_under_any_encoder(tmp_path: Path) -> None:
    """Otherwise a second run could hide its cost from the first by another encoder."""
    sections: Any = {"run": {"method": "fedstats", "rounds": 1}, "partition": {"clients": 2}}
    sections["privacy"] = {"epsilon": 8, "noise_multiplier": 9.0, "ledger": tmp_path / "ledgers"}
    data = [replace(part, spec=replace(part.spec, name="own")) for part in few()]
    parts, spent = [np.arange(60), np.arange(60, 120)], []
    for encoder in (None, EncoderSettings("pixels")):
        settings = replace(resolve(sections), encoder=encoder)
        result = simulate(settings, data=tuple(data), parts=parts, quiet=True)
        spent.append(result.metrics[-1]["epsilon"])
    assert spent[1] > 1.2 * spent[0]


def test_cache_is_private_and_keyed_by_weights(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    train, _ = few()
    features = feature_map("pixels", SHAPE)
    progress = Mock()

    def counted(data: ImageData, used: FeatureMap = features) -> torch.Tensor:
        return encode(data, used, CPU, cache=str(cache), progress=progress).images

    first = counted(train)
    assert (cache.stat().st_mode & 0o777, progress.call_count) == (0o700, 2)
    assert torch.equal(counted(train), first)
    assert progress.call_count == 2
    counted(train.subset(range(64)))
    moved = replace(features, function=lambda x: x.flatten(1) - 0.4)
    assert not torch.equal(counted(train, moved), first)
    assert progress.call_count == 5
    assert {f.stat().st_mode & 0o777 for f in cache.iterdir()} == {0o600}
    for kept, zeros in ((9, 0), (64, 64)):
        for path in cache.iterdir():
            path.write_bytes(bytes(zeros) + path.read_bytes()[kept:])
        assert torch.equal(counted(train), first)
    (cache / "vectors-0.safetensors").write_text("of an earlier version")
    (cache / "other.txt").write_text("kept")
    assert clear_cache(cache) == 4
    assert [f.name for f in cache.iterdir()] == ["other.txt"]
    cache.chmod(0o755)
    with raises(OutputError, "files.permissions"):
        counted(train)


def test_runs_store_the_vectors_of_their_feature_map(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    sections: Any = {"run": {"method": "fedstats", "rounds": 2}}
    sections["data"] = {"encoder_cache": str(cache)}
    first, second = (simulate(resolve(sections), quiet=True) for _ in range(2))
    assert len(list(cache.iterdir())) == 2  # of the training and of the test images
    assert first.metrics[-1]["test_accuracy"] == second.metrics[-1]["test_accuracy"]
    sections["run"]["method"] = "fedavg"
    with raises(SettingError, "data.encoder_cache"):
        simulate(resolve(sections), quiet=True)


def test_empty_encoder_settings_are_the_defaults() -> None:
    with_encoder = resolve({"data": {"encoder": "scattering", "encoder_cache": ""}})
    assert with_encoder == resolve({"data": {"encoder": "scattering"}})
    assert resolve({"data": {"encoder": "", "public_images": ""}}) == resolve({})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoder": "timm:no_such_network"}, "is unknown to timm"),
        ({"encoder": "torchvision:maskrcnn_resnet50_fpn"}, "is not a classifier in torchvision"),
        ({"encoder": "timm:hf-hub:someone/model"}, "no network's name after timm:"),
        (
            {"encoder": "pixels", "encoder_weights": "w.safetensors"},
            "requires data.encoder=timm:NAME",
        ),
        ({"encoder": "pixel"}, "did you mean pixels"),
        ({"encoder": "net.py:f@0123456789ab"}, "which is not loaded or has changed"),
    ],
)
def test_invalid_settings_raise_one_line_errors(settings: dict[str, str], message: str) -> None:
    with pytest.raises((SettingError, UnknownNameError), match=message) as refused:
        encoder_map(EncoderSettings(**{"encoder": "", **settings}), SHAPE)
    assert "\n" not in str(refused.value)


def test_damaged_and_foreign_weights_execute_no_code(tmp_path: Path, weights: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "attacked"), "w"))

    (tmp_path / "cut.safetensors").write_bytes(weights.read_bytes()[:-9])
    torch.save({"conv1.weight": Attack()}, tmp_path / "attack.pt")
    torch.save([torch.zeros(1)], tmp_path / "list.pt")
    save_file({"conv1.weight": torch.full((1,), torch.nan)}, tmp_path / "nan.safetensors")
    save_file({"other": torch.zeros(1)}, tmp_path / "other.safetensors")
    for name in ("cut.safetensors", "attack.pt", "list.pt", "nan.safetensors", "missing.pt"):
        with pytest.raises(SettingError, match="the weight file"):
            read_weights(str(tmp_path / name))
    assert not (tmp_path / "attacked").exists()
    with pytest.raises(SettingError, match=r"does not match timm:test_resnet"):
        encoder_map(EncoderSettings(NAME, str(tmp_path / "other.safetensors")), SHAPE)


def test_public_images_centre_vectors(tmp_path: Path, weights: Path) -> None:
    images = few()[0].images
    for number, image in enumerate(images[:6]):
        Image.fromarray(image[0].numpy()).save(tmp_path / f"{number}.png")
    plain = encoder_map(EncoderSettings(NAME, str(weights)), SHAPE)
    centred = encoder_map(EncoderSettings(NAME, str(weights), str(tmp_path)), SHAPE)
    assert centred.name.startswith(f"{plain.name}-")
    network = timm_network(weights)
    x = F.interpolate(images[:9].expand(-1, 3, -1, -1) / 255, (160, 160), mode="bilinear")
    with torch.no_grad():
        raw = network((x - 0.5) / 0.5)
        vectors = centred(images[:9])
    expected = F.normalize(raw - raw[:6].mean(0), dim=1)
    assert float((vectors * expected).sum(1).min()) > 0.99
    for number, image in enumerate(images[:6]):  # 12 bits, so black without a window
        Image.fromarray(image[0].numpy().astype(np.uint16) * 16).save(tmp_path / f"{number}.png")
    spec = replace(SPEC, window=(2040.0, 4080.0))
    windowed = encoder_map(EncoderSettings(NAME, str(weights), str(tmp_path)), spec)
    assert windowed.name == centred.name
