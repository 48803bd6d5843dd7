"""Training of a network only on an exported synthetic set."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.data.load_folder import read_as
from fedsynth.data.registry import DatasetSpec
from fedsynth.data.shared_set import SUMS, SharedSet, load_synthetic
from fedsynth.errors import FedsynthError, OutputError, SettingError, unknown_value
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.federation.context import resolve_device
from fedsynth.models.flat import require_finite
from fedsynth.models.registry import ModelSettings, has_given_weights, own_model, usual_depth
from fedsynth.results.run_folder import MODEL
from fedsynth.results.saved_model import (
    Architecture,
    images_of_model,
    load_model,
    teaches,
    write_model,
)
from fedsynth.synthesizer.condensation.student import StudentSettings, train_student

AUTO, SOFT, HARD = "auto", "soft", "hard"
LABELS = (AUTO, SOFT, HARD)
NO_TEACHER = "none"


@dataclass(frozen=True, eq=False)
class Student:
    """A trained network, and the data and settings of its training.

    Attributes:
        network: the network in evaluation mode, which maps normalised images to logits.
        architecture: the architecture of the network.
        synthetic: the synthetic set.
        labels: "soft" or "hard".
        settings: the settings of the training.
        taught: True if a teacher labelled augmented copies.
        guaranteed: True if the set's guarantee holds for the network: only the set and its own
            model were used. It is False with other teachers and with initial weights of unknown
            origin. A custom class is trusted to have none.
    """

    network: nn.Module
    architecture: Architecture
    synthetic: SharedSet
    labels: str
    settings: StudentSettings
    taught: bool
    guaranteed: bool

    def save(self, file: str | Path) -> None:
        """Writes weights, architecture and the facts of the training, for `load_model`.

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
        write_model(require_place(Path(file)), self.network, self.architecture, facts)

    def accuracy_on(self, test: ImageData) -> float:
        """Returns the accuracy on test images, which may be on any device."""
        return accuracy(self.network, test.to(next(self.network.parameters()).device))


def require_place(file: Path) -> Path:
    """Refuses a path that is a folder, or a file that would change an exported synthetic set.

    Raises:
        OutputError: names it.
    """
    if file.is_dir():
        raise OutputError(f"{file} is a folder: name a file instead")
    if any((folder / SUMS).is_file() for folder in file.resolve().parents):
        raise OutputError(
            f"{file} would be inside a synthetic set, which lists the hashes of all its "
            "files: choose another folder"
        )
    return file


def student_of_set(
    folder: str | Path,
    model: ModelSettings | nn.Module | Callable[..., nn.Module] | None = None,
    student_settings: StudentSettings | None = None,
    *,
    labels: str = AUTO,
    teacher: str | Path | nn.Module = AUTO,
    device: str = "auto",
    report: Callable[[int, int], None] = lambda completed, total: None,
) -> Student:
    """Trains a network on an exported folder.

    Args:
        folder: an output of `export_run` or `synthesize`; its hashes are checked.
        model: the network: settings, or a custom module or class as in `RunSettings.model`. None:
            `network_for` the specification of the set.
        student_settings: the settings of the training; their seed also initialises the network.
            None: `StudentSettings()`.
        labels: "soft" for the labels stored with the images, "hard" for their classes, or "auto"
            for soft labels if there are any.
        teacher: the model that labels augmented copies of the images: a model, or a path for
            `load_model`; "auto" for the exported model of the set, if it was not trained on these
            images; "none" if copies have the label of their image.
        device: "auto", "cpu" or "cuda".
        report: called with the number of finished steps and the total.

    Raises:
        DataFilesMissingError, DataFilesCorruptError: there is no set, or it was changed.
        SettingError: soft labels of a set that has none, a network that cannot take its images, or
            a teacher of other images, or of classes with other names.
        UnknownNameError: other labels than those.
        DeviceError: no such device.
        OutputError: a teacher that cannot be read, or the training has diverged.

    >>> import tempfile
    >>> from fedsynth import StudentSettings, owner_settings, synthesize
    >>> settings = owner_settings({"model": {"width": 8}, "privacy": {"epsilon": 8}})  # digits
    >>> place = tempfile.mkdtemp()
    >>> run = synthesize(settings, f"{place}/share", runs=f"{place}/runs")
    >>> training = StudentSettings(steps=20, views=1)
    >>> student_of_set(f"{place}/share", ModelSettings("linear"), training).labels
    'hard'
    """
    student_settings = student_settings or StudentSettings()
    synthetic = load_synthetic(folder)
    if labels not in LABELS:
        raise unknown_value(None, "labels", labels, LABELS)
    if labels == SOFT and synthetic.soft_labels is None:
        raise SettingError(None, "labels", "cannot be soft: the set has no soft labels")
    kind, target = HARD, synthetic.labels
    if labels != HARD and synthetic.soft_labels is not None:
        kind, target = SOFT, synthetic.soft_labels
    torch_device = resolve_device(device)
    if model is None:
        model = network_for(synthetic.spec)
    if not isinstance(model, ModelSettings):
        model = own_model(model)
    architecture = Architecture(synthetic.spec, model)
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
        guaranteed=covered and not has_given_weights(model),
    )


