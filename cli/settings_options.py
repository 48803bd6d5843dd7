"""Conversion of options to sections of settings: --set KEY=VALUE, the config file, files of user
code (FILE.py:NAME), and the options that --resume allows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from fedsynth.cli.application import OptionError
from fedsynth.errors import SettingError

Sections = dict[str, dict[str, Any]]
SET_SECTIONS = ("method", "run", "data", "partition", "model", "privacy", "report")


def set_options(texts: list[str]) -> Sections:
    """Returns the settings of --set: KEY=VALUE of the method, SECTION.KEY=VALUE of another section
    of a config file.
    """
    values: Sections = {"method": {}}
    for text in texts:
        key, equals, value = text.partition("=")
        section, dot, name = key.strip().partition(".")
        if not dot:
            section, name = "method", section
        if not equals or not name or section not in SET_SECTIONS:
            sections = ", ".join(SET_SECTIONS)
            raise OptionError(
                "--set must be KEY=VALUE for the method, or SECTION.KEY=VALUE for "
                f"{sections}; got {text!r}"
            )
        values.setdefault(section, {})[name] = value.strip()
    return values


def method_settings(texts: list[str]) -> dict[str, Any]:
    """Returns the settings of --set for a command that has only a method's settings."""
    sections = set_options(texts)
    if len(sections) > 1:
        raise OptionError(
            f"here, --set must be a setting of the method, got one of {list(sections)[1]}"
        )
    return sections["method"]


def with_set_options(sections: Sections, texts: list[str]) -> Sections:
    """Returns the settings of options and --set together.

    Args:
        sections: the options' values.
        texts: the values of --set.

    Raises:
        OptionError: an option and --set give the same setting.
    """
    merged = copy.deepcopy(sections)
    for section, values in set_options(texts).items():
        twice = merged.setdefault(section, {}).keys() & values.keys()
        if twice:
            raise OptionError(
                f"{section}.{min(twice)} is set twice, by an option and by --set: leave out one of "
                "them"
            )
        merged[section].update(values)
    return merged


def read_config(path: Path | None) -> Sections:
    """Returns the sections of a TOML file, or of a run folder's config.toml; empty for None."""
    if path is None:
        return {}
    from fedsynth.toml_file import read_sections

    return read_sections(path / "config.toml" if path.is_dir() else path)


def merged(
    config: Sections, chosen: Sections, note: Callable[[str], None] = lambda text: None
) -> Sections:
    """Returns the config file's settings, overridden by options. If the options change the method,
    the old method's settings are dropped, and `note` receives a message.
    """
    from fedsynth.methods import DEFAULT_METHOD

    config = copy.deepcopy(config)
    old = config.get("run", {}).get("method", DEFAULT_METHOD)
    new = str(chosen["run"].get("method", old))
    if new != old and config.pop("method", None):
        note(
            f"note: the config's method settings are for {old} and are ignored; {new} uses "
            "its defaults and your options"
        )
    if chosen.get("data", {}).get("folder") and "folder" not in config.get("data", {}):
        # custom images replace a named data set, whose name they do not have
        config.get("data", {}).pop("dataset", None)
        config.get("partition", {}).pop("kind", None)
    for section, values in _features_where_they_belong(chosen, new).items():
        config.setdefault(section, {}).update(values)
    return config


def _features_where_they_belong(options: Sections, method: str) -> Sections:
    """Moves --features to the method if it has its own feature map, as FedStats has, otherwise to
    the model.

    Raises:
        OptionError: it is given twice.
    """
    from fedsynth.methods import METHODS, method_class

    if "features" not in options.get("model", {}) or method not in METHODS:
        return options
    if "features" not in method_class(method).__dataclass_fields__:
        return options
    if "features" in options.get("method", {}):
        raise OptionError(
            "features is set twice, by --features and by --set: leave out one of them"
        )
    options = copy.deepcopy(options)
    options.setdefault("method", {})["features"] = options["model"].pop("features")
    return options


