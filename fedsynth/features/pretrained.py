"""Loads pretrained networks from timm and torchvision.

A network is named `timm:NAME` or `torchvision:NAME`. Its last linear layer is removed, so that it
returns an embedding. The library downloads the weights, or they are read from a file. Weight files
are untrusted. They are safetensors, or torch reads them with `weights_only=True`, so no code in a
file is executed.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.errors import SettingError, one_line
from fedsynth.files import expand_home, read_regular
from fedsynth.own_code import HASH_DIGITS

LIBRARIES = ("timm", "torchvision")
# The setting value that lets the library download the weights.
PRETRAINED = "pretrained"

MAX_WEIGHTS_BYTES = 2**33
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,100}")


def names_a_library(name: str) -> bool:
    """Returns True if a name has the form `timm:NAME` or `torchvision:NAME`.

    >>> names_a_library("timm:resnet18"), names_a_library("resnet18")
    (True, False)
    """
    library, colon, _ = name.partition(":")
    return bool(colon) and library in LIBRARIES


@dataclass(frozen=True, eq=False)
class PretrainedNetwork:
    """A pretrained network that maps images to embeddings, with its preprocessing constants.

    Attributes:
        network: maps normalised colour images [N, 3, H, W] to embeddings [N, d].
        dimension: d.
        size: the height and width of the training images.
        fixed_size: whether the network accepts only images of `size`.
        mean: the mean of each channel, for pixels in [0, 1].
        std: the standard deviation of each channel.
        mode: the interpolation for resizing, "bicubic" or "bilinear".
        sha256: a hash of the weights.
    """

    network: nn.Module
    dimension: int
    size: tuple[int, int]
    fixed_size: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mode: str
    sha256: str

    @property
    def preparation(self) -> str:
        """A description of the image preparation for reports."""
        height, width = self.size
        return (
            f"images resized to {height}×{width} ({self.mode}), mean {list(self.mean)}, standard "
            f"deviation {list(self.std)}"
        )

    def resized(self, x_NCHW: Tensor) -> Tensor:
        """Converts grey images to colour, and resizes images to the network's input size."""
        x = x_NCHW.expand(-1, 3, -1, -1)
        if tuple(x.shape[2:]) == self.size:
            return x
        return F.interpolate(x, self.size, mode=self.mode, antialias=True, align_corners=False)

    def embed_pixels(self, pixels_NCHW: Tensor) -> Tensor:
        """Computes the embeddings [N, d] for pixels in [0, 1]."""
        x = self.resized(pixels_NCHW).clamp(0, 1)
        mean = x.new_tensor(self.mean).view(1, -1, 1, 1)
        std = x.new_tensor(self.std).view(1, -1, 1, 1)
        return self.network.to(x.device)((x - mean) / std)


def pretrained_network(name: str, weights: str, place: tuple[str | None, str]) -> PretrainedNetwork:
    """Loads a timm or torchvision network without its last layer.

    Args:
        name: `timm:NAME` or `torchvision:NAME`.
        weights: "pretrained" for the library's download, a weight file, or an empty string for
            random weights from torch's global generator.
        place: the setting's section and key, for errors.

    Raises:
        SettingError: the library or network does not exist, or the weights cannot be downloaded or
            read, or do not match the network.
    """
    library, _, model = name.partition(":")
    if not _NAME.fullmatch(model):
        raise _refused(place, name, f"contains no network's name after {library}:. Add a name")
    load = {"timm": _timm, "torchvision": _torchvision}[library]
    try:
        network, expected = load(name, model, weights == PRETRAINED, place)
    except (OSError, RuntimeError, ValueError) as error:
        options = {"data": "--encoder-weights ", "model": "--set model.weights="}
        option = options.get(place[0] or "", "--weights ")
        reason = (
            f"has no weights on this machine, and the download failed: {one_line(error, 100)}. "
            f"Download them elsewhere and name the file with {option}FILE.safetensors"
        )
        raise _refused(place, name, reason) from None
    if weights not in ("", PRETRAINED):
        _fill(network, name, weights)
    for layer in network.modules():
        if getattr(layer, "inplace", False):
            layer.inplace = False  # type: ignore[assignment]  # gradients of each image need inputs
    network.eval()
    _, *size = expected["input_size"]
    with torch.no_grad():
        dimension = network(torch.zeros(2, 3, *size)).flatten(1).shape[1]
    return PretrainedNetwork(
        nn.Sequential(network, nn.Flatten()),
        dimension,
        (size[0], size[1]),
        bool(expected.get("fixed_input_size", False)),
        tuple(expected["mean"]),
        tuple(expected["std"]),
        "bicubic" if expected["interpolation"] == "bicubic" else "bilinear",
        _hash_of(network.state_dict()),
    )


