"""The one parser of files and folders that options name."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import typer

PATH = "PATH"


def path_option(help: str, *names: str, metavar: str = PATH, panel: str | None = None) -> Any:
    """Returns an option that names a file or folder."""
    return typer.Option(
        *names, parser=named_path, metavar=metavar, help=help, rich_help_panel=panel
    )


def path_argument(help: str, metavar: str = PATH) -> Any:
    """Returns an argument that names a file or folder."""
    return typer.Argument(parser=named_path, metavar=metavar, help=help)


def named_path(given: str | Path) -> Path:
    """A file or folder that an option names, with the user's home in the place of `~`.

    Raises:
        typer.BadParameter: no file can have that name, or it cannot be reached.
    """
    if "\0" in str(given):
        raise typer.BadParameter("a file's name has no zero byte")
    try:
        path = Path(given).expanduser()
        found = os.stat(path)
    except RuntimeError:
        raise typer.BadParameter(f"{str(given)!r}: there is no such user's home") from None
    except (FileNotFoundError, NotADirectoryError):
        return path  # which the command says, or makes
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no name of a file"
        raise typer.BadParameter(f"{str(given)[:200]!r}: {reason}") from None
    if stat.S_ISDIR(found.st_mode) and not os.access(path, os.X_OK):
        raise typer.BadParameter(f"{str(given)!r}: no right to look into that folder")
    return path
