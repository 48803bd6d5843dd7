"""Hostile values of every command's options: a result, or one line and exit code 2."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.fuzz.mutations import CommandFailedError, Faults, command, fuzzed, generator

RUN, OTHERS = 110, 105
CASES = RUN + OTHERS
WHOLE = ("-1", "0", "1", "2", "7", *("9" * n for n in (6, 9, 12, 18, 19, 30, 400, 5000)))
REAL = ("0.5", "1e-5", "1e5", "1e12", "1e30", "1e308", "-1e308", "1e-308", "5e-324", "nan", "inf")
WORDS = (
    *("", " ", "²", "١٢", "1_0", "x", "x/y", "../..", "x" * 5000, "x,y", ",", "=", "a=b", "None"),
    *("run.rounds=x", "~nobody-of-that-name/x", "\udcff", "\u202e", "\x1b[31m"),
    "none: this data set is public",
)
TRAIN = (
    *("method", "rounds", "seed", "precision", "memory-gb", "participation", "dataset"),
    *("partition", "clients", "alpha", "classes-per-client", "min-size", "subset", "local-test"),
    *("model", "client-models", "width", "depth", "norm", "ipc", "matching", "set", "config"),
    *("data-root", "device"),
)
PRIVATE = (
    *("dp-epsilon", "dp-sigma", "dp-clip", "dp-delta", "dp-max-records", "dp-mechanism"),
    *("dp-sample-rate", "dp-nominal-size", "dp-adjacency", "dp-unit"),
)
SETTINGS = (
    *("method.batch", "method.image_lr", "method.server_lr", "method.min_examples"),
    *("method.networks", "method.augment", "method.image_clip", "model.projection"),
    *("run.evaluate_every", "partition.missing_classes", "partition.dominant_share"),
    *("privacy.user_records", "privacy.max_request_norm", "privacy.four_sums"),
    *("method.server_batch", "method.blur", "partition.seed", "run.memory_gb", "run.seed"),
)
TINY = (
    *("train", "--device", "cpu", "--clients", "2", "--rounds", "1", "--width", "8"),
    *("--set", "iterations=1"),
)
PLAN = ("privacy", "plan", "--mechanism=residual")
OTHER = (
    (*PLAN, "--epsilon"),
    (*PLAN, "--epsilon", "8", "--rounds"),
    (*PLAN, "--epsilon", "8", "--steps"),
    (*PLAN, "--epsilon", "8", "--n"),
    ("privacy", "plan", "--epsilon", "8", "--method"),
    (*PLAN, "--sigma"),
    (*PLAN, "--sigma", "3", "--delta"),
    (*PLAN, "--sigma", "3", "--clients"),
    (*PLAN, "--sigma", "3", "--sample-rate"),
    (*PLAN, "--sigma", "3", "--set"),
    *(tuple(line.split()) for line in (
        "privacy report", "privacy report --ledger", "privacy verify", "privacy verify x --ledger",
        "privacy verify x --public-key", "privacy sign x --key", "privacy repair",
        "privacy carry-over .", "privacy carry-over", "runs", "methods show", "distill --models",
        "distill --models x --arch", "distill --models x --student", "distill --models x --width",
        "distill --models x --depth", "distill --models x --seed", "distill --models x --set",
        "distill --models x --dataset", "partition --clients", "partition --alpha",
        "partition --picture", "partition --set", "privacy audit --run", "privacy audit --canaries",
    )),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are taken for paths must not hit this folder."""
    monkeypatch.chdir(tmp_path)


def word(option: str, rng: random.Random) -> str:
    """A hostile value; for --set often one of a setting."""
    chosen = rng.choice(rng.choice((WHOLE, WHOLE, REAL, REAL, WORDS)))
    if option == "set" and rng.random() < 0.9:
        return f"{rng.choice(SETTINGS)}={chosen}"
    return chosen


def tried(faults: Faults, case: object, args: list[str]) -> None:
    faults.of((case, [a[:60] for a in args[-4:]]), lambda: command(*args), (CommandFailedError,))


@fuzzed(RUN)
def test_runs(cases: range, tmp_path: Path) -> None:
    """A tiny run with one hostile option: what is accepted is run."""
    faults = Faults()
    for number in cases:
        rng = generator(number)
        private = number % 3 == 0
        option = rng.choice(TRAIN + PRIVATE + ("set",) * 20 if private else TRAIN + ("set",) * 12)
        short = ["--ipc=1", "--set=server_epochs=1"]
        given = f"--{option}={word(option, rng)}"
        if option == "ipc":
            short = short[1:]
        sigma = ["--dp-sigma=3"] if private and option not in ("dp-sigma", "dp-epsilon") else []
        output = f"--output={tmp_path / 'out'}"
        if option == "rounds" and given[-3:].isdigit():
            output = "--dry-run"  # a number of rounds may be meant
        tried(faults, number, [*TINY, *short, *sigma, output, given])
    faults.check(cases, accepted=0.1)


@fuzzed(OTHERS)
def test_other_commands(cases: range, tmp_path: Path) -> None:
    faults = Faults()
    for number in cases:
        rng = generator(number)
        start = OTHER[number % len(OTHER)]
        last = word(start[-1].removeprefix("--"), rng)
        args = (
            [*start[:-1], f"{start[-1]}={last}"] if start[-1].startswith("--") else [*start, last]
        )
        tried(faults, number, args)
    faults.check(cases)
