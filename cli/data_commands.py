"""`fedsynth data describe`: what is public of a folder of one's own images, proposed to be
checked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedsynth.cli import options as given
from fedsynth.cli.errors import OptionError, one_line_errors, write_text
from fedsynth.cli.paths import PATH, named_path

data_app = typer.Typer(help="Your own images: what is public of them.", no_args_is_help=True)


@data_app.callback()
def _data() -> None:
    """A command of its own, so that there may be others beside it."""


@data_app.command()
def describe(
    context: typer.Context,
    folder: Annotated[
        Path,
        typer.Argument(
            parser=named_path,
            metavar="DIR",
            help="SITE/CLASS/files, CLASS/files, or with a manifest.csv (path,label,site,user).",
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(help="What to call the data set, in public; default: the folder's."),
    ] = None,
    image_size: given.ImageSize = None,
    channels: given.Channels = None,
    skip_corrupt: given.SkipCorrupt = None,
    skip_other: given.SkipOther = None,
    output: Annotated[
        Path | None,
        typer.Option(
            parser=named_path,
            metavar=PATH,
            help="Where it goes; default: fedsynth.toml in the folder, where `train --data` looks.",
        ),
    ] = None,
) -> None:
    """Propose the public declaration of a folder of images: a TOML file to be checked and signed.

    A run with differential privacy may know of the images only what it says: classes, sites, size,
    a bound on their number and a nominal number. What is proposed was read from the folder (sizes
    are rounded), so a person has to check each line, and sign it, before anything private runs.
    """
    with one_line_errors(context.command):
        from fedsynth.data.describe import describe_folder
        from fedsynth.data.folder_settings import FolderSettings

        settings = FolderSettings(
            str(folder),
            image_size=image_size or "",
            channels=channels or 0,
            skip_corrupt=bool(skip_corrupt),
            skip_other=bool(skip_other),
        )
        found = describe_folder(
            settings, lambda text: print(f"note: {text}", file=sys.stderr), name
        )
        path = output or found.path
        if path.exists():
            raise OptionError(f"{path} is there already: remove it, or give --output")
        write_text(path, found.toml)
        print(f"{found.table}\n(the table is exact and private: it stands in no file)\n")
        print(
            f"written: {path}\nCheck each line: all of it is public. Then fill in [signed_off]; "
            f"`fedsynth synthesize --data {folder} --dp-epsilon 8` (the images of one owner) or "
            f"`fedsynth train --data {folder} --dp-epsilon 8 --rounds 2 --set iterations=20` (each "
            "site a client) goes by it."
        )
