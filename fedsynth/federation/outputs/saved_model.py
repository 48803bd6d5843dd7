"""The model that a finished run left, from its folder."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedsynth.config_file import read_sections
from fedsynth.core.method import Method
from fedsynth.data.files import one_line
from fedsynth.data.registry import DatasetSpec, dataset_spec
from fedsynth.errors import OutputError
from fedsynth.federation.outputs.run_files import read_start
from fedsynth.federation.outputs.run_folder import MODEL, PRIVATE_START
from fedsynth.federation.terms.recorded import as_recorded
from fedsynth.federation.terms.resolve import resolve
from fedsynth.federation.terms.settings import RunSettings


def load_model(
    run: str | Path, *, spec: DatasetSpec | None = None, method: type[Method] | None = None
) -> nn.Module:
    """The model of a finished run, in evaluation mode, on the CPU: from normalised images to
    logits. FedStats' has its feature map, and can teach (`train_student(…, teacher=…)`).

    Args:
        run: the run's folder.
        spec: of the data set; needed of a run on your own images without differential privacy,
            whose folder does not say it (`ImageData.spec`).
        method: the class of a method that fedsynth does not know by name.

    Raises:
        OutputError: the folder is none of a finished run, its model is damaged or of another
            architecture, or `spec` is missing.
        FedsynthError, PrivacyError: its settings name something that this process does not know: a
            model or feature map of your own has to be registered first.

    >>> import tempfile
    >>> from fedsynth import FedStats, RunSettings, simulate
    >>> result = simulate(RunSettings(FedStats(), rounds=1), output=tempfile.mkdtemp())
    >>> len(load_model(result.folder).state_dict()) == len(result.model.state_dict())
    True
    """
    folder = Path(run)
    if not (folder / MODEL).is_file():
        raise OutputError(f"{folder} is no folder of a finished run: it has no {MODEL}")
    settings, known = _settings(folder, spec, method)
    network = settings.method.network(settings.model, known, settings.seed)
    try:
        network.load_state_dict(load_file(folder / MODEL))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise OutputError(f"{folder / MODEL} cannot be used: {one_line(error)}") from None
    return network.eval()


def _settings(
    folder: Path, spec: DatasetSpec | None, method: type[Method] | None
) -> tuple[RunSettings, DatasetSpec]:
    if (folder / PRIVATE_START).exists():
        _, settings, stated = read_start(folder, method)
        return settings, spec or stated
    sections = as_recorded(read_sections(folder / "config.toml"), method)
    own = None if spec is None else spec.name
    settings = resolve(sections, own_method=method, own_data=own)
    if spec is None and settings.folder is not None:
        raise OutputError(
            f"the run in {folder} was on images of your own, whose form it does not say: give "
            "spec=, of the same images (`load_folder(…).train.spec`)"
        )
    return settings, spec or dataset_spec(settings.dataset)
