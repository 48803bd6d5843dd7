"""Compares real images with synthetic ones, which are in a run folder or an exported set."""

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
from fedsynth.evaluation.evidence import Evidence, membership, site_inference
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
    _check_shape("test", test.spec, spec)
    embed = _embedding(network, weights, spec)
    images = to_stored(synthetic.images, spec)
    synthetic_ND = _features(embed, images, partial(report, "synthetic images"))
    real_ND = _features(embed, test.images.cpu(), partial(report, "real images"))
    return fidelity(synthetic_ND, real_ND)


class RealImages:
    """Real images for computing the evidence pack of a synthetic set.

    Args:
        training: the images from which the set is made.
        held_out: other images of the same distribution, from which nothing is made.
        network, weights: the network whose features are compared, as in `fidelity_of_set`.
        simulation: True states that all these images are public or simulated. There is no evidence
            without this statement, because it has exact numbers about the images.

    Raises:
        SettingError: `simulation` is False, the shapes of the images differ, or the network cannot
            be used.
        UnknownNameError: no feature map has the network's name.

    >>> import tempfile
    >>> from fedsynth import load_dataset, load_synthetic, owner_settings, synthesize
    >>> settings = owner_settings({"model": {"width": 8}, "privacy": {"epsilon": 8}})  # digits
    >>> place = tempfile.mkdtemp()
    >>> run = synthesize(settings, f"{place}/share", runs=f"{place}/runs")
    >>> real = RealImages(*load_dataset("digits"), simulation=True)
    >>> attack = real.evidence(load_synthetic(f"{place}/share")).membership
    >>> attack.low <= attack.chance
    True
    """

    def __init__(
        self,
        training: ImageData,
        held_out: ImageData,
        network: str = "pixels",
        weights: str = PRETRAINED,
        *,
        simulation: bool = False,
    ) -> None:
        if not simulation:
            reason = (
                "must be True, because evidence is only for public or simulated images. If all "
                "real images are public or simulated, set --simulation or simulation=True"
            )
            raise SettingError(None, "simulation", reason)
        _check_shape("held_out", held_out.spec, training.spec)
        self._name = network
        self._spec = training.spec
        self._embed = _embedding(network, weights, training.spec)
        self._training, self._held_out = (
            (self._features(data.images.cpu()), data.labels.cpu()) for data in (training, held_out)
        )

    def _features(self, images_NCHW: Tensor) -> Tensor:
        return _features(self._embed, images_NCHW, lambda completed, total: None)

    def evidence(self, synthetic: SharedSet) -> Evidence:
        """Computes the measurements for the evidence pack of a synthetic set.

        Raises:
            DataError: there are fewer than two released or held-out images.
            SettingError: the set has another image shape.
        """
        spec, labels, owners = synthetic.spec, synthetic.labels, synthetic.clients
        _check_shape("synthetic", spec, self._spec)
        released = self._features(to_stored(synthetic.images, spec))
        distances = fidelity(released, self._held_out[0])  # first, as it checks the features
        counts = labels.bincount(minlength=spec.classes).tolist()
        return Evidence(
            features=self._name,
            training_images=len(self._training[1]),
            held_out_images=len(self._held_out[1]),
            label_counts=dict(zip(spec.class_names, counts, strict=True)),
            membership=membership(released, self._training, self._held_out),
            site_inference=None if owners is None else site_inference(released, owners, labels),
            fidelity=distances,
        )


def _check_shape(name: str, spec: DatasetSpec, expected: DatasetSpec) -> None:
    if spec.image_shape != expected.image_shape:
        reason = f"must have images of shape {expected.image_shape}, got shape {spec.image_shape}"
        raise SettingError(None, name, reason)


def synthetic_set(folder: Path) -> SharedSet:
    """Returns the synthetic set in an exported folder or in a run folder."""
    if (folder / SUMS).is_file() or not (folder / TENSORS).is_file():
        return load_synthetic(folder)
    return read_set(folder / TENSORS)


def _embedding(network: str | Path | nn.Module, weights: str, spec: DatasetSpec) -> Embed:
    """Returns a function that computes the network's features of a data set's images."""
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
        raise SettingError(
            None, "network", "must have a method embed(x) that returns features. Define embed"
        )
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
