"""Options generated from the settings' classes, `--set`, and the help texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_args

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from fedsynth import (
    FedDM,
    FolderSettings,
    ModelSettings,
    PartitionSettings,
    PrivacySettings,
    RunSettings,
)
from fedsynth.cli.app import app
from fedsynth.cli.application import OptionError
from fedsynth.cli.options import KEYS, set_options, setting_parameter
from fedsynth.config.settings import ReportSettings
from fedsynth.features.encoding import EncoderSettings
from fedsynth.validation import field_types

CLASSES: dict[str, tuple[Any, ...]] = {
    "run": (RunSettings,),
    "data": (FolderSettings, EncoderSettings),
    "partition": (PartitionSettings,),
    "model": (ModelSettings,),
    "method": (FedDM,),
    "privacy": (PrivacySettings,),
    "report": (ReportSettings,),
}


def test_set_keys_name_method_or_section_settings() -> None:
    keys = set_options(["method.mu=0.1", " model.projection = 256", "partition.missing_classes=2"])
    assert keys == {
        "method": {"mu": "0.1"},
        "model": {"projection": "256"},
        "partition": {"missing_classes": "2"},
    }
    assert set_options(["a=b=c"]) == {"method": {"a": "b=c"}}


def test_malformed_set_options_are_rejected() -> None:
    for text in ("mu", "=1", "model.=1", "nowhere.x=1", "method.=1"):
        with pytest.raises(OptionError, match="--set must be KEY=VALUE"):
            set_options([text])


def test_repeated_settings_are_rejected() -> None:
    sections = {"partition": {"kind": "iid"}, "method": {}}
    merged = set_options(["partition.alpha=2"], sections)
    assert merged == {"partition": {"kind": "iid", "alpha": "2"}, "method": {}}
    with pytest.raises(OptionError, match=r"^partition\.kind is set twice"):
        set_options(["partition.kind=classes"], sections)


@pytest.mark.parametrize("section", KEYS)
def test_options_have_field_type_and_help(section: str) -> None:
    """Detects misspelt keys, and fields that a class docstring does not explain."""
    types = field_types(RunSettings)
    for cls in CLASSES[section]:
        types |= field_types(cls)
    for key in KEYS[section].split():
        annotation = setting_parameter(f"{section}.{key}", {}).annotation
        expected, (optional, option) = types[key], get_args(annotation)
        kind = get_args(optional)[0]
        assert kind.__name__ == (expected.__name__ if key != "method" else "str"), key
        assert len(option.help) > 10
        assert option.help.endswith(".")
    assert section == "run" or set(KEYS[section].split()) - {"dataset", "data_root"} <= {
        field.name for cls in CLASSES[section] for field in fields(cls)
    }


def commands() -> Iterator[list[str]]:
    open_: list[tuple[list[str], Any]] = [([], get_command(app))]
    for path, command in open_:  # grows in the loop
        open_ += [([*path, name], sub) for name, sub in getattr(command, "commands", {}).items()]
        yield path


@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_help_shows_all_texts_in_80_columns(path: list[str]) -> None:
    """Square brackets are not read as markup, and no word is cut."""
    command: Any = get_command(app)
    for word in path:
        command = command.commands[word]
    screen = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"}).stdout
    assert max(map(len, screen.splitlines())) <= 80
    letters = "".join(screen.split())
    texts = [command.help, *(parameter.help for parameter in command.params)]
    for text in filter(None, texts):
        assert "".join(text.split()) in letters
    for parameter in command.params:
        assert all(name in letters for name in parameter.opts if name.startswith("--"))
