"""Reads and writes models in safetensors files.

A model comes from a run, from an exported synthetic set, or from a student's training. The file
states the architecture in its metadata. Such files are untrusted input: reading them executes no
code, and custom models and feature maps must be registered by the reader.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.core.capabilities import ImagesAtEnd, OwnNetwork, network_of
from fedsynth.core.method import Method
from fedsynth.data.files import read_tensors, save_tensors
from fedsynth.data.images import normalise, to_stored
from fedsynth.data.registry import DatasetSpec, spec_from_json
from fedsynth.data.shared_set import SUMS, check_hashes
from fedsynth.errors import HOSTILE, FedsynthError, OutputError, one_line, writing
from fedsynth.features.registry import is_own_features, register_file
from fedsynth.files import decode_json
from fedsynth.methods import METHODS
from fedsynth.models import registry
from fedsynth.models.flat import restore
from fedsynth.results.file_names import MODEL
from fedsynth.seeding import torch_generator

FORMAT = "fedsynth model 1"
PROBES = 4
# The tolerance for comparing log-probabilities, relative to the largest of them. It is larger than
# the rounding differences between devices and versions of torch, and smaller than the effect of
# different weights.
TOLERANCE = 0.02

MAX_REASON = 400
TRUE = json.dumps(True)
# The errors that reading the metadata of a damaged file may raise.
UNUSABLE = (FedsynthError, RuntimeError, *HOSTILE)


@dataclass(frozen=True)
class Architecture:
    """A network's architecture, without its weights.

    Args:
        spec: the specification of the network's input images.
        model: the model settings.
        run: the settings of a run whose method builds the network, for example on a feature map.
            None if `model` determines the network.
    """

    spec: DatasetSpec
    model: registry.ModelSettings
    run: RunSettings | None = None

    @property
    def teaches(self) -> bool:
        """True if the model can label images to train a student model.

        A model that learned only from the synthetic images cannot be a teacher.
        """
        return self.run is not None and isinstance(self.run.method, ImagesAtEnd)

    def network(self, seed: int = 0) -> nn.Module:
        """Builds the untrained network, on the CPU."""
        if self.run is None:
            return registry.build_network(self.model, self.spec, seed)
        return network_of(self.run.method, self.model, self.spec, seed)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the feature maps that the network uses."""
        if self.run is not None:
            return self.run.feature_names
        return (self.model.features,) if self.model.features else ()

    @property
    def takes_model(self) -> bool:
        """True unless the method builds its own network."""
        return self.run is None or not isinstance(self.run.method, OwnNetwork)

    @property
    def custom_parts(self) -> dict[str, str]:
        """The names of custom code in the network: model, feature map and method.

        The keys are "model", "features" and "method". A part that is not custom has no entry.
        """
        names = {name: "features" for name in self.features if is_own_features(name)}
        if self.takes_model and registry.is_own_model(self.model):
            names[self.model.name] = "model"
        if self.run is not None and self.run.method.name not in METHODS:
            names[self.run.method.name] = "method"
        return {part: name for name, part in names.items()}

    def sections(self) -> dict[str, dict[str, Any]]:
        """Returns the settings that determine the network, grouped by section.

        Paths, privacy settings and partition settings are not included.
        """
        sections: dict[str, dict[str, Any]] = {"model": asdict(self.model)}
        if self.run is not None:
            sections = _network_sections(self.run.to_mapping())
        sections["model"].pop("weights", None)  # a local path, and they are in the model's file
        return sections

    def count(self) -> int | None:
        """Computes the network's parameter count from the settings, without building the network.

        Returns None if this is not possible.
        """
        if self.custom_parts or self.features or not self.takes_model:
            return None
        with torch.device("meta"):
            return registry.parameter_count(self.network())

    def to_metadata(self) -> dict[str, str]:
        """Converts the architecture to text entries for a model file's metadata.

        `from_metadata` reads these entries.
        """
        return {
            "format": FORMAT,
            "teaches": json.dumps(self.teaches),
            "settings": json.dumps(self.sections(), sort_keys=True),
            "spec": json.dumps(replace(self.spec, source="").to_json(), sort_keys=True),
        }

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, str], method: type[Method] | None, parameters: int
    ) -> Architecture:
        """Reads the architecture from a model file's metadata.

        Args:
            metadata: the file's metadata.
            method: the class of a custom method.
            parameters: the number of values in the file. A network with more parameters is refused.

        Raises:
            OutputError: the network has more parameters than the file.
            UNUSABLE: the settings are invalid or contain an unknown name.
        """
        sections = decode_json(metadata["settings"])
        spec = spec_from_json(decode_json(metadata["spec"]))
        if math.prod(spec.image_shape) * spec.classes > registry.MAX_PARAMETERS:
            raise OutputError(
                f"{spec.classes} classes with images of shape {spec.image_shape} exceed the limit "
                f"of {registry.MAX_PARAMETERS:,} values"
            )
        if "run" in sections:
            run = resolve(_network_sections(sections), own_method=method, own_data=spec.name)
            architecture = cls(spec, run.model, run)
        else:
            architecture = cls(spec, registry.ModelSettings(**sections["model"]))
        count = architecture.count() or 0
        if count > parameters:
            raise OutputError(f"the network needs {count:,} parameters, got only {parameters:,}")
        return architecture


