"""A model in one file that says what it is: weights, with the architecture in the metadata.

Such a file may be handed over, and may come from anybody: nothing in it is executed, and a model or
feature map of one's own has to be registered by whoever reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fedsynth.core.messages import DAMAGED
from fedsynth.core.method import Method
from fedsynth.data.files import one_line
from fedsynth.data.images import normalise
from fedsynth.data.registry import DatasetSpec
from fedsynth.data.stated_spec import spec_from_json
from fedsynth.errors import FedsynthError, OutputError
from fedsynth.federation.outputs.architecture import Architecture, from_metadata, to_metadata
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.report_file import HOSTILE
from fedsynth.seeding import torch_generator

FORMAT = "fedsynth model 1"
PROBES = 4
CLOSE = 0.02
"""Of the largest log-probability: devices and versions of torch round, other weights do more."""
LONGEST = 400
TRUE = json.dumps(True)
Read = TypeVar("Read")


def write_model(
    file: Path, network: nn.Module, of: Architecture, facts: Mapping[str, str] | None = None
) -> None:
    """Writes weights and architecture, and logits of public images to know it by.

    Args:
        file: to be written.
        network: with its weights.
        of: what it is.
        facts: more, for who finds the file.

    Raises:
        OutputError: the file cannot be written.
    """
    said = {
        **(facts or {}),
        "format": FORMAT,
        "teaches": json.dumps(of.teaches),
        "logits": json.dumps(_probe(network, of.spec)),
        **to_metadata(of),
    }
    weights = {name: value.cpu().contiguous() for name, value in network.state_dict().items()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(weights, file, metadata=said)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write {file}: {one_line(error)}") from None


def teaches(file: Path) -> bool:
    """Whether the model of a file says that it teaches (`RunsModel.teaches`).

    Raises:
        OutputError: the file is damaged.
    """
    return _opened(file, lambda opened: opened.metadata() or {}).get("teaches") == TRUE


def spec_of_file(file: Path) -> DatasetSpec | None:
    """Of which images the model of a file says that it is; None: it does not.

    Raises:
        OutputError: the file is damaged.
    """
    said = _opened(file, lambda opened: opened.metadata() or {})
    if "spec" not in said:
        return None
    try:
        return spec_from_json(json.loads(said["spec"]))
    except (FedsynthError, *HOSTILE, *DAMAGED) as error:
        raise OutputError(f"{file} cannot be used: {one_line(error, LONGEST)}") from None


def read_model(file: Path, method: type[Method] | None = None) -> nn.Module:
    """The model of a file, in evaluation mode, on the CPU.

    Args:
        file: as `write_model` wrote it.
        method: the class of a method that fedsynth does not know by name.

    Raises:
        OutputError: the file is damaged, says no architecture, one that is not known here, or one
            that is another here: an encoder with other weights.
    """
    said, weights = _opened(file, _contents)
    if said.get("format") != FORMAT:
        raise OutputError(f"{file} does not say of which architecture its weights are")
    try:
        of = from_metadata(said, method, sum(one.numel() for one in weights.values()))
        network = of.network()
        network.load_state_dict(weights)
        known = torch.tensor(json.loads(said["logits"]))
        found = torch.tensor(_probe(network, of.spec))
        close = CLOSE * max(1.0, float(known.nan_to_num().abs().max()))
        same = known.shape == found.shape and torch.allclose(
            known, found, rtol=0.0, atol=close, equal_nan=True
        )
    except (FedsynthError, PrivacyError, *HOSTILE, *DAMAGED) as error:
        raise OutputError(f"{file} cannot be used: {one_line(error, LONGEST)}") from None
    if not same:
        raise OutputError(
            f"{file} cannot be used: with these weights the network says something else of public "
            f"images here than where it was written{_blamed(of)}"
        )
    return network.eval()


def _opened(file: Path, read: Callable[[Any], Read]) -> Read:
    """What `read` makes of the opened file."""
    try:
        with safe_open(file, framework="pt") as opened:
            return read(opened)
    except (OSError, *DAMAGED) as error:
        raise OutputError(f"{file} cannot be used: {one_line(error)}") from None


def _contents(opened: Any) -> tuple[dict[str, str], dict[str, Tensor]]:
    weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return opened.metadata() or {}, weights


def _blamed(of: Architecture) -> str:
    names = " and ".join(of.own.values())
    return f": {names} must have other weights of its own here" if names else ""


def _probe(network: nn.Module, spec: DatasetSpec) -> list[list[float]]:
    """Log-probabilities of public images, to know a network by; rounded."""
    images = torch.rand(PROBES, *spec.image_shape, generator=torch_generator(0, "model's probe"))
    mode = network.training
    network.eval()
    with torch.no_grad():
        pixels = (images * 255).round().to(torch.uint8)
        device = next(iter(network.state_dict().values())).device
        logits = network(normalise(pixels, spec).to(device)).float().cpu()
    network.train(mode)
    found: list[list[float]] = logits.log_softmax(dim=1).mul(1000).round().div(1000).tolist()
    return found
