"""Damaged config files: each is refused in one line, or makes settings that can be written and
read again, and planned."""

from __future__ import annotations

import math
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedsynth import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.toml_file import read_sections, to_toml
from tests.fuzz.mutations import HOSTILE, Faults, altered, fuzzed, generator

TEXTS, VALUES = 200, 400
CASES = TEXTS + VALUES
METHODS = ("feddm", "fedavg", "fedkf", "fedhydra", "fedgen", "fedfm", "fedaf", "scaffold")
STRANGE = (
    "1979-05-27T07:32:00Z",
    "07:32:00",
    "0x" + "f" * 5000,
    "9" * 400,
    "9" * 5000,
    "1e400",
    "-inf",
    "[" * 5000,
    "[" * 200 + "]" * 200,
    "{a=" * 300 + "1" + "}" * 300,
    "'''\nx\n'''",
    '"\\u0000"',
    '"\\u202e"',
)


def sections(method: str) -> dict[str, dict[str, Any]]:
    """All settings of a private or a plain run."""
    private = {"privacy": {"noise_multiplier": 3.0, "epsilon": 50.0, "sample_rate": 0.5}}
    more = private if method in ("feddm", "fedavg", "fedfm") else {}
    return resolve({"run": {"method": method, "device": "cpu"}, **more}).to_mapping()


def sane(settings: RunSettings) -> bool:
    """Whether all numbers are finite, and none is a truth value where a number stands."""
    parts = (settings, settings.partition, settings.model, settings.method, settings.privacy)
    for part in parts:
        for f in fields(part) if part is not None else ():
            value = getattr(part, f.name)
            if isinstance(value, float) and not math.isfinite(value):
                return False
            if isinstance(value, bool) and "bool" not in str(f.type):
                return False
            if isinstance(value, int) and abs(value) >= 2**63:
                return False
    return True


def again(path: Path) -> RunSettings:
    """Settings of the file, if what is written of them is read as the same."""
    settings = resolve(read_sections(path))
    text = to_toml(settings.to_mapping())
    text.encode()
    assert resolve(tomllib.loads(text)) == settings, text
    return settings


@fuzzed(TEXTS)
def test_damaged_texts(cases: range, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    faults = Faults()
    for number in cases:
        rng = generator(number)
        good = to_toml(sections(rng.choice(METHODS))).encode()
        path.write_bytes(altered(good, rng))
        made = faults.of(number, lambda: again(path))
        faults.unless(made is None or sane(made), number, f"made {made}")
    faults.check(cases, refused=0.33)


@fuzzed(VALUES)
def test_values_that_nobody_can_mean(cases: range, tmp_path: Path) -> None:
    """One setting, of any section, becomes another type, huge, not finite, or deeply nested."""
    path = tmp_path / "config.toml"
    faults = Faults()
    for number in cases:
        rng = generator(number)
        path.write_text(with_one(sections(rng.choice(METHODS)), rng), errors="surrogateescape")
        made = faults.of(number, lambda: again(path))
        faults.unless(made is None or sane(made), number, f"made {made}")
    faults.check(cases, refused=0.33, accepted=0.02)


def with_one(given: dict[str, dict[str, Any]], rng: Any) -> str:
    """The sections as TOML, with one hostile value."""
    section = rng.choice(list(given))
    key = rng.choice(list(given[section]))
    given[section][key] = "@@"
    return to_toml(given).replace('"@@"', in_toml(rng))


def in_toml(rng: Any) -> str:
    """A hostile value as TOML says it."""
    value = rng.choice((*HOSTILE, *map(Raw, STRANGE)))
    if isinstance(value, Raw):
        return value
    if isinstance(value, str):
        return to_toml({"x": {"y": value.replace("\ud800", "\ufffd")}}).split("= ", 1)[1].strip()
    if value is None or isinstance(value, dict):
        return "{ x = 1 }"
    if isinstance(value, list):
        return "[[1], 'x']"
    return str(value).lower() if not isinstance(value, int) or value < 10**40 else "9" * 400


class Raw(str):
    """Text that is TOML already."""

    __slots__ = ()
