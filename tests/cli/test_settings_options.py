"""Options made from the settings' classes, `--set`, and the help texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

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
from fedsynth.cli.options import (
    KEYS,
    set_options,
    setting_option,
    with_set_options,
)
from fedsynth.config.settings import ReportSettings
from fedsynth.validation import field_types

CLASSES: dict[str, Any] = {
    "run": RunSettings,
    "data": FolderSettings,
    "partition": PartitionSettings,
    "model": ModelSettings,
    "method": FedDM,
    "privacy": PrivacySettings,
    "report": ReportSettings,
}


def test_keys_go_to_the_method_or_to_the_section_that_they_name() -> None:
    found = set_options(["method.mu=0.1", " model.projection = 256", "partition.missing_classes=2"])
    assert found == {
        "method": {"mu": "0.1"},
        "model": {"projection": "256"},
        "partition": {"missing_classes": "2"},
    }
    assert set_options(["a=b=c"]) == {"method": {"a": "b=c"}}


def test_anything_else_is_refused() -> None:
    for text in ("mu", "=1", "model.=1", "nowhere.x=1", "method.=1"):
        with pytest.raises(OptionError, match="--set must be KEY=VALUE"):
            set_options([text])


def test_a_setting_that_is_given_twice_is_refused() -> None:
    given = {"partition": {"kind": "iid"}, "method": {}}
    merged = with_set_options(given, ["partition.alpha=2"])
    assert merged == {"partition": {"kind": "iid", "alpha": "2"}, "method": {}}
    with pytest.raises(OptionError, match=r"^partition\.kind is set twice, by an option and by "):
        with_set_options(given, ["partition.kind=classes"])


@pytest.mark.parametrize("section", KEYS)
def test_options_have_the_type_of_their_fields_and_a_help(section: str) -> None:
    """Catches: a misspelt key, and a class's text that has no sentence on a field."""
    types = field_types(RunSettings) | field_types(CLASSES[section])
    for key in KEYS[section].split():
        option = setting_option(f"{section}.{key}", {})
        kind = types[key]
        assert option.kind.__name__ == (kind.__name__ if key != "method" else "str"), key
        assert len(option.help) > 10
        assert option.help.endswith(".")
    assert section == "run" or set(KEYS[section].split()) - {"dataset", "data_root"} <= {
        field.name for field in fields(CLASSES[section])
    }


def commands() -> Iterator[list[str]]:
    open_: list[tuple[list[str], Any]] = [([], get_command(app))]
    for words, command in open_:  # which grows
        open_ += [([*words, name], one) for name, one in getattr(command, "commands", {}).items()]
        yield words


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_a_help_shows_all_of_its_texts_in_80_columns(words: list[str]) -> None:
    """Catches: square brackets that are read as markup, and words that are cut."""
    command: Any = get_command(app)
    for word in words:
        command = command.commands[word]
    shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"}).stdout
    assert max(map(len, shown.splitlines())) <= 80
    letters = "".join(shown.split())
    texts = [command.help, *(one.help for one in command.params)]
    for text in filter(None, texts):
        assert "".join(text.split()) in letters
    for one in command.params:
        assert all(name in letters for name in one.opts if name.startswith("--"))
