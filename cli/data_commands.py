"""`fedsynth data describe`: what is public of a folder of one's own images, proposed to be
checked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedsynth.cli.application import Application
from fedsynth.cli.errors import OptionError, write_text
from fedsynth.cli.generated_options import takes_settings
from fedsynth.cli.paths import path_argument, path_option
from fedsynth.cli.settings_options import Sections

data_app = Application(help="Your own images: what is public of them.", no_args_is_help=True)


@data_app.callback()
def _data() -> None:
    """A command of its own, so that there may be others beside it."""


@data_app.command()
@takes_settings(
    "data.image_size", "data.channels", "data.skip_corrupt", "data.skip_other", others=False
)
def describe(
    chosen: Sections,
    folder: Annotated[
        Path,
        path_argument(
            "SITE/CLASS/files, CLASS/files, or with a manifest.csv of path, label, site, user.",
            metavar="DIR",
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(help="What to call the data set, in public; default: the folder's."),
    ] = None,
    output: Annotated[
        Path | None,
        path_option("Default: fedsynth.toml in the folder, where `train --data` finds it."),
    ] = None,
) -> None:
    """Propose the public declaration of a folder of images: a TOML file to be checked and signed.

    A run with differential privacy may know of the images only what it says: classes, sites, size,
    a bound on their number and a nominal number. What is proposed was read from the folder (sizes
    are rounded), so a person has to check each line, and sign it, before anything private runs.
    """
    from fedsynth.data.describe import describe_folder
    from fedsynth.data.folder_settings import FolderSettings

    settings = FolderSettings(str(folder), **chosen["data"])
    found = describe_folder(settings, lambda text: print(f"note: {text}", file=sys.stderr), name)
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
