"""Loads the custom code that the settings of a run name as FILE.py:NAME.

The callers decide whose settings these are. Settings in the config.toml of a run, or from a server,
may come from others, so their code is never loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from fedsynth.config.settings import RunSettings
from fedsynth.errors import SettingError
from fedsynth.features.pretrained import names_a_library
from fedsynth.features.registry import is_own_features, register_file
from fedsynth.methods import METHODS, is_own_method, method_class, own_label, register_method
from fedsynth.models.registry import model_names, register_model_file
from fedsynth.own_code import LOADERS, SOURCES, is_label, load_own, names_a_file
from fedsynth.synthesizer.condensation.losses import register_loss_file


def with_own_code(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Loads and registers the custom code that the settings name as FILE.py:NAME.

    In the returned settings, the name under which the code is registered replaces FILE.py:NAME.

    Raises:
        SettingError: a file cannot be executed, or does not define what the setting names.
    """
    loaded = {name: dict(values) for name, values in sections.items()}
    for section, key in LOADERS:
        value = loaded.get(section, {}).get(key)
        if isinstance(value, str) and ".py" in value:
            parts = value.split(",") if key == "clients" else [value]
            names = [_registered(section, key, part.strip()) for part in parts]
            loaded[section][key] = ",".join(names)
    return loaded


def _registered(section: str, key: str, value: str) -> str:
    """Registers the custom code that a setting names, and returns the registered name.

    Other values are returned unchanged.
    """
    if value.endswith(".py"):
        raise SettingError(section, key, f"must have the form FILE.py:NAME, got {value}")
    if not names_a_file(value):
        return value
    if key == "method":
        return register_method(*load_own(section, key, value))
    if section == "model" and key != "features":
        return register_model_file(value, key).name
    if key == "matching":
        return register_loss_file(value)
    return register_file(value, section, key)


def settings_with_own_code(settings: RunSettings) -> list[tuple[str, str]]:
    """Lists the settings, as (section, key), that name the user's own code."""
    sections = settings.to_mapping()
    selected = [("run", "method")] if is_own_method(settings.method) else []
    for section, key in LOADERS:
        names = str(sections.get(section, {}).get(key, "")).split(",")
        if any(_is_custom(section, key, name.strip()) for name in names):
            selected.append((section, key))
    return selected


def code_options(settings: RunSettings) -> list[str]:
    """Returns the `fedsynth train` options that load a run's custom code in a new process.

    Raises:
        SettingError: code was registered in this process, and not from a file.
    """
    options = []
    sections = settings.to_mapping()
    for (section, key), (option, _) in LOADERS.items():
        names = str(sections.get(section, {}).get(key, "")).split(",")
        places = [_place(section, key, name.strip()) for name in names]
        if any(map(names_a_file, places)):
            options += [option, ",".join(places)]
    return options


def _place(section: str, key: str, name: str) -> str:
    """Returns a name that loads the same code in another process.

    Custom code is named as FILE.py:NAME. Built-in names are returned unchanged.
    """
    if not _is_custom(section, key, name):
        return name
    code = SOURCES.get(own_label(name) if key == "method" else name)
    if code is not None:
        return f"{code.path}:{code.name}"
    if key == "method":
        cls = method_class(name)
        module = sys.modules.get(cls.__module__)
        place = f"{getattr(module, '__file__', None)}:{cls.__qualname__}"
        if names_a_file(place) and cls.__module__ != "__main__":  # a script would run again
            return place
    reason = "is custom code that a new process cannot find. Set it to FILE.py:NAME"
    raise SettingError(section, key, reason, value=name)


def _is_custom(section: str, key: str, name: str) -> bool:
    if key == "method":
        return name not in METHODS
    if section == "model" and key != "features":
        return bool(name) and name not in model_names() and not names_a_library(name)
    return is_own_features(name) or (key == "matching" and is_label(name))
