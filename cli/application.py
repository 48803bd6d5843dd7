"""The command-line class, which prints errors in one line.

This module also ends a program cleanly on signals.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

import typer
from typer.core import TyperGroup

from fedsynth import rank
from fedsynth.errors import FedsynthError

# SIGHUP: the terminal was closed. `nohup` ignores it, and so does fedsynth then. On Windows,
# SIGBREAK replaces both.
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)
)


class TerminatedError(KeyboardInterrupt):
    """Raised on one of `SIGNALS`, so that a run ends as after Ctrl-C.

    Args:
        number: the number of the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(number)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raises TerminatedError in the `with` block if one of `SIGNALS` is received.

    A second signal ends the process at once.
    """

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise TerminatedError(number)

    previous = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in previous.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, terminate)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# The parser's own errors (an unknown option, text in place of a number). Their location depends on
# typer's version.
_UsageError: Any = typer.BadParameter.__mro__[1]

PACKAGE = Path(__file__).resolve().parent.parent
OUT_OF_MEMORY = (
    "these settings need more memory than this machine has. Use fewer images, smaller batches or "
    "a smaller model"
)
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # torch's RuntimeError on a CPU
# Errors of the operating system that are never caused by a bug in fedsynth, even if they name no
# file.
NO_BUG = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM),
    errno.ENOENT,  # the current folder was deleted
}
NO_TEMPORARY_FOLDER = "No usable temporary directory"  # of Python's tempfile

BROKEN_PIPE = 141  # the exit code of a program that SIGPIPE has ended


class OptionError(FedsynthError, code="options.invalid"):
    """Raised for contradictory options, and for an invalid --set or --config."""


class OneLineGroup(TyperGroup):
    """The command `fedsynth`, which contains all other commands.

    If one of these commands fails, a message of one line and an exit code report the error.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        standalone = options.pop("standalone_mode", True)
        try:
            with one_line_errors(), ended_by_signals():
                # no caller passes standalone_mode by position
                code = super().main(*args, **options, standalone_mode=False)  # type: ignore[misc]
                _flush()
        except _UsageError as error:
            path = getattr(error.ctx, "command_path", self.name)
            fail(f"{error.format_message().rstrip('.')} (see {path} --help)")
        if standalone:
            sys.exit(code)
        return code

    def invoke(self, ctx: Any) -> Any:
        # inside `main`, which would turn Ctrl-C into an exit code
        with one_line_errors("--json" in ctx.args):
            return super().invoke(ctx)


def fail(text: str, code: str = "") -> NoReturn:
    """Prints an error message as one line, and ends the program with exit code 2.

    Of several ranks, one prints it (`rank.speaks`).

    Args:
        text: the message.
        code: the code of the error.
    """
    if rank.speaks(code):
        print(f"fedsynth: error: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(2)


def say(text: str) -> None:
    """Prints a line on stderr, at rank 0."""
    if rank.this_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Prints a message for the user on stderr, as a line that begins with "note:"."""
    say(f"note: {text}")


@contextmanager
def one_line_errors(as_json: bool = False) -> Iterator[None]:
    """Prints an error from the `with` block as one line, and ends the program with an exit code.

    If `as_json` is True, it also prints the code and the message as JSON on stdout.

    This applies to errors that the user, the file system or a signal caused. Other errors are bugs
    and keep their traceback.
    """
    try:
        yield
    except FedsynthError as error:
        text = ". Also: ".join((str(error), *getattr(error, "__notes__", ())))
        if as_json and rank.speaks(error.code):
            print(json.dumps({"error": {"code": error.code, "message": text}}, indent=2))
        fail(text, error.code)
    except BrokenPipeError:  # as in `fedsynth runs | head`
        _discard(sys.stdout)
        _discard(sys.stderr)
        sys.exit(BROKEN_PIPE)
    except OSError as error:
        if _is_bug(error):
            raise
        _flush()
        if NO_TEMPORARY_FOLDER in str(error):
            fail("no folder for temporary files is writable. Set TMPDIR to a folder with space")
        path = os.fsdecode(error.filename or "a file or stdout")
        fail(f"cannot use {path}: {error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and NO_MEMORY not in str(error):
            raise
        fail(OUT_OF_MEMORY)
    except TerminatedError as error:
        say("fedsynth: terminated")
        raise typer.Exit(128 + error.number) from None
    except KeyboardInterrupt:
        say("fedsynth: interrupted")
        raise typer.Exit(130) from None


def _flush() -> None:
    """Flushes stdout early, so that a full disk is reported before Python shuts down."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard(sys.stdout)
        fail(f"cannot write to stdout: {error.strerror}")


def _discard(stream: TextIO) -> None:
    """Redirects an output stream to /dev/null if it cannot be written.

    Otherwise, Python would report the error a second time when the program ends.
    """
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), stream.fileno())


def _is_bug(error: OSError) -> bool:
    """Returns True if an error looks like a bug in fedsynth rather than a mistake by the user."""
    if error.filename is None:
        return error.errno not in NO_BUG
    if isinstance(error.filename, int):  # a file descriptor
        return True
    return Path(os.fsdecode(error.filename)).is_relative_to(PACKAGE)


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_large_allocations() -> bool:
    """Makes the C library keep up to 2 GiB of freed memory, for faster training.

    Returns True if the C library supports this.

    By default, glibc requests every allocation over 32 MB from the operating system, and returns it
    when it is freed. Each training step on a CPU then causes page faults for all its activations.
    For a ConvNet-32 on batches of 256 28×28 images, the page faults took half of the CPU time (959
    against 490 µs per image, one thread, measured once). `tests/cli/test_commands.py` counts the
    page faults. The setting applies to the whole process, so only the command line makes it, and
    not the library.
    """
    if sys.platform == "win32":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library, such as musl
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


@contextmanager
def imports_without_gc() -> Iterator[None]:
    """Suspends garbage collection in the `with` block, which imports large libraries.

    Imports leave almost no garbage, but a third of a million objects, through which collections
    would search again and again. Later collections skip these objects.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def wait_passively() -> None:
    """Lets idle OpenMP threads sleep, unless the user has configured their behaviour.

    OpenMP reads the environment variable when torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
