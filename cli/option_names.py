"""Which setting each option is, and so how the running command says a setting.

`SETTINGS` is the table; `option_names` reads it backwards: a setting that the library's texts name
is shown as the running command's own option.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsynth.privacy.wording import Setting, Text

SETTINGS: dict[str, tuple[str, str]] = {
    **{
        name: ("run", name)
        for name in (
            "method",
            "rounds",
            "seed",
            "device",
            "precision",
            "compile",
            "memory_gb",
            "participation",
            "client_failures",
            "quorum",
            "robust",
        )
    },
    "dataset": ("data", "dataset"),
    "data_root": ("data", "data_root"),
    "data": ("data", "folder"),
    "test_data": ("data", "test_folder"),
    **{
        name: ("data", name)
        for name in ("test", "image_size", "channels", "skip_corrupt", "skip_other", "declaration")
    },
    "partition": ("partition", "kind"),
    **{
        name: ("partition", name)
        for name in ("clients", "alpha", "classes_per_client", "min_size", "subset", "local_test")
    },
    "model": ("model", "name"),
    "client_models": ("model", "clients"),
    **{name: ("model", name) for name in ("features", "width", "depth", "norm")},
    **{name: ("method", name) for name in ("ipc", "matching")},
    "dp_sigma": ("privacy", "noise_multiplier"),
    **{
        f"dp_{name}": ("privacy", name)
        for name in (
            "epsilon",
            "clip",
            "delta",
            "max_records",
            "mechanism",
            "sample_rate",
            "nominal_size",
            "adjacency",
            "unit",
            "four_sums",
            "ledger",
        )
    },
    **{name: ("report", name) for name in ("responsible", "purpose", "sites")},
}
"""A command's parameter: section and key of the setting. Parameters that are none of these are not
settings of a run.
"""
ARGUMENTS: dict[str, str] = {
    "download": "download",
    "ledger": "ledger",
    "canaries": "canaries",
    "canaries_as": "canaries_as",
    "guesses": "guesses",
    "confidence": "confidence",
    "run": "folder",
    "resume": "resume",
    "models": "files",
    "arch": "architectures",
    "form": "format",
    "by": "by",
    "log": "log",
    "unprotected": "unprotected",
    "labels": "labels",
    "teacher": "teacher",
    "steps": "steps",
    "copies": "views",
    "out": "out",
}
"""A command's parameter: the argument of the library's function, where it is no setting of a
run.
"""
Place = tuple[str | None, str]  # section and key of a setting, as in `Setting`
NAMED: tuple[tuple[str, Place], ...] = (
    *SETTINGS.items(),
    *((parameter, (None, argument)) for parameter, argument in ARGUMENTS.items()),
)
"""Parameters of all commands, each with the setting that it gives."""
SET_SECTIONS = ("method", "run", "data", "partition", "model", "privacy", "report")


@dataclass(frozen=True)
class OptionNames:
    """How one command says a setting: with its own option, or with --set.

    Args:
        options: setting: its option ("--ipc").
        flags: settings whose option takes no value.
        set_sections: sections whose settings the command's --set takes.
    """

    options: Mapping[Place, str]
    flags: frozenset[Place]
    set_sections: tuple[str, ...]

    def __call__(self, setting: Setting) -> str:
        place = (setting.section, setting.key)
        option = self.options.get(place)
        if option is not None and setting.value is None:
            return option
        if option is not None and place not in self.flags:
            return f"{option} {setting.value}"
        if option is not None and setting.value == "True":
            return option
        return f"--set {setting}" if setting.section in self.set_sections else str(setting)

    def text(self, text: str) -> str:
        """A text of the library as this command says it."""
        return text.worded(self) if isinstance(text, Text) else text


def option_names(
    command: Any,
    named: Iterable[tuple[str, Place]] = NAMED,
    set_sections: tuple[str, ...] = SET_SECTIONS,
) -> OptionNames:
    """How this command (of typer, with its parameters) says settings.

    Args:
        command: the running one is `context.command`.
        named: a parameter's name, and a setting that it gives.
        set_sections: what --set takes, if the command has it.
    """
    options = {p.name: p for p in command.params if p.opts[0].startswith("--")}
    found = [(place, options[name]) for name, place in named if name in options]
    return OptionNames(
        {place: option.opts[0] for place, option in found},
        frozenset(place for place, option in found if getattr(option, "is_flag", False)),
        set_sections if any("--set" in option.opts for option in options.values()) else (),
    )


def sections_of(
    parameters: Mapping[str, Any], settings: Mapping[str, tuple[str, str]] = SETTINGS
) -> dict[str, dict[str, Any]]:
    """A command's parameters (None: not given) as sections of settings."""
    found: dict[str, dict[str, Any]] = {section: {} for section, _ in settings.values()}
    for name, (section, key) in settings.items():
        value = parameters.get(name)
        found[section][key] = str(value) if isinstance(value, Path) else value
    return found
