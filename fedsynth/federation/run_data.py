"""The data of a run: their source, validation, division among clients, and the clients' ledgers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsynth.config.settings import RunSettings
from fedsynth.data.arrays import IntArray
from fedsynth.data.declaration import Declaration, require_signed
from fedsynth.data.files import one_line
from fedsynth.data.fingerprints import record_digests
from fedsynth.data.images import ImageData
from fedsynth.data.leaf import LEAF_READERS
from fedsynth.data.load import load_dataset
from fedsynth.data.load_folder import FolderData, read_folder
from fedsynth.data.partition_settings import GIVEN
from fedsynth.data.registry import DatasetSpec, dataset_spec, is_published
from fedsynth.data.users import bounded, hold_out
from fedsynth.errors import DataError, DataFilesMissingError, PartitionError, SettingError
from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.privacy.files import expand_home
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.folder import Digests, LedgerFolder, default_names
from fedsynth.privacy.releases import USER
from fedsynth.privacy.report.formatting import printable
from fedsynth.privacy.settings import NO_LEDGER
from fedsynth.validation import check_choice

PUBLIC, PRIVATE, NO_TEST = "public", "private", "none"
"""The kinds of a run's test images."""


def checked_data(data: tuple[ImageData, ImageData | None]) -> tuple[ImageData, ImageData | None]:
    """Returns (train, test) unchanged, after validation.

    Raises:
        DataError: they are not image data, or have different specifications.
    """
    wrong = "data must be (train, test) or (train, None), each made by fedsynth.from_arrays"
    if isinstance(data, ImageData):
        raise DataError(f"{wrong}; got only the training images")
    if not (isinstance(data, tuple | list) and len(data) == 2):
        raise DataError(
            f"{wrong}, or the result of fedsynth.load_folder; got {type(data).__name__}"
        )
    train, test = data
    if not (isinstance(train, ImageData) and (test is None or isinstance(test, ImageData))):
        raise DataError(wrong)
    if test is not None and train.spec != test.spec:
        raise DataError(
            f"training and test data must have the same specification, got {train.spec.name!r} "
            f"and {test.spec.name!r}"
        )
    return train, test


def kind_of_test(spec: DatasetSpec, test: ImageData | None, declared: str | None) -> str:
    """Returns the kind of the test images: "public", "private" or "none"."""
    if declared is not None:
        check_choice(None, "test", declared, (PUBLIC, PRIVATE, NO_TEST))
    if test is None or declared == NO_TEST:
        return NO_TEST
    return declared or (PUBLIC if is_published(spec) else PRIVATE)


def note_shared_records(train: ImageData, test: ImageData, note: Callable[[str], None]) -> None:
    """Notes how many test images are also training images, by a hash of their pixels.

    Only for custom data: published data sets contain such images as released.
    """
    training = set(_pixel_hashes(train))
    testing = _pixel_hashes(test)
    both = sum(digest in training for digest in testing)
    if both:
        note(
            f"warning: {both} of {len(testing)} test images are identical to training "
            "images: the accuracy may not hold for new images"
        )


def _pixel_hashes(data: ImageData) -> list[bytes]:
    digests = record_digests(data, np.arange(len(data)), b"", labels=False)
    return [digest.tobytes() for digest in digests]


def require_a_ledger(settings: RunSettings, spec: DatasetSpec) -> None:
    """Refuses a private run on custom data without a ledger, unless the owner declares that there
    is none: custom data are not public, so all runs on them have to be counted.
    """
    if settings.privacy is not None and settings.privacy.ledger is None and not is_published(spec):
        reason = (
            f"must name the folder of the ledgers of your data ({spec.name!r}), the same for "
            f"all runs on them, or be {NO_LEDGER!r}"
        )
        raise PrivacySettingError("privacy", "ledger", reason)


def protects_users(settings: RunSettings) -> bool:
    """Returns whether privacy protects all records of a user together."""
    return settings.privacy is not None and settings.privacy.unit == USER


