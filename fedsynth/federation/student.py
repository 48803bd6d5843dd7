"""A network trained on a synthetic set that somebody handed over, and on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.data.load_folder import read_as
from fedsynth.data.registry import DatasetSpec
from fedsynth.data.shared_set import SharedSet, load_synthetic
from fedsynth.errors import OutputError, Setting, SettingError, Text, unknown_value
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.federation.outputs.model_file import Architecture, write_model
from fedsynth.federation.outputs.run_folder import MODEL
from fedsynth.federation.outputs.saved_model import load_model
from fedsynth.federation.terms.devices import resolve_device
from fedsynth.models.registry import ModelSettings, usual_depth
from fedsynth.synthesizer.condensation.student import StudentSettings, train_student

AUTO, SOFT, HARD = "auto", "soft", "hard"
LABELS = (AUTO, SOFT, HARD)
OWN, NOBODY = "auto", "none"


@dataclass(frozen=True, eq=False)
class Student:
    """A trained network, and what it learned from.

    Attributes:
        network: in evaluation mode, from normalised images to logits.
        architecture: what it is.
        found: the synthetic set; what is guaranteed of it holds of the network.
        labels: "soft" or "hard".
        taught: a teacher labelled changed copies.
    """

    network: nn.Module
    architecture: Architecture
    found: SharedSet
    labels: str
    taught: bool

    def save(self, file: str | Path) -> None:
        """Writes weights and architecture, for `load_model`.

        Raises:
            OutputError: the file cannot be written.
        """
        write_model(Path(file), self.network, self.architecture)

    def accuracy_on(self, test: ImageData) -> float:
        """The share of test images that it labels rightly; they may be on any device."""
        return accuracy(self.network, test.to(next(self.network.parameters()).device))


def student_of_set(
    folder: str | Path,
    model: ModelSettings | None = None,
    how: StudentSettings | None = None,
    *,
    labels: str = AUTO,
    teacher: str | Path = OWN,
    device: str = "auto",
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Student:
    """Trains a network on a folder that was handed over.

    Args:
        folder: as `export_run` and `synthesize` make it; its hashes are compared.
        model: the network; None: `network_for(the set's)`.
        how: it is trained; its seed is the network's, too. None: `StudentSettings()`.
        labels: "soft", those that are kept with the images; "hard", their classes; "auto": soft
            ones where there are any.
        teacher: whose model labels changed copies of the images: a path, as `load_model` takes it;
            "auto": the set's own, if one was handed over; "none": copies keep their image's label.
        device: "auto", "cpu" or "cuda".
        report: told of steps that are done, and of how many there are.

    Raises:
        DataFilesMissingError, DataFilesCorruptError: there is no set, or it was changed.
        SettingError: soft labels of a set that has none, or a network that cannot take its images.
        OutputError: a teacher that cannot be read, or is for other images.

    >>> import tempfile
    >>> from fedsynth import StudentSettings, owner_settings, synthesize
    >>> settings = owner_settings({"model": {"width": 8}, "privacy": {"epsilon": 8}})  # digits
    >>> place = tempfile.mkdtemp()
    >>> run = synthesize(settings, f"{place}/share", runs=f"{place}/runs")
    >>> how = StudentSettings(steps=20, views=1)
    >>> student_of_set(f"{place}/share", ModelSettings("linear"), how).labels
    'hard'
    """
    how = how or StudentSettings()
    found = load_synthetic(folder)
    if labels not in LABELS:
        raise unknown_value(None, "labels", labels, LABELS)
    if labels == SOFT and found.soft_labels is None:
        raise SettingError(None, "labels", "cannot be soft: the set has no soft labels")
    soft = labels != HARD and found.soft_labels is not None
    target = found.soft_labels if soft and found.soft_labels is not None else found.labels
    where = resolve_device(device)
    architecture = Architecture(found.spec, model or network_for(found.spec))
    network = architecture.network(how.seed).to(where)
    tutor = _teacher(Path(folder), str(teacher), found.spec)
    train_student(
        network,
        found.normalised().to(where),
        target.to(where),
        how,
        teacher=None if tutor is None else tutor.to(where),
        report=report,
    )
    return Student(network.eval(), architecture, found, SOFT if soft else HARD, tutor is not None)


def network_for(spec: DatasetSpec, **asked: Any) -> ModelSettings:
    """A network for a set's images: a ConvNet of width 32, unless something else is asked for.

    Args:
        spec: the set's.
        asked: settings of a model; None: not asked for.

    >>> from fedsynth.data.registry import dataset_spec
    >>> network_for(dataset_spec("digits"), width=8, norm=None).depth
    2
    """
    usual = {"width": 32, "depth": usual_depth(spec.image_shape)}
    return ModelSettings(**usual | {key: one for key, one in asked.items() if one is not None})


def _teacher(folder: Path, named: str, spec: DatasetSpec) -> nn.Module | None:
    if named == NOBODY or (named == OWN and not (folder / MODEL).is_file()):
        return None
    place = folder if named == OWN else Path(named)
    try:
        model = load_model(place, spec=spec)
    except OutputError as error:
        if named != OWN:
            raise
        without = Setting(None, "teacher", NOBODY)
        raise OutputError(Text(f"{error} (", without, " does without it)")) from None
    try:
        with torch.no_grad():
            fits = model(torch.zeros(2, *spec.image_shape)).shape == (2, spec.classes)
    except RuntimeError:
        fits = False
    if not fits:
        raise SettingError(None, "teacher", f"of {place} is for other images than the set's")
    return model


def real_images(
    spec: DatasetSpec,
    *,
    folder: str | Path | None = None,
    dataset: str | None = None,
    data_root: Path | None = None,
) -> ImageData | None:
    """Real images to test a student on: those of a folder, or the test images of a data set.

    Args:
        spec: of the synthetic set, whose size and classes they must have.
        folder: of CLASS/files; they are resized.
        dataset: by name.
        data_root: folder of the data sets.

    Returns:
        None where neither is named.

    Raises:
        SettingError: both are named, or a data set of other images.
        DataError: the files are missing or damaged, or of other classes.
    """
    if folder is not None and dataset is not None:
        raise SettingError(
            "data", "dataset", "is named beside ", Setting("data", "test_folder"), ": give one"
        )
    if folder is not None:
        return read_as(Path(folder), spec, lambda note: None)[0]
    if dataset is None:
        return None
    found = load_dataset(dataset, data_root)[1]
    theirs = found.spec
    if theirs.image_shape != spec.image_shape or theirs.class_names != spec.class_names:
        raise SettingError(
            "data", "dataset", "has other images or classes than the synthetic set", value=dataset
        )
    return ImageData(found.images, found.labels, spec)  # normalised as the synthetic ones are
