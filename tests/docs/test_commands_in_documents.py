"""Every `fedsynth …` that a document prints is one that the command line takes: the command is
there, so are its options, and their values have the right types."""

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


class NotACommandError(Exception):
    """What a document prints is not taken; says why."""


def shell_lines(text: str) -> Iterator[str]:
    """The lines of a document's shell blocks, with continued ones put together."""
    for found in FENCE.finditer(text):
        if found[0].startswith("```{") and not re.search(r"^%%bash", found[1], re.MULTILINE):
            continue
        body = re.sub(r"^(:[\w-]+:[^\n]*\n|%%bash[^\n]*\n)+", "", found[1])
        yield from body.replace("\\\n", " ").splitlines()


def commands(line: str) -> Iterator[list[str]]:
    """The words after `fedsynth` of each call in a line of a shell, without redirections."""
    line = re.sub(r"\d?>&\d|\d?>\s*[\w./$-]+", " ", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&<>")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set(";|&<>"):
            starts = [n for n, each in enumerate(words) if PROGRAM.fullmatch(each)]
            if starts and words[: starts[0]] in ([], ["do"], ["time"]):
                yield words[starts[0] + 1 :]
            elif starts and words[0] == "docker" and words[1] == "run":
                yield words[starts[-1] + 1 :]
            words = []
        else:
            words.append(word)


def found_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that is meant, and the words that are left."""
    command, left = ROOT_COMMAND, words
    while left and getattr(command, "commands", {}) and re.match(r"[a-z]", left[0]):
        named = left[0].split("|")  # `deploy keys|init` names two
        if missing := [name for name in named if name not in command.commands]:
            raise NotACommandError(f"there is no command {missing[0]!r}")
        command, left = command.commands[named[0]], left[1:]
    return command, left


def check(words: list[str]) -> None:
    """Parses a whole call.

    Raises:
        NotACommandError: the command line would not take it.
    """
    command, left = found_command([re.sub(r"\$\w+", "0", word) for word in words])
    if getattr(command, "commands", {}) and left in ([], ["--help"], ["--version"]):
        return
    try:
        command.make_context(" ".join(words), [word for word in left if word != "--help"])
    except typer.Exit:
        return
    except Exception as error:  # of the parser, which lives elsewhere in each version of typer
        if "Missing" in str(error) and "--help" in left:
            return
        raise NotACommandError(f"{' '.join(words)!r}: {error!r}") from error


def check_names(words: list[str]) -> None:
    """Looks for the command and the options alone, of a call that is cut short."""
    command, left = found_command(words)
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    for word in left:
        name = word.split("=")[0]
        if re.fullmatch(r"--[a-z][\w-]*", name) and name not in known | {"--help"}:
            raise NotACommandError(f"{' '.join(words)!r}: there is no option {name}")


@pytest.mark.parametrize("name", NAMES)
def test_every_command_of_a_document_is_taken(name: str) -> None:
    for line in shell_lines(TEXTS[name]):
        for words in commands(line):
            check(words)
    prose = re.sub(r"^```.*?^```", "", TEXTS[name], flags=re.DOTALL | re.MULTILINE)
    for span in SPAN.findall(prose):
        check_names(" ".join(span.split()).replace("'", "").split(" ")[1:])


def test_commands_are_found() -> None:
    found = {
        name: sum(len(list(commands(line))) for line in shell_lines(text))
        for name, text in TEXTS.items()
    }
    assert found["README.md"] > 5
    assert found["docs/tutorials/deploying.md"] >= 3
    assert found["docs/docker.md"] >= 5
    assert sum(found.values()) > 60


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
def test_a_slip_is_found(line: str) -> None:
    with pytest.raises(NotACommandError):
        list(map(check, commands(line)))
