"""Damaged ledgers: none is read as other rows than were written, and one whose hashes were made
anew is read only if its rows can be what they say."""

from __future__ import annotations

import hashlib
import json
import math
import random
from pathlib import Path
from typing import Any

from fedsynth.privacy.ledger import Ledger, read_ledger
from fedsynth.privacy.ledger.lines import repair_ledger
from fedsynth.privacy.releases import SAMPLERS, UNITS, Release
from tests.fuzz.mutations import Faults, altered, altered_json, fuzzed, generator, json_bytes

FLIPPED, REHASHED, REPAIRED = 200, 300, 100
CASES = FLIPPED + REHASHED + REPAIRED
ROWS = [
    Release(n, "images", "residual", "residuals", 5.0, 0.1, 0.25, "poisson", 2, 7840)
    for n in (1, 2, 3)
]


def written(folder: Path) -> bytes:
    ledger = Ledger("north", folder / "good.jsonl", dataset="d", records="ab")
    for row in ROWS[:2]:
        ledger.charge(row)
    ledger.carry_over()
    ledger.charge(ROWS[2])
    return (folder / "good.jsonl").read_bytes()


def loads(line: bytes) -> Any:
    return json.loads(line)


def rehashed(lines: list[dict[str, Any]]) -> bytes:
    """The lines with a chain of hashes as the format describes it, computed here."""
    chain = ""
    made = b""
    for line in lines:
        entry = {key: value for key, value in line.items() if key != "chain"}
        text = chain + json.dumps(entry, sort_keys=True)
        chain = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]
        made += json.dumps({**entry, "chain": chain}).encode() + b"\n"
    return made


def sound(row: Release) -> bool:
    """Whether a row's values can be what they say, by their meaning alone."""
    numbers = (row.noise_multiplier, row.sensitivity, row.sample_rate)
    whole = (row.round, row.steps, row.dimension)
    return (
        all(type(n) in (int, float) and math.isfinite(n) for n in numbers)
        and all(type(n) is int and 0 <= n < 2**63 for n in whole)
        and row.noise_multiplier >= 0
        and row.sensitivity > 0
        and 0 < row.sample_rate <= 1
        and row.sampler in SAMPLERS
        and row.unit in UNITS
        and all(type(t) is str for t in (row.quantity, row.mechanism, row.clipped))
    )


def read(path: Path) -> tuple[Release, ...]:
    ledger = read_ledger(path)
    assert len(ledger.chains) == len(ledger.releases) + 1
    ledger.history().to_json()
    return ledger.releases


@fuzzed(FLIPPED)
def test_a_changed_ledger_is_noticed(cases: range, tmp_path: Path) -> None:
    """A prefix of whole lines is all that may be taken for the ledger."""
    good = written(tmp_path)
    lines = good.splitlines(keepends=True)
    meant = [[loads(line) for line in lines[:n]] for n in range(1, len(lines) + 1)]
    faults = Faults()
    path = tmp_path / "damaged.jsonl"
    for number in cases:
        path.write_bytes(altered(good, generator(number)))
        rows = faults.of(number, lambda: read(path))
        if rows is not None:
            now = [loads(line) for line in path.read_bytes().splitlines()]
            faults.unless(now in meant, number, "read as other rows")
            faults.unless(list(rows) == ROWS[: len(rows)], number, f"read as {rows}")
    faults.check(cases, refused=0.5)


@fuzzed(REHASHED)
def test_new_hashes_make_no_nonsense_true(cases: range, tmp_path: Path) -> None:
    good = [loads(line) for line in written(tmp_path).splitlines()]
    faults = Faults()
    path = tmp_path / "damaged.jsonl"
    for number in cases:
        rng = generator(number)
        changed = altered_json(good, rng)
        try:
            content = rehashed(changed)
        except (AttributeError, RecursionError, ValueError, TypeError):  # no lines of objects
            content = json_bytes(changed, rng)
        path.write_bytes(content)
        rows = faults.of(number, lambda: read(path))
        for row in rows or ():
            faults.unless(sound(row), number, f"took {row}")
    faults.check(cases, accepted=0.05)


@fuzzed(REPAIRED)
def test_a_repair_adds_nothing(cases: range, tmp_path: Path) -> None:
    """What is left after a repair is a ledger of the rows that were charged, or the file as it
    was."""
    good = written(tmp_path)
    faults = Faults()
    for number in cases:
        rng = generator(number)
        path = tmp_path / f"{number}.jsonl"
        torn = good[: rng.randrange(1, len(good))]
        path.write_bytes(torn if rng.random() < 0.5 else altered(torn, rng))
        before = path.read_bytes()
        repair = faults.of(number, lambda p=path: (repair_ledger(p),))
        if repair is None:
            faults.unless(path.read_bytes() == before, number, "changed what it refused")
        else:
            rows = read(path)
            faults.unless(list(rows) == ROWS[: len(rows)], number, f"left {rows}")
    faults.check(cases, accepted=0.2)


def test_the_oracle_makes_the_hashes_of_the_ledger(tmp_path: Path) -> None:
    good = written(tmp_path)
    assert rehashed([loads(line) for line in good.splitlines()]) == good
    assert random.Random(0).random() == generator(0).random()
