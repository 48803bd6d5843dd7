"""Settings: merging, conversion, checks and the round trip through TOML; errors name section and
key."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsynth import ModelSettings, PrivacySettings, RunSettings
from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RUN_KINDS
from fedsynth.data.partition_settings import PartitionSettings
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import SettingError, UnknownNameError
from fedsynth.federation.context import public_context
from fedsynth.methods import METHODS, method_class
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.validation import check_fields, field_types, from_mapping, in_range, to_toml


@pytest.mark.parametrize("dataset", ["digits", "mnist", "cifar100"])
def test_settings_survive_toml_round_trip(dataset: str) -> None:
    data = {"dataset": dataset, "data_root": '/a folder/with "quotes" and ε'}
    privacy = {"noise_multiplier": 1.5, "ledger": "/ledgers"}
    for method in METHODS:
        run = {"method": method, "seed": 3, "device": "cpu"}
        resolved = resolve({"run": run, "data": data, "privacy": privacy})
        assert resolve(tomllib.loads(to_toml(resolved.to_mapping()))) == resolved


texts = st.text(st.characters(exclude_categories=["Cs"]))  # TOML cannot hold lone surrogates


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,9}", fullmatch=True),
        texts | st.integers() | st.booleans() | st.floats(allow_nan=False),
    )
)
def test_toml_preserves_every_value(values: dict[str, Any]) -> None:
    read = tomllib.loads(to_toml({"section": values}))["section"]
    assert read == values
    assert [type(read[key]) for key in values] == list(map(type, values.values()))


def test_settings_override_presets_and_defaults() -> None:
    merged = resolve({"model": {"width": 16}})
    assert (merged.method.name, merged.dataset) == ("feddm", "digits")
    assert (merged.model.width, merged.model.depth, merged.model.norm) == (16, 2, "instance")
    assert resolve({"data": {"dataset": "mnist"}}).model.depth == 3
    assert resolve({"data": {"dataset": "cifar100"}}).to_mapping()["method"]["ipc"] == 5
    assert resolve({"data": {"dataset": "cifar10"}}).to_mapping()["method"]["ipc"] == 10
    assert resolve({"run": {"method": "FedFM-Lite"}}).method.name == "fedfm-lite"
    for name in METHODS:
        method = resolve({"run": {"method": name}}).method
        # a method without the preset could not be compared with the others
        assert not isinstance(method, TrainsLocally) or method.batch == 32, name


def test_empty_privacy_section_means_no_privacy() -> None:
    assert resolve({"privacy": {}}).privacy is None
    privacy = resolve({"privacy": {"epsilon": "4", "ledger": "here"}}).privacy
    assert (privacy.epsilon, privacy.noise_multiplier) == (4.0, None)
    assert privacy.ledger == Path("here").absolute()
    with pytest.raises(PrivacySettingError, match=r"privacy.epsilon must be set"):
        resolve({"privacy": {"delta": 1e-5}})


def test_nominal_size_of_natural_clients_is_per_group() -> None:
    """Also where fewer clients than writers take part; other partitions divide all examples."""
    spec = dataset_spec("femnist")
    for kind, pieces in (("natural", 3_550), ("iid", 100)):
        partition = {"clients": 100, "kind": kind}
        run = resolve({"data": {"dataset": "femnist"}, "partition": partition})
        context = public_context(run, spec, torch.device("cpu"))
        assert context.nominal_size == spec.train_size / pieces
    synthetic = resolve({"data": {"dataset": "synthetic(0.5,1)"}})
    assert synthetic.partition == PartitionSettings("natural", 30)
    assert synthetic.model.name == "linear"


CLASSES: tuple[tuple[Any, dict[str, Any]], ...] = (
    *((method_class(name), {}) for name in METHODS),
    (PartitionSettings, {}),
    (ModelSettings, {}),
    (PrivacySettings, {"noise_multiplier": 1.0}),
    (RunSettings, {"method": method_class("feddm")()}),
)
BAD = {int: (-(10**9),), float: (-1e9, math.nan), str: ("no such thing",)}
ANYTHING = {  # checked only with the run's data, method and machine
    "method": ("proxy",),
    "partition": ("seed",),
    "privacy": ("ledger", "mechanism"),
    "run": ("dataset", "device", "seed"),
}


@pytest.mark.parametrize(("cls", "base"), CLASSES, ids=lambda value: getattr(value, "__name__", ""))
def test_errors_name_section_and_key(cls: Any, base: dict[str, Any]) -> None:
    """Errors name the setting's section, not only its key or a field of an inner object."""

    def convert(values: dict[str, Any]) -> object:
        if cls is RunSettings:
            return resolve({"run": values})
        return from_mapping(cls, {**base, **values})

    def error_of(make: Callable[[dict[str, Any]], object], name: str, invalid: object) -> str:
        with pytest.raises((SettingError, PrivacySettingError, UnknownNameError)) as caught:
            make({name: invalid})
        assert (caught.value.section, caught.value.key) == (cls.section, name)
        return str(caught.value)

    for name, kind in field_types(cls).items():
        for invalid in () if name in ANYTHING.get(cls.section, ()) else BAD.get(kind, ()):
            message = error_of(lambda values: cls(**{**base, **values}), name, invalid)
            assert str(invalid) in message
            # unknown names are of a method, a model, a data set
            assert message.startswith((f"{cls.section}.{name} ", "unknown "))
    for name, kind in (RUN_KINDS if cls is RunSettings else field_types(cls)).items():
        for invalid in ("no such thing", [1]) if kind in (bool, int, float) else ():
            message = error_of(convert, name, invalid)
            assert message.startswith(f"{cls.section}.{name} must be ")
    assert error_of(convert, "no_such_setting", 1).startswith("unknown ")


