"""A user's mistake is one line on stderr and exit code 2; a mistake of ours keeps its traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from fedsynth.cli.option_names import OptionNames, option_names
from fedsynth.cli.signals import TerminatedError
from fedsynth.errors import FedsynthError, OutputError
from fedsynth.privacy.errors import PrivacyError

# The parser's own errors (an unknown option, text in place of a number). Where they live depends on
# typer's version.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


OUT_OF_MEMORY = (
    "this machine has not enough memory for these settings: fewer images, smaller batches or a "
    "smaller model may fit"
)
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"


class OptionError(FedsynthError):
    """Options that contradict each other, or what --set or --config cannot take."""


class OneLineGroup(TyperGroup):
    """Like every other mistake of a user, a mistyped option is one line and exit code 2, not a box
    of several.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        standalone = options.pop("standalone_mode", True)
        try:
            # nobody gives standalone_mode by position
            code = super().main(*args, **options, standalone_mode=False)  # type: ignore[misc]
        except _UsageError as error:
            where = getattr(getattr(error, "ctx", None), "command_path", self.name)
            what: Any = error
            fail(f"{what.format_message().rstrip('.')} (see {where} --help)")
        if standalone:
            sys.exit(code)
        return code


def fail(text: str) -> NoReturn:
    """Ends the program with one line."""
    print(f"fedsynth: error: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(2)


def write_text(path: Path, text: str) -> None:
    """Writes a file that the user named."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from None


@contextmanager
def one_line_errors(command: Any, names: OptionNames | None = None) -> Iterator[OptionNames]:
    """Around a command's work; what it gives says settings as the command's options.

    Args:
        command: the running one, `context.command`.
        names: of its options, where the table of all commands is not its own.
    """
    names = names or option_names(command)
    try:
        yield names
    except (FedsynthError, PrivacyError) as error:
        fail(names.text(error.args[0]) if error.args else str(error))
    except MemoryError:
        fail(OUT_OF_MEMORY)
    except RuntimeError as error:
        if NO_MEMORY not in str(error):  # torch's way to say it of a CPU
            raise
        fail(OUT_OF_MEMORY)
    except TerminatedError:
        print("fedsynth: terminated", file=sys.stderr)
        raise typer.Exit(143) from None
    except KeyboardInterrupt:
        print("fedsynth: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
