"""Reproducible damage to valid files, messages and options, and the checks of calls with them: each
returns a result or raises a one-line error of fedsynth, within 20 seconds.

A surface builds its valid bytes or its valid JSON value once, damages it for each case by `altered`
or `altered_json`, and passes the call to `Fuzzer.run`.
"""

from __future__ import annotations

import copy
import functools
import json
import operator
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from fedsynth.cli.app import app
from fedsynth.errors import FedsynthError

SECONDS = 20.0
LONGEST_LINE = 600
# Unexpected values: another type, out of range, huge, not finite, control characters.
HOSTILE: tuple[Any, ...] = (
    None, True, 0, -1, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, -1e308, 5e-324,
    float("nan"), float("inf"), "", " ", "x", "²", "١٢", "1e999", "nan", "a/b", "../../x",
    "~nobody-of-that-name", "\0", "\x1b[31m", "\ud800", "<script>alert(1)</script>", "|" * 20,
    "9" * 5000, "x" * 100_000, [], {}, [[]], [1, "x"], {"x": 1},
)  # fmt: skip


def altered(
    valid: bytes, rng: random.Random, *donors: bytes, starts: Sequence[int] | None = None
) -> bytes:
    """Changes one to three places, anywhere or within six bytes after one of `starts`."""
    content = bytearray(valid)
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(content) + 1)
        if starts is not None:
            start = min(rng.choice(starts) + rng.randint(0, 6), len(content))
        length = rng.randint(1, 12)
        match rng.randrange(9):
            case 0 | 1 if start < len(content):
                content[start] ^= 1 << rng.randrange(8)
            case 2 if start < len(content):
                content[start] = rng.randrange(256)
            case 3:
                del content[start : start + length]
            case 4:
                content[start:start] = rng.randbytes(length)
            case 5:
                content[start:start] = content[start : start + 10 * length]
            case 6:
                other = rng.choice((valid, *donors))
                first = rng.randrange(len(other) + 1)
                content[start : start + length] = other[first : first + 3 * length]
            case 7:
                content[start : start + 8] = rng.choice(
                    (b"\xff" * 8, b"\0" * 8, b"\xff" * 7 + b"\x7f")
                )
            case _:
                del content[start:]
    return bytes(content)


def value_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every value inside lists and mappings."""
    if not isinstance(value, (dict, list)):
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        yield from value_paths(part, (*path, key))


def altered_json(valid: Any, rng: random.Random) -> Any:
    """Returns a copy of a JSON value with one random change at a random path."""
    value = copy.deepcopy(valid)
    path = rng.choice(list(value_paths(value)))
    parent, key = functools.reduce(operator.getitem, path[:-1], value), path[-1]
    old = parent[key]
    match rng.randrange(6):
        case 0 | 1:
            parent[key] = copy.deepcopy(rng.choice(HOSTILE))
        case 2:
            parent[key] = _similar(old, rng)
        case 3:
            del parent[key]
        case 4 if isinstance(parent, dict):
            parent[rng.choice(("x", "", f"{key}2", "\ud800", "a" * 300))] = copy.deepcopy(old)
        case 4:
            parent.append(copy.deepcopy(old))
        case _:
            for _ in range(rng.choice((1, 30, 5000))):
                parent[key] = [parent[key]]
    return value


def _similar(old: Any, rng: random.Random) -> Any:
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return old + rng.choice((1, -1, 1000))
    if isinstance(old, float):
        return old * rng.choice((1.01, 0.99, -1.0)) + rng.choice((0.0, 1e-3))
    if isinstance(old, str):
        return old + rng.choice((" ", "x", "\n", "\u202e"))
    if isinstance(old, list):
        return old[:-1] if old and rng.random() < 0.5 else [*old, *(old[:1] or [0])]
    return {**old, "one more": 1} if isinstance(old, dict) else 0


def json_bytes(value: Any, rng: random.Random) -> bytes:
    """Returns the value as JSON if possible, with a damaged text in a third of the cases."""
    try:
        text = json.dumps(value)
    except RecursionError:
        text = '{"x":' + "[" * 100_000
    except ValueError:
        text = '{"x": ' + "9" * 5000 + "}"
    match rng.randrange(12):
        case 0 if text.startswith("{") and '":' in text:
            first = text[1 : text.index('":') + 2]
            text = f"{{{first} 1, {text[1:]}"
        case 1:
            return text.encode().replace(b"e", b"\xff", 1)
        case 2:
            return b"\xef\xbb\xbf" + text.encode()
        case 3:
            text = text.replace(": ", ": " + "[" * rng.choice((1, 100_000)), 1)
    return text.encode(errors="surrogatepass")


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def interrupt(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def replaced_content(path: Path, content: bytes | None) -> Iterator[None]:
    """Replaces a file's content, or removes the file; restores it afterwards."""
    original = path.read_bytes() if path.exists() else None
    try:
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        yield
    finally:
        path.unlink(missing_ok=True)  # writing into a pipe would block
        if original is not None:
            path.write_bytes(original)


class CommandFailedError(Exception):
    """The command line exited with a one-line error."""


EXPECTED_ERRORS = (FedsynthError, CommandFailedError)


def command(*args: str) -> tuple[int, str]:
    """Runs `fedsynth` in this process; returns its exit code, 0 or 1, and its output. Exit code 2
    and one line on stderr raise a CommandFailedError, any other exit an AssertionError."""
    runner = CliRunner(env={"FEDSYNTH_DATA": None, "COLUMNS": "200"})
    run = runner.invoke(app, list(args), catch_exceptions=False)
    if run.exit_code == 2:
        errors = [line for line in run.stderr.splitlines() if line.startswith("fedsynth: error: ")]
        assert len(errors) == 1, run.stderr[:500]
        assert run.stderr.endswith(errors[0] + "\n"), run.stderr[-500:]
        raise CommandFailedError(errors[0][:1000])
    assert run.exit_code in (0, 1), (run.exit_code, run.stderr[:500])
    return run.exit_code, run.stdout


class Fuzzer:
    """The numbered cases of a surface, in their folder, and the problems: neither a result nor a
    one-line error. `refused` and `accepted` count the other cases."""

    def __init__(self, folder: Path, numbers: range) -> None:
        self.folder = folder
        self.numbers = numbers
        self.faults: list[str] = []
        self.refused = 0
        self.accepted = 0

    def cases(self) -> Iterator[tuple[int, random.Random]]:
        """Yields the number and the generator of each case, the same on every machine."""
        for number in self.numbers:
            yield number, random.Random(number)

    def run(self, case: object, call: Callable[..., Any], *args: Any) -> None:
        try:
            with time_limit(SECONDS):
                call(*args)
            self.accepted += 1
        except EXPECTED_ERRORS as error:
            self.refused += 1
            text = str(error)
            if not text.isprintable() or len(text) > LONGEST_LINE:
                self.faults.append(f"{case}: not one short line: {text[:300]!r}")
        except Exception as error:
            self.faults.append(f"{case}: {type(error).__name__}: {str(error)[:300]}")

    def check(self, refused: float, accepted: float) -> None:
        """Asserts no problem, no missing case, and least shares of refused and accepted."""
        assert self.faults == [], f"{len(self.faults)} faults:\n" + "\n".join(self.faults[:40])
        assert self.refused + self.accepted == len(self.numbers)
        assert self.refused >= refused * len(self.numbers)
        assert self.accepted >= accepted * len(self.numbers)
