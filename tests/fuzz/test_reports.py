"""Damaged run folders: `privacy report` and `privacy verify` end with their verdict or in one line,
and `verify` accepts nothing that says something else than the run did."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fuzz.mutations import (
    CommandFailedError,
    Faults,
    altered,
    altered_json,
    command,
    fuzzed,
    generator,
    json_bytes,
)

STATED, JSONS, BYTES = 180, 100, 100
CASES = STATED + JSONS + BYTES
ONE_LINE = (CommandFailedError,)
TINY = ("--set", "iterations=1", "--set", "server_epochs=1", "--ipc", "2", "--width", "8")
PROMISED = (
    "config.toml",
    "privacy_start.json",
    "privacy_report.md",
    "privacy_report.html",
    "metrics.jsonl",
    "summary.json",
    "ledger/client-000.jsonl",
    "ledger/client-001.jsonl",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished private run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    output = tmp_path_factory.mktemp("runs")
    command(
        *("train", "--device", "cpu", "--clients", "2", "--rounds", "2", "--dp-sigma", "3"),
        *(*TINY, "--output", str(output)),
    )
    (folder,) = output.iterdir()
    yield folder
    torch.set_num_threads(before)


def alike(one: Any, other: Any) -> bool:
    """Whether two JSON values say the same, figures up to 1e-6 of them and whole ones as such."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and type(other) in (int, float):
        try:
            return math.isclose(one, other, rel_tol=1.01e-6, abs_tol=1e-12)
        except OverflowError:
            return False
    return type(one) is type(other) and bool(one == other)


def without_versions(report: dict[str, Any]) -> dict[str, Any]:
    """What must follow from the run's files: all but which versions made it."""
    report = json.loads(json.dumps(report))
    kept = report.get("provenance")
    report["provenance"] = kept.get("config") if isinstance(kept, dict) else kept
    accountant = report.get("accountant")
    if isinstance(accountant, dict):
        accountant.pop("library", None)
    return report


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def restored(file: Path, content: bytes, call: Callable[[], Any]) -> Any:
    """What the call returns with another content of a file, which then has its own again."""
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        return call()
    finally:
        file.write_bytes(before)


@fuzzed(STATED)
def test_verify_accepts_no_other_report(cases: range, copied: Path) -> None:
    """One change of the report's JSON: refused, or of no meaning."""
    file = copied / "privacy_report.json"
    good = json.loads(file.read_text())
    faults = Faults()
    for number in cases:
        rng = generator(number)
        content = json_bytes(altered_json(good, rng), rng)

        def verified(number: int = number) -> tuple[int, str]:
            return faults.of(number, lambda: command("privacy", "verify", str(copied)), ONE_LINE)  # type: ignore[no-any-return]

        done = restored(file, content, verified)
        if done is not None and done[0] == 0:
            same = alike(without_versions(good), without_versions(json.loads(content)))
            faults.unless(same, number, f"accepted {content[:3000]!r}")
    faults.check(cases)


@fuzzed(JSONS)
def test_reports_of_anybody(cases: range, copied: Path) -> None:
    """Each form of a damaged report is text, and nothing in it is taken for HTML."""
    file = copied / "privacy_report.json"
    good = json.loads(file.read_text())
    faults = Faults()
    for number in cases:
        rng = generator(number)
        content = json_bytes(altered_json(good, rng), rng)
        form = ("markdown", "html", "json")[number % 3]
        shown = restored(
            file,
            content,
            lambda number=number, form=form: faults.of(
                number,
                lambda: command("privacy", "report", str(copied), "--format", form),
                ONE_LINE,
            ),
        )
        if shown is not None:
            faults.unless("\x1b" not in shown[1], number, "steers a terminal")
            script = form == "html" and "<script" in shown[1]
            faults.unless(not script, number, "has a script")
    faults.check(cases)


@fuzzed(BYTES)
def test_verify_reads_whatever_a_folder_has(cases: range, copied: Path) -> None:
    """Bytes of any of the files that a report follows from."""
    faults = Faults()
    accepted = 0
    for number in cases:
        rng = generator(number)
        file = copied / PROMISED[number % len(PROMISED)]
        good = file.read_bytes()
        content = damaged(file, good, rng)
        done = restored(
            file,
            content,
            lambda number=number: faults.of(
                number, lambda: command("privacy", "verify", str(copied)), ONE_LINE
            ),
        )
        if done is not None and done[0] == 0:
            accepted += 1
            same = same_meaning(file.name, good, content)
            faults.unless(same, number, f"{file.name}: accepted {content!r:.1500}")
    faults.check(cases)
    assert accepted < len(cases) / 2


def damaged(file: Path, good: bytes, rng: random.Random) -> bytes:
    if file.suffix == ".json" and rng.random() < 0.6:
        return json_bytes(altered_json(json.loads(good), rng), rng)
    return altered(good, rng)


SPEAKS_OF_PRIVACY = {
    "summary.json": ("method", "settings", "dataset", "rounds", "seed", "differential_privacy"),
    "metrics.jsonl": ("round", "epsilon"),
}


def same_meaning(name: str, good: bytes, content: bytes) -> bool:
    """Whether the file says the same of the run's privacy."""
    if name == "config.toml":
        import tomllib

        was, now = tomllib.loads(good.decode()), tomllib.loads(content.decode())
        for mapping in (was, now):
            for key in ("device", "memory_gb", "compile", "evaluate_every", "precision"):
                mapping["run"].pop(key, None)
        return alike(was, now)
    keys = SPEAKS_OF_PRIVACY.get(name)
    if name == "privacy_start.json":
        return alike(json.loads(good), json.loads(content))
    if keys is None:
        return good == content
    lines = (lambda text: [text]) if name == "summary.json" else bytes.splitlines
    was, now = ([json.loads(line) for line in lines(text)] for text in (good, content))  # type: ignore[assignment]
    return len(was) == len(now) and all(
        alike({key: a.get(key) for key in keys}, {key: b.get(key) for key in keys})
        for a, b in zip(was, now, strict=True)
    )
