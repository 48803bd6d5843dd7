"""Models in safetensors files: of a run, of an exported synthetic set, or of a student.

A standalone file states the architecture in its metadata. Such files are untrusted input: nothing
in them is executed, and the reader has to register custom models and feature maps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.core.method import Method
from fedsynth.data.files import one_line, read_tensors, save_tensors
from fedsynth.data.images import normalise
from fedsynth.data.registry import DatasetSpec, dataset_spec, spec_from_json
from fedsynth.data.shared_set import SUMS, check_hashes
from fedsynth.errors import FedsynthError, OutputError
from fedsynth.features.registry import is_own_features, register_file
from fedsynth.methods import METHODS
from fedsynth.models.flat import restore
from fedsynth.models.registry import (
    MAX_PARAMETERS,
    ModelSettings,
    build_network,
    count_parameters,
    is_own_model,
    register_model_file,
)
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.files import decode_json
from fedsynth.privacy.report.file import HOSTILE
from fedsynth.results.private_run import read_start
from fedsynth.results.run_folder import CONFIG, MODEL, PRIVATE_START
from fedsynth.seeding import torch_generator
from fedsynth.toml_file import read_sections

FORMAT = "fedsynth model 1"
PROBES = 4
TOLERANCE = 0.02
"""Relative to the largest log-probability: larger than the rounding differences between devices and
versions of torch, smaller than the effect of other weights.
"""
MAX_REASON = 400
TRUE = json.dumps(True)
UNUSABLE = (FedsynthError, PrivacyError, RuntimeError, *HOSTILE)
"""Errors that the metadata of a damaged file may raise."""


@dataclass(frozen=True)
class Architecture:
    """A network without its weights.

    Args:
        spec: the specification of its input images.
        model: the model settings.
        run: the settings of a run whose method makes the network, for example on a feature map;
            None: `model` determines the network.
    """

    spec: DatasetSpec
    model: ModelSettings
    run: RunSettings | None = None

    @property
    def teaches(self) -> bool:
        """Returns whether the model learned from more than synthetic images, and so can label
        others.
        """
        return self.run is not None and not self.run.method.learns_from_images

    def network(self, seed: int = 0) -> nn.Module:
        """Returns the untrained network, on the CPU."""
        if self.run is None:
            return build_network(self.model, self.spec, seed)
        return self.run.method.network(self.model, self.spec, seed)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of its feature maps."""
        if self.run is not None:
            return self.run.feature_names
        return (self.model.features,) if self.model.features else ()

    @property
    def takes_model(self) -> bool:
        """True if the model settings determine the network."""
        return self.run is None or self.run.method.takes_model

    @property
    def custom_parts(self) -> dict[str, str]:
        """The names of custom parts, by "model", "features" and "method"."""
        names = {name: "features" for name in self.features if is_own_features(name)}
        if self.takes_model and is_own_model(self.model):
            names[self.model.name] = "model"
        if self.run is not None and self.run.method.name not in METHODS:
            names[self.run.method.name] = "method"
        return {part: name for name, part in names.items()}

    def sections(self) -> dict[str, dict[str, Any]]:
        """Returns the settings that determine the network: no paths, no privacy, no partition."""
        if self.run is None:
            return {"model": asdict(self.model)}
        return _network_sections(self.run.to_mapping())

    def count(self) -> int | None:
        """Returns the number of parameters without building the network, or None if it has to be
        built for that.
        """
        if self.custom_parts or self.features or not self.takes_model:
            return None
        return count_parameters(self.model, self.spec.image_shape, self.spec.classes)

    def to_metadata(self) -> dict[str, str]:
        """Returns the architecture as a file's metadata; `from_metadata` is the inverse."""
        return {
            "settings": json.dumps(self.sections(), sort_keys=True),
            "spec": json.dumps(asdict(replace(self.spec, source="")), sort_keys=True),
        }

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, str], method: type[Method] | None, parameters: int
    ) -> Architecture:
        """Returns the architecture that a file states.

        Args:
            metadata: the file's metadata.
            method: the class of a custom method.
            parameters: the count of numbers in the file; a larger network is refused.

        Raises:
            OutputError: the network is larger than the file.
            UNUSABLE: the settings are invalid, or name something unknown.
        """
        sections = decode_json(metadata["settings"])
        spec = spec_from_json(decode_json(metadata["spec"]))
        if math.prod(spec.image_shape) * spec.classes > MAX_PARAMETERS:
            raise OutputError("it has too many images or classes")
        if "run" in sections:
            settings = _network_sections(sections)
            run = resolve(settings, own_method=method, own_data=spec.name)
            architecture = cls(spec, run.model, run)
        else:
            architecture = cls(spec, ModelSettings(**sections["model"]))
        count = architecture.count() or 0
        if count > parameters:
            raise OutputError(
                f"its network has {count:,} parameters, but the file has {parameters:,}"
            )
        return architecture


