"""--set: settings of the method and, with a section, of all else; nothing is given twice."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest
from typer.main import get_command

from fedsynth import FedDM, ModelSettings, PartitionSettings, PrivacySettings, RunSettings
from fedsynth.cli.app import app, partition, train
from fedsynth.cli.errors import OptionError
from fedsynth.cli.option_names import SETTINGS, option_names, sections_of
from fedsynth.cli.settings_options import method_settings, set_options, with_set_options
from fedsynth.federation.terms.report_settings import ReportSettings

NAMES = option_names(get_command(app).commands["train"])  # type: ignore[attr-defined]


def test_keys_go_to_the_method_or_to_the_section_that_they_name() -> None:
    found = set_options(["method.mu=0.1", " model.projection = 256", "partition.missing_classes=2"])
    assert found == {
        "method": {"mu": "0.1"},
        "model": {"projection": "256"},
        "partition": {"missing_classes": "2"},
    }
    assert method_settings(["a=b=c"]) == {"a": "b=c"}


@pytest.mark.parametrize("text", ["mu", "=1", "model.=1", "nowhere.x=1", "method.=1"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--set takes KEY=VALUE"):
        set_options([text])


def test_given_twice() -> None:
    given = {"partition": {"kind": "iid", "alpha": None}, "method": {}}
    assert with_set_options(given, ["partition.alpha=2"], NAMES) == {
        "partition": {"kind": "iid", "alpha": "2"},
        "method": {},
    }
    with pytest.raises(OptionError, match="kind is given twice, by --partition and by --set"):
        with_set_options(given, ["partition.kind=classes"], NAMES)
    given = {
        "partition": {},
        "model": {"clients": "lenet5"},
        "privacy": {"delta": 0.1},
        "method": {},
    }
    with pytest.raises(
        OptionError, match="clients is given twice, by --client-models and by --set"
    ):
        with_set_options(given, ["model.clients=cnn1"], NAMES)
    with pytest.raises(OptionError, match="delta is given twice, by --dp-delta and by --set"):
        with_set_options(given, ["privacy.delta=1"], NAMES)
    assert with_set_options(given, ["partition.clients=3"], NAMES)["partition"] == {"clients": "3"}
    with pytest.raises(OptionError, match="one of model"):
        method_settings(["model.width=3"])


def test_every_option_is_a_setting_or_known_to_be_none() -> None:
    """Catches: a misspelt name in `SETTINGS`, or a new option that reaches no setting."""
    types = {
        "run": RunSettings,
        "partition": PartitionSettings,
        "model": ModelSettings,
        "method": FedDM,
        "privacy": PrivacySettings,
        "report": ReportSettings,
    }
    for section, key in SETTINGS.values():
        assert section == "data" or key in {f.name for f in fields(types[section])}, (section, key)
    others = {
        "context",
        "config",
        "preset",
        "settings",
        "output",
        "resume",
        "as_json",
        "dry_run",
        "download",
        "sign_key",
        "log",
    }
    assert set(signature(train).parameters) == others | set(SETTINGS)
    assert set(signature(partition).parameters) - set(SETTINGS) == {
        "context",
        "settings",
        "download",
        "picture",
    }


def test_options_reach_their_sections() -> None:
    found = sections_of(
        {
            "partition": "iid",
            "dp_sigma": 3.0,
            "data_root": Path("x"),
            "picture": Path("y"),
            "rounds": None,
        }
    )
    assert found["partition"]["kind"] == "iid"
    assert found["privacy"]["noise_multiplier"] == 3.0
    assert {k: v for k, v in found["data"].items() if v is not None} == {"data_root": "x"}
    assert "picture" not in {key for section in found.values() for key in section}
