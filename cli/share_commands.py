"""`fedsynth synthesize` and `fedsynth export`: synthetic images with their report, in a folder that
may leave the house."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedsynth.cli import options as given
from fedsynth.cli.errors import one_line_errors
from fedsynth.cli.option_names import sections_of
from fedsynth.cli.own_code_options import own_code_alone, with_own_code
from fedsynth.cli.paths import PATH, named_path
from fedsynth.cli.settings_options import merged, read_config, with_set_options
from fedsynth.cli.signals import ended_by_signals

Out = Annotated[
    Path,
    typer.Option(
        "--out",
        parser=named_path,
        metavar=PATH,
        help="The folder to be made: what may leave the house, and nothing else.",
    ),
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


def synthesize(
    context: typer.Context,
    out: Out,
    data: given.Data = None,
    image_size: given.ImageSize = None,
    channels: given.Channels = None,
    skip_corrupt: given.SkipCorrupt = None,
    skip_other: given.SkipOther = None,
    declaration: given.Declaration = None,
    test_data: given.TestData = None,
    test: given.Test = None,
    dataset: given.Dataset = None,
    data_root: given.DataRoot = None,
    download: given.Download = False,
    dp_epsilon: given.DpEpsilon = None,
    dp_sigma: given.DpSigma = None,
    dp_delta: given.DpDelta = None,
    dp_clip: given.DpClip = None,
    dp_mechanism: given.DpMechanism = None,
    dp_sample_rate: given.DpSampleRate = None,
    dp_max_records: given.DpMaxRecords = None,
    dp_unit: given.DpUnit = None,
    dp_nominal_size: given.DpNominalSize = None,
    dp_ledger: given.DpLedger = None,
    responsible: given.Responsible = None,
    purpose: given.Purpose = None,
    sites: given.Sites = None,
    unprotected: Unprotected = False,
    with_model: WithModel = False,
    method: given.Method = None,
    ipc: given.Ipc = None,
    rounds: given.Rounds = None,
    seed: given.Seed = None,
    device: given.Device = None,
    memory_gb: given.MemoryGb = None,
    model: given.Model = None,
    width: given.Width = None,
    depth: given.Depth = None,
    norm: given.Norm = None,
    features: given.Features = None,
    config: given.Config = None,
    settings: given.Set = None,
    output: given.Output = Path("runs"),
    as_json: given.AsJson = False,
) -> None:
    """Make one owner's private synthetic set of a folder of images.

    In --out stands what may leave the house: the images by class as PNG and as a safetensors file,
    a README for who gets them, the privacy report, and hashes. The run folder (in --output) stays.

    Example: `fedsynth data describe scans`, check and sign scans/fedsynth.toml, then `fedsynth
    synthesize --data scans --dp-epsilon 8 --out share`.
    """
    with one_line_errors(context.command) as names:
        from fedsynth.cli.memory import keep_large_allocations
        from fedsynth.cli.progress import make_observer, print_summary
        from fedsynth.federation.synthesize import owner_settings
        from fedsynth.federation.synthesize import synthesize as make
        from fedsynth.privacy.errors import BudgetExceededError

        chosen = with_set_options(sections_of(context.params), settings or [], names)
        chosen = with_own_code(chosen)
        resolved = owner_settings(merged(read_config(config), chosen))
        keep_large_allocations()
        with make_observer(resolved, names) as observer, ended_by_signals():
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
    context: typer.Context,
    run: Annotated[
        Path,
        typer.Argument(parser=named_path, metavar="RUN", help="A finished run's folder."),
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
    with one_line_errors(context.command):
        from fedsynth.federation.outputs.export import export_run

        own_code_alone(method, model, features)
        made = export_run(run, out, unprotected=unprotected, with_model=with_model)
        print(f"to hand over: {made}")
