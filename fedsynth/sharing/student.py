"""Trains a student network on an exported synthetic set, or by distilling saved models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedsynth.config.resolve import resolve, take_encoder
from fedsynth.core.messages import ModelParameters
from fedsynth.data.declaration import FolderSettings
from fedsynth.data.files import TEST
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.data.own_data import read_as
from fedsynth.data.registry import DatasetSpec, is_known
from fedsynth.data.shared_set import SUMS, SharedSet, load_synthetic
from fedsynth.errors import FedsynthError, OutputError, SettingError, short_repr
from fedsynth.evaluation import GENERATOR
from fedsynth.evaluation.accuracy import accuracy, predict
from fedsynth.evaluation.classification import classification_measures
from fedsynth.evaluation.generated import format_facts
from fedsynth.features.encoding import EncoderSettings, encode, encoder_map, image_spec
from fedsynth.federation.context import public_context, resolve_device
from fedsynth.methods.shared.ensemble import DataFreeEnsembleDistillation, EnsembleState
from fedsynth.models import registry
from fedsynth.models.flat import require_finite
from fedsynth.results import saved_model
from fedsynth.results.file_names import MODEL
from fedsynth.synthesizer.condensation.student import (
    StudentSettings,
    settings_for,
    train_student,
)
from fedsynth.validation import check_choice

AUTO, SOFT, HARD = "auto", "soft", "hard"
LABELS = (AUTO, SOFT, HARD)
NO_TEACHER = "none"
_FACTS_OF_INPUTS = (
    "image_shape", "class_names", "mean", "std", "bounds", "encoder", "window", "slice", "features"
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Student:
    """A network that was trained on a synthetic set, with a description of the training.

    Attributes:
        network: the network in evaluation mode. It maps normalised images to logits.
        architecture: the architecture of the network.
        synthetic: the synthetic set.
        labels: the kind of labels with which the network was trained, "soft" or "hard".
        settings: the settings of the training.
        taught: True if a teacher labelled augmented copies of the images.
        guaranteed: True if the privacy guarantee of the set also holds for the network, because
            only the set and the model that was exported with the set were used. It is False if
            there was another teacher, or if the initial weights of the network were trained
            elsewhere. A custom class is trusted to have no trained weights.
    """

    network: nn.Module
    architecture: saved_model.Architecture
    synthetic: SharedSet
    labels: str
    settings: StudentSettings
    taught: bool
    guaranteed: bool

    def save(self, file: str | Path) -> None:
        """Writes the student's weights, architecture and training facts to a file.

        `load_model` reads the file.

        Raises:
            OutputError: the file cannot be written, or would be inside a synthetic set.
        """
        epsilon = delta = None
        if self.guaranteed:
            epsilon, delta = self.synthetic.epsilon, self.synthetic.delta
        facts = {
            "learned_from": f"{len(self.synthetic.labels)} images of {self.synthetic.spec.name}",
            "labels": self.labels,
            "training": json.dumps(asdict(self.settings)),
            "taught": json.dumps(self.taught),
            "epsilon": json.dumps(epsilon),
            "delta": json.dumps(delta),
        }
        saved_model.write_model(require_place(Path(file)), self.network, self.architecture, **facts)

    def measures_on(self, test: ImageData) -> dict[str, float | None]:
        """Computes the `accuracy` on test images, and the `classification_measures`."""
        test = test.to(next(self.network.parameters()).device)
        logits = predict(self.network, test)
        share = float((logits.argmax(dim=1) == test.labels).double().mean())
        return {"accuracy": share, **classification_measures(logits, test.labels)}


def require_place(file: Path) -> Path:
    """Checks that a model may be written to a path, and returns the path.

    Raises:
        OutputError: the path is a folder, or it is inside an exported synthetic set, which must not
            be changed.
    """
    if file.is_dir():
        raise OutputError(
            f"{file} is a folder, but the model needs a file name. Add a name such as model.pt"
        )
    if any((folder / SUMS).is_file() for folder in file.resolve().parents):
        raise OutputError(f"{file} is inside a synthetic set. Choose another folder for the model")
    return file


def student_of_set(
    folder: str | Path,
    model: registry.ModelSettings | nn.Module | Callable[..., nn.Module] | None = None,
    student_settings: StudentSettings | None = None,
    *,
    labels: str = AUTO,
    teacher: str | Path | nn.Module = AUTO,
    device: str = "auto",
    report: Callable[[int, int], None] = lambda completed, total: None,
) -> Student:
    """Trains a network on an exported synthetic set.

    Args:
        folder: the output of `export_run` or `synthesize`. The hashes of its files are checked.
        model: the network, as settings, or as a custom module or class as in `RunSettings.model`.
            None lets `network_for` choose a network for the images.
        student_settings: the settings of the training. Their seed also initialises the network.
            None uses `settings_for` the images.
        labels: "soft" for the labels stored with the images, "hard" for their classes, or "auto"
            for soft labels if there are any.
        teacher: the model that labels augmented copies of the images. It is a model or a path for
            `load_model`. "auto" uses the model that was exported with the set, unless it was
            trained on these images. "none" gives each copy the label of its image.
        device: "auto", "cpu" or "cuda".
        report: a function that receives the number of finished steps and the total number of steps.

    Raises:
        DataFilesMissingError, DataFilesCorruptError: there is no synthetic set in the folder, or
            the files of the set were changed.
        SettingError: soft labels are requested, but the set has no soft labels. Or the network
            cannot process the images, or the teacher was trained for other images or class names.
        UnknownNameError: `labels` is not "soft", "hard" or "auto".
        DeviceError: the device does not exist.
        OutputError: the teacher cannot be read, or the training has diverged.

    >>> import tempfile
    >>> from fedsynth import ModelSettings, StudentSettings, owner_settings, synthesize
    >>> settings = owner_settings({"model": {"width": 8}, "privacy": {"epsilon": 8}})  # digits
    >>> place = tempfile.mkdtemp()
    >>> run = synthesize(settings, f"{place}/share", runs=f"{place}/runs")
    >>> training = StudentSettings(steps=20, views=1)
    >>> student_of_set(f"{place}/share", ModelSettings("linear"), training).labels
    'hard'
    """
    synthetic = load_synthetic(folder)
    student_settings = student_settings or settings_for(synthetic.spec.image_shape)
    check_choice(None, "labels", labels, LABELS)
    if labels == SOFT and synthetic.soft_labels is None:
        reason = "must be 'hard' or 'auto', as the set contains no soft labels. Choose one of them"
        raise SettingError(None, "labels", reason)
    kind, target = HARD, synthetic.labels
    if labels != HARD and synthetic.soft_labels is not None:
        kind, target = SOFT, synthetic.soft_labels
    torch_device = resolve_device(device)
    if model is None:
        model = network_for(synthetic.spec)
    if not isinstance(model, registry.ModelSettings):
        model = registry.own_model(model)
    architecture = saved_model.Architecture(synthetic.spec, model)
    network = architecture.network(student_settings.seed).to(torch_device)
    if not student_settings.views:
        teacher = NO_TEACHER  # without copies it has nothing to label
    tutor, covered = _teacher(Path(folder), teacher, synthetic.spec)
    if tutor is not None:
        tutor = tutor.to(torch_device)
    train_student(
        network,
        synthetic.normalised().to(torch_device),
        target.to(torch_device),
        student_settings,
        teacher=tutor,
        report=report,
    )
    require_finite(network)
    return Student(
        network.eval(),
        architecture,
        synthetic,
        kind,
        student_settings,
        taught=tutor is not None,
        guaranteed=covered and not registry.has_given_weights(model),
    )


def network_for(spec: DatasetSpec, **settings: Any) -> registry.ModelSettings:
    """Returns network settings for a synthetic set's images.

    By default, the network is a ConvNet of width 32, or an MLP for vectors and time series.

    Args:
        spec: the specification of the set.
        settings: model settings that replace the default values.

    >>> from fedsynth.data.registry import dataset_spec
    >>> network_for(dataset_spec("digits"), width=8).depth
    2
    """
    defaults = registry.usual_model(spec.image_shape)
    if "name" not in defaults:
        defaults["width"] = 32
    return registry.ModelSettings(**{**defaults, **settings})


def _teacher(
    folder: Path, named: str | Path | nn.Module, spec: DatasetSpec
) -> tuple[nn.Module | None, bool]:
    """Loads a student's teacher model.

    Returns:
        The teacher, and True if the privacy guarantee of the set also holds for a student of this
        teacher. The teacher is None if there is no teacher.
    """
    if isinstance(named, nn.Module):
        return _fitting(named, "the teacher", spec), False
    model_of_set = folder / MODEL
    if str(named) == AUTO:
        named = NO_TEACHER
        if model_of_set.is_file() and saved_model.teaches(model_of_set):
            named = model_of_set
    if str(named) == NO_TEACHER:
        return None, True
    place = Path(named)
    covered = place.resolve() in (folder.resolve(), model_of_set.resolve())
    if covered:
        place = folder  # whose hashes are checked
    model, architecture = saved_model.model_in(place)
    _require_same_images("teacher", spec, place, architecture.spec)
    return model, covered


def _require_same_images(key: str, spec: DatasetSpec, place: Path, other: DatasetSpec) -> None:
    """Refuses a model whose image shape, classes or image scaling do not match.

    The labels of such a model would be wrong.
    """
    for name in _FACTS_OF_INPUTS:
        if getattr(other, name) != getattr(spec, name):
            value, fact = short_repr(getattr(spec, name)), name.replace("_", " ")
            reason = f"must have the {fact} {value} of {spec.name}, but the model in {place} has"
            mismatch = f"{short_repr(getattr(other, name))}, that of {other.name}"
            raise SettingError(None, key, f"{reason} {mismatch}. Choose another model")


def _fitting(model: nn.Module, name: str, spec: DatasetSpec) -> nn.Module:
    mode = model.training
    model.eval()
    device = next((tensor.device for tensor in model.state_dict().values()), "cpu")
    try:
        with torch.no_grad():
            logits = model(torch.zeros(2, *spec.image_shape, device=device))
    except (RuntimeError, FedsynthError):
        logits = torch.empty(0)
    model.train(mode)
    if logits.shape != (2, spec.classes):
        reason = (
            f"must map {spec.image_shape} images to {spec.classes} logits, but {name} does not. "
            "Choose another"
        )
        raise SettingError(None, "teacher", reason)
    return model


def real_images(
    spec: DatasetSpec,
    data: Mapping[str, Any],
    dataset: str | None = None,
    *,
    download: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> ImageData | None:
    """Loads real test images for models that were trained on a synthetic set.

    Args:
        spec: the specification of the synthetic set. The test images must have its image size and
            classes.
        data: settings of the section "data". `test_folder` is a folder of CLASS/files, whose images
            are resized, or a file. The window, slice and encoder are those of the set.
        dataset: the name of a data set.
        download: True lets torchvision download the data set.
        note: a function that receives the names of skipped files.

    Returns:
        The images, or None if neither a folder nor a data set is named.

    Raises:
        SettingError: both a folder and a data set are named, or the image shape or the classes of
            the data set differ from those of the synthetic set.
        DataError: files are missing or damaged, or the classes of the folder differ from those of
            the synthetic set.
    """
    data = dict(data)
    encoder, root = take_encoder(data), data.pop("data_root", None)
    folder = data.pop("test_folder", None)
    images = image_spec(spec)
    if folder is not None:
        if dataset is not None:
            raise SettingError(
                "data",
                "dataset",
                "and data.test_folder are both set. Remove one of them",
            )
        chosen = FolderSettings(folder, **data)
        return _encoded(read_as(chosen, images, note, TEST), spec, encoder)
    if dataset is None:
        return None
    loaded = load_dataset(dataset, root, download=download)[1]
    other = loaded.spec
    if (other.image_shape, other.class_names) != (images.image_shape, images.class_names):
        reason = (
            f"does not have the synthetic set's image shape {images.image_shape} and class "
            "names. Choose another data set"
        )
        raise SettingError("data", "dataset", reason, value=dataset)
    test = ImageData(loaded.images, loaded.labels, images)  # normalised as the synthetic ones are
    return _encoded(test, spec, encoder)


def _encoded(test: ImageData, spec: DatasetSpec, encoder: EncoderSettings | None) -> ImageData:
    """Replaces test images by vectors from a synthetic set's encoder.

    Images of a set without an encoder are returned unchanged.
    """
    if not spec.encoder:
        return test
    expected = spec.encoder.partition(": ")[0]
    if encoder is None:
        reason = (
            f"is not set, but the synthetic set contains vectors of {expected}. Set it to "
            f"{expected.partition('@')[0]}"
        )
        raise SettingError("data", "encoder", reason)
    features = encoder_map(encoder, test.spec)
    vectors = encode(test, features, torch.device("cpu"))
    if vectors.spec.encoder != spec.encoder:
        reason = (
            f"must be the synthetic set's encoder {expected}, got {features.name}. Use the set's "
            "encoder and weights"
        )
        raise SettingError("data", "encoder", reason)
    return replace(vectors, spec=spec)


def distil_files(
    files: Sequence[Path],
    student: str | None,
    sections: Mapping[str, Mapping[str, Any]],
    *,
    evaluate: bool,
    output: Path,
    report: Callable[[str, int, int], None] = lambda stage, completed, total: None,
) -> Iterator[str]:
    """Distils several models into one student network, and writes the student to a file.

    Yields lines of text that report the progress.

    Args:
        files: the models: files and folders as for `load_model`.
        student: the architecture of the student. None uses that of the first model.
        sections: the sections "run", "model" and "method" of settings, as for `resolve`, and
            "data", as for `real_images`. The settings of the model are those of the student.
        evaluate: True tests the models and the student on the data set.
        output: the file to which the student is written.
        report: receives the stage, the number of its finished steps and their total number.

    Raises:
        SettingError: the method needs data, or the models were trained for different images.
        OutputError: a model cannot be used, the student cannot be written, or its training has
            diverged.
    """
    notes: list[str] = []
    networks, architectures = zip(*map(saved_model.model_in, files), strict=True)
    first = architectures[0]
    spec = first.spec
    for file, architecture in zip(files, architectures, strict=True):
        _require_same_images("files", spec, file, architecture.spec)
    one_shot = {
        "run": {**sections["run"], "rounds": 1},
        "partition": {"clients": len(files)},
        "data": {"dataset": spec.name},
        "model": {**sections["model"], "name": student or first.model.name},
    }
    dataset = spec.name if evaluate else None
    test = real_images(spec, sections["data"], dataset, note=notes.append)
    own_data = None if is_known(spec.name) else spec.name
    settings = resolve({**sections, **one_shot}, own_data=own_data)
    method, device = settings.method, resolve_device(settings.device)
    if not isinstance(method, DataFreeEnsembleDistillation):
        reason = "does not support distillation without data. Use fedhydra or dense"
        raise SettingError("run", "method", reason, value=method.name)
    context = replace(
        public_context(settings, spec, device),
        note=notes.append,
        report=report,
        client_architectures=tuple(network.to(device) for network in networks),
    )
    uploads = {k: ModelParameters(model.state_dict(), 1.0) for k, model in enumerate(networks)}
    network = context.architecture.to(device)
    state = method.server_step(EnsembleState(network.state_dict()), uploads, context)
    yield from notes
    facts = method.facts(state, context)
    if GENERATOR in facts:
        yield f"generated: {format_facts(facts[GENERATOR])}"
    network.load_state_dict(dict(state.parameters))
    require_finite(network)
    if test is not None:
        test = test.to(device)
        for name, model in zip([*map(str, files), "student"], [*networks, network], strict=True):
            yield f"{name}: test accuracy {100 * accuracy(model, test):.2f} %"
    saved_model.write_model(output, network, saved_model.Architecture(spec, settings.model))
    yield f"student: {output}"
