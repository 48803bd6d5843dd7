"""Converts options to sections of settings.

This includes --set KEY=VALUE, the config file, files with user code (FILE.py:NAME), and the check
of the options that --resume allows.
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
    """Returns the settings that --set gives, by section.

    KEY=VALUE is a setting of the method. SECTION.KEY=VALUE is a setting of another section.
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
                "--set must be KEY=VALUE for a setting of the method, or SECTION.KEY=VALUE for "
                f"one of the sections {sections}, got {text!r}"
            )
        values.setdefault(section, {})[name] = value.strip()
    return values


def method_settings(texts: list[str]) -> dict[str, Any]:
    """Returns the settings given by --set, for a command that allows only settings of a method."""
    sections = set_options(texts)
    if len(sections) > 1:
        raise OptionError(
            "--set accepts only settings of the method for this command, "
            f"got one of section {list(sections)[1]}"
        )
    return sections["method"]


def with_set_options(sections: Sections, texts: list[str]) -> Sections:
    """Returns the settings that the other options give, together with those that --set gives.

    Args:
        sections: the values of the other options.
        texts: the values of --set.

    Raises:
        OptionError: a setting is given by an option and by --set.
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
    """Reads the sections of a TOML file, or of the config.toml in a run folder.

    Returns an empty dictionary for None.
    """
    if path is None:
        return {}
    from fedsynth.toml_file import read_sections

    return read_sections(path / "config.toml" if path.is_dir() else path)


def merged(
    config: Sections, chosen: Sections, note: Callable[[str], None] = lambda text: None
) -> Sections:
    """Returns the settings of a config file, overridden by options.

    If the options change the method, the settings of the old method are dropped, and `note`
    receives a message.
    """
    from fedsynth.methods import DEFAULT_METHOD

    config = copy.deepcopy(config)
    old = config.get("run", {}).get("method", DEFAULT_METHOD)
    new = str(chosen["run"].get("method", old))
    if new != old and config.pop("method", None):
        note(
            f"note: the method settings in the config are for {old} and are ignored. {new} uses "
            "its default settings and your options"
        )
    if chosen.get("data", {}).get("folder") and "folder" not in config.get("data", {}):
        # custom images replace a named data set, whose name they do not have
        config.get("data", {}).pop("dataset", None)
        config.get("partition", {}).pop("kind", None)
    for section, values in _features_where_they_belong(chosen, new).items():
        config.setdefault(section, {}).update(values)
    return config


def _features_where_they_belong(options: Sections, method: str) -> Sections:
    """Moves the value of --features to the section of the setting that the method uses.

    For a method with its own feature map, such as FedStats, this is a setting of the method.
    Otherwise it is a setting of the model.

    Raises:
        OptionError: the feature map is given by --features and by --set.
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
    """Returns the settings for a cell of a published table, overridden by options.

    Args:
        name: the name of the table's preset.
        config: the value of --config, which must be None.
        chosen: the settings that the options and --set give.
        note: receives a line with the name of the cell.

    Raises:
        OptionError: --config is given, too.
        FedsynthError: there is no such preset or cell.
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
    """Returns a line with the settings that a data set's preset determines, or an empty string."""
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
"""The options whose value may be a file with user code."""
OWN_SETTINGS = (("run", "method"), ("model", "name"), ("model", "features"), ("method", "features"))
"""The settings whose value may be a file with user code, as (section, key)."""
BESIDE_RESUME = "resume device memory_gb compile data_root download as_json sign_key log"
"""The parameters of `train` that may be combined with --resume."""


def with_own_code(chosen: Sections) -> Sections:
    """Loads and registers the files with user code (FILE.py:NAME) that the options name.

    Returns the settings with the names under which the code is registered. Only options may name
    such files: a file that is named in a config file is never executed.

    Raises:
        SettingError: a file cannot be executed, or does not define the model, method or feature
            map.
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
    """Checks that no option contradicts --resume, because a resumed run keeps its settings.

    Raises:
        OptionError: an option is not allowed with --resume. The message names the option.
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
                "--resume uses the settings in the config.toml of the run: leave out "
                f"{parameter.opts[0]}"
            )
