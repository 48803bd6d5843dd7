"""Every `fedsynth …` in a document is valid: the command and its options exist, and the values have
the right types."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer
import typer.main

from fedsynth.cli.app import app
from tests.docs.conftest import NAMES, TEXTS

ROOT_COMMAND: Any = typer.main.get_command(app)
FENCE = re.compile(r"^```(?:sh|bash|\{code-cell\}[^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"(?<!`)`(fedsynth [^`]+)`(?!`)")
PROGRAM = re.compile(r"fedsynth(:\w+)?")


class InvalidCommandError(Exception):
    """A command of a document is invalid; the message has the reason."""


def shell_lines(text: str) -> Iterator[str]:
    """Yields the lines of a document's shell blocks, with continued lines joined."""
    for block in FENCE.finditer(text):
        if block[0].startswith("```{") and not re.search(r"^%%bash", block[1], re.MULTILINE):
            continue
        body = re.sub(r"^(:[\w-]+:[^\n]*\n|%%bash[^\n]*\n)+", "", block[1])
        yield from body.replace("\\\n", " ").splitlines()


def commands(line: str) -> Iterator[list[str]]:
    """Yields the arguments of each `fedsynth` call in a shell line, without redirections."""
    line = re.sub(r"\d?>&\d|\d?>\s*[\w./$-]+", " ", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&<>")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    args: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set(";|&<>"):
            starts = [n for n, arg in enumerate(args) if PROGRAM.fullmatch(arg)]
            if starts and args[: starts[0]] in ([], ["do"], ["time"]):
                yield args[starts[0] + 1 :]
            elif starts and args[0] == "docker" and args[1] == "run":
                yield args[starts[-1] + 1 :]
            args = []
        else:
            args.append(word)


def parse_command(args: list[str]) -> tuple[Any, list[str]]:
    """Returns the command of a call, and its remaining arguments."""
    command, rest = ROOT_COMMAND, args
    while rest and getattr(command, "commands", {}) and re.match(r"[a-z]", rest[0]):
        names = rest[0].split("|")  # `deploy keys|init` names two
        if missing := [name for name in names if name not in command.commands]:
            raise InvalidCommandError(f"there is no command {missing[0]!r}")
        command, rest = command.commands[names[0]], rest[1:]
    return command, rest


def check(args: list[str]) -> None:
    """Parses a complete call.

    Raises:
        InvalidCommandError: the command line would reject it.
    """
    command, rest = parse_command([re.sub(r"\$\w+", "0", word) for word in args])
    if getattr(command, "commands", {}) and rest in ([], ["--help"], ["--version"]):
        return
    try:
        command.make_context(" ".join(args), [word for word in rest if word != "--help"])
    except typer.Exit:
        return
    except Exception as error:  # the parser's, whose module depends on the version of typer
        if "Missing" in str(error) and "--help" in rest:
            return
        raise InvalidCommandError(f"{' '.join(args)!r}: {error!r}") from error


def check_names(args: list[str]) -> None:
    """Checks only the command and the option names, of an abbreviated call."""
    command, rest = parse_command(args)
    options = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    for word in rest:
        name = word.split("=")[0]
        if re.fullmatch(r"--[a-z][\w-]*", name) and name not in options | {"--help"}:
            raise InvalidCommandError(f"{' '.join(args)!r}: there is no option {name}")


@pytest.mark.parametrize("name", NAMES)
def test_document_commands_are_valid(name: str) -> None:
    for line in shell_lines(TEXTS[name]):
        for args in commands(line):
            check(args)
    prose = re.sub(r"^```.*?^```", "", TEXTS[name], flags=re.DOTALL | re.MULTILINE)
    for span in SPAN.findall(prose):
        check_names(" ".join(span.split()).replace("'", "").split(" ")[1:])


def test_document_commands_are_extracted() -> None:
    counts = {
        name: sum(len(list(commands(line))) for line in shell_lines(text))
        for name, text in TEXTS.items()
    }
    assert counts["README.md"] > 5
    assert counts["docs/tutorials/deploying.md"] >= 3
    assert counts["docs/docker.md"] >= 4
    assert sum(counts.values()) > 60


@pytest.mark.parametrize(
    "line",
    [
        "fedsynth trian",
        "fedsynth privacy plane",
        "fedsynth train --dp-epsilom 8",
        "fedsynth train --rounds many",
        "fedsynth synthesize --data scans",  # without --out
        "for m in a b; do fedsynth train --methods $m; done",
        'docker run --rm -v "$PWD:/output" fedsynth train --epsilon 8',
        "fedsynth runs a b > x.txt && fedsynth plot --mena",
    ],
)
def test_invalid_commands_are_detected(line: str) -> None:
    with pytest.raises(InvalidCommandError):
        list(map(check, commands(line)))
