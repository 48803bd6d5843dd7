"""A model in one file that says what it is: weights, with the architecture in the metadata.

Such a file may be handed over, and may come from anybody: nothing in it is executed, and a model or
feature map of one's own has to be registered by whoever reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

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
from fedsynth.features.registry import is_own_features
from fedsynth.federation.terms.recorded import as_recorded
from fedsynth.federation.terms.resolve import resolve
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.models.registry import ModelSettings, build_network, is_own_model
from fedsynth.seeding import torch_generator

FORMAT = "fedsynth model 1"
PROBES = 4
CLOSE = 0.02
"""Of the largest log-probability: devices and versions of torch round, other weights do more."""
LONGEST = 400


@dataclass(frozen=True)
class Architecture:
    """What a model's weights belong to.

    Args:
        spec: of the images that it takes.
        model: the network's settings.
        run: of the run whose model it is: FedStats' stands on a feature map; None: the network of
            `model` and nothing else.
    """

    spec: DatasetSpec
    model: ModelSettings = field(default_factory=ModelSettings)
    run: RunSettings | None = None

    def network(self, seed: int = 0) -> nn.Module:
        """The untrained network, on the CPU; a seed is for one that is to be trained."""
        if self.run is None:
            return build_network(self.model, self.spec, seed)
        return self.run.method.network(self.run.model, self.spec, self.run.seed)

    @property
    def own(self) -> tuple[str, ...]:
        """What of it comes from outside the package, by name: the model, or a feature map."""
        names = (self.model.features,) if self.run is None else self.run.feature_names
        maps = tuple(name for name in names if is_own_features(name))
        model = self.model if self.run is None else self.run.model
        whole = self.run is None or self.run.method.takes_model
        return (*maps, model.name) if whole and is_own_model(model) else maps

    @property
    def teaches(self) -> bool:
        """Whether it was made of something else than the run's images, and so can label more."""
        return self.run is not None and not self.run.method.learns_from_images

    def sections(self) -> dict[str, dict[str, Any]]:
        """Of the settings what the network follows from: no paths, no privacy, no partition."""
        if self.run is None:
            return {"model": asdict(self.model)}
        said = self.run.to_mapping()
        name = {"method": self.run.method.name}
        return {"run": name, "method": said.get("method", {}), "model": said["model"]}


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
    spec = replace(of.spec, source="")
    said = {
        **(facts or {}),
        "format": FORMAT,
        "teaches": json.dumps(of.teaches),
        "logits": json.dumps(_probe(network, of.spec)),
        "settings": json.dumps(of.sections(), sort_keys=True),
        "spec": json.dumps(asdict(spec), sort_keys=True),
    }
    weights = {name: value.cpu().contiguous() for name, value in network.state_dict().items()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(weights, file, metadata=said)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write {file}: {one_line(error)}") from None


def teaches(file: Path) -> bool:
    """Whether the model of a file says that it teaches (`Architecture.teaches`).

    Raises:
        OutputError: the file is damaged.
    """
    return bool(_contents(file)[0].get("teaches") == json.dumps(True))


def read_model(file: Path, method: type[Method] | None = None) -> nn.Module:
    """The model of a file, in evaluation mode, on the CPU.

    Args:
        file: as `write_model` wrote it.
        method: the class of a method that fedsynth does not know by name.

    Raises:
        OutputError: the file is damaged, says no architecture, one that is not known here, or one
            that is another here: an encoder with other weights.
    """
    said, weights = _contents(file)
    if said.get("format") != FORMAT:
        raise OutputError(f"{file} does not say of which architecture its weights are")
    try:
        of = _stated(said, method)
        network = of.network()
        network.load_state_dict(weights)
        known = torch.tensor(json.loads(said["logits"]))
        found = torch.tensor(_probe(network, of.spec))
        close = CLOSE * max(1.0, float(known.abs().max()))
        same = known.shape == found.shape and torch.allclose(known, found, rtol=0.0, atol=close)
    except (FedsynthError, *DAMAGED) as error:
        raise OutputError(f"{file} cannot be used: {one_line(error, LONGEST)}") from None
    if not same:
        raise OutputError(
            f"{file} cannot be used: with these weights the network says something else of public "
            f"images here than where it was written{_blamed(of)}"
        )
    return network.eval()


def _contents(file: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            said = opened.metadata() or {}
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, *DAMAGED) as error:
        raise OutputError(f"{file} cannot be used: {one_line(error)}") from None
    return said, weights


def _blamed(of: Architecture) -> str:
    return f": {' and '.join(of.own)} must have other weights of its own here" if of.own else ""


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


def _stated(said: Mapping[str, str], method: type[Method] | None) -> Architecture:
    sections = json.loads(said["settings"])
    spec = spec_from_json(json.loads(said["spec"]))
    if "run" not in sections:
        return Architecture(spec, ModelSettings(**sections["model"]))
    known = as_recorded(sections, method)
    return Architecture(spec, run=resolve(known, own_method=method, own_data=spec.name))
