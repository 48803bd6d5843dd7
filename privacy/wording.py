"""Texts that name settings, so that whoever shows a text can say how a setting is given there.

A library's text says `method.ipc`; the command line shows the same text with `--ipc`. Nothing is
searched for in a finished text: its parts are kept.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def shown(value: object) -> str:
    """A value that may come from anybody, on an error's line: short, and on one line whatever it
    is.

    >>> shown("x" * 1000)[-5:], shown(10**5000)
    ("xxxx'", 'a number of more than 18 digits')
    """
    if isinstance(value, int) and abs(value) >= 2**63:  # beyond 4,300 digits Python prints none
        return "a number of more than 18 digits"
    try:
        return _SHORT.repr(value)
    except (ValueError, RecursionError):  # such a number, or such nesting, within a list
        return f"a {type(value).__name__}"


@dataclass(frozen=True)
class Setting:
    """A setting as a text names it; `str` is its name in the library.

    Args:
        section: of a config file ("method", "privacy", …); None for an argument of a function or
            class that no config file has.
        key: its name in the section.
        value: what to set it to, or what it is set to, where the text says so.

    >>> str(Setting("method", "ipc")), str(Setting("model", "norm", "group"))
    ('method.ipc', 'model.norm=group')
    """

    section: str | None
    key: str
    value: str | None = None

    def __str__(self) -> str:
        name = self.key if self.section is None else f"{self.section}.{self.key}"
        return name if self.value is None else f"{name}={self.value}"


class Text(str):
    """One text, in the library's words, that remembers where it names settings.

    Args:
        parts: words, settings and other such texts, in order.

    >>> Text("a smaller ", Setting("method", "lr")).worded(lambda setting: f"--{setting.key}")
    'a smaller --lr'
    """

    parts: tuple[str | Setting, ...]

    def __new__(cls, *parts: str | Setting) -> Text:
        made = super().__new__(cls, "".join(str(part) for part in parts))
        flat: list[str | Setting] = []
        for part in parts:
            flat.extend(part.parts if isinstance(part, Text) else (part,))
        made.parts = tuple(flat)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.parts

    def worded(self, name: Callable[[Setting], str]) -> str:
        """The text with each setting named by `name`."""
        return "".join(name(part) if isinstance(part, Setting) else part for part in self.parts)


class NamedSettingError(Exception):
    """Base of errors about one setting, which the text begins with.

    Args:
        section, key: the setting, as in `Setting`.
        reason: the rest of the sentence; where it names other settings, these are `Setting`s.
        value: what the setting is set to, where the sentence is about this value.
    """

    def __init__(
        self, section: str | None, key: str, *reason: str | Setting, value: object = None
    ) -> None:
        self.section = section
        self.key = key
        self.reason = reason
        self.value = None if value is None else str(value)
        super().__init__(Text(Setting(section, key, self.value), " ", *reason))

    def of(self, section: str | None, key: str) -> NamedSettingError:
        """The same error, about the setting that its value came from."""
        return type(self)(section, key, *self.reason, value=self.value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.section, self.key, self.reason, self.value)


def _rebuilt(
    kind: type[NamedSettingError],
    section: str | None,
    key: str,
    reason: tuple[str | Setting, ...],
    value: str | None,
) -> NamedSettingError:
    return kind(section, key, *reason, value=value)
