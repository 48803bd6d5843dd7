"""`fedsynth data describe | synthesize | export | student`: custom images, a synthetic set for
release, and a network trained on it.
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
    """Makes `describe` a subcommand, so that more can be added."""


@data_app.command()
@takes_settings(
    "data.image_size", "data.channels", "data.skip_corrupt", "data.skip_other", set_option=False
)
def describe(
    chosen: Sections,
    folder: Annotated[
        Path,
        path_argument(
            "SITE/CLASS/files, CLASS/files, or a folder with a manifest.csv (path, label, "
            "site, user).",
            metavar="DIR",
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(help="The public name of the data set; default: the folder's name."),
    ] = None,
    output: Annotated[
        Path | None,
        path_option(
            "The file to write; default: fedsynth.toml in the folder, where `train "
            "--data` looks for it."
        ),
    ] = None,
) -> None:
    """Propose the public declaration of a folder of images: a TOML file to be checked and signed.

    A run with differential privacy uses only this information about the images: classes, sites,
    size, a bound on their number and a nominal number. The proposal is read from the folder (sizes
    are rounded), so a person has to check each line, and sign it, before any private run.
    """
    from fedsynth.data.describe import describe_folder
    from fedsynth.data.folder_settings import FolderSettings

    settings = FolderSettings(str(folder), **chosen["data"])
    description = describe_folder(settings, note, name)
    path = output or description.path
    if path.exists():
        raise OptionError(f"{path} already exists: remove it, or set --output")
    write_text(path, description.toml)
    print(f"{description.table}\n(the table is exact and private: it is not written to any file)\n")
    print(
        f"written: {path}\n"
        "Check each line: all of it is public. Then fill in [signed_off], and use it with "
        f"`fedsynth synthesize --data {folder} --dp-epsilon 8`."
    )


Out = Annotated[
    Path, path_option("The folder to create. It contains only what may be shared.", "--out")
]
Unprotected = Annotated[
    bool,
    typer.Option(
        "--unprotected",
        help="Also export without differential privacy: such images may reveal real ones.",
    ),
]
WithModel = Annotated[
    bool,
    typer.Option(
        "--with-model",
        help="Also export the run's model, which has the same guarantee. FedStats' model labels "
        "augmented copies for `fedsynth student`.",
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

    The folder --out has only what may be released: the images by class as PNG and as a safetensors
    file, a README for the recipients, the privacy report, and hashes. The run folder (in --output)
    stays.

    Example: `fedsynth data describe scans`, check and sign scans/fedsynth.toml, then `fedsynth
    synthesize --data scans --dp-epsilon 8 --out share`.
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
    say(f"to share: {out} (share nothing from the run folder)")


@takes_settings(*OWN_CODE, set_option=False)
def export(
    chosen: Sections,
    run: Annotated[Path, path_argument("A finished run's folder.", metavar="RUN")],
    out: Out,
    unprotected: Unprotected = False,
    with_model: WithModel = False,
) -> None:
    """Write what may be released of a run: synthetic images, their privacy report, hashes.

    The report is first rebuilt from settings and ledgers, and must agree. `load_synthetic` reads
    the folder.

    Example: `fedsynth export runs/… --out share`.
    """
    from fedsynth.results.export import export_run

    with_own_code(chosen)
    folder = export_run(run, out, unprotected=unprotected, with_model=with_model)
    print(f"to share: {folder}")


@takes_settings(
    "model.name", "model.width", "model.depth", "model.norm", "data.test_folder",
    "data.skip_corrupt", "data.skip_other", "data.data_root", "run.seed", "run.device",
    set_option=False,
)  # fmt: skip
def student(
    chosen: Sections,
    share: Annotated[Path, path_argument("A folder that `fedsynth export` wrote.", metavar="SET")],
    labels: Annotated[
        str, typer.Option(help="soft (stored with the images), hard (their classes), or auto.")
    ] = "auto",
    teacher: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="The model that labels augmented copies of the images: a run folder, an "
            "exported set or a model file; auto: the set's model, if it was not trained on "
            "them; none.",
        ),
    ] = "auto",
    features: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME", help="The teacher's feature map, if it is a custom one."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    copies: Annotated[
        int | None, typer.Option(help="Number of augmented copies per image.")
    ] = None,
    flip: Annotated[
        bool, typer.Option("--flip", help="Also mirror copies (not for digits or letters).")
    ] = False,
    dataset: Annotated[str | None, typer.Option(help="The data set with the test images.")] = None,
    download: given.Download = False,
    output: Annotated[Path, path_option("The file to write the network to.")] = Path(
        "student.safetensors"
    ),
) -> None:
    """Train a network only on a synthetic set.

    `fedsynth.load_model` reads the file. The set's guarantee holds for the network, if there is no
    teacher or the teacher is the set's model.

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
            note("if these images are private, this accuracy is not covered by the guarantee")
    print(f"student: {output}")


def _guarantee(result: Student) -> str:
    from fedsynth.privacy.report.formatting import format_epsilon

    if result.synthetic.epsilon is None:
        return "none: the synthetic set has none"
    epsilon = f"ε = {format_epsilon(result.synthetic.epsilon)} at δ = {result.synthetic.delta:g}"
    if not result.guaranteed:
        return f"unknown: the set has {epsilon}, but the training used more than the set"
    model = result.architecture.custom_parts.get("model")
    if model is None:
        return f"{epsilon}, the set's"
    return f"{epsilon}, the same as the set's, if nothing in {model} comes from private data"


def _print_progress(step: int, total: int) -> None:
    """Prints each tenth of the training to stderr."""
    if 10 * step // total > 10 * (step - 1) // total:
        say(f"step {step} of {total}")
