"""Generates the command line's reference from the commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import cleandoc
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer.main

from fedsynth.cli.app import app
from generate.markdown import code, fence, plain, table

KINDS = {int: "number", float: "number", str: "text", bool: ""}


def commands() -> dict[str, Any]:
    """Returns each command and group by its name ("privacy plan"), in the order of `--help`."""
    return dict(_walk(typer.main.get_command(app), ""))


def _walk(command: Any, full_name: str) -> Iterator[tuple[str, Any]]:
    yield full_name, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _walk(inner, f"{full_name} {name}".strip())


def pages() -> dict[str, str]:
    """Returns a page `commands/NAME.md` for each command or group, and an index."""
    by_name = commands()
    sections: dict[str, list[str]] = {}
    for full_name, command in by_name.items():
        if full_name:
            sections.setdefault(full_name.split()[0], []).append(section(full_name, command))
    texts = {f"commands/{top}.md": "\n\n".join(parts) + "\n" for top, parts in sections.items()}
    return {**texts, "commands/index.md": _index(list(sections), by_name)}


def _index(tops: list[str], by_name: dict[str, Any]) -> str:
    rows = [
        [f"[fedsynth {full_name}]({full_name.split()[0]}.md)", plain(summary(command))]
        for full_name, command in by_name.items()
        if full_name
    ]
    entries = "\n".join(sorted(tops))
    return f"""# The command line

The output of `fedsynth COMMAND --help`. Settings have the same names as in config.toml. `--set
SECTION.KEY=VALUE` sets those that have no option. `fedsynth --version` prints the version.

{table(["command", "summary"], rows)}

```{{toctree}}
:hidden:

{entries}
```
"""


def summary(command: Any) -> str:
    """Returns the first paragraph of a command's help."""
    return " ".join(cleandoc(command.help or "").split("\n\n")[0].split())


def section(full_name: str, command: Any) -> str:
    """Returns the usage, text, arguments and options of a command."""
    depth = "#" * (1 + full_name.count(" "))
    arguments = [item for item in command.params if item.param_type_name == "argument"]
    options = [item for item in command.params if item.param_type_name == "option"]
    inner = " COMMAND [ARGS]…" if getattr(command, "commands", {}) else ""
    usage = " ".join(
        ["fedsynth", full_name, *(["[OPTIONS]"] if options else []), *map(_shape, arguments)]
    )
    parts = [f"{depth} fedsynth {full_name}", fence("text", usage + inner)]
    parts += [_text(paragraph) for paragraph in cleandoc(command.help or "").split("\n\n")]
    hints = _hints(command)
    if arguments:
        rows = [[code(_name(item)), plain(item.help or "")] for item in arguments]
        parts.append(table(["argument", "meaning"], rows))
    if options:
        head = ["option", "value", "meaning", "default"]
        parts.append(table(head, [_option(item, hints) for item in options]))
    return "\n\n".join(parts)


def _text(paragraph: str) -> str:
    return plain(" ".join(paragraph.split()))


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name).upper()


def _shape(argument: Any) -> str:
    name = _name(argument) + ("…" if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _hints(command: Any) -> dict[str, Any]:
    return get_type_hints(command.callback, include_extras=True) if command.callback else {}


def _option(option: Any, hints: dict[str, Any]) -> list[str]:
    names = ", ".join(map(code, [*option.opts, *option.secondary_opts]))
    default = option.default
    if option.required:
        text = "required"
    elif default is None or default is False or default == () or default == [] or default == "":
        text = ""
    else:
        text = code(str(default))
    return [names, _value(option, hints.get(option.name)), plain(option.help or ""), text]


def _value(option: Any, hint: Any) -> str:
    """Returns the kind of value that an option takes. It is empty for a flag."""
    if getattr(option, "is_flag", False):
        return ""
    if option.metavar:
        return code(re.sub(r"[<>]", "", option.metavar))
    kinds = {KINDS.get(kind, "text") for kind in _kinds(hint)}
    return " or ".join(sorted(kinds)) or "text"


def _kinds(hint: Any) -> Iterator[type]:
    """Yields the types of a type hint's values: `str` for `Annotated[list[str] | None, …]`."""
    origin = get_origin(hint)
    if origin is Annotated:
        yield from _kinds(get_args(hint)[0])
    elif origin in (Union, UnionType, list, tuple):
        for argument in get_args(hint):
            yield from _kinds(argument)
    elif hint not in (None, NoneType):
        yield hint
