"""Compares synthetic images from a run or an exported set with real images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from fedsynth.data.images import ImageData, normalise, to_stored
from fedsynth.data.registry import DatasetSpec
from fedsynth.data.shared_set import SUMS, TENSORS, SharedSet, load_synthetic, read_set
from fedsynth.errors import SettingError
from fedsynth.evaluation.fidelity import Fidelity, fidelity
from fedsynth.features.pretrained import PRETRAINED, names_a_library, pretrained_network
from fedsynth.features.registry import feature_map, register_file
from fedsynth.own_code import names_a_file
from fedsynth.results.saved_model import load_model

CHUNK = 500
# The name of the argument in errors about a network of timm or torchvision.
PLACE = (None, "network")

Embed = Callable[[Tensor], Tensor]


def fidelity_of_set(
    folder: str | Path,
    test: ImageData,
    network: str | Path | nn.Module,
    weights: str = PRETRAINED,
    *,
    report: Callable[[str, int, int], None] = lambda stage, completed, total: None,
) -> Fidelity:
    """Computes FID and KID between a synthetic set and real test images.

    Both are compared as they are stored: images have 8 bits, so values outside [0, 1] are clipped.
    Networks of timm and torchvision get the images at the size for which their weights were
    trained, as colour images. Other networks get them at the size of the set.

    Args:
        folder: the output of `export_run` or `synthesize`, or the folder of a finished run.
        test: real images with the image shape of the set. They should not be the images from which
            the set was made. If they are private, the distances are private, too.
        network: the network whose features are compared: `timm:NAME`, `torchvision:NAME`, the name
            of a feature map, `FILE.py:NAME` of a custom feature map, a path for `load_model`, or a
            network with `embed`, which maps normalised images to features [N, d].
        weights: for networks of timm and torchvision, a file of weights, or "pretrained" for the
            weights that the library downloads.
        report: receives the stage, the number of finished images and their total number.

    Raises:
        DataFilesMissingError, DataFilesCorruptError: there is no synthetic set in the folder, or
            its files are damaged.
        DataError: there are fewer than two synthetic or real images.
        SettingError: the test images have another shape, the network has no `embed`, or its
            weights cannot be loaded.
        UnknownNameError: no feature map has this name.

    >>> import tempfile
    >>> from fedsynth import load_dataset, owner_settings, synthesize
    >>> settings = owner_settings({"model": {"width": 8}, "privacy": {"epsilon": 8}})  # digits
    >>> place = tempfile.mkdtemp()
    >>> run = synthesize(settings, f"{place}/share", runs=f"{place}/runs")
    >>> measured = fidelity_of_set(f"{place}/share", load_dataset("digits")[1], "pixels")
    >>> measured.fid > 0, measured.synthetic, measured.features
    (True, 100, 64)
    """
    synthetic = synthetic_set(Path(folder))
    spec = synthetic.spec
    if test.spec.image_shape != spec.image_shape:
        reason = f"must contain images of shape {spec.image_shape}, got {test.spec.image_shape}"
        raise SettingError(None, "test", reason)
    embed = _embedding(network, weights, spec)
    images = to_stored(synthetic.images, spec)
    synthetic_ND = _features(embed, images, partial(report, "synthetic images"))
    real_ND = _features(embed, test.images.cpu(), partial(report, "real images"))
    return fidelity(synthetic_ND, real_ND)


def synthetic_set(folder: Path) -> SharedSet:
    """Returns the synthetic set in an exported folder or in a run folder."""
    if (folder / SUMS).is_file() or not (folder / TENSORS).is_file():
        return load_synthetic(folder)
    return read_set(folder / TENSORS)


def _embedding(network: str | Path | nn.Module, weights: str, spec: DatasetSpec) -> Embed:
    """Returns a function from stored images to the network's features."""
    if isinstance(network, str) and names_a_library(network):
        pretrained = pretrained_network(network, weights, PLACE)
        return lambda images_NCHW: pretrained.embed_pixels(_unit(images_NCHW))
    if isinstance(network, str) and names_a_file(network):
        return feature_map(register_file(network), spec.image_shape)
    if not isinstance(network, nn.Module):
        if not Path(network).exists():
            return feature_map(str(network), spec.image_shape)
        network = load_model(network)
    if not hasattr(network, "embed"):
        raise SettingError(None, "network", "has no `embed`, which returns features. Define it")
    embed: Embed = network.eval().embed  # type: ignore[assignment]
    return lambda images_NCHW: embed(normalise(images_NCHW, spec))


def _unit(images_NCHW: Tensor) -> Tensor:
    """Returns stored images as values in [0, 1]."""
    if images_NCHW.dtype == torch.uint8:
        return images_NCHW.float() / 255
    return images_NCHW


@torch.no_grad()
def _features(embed: Embed, images_NCHW: Tensor, report: Callable[[int, int], None]) -> Tensor:
    parts = []
    for chunk in images_NCHW.split(CHUNK):
        parts.append(embed(chunk))
        report(sum(map(len, parts)), len(images_NCHW))
    return torch.cat(parts)