@dataclass(frozen=True)
class Sample:
    """Settings with a field of every type."""

    section: ClassVar[str] = "own"

    number: int = 1
    rate: float = 1
    flag: bool = False
    text: str = ""
    bound: float | None = None


values = st.integers(-(2**63), 2**63) | st.floats(-3e38, 3e38) | st.booleans()


def test_out_of_range_numbers_are_rejected() -> None:
    """Also as text, and in digits of other scripts, which Python accepts."""
    for key in ("number", "rate"):
        for value in (10**400, "9" * 400, "9" * 5000, 1e39, "1e39", "١٢", [1], None):
            with pytest.raises(SettingError) as caught:
                from_mapping(Sample, {key: value})
            assert len(str(caught.value)) < 300
    for value in (2**63, 1.5, True, math.inf):
        with pytest.raises(SettingError):
            from_mapping(Sample, {"number": value})
    for value in ("nan", math.nan, "1e999"):
        with pytest.raises(SettingError, match=r"^own\.bound must be a finite number up to "):
            from_mapping(Sample, {"bound": value})
    assert from_mapping(Sample, {"bound": "2", "number": 3.0}) == Sample(number=3, bound=2.0)


@given(st.integers(-(10**15), 10**15), values, st.booleans(), st.text(max_size=20))
def test_text_and_values_convert_equally(number: int, rate: float, flag: bool, text: str) -> None:
    """A float field stays one if its default is written as 1."""
    as_text = {"number": str(number), "rate": str(float(rate)), "flag": str(flag), "text": text}
    expected = Sample(number, float(rate), flag, text)
    assert from_mapping(Sample, as_text) == expected
    assert from_mapping(Sample, {**as_text, "rate": float(rate), "flag": flag}) == expected


@dataclass(frozen=True)
class Bounded:
    section: ClassVar[str] = "own"
    number: int = in_range(2, 2, 5)
    rate: float = in_range(0.5, 0, 1)
    scale: float = in_range(2.0, 2)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"rate": math.nan}, r"rate must be a finite number"),
        ({"rate": math.inf}, r"rate must be a finite number"),
        ({"rate": 10**400}, r"rate must be between 0 and 1"),
        ({"rate": "1"}, r"rate must be a number, got "),
        ({"number": 1}, r"number must be between 2 and 5, got 1$"),
        ({"number": 2.5}, r"number must be a whole number, got 2.5$"),
        ({"scale": 1}, r"scale must be at least 2, got 1$"),
    ],
)
def test_values_outside_declared_ranges_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=rf"^own\.{text}"):
        check_fields(Bounded(**values))
    check_fields(Bounded(5, 1, 1e9))


def test_setting_errors_can_be_moved() -> None:
    error = SettingError("a", "b", "needs c.d=1: so", value=5)
    assert str(error) == "a.b=5 needs c.d=1: so"
    moved = error.of("x", "y")
    assert (type(moved), str(moved)) == (SettingError, "x.y=5 needs c.d=1: so")
    assert str(SettingError(None, "columns", "must be odd")) == "columns must be odd"
