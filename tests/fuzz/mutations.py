"""Damage to valid files, messages and options, reproducible from a seed, and what a call may do
with it: a result, or one line of an error of fedsynth's own, within 20 seconds.

A surface makes its good bytes or its good JSON value once, takes `altered` or `altered_json` of it
for each of its cases, and gives the call to `Faults.of`.
"""

from __future__ import annotations

import copy
import json
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from fedsynth.cli.app import app
from fedsynth.errors import FedsynthError
from fedsynth.privacy.errors import PrivacyError

SECONDS = 20.0
LONGEST_LINE = 4000
HOSTILE: tuple[Any, ...] = (
    None, True, 0, -1, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, -1e308, 5e-324,
    float("nan"), float("inf"), "", " ", "x", "²", "١٢", "1e999", "nan", "a/b", "../../x",
    "~nobody-of-that-name", "\0", "\x1b[31m", "\ud800", "<script>alert(1)</script>", "|" * 20,
    "9" * 5000, "x" * 100_000, [], {}, [[]], [1, "x"], {"x": 1},
)  # fmt: skip
"""What no place expects: another type, out of range, huge, not finite, steering characters."""


def altered(
    good: bytes, rng: random.Random, *others: bytes, starts: Sequence[int] | None = None
) -> bytes:
    """The bytes with one to three changes: bits, bytes, cuts, repeats, parts of `others`; anywhere,
    or at one of `starts` and the six bytes after it."""
    content = bytearray(good)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(content) + 1)
        if starts is not None:
            at = min(rng.choice(starts) + rng.randint(0, 6), len(content))
        long = rng.randint(1, 12)
        match rng.randrange(9):
            case 0 | 1 if at < len(content):
                content[at] ^= 1 << rng.randrange(8)
            case 2 if at < len(content):
                content[at] = rng.randrange(256)
            case 3:
                del content[at : at + long]
            case 4:
                content[at:at] = rng.randbytes(long)
            case 5:
                content[at:at] = content[at : at + 10 * long]
            case 6:
                other = rng.choice((good, *others))
                start = rng.randrange(len(other) + 1)
                content[at : at + long] = other[start : start + 3 * long]
            case 7:
                content[at : at + 8] = rng.choice((b"\xff" * 8, b"\0" * 8, b"\xff" * 7 + b"\x7f"))
            case _:
                del content[at:]
    return bytes(content)


def places(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside lists and mappings."""
    inside: Any = ()
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, list):
        inside = enumerate(value)
    for key, part in inside:
        yield (*where, key)
        yield from places(part, (*where, key))


def altered_json(good: Any, rng: random.Random) -> Any:
    """A copy of a JSON value with one change at a random place: another value, a slightly other
    one, a key or an entry less or more, two parts swapped."""
    value = copy.deepcopy(good)
    path = rng.choice(list(places(value)))
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    key = path[-1]
    old = holder[key]
    match rng.randrange(6):
        case 0 | 1:
            holder[key] = copy.deepcopy(rng.choice(HOSTILE))
        case 2:
            holder[key] = _nearly(old, rng)
        case 3:
            del holder[key]
        case 4 if isinstance(holder, dict):
            holder[rng.choice(("x", "", f"{key}2", "\ud800", "a" * 300))] = copy.deepcopy(old)
        case 4:
            holder.append(copy.deepcopy(old))
        case _:
            for _ in range(rng.choice((1, 30, 5000))):
                holder[key] = [holder[key]]
    return value


def _nearly(old: Any, rng: random.Random) -> Any:
    """A value of the same type that is not the same."""
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
    """The value as JSON, as far as it can be said, now and then with a flaw of the text itself: a
    key twice, no UTF-8, a byte order mark, endless nesting."""
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
        case _:
            pass
    return text.encode(errors="surrogatepass")


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends what takes longer with a TimeoutError."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def replaced_content(path: Path, content: bytes | None) -> Iterator[None]:
    """Gives a file another content, or removes it; afterwards it is as before."""
    before = path.read_bytes() if path.exists() else None
    try:
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        yield
    finally:
        path.unlink(missing_ok=True)  # it may be a pipe, which would not end a write
        if before is not None:
            path.write_bytes(before)


class CommandFailedError(Exception):
    """The command line refused, in one line."""


OWN = (FedsynthError, PrivacyError, CommandFailedError)


def command(*args: str) -> tuple[int, str]:
    """Runs `fedsynth` in this process: its exit code (0, or 1 of a verification) and its output.

    Raises:
        CommandFailedError: it refused, with exit code 2 and one line on stderr.
        AssertionError: it ended in another way.
    """
    runner = CliRunner(env={"FEDSYNTH_DATA": None, "COLUMNS": "200"})
    done = runner.invoke(app, list(args), catch_exceptions=False)
    if done.exit_code == 2:
        errors = [line for line in done.stderr.splitlines() if line.startswith("fedsynth: error: ")]
        assert len(errors) == 1, done.stderr[:500]
        assert done.stderr.endswith(errors[0] + "\n"), done.stderr[-500:]
        raise CommandFailedError(errors[0][:1000])
    assert done.exit_code in (0, 1), (done.exit_code, done.stderr[:500])
    return done.exit_code, done.stdout


class Faults:
    """The numbered cases of a surface, in a folder of their own, and what was neither a result nor
    an error as it should be; `refused` and `accepted` count the others."""

    def __init__(self, folder: Path, numbers: range) -> None:
        self.folder = folder
        self.numbers = numbers
        self.found: list[str] = []
        self.refused = 0
        self.accepted = 0

    def cases(self) -> Iterator[tuple[int, random.Random]]:
        """The number and the draws of each case, the same on every machine."""
        for number in self.numbers:
            yield number, random.Random(number)

    def of(self, case: object, call: Callable[..., Any], *args: Any) -> Any:
        """What the call returns; None where it refuses, or is at fault."""
        try:
            with time_limit(SECONDS):
                result = call(*args)
        except OWN as error:
            self.refused += 1
            text = str(error)
            if "\n" in text or len(text) > LONGEST_LINE:
                self.found.append(f"{case}: not one short line: {text[:300]!r}")
            return None
        except Exception as error:
            self.found.append(f"{case}: {type(error).__name__}: {str(error)[:300]}")
            return None
        self.accepted += 1
        return result

    def unless(self, right: bool, case: object, what: str) -> None:
        """A wrong acceptance."""
        if not right:
            self.found.append(f"{case}: {what}")

    def check(self, refused: float, accepted: float) -> None:
        """No fault, no case left out, and at least these shares refused and accepted."""
        assert self.found == [], f"{len(self.found)} faults:\n" + "\n".join(self.found[:40])
        assert self.refused + self.accepted == len(self.numbers)
        assert self.refused >= refused * len(self.numbers)
        assert self.accepted >= accepted * len(self.numbers)
