"""A data owner's records: a folder of images by class, or for trials a part of a data set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fedsynth.data.declaration import Declaration, read_declaration
from fedsynth.data.folders import images_in, read_images
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.load import load_dataset
from fedsynth.data.own_files import DECLARATION
from fedsynth.data.partition import GIVEN, partition
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataError, DataFilesMissingError
from fedsynth.federation.nodes.proposal import Proposal
from fedsynth.federation.terms.client_ledgers import data_set_id


class Source(Protocol):
    """Where a node's records come from."""

    def read(self, proposal: Proposal, number: int) -> ImageData:
        """The records that the client with this number has, in a run.

        Raises:
            DataError: they are not there, or do not fit the run's specification.
        """

    def objections(self, proposal: Proposal, said: bool) -> list[str]:
        """Why these records are not read for a run, whatever they are; empty: they may be.

        Args:
            proposal: the server's.
            said: whether the owner's policy says which images fit.
        """

    def identifier(self, proposal: Proposal) -> str:
        """Names the records for their ledger, in all runs on them alike."""


@dataclass(frozen=True)
class ClassFolders:
    """Images in FOLDER/CLASS/*, a folder for each class by the specification's names; a class that
    the owner has not may lack its folder.

    Args:
        folder: the owner's.
    """

    folder: Path

    def objections(self, proposal: Proposal, said: bool) -> list[str]:
        """A server that could name classes and sizes at will would learn from who joins which
        folders and images there are: they are the owner's to say."""
        declared: Declaration | None = None
        if (self.folder / DECLARATION).is_file():
            declared = read_declaration(self.folder / DECLARATION)
        if declared is not None and declared.signed:
            same = _images(declared.spec) == _images(proposal.spec)
            return [] if same else ["classes or image size are not those that its owner declares"]
        if proposal.settings.privacy is None or said:
            return []
        return [
            f"its owner says no classes and image size (a signed {DECLARATION} beside the images, "
            "or classes, height, width and channels in the policy)"
        ]

    def read(self, proposal: Proposal, number: int) -> ImageData:
        spec = proposal.spec
        paths: list[Path] = []
        labels: list[int] = []
        for label, name in enumerate(spec.class_names):
            files = _class_images(self.folder, name)
            paths += files
            labels += [label] * len(files)
        if not paths:
            raise DataFilesMissingError(
                f"{self.folder} has no images in folders of the classes of {spec.name}: "
                f"{', '.join(spec.class_names)}"
            )
        return from_arrays(_pixels(paths, spec), np.array(labels, np.int64), spec)

    def identifier(self, proposal: Proposal) -> str:
        return f"{proposal.spec.name}-{GIVEN}"


@dataclass(frozen=True)
class PartOf:
    """A part of a published data set, as a simulation divides it: for trials.

    Args:
        data_root: the folder of data sets; None: FEDSYNTH_DATA.
    """

    data_root: Path | None = None

    def objections(self, proposal: Proposal, said: bool) -> list[str]:
        """None: the data set is published."""
        return []

    def read(self, proposal: Proposal, number: int) -> ImageData:
        settings = replace(proposal.settings, data_root=self.data_root)
        train, _ = load_dataset(settings.dataset, settings.data_root)
        _check_same(train.spec, proposal.spec)
        parts = partition(
            train.labels.cpu().numpy(),
            settings.resolved_partition,
            train.spec.classes,
            *train.origins(),
        )
        return train.subset(np.asarray(parts[number], np.int64))

    def identifier(self, proposal: Proposal) -> str:
        return data_set_id(proposal.settings)


def _images(spec: DatasetSpec) -> tuple[object, ...]:
    """What decides on whether images can be read for a specification."""
    return (spec.class_names, *spec.image_shape)


def _class_images(folder: Path, name: str) -> list[Path]:
    """The images of a class whose name a server has said; none where its folder is missing.

    Raises:
        DataError: the name is none of a folder in this one, or leads out of it (a link).
    """
    wrong = f"{name!r:.80} is a class's name and names no folder in {folder}"
    if name in ("", ".", "..") or set(name) & set("/\\\0"):
        raise DataError(wrong)
    try:
        root = folder.resolve()
        found = (root / name).resolve()
        if found.parent != root:
            raise DataError(wrong)
        return images_in(found) if found.is_dir() else []
    except (OSError, ValueError) as error:  # too long a name, one that cannot be encoded, ...
        raise DataError(f"{wrong}: {type(error).__name__}") from None


def _pixels(paths: list[Path], spec: DatasetSpec) -> npt.NDArray[np.uint8]:
    """The files' images, [N, C, H, W]; grey ones where the data set has one channel."""
    if spec.channels == 3:
        return read_images(paths, spec)
    if spec.channels != 1:
        raise DataError(f"{spec.name} has {spec.channels} channels: image files have 1 or 3")
    in_colour = replace(spec, channels=3, mean=spec.mean * 3, std=spec.std * 3)
    images = read_images(paths, in_colour)
    coloured = np.flatnonzero((images != images[:, :1]).any(axis=(1, 2, 3)))
    if len(coloured):
        raise DataError(f"{paths[coloured[0]]} has colours: images of {spec.name} are grey")
    return images[:, :1]


def _check_same(own: DatasetSpec, proposed: DatasetSpec) -> None:
    if own != proposed:
        raise DataError(f"the server has another specification of {own.name} than this package")
