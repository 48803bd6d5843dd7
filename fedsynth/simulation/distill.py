"""Distils models from files into a student in one step. The models were trained elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from fedsynth.core.context import Notes, RoundContext
from fedsynth.core.messages import ModelParameters
from fedsynth.data.files import one_line, read_tensors, save_tensors
from fedsynth.data.load import load_dataset
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import DataFilesCorruptError, DataFilesMissingError, OutputError, SettingError
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.evaluation.generated import GENERATOR, format_facts
from fedsynth.federation.context import resolve_device
from fedsynth.methods import method_class
from fedsynth.methods.shared.ensemble import DataFreeEnsembleDistillation, EnsembleState
from fedsynth.models.flat import require_finite, restore
from fedsynth.models.registry import ModelSettings, build_model


def distil_files(
    files: Sequence[Path],
    architectures: Sequence[str],
    *,
    student: str,
    dataset: str,
    method: str,
    settings: Mapping[str, Any],
    sizes: Mapping[str, Any],
    seed: int,
    device: str,
    data_root: Path | None,
    evaluate: bool,
    output: Path,
) -> Iterator[str]:
    """Reads models from files, distils them, and writes the student. Yields lines of text that
    report the progress.

    Args:
        files: the files of the models.
        architectures: one architecture for all models, or one for each model.
        student: the architecture of the student.
        dataset: the data set that defines the inputs and classes of the models.
        method: a method that distils without data.
        settings: the settings of the method.
        sizes: the model settings that all architectures share (width, depth, norm).
        seed: the seed of the generator and of all random draws.
        device: "auto", "cpu" or "cuda".
        data_root: the folder of the data sets.
        evaluate: whether to test the models and the student on the data set.
        output: the file for the student.

    Raises:
        SettingError: if the method needs data, or if the numbers of files and architectures differ.
        DataFilesMissingError, DataFilesCorruptError: if a file does not exist, or does not contain
            a model of its architecture.
        OutputError: if the student cannot be written, or if its training has diverged.
    """
    spec = dataset_spec(dataset)
    torch_device = resolve_device(device)
    kind = method_class(method)
    if not issubclass(kind, DataFreeEnsembleDistillation):
        reason = "cannot distil without data: use fedhydra or dense"
        raise SettingError("run", "method", reason, value=method)
    distillation = kind.from_mapping(settings)
    if not files:
        raise SettingError(None, "files", "must name at least one model file")
    if len(architectures) == 1:
        architectures = [*architectures] * len(files)
    if len(architectures) != len(files):
        reason = (
            f"must be one name for all {len(files)} model files, or one name for each file; got "
            f"{len(architectures)} names"
        )
        raise SettingError(None, "architectures", reason)

    def network_of(name: str) -> nn.Module:
        model = ModelSettings(name, **sizes)
        return build_model(model, spec.image_shape, spec.classes, seed)

    networks = []
    uploads = {}
    for number, (file, name) in enumerate(zip(files, architectures, strict=True)):
        model = _read(file, network_of(name)).to(torch_device).eval()
        networks.append(model)
        uploads[number] = ModelParameters(model.state_dict(), 1.0)
    network = network_of(student).to(torch_device)
    notes = Notes()
    context = RoundContext(
        1,
        seed,
        torch_device,
        spec,
        network,
        1.0,
        clients=len(uploads),
        client_architectures=tuple(networks),
        reporter=notes,
    )
    state = distillation.server_step(EnsembleState(network.state_dict()), uploads, context)
    yield from notes.lines
    facts = distillation.facts(state, context)
    if GENERATOR in facts:
        yield f"generated: {format_facts(facts[GENERATOR])}"
    network.load_state_dict(dict(state.parameters))
    require_finite(network)
    if evaluate:
        test = load_dataset(dataset, data_root)[1].to(torch_device)
        names = [*map(str, files), "student"]
        for name, model in zip(names, [*networks, network], strict=True):
            yield f"{name}: test accuracy {100 * accuracy(model, test):.2f} %"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(network.state_dict(), output, {})
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write {output}: {error}") from None
    yield f"student: {output}"


def _read(file: Path, network: nn.Module) -> nn.Module:
    if not file.is_file():
        raise DataFilesMissingError(f"the model file {file} does not exist")
    try:
        restore(network, read_tensors(file)[0])
    except (OSError, ValueError) as error:
        raise DataFilesCorruptError(
            f"{file} is not a model of the given architecture: {one_line(error, 300)}"
        ) from None
    return network
