"""`fedsynth synthesize` and `fedsynth export`: synthetic images with their report, in a folder that
may leave the house."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedsynth.cli import options as given
from fedsynth.cli.generated_options import takes_settings
from fedsynth.cli.own_code_options import own_code_alone, with_own_code
from fedsynth.cli.paths import path_argument, path_option
from fedsynth.cli.settings_options import Sections, merged, read_config
from fedsynth.cli.signals import ended_by_signals

Out = Annotated[
    Path,
    path_option("The folder to be made: what may leave the house, and nothing else.", "--out"),
]
Unprotected = Annotated[
    bool,
    typer.Option(
        "--unprotected",
        help="Also without differential privacy: such images may show real ones.",
    ),
]
WithModel = Annotated[
    bool,
    typer.Option(
        "--with-model",
        help="Also the run's model, which has the same guarantee: FedStats' labels changed copies "
        "for `fedsynth student`.",
    ),
]


@takes_settings(
    "data", "privacy", "report", "run.method", "run.rounds", "run.seed", "run.device",
    "run.memory_gb", "method.ipc", "model.name", "model.width", "model.depth", "model.norm",
    "model.features",
)  # fmt: skip
def synthesize(
    chosen: Sections,
    out: Out,
    download: given.Download = False,
    unprotected: Unprotected = False,
    with_model: WithModel = False,
    config: given.Config = None,
    output: given.Output = Path("runs"),
    as_json: given.AsJson = False,
) -> None:
    """Make one owner's private synthetic set of a folder of images.

    In --out stands what may leave the house: the images by class as PNG and as a safetensors file,
    a README for who gets them, the privacy report, and hashes. The run folder (in --output) stays.

    Example: `fedsynth data describe scans`, check and sign scans/fedsynth.toml, then `fedsynth
    synthesize --data scans --dp-epsilon 8 --out share`.
    """
    from fedsynth.cli.memory import keep_large_allocations
    from fedsynth.cli.progress import make_observer, print_summary
    from fedsynth.federation.synthesize import owner_settings
    from fedsynth.federation.synthesize import synthesize as make
    from fedsynth.privacy.errors import BudgetExceededError

    resolved = owner_settings(merged(read_config(config), with_own_code(chosen)))
    keep_large_allocations()
    with make_observer(resolved) as observer, ended_by_signals():
        result = make(
            resolved,
            out,
            runs=output,
            unprotected=unprotected,
            with_model=with_model,
            observer=observer,
            download=download,
        )
    if not result.metrics:
        raise BudgetExceededError(result.deviations[-1])
    if as_json:
        print(json.dumps(result.summary, indent=2, allow_nan=False))
    else:
        print_summary(result)
    print(f"to hand over: {out} (and nothing of the run folder)", file=sys.stderr)


def export(
    run: Annotated[
        Path,
        path_argument("A finished run's folder.", metavar="RUN"),
    ],
    out: Out,
    unprotected: Unprotected = False,
    with_model: WithModel = False,
    method: given.OwnMethod = None,
    model: given.OwnModel = None,
    features: given.OwnFeatures = None,
) -> None:
    """Write what may leave the house of a run: synthetic images, their privacy report, hashes.

    The report is made again from settings and ledgers first, and must agree. `load_synthetic` reads
    the folder.

    Example: `fedsynth export runs/… --out share`.
    """
    from fedsynth.federation.outputs.export import export_run

    own_code_alone(method, model, features)
    made = export_run(run, out, unprotected=unprotected, with_model=with_model)
    print(f"to hand over: {made}")
