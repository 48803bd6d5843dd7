"""The options of `train` and `partition`: what each is called, and its help.

Which setting an option is stands in `fedsynth.cli.option_names`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedsynth.cli.paths import PATH, named_path
from fedsynth.data.partition_settings import BY_LABELS, DOMAIN, NATURAL
from fedsynth.data.registry import DATASETS

DATA, PRIVACY, MODEL = "Data and partition", "Differential privacy", "Model"
NAMED = ", ".join(name for name in DATASETS if "(" not in name)


def _data(*names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=DATA)


def _model(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=MODEL)


def _privacy(*names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=PRIVACY)


Method = Annotated[
    str | None,
    typer.Option(
        help="feddm, fedaf, fedkf, … (see `fedsynth methods`), or a class of your own: "
        "FILE.py:NAME."
    ),
]
OwnMethod = Annotated[
    str | None,
    typer.Option("--method", metavar="FILE.py:NAME", help="The run's method, if it is your own."),
]
OwnModel = Annotated[
    str | None,
    typer.Option("--model", metavar="FILE.py:NAME", help="The run's model, if it is your own."),
]
OwnFeatures = Annotated[
    str | None,
    typer.Option(
        "--features", metavar="FILE.py:NAME", help="The run's feature map, if it is your own."
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        parser=named_path,
        metavar=PATH,
        help="A config.toml of an earlier run, or its folder, or your own; options given here win.",
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="A published table's settings, as feddm:table2 (`fedsynth reproduce --list`); "
        "--dataset, --method, --alpha, --clients and --rounds choose the cell, other options win over it."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A setting of the method, KEY=VALUE, or of another section, model.projection=256; "
        "may be repeated.",
    ),
]
Ipc = Annotated[int | None, typer.Option(help="Synthetic images per class (same as --set ipc=N).")]
Matching = Annotated[
    str | None,
    typer.Option(
        help="mean (the papers'), gaussian, energy or sinkhorn: what condensation matches (same "
        "as --set matching=…)."
    ),
]
Rounds = Annotated[int | None, typer.Option(help="Communication rounds.")]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Seed of everything but privacy's noise and masks (a config's own partition seed "
        "stays)."
    ),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
Precision = Annotated[
    str | None,
    typer.Option(
        help="fp32 or bf16, of condensation's passes over real images, plain local training, a "
        "server's training on synthetic images, and distillation by a server or on generated "
        "images."
    ),
]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Let torch.compile make condensation's passes (long runs gain; not with DP).",
    ),
]
MemoryGb = Annotated[
    float | None,
    typer.Option(
        help="Memory that steps stay within, by letting fewer clients share one; default 4, on a "
        "GPU half of it."
    ),
]
Robust = Annotated[
    str | None,
    typer.Option(
        help="none, median, trimmed or clip: what the server takes in place of averages, so that a "
        "few clients that lie cannot move it far (--set run.robust_share=0.2 is what trimmed "
        "leaves out)."
    ),
]
Output = Annotated[
    Path, typer.Option(parser=named_path, metavar=PATH, help="Where run folders go.")
]
Resume = Annotated[
    Path | None,
    typer.Option(
        parser=named_path,
        metavar="RUN",
        help="Go on with a run that did not finish, by its folder (runs/….incomplete). Settings "
        "are its own; --device, --memory-gb, --compile and --data-root may be given anew.",
    ),
]
Log = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        help="Also log each round to csv, tensorboard, wandb or mlflow, below --output; may be "
        "repeated (extras: fedsynth[tensorboard], …).",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Say what the run would cost in privacy, touch no data, and stop."
    ),
]

Dataset = Annotated[
    str | None,
    _data(help=f"{NAMED}, or 'synthetic(1,1)' with numbers of yours; digits come with fedsynth."),
]
DataRoot = Annotated[
    Path | None,
    typer.Option(
        parser=named_path,
        metavar=PATH,
        help="Folder of the data sets; else $FEDSYNTH_DATA.",
        rich_help_panel=DATA,
    ),
]
Data = Annotated[
    str | None,
    _data(
        "--data",
        help="Your own images: a folder SITE/CLASS/files (each site is a client) or CLASS/files "
        "(with --partition), or with a manifest.csv (path,label,site,user). JPEG, PNG, BMP, WebP.",
        metavar=PATH,
    ),
]
TestData = Annotated[
    str | None,
    _data("--test-data", help="Your own images to test on, in folders alike.", metavar=PATH),
]
Test = Annotated[
    str | None,
    _data(
        "--test",
        help="What --test-data is: public, private (default: with DP, what is measured on it then "
        "stands in simulation_only alone) or none.",
    ),
]
ImageSize = Annotated[
    str | None,
    _data("--image-size", help="Resize every image of --data: 64, or 64x48 (height x width)."),
]
Channels = Annotated[
    int | None, _data(help="Of --data: 1 (grey) or 3 (colour); default: as the images are.")
]
SkipCorrupt = Annotated[
    bool | None,
    _data(
        "--skip-corrupt/--no-skip-corrupt",
        help="Name the files of --data that cannot be read, and leave them out.",
    ),
]
SkipOther = Annotated[
    bool | None,
    _data(
        "--skip-other/--no-skip-other",
        help="Count what is no image in --data (other files, links to nothing, empty folders), and "
        "skip it.",
    ),
]
Declaration = Annotated[
    str | None,
    _data(
        "--declaration",
        help="What is public of --data (default: fedsynth.toml in it), as `fedsynth data describe` "
        "proposes it; a run with DP needs one, signed off.",
        metavar=PATH,
    ),
]
Download = Annotated[bool, _data("--download", help="Let torchvision fetch the data set.")]
Partition = Annotated[
    str | None,
    _data(
        "--partition",
        help=f"{', '.join(BY_LABELS)}, {DOMAIN} or {NATURAL} (as the data come); more by --set "
        "partition.missing_classes=, "
        "dominant_classes=, dominant_share=.",
    ),
]
Clients = Annotated[int | None, _data(help="Number of clients.")]
Alpha = Annotated[
    float | None, _data(help="Concentration of dirichlet and quantity; small is skewed.")
]
ClassesPerClient = Annotated[int | None, _data(help="For --partition classes.")]
MinSize = Annotated[int | None, _data(help="Fewest examples of a client (dirichlet, quantity).")]
Subset = Annotated[float | None, _data(help="Share of each class's examples that is used at all.")]
LocalTest = Annotated[
    float | None, _data(help="Share of each client's examples that tests: AMP, FM and WLP.")
]
Participation = Annotated[
    float | None, _data(help="Share of the clients that takes part in a round.")
]

ClientFailures = Annotated[
    float | None,
    _data(help="Probability that a client of a round fails: crashes, hangs, or answers too late."),
]
Quorum = Annotated[
    float | None,
    _data(help="Share of a round's clients whose uploads make a round (default 0.5)."),
]

Model = Annotated[
    str | None,
    _model(
        "--model",
        "--server-model",
        help="convnet, linear, mlp, lenet5, cnn1, cnn2, resnet8, resnet18, resnet50, alexnet or "
        "googlenet; or your own: FILE.py:NAME, a class or function of image_shape and classes.",
    ),
]
ClientModels = Annotated[
    str | None,
    _model(
        help="The clients' own architectures, comma-separated, dealt out in turn (one-shot "
        "methods)."
    ),
]
Features = Annotated[
    str | None,
    _model(
        help="A fixed feature map that a linear model (or --model mlp) is trained on, by methods "
        "that train models: whitened-scattering, scattering, random-process, pixels, …; or your own: "
        "FILE.py:NAME, a function of image_shape that makes a FeatureMap. Of fedstats: its map.",
    ),
]
Width = Annotated[
    int | None, _model(help="Channels of a block of convnet; units of the hidden layer of mlp.")
]
Depth = Annotated[int | None, _model(help="Number of blocks.")]
Norm = Annotated[
    str | None, _model(help="instance, group, batch or none; the model's own if not given.")
]

DpEpsilon = Annotated[
    float | None,
    _privacy(
        help="Budget ε of each client. Alone: σ is found for the run. With --dp-sigma: a hard cap."
    ),
]
DpSigma = Annotated[float | None, _privacy(help="Noise multiplier σ of each release.")]
DpClip = Annotated[float | None, _privacy(help="L2 bound of one example's contribution.")]
DpDelta = Annotated[
    float | None, _privacy(help="δ, a constant (default 1e-5), at most 1 / max-records.")
]
DpMaxRecords = Annotated[
    int | None,
    _privacy(help="Public bound on all clients' records; default: the data set's published size."),
]
DpMechanism = Annotated[
    str | None,
    _privacy(
        help="One of the method's (fedsynth methods NAME lists them; default: the first); paper "
        "is FedDM as printed, without a guarantee."
    ),
]
DpSampleRate = Annotated[float | None, _privacy(help="Public rate q of Poisson sampling.")]
DpNominalSize = Annotated[
    float | None, _privacy(help="Public nominal records (or users) of a client, for divisors.")
]
DpAdjacency = Annotated[str | None, _privacy(help="add-remove (default), zero-out or replace-one.")]
DpUnit = Annotated[
    str | None,
    _privacy(
        help="Who is protected: record (one example, default) or user (all examples of a person "
        "at a client; "
        "--dp-nominal-size then counts users)."
    ),
]
DpFourSums = Annotated[
    bool | None,
    _privacy(
        "--dp-four-sums/--no-dp-four-sums", help="Each noise value from four Gaussians: hardens it."
    ),
]
DpLedger = Annotated[
    str | None,  # as a Path an empty one would be the current folder
    _privacy(
        metavar="PATH",
        help="Folder of the clients' ledgers, kept over runs (without privacy a run spends all); "
        "else each run counts for itself.",
    ),
]
Responsible = Annotated[
    str | None,
    _privacy(help="Who answers for the run, as the report's first page says it."),
]
Purpose = Annotated[str | None, _privacy(help="What the run is for, likewise.")]
Sites = Annotated[
    str | None,
    _privacy(help="The clients' sites by name, comma-separated, likewise: 'Mitte,Nord,Süd'."),
]

SignKey = Annotated[
    Path | None,
    typer.Option(
        "--sign-key",
        parser=named_path,
        metavar=PATH,
        help="Sign the run folder with this Ed25519 key in PEM (`privacy verify --public-key`).",
        rich_help_panel=PRIVACY,
    ),
]
