"""Typer's commands and groups with help in plain text.

Typer's usual help reads square brackets as markup, and cuts long words in narrow terminals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

F = TypeVar("F", bound=Callable[..., Any])
WIDTH = 100
"""The most columns of a help text."""


class Command(TyperCommand):
    """A command whose help shows its options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[Any]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                usual = f"{parameter.param_type_name.capitalize()}s"
                group = getattr(parameter, "rich_help_panel", None) or usual
                groups.setdefault(group, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Group(TyperGroup):
    """A group whose help shows the whole first paragraph of each command's."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, _first_paragraph(one.help)) for name, one in self.commands.items()]
            )


class Application(typer.Typer):
    """A Typer application of such commands and groups."""

    def __init__(self, *, cls: type[TyperGroup] = Group, **options: Any) -> None:
        settings = {"max_content_width": WIDTH}
        super().__init__(cls=cls, rich_markup_mode=None, context_settings=settings, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[F], F]:
        return super().command(name, cls=Command, **options)


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())
