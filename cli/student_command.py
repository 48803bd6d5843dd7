"""`fedsynth student`: a network trained on a synthetic set that was handed over, and tested."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fedsynth.cli import options as given
from fedsynth.cli.errors import one_line_errors
from fedsynth.cli.paths import PATH, named_path
from fedsynth.cli.settings_options import own_code_alone, with_own_code

TENTHS = 10


def student(
    context: typer.Context,
    share: Annotated[
        Path,
        typer.Argument(
            parser=named_path, metavar="SET", help="A folder that `fedsynth export` made."
        ),
    ],
    labels: Annotated[
        str, typer.Option(help="soft (as kept with the images), hard (their classes), or auto.")
    ] = "auto",
    teacher: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="A run's folder, or a set or file with a model, that labels changed copies of the "
            "images; auto: the set's own model, if it has one; none.",
        ),
    ] = "auto",
    features: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME", help="The teacher's feature map, if it is somebody's own."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    copies: Annotated[int | None, typer.Option(help="Changed copies of each image.")] = None,
    flip: Annotated[
        bool, typer.Option("--flip", help="Copies may be mirrored (not digits or letters).")
    ] = False,
    model: given.Model = None,
    width: given.Width = None,
    depth: given.Depth = None,
    norm: given.Norm = None,
    test_data: Annotated[
        str | None,
        typer.Option(metavar=PATH, help="Real images to test on, in folders by class."),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="A data set whose test images to test on.")
    ] = None,
    data_root: given.DataRoot = None,
    seed: Annotated[int, typer.Option(help="Of weights, batches and copies.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    output: Annotated[
        Path, typer.Option(parser=named_path, metavar=PATH, help="Where the network goes.")
    ] = Path("student.safetensors"),
) -> None:
    """Train a network on a synthetic set and on nothing else.

    `fedsynth.load_model` reads the file. What is guaranteed of the set holds of the network.

    Example: `fedsynth student share --width 32 --steps 5000 --copies 4 --dataset fashion-mnist`.
    """
    with one_line_errors(context.command):
        from fedsynth.cli.memory import keep_large_allocations
        from fedsynth.data.shared_set import load_synthetic
        from fedsynth.federation.student import network_for, real_images, student_of_set
        from fedsynth.synthesizer.condensation.student import StudentSettings

        keep_large_allocations()
        spec = load_synthetic(share).spec
        test = real_images(spec, folder=test_data, dataset=dataset, data_root=data_root)
        asked = {"name": model, "width": width, "depth": depth, "norm": norm}
        own_code_alone(None, None, features)
        network = network_for(spec, **with_own_code({"model": asked})["model"])
        usual = StudentSettings(flip=flip, seed=seed)
        how = replace(
            usual,
            steps=usual.steps if steps is None else steps,
            views=usual.views if copies is None else copies,
        )
        place = teacher if teacher in ("auto", "none") else named_path(teacher)
        made = student_of_set(
            share,
            network,
            how,
            labels=labels,
            teacher=place,
            device=device,
            report=_said,
        )
        made.save(output)
        learned = f"{len(made.found.labels)} images with {made.labels} labels"
        if made.taught:
            learned += f", and changed copies of each ({how.views}) that a model labelled"
        print(f"learned: {learned}")
        if made.found.epsilon is not None:
            print(f"guarantee: ε = {made.found.epsilon:.4g} at δ = {made.found.delta:g}, the set's")
        if test is not None:
            right = 100 * made.accuracy_on(test)
            print(f"accuracy: {right:.2f} % of {len(test.labels)} real test images")
        print(f"student: {output}")


def _said(done: int, total: int) -> None:
    """Each tenth of the steps, on stderr."""
    if done * TENTHS // total > (done - 1) * TENTHS // total:
        print(f"step {done} of {total}", file=sys.stderr)