def _network_sections(sections: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Selects the settings that determine a run's network."""
    names = ("method", "method_source")
    run = {key: value for key, value in sections["run"].items() if key in names}
    return {"run": run, "method": sections.get("method", {}), "model": sections["model"]}


# ----------------------------------------------------------------------------------------- files


def write_model(file: Path, network: nn.Module, architecture: Architecture, **facts: str) -> None:
    """Writes a network's weights and architecture to a file.

    The file also contains the network's outputs for public images, so that `read_model` can check
    that it rebuilt the same network.

    Args:
        file: the file to write.
        network: the network with its weights.
        architecture: the architecture of the network.
        facts: additional metadata.

    Raises:
        OutputError: the file cannot be written.
    """
    logits = json.dumps(_probe(network, architecture.spec))
    metadata = {**facts, "logits": logits, **architecture.to_metadata()}
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(network.state_dict(), file, metadata)


def teaches(file: Path) -> bool:
    """Returns True if a saved model can label images to train a student model.

    The file's metadata contain the value of `Architecture.teaches`.

    Raises:
        OutputError: the file is damaged.
    """
    return _read(file)[1].get("teaches") == TRUE


def read_model(file: Path, method: type[Method] | None) -> tuple[nn.Module, Architecture]:
    """Reads a model and its architecture from a file written by `write_model`.

    The model is in evaluation mode, on the CPU.

    Args:
        file: the file.
        method: the class of a custom method.

    Raises:
        OutputError: the file is damaged, or the file states no architecture or one that is not
            known here. Or a part of the network that is not in the file, such as an encoder, has
            different weights on this machine than when the file was written.
    """
    weights, metadata = _read(file)
    if metadata.get("format") != FORMAT:
        raise OutputError(f"{file} contains no model's architecture. Name a model file")
    try:
        parameters = sum(map(Tensor.numel, weights.values()))
        architecture = Architecture.from_metadata(metadata, method, parameters)
        network = architecture.network()
        restore(network, weights)
        same = computes(network, architecture.spec, metadata["logits"])
    except UNUSABLE as error:
        raise OutputError(f"{file} cannot be used: {one_line(error, MAX_REASON)}") from None
    if not same:
        parts = " and ".join(architecture.custom_parts.values()) or "the network"
        raise OutputError(
            f"{file} cannot be used: the rebuilt network does not compute the outputs that the "
            f"file contains. Restore the original code and weights of {parts}"
        ).with_code("files.model")
    return network.eval(), architecture


def computes(network: nn.Module, spec: DatasetSpec, logits: str) -> bool:
    """Returns True if a network reproduces the outputs stored in a model file's metadata.

    Args:
        network: the network.
        spec: the specification of the network's input images.
        logits: the entry "logits" of the metadata.
    """
    expected = torch.tensor(decode_json(logits))
    actual = torch.tensor(_probe(network, spec))
    atol = TOLERANCE * max(1.0, float(expected.abs().max()))
    return expected.shape == actual.shape and torch.allclose(expected, actual, 0.0, atol)


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        return read_tensors(file)
    except (OSError, ValueError) as error:
        raise OutputError(f"{file} cannot be used: {one_line(error)}") from None


def _probe(network: nn.Module, spec: DatasetSpec) -> list[list[float]]:
    """Returns a network's rounded log-probabilities for fixed random images.

    They are compared later to identify the network. In segmentation, logits are averaged over
    pixels.
    """
    images = torch.rand(PROBES, *spec.image_shape, generator=torch_generator(0, "model's probe"))
    mode = network.training
    network.eval()
    with torch.no_grad():
        pixels = to_stored(images, spec)
        device = next(iter(network.state_dict().values())).device
        logits = network(normalise(pixels, spec).to(device)).float().cpu()
    logits = logits.flatten(2).mean(dim=2) if spec.has_masks else logits
    network.train(mode)
    rounded: list[list[float]] = logits.log_softmax(dim=1).mul(1000).round().div(1000).tolist()
    return rounded


# ------------------------------------------------------------------------------ files and folders


def load_model(
    source: str | Path,
    *,
    method: type[Method] | None = None,
    model: str = "",
    features: str = "",
) -> nn.Module:
    """Loads a saved or exported model, which maps normalised images to logits.

    The model is in evaluation mode, on the CPU. The model of a FedStats run includes its feature
    map, and can teach a student (`train_student(…, teacher=…)`).

    Args:
        source: the folder of a finished run, a folder exported with the run's model (`export_run(…,
            with_model=True)`), or a file that `fedsynth student` wrote. The hashes in an exported
            folder are checked.
        method: the class of the run's method, if fedsynth does not know the method by name.
        model, features: the `FILE.py:NAME` of a custom architecture or feature map with which the
            model was made. These files are executed.

    Raises:
        OutputError: there is no model, the model is damaged, or its settings contain a name that
            is not known here, and that neither `model` nor `features` defines.
        DataFilesCorruptError: a file in the exported folder has changed since it was written.

    >>> import tempfile
    >>> from fedsynth import FedStats, RunSettings, simulate
    >>> result = simulate(RunSettings(FedStats(), rounds=1), output=tempfile.mkdtemp())
    >>> len(load_model(result.folder).state_dict()) == len(result.model.state_dict())
    True
    """
    if model:
        registry.register_model_file(model)
    if features:
        register_file(features, "model")
    return model_in(Path(source), method)[0]


def model_in(source: Path, method: type[Method] | None = None) -> tuple[nn.Module, Architecture]:
    """Returns a saved or exported model, and its architecture. See `load_model`."""
    if source.is_file():
        return read_model(source, method)
    if not (source / MODEL).is_file():
        raise OutputError(
            f"{source} is not a model file, a finished run's folder or an export with a model "
            "(--with-model). Name one of them"
        ).with_code("files.model")
    if (source / SUMS).is_file():
        check_hashes(source)
    return read_model(source / MODEL, method)
