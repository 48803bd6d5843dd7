"""The commands `fedsynth methods`, `fedsynth methods show` and `fedsynth distill`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsynth.cli.application import Application
from fedsynth.cli.options import path_option, takes_settings
from fedsynth.cli.settings_options import Sections, method_settings
from fedsynth.privacy.files import expand_home

ROBUST = "median, trimmed or clip (run.robust)"


methods_app = Application(
    help="List all methods, or describe one method in full.", no_args_is_help=False
)


@methods_app.callback(invoke_without_command=True)
def methods(context: typer.Context) -> None:
    """List the methods, one per line. To describe one method in full, use `fedsynth methods show
    NAME`.
    """
    from fedsynth.methods import METHODS, method_class

    if context.invoked_subcommand is None:
        for name in sorted(METHODS):
            cls = method_class(name)
            print(f"{name:10} {cls.summary} ({cls.reference})")


@methods_app.command("show")
def show_method(name: Annotated[str, typer.Argument(help="A method's name.")]) -> None:
    """Describe one method in full.

    The description contains the settings with their defaults, the uploads and their privacy, and
    the reference.
    """
    from dataclasses import fields

    from fedsynth.core.messages import privacy_of_fields
    from fedsynth.methods import method_class

    cls = method_class(name)
    print(
        f"{name}: {cls.summary}\nreference: {cls.reference}\n\nsettings (--set KEY=VALUE), "
        "with defaults:"
    )
    for field in fields(cls):
        print(f"  {field.name} = {field.default}")
    print(f"\n{explanation(cls)}")
    for base in explaining(cls):
        print(f"\n`{base.__name__}`: {explanation(base)}")
    uploads = {"uploads in a first exchange": cls.first_upload, "uploads": cls.upload}
    for title, message in uploads.items():
        if message is not None:
            print(f"\n{title} ({message.__name__}):")
            for key, (kind, reason) in privacy_of_fields(message).items():
                suffix = f" ({reason})" if reason else ""
                print(f"  {key}: {kind}{suffix}")
    mechanisms = ", ".join(cls.dp_mechanisms) or f"refused: {cls.refusal}"
    print(f"\nwith differential privacy: {mechanisms}")
    robust = f"refused: {cls.robust_refusal}" if cls.robust_refusal else ROBUST
    print(f"robust aggregation: {robust}")


def explanation(cls: type) -> str:
    """Returns the docstring of a class without the paragraphs that are Python examples."""
    from inspect import getdoc

    paragraphs = (getdoc(cls) or "").split("\n\n")
    return "\n\n".join(text for text in paragraphs if ">>> " not in text)


def explaining(cls: type) -> list[type]:
    """Returns further classes whose docstrings explain the settings of a method.

    These are the base classes of the method, and the classes that a docstring mentions as `Name`.
    """
    from dataclasses import fields, is_dataclass
    from inspect import getdoc

    classes = [cls]
    for described in classes:  # the list grows in the loop
        module = sys.modules[described.__module__]
        mentioned = re.findall(r"`([A-Z]\w+)`", getdoc(described) or "")
        candidates: list[Any] = [getattr(module, name, None) for name in mentioned]
        candidates += described.__mro__[1:]
        for candidate in candidates:
            is_class = isinstance(candidate, type) and is_dataclass(candidate)
            if is_class and fields(candidate) and candidate not in classes:
                classes.append(candidate)
    return classes[1:]


def split_names(text: str) -> list[str]:
    """Returns the names in a comma-separated list."""
    return [name.strip() for name in text.split(",") if name.strip()]


@takes_settings(
    "model.width", "model.depth", "model.norm", "run.seed", "run.device", "data.data_root",
    set_option=False,
)  # fmt: skip
def distill(
    chosen: Sections,
    models: Annotated[str, typer.Option(help="Model files, separated by commas.")],
    arch: Annotated[
        str,
        typer.Option(
            help="The architecture of all models, or one for each model, separated by commas."
        ),
    ] = "convnet",
    student: Annotated[
        str | None, typer.Option(help="The student's architecture. Default: the first model's.")
    ] = None,
    dataset: Annotated[
        str, typer.Option(help="The data set that defines image size, classes and normalisation.")
    ] = "mnist",
    method: Annotated[
        str, typer.Option(help="A method that needs no data: fedhydra or dense.")
    ] = "fedhydra",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A setting of the method's server, as KEY=VALUE. May be repeated."
        ),
    ] = None,
    evaluate: Annotated[
        bool,
        typer.Option("--evaluate", help="Also test the models and the student on the data set."),
    ] = False,
    output: Annotated[Path, path_option("The file to write the student to.")] = Path(
        "student.safetensors"
    ),
) -> None:
    """Distil trained models into one model, in one shot and without data.

    Example: `fedsynth distill --models a.safetensors,b.safetensors --arch lenet5,cnn1 --student
    resnet18 --dataset mnist`.
    """
    from fedsynth.simulation.distill import distil_files

    run = chosen["run"]
    root = chosen["data"].get("data_root")
    files = list(map(expand_home, split_names(models)))
    architectures = split_names(arch)
    lines = distil_files(
        files,
        architectures,
        student=student or next(iter(architectures), ""),
        dataset=dataset,
        method=method,
        settings=method_settings(settings or []),
        sizes=chosen["model"],
        seed=run.get("seed", 0),
        device=run.get("device", "auto"),
        data_root=None if root is None else Path(root),
        evaluate=evaluate,
        output=output,
    )
    for line in lines:
        print(line)
