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

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from fedsynth.core.messages import DAMAGED
from fedsynth.core.method import Method
from fedsynth.data.files import one_line
from fedsynth.data.registry import DatasetSpec
from fedsynth.data.stated_spec import spec_from_json
from fedsynth.errors import FedsynthError, OutputError
from fedsynth.federation.terms.recorded import as_recorded
from fedsynth.federation.terms.resolve import resolve
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.models.registry import ModelSettings, build_network

FORMAT = "fedsynth model 1"


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

    def sections(self) -> dict[str, dict[str, Any]]:
        """Of the settings what the network follows from: no paths, no privacy, no partition."""
        if self.run is None:
            return {"model": asdict(self.model)}
        said = self.run.to_mapping()
        name = {"method": self.run.method.name}
        return {"run": name, "method": said.get("method", {}), "model": said["model"]}


def write_model(file: Path, network: nn.Module, of: Architecture) -> None:
    """Writes weights and architecture.

    Raises:
        OutputError: the file cannot be written.
    """
    spec = replace(of.spec, source="")
    said = {
        "format": FORMAT,
        "settings": json.dumps(of.sections(), sort_keys=True),
        "spec": json.dumps(asdict(spec), sort_keys=True),
    }
    weights = {name: value.cpu().contiguous() for name, value in network.state_dict().items()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(weights, file, metadata=said)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write {file}: {one_line(error)}") from None


def read_model(file: Path, method: type[Method] | None = None) -> nn.Module:
    """The model of a file, in evaluation mode, on the CPU.

    Args:
        file: as `write_model` wrote it.
        method: the class of a method that fedsynth does not know by name.

    Raises:
        OutputError: the file is damaged, says no architecture, or one that is not known here.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            said = opened.metadata() or {}
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, *DAMAGED) as error:
        raise OutputError(f"{file} cannot be used: {one_line(error)}") from None
    if said.get("format") != FORMAT:
        raise OutputError(f"{file} does not say of which architecture its weights are")
    try:
        network = _stated(said, method).network()
        network.load_state_dict(weights)
    except (FedsynthError, *DAMAGED) as error:
        raise OutputError(f"{file} cannot be used: {one_line(error)}") from None
    return network.eval()


def _stated(said: Mapping[str, str], method: type[Method] | None) -> Architecture:
    sections = json.loads(said["settings"])
    spec = spec_from_json(json.loads(said["spec"]))
    if "run" not in sections:
        return Architecture(spec, ModelSettings(**sections["model"]))
    known = as_recorded(sections, method)
    return Architecture(spec, run=resolve(known, own_method=method, own_data=spec.name))
