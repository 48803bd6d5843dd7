"""A proposed declaration for a folder of images, for a person to check."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedsynth.data.declaration import proposal
from fedsynth.data.folder_checks import Note
from fedsynth.data.folder_settings import FolderSettings, declaration_beside
from fedsynth.data.load_folder import read_folder
from fedsynth.data.own_files import find_files
from fedsynth.data.partition import count_matrix
from fedsynth.data.picture import partition_table


@dataclass(frozen=True)
class Described:
    """A proposed declaration.

    Attributes:
        toml: the declaration's text.
        table: the exact number of images by site and class, which is private.
        path: where runs look for the declaration.
    """

    toml: str
    table: str
    path: Path


def describe_folder(settings: FolderSettings, note: Note, name: str | None = None) -> Described:
    """Reads all images of a folder, and proposes a declaration of public facts about them.

    Args:
        settings: the folder, and the size that its images are resized to.
        note: receives messages about skipped files.
        name: the data set's name; None: the folder's name.

    Raises:
        DataError: as for `load_folder`.
    """
    place = Path(settings.folder)
    undeclared = replace(settings, declaration="")
    data = read_folder(undeclared, note, name or "", declared=False)
    spec = data.train.spec
    files = find_files(place)
    parts = data.sites or (np.arange(len(data.train)),)
    counts = count_matrix(data.train.labels.numpy(), parts, spec.classes)
    users = 0 if data.train.groups is None else len(data.train.groups.unique())
    rows = ", ".join(
        f"{number}: {site}" for number, site in enumerate(files.site_names or ("all",))
    )
    columns = ", ".join(
        f"{number}: {class_name}" for number, class_name in enumerate(spec.class_names)
    )
    return Described(
        proposal(spec, files.site_names, len(data.train), users),
        f"sites {rows}\nclasses {columns}\n{partition_table(counts)}",
        declaration_beside(place),
    )
