"""The command line's reference, from the commands themselves."""

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
    """Every command by its words ("privacy plan"), groups included, in the order of `--help`."""
    return dict(_walk(typer.main.get_command(app), ""))


def _walk(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _walk(inner, f"{words} {name}".strip())


def pages() -> dict[str, str]:
    """`commands/NAME.md` for each command at the top (with those of its group), and their list."""
    found = commands()
    tops = [words for words in found if words and " " not in words]
    made = {}
    for top in tops:
        inside = {words: one for words, one in found.items() if words.split(" ")[0] == top}
        sections = [section(words, one) for words, one in inside.items()]
        made[f"commands/{top}.md"] = "\n\n".join(sections) + "\n"
    return {**made, "commands/index.md": _list(tops, found)}


def _list(tops: list[str], found: dict[str, Any]) -> str:
    rows = [
        [f"[fedsynth {words}]({words.split(' ')[0]}.md)", plain(summary(one))]
        for words, one in found.items()
        if words
    ]
    entries = "\n".join(sorted(tops))
    return f"""# The command line

What `fedsynth COMMAND --help` says. Settings have the names of config.toml's; `--set SECTION.KEY=VALUE`
reaches those that have no option of their own. `fedsynth --version` prints the version.

{table(["command", "in a line"], rows)}

```{{toctree}}
:hidden:

{entries}
```
"""


def summary(command: Any) -> str:
    """The first paragraph of its help."""
    return " ".join(cleandoc(command.help or "").split("\n\n")[0].split())


def section(words: str, command: Any) -> str:
    """A command's usage, text, arguments and options."""
    depth = "#" * (1 + words.count(" "))
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option"]
    inner = " COMMAND [ARGS]…" if getattr(command, "commands", {}) else ""
    usage = " ".join(
        ["fedsynth", words, *(["[OPTIONS]"] if options else []), *map(_shape, arguments)]
    )
    parts = [f"{depth} fedsynth {words}", fence("text", usage + inner)]
    parts += [_text(each) for each in cleandoc(command.help or "").split("\n\n")]
    hints = _hints(command)
    if arguments:
        rows = [[code(_name(one)), plain(one.help or "")] for one in arguments]
        parts.append(table(["argument", "what"], rows))
    if options:
        head = ["option", "takes", "what", "default"]
        parts.append(table(head, [_option(one, hints) for one in options]))
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


def _option(one: Any, hints: dict[str, Any]) -> list[str]:
    names = ", ".join(map(code, [*one.opts, *one.secondary_opts]))
    default = one.default
    if one.required:
        shown = "required"
    elif default is None or default is False or default == () or default == [] or default == "":
        shown = ""
    else:
        shown = code(str(default))
    return [names, _takes(one, hints.get(one.name)), plain(one.help or ""), shown]


def _takes(one: Any, hint: Any) -> str:
    """What stands after an option; nothing for a flag."""
    if getattr(one, "is_flag", False):
        return ""
    if one.metavar:
        return code(re.sub(r"[<>]", "", one.metavar))
    kinds = {KINDS.get(kind, "text") for kind in _kinds(hint)}
    return " or ".join(sorted(kinds)) or "text"


def _kinds(hint: Any) -> Iterator[type]:
    """The types that a value may have: of `Annotated[list[str] | None, …]`, str."""
    origin = get_origin(hint)
    if origin is Annotated:
        yield from _kinds(get_args(hint)[0])
    elif origin in (Union, UnionType, list, tuple):
        for each in get_args(hint):
            yield from _kinds(each)
    elif hint not in (None, NoneType):
        yield hint
