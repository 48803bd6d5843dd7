"""Loads, validates and divides a run's data, and opens the clients' ledgers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedsynth.config.checks import check_unit
from fedsynth.config.settings import RunSettings
from fedsynth.core.periods import has_periods
from fedsynth.data.declaration import Declaration, FolderSettings, require_signed
from fedsynth.data.images import DERIVED, ImageData, IntArray, from_arrays, record_digests
from fedsynth.data.load import load_dataset
from fedsynth.data.medical import window_text
from fedsynth.data.own_data import OwnerData, read_own_data
from fedsynth.data.partition import bounded, hold_out
from fedsynth.data.partition_settings import EXPLICIT
from fedsynth.data.records import Note
from fedsynth.data.registry import DatasetSpec, dataset_spec, is_published
from fedsynth.data.tables import HUB, downloaded
from fedsynth.data.text import LEAF
from fedsynth.errors import (
    DataError,
    DataFilesMissingError,
    PartitionError,
    PrivacySettingError,
    SettingError,
    one_line,
)
from fedsynth.features.encoding import Adder, encode, encoded_spec, encoder_map
from fedsynth.files import expand_home, require_folder
from fedsynth.formatting import printable
from fedsynth.large_arrays import new_tensor
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.folder import PRIVATE as PRIVATE_FILES
from fedsynth.privacy.ledger.folder import Digests, LedgerFolder, default_names, with_users
from fedsynth.privacy.periods import ReleaseSequence
from fedsynth.privacy.releases import USER
from fedsynth.privacy.settings import NO_LEDGER
from fedsynth.validation import check_choice

# The custom data that `simulate` accepts.
CustomData = ImageData | OwnerData | Dataset[Any] | DataLoader[Any] | tuple[Any, Any]
# The kinds of a run's test images.
PUBLIC, PRIVATE, NO_TEST = "public", "private", "none"


def checked_data(data: Any) -> tuple[ImageData, ImageData | None]:
    """Checks and returns custom training and test data.

    Args:
        data: (train, test), training data, arrays (x, y), or one or two data sets of pairs.

    Raises:
        DataError: the data are not image data, or the training and test data have different
            specifications.
    """
    match data:
        case ImageData():
            return data, None
        case Dataset() | DataLoader():
            return from_arrays(data), None
        case (Dataset() | DataLoader() as train, Dataset() | DataLoader() as test):
            training = from_arrays(train)
            return training, from_arrays(test, spec=training.spec)
        case (np.ndarray() | Tensor() as x, np.ndarray() | Tensor() as y):
            return from_arrays(x, y), None
        case (ImageData() as train, (ImageData() | None) as test):
            if test is not None and train.spec != test.spec:
                raise DataError(
                    "training and test data must have the same specification, got "
                    f"{train.spec.name!r} and {test.spec.name!r}"
                ).with_code("data.spec")
            return train, test
    raise DataError(
        "data must be a tuple (train, test) of arrays from fedsynth.from_arrays, or the result of "
        f"fedsynth.load_records, got {type(data).__name__}"
    ).with_code("data.type")


def note_shared_records(train: ImageData, test: ImageData, note: Note) -> None:
    """Warns if some test images are also training images.

    Images are compared by a hash of their pixels. Published data sets are not checked.
    """
    training = set(_pixel_hashes(train))
    shared = sum(map(training.__contains__, _pixel_hashes(test)))
    if shared:
        note(
            f"warning: {shared} of {len(test)} test images are identical to training images. The "
            "accuracy on new images may be lower"
        )


def _pixel_hashes(data: ImageData) -> Iterator[bytes]:
    pixels = replace(data, record_bytes=None)
    return map(bytes, record_digests(pixels, np.arange(len(data)), b"", labels=False))


def note_unprotected_users(settings: RunSettings, train: ImageData, note: Note) -> None:
    """Warns if custom data name each record's user, but no privacy unit is set.

    The users are not counted, because a private run prints nothing about the data. If the
    declaration has users, the run is refused instead (`check_unit`).
    """
    if settings.privacy is None or settings.privacy.unit is not None or train.groups is None:
        return
    if not is_published(train.spec):
        note(
            "warning: the data name the user of each record, but the privacy unit is one record. "
            "To protect a user with all of their records, set --dp-unit user (privacy.unit)"
        )


def require_a_ledger(settings: RunSettings, spec: DatasetSpec) -> None:
    """Refuses a private run on custom data without a folder that keeps the ledgers.

    All private runs on custom data must be counted, unless the owner declares that the data are
    public.
    """
    if settings.privacy is not None and settings.privacy.ledger is None and not is_published(spec):
        reason = (
            "is not set, but private runs need a permanent ledger. Set it to the ledger folder of "
            f"data set {spec.name!r}, or to {NO_LEDGER!r}"
        )
        raise PrivacySettingError("privacy", "ledger", reason)


def protects_users(settings: RunSettings) -> bool:
    """Returns True if the privacy unit of the run is a user instead of a record."""
    return settings.privacy is not None and settings.privacy.unit == USER


def divided(
    settings: RunSettings, parts: Sequence[Tensor], data: ImageData
) -> tuple[list[Tensor], list[Tensor]]:
    """Divides each client's records into a training and a test split.

    The test splits are empty if `local_test` is 0. If the run protects users, all records of a user
    are in the same split, and at most `user_records` records of each user are used for training.
    Without differential privacy, a user's records stay together, too, if the data are custom data
    and the client has several users.

    Args:
        settings: the settings of the run.
        parts: the indices of each client's records.
        data: the data set that contains the records.

    Returns:
        The indices of each client's training records, and the indices of its test split.
    """
    seed = settings.resolved_partition.seed or 0
    by_user = [protects_users(settings) or _may_split(part, settings, data) for part in parts]
    training: Sequence[IntArray] = list(map(Tensor.numpy, parts))
    testing: Sequence[IntArray] = [np.zeros(0, np.int64)] * len(parts)
    share = settings.partition.local_test
    if share > 0:
        training, testing = hold_out(training, share, seed, data, by_user)
    if settings.privacy is not None and settings.privacy.user_records is not None:
        limit = settings.privacy.user_records
        training = [bounded(part, data, limit, seed) for part in training]
    return list(map(torch.as_tensor, training)), list(map(torch.as_tensor, testing))


def _may_split(part: Tensor, settings: RunSettings, data: ImageData) -> bool:
    """Returns True if a random split of a client's records could divide a user's records.

    Published data sets are divided as in papers. With privacy for records, a record's split must
    not depend on other records of its user.
    """
    if settings.privacy is not None or data.groups is None or is_published(data.spec):
        return False
    return len(data.groups.cpu()[part.cpu()].unique()) > 1


@dataclass(frozen=True, eq=False)
class RunData:
    """A run's images, and what is known about the clients that hold them.

    Attributes:
        settings: the run's settings, completed with the values of the owner's declaration.
        train: the training images.
        test: the test images. None if there are no test images.
        test_kind: "public", "private" or "none".
        parts: the indices of each client's training images. None if the settings of the partition
            divide the images.
        names: the names of the clients. None if no names were given.
        left_out: a text that states which files in the folder were not read. Empty if all were.
    """

    settings: RunSettings
    train: ImageData
    test: ImageData | None
    test_kind: str
    parts: Sequence[IntArray] | None = None
    names: Sequence[str] | None = None
    left_out: str = ""


def data_of_run(
    settings: RunSettings, data: CustomData | None, test: str | None, note: Note, *, download: bool
) -> RunData:
    """Loads a run's images, and adds the declared facts about them to the settings.

    Args:
        settings: the run's settings.
        data: custom data, as in `simulate`. None loads the data that the settings name.
        test: the kind of the test images, as in `simulate`.
        note: a function that receives a warning or a note about files that were not read.
        download: True lets torchvision download a named data set.

    Raises:
        DataError: the data cannot be used, or the folder of a private run has no declaration of
            public facts.
    """
    if test is not None:
        check_choice(None, "test", test, (PUBLIC, PRIVATE, NO_TEST))
    if data is None and settings.folder is not None:
        if settings.privacy is not None:
            check_unit(settings.privacy, declared(settings).spec)  # before any data are read
        folder = settings.folder
        _, commit = downloaded(folder.folder, folder.revision)
        folder = replace(folder, revision=commit)
        settings = replace(settings, folder=folder)
        data = read_own_data(folder, note, settings.dataset, declaration=folder.declared())
    elif isinstance(data, OwnerData) and data.sites:
        settings = replace(settings, partition=replace(settings.partition, kind=EXPLICIT))
    if isinstance(data, OwnerData):
        run_data = _of_folder(settings, data, test or data.test_kind)
    else:
        is_named = data is None
        if is_named:
            data = load_dataset(settings.dataset, settings.data_root, download=download)
        run_data = _of_arrays(settings, data, test)
        if is_named and settings.privacy is None:  # private runs print nothing about the data
            _note_missing(run_data.train, note)
    if run_data.test is None or run_data.test_kind == NO_TEST:
        run_data = replace(run_data, test=None, test_kind=NO_TEST)
    elif not is_published(run_data.train.spec):
        note_shared_records(run_data.train, run_data.test, note)
    note_unprotected_users(run_data.settings, run_data.train, note)
    return run_data


def load_encoder(run_data: RunData) -> None:
    """Loads the encoder of a run if it has one. `encoded` then uses the loaded weights."""
    encoder = run_data.settings.encoder
    if encoder is not None and encoder.encoder:
        encoder_map(encoder, run_data.train.spec)


def encoded(
    run_data: RunData,
    parts: Sequence[IntArray],
    device: torch.device,
    progress: Callable[[int, str, int, int], None],
    links: Adder | None = None,
) -> RunData:
    """Replaces the run's images by vectors, if the run has an encoder.

    Args:
        run_data: the images of the run.
        parts: the indices of each client's training images. The vectors of other images are 0.
        device: the device that computes the vectors.
        progress: a function that receives the progress, as `Observer.step`.
        links: the connections to the other ranks, or None.
    """
    settings, images, test = run_data.settings, run_data.train, run_data.test
    encoder = settings.encoder
    if encoder is None or not encoder.encoder:
        return run_data
    if settings.folder is not None and encoder.public_images:
        _check_public_images(Path(encoder.public_images), settings.folder)
    features = encoder_map(encoder, images.spec)
    show = partial(progress, 0, "encoding")
    options: dict[str, Any] = {"cache": encoder.encoder_cache, "progress": show, "links": links}
    used = np.unique(np.concatenate(parts))
    are_all_used = len(used) == len(images)
    subset = images if are_all_used else images.subset(used)
    vectors = encode(subset, features, device, **options)
    stored = vectors.images
    if not are_all_used:
        stored = new_tensor((len(images), *vectors.spec.image_shape), stored.dtype, stored.device)
        stored[used] = vectors.images
    train = replace(images, images=stored, spec=vectors.spec, record_bytes=None)
    if test is not None:
        test = encode(test, features, device, **options)
    settings = replace(settings, encoder=replace(encoder, encoder=features.name))
    return replace(run_data, settings=settings, train=train, test=test)


def _check_public_images(public: Path, settings: FolderSettings) -> None:
    """Checks that a folder of public images contains no image of the run.

    Raises:
        SettingError: the folder contains, or is in, a folder of the run's images.
    """
    public = public.resolve()
    for name in filter(None, (settings.folder, settings.test_folder)):
        folder = Path(name).resolve()
        if folder.is_relative_to(public) or public.is_relative_to(folder):
            reason = f"overlaps the run's image folder {name}. Choose another folder"
            raise SettingError("data", "public_images", reason)


def _of_arrays(settings: RunSettings, data: Any, test_kind: str | None) -> RunData:
    """Creates a run's data from arrays or a named data set.

    Raises:
        DataError: the run is private, and no person stated the specification of the data.
    """
    train, test = checked_data(data)
    if settings.privacy is not None:
        if train.spec.source == DERIVED:
            raise DataError(
                "the specification was derived from private images. Pass a public "
                "spec=DatasetSpec(...) to from_arrays"
            ).with_code("data.spec")
        check_unit(settings.privacy, train.spec, has_users=train.groups is not None)
    kind = test_kind or (PUBLIC if is_published(train.spec) else PRIVATE)
    return RunData(replace(settings, dataset=train.spec.name), train, test, kind)


def _of_folder(settings: RunSettings, data: OwnerData, test_kind: str) -> RunData:
    """Loads a folder's or file's data, and adds the declared facts to the settings.

    Raises:
        DataError: the run is private, and the folder has no signed declaration.
        PartitionError: the sites are to be the clients, but the folder has no sites.
    """
    name = data.train.spec.name
    settings = replace(settings, dataset=name)
    if settings.privacy is not None:
        settings = with_declared(settings, _required(data.declaration, settings))
    run_data = RunData(settings, data.train, data.test, test_kind, left_out=data.left_out)
    if settings.partition.kind != EXPLICIT:
        return run_data
    if data.sites is None:
        raise PartitionError(
            f"data set {name} names no sites, so its images are not divided among clients. Set "
            "partition.kind and partition.clients"
        ).with_code("partition.sites")
    return replace(run_data, parts=data.sites, names=data.names)


def _note_missing(train: ImageData, note: Note) -> None:
    """Warns if the local copy of a data set contains fewer images than the published one."""
    spec = train.spec
    if len(train) < spec.train_size and spec.name not in LEAF:  # which draws some users
        note(
            f"warning: data set {spec.name} has {len(train):,} training images, but the published "
            f"version has {spec.train_size:,}"
        )


def specification(settings: RunSettings) -> DatasetSpec:
    """Returns the public specification of a run's data, without reading the data.

    Raises:
        DataError: the custom images have no declaration of public facts.
    """
    spec = _image_specification(settings)
    if settings.encoder is None or not settings.encoder.encoder:
        return spec
    return encoded_spec(spec, encoder_map(settings.encoder, spec))


def _image_specification(settings: RunSettings) -> DatasetSpec:
    if settings.folder is None:
        return dataset_spec(settings.dataset)
    return declared(settings).spec


def declared(settings: RunSettings) -> Declaration:
    """Returns the owner's signed declaration of custom images.

    Raises:
        DataError: there is no declaration, or it is not signed. The message states what to do.
    """
    declaration = settings.folder.declared() if settings.folder is not None else None
    return _required(declaration, settings)


def _required(declaration: Declaration | None, settings: RunSettings) -> Declaration:
    """Checks that there is a signed declaration, and returns it.

    Raises:
        DataError: there is no declaration, or it is not signed.
    """
    if declaration is None:
        folder = "FOLDER"
        if settings.folder is not None:
            folder = settings.folder.folder
            if not folder.startswith(HUB) and not Path(folder).exists():
                raise DataFilesMissingError(
                    f"the folder or file {one_line(folder)} does not exist. Correct data.folder"
                )
        raise DataError(
            "the images have no declaration, as a private run requires. Run fedsynth data describe "
            f"{folder}, then check and sign the file"
        ).with_code("declaration.missing")
    require_signed(declaration)
    return declaration


def with_declared(settings: RunSettings, declaration: Declaration) -> RunSettings:
    """Fills unset settings with the declaration's values.

    Raises:
        SettingError: `privacy.ledger` is another folder than the declaration states.
    """
    settings = replace(settings, dataset=declaration.spec.name)
    if settings.partition.kind == EXPLICIT:
        clients = max(1, len(declaration.sites))
        settings = replace(settings, partition=replace(settings.partition, clients=clients))
    if settings.folder is not None:
        spec = declaration.spec
        folder = replace(settings.folder, window=window_text(spec.window), slice=spec.slice)
        settings = replace(settings, folder=folder)
    privacy = settings.privacy
    if privacy is None:
        return settings
    if privacy.max_records is None:
        privacy = replace(privacy, max_records=declaration.most_images)
    if declaration.ledger is not None:
        stated = privacy.ledger
        if stated is not None and expand_home(stated).resolve() != declaration.ledger.resolve():
            reason = (
                "is not the ledger folder that the data's declaration names. "
                f"Set it to {declaration.ledger}"
            )
            raise SettingError("privacy", "ledger", reason, value=str(stated))
        privacy = replace(privacy, ledger=declaration.ledger)
    report = settings.report
    if not report.person:
        report = replace(report, person=printable(declaration.person))
    if not report.sites and settings.partition.kind != EXPLICIT and settings.partition.clients == 1:
        names = [printable(site).replace(",", " ") for site in declaration.sites]
        # a single owner has the data of all sites
        report = replace(report, sites=", ".join(names))
    return replace(settings, privacy=privacy, report=report)


@dataclass(frozen=True, eq=False)
class Clients:
    """The clients of a run, with their names and records.

    Attributes:
        data: the data set that contains the records of all clients.
        parts: the indices of each client's records.
        names: the names of the clients (see `check_names`). None if no names were given.
        by_user: whether the privacy unit is a user.
    """

    data: ImageData
    parts: Sequence[IntArray]
    names: tuple[str, ...] | None = None
    by_user: bool = False

    def digests(self, key: bytes) -> list[Digests]:
        """Computes keyed hashes that identify each client's records in ledgers.

        The hashes of a client have the shape [N, 16], uint8. They do not include labels, because an
        image with another label is still the same record. If the privacy unit is a user, the hashes
        of the users follow (see `with_users`).
        """
        digests = [record_digests(self.data, part, key, labels=False) for part in self.parts]
        _, groups = self.data.origins()
        if not self.by_user or groups is None:
            return digests
        pairs = zip(digests, self.parts, strict=True)
        return [with_users(records, groups[part], key) for records, part in pairs]

    def kept_ledgers(
        self,
        folder: Path,
        run: RunSettings,
        sequences: Mapping[str, ReleaseSequence] = MappingProxyType({}),
    ) -> list[Ledger]:
        """Opens the clients' ledgers in a folder that is kept across runs.

        Raises:
            LedgerError: a client's records differ from those for which its ledger was charged, or
                the records of a period are not new (see `LedgerFolder.open`).
        """
        return LedgerFolder(folder).open(self.names, self.digests, data_set_id(run), sequences)

    def sequences(self, folder: Path, run: RunSettings) -> dict[str, ReleaseSequence]:
        """Returns each client's releases in all periods, by client name.

        The result is empty unless the run is one of several periods.
        """
        method = run.method
        if not has_periods(method):
            return {}
        sequences = {}
        for name in self.ledger_names:
            sequences[name] = ReleaseSequence(
                folder / PRIVATE_FILES, name, method.period, method.periods
            )
        return sequences

    @property
    def ledger_names(self) -> tuple[str, ...]:
        """The clients' ledger names: the given names or, without any, default names."""
        return self.names or default_names(len(self.parts))