def divided(
    settings: RunSettings, parts: Sequence[Tensor], data: ImageData
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns each client's training positions and local test split (empty without `local_test`).

    If users are protected, a user's records are all in one split, and at most `user_records`
    records of each user are used for training.
    """
    seed = settings.resolved_partition.seed or 0
    by_user = protects_users(settings)
    training: Sequence[IntArray] = [part.numpy() for part in parts]
    testing: Sequence[IntArray] = [np.zeros(0, np.int64) for _ in parts]
    share = settings.partition.local_test
    if share > 0:
        training, testing = hold_out(training, share, seed, data, by_user)
    limit = settings.privacy.user_records if settings.privacy is not None else None
    if limit is not None:
        training = [bounded(part, data, limit, seed) for part in training]
    return [torch.as_tensor(part) for part in training], [torch.as_tensor(p) for p in testing]


Brought = tuple[ImageData, ImageData | None] | FolderData


@dataclass(frozen=True, eq=False)
class RunData:
    """The data of a run.

    Attributes:
        settings: the run's settings, completed by the declaration.
        train: the training images.
        test: the test images; None: there are none.
        test_kind: "public", "private" or "none".
        parts: the positions of each client's images; None: the partition divides them.
        names: the clients' names; None: not given.
        left_out: the files of the data's folders that were not read, as text; empty if none.
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
    """Returns the data of a run.

    Args:
        settings: the run's settings.
        data: as in `simulate`.
        test: the declared kind of the test images, if any.
        note: receives a note on files that were left out.
        download: let torchvision fetch a named data set.

    Raises:
        DataError: the data cannot be used, or a private run's folder has no declaration.
    """
    run_data = _found(settings, data, test, note, download=download)
    if run_data.test is not None and not is_published(run_data.train.spec):
        note_shared_records(run_data.train, run_data.test, note)
    return run_data


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
            declared(settings)  # before any data are read
        folder_data = read_folder(
            settings.folder, note, settings.dataset, declaration=settings.folder.declared()
        )
        return _of_folder(settings, folder_data, test)
    if isinstance(data, FolderData):
        partition = replace(
            settings.partition, kind=GIVEN if data.sites else settings.partition.kind
        )
        return _of_folder(replace(settings, partition=partition), data, test)
    loaded = data or load_dataset(settings.dataset, settings.data_root, download=download)
    # A private run prints nothing that depends on the data.
    if data is None and settings.privacy is None:
        _note_missing(loaded[0], note)
    train, tested = checked_data(loaded)
    kind = kind_of_test(train.spec, tested, test)
    settings = replace(settings, dataset=train.spec.name)
    return RunData(settings, train, None if kind == NO_TEST else tested, kind)


def _of_folder(settings: RunSettings, folder_data: FolderData, test: str | None) -> RunData:
    settings = replace(settings, dataset=folder_data.train.spec.name)
    if settings.privacy is not None:
        settings = with_declared(settings, _required(folder_data.declaration, settings))
    kind = kind_of_test(folder_data.train.spec, folder_data.test, test or folder_data.test_kind)
    tested = None if kind == NO_TEST else folder_data.test
    if settings.partition.kind != GIVEN:
        return RunData(settings, folder_data.train, tested, kind, left_out=folder_data.left_out)
    if folder_data.sites is None:
        raise PartitionError(
            f"the images of {folder_data.train.spec.name} have no sites (SITE/CLASS/files): "
            "set how to divide them among clients (partition.kind=dirichlet, "
            "partition.clients=5)"
        )
    return RunData(
        settings,
        folder_data.train,
        tested,
        kind,
        folder_data.sites,
        folder_data.names,
        folder_data.left_out,
    )


def _note_missing(train: ImageData, note: Callable[[Any], None]) -> None:
    """Notes that a published data set has fewer images here than were published."""
    spec = train.spec
    if len(train) < spec.train_size and spec.name not in LEAF_READERS:  # LEAF's scripts draw some
        note(
            f"warning: {spec.name} has {len(train):,} training images on this machine, but "
            f"{spec.train_size:,} in the published version: some are missing"
        )


def specification(settings: RunSettings) -> DatasetSpec:
    """Returns the public specification of a run's data without reading them.

    Raises:
        DataError: the custom images have no declaration.
    """
    if settings.folder is None:
        return dataset_spec(settings.dataset)
    return declared(settings).spec


def declared(settings: RunSettings) -> Declaration:
    """Returns the signed declaration of custom images.

    Raises:
        DataError: there is none; the message states how to create it.
    """
    return _required(None if settings.folder is None else settings.folder.declared(), settings)


def _required(declaration: Declaration | None, settings: RunSettings) -> Declaration:
    if declaration is None:
        folder = "FOLDER" if settings.folder is None else settings.folder.folder
        if folder != "FOLDER" and not Path(folder).exists():
            raise DataFilesMissingError(f"the folder {one_line(folder)} does not exist")
        raise DataError(
            "a private run on your images needs a declaration of their public facts: run "
            f"fedsynth data describe {folder}, then check and sign the file"
        )
    require_signed(declaration)
    return declaration


def _require_same_ledger(setting: str | Path | None, declared: Path) -> None:
    """Refuses another ledger than the declared one, which records what was already spent on these
    images.
    """
    if setting is not None and expand_home(setting).resolve() != declared.resolve():
        reason = (
            f"must be the ledger folder of the declaration, {declared}, or be left out: "
            "another folder would not count earlier releases from these images"
        )
        raise SettingError("privacy", "ledger", reason, value=str(setting))


def with_declared(settings: RunSettings, declaration: Declaration) -> RunSettings:
    """Returns the settings, with the declaration's values for those that are not set."""
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
        report = replace(report, sites=", ".join(names))  # a single owner has the data of all sites
    return replace(settings, privacy=privacy, report=report)


@dataclass(frozen=True, eq=False)
class Clients:
    """The clients of a run.

    Attributes:
        data: the training data of all clients.
        parts: the positions of each client's records.
        names: the declared names (`check_names`); None if there are none.
    """

    data: ImageData
    parts: Sequence[IntArray]
    names: tuple[str, ...] | None = None

    def digests(self, key: bytes) -> list[Digests]:
        """Returns the keyed hashes of each client's images, uint8 [N, 16].

        Labels are left out: an image that is relabelled for another study is the same record.
        """
        return [record_digests(self.data, part, key, labels=False) for part in self.parts]

    def kept_ledgers(self, folder: Path, run: RunSettings) -> list[Ledger]:
        """Returns the clients' ledgers in a folder that is kept over runs.

        Raises:
            LedgerError: a ledger is for other records.
        """
        return LedgerFolder(folder).open(self.names, self.digests, data_set_id(run))

    def ledgers(self, folder: Path | None, run: RunSettings) -> list[Ledger]:
        """Returns the ledgers kept in `folder`; None: empty ones in memory.

        Raises:
            LedgerError: a ledger is for other records.
        """
        return self.fresh_ledgers(None, run) if folder is None else self.kept_ledgers(folder, run)

    def fresh_ledgers(self, folder: Path | None, run: RunSettings) -> list[Ledger]:
        """Returns empty ledgers, in memory or in a run folder. They are public, so they have no
        fingerprints of records.
        """
        return [
            Ledger(name, folder / f"{name}.jsonl" if folder else None, dataset=data_set_id(run))
            for name in self.fresh_names
        ]

    @property
    def fresh_names(self) -> tuple[str, ...]:
        """The names of fresh ledgers."""
        return self.names or default_names(len(self.parts))


def planned_ledgers(
    run: RunSettings, folder: Path | None, names: Sequence[str] | None = None
) -> list[Ledger]:
    """Returns ledgers for a plan, which reads no data and creates no file: the existing ones, or
    else empty ones.

    They have these names, or default ones.

    Raises:
        LedgerError: a ledger is damaged, of another data set, or missing although it existed.
    """
    if folder is not None:
        LedgerFolder(folder).check_whole()
    names = names or default_names(run.partition.clients)
    dataset = data_set_id(run)
    files = {name: folder / f"{name}.jsonl" if folder else None for name in names}
    return [
        Ledger(name, file if file is not None and file.exists() else None, dataset=dataset)
        for name, file in files.items()
    ]


def data_set_id(run: RunSettings) -> str:
    """Returns an identifier of the clients' data sets, from data set and partition.

    It ignores the local test split, because the records are the same. Custom clients are identified
    by their records.
    """
    if run.partition.kind == GIVEN:
        return f"{run.dataset}-{GIVEN}"
    parts = asdict(run.resolved_partition)
    del parts["local_test"]
    if parts["subset"] == 1:
        del parts["subset"]
    for kind in ("missing", "dominant"):  # settings of one kind mean nothing under another
        for name in [
            name for name in parts if name.startswith(kind) and run.partition.kind != kind
        ]:
            del parts[name]
    partition = json.dumps(parts, sort_keys=True)
    return f"{run.dataset}-{hashlib.blake2b(partition.encode(), digest_size=6).hexdigest()}"
