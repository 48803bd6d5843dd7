"""After a fork two processes hold one client's secret and its charged series: neither may be used
twice."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from fedsynth.privacy.errors import LedgerError, PrivacyError
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.privacy.randomness import SecretGenerator
from tests.privacy.support import guard, release, series


def in_a_fork(work: Callable[[], bytes]) -> bytes:
    """What `work` gives in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, work())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        return file.read()


def test_parents_children_and_grandchildren_draw_other_noise_and_masks() -> None:
    secret = SecretGenerator()

    def draw() -> bytes:
        masks = secret.poisson_sample(64, 0.5).numpy().astype(np.uint8)
        return (
            secret.normal((4,), 1.0).numpy().tobytes()
            + np.packbits(np.isin(np.arange(64), masks)).tobytes()
        )

    drawn = [in_a_fork(draw), in_a_fork(lambda: in_a_fork(draw)), in_a_fork(draw), draw(), draw()]
    assert len({one[:32] for one in drawn}) == len({one[32:] for one in drawn}) == 5


def test_a_process_number_that_comes_back_is_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A grandchild may get its grandfather's number; the numbers are made equal here."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    secret = SecretGenerator()
    theirs = in_a_fork(lambda: secret.normal((4,), 1.0).numpy().tobytes())
    assert theirs != secret.normal((4,), 1.0).numpy().tobytes()


def test_a_forked_series_is_refused() -> None:
    """It was charged once, and parent and child would both release it."""
    one = series(3, steps=2)
    one.sample(0)

    def refused() -> bytes:
        said = []
        for step in (one.release, lambda: one.sample(0)):
            with pytest.raises(PrivacyError, match="another process"):
                step()  # type: ignore[no-untyped-call]
            said.append("refused")
        return " ".join(said).encode()

    assert in_a_fork(refused) == b"refused refused"
    one.release()


def test_a_ledger_in_memory_is_not_charged_by_a_fork() -> None:
    """Its parent would not see the charge, and state an ε without it."""
    row = release()
    charged = guard()

    def refused() -> bytes:
        with pytest.raises(LedgerError, match="memory of another process"):
            GaussianSumMechanism(row, 3, charged, SecretGenerator())
        return b"refused"

    assert in_a_fork(refused) == b"refused"
    charged.charge(row)
    assert charged.ledger.releases == (row,)