def _timm(
    name: str, model: str, download: bool, place: tuple[str | None, str]
) -> tuple[nn.Module, Mapping[str, Any]]:
    try:
        import timm
    except ImportError:
        raise _refused(place, name, "requires timm. Run pip install 'fedsynth[encoders]'") from None
    if not timm.is_model(model.partition(".")[0]):
        raise _refused(place, name, "is unknown to timm. Choose a network from timm.list_models()")
    network = timm.create_model(model, pretrained=download, num_classes=0)
    config: dict[str, Any] = timm.data.resolve_model_data_config(network)
    trained: Any = getattr(network, "pretrained_cfg", {})
    config["fixed_input_size"] = trained.get("fixed_input_size", False)
    return network, config


def _torchvision(
    name: str, model: str, download: bool, place: tuple[str | None, str]
) -> tuple[nn.Module, Mapping[str, Any]]:
    from torchvision import models

    if model not in models.list_models(module=models):
        raise _refused(
            place,
            name,
            (
                "is not a classifier in torchvision.models. Choose one from "
                "torchvision.models.list_models()"
            ),
        )
    default = models.get_model_weights(model).DEFAULT
    network = models.get_model(model, weights=default if download else None)
    linear = [key for key, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    if not linear:
        raise _refused(
            place,
            name,
            "has no linear layer, so its embedding is undefined. Choose another network",
        )
    network.set_submodule(linear[-1], nn.Identity())
    expected = default.transforms()
    return network, {
        "input_size": (3, expected.crop_size[0], expected.crop_size[0]),
        "mean": expected.mean,
        "std": expected.std,
        "interpolation": expected.interpolation.value,
        "fixed_input_size": model.startswith("vit"),
    }


def _fill(network: nn.Module, name: str, file: str) -> None:
    """Loads weights from a file into a network, and ignores additional weights in the file.

    Raises:
        SettingError: the file cannot be read, or belongs to another network.
    """
    try:
        missing = network.load_state_dict(read_weights(file), strict=False).missing_keys
    except RuntimeError as error:
        raise _wrong_weights(f"{file} does not match {name}: {one_line(error)}") from None
    if missing:
        reason = f"{file} does not match {name}: the tensor {one_line(missing[0], 80)} is missing"
        raise _wrong_weights(reason)


def read_weights(file: str) -> dict[str, Tensor]:
    """Reads a network's weights from a safetensors file, or from a file that torch saved.

    Raises:
        SettingError: the file is unreadable, or is not a dictionary of finite tensors.
    """
    path = expand_home(file)
    try:
        content = read_regular(path, MAX_WEIGHTS_BYTES)
        if path.suffix == ".safetensors":
            state: Any = safetensors.torch.load(content)
        else:
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        raise _wrong_weights(f"{file} cannot be read: {one_line(error)}") from None
    except Exception as error:  # of damaged files, torch raises errors of many classes
        reason = f"{file} is damaged, or contains objects other than tensors: {one_line(error)}"
        raise _wrong_weights(reason) from None
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise _wrong_weights(f"{file} is not a state_dict of tensors. Save network.state_dict()")
    for key, tensor in state.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise _wrong_weights(f"{file} contains NaN or infinite values in {one_line(key, 80)}")
    return state


def _hash_of(state: Mapping[str, Tensor]) -> str:
    """Computes the SHA-256 of a network's weights (names, shapes and values)."""
    digest = hashlib.sha256()
    for key, tensor in state.items():
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def label_of(name: str, sha256: str) -> str:
    """Appends `@` and the first digits of the weights' hash to a network's name."""
    return f"{name}@{sha256[:HASH_DIGITS]}"


def _refused(place: tuple[str | None, str], name: str, reason: str) -> SettingError:
    return SettingError(*place, reason, value=name)


def _wrong_weights(reason: str) -> SettingError:
    return SettingError(None, "the weight file", reason).with_code("files.weights")
