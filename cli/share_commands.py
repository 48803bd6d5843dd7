"""The commands `fedsynth methods`, `distill`, `data`, `synthesize`, `export`, `student` and
`fidelity`.

These commands describe methods and custom images, make synthetic images for release and compare
them with real images, and train networks without private images.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsynth.cli import options
from fedsynth.cli.application import (
    OptionError,
    keep_large_allocations,
    note,
    say,
)
from fedsynth.cli.privacy_commands import print_dry_run
from fedsynth.files import expand_home, read_regular, write_output

if TYPE_CHECKING:
    from fedsynth.sharing.student import Student

ROBUST = "median, trimmed or clip (run.robust)"


methods_app = typer.Typer(help="List all methods, or describe one method in full.")


@methods_app.callback(invoke_without_command=True)
def methods(context: typer.Context) -> None:
    """List the methods, one per line. To describe one method in full, use `fedsynth methods show
    NAME`.
    """
    from fedsynth.methods import METHODS, described

    if context.invoked_subcommand is None:
        for name in sorted(METHODS):
            summary, reference = described(name)
            print(f"{name:10} {summary} ({reference})")


@methods_app.command("show")
def show_method(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The name of a method, or FILE.py:NAME.")
    ],
) -> None:
    """Describe one method in full.

    The description contains the settings with their defaults, the uploads and their privacy, and
    the reference.
    """
    from dataclasses import fields, is_dataclass

    from fedsynth.core.capabilities import upload_types
    from fedsynth.core.messages import privacy_of_fields
    from fedsynth.methods import method_class

    cls = method_class(options.with_own_code({"run": {"method": name}})["run"]["method"])
    print(f"{name}: {cls.summary}\nreference: {cls.reference}\n")
    print("settings (--set KEY=VALUE), with defaults:")
    for field in fields(cls):
        print(f"  {field.name} = {field.default}")
    print(f"\n{explanation(cls)}")
    for base in cls.__mro__[1:]:
        if is_dataclass(base) and fields(base):
            print(f"\n`{base.__name__}`: {explanation(base)}")
    for message in upload_types(cls):
        title = "uploads" if message is cls.upload else "uploads in a first exchange"
        print(f"\n{title} ({message.__name__}):")
        for key, (kind, reason) in privacy_of_fields(message).items():
            suffix = f" ({reason})" if reason else ""
            print(f"  {key}: {kind}{suffix}")
    mechanisms = ", ".join(cls.dp_mechanisms) or f"refused: {cls.refusal}"
    print(f"\nwith differential privacy: {mechanisms}")
    robust = f"refused: {cls.robust_refusal}" if cls.robust_refusal else ROBUST
    print(f"robust aggregation: {robust}")


def explanation(cls: type) -> str:
    """Returns a class's docstring without paragraphs that contain Python examples."""
    from inspect import getdoc

    paragraphs = (getdoc(cls) or "").split("\n\n")
    return "\n\n".join(text for text in paragraphs if ">>> " not in text)


# The settings of a network, and of the real images on which it is tested.
NETWORK = ("model.width", "model.depth", "model.norm")
TEST_DATA = (
    "data.data_root", "data.test_folder", "data.skip_corrupt", "data.skip_other", "data.encoder",
    "data.encoder_weights", "data.public_images", *options.COLUMNS,
)  # fmt: skip
TestDataset = Annotated[
    str | None, typer.Option("--dataset", help="The data set of the real images.")
]
StudentFile = Annotated[Path, options.path_option("The file to write the student to.")]


@options.takes_settings(*NETWORK, "run.seed", "run.device", *TEST_DATA, set_option=False)
def distill(
    chosen: options.Sections,
    models: Annotated[
        list[Path], options.path_argument("Run folders or model files.", metavar="MODEL")
    ],
    student: Annotated[
        str | None, typer.Option(help="The student's architecture. Default: the first model's.")
    ] = None,
    method: Annotated[str, typer.Option(help="The method: fedhydra or dense.")] = "fedhydra",
    settings: options.Set = None,
    evaluate: Annotated[bool, options.flag("--evaluate", "Also test on the data set.")] = False,
    output: StudentFile = Path("student.safetensors"),
) -> None:
    """Distil trained models into one model, in one shot and without data.

    Example: `fedsynth distill runs/A runs/B --student resnet18`.
    """
    from fedsynth.cli.progress import show_steps
    from fedsynth.sharing.student import distil_files

    sections = options.set_options(settings or [])
    if unused := [section for section in sections if section != "method"]:
        raise OptionError(
            f"--set contains the sections {', '.join(unused)}. Set only the method's settings"
        )
    sections["run"] = {**chosen["run"], "method": method}
    sections |= {"data": chosen["data"], "model": chosen["model"]}
    with show_steps() as report:
        lines = list(
            distil_files(models, student, sections, evaluate=evaluate, output=output, report=report)
        )
    print(*lines, sep="\n")


