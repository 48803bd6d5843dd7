"""The data that a simulation is given: whether they fit together, and what of them trains or tests
at each client."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedsynth.data.arrays import IntArray
from fedsynth.data.fingerprints import record_digests
from fedsynth.data.images import ImageData
from fedsynth.data.local_test import hold_out
from fedsynth.data.registry import DatasetSpec, is_published
from fedsynth.data.users import bounded
from fedsynth.errors import DataError
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.privacy.releases import USER
from fedsynth.privacy.settings import NO_LEDGER
from fedsynth.validation import check_choice

PUBLIC, PRIVATE, NO_TEST = "public", "private", "none"
"""What a run's test images are."""


def checked_data(given: tuple[ImageData, ImageData | None]) -> tuple[ImageData, ImageData | None]:
    """(train, test) as they were given.

    Raises:
        DataError: they are no image data, or of two specifications.
    """
    wrong = "data must be (train, test), each made by fedsynth.from_arrays, or (train, None)"
    if isinstance(given, ImageData):
        raise DataError(f"{wrong}; got the training images alone")
    if not (isinstance(given, tuple | list) and len(given) == 2):
        raise DataError(f"{wrong}, or what fedsynth.load_folder gives; got {type(given).__name__}")
    train, test = given
    if not (isinstance(train, ImageData) and (test is None or isinstance(test, ImageData))):
        raise DataError(wrong)
    if test is not None and train.spec != test.spec:
        raise DataError(
            f"training and test data must have the same specification, got {train.spec.name!r} "
            f"and {test.spec.name!r}"
        )
    return train, test


def kind_of_test(spec: DatasetSpec, test: ImageData | None, declared: str | None) -> str:
    """What the test images are: "public", "private" or "none"."""
    if declared is not None:
        check_choice(None, "test", declared, (PUBLIC, PRIVATE, NO_TEST))
    if test is None or declared == NO_TEST:
        return NO_TEST
    return declared or (PUBLIC if is_published(spec) else PRIVATE)


def note_shared_records(train: ImageData, test: ImageData, note: Callable[[str], None]) -> None:
    """Notes how many test images also train, by a hash of their pixels.

    It is for a user's own data: published data sets have such images, as they came.
    """
    training = set(_pixel_hashes(train))
    testing = _pixel_hashes(test)
    both = sum(one in training for one in testing)
    if both:
        note(
            f"warning: {both} of {len(testing)} test images are the same, pixel by pixel, as "
            "training images: the accuracy on them says little of new images"
        )


def _pixel_hashes(data: ImageData) -> list[bytes]:
    digests = record_digests(data, np.arange(len(data)), b"", labels=False)
    return [digest.tobytes() for digest in digests]


def require_a_ledger(settings: RunSettings, spec: DatasetSpec) -> None:
    """Own data are not public unless their owner says so: all runs on them have to be counted."""
    if settings.privacy is not None and settings.privacy.ledger is None and not is_published(spec):
        raise PrivacySettingError(
            "privacy",
            "ledger",
            f"must name a folder for the ledgers of your own data ({spec.name!r}), kept over all "
            f"runs on them; or say {NO_LEDGER!r}",
        )


def protects_users(settings: RunSettings) -> bool:
    """Whether privacy protects all records of a user together."""
    return settings.privacy is not None and settings.privacy.unit == USER


def divided(
    settings: RunSettings, parts: Sequence[Tensor], data: ImageData
) -> tuple[list[Tensor], list[Tensor]]:
    """What each client trains on, and its own test split (empty without `local_test`).

    Where users are protected they are not cut in two, and at most `user_records` records of each
    train.
    """
    seed = settings.resolved_partition.seed or 0
    by_user = protects_users(settings)
    training: Sequence[IntArray] = [part.numpy() for part in parts]
    testing: Sequence[IntArray] = [np.zeros(0, np.int64) for _ in parts]
    share = settings.partition.local_test
    if share > 0:
        training, testing = hold_out(training, share, seed, data, by_user)
    most = settings.privacy.user_records if settings.privacy is not None else None
    if most is not None:
        training = [bounded(part, data, most, seed) for part in training]
    return [torch.as_tensor(part) for part in training], [torch.as_tensor(p) for p in testing]
