"""The model that a run left: from its folder, from a set that was handed over with it, or from a
file that says its architecture."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedsynth.config_file import read_sections
from fedsynth.core.method import Method
from fedsynth.data.files import one_line
from fedsynth.data.registry import DatasetSpec, dataset_spec
from fedsynth.data.shared_set import SUMS, check_hashes
from fedsynth.errors import OutputError
from fedsynth.features.registry import register_file
from fedsynth.federation.outputs.architecture import RunsModel
from fedsynth.federation.outputs.model_file import read_model, spec_of_file
from fedsynth.federation.outputs.run_files import read_start
from fedsynth.federation.outputs.run_folder import CONFIG, MODEL, PRIVATE_START
from fedsynth.federation.terms.resolve import resolve
from fedsynth.models.registry import register_model_file


def load_model(
    source: str | Path,
    *,
    spec: DatasetSpec | None = None,
    method: type[Method] | None = None,
    model: str = "",
    features: str = "",
) -> nn.Module:
    """A model that was left or handed over, in evaluation mode, on the CPU: from normalised images
    to logits. FedStats' has its feature map, and can teach (`train_student(…, teacher=…)`).

    Args:
        source: the folder of a finished run; a folder that was handed over with the run's model
            (`export_run(…, with_model=True)`), whose hashes are compared; or a file that
            `fedsynth student` wrote.
        spec: of the data set; needed of a run on your own images without differential privacy,
            whose folder does not say it (`ImageData.spec`).
        method: the class of a method that fedsynth does not know by name.
        model, features: `FILE.py:NAME` of an architecture or a feature map of somebody's own,
            which the model was made with; the files are executed.

    Raises:
        OutputError: there is no model, it is damaged or of another architecture, or `spec` is
            missing.
        DataFilesCorruptError: a file of the set is another than when it was written.
        FedsynthError, PrivacyError: its settings name something that this process does not know,
            and neither `model` nor `features` says.

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
    place = Path(source)
    if place.is_file():
        return read_model(place, method)
    if (place / SUMS).is_file():
        return _of_set(place, method)
    if not (place / MODEL).is_file():
        raise OutputError(
            f"{place} is no folder of a finished run, no set that was handed over, and no model's "
            "file"
        )
    return model_of_run(place, spec, method)[0]


def images_of_model(source: Path) -> DatasetSpec | None:
    """Of which images the model says that it is; None: a run on images of your own without
    differential privacy does not say it.

    Args:
        source: as `load_model` takes it.

    Raises:
        OutputError: what says so is damaged.
    """
    if source.is_file():
        return spec_of_file(source)
    if (source / SUMS).is_file():
        return spec_of_file(source / MODEL)
    if (source / PRIVATE_START).exists():
        return read_start(source, None)[2]
    data = read_sections(source / CONFIG).get("data", {})
    return None if "folder" in data else dataset_spec(str(data["dataset"]))


def model_of_run(
    folder: Path, spec: DatasetSpec | None, method: type[Method] | None
) -> tuple[nn.Module, RunsModel]:
    """The model of a run's folder, and what it is; see `load_model`."""
    if not (folder / MODEL).is_file():
        raise OutputError(f"{folder} is no folder of a finished run: it has no {MODEL}")
    made = _architecture(folder, spec, method)
    network = made.network()
    try:
        network.load_state_dict(load_file(folder / MODEL))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise OutputError(f"{folder / MODEL} cannot be used: {one_line(error)}") from None
    return network.eval(), made


def _of_set(folder: Path, method: type[Method] | None) -> nn.Module:
    if not (folder / MODEL).is_file():
        raise OutputError(
            f"{folder} was handed over without the run's model: whoever exported it can add it"
        )
    check_hashes(folder)
    return read_model(folder / MODEL, method)


def _architecture(folder: Path, spec: DatasetSpec | None, method: type[Method] | None) -> RunsModel:
    if (folder / PRIVATE_START).exists():
        _, settings, stated = read_start(folder, method)
        return RunsModel(spec or stated, settings)
    if not (folder / CONFIG).is_file():
        raise OutputError(f"{folder} is no folder of a finished run: it has no {CONFIG}")
    sections = read_sections(folder / CONFIG)
    own = None if spec is None else spec.name
    settings = resolve(sections, own_method=method, own_data=own)
    if spec is None and settings.folder is not None:
        raise OutputError(
            f"the run in {folder} was on images of your own, whose form it does not say: give "
            "spec=, of the same images (`load_folder(…).train.spec`)"
        )
    return RunsModel(spec or dataset_spec(settings.dataset), settings)
