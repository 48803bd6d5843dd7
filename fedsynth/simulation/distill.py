"""One-shot distillation of models from files: the server step with models that were trained
elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from fedsynth.core.context import Notes, Reporter, RoundContext, Silent
from fedsynth.core.messages import ModelParameters
from fedsynth.data.files import one_line, read_tensors, save_tensors
from fedsynth.data.load import load_dataset
from fedsynth.data.registry import DatasetSpec, dataset_spec
from fedsynth.errors import (
    DataFilesCorruptError,
    DataFilesMissingError,
    OutputError,
    SettingError,
    UnknownNameError,
    unknown_value,
)
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.evaluation.generated import GENERATOR, in_words
from fedsynth.federation.context import resolve_device
from fedsynth.methods import method_class
from fedsynth.methods.shared.ensemble import DataFreeEnsembleDistillation, EnsembleState
from fedsynth.models.convnet import NORMS
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.models.weights import require_finite, restore


def distil_models(
    models: Sequence[nn.Module],
    student: nn.Module,
    method: DataFreeEnsembleDistillation,
    spec: DatasetSpec,
    seed: int = 0,
    reporter: Reporter | None = None,
) -> EnsembleState:
    """The student's state after one shot, and what the method measured (FedHydra: U).

    Args:
        models: trained classifiers, on the student's device.
        student: an untrained network; not changed.
        method: the method, with its settings.
        spec: the specification of the models' input images.
        seed: the seed of the generator and of all random draws.
        reporter: receives the progress.
    """
    context = one_shot_context(models, student, spec, seed, reporter)
    uploads = {
        client: ModelParameters(model.state_dict(), 1.0) for client, model in enumerate(models)
    }
    return method.server_step(EnsembleState(student.state_dict()), uploads, context)


def one_shot_context(
    models: Sequence[nn.Module],
    student: nn.Module,
    spec: DatasetSpec,
    seed: int = 0,
    reporter: Reporter | None = None,
) -> RoundContext:
    """Returns the context of a single round whose clients have these models."""
    return RoundContext(
        1,
        seed,
        next(student.parameters()).device,
        spec,
        student,
        1.0,
        clients=len(models),
        client_architectures=tuple(models),
        reporter=reporter or Silent(),
    )


def distil_files(
    files: Sequence[Path],
    architectures: Sequence[str],
    *,
    student: str,
    dataset: str,
    method: str,
    settings: Mapping[str, Any],
    size: tuple[int, int, str],
    seed: int,
    device: str,
    test_root: tuple[Path | None, bool],
    output: Path,
) -> Iterator[str]:
    """Reads the models, distils, writes the student; yields lines for people.

    Raises:
        SettingError: a method that needs data, or numbers of files and architectures that do not
            fit.
        DataFilesMissingError, DataFilesCorruptError: a file that is not there, or is not a model of
            its architecture.
        OutputError: the student cannot be written, or its training has diverged.
    """
    spec = dataset_spec(dataset)
    torch_device = resolve_device(device)
    kind = method_class(method)
    if not issubclass(kind, DataFreeEnsembleDistillation):
        raise SettingError(
            "run", "method", "cannot distil without data: use fedhydra or dense", value=method
        )
    chosen = kind.from_mapping(settings)
    if not files:
        raise SettingError(None, "files", "must name at least one model file")
    names = list(architectures) * len(files) if len(architectures) == 1 else list(architectures)
    if len(names) != len(files):
        reason = (
            f"must be one name for all {len(files)} model files, or one each; got "
            f"{len(architectures)}"
        )
        raise SettingError(None, "architectures", reason)
    models = [
        _read(file, _network(name, size, spec, seed)).to(torch_device).eval()
        for file, name in zip(files, names, strict=True)
    ]
    network = _network(student, size, spec, seed).to(torch_device)
    notes = Notes()
    state = distil_models(models, network, chosen, spec, seed, notes)
    yield from notes.lines
    facts = chosen.facts(state, one_shot_context(models, network, spec, seed))
    if GENERATOR in facts:
        yield f"generated: {in_words(facts[GENERATOR])}"
    network.load_state_dict(dict(state.parameters))
    require_finite(network)
    if test_root[1]:
        _, test = load_dataset(dataset, test_root[0])
        test = test.to(torch_device)
        for file, model in zip(files, models, strict=True):
            yield f"{file}: test accuracy {100 * accuracy(model, test):.2f} %"
        yield f"student: test accuracy {100 * accuracy(network, test):.2f} %"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(network.state_dict(), output, {})
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write {output}: {error}") from None
    yield f"student: {output}"


def _network(name: str, size: tuple[int, int, str], spec: DatasetSpec, seed: int) -> nn.Module:
    width, depth, norm = size
    default_norm = ModelSettings(name).norm
    if norm and norm not in NORMS:
        raise unknown_value("model", "norm", norm, NORMS)
    try:
        settings = ModelSettings(name, width, depth, norm or default_norm)
    except UnknownNameError:  # this architecture has no such norm: its own
        settings = ModelSettings(name, width, depth, default_norm)
    return build_model(settings, spec.image_shape, spec.classes, seed)


def _read(file: Path, network: nn.Module) -> nn.Module:
    if not file.is_file():
        raise DataFilesMissingError(f"the model file {file} does not exist")
    try:
        restore(network, read_tensors(file)[0])
    except (OSError, ValueError) as error:
        raise DataFilesCorruptError(
            f"{file} is not a model of this architecture: {one_line(error, 300)}"
        ) from None
    return network
