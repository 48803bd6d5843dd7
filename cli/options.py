"""Options that several commands share and that are no settings of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedsynth.cli.paths import path_option


def _own(what: str) -> Any:
    return typer.Option(metavar="FILE.py:NAME", help=f"The run's {what}, if it is your own.")


OwnMethod = Annotated[str | None, _own("method")]
OwnModel = Annotated[str | None, _own("model")]
OwnFeatures = Annotated[str | None, _own("feature map")]
Config = Annotated[
    Path | None,
    path_option("A config.toml, or a run's folder with one. Options that are given win over it."),
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="A published table's settings, as feddm:table2 (`fedsynth reproduce --list`). "
        "--dataset, --method, --alpha, --clients and --rounds choose the cell; other options win "
        "over it."
    ),
]
Output = Annotated[Path, path_option("The folder of run folders.")]
Resume = Annotated[
    Path | None,
    path_option(
        "Resume a run that did not finish, by its folder (runs/….incomplete). Its own settings "
        "hold; only --device, --memory-gb, --compile and --data-root may be given.",
        metavar="RUN",
    ),
]
Log = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Also log each round to csv, tensorboard, wandb or mlflow, below --output; may be "
        "repeated. All but csv need the extra of that name.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print what the run would cost in privacy; read no data."),
]
Download = Annotated[
    bool, typer.Option("--download", help="Download the data set (with torchvision).")
]
SignKey = Annotated[
    Path | None,
    path_option(
        "Sign the run folder with this Ed25519 key in PEM (`privacy verify --public-key`).",
        panel="Differential privacy",
    ),
]
