"""`fedsynth student`: a network trained on a synthetic set that was handed over, and tested."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsynth.cli import options as given
from fedsynth.cli.generated_options import takes_settings
from fedsynth.cli.own_code_options import own_code_alone, with_own_code
from fedsynth.cli.pace import duration
from fedsynth.cli.paths import named_path, path_argument, path_option
from fedsynth.cli.settings_options import Sections

if TYPE_CHECKING:
    from fedsynth.federation.student import Student

TENTHS = 10
MEASURED_STEPS = 10


@takes_settings(
    "model.name", "model.width", "model.depth", "model.norm", "data.test_folder",
    "data.skip_corrupt", "data.skip_other", "data.data_root", "run.seed", "run.device",
    others=False,
)  # fmt: skip
def student(
    chosen: Sections,
    share: Annotated[
        Path,
        path_argument("A folder that `fedsynth export` made.", metavar="SET"),
    ],
    labels: Annotated[
        str, typer.Option(help="soft (as kept with the images), hard (their classes), or auto.")
    ] = "auto",
    teacher: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="A run's folder, or a set or file with a model, that labels changed copies of the "
            "images; auto: the set's own model, if it has one that was not trained on them; none.",
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
    dataset: Annotated[
        str | None, typer.Option(help="A data set whose test images to test on.")
    ] = None,
    download: given.Download = False,
    output: Annotated[Path, path_option("Where the network goes.")] = Path("student.safetensors"),
) -> None:
    """Train a network on a synthetic set and on nothing else.

    `fedsynth.load_model` reads the file. What is guaranteed of the set holds of the network, if the
    teacher is nobody or of the same run.

    Example: `fedsynth student share --width 32 --steps 5000 --copies 4 --dataset fashion-mnist`.
    """
    from fedsynth.cli.memory import keep_large_allocations
    from fedsynth.data.folder_checks import Skip
    from fedsynth.data.shared_set import load_synthetic
    from fedsynth.federation.student import (
        network_for,
        real_images,
        require_place,
        student_of_set,
    )
    from fedsynth.synthesizer.condensation.student import StudentSettings

    keep_large_allocations()
    spec = load_synthetic(share).spec
    require_place(output)
    data, run = chosen["data"], chosen["run"]
    root = data.get("data_root")
    test = real_images(
        spec,
        folder=data.get("test_folder"),
        skip=Skip(data.get("skip_corrupt", False), data.get("skip_other", False)),
        dataset=dataset,
        data_root=None if root is None else Path(root),
        download=download,
        note=_to_stderr,
    )
    own_code_alone(None, None, features)
    network = network_for(spec, **with_own_code({"model": chosen["model"]})["model"])
    given_numbers = {"steps": steps, "views": copies, "seed": run.get("seed")}
    numbers: dict[str, Any] = {
        name: value for name, value in given_numbers.items() if value is not None
    }
    how = StudentSettings(flip=flip, **numbers)
    place = teacher if teacher in ("auto", "none") else named_path(teacher)
    made = student_of_set(
        share,
        network,
        how,
        labels=labels,
        teacher=place,
        device=run.get("device", "auto"),
        report=_Progress(),
    )
    made.save(output)
    copies_of = f", and {how.views} changed copies of each" if how.views else ""
    whose = " that a model labelled" if made.taught and how.views else ""
    print(f"learned: {len(made.found.labels)} images, {made.labels} labels{copies_of}{whose}")
    print(f"guarantee: {_guarantee(made)}")
    if test is not None:
        right = 100 * made.accuracy_on(test)
        print(f"accuracy: {right:.2f} % of {len(test.labels)} real test images")
        if "test_folder" in data:
            _to_stderr("note: of private images that figure is outside any guarantee")
    print(f"student: {output}")


def _guarantee(made: Student) -> str:
    from fedsynth.privacy.formatting import format_epsilon

    if made.found.epsilon is None:
        return "none: the set has none"
    epsilon = f"ε = {format_epsilon(made.found.epsilon)} at δ = {made.found.delta:g}"
    own = made.architecture.own.get("model")
    if made.guaranteed and own is None:
        return f"{epsilon}, the set's"
    if made.guaranteed:
        return f"{epsilon}, the set's, if nothing in {own} comes from private data"
    return f"none that is known: the set has {epsilon}, and more than the set went in"


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


class _Progress:
    """Reports on stderr: how long the training takes, by its first steps, then each tenth of it."""

    def __init__(self) -> None:
        self._began = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == 1:  # the first one is slower, and is not measured
            self._began = now
        if done == MEASURED_STEPS < total:
            seconds = (now - self._began) / (MEASURED_STEPS - 1) * total
            _to_stderr(f"{total} steps take about {duration(max(1.0, seconds))}")
        if done * TENTHS // total > (done - 1) * TENTHS // total:
            _to_stderr(f"step {done} of {total}")