def _network_sections(sections: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the settings of a run that determine its network."""
    names = ("method", "method_source")
    run = {key: value for key, value in sections["run"].items() if key in names}
    return {"run": run, "method": sections.get("method", {}), "model": sections["model"]}


# ----------------------------------------------------------------------------------------- files


def write_model(
    file: Path,
    network: nn.Module,
    architecture: Architecture,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Writes weights, architecture, and logits on public images that identify the network.

    Args:
        file: the file to write.
        network: the network with its weights.
        architecture: the network's.
        facts: additional metadata.

    Raises:
        OutputError: the file cannot be written.
    """
    metadata = {
        **(facts or {}),
        "format": FORMAT,
        "teaches": json.dumps(architecture.teaches),
        "logits": json.dumps(_probe(network, architecture.spec)),
        **architecture.to_metadata(),
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(network.state_dict(), file, metadata)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write {file}: {one_line(error)}") from None


def teaches(file: Path) -> bool:
    """Returns whether a file states that its model can teach (`Architecture.teaches`).

    Raises:
        OutputError: the file is damaged.
    """
    return _read(file)[1].get("teaches") == TRUE


def read_model(file: Path, method: type[Method] | None = None) -> nn.Module:
    """Returns the model of a file that `write_model` wrote, in evaluation mode, on the CPU.

    Args:
        file: the file.
        method: the class of a custom method.

    Raises:
        OutputError: the file is damaged, states no architecture, one that is not known here, or one
            that is different here: an encoder with other weights.
    """
    weights, metadata = _read(file)
    if metadata.get("format") != FORMAT:
        raise OutputError(f"{file} does not name the architecture of its weights")
    try:
        parameters = sum(tensor.numel() for tensor in weights.values())
        architecture = Architecture.from_metadata(metadata, method, parameters)
        network = architecture.network()
        restore(network, weights)
        expected = torch.tensor(decode_json(metadata["logits"]))
        actual = torch.tensor(_probe(network, architecture.spec))
        atol = TOLERANCE * max(1.0, float(expected.abs().max()))
        same = expected.shape == actual.shape and torch.allclose(expected, actual, 0.0, atol)
    except UNUSABLE as error:
        raise OutputError(f"{file} cannot be used: {one_line(error, MAX_REASON)}") from None
    if not same:
        parts = " and ".join(architecture.custom_parts.values()) or "a part of it"
        raise OutputError(
            f"{file} cannot be used: with these weights the network returns other outputs "
            f"for public images than when the file was written: {parts} must have other built-in "
            "weights on this machine"
        )
    return network.eval()


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        return read_tensors(file)
    except (OSError, ValueError) as error:
        raise OutputError(f"{file} cannot be used: {one_line(error)}") from None


def _probe(network: nn.Module, spec: DatasetSpec) -> list[list[float]]:
    """Returns rounded log-probabilities of public images, which identify a network."""
    images = torch.rand(PROBES, *spec.image_shape, generator=torch_generator(0, "model's probe"))
    mode = network.training
    network.eval()
    with torch.no_grad():
        pixels = (images * 255).round().to(torch.uint8)
        device = next(iter(network.state_dict().values())).device
        logits = network(normalise(pixels, spec).to(device)).float().cpu()
    network.train(mode)
    rounded: list[list[float]] = logits.log_softmax(dim=1).mul(1000).round().div(1000).tolist()
    return rounded


# ------------------------------------------------------------------------------ files and folders


def load_model(
    source: str | Path,
    *,
    spec: DatasetSpec | None = None,
    method: type[Method] | None = None,
    model: str = "",
    features: str = "",
) -> nn.Module:
    """Loads a saved or exported model, in evaluation mode, on the CPU: from normalised images to
    logits. FedStats' model includes its feature map, and can teach (`train_student(…, teacher=…)`).

    Args:
        source: the folder of a finished run; a folder exported with the run's model
            (`export_run(…, with_model=True)`), whose hashes are checked; or a file that
            `fedsynth student` wrote.
        spec: of the data set; needed for a run on custom images without differential privacy,
            whose folder does not state it (`ImageData.spec`).
        method: the class of a method that fedsynth does not know by name.
        model, features: `FILE.py:NAME` of a custom architecture or feature map
            with which the model was made; the files are executed.

    Raises:
        OutputError: there is no model, it is damaged or of another architecture, or `spec` is
            missing.
        DataFilesCorruptError: a file of the set has changed since it was written.
        FedsynthError, PrivacyError: its settings name something that this process does not know,
            and neither `model` nor `features` gives it.

    >>> import tempfile
    >>> from fedsynth import FedStats, RunSettings, simulate
    >>> result = simulate(RunSettings(FedStats(), rounds=1), output=tempfile.mkdtemp())
    >>> len(load_model(result.folder).state_dict()) == len(result.model.state_dict())
    True
    """
    if model:
        register_model_file(model)
    if features:
        register_file(features, "model")
    path = Path(source)
    if path.is_file():
        return read_model(path, method)
    if not (path / MODEL).is_file():
        raise OutputError(
            f"{path} is neither a model file, nor the folder of a finished run, nor a set that was "
            "exported with its run's model (--with-model)"
        )
    if (path / SUMS).is_file():
        check_hashes(path)
        return read_model(path / MODEL, method)
    return model_of_run(path, spec, method)[0]


def images_of_model(source: Path) -> DatasetSpec | None:
    """Returns the specification of a model's images, or None for a run on custom images without
    differential privacy, which does not state it.

    Args:
        source: as for `load_model`.

    Raises:
        OutputError: the file that states it is damaged.
    """
    if (source / SUMS).is_file():
        source = source / MODEL
    if source.is_file():
        try:
            return spec_from_json(decode_json(_read(source)[1]["spec"]))
        except UNUSABLE as error:
            raise OutputError(f"{source} cannot be used: {one_line(error, MAX_REASON)}") from None
    if (source / PRIVATE_START).exists():
        return read_start(source, None).spec
    data = read_sections(source / CONFIG).get("data", {})
    return None if "folder" in data else dataset_spec(str(data["dataset"]))


def model_of_run(
    folder: Path, spec: DatasetSpec | None, method: type[Method] | None
) -> tuple[nn.Module, Architecture]:
    """Returns the model of a run's folder and its architecture; see `load_model`."""
    if not (folder / MODEL).is_file():
        raise OutputError(f"{folder} is not the folder of a finished run: it has no {MODEL}")
    architecture = _architecture(folder, spec, method)
    network = architecture.network()
    try:
        restore(network, _read(folder / MODEL)[0])
    except ValueError as error:
        raise OutputError(f"{folder / MODEL} cannot be used: {one_line(error)}") from None
    return network.eval(), architecture


def _architecture(
    folder: Path, spec: DatasetSpec | None, method: type[Method] | None
) -> Architecture:
    if (folder / PRIVATE_START).exists():
        start = read_start(folder, method)
        return Architecture(spec or start.spec, start.settings.model, start.settings)
    sections = read_sections(folder / CONFIG)
    custom = None if spec is None else spec.name
    settings = resolve(sections, own_method=method, own_data=custom)
    if spec is None and settings.folder is not None:
        raise OutputError(
            f"the run in {folder} used your images, whose specification it does not contain: "
            "pass spec= of the same images (`load_folder(…).train.spec`)"
        )
    return Architecture(spec or dataset_spec(settings.dataset), settings.model, settings)
