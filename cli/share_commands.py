"""The commands `fedsynth data describe`, `synthesize`, `export` and `student`.

They describe custom images, make synthetic images for release, and train a network on them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsynth.cli import options as given
from fedsynth.cli.application import (
    Application,
    OptionError,
    ended_by_signals,
    note,
    say,
    write_text,
)
from fedsynth.cli.options import OWN_CODE, path_argument, path_option, takes_settings
from fedsynth.cli.process import keep_large_allocations
from fedsynth.cli.settings_options import (
    Sections,
    merged,
    read_config,
    with_own_code,
)
from fedsynth.privacy.files import expand_home

if TYPE_CHECKING:
    from fedsynth.simulation.student import Student


data_app = Application(help="Describe the public facts about your images.", no_args_is_help=True)


@data_app.callback()
def _data() -> None:
    """Makes `describe` a subcommand of `data`, so that further subcommands can be added."""


@data_app.command()
@takes_settings(
    "data.image_size", "data.channels", "data.skip_corrupt", "data.skip_other", set_option=False
)
def describe(
    chosen: Sections,
    folder: Annotated[
        Path,
        path_argument(
            "A folder with the structure SITE/CLASS/files or CLASS/files, or with a manifest.csv "
            "(path, label, site, user).",
            metavar="DIR",
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(help="The public name of the data set. Default: the folder's name."),
    ] = None,
    output: Annotated[
        Path | None,
        path_option(
            "The file to write. Default: fedsynth.toml in the folder, where `train --data` "
            "looks for it."
        ),
    ] = None,
) -> None:
    """Propose a public description of a folder of images, for a person to check and sign.

    The description is a TOML file with the classes, sites, image size, a bound on the number of
    images and a nominal number. Apart from noisy releases, a run with differential privacy uses no
    other information about the images. The proposal is read from the folder, with rounded sizes.
    Before any private run, a person must therefore check each line and sign the file.
    """
    from fedsynth.data.describe import describe_folder
    from fedsynth.data.folder_settings import FolderSettings

    settings = FolderSettings(str(folder), **chosen["data"])
    description = describe_folder(settings, note, name)
    path = output or description.path
    if path.exists():
        raise OptionError(f"{path} already exists: remove it, or set --output")
    write_text(path, description.toml)
    print(f"{description.table}\n(this table is exact and private, so no file contains it)\n")
    print(
        f"written: {path}\n"
        "Check each line, because the whole file is public. Then fill in [signed_off], and run "
        f"`fedsynth synthesize --data {folder} --dp-epsilon 8`."
    )


Out = Annotated[Path, path_option("The folder to create. You may share all of its files.", "--out")]
Unprotected = Annotated[
    bool,
    typer.Option(
        "--unprotected",
        help="Also export images without a privacy guarantee. They may reveal real images.",
    ),
]
WithModel = Annotated[
    bool,
    typer.Option(
        "--with-model",
        help="Also export the run's model, which has the same guarantee. A FedStats model can "
        "label augmented images for `fedsynth student`.",
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
    """Make synthetic images from the private images of one owner.

    The folder --out contains only files that may be released: the synthetic images as PNG files and
    as a safetensors file, a README for the recipients, the privacy report, and hashes. The run
    folder stays below --output.

    Example: run `fedsynth data describe scans`, check and sign scans/fedsynth.toml, then run
    `fedsynth synthesize --data scans --dp-epsilon 8 --out share`.
    """
    from fedsynth.cli.progress import make_observer, show_result
    from fedsynth.simulation.synthesize import owner_settings
    from fedsynth.simulation.synthesize import synthesize as make

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
    show_result(result, as_json)
    say(f"you may share the folder {out}, but nothing from the run folder")


@takes_settings(*OWN_CODE, set_option=False)
def export(
    chosen: Sections,
    run: Annotated[Path, path_argument("The folder of a finished run.", metavar="RUN")],
    out: Out,
    unprotected: Unprotected = False,
    with_model: WithModel = False,
) -> None:
    """Export the synthetic images of a run to a new folder that you may share.

    The folder also contains the privacy report, a README and hashes. Before the export, the report
    is built again from the settings and ledgers, and must be the same. `load_synthetic` reads the
    folder.

    Example: `fedsynth export runs/… --out share`.
    """
    from fedsynth.results.export import export_run

    with_own_code(chosen)
    folder = export_run(run, out, unprotected=unprotected, with_model=with_model)
    print(f"you may share the folder {folder}")


@takes_settings(
    "model.name", "model.width", "model.depth", "model.norm", "data.test_folder",
    "data.skip_corrupt", "data.skip_other", "data.data_root", "run.seed", "run.device",
    set_option=False,
)  # fmt: skip
def student(
    chosen: Sections,
    share: Annotated[Path, path_argument("A folder that `fedsynth export` wrote.", metavar="SET")],
    labels: Annotated[
        str, typer.Option(help="The labels: soft (stored with the images), hard (classes) or auto.")
    ] = "auto",
    teacher: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="The model that labels augmented copies of the images: a run folder, an "
            "exported folder, a model file, none, or auto. With auto, this is the model in SET, "
            "unless it was trained on these images.",
        ),
    ] = "auto",
    features: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME", help="The custom feature map of the teacher, if it has one."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="The number of training steps.")] = None,
    copies: Annotated[
        int | None, typer.Option(help="The number of augmented copies of an image.")
    ] = None,
    flip: Annotated[
        bool, typer.Option("--flip", help="Also mirror the copies. Not for digits or letters.")
    ] = False,
    dataset: Annotated[str | None, typer.Option(help="The data set of the test images.")] = None,
    download: given.Download = False,
    output: Annotated[Path, path_option("The file to write the network to.")] = Path(
        "student.safetensors"
    ),
) -> None:
    """Train a network only on synthetic images.

    `fedsynth.load_model` reads the file. The privacy guarantee of the images also holds for the
    network if there is no teacher, or if the teacher is the model in SET.

    Example: `fedsynth student share --width 32 --steps 5000 --copies 4 --dataset fashion-mnist`.
    """
    from fedsynth.data.shared_set import load_synthetic
    from fedsynth.simulation.student import network_for, real_images, require_place, student_of_set
    from fedsynth.synthesizer.condensation.student import StudentSettings

    keep_large_allocations()
    spec = load_synthetic(share).spec
    require_place(output)
    data, run = chosen["data"], chosen["run"]
    test = real_images(
        spec,
        folder=data.get("test_folder"),
        skip_corrupt=data.get("skip_corrupt", False),
        skip_other=data.get("skip_other", False),
        dataset=dataset,
        data_root=data.get("data_root"),
        download=download,
        note=say,
    )
    with_own_code({"model": {"features": features}})
    network = network_for(spec, **with_own_code({"model": chosen["model"]})["model"])
    numbers: dict[str, Any] = {"steps": steps, "views": copies, "seed": run.get("seed")}
    changes = {name: value for name, value in numbers.items() if value is not None}
    settings = StudentSettings(flip=flip, **changes)
    result = student_of_set(
        share,
        network,
        settings,
        labels=labels,
        teacher=expand_home(teacher),
        device=run.get("device", "auto"),
        report=_print_progress,
    )
    result.save(output)
    print(f"trained on: {len(result.synthetic.labels)} images, {result.labels} labels")
    if settings.views:
        labels_from = "a model's" if result.taught else "their image's"
        print(f"augmented copies: {settings.views} of each image, with {labels_from} labels")
    print(f"guarantee: {_guarantee(result)}")
    if test is not None:
        right = 100 * result.accuracy_on(test)
        print(f"accuracy: {right:.2f} % of {len(test.labels)} real test images")
        if "test_folder" in data:
            note("the guarantee does not cover this accuracy if these test images are private")
    print(f"student: {output}")


def _guarantee(result: Student) -> str:
    from fedsynth.privacy.report.formatting import format_epsilon

    if result.synthetic.epsilon is None:
        return "none, because the synthetic images have none"
    epsilon = f"ε = {format_epsilon(result.synthetic.epsilon)} at δ = {result.synthetic.delta:g}"
    if not result.guaranteed:
        return f"unknown: the images have {epsilon}, but the training also used other data"
    model = result.architecture.custom_parts.get("model")
    if model is None:
        return f"{epsilon}, as for the synthetic images"
    return f"{epsilon}, as for the synthetic images, unless {model} uses private data"


def _print_progress(step: int, total: int) -> None:
    """Prints a line to stderr after each tenth of the training."""
    if 10 * step // total > 10 * (step - 1) // total:
        say(f"step {step} of {total}")
