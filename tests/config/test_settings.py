"""Settings: merged, checked, and the same after a trip through TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsynth.config.resolve import resolve
from fedsynth.data.partition_settings import PartitionSettings
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import SettingError, UnknownNameError
from fedsynth.federation.context import public_context
from fedsynth.methods import METHODS
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.validation import to_toml

Sections = dict[str, dict[str, Any]]


@pytest.mark.parametrize("dataset", ["digits", "mnist", "cifar100"])
def test_the_trip_through_toml(dataset: str) -> None:
    data = {"dataset": dataset, "data_root": '/a folder/with "quotes" and ε'}
    privacy = {"noise_multiplier": 1.5, "ledger": "/ledgers"}
    for method in METHODS:
        run = {"method": method, "seed": 3, "device": "cpu"}
        found = resolve({"run": run, "data": data, "privacy": privacy})
        assert resolve(tomllib.loads(to_toml(found.to_mapping()))) == found


texts = st.text(st.characters(exclude_categories=["Cs"]))  # TOML cannot hold lone surrogates


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,9}", fullmatch=True),
        texts | st.integers() | st.booleans() | st.floats(allow_nan=False),
    )
)
def test_toml_gives_back_every_value(values: dict[str, Any]) -> None:
    read = tomllib.loads(to_toml({"section": values}))["section"]
    assert read == values
    assert {key: type(value) for key, value in read.items()} == {
        key: type(value) for key, value in values.items()
    }


def test_what_is_given_wins_over_the_preset_which_wins_over_the_defaults() -> None:
    found = resolve({"model": {"width": 16}})
    assert (found.method.name, found.dataset) == ("feddm", "digits")
    assert (found.model.width, found.model.depth, found.model.norm) == (16, 2, "instance")
    assert resolve({"data": {"dataset": "mnist"}}).model.depth == 3
    assert resolve({"data": {"dataset": "cifar100"}}).to_mapping()["method"]["ipc"] == 5
    assert resolve({"data": {"dataset": "cifar10"}}).to_mapping()["method"]["ipc"] == 10


def test_on_the_digits_all_methods_with_local_training_have_batches_of_32() -> None:
    """Catches: a method left out of the preset, so that comparing it with the others compares
    presets."""
    for name in METHODS:
        method = resolve({"run": {"method": name}}).method
        if isinstance(method, TrainsLocally):
            assert method.batch == 32, name
    assert resolve({"run": {"method": "FedFM-Lite"}}).method.name == "fedfm-lite"


def test_no_privacy_settings_mean_no_privacy() -> None:
    assert resolve({"privacy": {}}).privacy is None
    privacy = resolve({"privacy": {"epsilon": "4", "ledger": "here"}}).privacy
    assert privacy is not None
    assert (privacy.epsilon, privacy.noise_multiplier, privacy.ledger) == (
        4.0,
        None,
        Path("here").absolute(),
    )


@pytest.mark.parametrize(
    ("sections", "error", "text"),
    [
        ({"runs": {}}, UnknownNameError, "unknown section 'runs'; did you mean run?"),
        ({"data": {"rot": 1}}, UnknownNameError, "unknown setting of data 'rot'"),
        (
            {"run": {"rounds": "many"}},
            SettingError,
            "run.rounds must be a whole number, got 'many'",
        ),
        ({"method": {"restart": "x"}}, SettingError, "method.restart must be true or false, got"),
        (
            {"privacy": {"delta": 1e-5}},
            PrivacySettingError,
            "privacy.epsilon (a budget) must be set",
        ),
    ],
    ids=str,
)
def test_refusals_are_named_and_one_line(
    sections: Sections, error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        resolve(sections)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_natural_clients_nominal_size_is_a_groups() -> None:
    """Also where fewer clients than writers take part; other partitions divide all examples."""
    spec, cpu = dataset_spec("femnist"), torch.device("cpu")
    small = {"model": {"width": 4}, "partition": {"clients": 100}}
    for kind, pieces in (("natural", 3_550), ("iid", 100)):
        run = resolve(
            {"data": {"dataset": "femnist"}, **small, "partition": {"clients": 100, "kind": kind}}
        )
        assert public_context(run, spec, cpu).nominal_size == spec.train_size / pieces
    assert resolve({"data": {"dataset": "synthetic(0.5,1)"}}).partition == PartitionSettings(
        "natural", 30
    )
    assert resolve({"data": {"dataset": "synthetic(0.5,1)"}}).model.name == "linear"
