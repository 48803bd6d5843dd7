"""Options generated from the settings' classes, `--set`, and the help texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from fedsynth.cli.app import app
from fedsynth.cli.application import OptionError
from fedsynth.cli.options import merged, set_options
from fedsynth.config.resolve import resolve


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
    with pytest.raises(OptionError, match=r"^partition\.kind is set by an option and by --set"):
        set_options(["partition.kind=classes"], sections)
    for text in ("mu", "=1", "model.=1", "nowhere.x=1", "method.=1"):
        with pytest.raises(OptionError, match="--set must be KEY=VALUE"):
            set_options([text])


def test_feature_map_of_option_replaces_that_of_config() -> None:
    config = {"run": {"method": "fedstats"}, "method": {"features": "scattering"}}
    settings: Any = resolve(merged(config, {"run": {}, "model": {"features": "pixels"}}))
    assert settings.method.features == "pixels"


def commands(path: tuple[str, ...] = (), command: Any = None) -> Iterator[Any]:
    command = command or get_command(app)
    yield pytest.param(path, command, id=" ".join(path))
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands((*path, name), inner)


@pytest.mark.parametrize(("path", "command"), list(commands()))
def test_help_shows_all_texts_in_80_columns(path: tuple[str, ...], command: Any) -> None:
    """Every option has a sentence. Square brackets are not read as markup, and no word is cut.
    Backticks mark code."""
    screen = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"}).stdout
    assert max(map(len, screen.splitlines())) <= 80
    letters = "".join(screen.replace("│", "").split())
    texts = [command.help, *(parameter.help for parameter in command.params)]
    for text in filter(None, texts):
        assert "".join(text.replace("`", "").split()) in letters
    options = [item for item in command.params if item.param_type_name == "option"]
    for option in options:  # Flower's version of typer keeps the help of arguments elsewhere
        assert len(option.help) > 10, option.name
        assert option.help.endswith("."), option.name
        assert all(name in letters for name in option.opts if name.startswith("--"))
