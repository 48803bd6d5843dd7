"""Options generated from the settings' classes, `--set`, and the help texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_args

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import fedsynth
from fedsynth.cli.app import app
from fedsynth.cli.application import OptionError
from fedsynth.cli.options import KEYS, set_options, setting_parameter
from fedsynth.config.settings import ReportSettings
from fedsynth.features.encoding import EncoderSettings
from fedsynth.validation import field_types

CLASSES: tuple[Any, ...] = (
    fedsynth.FolderSettings,
    EncoderSettings,
    fedsynth.PartitionSettings,
    fedsynth.ModelSettings,
    fedsynth.FedDM,
    fedsynth.PrivacySettings,
    ReportSettings,
)


def test_set_keys_name_method_or_section_settings() -> None:
    keys = set_options(["method.mu=0.1", " model.projection = 256", "partition.missing_classes=2"])
    assert keys == {
        "method": {"mu": "0.1"},
        "model": {"projection": "256"},
        "partition": {"missing_classes": "2"},
    }
    assert set_options(["a=b=c"]) == {"method": {"a": "b=c"}}
    sections = {"partition": {"kind": "iid"}, "method": {}}
    merged = set_options(["partition.alpha=2"], sections)
    assert merged == {"partition": {"kind": "iid", "alpha": "2"}, "method": {}}
    with pytest.raises(OptionError, match=r"^partition\.kind is set twice"):
        set_options(["partition.kind=classes"], sections)
    for text in ("mu", "=1", "model.=1", "nowhere.x=1", "method.=1"):
        with pytest.raises(OptionError, match="--set must be KEY=VALUE"):
            set_options([text])


@pytest.mark.parametrize("section", KEYS)
def test_options_have_field_type_and_help(section: str) -> None:
    """Detects misspelt keys, and fields that a class docstring does not explain."""
    classes = [cls for cls in CLASSES if cls.section == section]
    types = {k: v for cls in (fedsynth.RunSettings, *classes) for k, v in field_types(cls).items()}
    for key in KEYS[section].split():
        annotation = setting_parameter(f"{section}.{key}").annotation
        expected, (optional, option) = types[key], get_args(annotation)
        kind = get_args(optional)[0]
        assert kind.__name__ == (expected.__name__ if key != "method" else "str"), key
        assert len(option.help) > 10
        assert option.help.endswith(".")
    names = {"dataset", "data_root", *(field.name for cls in classes for field in fields(cls))}
    assert section == "run" or set(KEYS[section].split()) <= names


def commands(path: tuple[str, ...] = (), command: Any = None) -> Iterator[Any]:
    command = command or get_command(app)
    yield pytest.param(path, command, id=" ".join(path))
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands((*path, name), inner)


@pytest.mark.parametrize(("path", "command"), list(commands()))
def test_help_shows_all_texts_in_80_columns(path: tuple[str, ...], command: Any) -> None:
    """Square brackets are not read as markup, and no word is cut. Backticks mark code."""
    screen = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"}).stdout
    assert max(map(len, screen.splitlines())) <= 80
    letters = "".join(screen.replace("│", "").split())
    texts = [command.help, *(parameter.help for parameter in command.params)]
    for text in filter(None, texts):
        assert "".join(text.replace("`", "").split()) in letters
    for parameter in command.params:
        assert all(name in letters for name in parameter.opts if name.startswith("--"))