def from_table(
    name: str, config: Path | None, chosen: Sections, note: Callable[[str], None]
) -> Sections:
    """Returns the settings of a published table's cell, overridden by the given ones.

    Args:
        name: the table's preset.
        config: of --config, which must not be combined with it.
        chosen: the settings of options and --set.
        note: receives the cell's name.

    Raises:
        OptionError: there is a config, too.
        FedsynthError: no such preset or cell.
    """
    if config is not None:
        raise OptionError("--preset and --config both define all settings: use only one of them")
    from fedsynth.reproduction.preset_files import preset
    from fedsynth.reproduction.presets import cell_words, preset_sections

    table = preset(name)
    sections, cell = preset_sections(table, chosen)
    note(f"preset {name} ({table.source}, {table.table}): {cell_words(cell, table)}")
    return sections


def from_preset(sections: Sections) -> str:
    """Returns a line on what a data set's preset decides in a run; empty if nothing."""
    from fedsynth.config.resolve import preset_of
    from fedsynth.data.registry import DEFAULT_DATASET
    from fedsynth.methods import DEFAULT_METHOD, method_class

    if sections["data"].get("folder"):
        return ""  # custom images have no preset
    dataset = str(sections["data"].get("dataset", DEFAULT_DATASET))
    method = method_class(str(sections["run"].get("method", DEFAULT_METHOD)))
    changed = []
    for section, values in preset_of(dataset, method).items():
        for key, value in values.items():
            if key not in sections.get(section, {}):
                changed.append(f"{section}.{key}={value}")
    if not changed:
        return ""
    return f"preset of {dataset}, for settings that you did not set: {', '.join(changed)}"


OWN_CODE = ("method", "model", "features")
"""Options that may name a file of user code."""
OWN_SETTINGS = (("run", "method"), ("model", "name"), ("model", "features"), ("method", "features"))
"""The settings that may name one."""
BESIDE_RESUME = "resume device memory_gb compile data_root download as_json sign_key log"
"""Parameters of `train` that --resume allows."""


def with_own_code(chosen: Sections) -> Sections:
    """Returns the options' settings, with files of user code (FILE.py:NAME) loaded and registered.

    Only options name such files: a name in a config file is never executed.

    Raises:
        SettingError: a file that cannot be executed, or has no such model, method or feature map.
    """
    from fedsynth.own_code import load_own, names_a_file

    chosen = copy.deepcopy(chosen)
    for section, key in OWN_SETTINGS:
        value = str(chosen.get(section, {}).get(key) or "")
        if value.endswith(".py"):
            raise SettingError(section, key, f"must be FILE.py:NAME, got {value}")
    method = str(chosen.get("run", {}).get("method") or "")
    if names_a_file(method):
        from fedsynth.methods import register_method

        chosen["run"]["method"] = register_method(*load_own("run", "method", method))
    model = str(chosen.get("model", {}).get("name") or "")
    if names_a_file(model):
        from fedsynth.models.registry import register_model_file

        chosen["model"]["name"] = register_model_file(model).name
    for section in ("model", "method"):
        features = str(chosen.get(section, {}).get("features") or "")
        if names_a_file(features):
            from fedsynth.features.registry import register_file

            chosen[section]["features"] = register_file(features, section)
    return chosen


def refuse_beside_resume(context: typer.Context) -> None:
    """Refuses options that cannot be combined with --resume: a resumed run has its own settings.

    Raises:
        OptionError: names the first such option.
    """
    from fedsynth.own_code import names_a_file

    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        explicit = source is not None and source.name == "COMMANDLINE"
        if name in OWN_CODE and names_a_file(str(context.params.get(name))):
            continue  # user code has to be given again
        if explicit and name not in BESIDE_RESUME.split():
            raise OptionError(
                "--resume uses the settings of the run's config.toml: leave out "
                f"{parameter.opts[0]}"
            )
