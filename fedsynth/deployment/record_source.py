"""A data owner's records: a folder of images by class, or, for trials, a part of a data set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedsynth.data.declaration import read_declaration
from fedsynth.data.folder_files import DECLARATION
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.data.load_folder import read_as, read_records
from fedsynth.data.partition import partition
from fedsynth.data.partition_settings import EXPLICIT
from fedsynth.deployment.proposal import Proposal
from fedsynth.errors import DataError
from fedsynth.federation.run_data import data_set_id
from fedsynth.privacy.releases import USER


@dataclass(frozen=True)
class ClassFolders:
    """An owner's images, in the layout of `fedsynth.load_folder` (CLASS/files, or a manifest, whose
    sites are ignored here), at the run's size. Classes that the owner does not have may be missing.
    Names from a server are compared with the folders' names, and never used as paths.

    Args:
        folder: the owner's.
    """

    folder: Path

    def objections(self, proposal: Proposal, identified: bool) -> list[str]:
        """Returns an objection unless the owner has stated the classes and image size. A server
        that could choose them freely would learn from the clients that join which folders and
        images exist.

        Args:
            proposal: the server's.
            identified: whether the owner's policy states which images fit.
        """
        file = self.folder / DECLARATION
        if file.is_file():
            declared = read_declaration(file)
            if declared.signed_by:
                spec = declared.spec
                stated = (spec.class_names, spec.image_shape)
                if stated == (proposal.spec.class_names, proposal.spec.image_shape):
                    return []
                return ["classes or image size differ from its owner's declaration"]
        if proposal.settings.privacy is None or identified:
            return []
        return [
            f"its owner declares no classes and image size (put a signed {DECLARATION} next "
            "to the images, or classes, height, width and channels into the policy)"
        ]

    def read(self, proposal: Proposal, number: int) -> ImageData:
        """Returns the records of the client with this index, in a run.

        Raises:
            DataError: they do not exist, or do not fit the run's specification.
        """
        privacy = proposal.settings.privacy
        if privacy is None:
            return read_as(self.folder, proposal.spec, print)
        by_user = privacy.unit == USER
        return read_records(self.folder, proposal.spec, print, by_user=by_user)

    def identifier(self, proposal: Proposal) -> str:
        """Returns the name of the records for their ledger, the same in all runs on them."""
        return f"{proposal.spec.name}-{EXPLICIT}"


class DatasetPart:
    """A part of a published data set, partitioned as in a simulation: for trials."""

    def objections(self, proposal: Proposal, identified: bool) -> list[str]:
        """Returns no objection, because the data set is published."""
        return []

    def read(self, proposal: Proposal, number: int) -> ImageData:
        settings = proposal.settings
        train, _ = load_dataset(settings.dataset, None)
        spec = train.spec
        if spec != proposal.spec:
            raise DataError(f"the server has another specification of {spec.name}")
        labels = train.labels.cpu().numpy()
        parts = partition(labels, settings.resolved_partition, spec.classes, *train.origins())
        data = replace(train, may_be_empty=True)
        return data.subset(np.asarray(parts[number], np.int64))

    def identifier(self, proposal: Proposal) -> str:
        return data_set_id(proposal.settings)


Source = ClassFolders | DatasetPart
"""The source of a node's records."""