def network_for(spec: DatasetSpec, **settings: Any) -> ModelSettings:
    """Returns the settings of a network for a set's images: a ConvNet of width 32 by default.

    Args:
        spec: the set's specification.
        settings: model settings that replace the defaults.

    >>> from fedsynth.data.registry import dataset_spec
    >>> network_for(dataset_spec("digits"), width=8).depth
    2
    """
    return ModelSettings(**{"width": 32, "depth": usual_depth(spec.image_shape), **settings})


def _teacher(
    folder: Path, named: str | Path | nn.Module, spec: DatasetSpec
) -> tuple[nn.Module | None, bool]:
    """Returns the teacher, if any, and whether the set's guarantee covers it."""
    if isinstance(named, nn.Module):
        return _fitting(named, "the teacher", spec), False
    model_of_set = folder / MODEL
    if str(named) == AUTO:
        named = NO_TEACHER
        if model_of_set.is_file() and teaches(model_of_set):
            named = model_of_set
    if str(named) == NO_TEACHER:
        return None, True
    place = Path(named)
    if place.resolve() in (folder.resolve(), model_of_set.resolve()):
        return _fitting(load_model(folder), str(folder), spec), True
    model = _fitting(load_model(place, spec=spec), str(place), spec)
    _refuse_other_images(place, spec)
    return model, False


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
        raise SettingError(None, "teacher", f"of {name} does not fit the images of the set")
    return model


def _refuse_other_images(place: Path, spec: DatasetSpec) -> None:
    """Refuses a teacher with other class names or normalisation constants than the set's, whose
    labels would be wrong.
    """
    other = images_of_model(place)
    if other is None:
        return
    if (other.class_names, other.mean, other.std) != (spec.class_names, spec.mean, spec.std):
        reason = (
            f"of {place} is for images of {other.name}, but the set has images of {spec.name}: "
            "the classes or normalisation constants differ"
        )
        raise SettingError(None, "teacher", reason)


def real_images(
    spec: DatasetSpec,
    *,
    folder: str | Path | None = None,
    skip_corrupt: bool = False,
    skip_other: bool = False,
    dataset: str | None = None,
    data_root: Path | None = None,
    download: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> ImageData | None:
    """Returns real test images: those of a folder, or the test images of a data set.

    Args:
        spec: the specification of the synthetic set, whose image size and classes are required.
        folder: a folder of CLASS/files; the images are resized.
        skip_corrupt, skip_other: as for `load_folder`.
        dataset: the name of a data set.
        data_root: the folder of the data sets.
        download: let torchvision download the data set.
        note: receives the names of skipped files.

    Returns:
        The images, or None if neither folder nor data set is named.

    Raises:
        SettingError: both are named, or a data set of other images.
        DataError: the files are missing or damaged, or of other classes.
    """
    if folder is not None and dataset is not None:
        raise SettingError("data", "dataset", "and data.test_folder are both set: use only one")
    if folder is not None:
        return read_as(Path(folder), spec, note, skip_corrupt=skip_corrupt, skip_other=skip_other)
    if dataset is None:
        return None
    loaded = load_dataset(dataset, data_root, download=download)[1]
    other = loaded.spec
    if (other.image_shape, other.class_names) != (spec.image_shape, spec.class_names):
        reason = "does not have the same image shape and classes as the synthetic set"
        raise SettingError("data", "dataset", reason, value=dataset)
    return ImageData(loaded.images, loaded.labels, spec)  # normalised as the synthetic ones are
