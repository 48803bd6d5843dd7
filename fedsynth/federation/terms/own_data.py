"""The data of a run, from wherever they are brought: a named data set, arrays, or a folder of one's
own images with what is declared public of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedsynth.data.arrays import IntArray
from fedsynth.data.declaration import Declaration, require_signed
from fedsynth.data.files import one_line
from fedsynth.data.images import ImageData
from fedsynth.data.leaf import LEAF_READERS
from fedsynth.data.load import load_dataset
from fedsynth.data.load_folder import FolderData, read_folder
from fedsynth.data.partition_settings import GIVEN
from fedsynth.data.registry import DatasetSpec, dataset_spec, is_published
from fedsynth.errors import (
    DataError,
    DataFilesMissingError,
    PartitionError,
    SettingError,
)
from fedsynth.federation.terms.given_data import (
    NO_TEST,
    checked_data,
    kind_of_test,
    note_shared_records,
)
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.files import expand_home
from fedsynth.privacy.formatting import printable

Brought = tuple[ImageData, ImageData | None] | FolderData


@dataclass(frozen=True, eq=False)
class RunData:
    """What a run computes on.

    Attributes:
        settings: the run's, with what a declaration says where they say nothing.
        train: the training images.
        test: the test images; None: there are none.
        test_kind: "public", "private" or "none".
        parts: of each client the positions of its images; None: the partition divides them.
        names: the clients'; None: nobody says.
        left_out: what the data's folders have and the data do not, as text; empty for nothing.
    """

    settings: RunSettings
    train: ImageData
    test: ImageData | None
    test_kind: str
    parts: Sequence[IntArray] | None = None
    names: Sequence[str] | None = None
    left_out: str = ""


def data_of_run(
    settings: RunSettings,
    data: Brought | None,
    test: str | None,
    note: Callable[[Any], None],
    *,
    download: bool,
) -> RunData:
    """The data of a run.

    Args:
        settings: the run's.
        data: as `simulate` is given them.
        test: what the test images are declared to be, if anybody does.
        note: told of files that were left out.
        download: let torchvision fetch a named data set.

    Raises:
        DataError: they cannot be used; a private run on a folder that nobody has declared.
    """
    found = _found(settings, data, test, note, download=download)
    if found.test is not None and not is_published(found.train.spec):
        note_shared_records(found.train, found.test, note)
    return found


def _found(
    settings: RunSettings,
    data: Brought | None,
    test: str | None,
    note: Callable[[Any], None],
    *,
    download: bool,
) -> RunData:
    if data is None and settings.folder is not None:
        if settings.privacy is not None:
            declared(settings)  # before anything is read
        found = read_folder(settings.folder, note, settings.dataset)
        return _of_folder(settings, found, test)
    if isinstance(data, FolderData):
        partition = replace(
            settings.partition, kind=GIVEN if data.sites else settings.partition.kind
        )
        return _of_folder(replace(settings, partition=partition), data, test)
    given = data or load_dataset(settings.dataset, settings.data_root, download=download)
    if data is None:
        _note_missing(given[0], note)
    train, tested = checked_data(given)
    kind = kind_of_test(train.spec, tested, test)
    settings = replace(settings, dataset=train.spec.name)
    return RunData(settings, train, None if kind == NO_TEST else tested, kind)


def _of_folder(settings: RunSettings, found: FolderData, test: str | None) -> RunData:
    settings = replace(settings, dataset=found.train.spec.name)
    if settings.privacy is not None:
        settings = with_declared(settings, _required(found.declaration, settings))
    kind = kind_of_test(found.train.spec, found.test, test or found.test_kind)
    tested = None if kind == NO_TEST else found.test
    if settings.partition.kind != GIVEN:
        return RunData(settings, found.train, tested, kind, left_out=found.left_out)
    if found.sites is None:
        raise PartitionError(
            f"the images of {found.train.spec.name} have no sites (SITE/CLASS/files): say how "
            "they are divided among clients (partition.kind=dirichlet, partition.clients=5)"
        )
    return RunData(settings, found.train, tested, kind, found.sites, found.names, found.left_out)


def _note_missing(train: ImageData, note: Callable[[Any], None]) -> None:
    """Notes that a published data set has fewer images here than its authors published."""
    spec = train.spec
    if len(train) < spec.train_size and spec.name not in LEAF_READERS:  # LEAF's scripts draw some
        note(
            f"warning: {spec.name} has {len(train):,} training images here, and "
            f"{spec.train_size:,} as it is published: a part of it is missing"
        )


def specification(settings: RunSettings) -> DatasetSpec:
    """What is public of a run's data, without a look at them.

    Raises:
        DataError: they are one's own, and nobody has declared it.
    """
    if settings.folder is None:
        return dataset_spec(settings.dataset)
    return declared(settings).spec


def declared(settings: RunSettings) -> Declaration:
    """The signed declaration of one's own images.

    Raises:
        DataError: there is none; says how to get it.
    """
    return _required(None if settings.folder is None else settings.folder.declared(), settings)


def _required(declaration: Declaration | None, settings: RunSettings) -> Declaration:
    if declaration is None:
        folder = "FOLDER" if settings.folder is None else settings.folder.folder
        if folder != "FOLDER" and not Path(folder).exists():
            raise DataFilesMissingError(f"there is no folder {one_line(folder)}")
        raise DataError(
            "a private run on your own images must be told what is public of them: fedsynth data "
            f"describe {folder} proposes a declaration, which a person checks and signs"
        )
    require_signed(declaration)
    return declaration


def _require_same_ledger(given: str | Path | None, declared: Path) -> None:
    """What was spent on these images is in the declared one: with another it would not count."""
    if given is not None and expand_home(given).resolve() != declared.resolve():
        raise SettingError(
            "privacy",
            "ledger",
            f"must be that of the declaration, {declared}, or be left out: with another what these "
            "images have spent would not count",
            value=str(given),
        )


def with_declared(settings: RunSettings, declaration: Declaration) -> RunSettings:
    """The settings, with what the declaration says where they say nothing."""
    settings = replace(settings, dataset=declaration.spec.name)
    if settings.partition.kind == GIVEN:
        clients = max(1, len(declaration.sites))
        settings = replace(settings, partition=replace(settings.partition, clients=clients))
    privacy = settings.privacy
    if privacy is None:
        return settings
    if privacy.max_records is None:
        privacy = replace(privacy, max_records=declaration.most_images)
    if declaration.ledger is not None:
        _require_same_ledger(privacy.ledger, declaration.ledger)
        privacy = replace(privacy, ledger=declaration.ledger)
    report = settings.report
    if not report.person:
        report = replace(report, person=printable(declaration.person))
    if not report.sites and settings.partition.kind != GIVEN and settings.partition.clients == 1:
        names = [printable(site).replace(",", " ") for site in declaration.sites]
        report = replace(report, sites=", ".join(names))  # one owner has the data of all sites
    return replace(settings, privacy=privacy, report=report)