def new_ledgers(names: Sequence[str], folder: Path | None, run: RunSettings) -> list[Ledger]:
    """Opens the ledger of each name in a run folder, or creates new ledgers.

    The ledgers in a run folder are public, so they contain no fingerprints of records.

    Args:
        names: the names of the clients.
        folder: the folder of the ledgers. None creates ledgers in memory.
        run: the settings of the run.
    """
    dataset = data_set_id(run)
    ledgers = []
    for name in names:
        file = None if folder is None else folder / f"{name}.jsonl"
        ledgers.append(Ledger(name, file, dataset=dataset))
    return ledgers


def planned_ledgers(
    run: RunSettings, folder: Path | None, names: Sequence[str] | None = None
) -> list[Ledger]:
    """Returns the clients' ledgers for planning a run's privacy cost.

    Existing ledgers are read. For a client without a ledger, an empty ledger in memory is returned.
    No data are read and no file is created.

    Args:
        run: the settings of the run.
        folder: the folder that keeps the ledgers across runs. None if there is no such folder.
        names: the names of the clients. None uses default names.

    Raises:
        LedgerError: a ledger is damaged, belongs to another data set, or was deleted.
        OSError: the folder cannot be written.
    """
    if folder is not None:
        require_folder(folder)
        LedgerFolder(folder).check_whole()
    ledgers = []
    for name in names or default_names(run.partition.clients):
        exists = folder is not None and (folder / f"{name}.jsonl").exists()
        ledgers += new_ledgers([name], folder if exists else None, run)
    return ledgers


def data_set_id(run: RunSettings) -> str:
    """Returns the name of a run's data set and partition, which ledgers store.

    It does not depend on the local test split, because the records are the same. If the clients are
    custom parts of the data, the text does not identify the parts. The ledgers then identify the
    records themselves.
    """
    kind = run.partition.kind
    if kind == EXPLICIT:
        return f"{run.dataset}-{EXPLICIT}"
    parts = {}
    for name, value in asdict(run.resolved_partition).items():
        of_other_kind = name.startswith(("missing", "dominant")) and not name.startswith(kind)
        unused = (name, value) in (("subset", 1), ("min_group", 0))
        if name != "local_test" and not unused and not of_other_kind:
            parts[name] = value
    partition = json.dumps(parts, sort_keys=True)
    return f"{run.dataset}-{hashlib.blake2b(partition.encode(), digest_size=6).hexdigest()}"
