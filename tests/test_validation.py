"""Settings' conversion, their checks, and errors that name section and key: of every setting there
is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsynth import ModelSettings, PartitionSettings, PrivacySettings, RunSettings
from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RUN_KINDS
from fedsynth.errors import FedsynthError, SettingError, UnknownNameError
from fedsynth.methods import METHODS, method_class
from fedsynth.privacy.errors import PrivacyError, PrivacySettingError
from fedsynth.validation import check_ranges, field_types, from_mapping

CLASSES: tuple[tuple[Any, dict[str, Any]], ...] = (
    *((method_class(name), {}) for name in METHODS),
    (PartitionSettings, {}),
    (ModelSettings, {}),
    (PrivacySettings, {"noise_multiplier": 1.0}),
    (RunSettings, {"method": method_class("feddm")()}),
)
BAD: dict[type, tuple[Any, ...]] = {
    int: (-(10**9),),
    float: (-1e9, math.nan),
    str: ("no such thing",),
}
ANYTHING = {  # what is right for these is known only when the run has its data, method and machine
    ("method", "proxy"),
    ("partition", "seed"),
    ("privacy", "ledger"),
    ("privacy", "mechanism"),
    ("run", "dataset"),
    ("run", "device"),
    ("run", "seed"),
}
NAMED = (SettingError, PrivacySettingError, UnknownNameError)


@pytest.mark.parametrize(("cls", "base"), CLASSES, ids=lambda value: getattr(value, "__name__", ""))
def test_errors_of_ranges_and_choices_name_section_and_key(cls: Any, base: dict[str, Any]) -> None:
    """Catches: an error that says "ipc" and not whose, or the name of an inner object's field."""
    for name, kind in field_types(cls).items():
        if (cls.section, name) in ANYTHING:
            continue
        for bad in BAD.get(kind, ()):
            with pytest.raises(NAMED) as caught:
                cls(**{**base, name: bad})
            assert (caught.value.section, caught.value.key) == (cls.section, name)
            assert str(bad) in str(caught.value)
            if not str(caught.value).startswith("unknown "):  # of a method, a model, a data set
                assert str(caught.value).startswith(f"{cls.section}.{name} ")


@pytest.mark.parametrize(("cls", "base"), CLASSES, ids=lambda value: getattr(value, "__name__", ""))
def test_errors_of_conversions_name_section_and_key(cls: Any, base: dict[str, Any]) -> None:
    def convert(values: dict[str, Any]) -> object:
        if cls is RunSettings:
            return resolve({"run": values})
        return from_mapping(cls, {**base, **values})

    kinds = RUN_KINDS if cls is RunSettings else field_types(cls)
    for name, kind in kinds.items():
        for bad in ("no such thing", [1]) if kind in (bool, int, float) else ():
            with pytest.raises(SettingError, match=rf"^{cls.section}\.{name} must be ") as caught:
                convert({name: bad})
            assert (caught.value.section, caught.value.key) == (cls.section, name)
    with pytest.raises(UnknownNameError) as missing:
        convert({"no_such_setting": 1})
    assert (missing.value.section, missing.value.key) == (cls.section, "no_such_setting")


@dataclass(frozen=True)
class Own:
    """Settings with every type that there is."""

    section: ClassVar[str] = "own"

    number: int = 1
    rate: float = 1
    flag: bool = False
    text: str = ""
    bound: float | None = None


values = st.integers(-(2**63), 2**63) | st.floats(-3e38, 3e38) | st.booleans()


def test_numbers_that_no_setting_can_be() -> None:
    """Also as text, and in the digits of other scripts, which Python takes."""
    for key in ("number", "rate"):
        for value in (10**400, "9" * 400, "9" * 5000, 1e39, "1e39", "١٢", [1], None):
            with pytest.raises(SettingError) as caught:
                from_mapping(Own, {key: value})
            assert len(str(caught.value)) < 300
    for value in (2**63, 1.5, True, "one", math.inf):
        with pytest.raises(SettingError):
            from_mapping(Own, {"number": value})


@given(st.integers(-(10**15), 10**15), values, st.booleans(), st.text(max_size=20))
def test_text_and_values_are_converted_alike(
    number: int, rate: float, flag: bool, text: str
) -> None:
    """Catches: a float field whose default is written 1 and is then taken for an int."""
    as_text = {"number": str(number), "rate": str(float(rate)), "flag": str(flag), "text": text}
    wanted = Own(number, float(rate), flag, text)
    assert from_mapping(Own, as_text) == wanted
    assert from_mapping(Own, {**as_text, "rate": float(rate), "flag": flag}) == wanted


def test_non_finite_and_optional_numbers() -> None:
    for bad in ("nan", "inf", math.nan, "1e999"):
        with pytest.raises(SettingError, match=r"^own\.bound must be a finite number up to "):
            from_mapping(Own, {"bound": bad})
    assert from_mapping(Own, {"bound": "2"}).bound == 2.0
    assert from_mapping(Own, {"number": 3.0}).number == 3
    assert from_mapping(Own, {}) == Own()


def test_ranges() -> None:
    for odd in (math.nan, math.inf):
        with pytest.raises(SettingError, match=r"^own\.rate must be a finite number"):
            check_ranges(Own(rate=odd), rate=(0, 1))
    with pytest.raises(SettingError, match=r"^own\.rate must be between 0 and 1, got a number"):
        check_ranges(Own(rate=10**400), rate=(0, 1))
    with pytest.raises(SettingError, match=r"^own\.rate must be a number, got "):
        check_ranges(Own(rate="1"), rate=(0, 1))
    with pytest.raises(SettingError, match=r"^own\.number must be between 2 and 5, got 1$"):
        check_ranges(Own(), number=(2, 5))
    with pytest.raises(SettingError, match=r"^own\.number must be a whole number, got 2.5$"):
        check_ranges(Own(2.5), number=(2, 5))  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"^own\.rate must be at least 2, got 1$"):
        check_ranges(Own(), rate=(2, math.inf))
    check_ranges(Own(), number=(1, 1), rate=(1, math.inf))


def test_an_error_names_its_setting_and_can_be_moved_to_another() -> None:
    error = SettingError("a", "b", "needs c.d=1: so", value=5)
    assert str(error) == "a.b=5 needs c.d=1: so"
    moved = error.of("x", "y")
    assert (type(moved), str(moved)) == (SettingError, "x.y=5 needs c.d=1: so")
    assert isinstance(error, FedsynthError)
    assert isinstance(PrivacySettingError("privacy", "clip", "is odd"), PrivacyError)
    assert str(SettingError(None, "columns", "must be odd")) == "columns must be odd"
