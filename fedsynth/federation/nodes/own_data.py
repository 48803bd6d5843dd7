"""A data owner's records: a folder of images by class, or for trials a part of a data set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from fedsynth.data.declaration import Declaration, read_declaration
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.data.load_folder import read_as, read_records
from fedsynth.data.own_files import DECLARATION
from fedsynth.data.partition import partition
from fedsynth.data.partition_settings import GIVEN
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataError
from fedsynth.federation.nodes.proposal import Proposal
from fedsynth.federation.terms.run_data import data_set_id
from fedsynth.privacy.releases import USER


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
    """An owner's images, as `fedsynth.load_folder` takes them (CLASS/files, or a manifest; sites in
    it make no difference here), in the run's size; a class that the owner has not may be missing.
    Names that a server has said are compared with the folders', and never followed.

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
        privacy = proposal.settings.privacy
        if privacy is None:
            return read_as(self.folder, proposal.spec, print)[0]
        by_user = privacy.unit == USER
        return read_records(self.folder, proposal.spec, print, by_user=by_user)

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
        own = replace(train, may_be_empty=True)
        return own.subset(np.asarray(parts[number], np.int64))

    def identifier(self, proposal: Proposal) -> str:
        return data_set_id(proposal.settings)


def _images(spec: DatasetSpec) -> tuple[object, ...]:
    """What decides on whether images can be read for a specification."""
    return (spec.class_names, *spec.image_shape)


def _check_same(own: DatasetSpec, proposed: DatasetSpec) -> None:
    if own != proposed:
        raise DataError(f"the server has another specification of {own.name} than this package")