data_app = typer.Typer(help="Describe the public facts about your images.", no_args_is_help=True)


@data_app.command()
@options.takes_settings(
    "data.image_size", "data.channels", "data.skip_corrupt", "data.skip_other", "data.window",
    "data.slice", *options.COLUMNS, "data.bounds", "data.revision", set_option=False,
)  # fmt: skip
def describe(
    chosen: options.Sections,
    folder: Annotated[
        Path,
        options.path_argument(
            "A folder with the structure SITE/CLASS/files or CLASS/files, or with a manifest.csv "
            "(path, label, site, user), or a file .npz, .npy, .safetensors, .parquet, .csv or "
            ".tsv.",
            metavar="DIR",
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Public name. Default: the folder's.")] = None,
    output: Annotated[
        Path | None,
        options.path_option("Default: fedsynth.toml in the folder, or FILE.fedsynth.toml."),
    ] = None,
    overwrite: Annotated[
        bool, options.flag("--overwrite", "Replace a file that is not signed.")
    ] = False,
) -> None:
    """Propose a public description of an image folder, for a person to check and sign.

    The description is a TOML file with the classes, sites, image size, a bound on the number of
    images and a nominal number. Apart from noisy releases, a run with differential privacy uses no
    other information about the images. The proposal is read from the folder, with rounded sizes.
    Before any private run, a person must therefore check each line and sign the file.
    """
    from fedsynth.data.declaration import FolderSettings, read_declaration
    from fedsynth.data.describe import describe_folder

    description = describe_folder(FolderSettings(str(folder), **chosen["data"]), note, name)
    path = output or description.path
    proposal = description.toml.encode()
    if path.exists():
        if read_declaration(path).signed_by:
            raise OptionError(f"{path} is signed, so it is not replaced. Name a new --output")
        if not overwrite and read_regular(path) != proposal:
            raise OptionError(
                f"{path} exists and contains another proposal. Name a new file with --output, or "
                "replace this one with --overwrite"
            )
    write_output(path, proposal)
    print(f"{description.table}\n(this table is exact and private, so no file contains it)\n")
    print(
        f"written: {path}\n"
        "Check each line, because the whole file is public. Then fill in [signed_off], and run one "
        "of these commands:"
    )
    print(*(f"  {line}" for line in description.commands(path)), sep="\n")


@data_app.command("clear-cache")
def clear_cache(
    folder: Annotated[
        Path, options.path_argument("The folder that --encoder-cache named.", metavar="DIR")
    ],
) -> None:
    """Delete the vectors stored by runs with --encoder-cache.

    Example: `fedsynth data clear-cache ~/vectors`.
    """
    from fedsynth.features.encoding import clear_cache as clear

    print(f"deleted files: {clear(folder)}")


out_option = options.path_option("The folder to create. You may share all of its files.", "--out")
Unprotected = Annotated[
    bool, options.flag("--unprotected", "Also export without a guarantee: may reveal real images.")
]
WithModel = Annotated[
    bool, options.flag("--with-model", "Also export the run's model, which has the same guarantee.")
]


EvidenceBy = Annotated[
    str | None,
    typer.Option(
        "--evidence",
        metavar="NETWORK",
        help="Also attack the set, and compare it with the real images by these features, such as "
        "pixels. Held out are partition.local_test or the test images.",
    ),
]
Simulation = Annotated[
    bool,
    options.flag("--simulation", "State that the real images are public or simulated."),
]
Continued = Annotated[
    Path | None,
    options.path_option(
        "The shared set of the previous period. Its sums are continued with the new records of "
        "--data.",
        "--continue",
        metavar="SHARE",
    ),
]


@options.takes_settings(
    "data", "privacy", "report", "run.method", "run.rounds", "run.seed", "run.device",
    "run.memory_gb", "method.ipc", "model.name", "model.width", "model.depth", "model.norm",
    "model.features",
)  # fmt: skip
def synthesize(
    chosen: options.Sections,
    out: Annotated[Path, out_option],
    download: options.Download = False,
    unprotected: Unprotected = False,
    with_model: WithModel = False,
    continued: Continued = None,
    evidence: EvidenceBy = None,
    simulation: Simulation = False,
    config: options.Config = None,
    output: options.Output = Path("runs"),
    as_json: options.AsJson = False,
    dry_run: options.DryRun = False,
) -> None:
    """Make synthetic images from the private images of one owner.

    The folder --out contains only releasable files: the synthetic images as PNG and safetensors
    files, a README for recipients, the privacy report, and hashes. The run folder stays below
    --output.

    Example: run `fedsynth data describe scans`, check and sign scans/fedsynth.toml, then run
    `fedsynth synthesize --data scans --dp-epsilon 8 --out share`.

    If records keep arriving, set the number of periods in the first run (`--method fedstats --set
    periods=12`). For the next period, run `fedsynth synthesize --continue share --data new --out
    share-2`.
    """
    from fedsynth.cli.progress import make_observer, show_result
    from fedsynth.simulation.simulate import check_synthesis, owner_settings
    from fedsynth.simulation.simulate import synthesize as make

    sections = options.merged(options.read_config(config), chosen)
    resolved = owner_settings(sections, continued)
    if dry_run:
        check_synthesis(resolved, out, unprotected=unprotected)
        print_dry_run(resolved, as_json)
        return
    keep_large_allocations()
    with make_observer(resolved) as observer:
        result = make(
            resolved,
            out,
            runs=output,
            unprotected=unprotected,
            with_model=with_model,
            observer=observer,
            download=download,
            continued=continued,
            evidence=evidence,
            simulation=simulation,
        )
    show_result(result, as_json)
    say(f"you may share the folder {out}, but nothing from the run folder")


@options.takes_settings(*options.OWN_CODE, "data.test_folder", set_option=False)
def export(
    chosen: options.Sections,
    run: Annotated[Path, options.path_argument("The folder of a finished run.", metavar="RUN")],
    out: Annotated[Path | None, out_option] = None,
    onnx: Annotated[
        Path | None, options.path_option("The ONNX file to write, for pixels in [0, 1].")
    ] = None,
    unprotected: Unprotected = False,
    with_model: WithModel = False,
    evidence: EvidenceBy = None,
    simulation: Simulation = False,
    download: options.Download = False,
) -> None:
    """Export a run's synthetic images to a new folder, or its model to a file, for sharing.

    The folder also contains the privacy report, a README and hashes. Before the export, the report
    is built again from the settings and ledgers, and must be the same. `load_synthetic` reads the
    folder. An ONNX file (--onnx) needs no fedsynth and no PyTorch.

    Examples: `fedsynth export runs/… --out share`, `fedsynth export runs/… --onnx model.onnx`,
    `fedsynth export runs/… --out share --evidence pixels --simulation`.
    """
    from fedsynth.config.resolve import resolve
    from fedsynth.sharing.export import export_run
    from fedsynth.sharing.onnx_export import export_onnx
    from fedsynth.simulation.simulate import images_of_run

    if out is None and onnx is None:
        raise OptionError("no output is set. Name a folder with --out or a model file with --onnx")
    if out is not None:
        real = None
        if evidence is not None:
            settings = resolve(options.merged(options.read_config(run), chosen))
            real = images_of_run(settings, evidence, simulation=simulation, download=download)
        folder = export_run(run, out, unprotected=unprotected, with_model=with_model, real=real)
        print(f"you may share the folder {folder}")
    if onnx is not None:
        print(f"model: {export_onnx(run, onnx, unprotected=unprotected)}")


@options.takes_settings(
    "model.name", *NETWORK, *TEST_DATA, "run.seed", "run.device", set_option=False
)
def student(
    chosen: options.Sections,
    share: Annotated[
        Path, options.path_argument("A folder that `fedsynth export` wrote.", metavar="SET")
    ],
    labels: Annotated[str, typer.Option(help="soft (in the set), hard or auto.")] = "auto",
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
        typer.Option(metavar="FILE.py:NAME", help="The custom feature map of the teacher, if any."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="The number of training steps. Default: 1000, or fewer if the images "
            "have more than 32×32 pixels."
        ),
    ] = None,
    copies: Annotated[int | None, typer.Option(help="Augmented copies of an image.")] = None,
    flip: Annotated[bool, options.flag("--flip", "Mirror copies, not for digits.")] = False,
    dataset: TestDataset = None,
    download: options.Download = False,
    output: StudentFile = Path("student.safetensors"),
) -> None:
    """Train a network on synthetic images only.

    `fedsynth.load_model` reads the file. The privacy guarantee of the images also holds for the
    network if there is no teacher, or if the teacher is the model in SET.

    Example: `fedsynth student share --width 32 --steps 5000 --copies 4 --dataset fashion-mnist`.
    """
    from time import monotonic

    from fedsynth.cli.progress import show_steps
    from fedsynth.data.shared_set import load_synthetic
    from fedsynth.results.finished import auroc_text, percent
    from fedsynth.sharing.student import network_for, real_images, require_place, student_of_set
    from fedsynth.synthesizer.condensation.student import settings_for

    keep_large_allocations()
    spec = load_synthetic(share).spec
    require_place(output)
    data, run = chosen["data"], chosen["run"]
    test = real_images(spec, data, dataset, download=download, note=say)
    options.with_own_code({"model": {"features": features}})
    network = network_for(spec, **chosen["model"])
    numbers: dict[str, Any] = {"steps": steps, "views": copies, "seed": run.get("seed")}
    changes = {name: value for name, value in numbers.items() if value is not None}
    settings = settings_for(spec.image_shape, flip=flip, **changes)
    started = monotonic()
    with show_steps() as report:
        result = student_of_set(
            share,
            network,
            settings,
            labels=labels,
            teacher=expand_home(teacher),
            device=run.get("device", "auto"),
            report=lambda step, total: report("training step", step, total),
        )
    result.save(output)
    count, seconds = len(result.synthetic.labels), monotonic() - started
    print(f"trained on: {count} images, {result.labels} labels")
    print(f"training: {settings.steps} steps in {seconds:.1f} s")
    if settings.views:
        labels_from = "a model's" if result.taught else "their image's"
        print(f"augmented copies: {settings.views} of each image, with {labels_from} labels")
    print(f"guarantee: {_guarantee(result)}")
    if test is not None:
        measures = result.measures_on(test)
        print(f"accuracy: {percent(measures['accuracy'])} of {len(test.labels)} real test images")
        print(f"AUROC: {auroc_text(measures)}")
        if "test_folder" in data:
            note("the guarantee does not cover this accuracy if these test images are private")
    print(f"student: {output}")


@options.takes_settings(*TEST_DATA, set_option=False)
def fidelity(
    chosen: options.Sections,
    folder: Annotated[
        Path,
        options.path_argument(
            "A folder that `fedsynth export` wrote, or the folder of a finished run.", metavar="SET"
        ),
    ],
    features: Annotated[
        str,
        typer.Option(
            metavar="NETWORK",
            help="The network whose features are compared: timm:NAME, torchvision:NAME, the name "
            "of a feature map, FILE.py:NAME, or a run folder or model file.",
        ),
    ],
    weights: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="A file of weights for a network of timm or torchvision. Default: the weights "
            "that the library downloads.",
        ),
    ] = "pretrained",
    dataset: TestDataset = None,
    download: options.Download = False,
    as_json: options.AsJson = False,
) -> None:
    """Measure the similarity of synthetic and real images by FID and KID.

    Lower values mean more similar images. Compare values only if they have the same network and the
    same numbers of images.

    Example: `fedsynth fidelity share --dataset fashion-mnist --features
    torchvision:inception_v3`.
    """
    from dataclasses import asdict

    from fedsynth.cli.progress import show_steps
    from fedsynth.sharing.fidelity import fidelity_of_set, synthetic_set
    from fedsynth.sharing.student import real_images

    spec = synthetic_set(folder).spec
    test = real_images(spec, chosen["data"], dataset, download=download, note=say)
    if test is None:
        raise OptionError("no real images are named. Set --test-data or --dataset")
    with show_steps() as report:
        measured = fidelity_of_set(folder, test, features, weights, report=report)
    if as_json:
        print(json.dumps(asdict(measured), indent=2))
        return
    spread = "" if measured.kid_std is None else f" ± {measured.kid_std:.2g}"
    print(
        f"FID: {measured.fid:.4g}\nKID: {measured.kid:.4g}{spread} over subsets of "
        f"{measured.subset_size} images\ncompared: {measured.synthetic} synthetic and "
        f"{measured.real} real images, {measured.features} features of {features}"
    )
    if "test_folder" in chosen["data"]:
        note("the guarantee does not cover these distances if the test images are private")


def _guarantee(result: Student) -> str:
    from fedsynth.formatting import format_epsilon

    if result.synthetic.epsilon is None:
        return "none, because the synthetic images have no guarantee"
    epsilon = f"ε = {format_epsilon(result.synthetic.epsilon)} at δ = {result.synthetic.delta:g}"
    if not result.guaranteed:
        return f"unknown: the images have {epsilon}, but the training also used other data"
    model = result.architecture.custom_parts.get("model")
    if model is None:
        return f"{epsilon}, as for the synthetic images"
    return f"{epsilon}, as for the synthetic images, unless {model} uses private data"
