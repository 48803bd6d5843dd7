"""What may leave the house of a run: its synthetic images with their report, in a folder of their
own, and nothing else (`fedsynth.data.shared_set` has the list)."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedsynth.core.messages import DAMAGED
from fedsynth.core.method import Method
from fedsynth.data.files import one_line
from fedsynth.data.shared_set import FORMAT, README, TENSORS, write_hashes
from fedsynth.errors import OutputError, Setting, Text, UnknownNameError
from fedsynth.federation.outputs.run_folder import INCOMPLETE, PRIVATE_START
from fedsynth.federation.outputs.verification import verify_run
from fedsynth.federation.terms.given_data import PUBLIC
from fedsynth.methods import method_class
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.report import write_report
from fedsynth.privacy.report_file import read_json, sound_report
from fedsynth.privacy.report_text import up
from fedsynth.version import __version__

UNPROTECTED = "unprotected"
CONFIG = "config.toml"
_LONGEST_NAME = 60


@dataclass(frozen=True)
class _Made:
    """A run's synthetic images.

    Attributes:
        tensors: `images` float32 [N, C, H, W] with 0 for black and 1 for white, `labels`, and what
            else there is of each image.
        facts: the file's metadata.
        report: the privacy report; None: the run had no differential privacy.
        accuracy: of the run's model on test images; None: not measured.
        learned: whether that model was trained on these images.
        test: what these images are: "public", "private", or "" where the run says nothing of it.
    """

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, str]
    report: dict[str, Any] | None
    accuracy: float | None
    learned: bool
    test: str

    @property
    def class_names(self) -> list[str]:
        names: list[str] = json.loads(self.facts["class_names"])
        return names


def export_run(
    run: str | Path,
    out: str | Path,
    *,
    unprotected: bool = False,
    method: type[Method] | None = None,
) -> Path:
    """Writes what may leave the house of a finished run: synthetic images, their report, hashes.

    No settings, ledgers, models, paths or names of the run go with it, and of the private data no
    number that the report does not state.

    Args:
        run: the run's folder.
        out: the folder to be made.
        unprotected: also of a run that guarantees nothing, whose images may show real ones.
        method: the class of a method that fedsynth does not know by name.

    Returns:
        `out`.

    Raises:
        OutputError: the run made no synthetic images, did not finish, or guarantees nothing
            (without `unprotected`); `out` is there, or cannot be written.
        PrivacyError: the run's report does not follow from its ledgers.

    >>> export_run("/no/such/run", "share")
    Traceback (most recent call last):
    fedsynth.errors.OutputError: ...
    """
    folder = Path(run)
    target = Path(out)
    made = _read(folder, unprotected, method)
    require_new(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # whole or not at all: nobody shall hand half of it over
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as place:
            whole = Path(place) / "share"
            whole.mkdir()
            _write(made, whole)
            if target.exists():
                target.rmdir()
            shutil.move(whole, target)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write {target}: {one_line(error)}") from None
    return target


def require_new(target: Path) -> None:
    """Refuses a folder that has something in it.

    Raises:
        OutputError: names it.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OutputError(f"{target} is there already: name a folder that is not, or is empty")


# --------------------------------------------------------------------------------------- reading


def _read(folder: Path, unprotected: bool, method: type[Method] | None) -> _Made:
    if not (folder / "summary.json").is_file():
        if folder.suffix == INCOMPLETE and folder.is_dir():
            raise OutputError(f"the run in {folder} did not finish: there is nothing to hand over")
        raise OutputError(f"{folder} is no folder of a finished run")
    summary = read_json(folder / "summary.json", "run's summary")
    private = (folder / PRIVATE_START).exists()
    report = _sound_report(folder, method) if private else None
    promise = (report or {}).get("guarantee") or {}
    if not promise and not unprotected:
        lacks = "a mechanism that guarantees nothing" if private else "no differential privacy"
        raise OutputError(
            Text(
                f"the run in {folder} had {lacks}: its images may show real ones, and nothing is "
                "promised to anybody (",
                Setting(None, UNPROTECTED, "True"),
                " hands them over all the same)",
            )
        )
    name = one_line(summary.get("method"))
    made_by = method or _known(name)
    if not (folder / TENSORS).is_file():
        needs = "" if made_by is None else made_by.images_from
        why = f"with {name} they need {needs}" if needs else f"{name} sends models"
        raise OutputError(f"the run in {folder} made no synthetic images: {why}")
    tensors, facts = _tensors(folder / TENSORS)
    accuracy = summary.get("test_accuracy")
    return _Made(
        tensors,
        {
            "format": FORMAT,
            "pixels": "float32; 0 is black, 1 is white; values outside are not cut off",
            "data_set": facts["dataset"],
            "class_names": facts["class_names"],
            "mean": facts["mean"],
            "std": facts["std"],
            "made_by": f"fedsynth {__version__}, {one_line(summary.get('method'), 60)}",
            "epsilon": json.dumps(promise.get("epsilon")),
            "delta": json.dumps(promise.get("delta")),
        },
        None if report is None else _without_settings(report),
        accuracy if type(accuracy) is float else None,
        made_by is not None and made_by.learns_from_images,
        str(read_json(folder / PRIVATE_START, "start of a run")["test_images"]) if private else "",
    )


def _known(name: str) -> type[Method] | None:
    """The method's class; None: fedsynth does not know it."""
    try:
        return method_class(name)
    except UnknownNameError:
        return None


def _without_settings(report: dict[str, Any]) -> dict[str, Any]:
    """The report without the hash of config.toml, which does not go with it: who knows the other
    settings could guess names of folders in it, and see by the hash that the guess is right."""
    if "files" not in report:
        return report
    kept = {name: digest for name, digest in report["files"].items() if name != CONFIG}
    return {**report, "files": kept}


def _sound_report(folder: Path, method: type[Method] | None) -> dict[str, Any]:
    """The run's report, which must follow from its ledgers: nobody shall hand over another."""
    problems = verify_run(folder, method=method).problems
    if problems:
        raise PrivacyError(
            f"the privacy report of {folder} does not follow from its settings and ledgers "
            f"({one_line(problems[0])}): fedsynth privacy verify {folder} says more"
        )
    return sound_report(folder)


def _tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The images in pixel units with what belongs to each, and the file's facts."""
    try:
        with safe_open(file, framework="pt") as opened:
            facts = opened.metadata() or {}
            found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        images = _in_pixel_units(found.pop("images"), facts)
        missing = [name for name in ("dataset", "class_names", "mean", "std") if name not in facts]
        if missing:
            raise ValueError(f"it does not say {missing[0]}: an earlier version made it")
        kept = {"images": images, "labels": found["labels"]}
        if len(found["client"].unique()) > 1:
            kept["client"] = found["client"]
        if "soft_labels" in found:
            kept["soft_labels"] = found["soft_labels"]
        return kept, facts
    except (OSError, *DAMAGED) as error:
        raise OutputError(f"{file} cannot be used: {one_line(error)}") from None


def _in_pixel_units(images: Tensor, facts: Mapping[str, str]) -> Tensor:
    if images.dtype == torch.uint8:
        return images.float() / 255
    mean, std = (torch.tensor(json.loads(facts[key])).view(1, -1, 1, 1) for key in ("mean", "std"))
    return (images.float() * std + mean).contiguous()


# --------------------------------------------------------------------------------------- writing


def _write(made: _Made, out: Path) -> None:
    save_file(dict(made.tensors), out / TENSORS, metadata=dict(made.facts))
    _draw(made, out / "images")
    if made.report is not None:
        write_report(made.report, out)
    (out / README).write_text(readme(made), "utf-8")
    write_hashes(out)


def folder_names(class_names: list[str]) -> list[str]:
    """A folder's name for each class, in the classes' order.

    >>> folder_names(["T-shirt/top", "Trouser"])
    ['00-T-shirt_top', '01-Trouser']
    """
    digits = max(2, len(str(len(class_names) - 1)))
    plain = [re.sub(r"[^\w.+-]", "_", name)[:_LONGEST_NAME] for name in class_names]
    return [f"{number:0{digits}d}-{name}" for number, name in enumerate(plain)]


def _draw(made: _Made, folder: Path) -> None:
    """Each image as a PNG in its class's folder; of more channels than colours there are none."""
    images = made.tensors["images"]
    if images.shape[1] not in (1, 3):
        return
    pixels = (images * 255).round().clamp(0, 255).to(torch.uint8).numpy()
    for label, name in enumerate(folder_names(made.class_names)):
        rows = np.flatnonzero(made.tensors["labels"].numpy() == label)
        if len(rows):
            (folder / name).mkdir(parents=True)
        for row in rows:
            shown = pixels[row, 0] if pixels.shape[1] == 1 else pixels[row].transpose(1, 2, 0)
            # numbered as in the tensors, so that the two can be laid beside each other
            Image.fromarray(shown).save(folder / name / f"{row:05d}.png")


def readme(made: _Made) -> str:
    """What the recipient reads first."""
    tensors = made.tensors
    facts = made.facts
    report = made.report
    images = tensors["images"]
    names = json.loads(facts["class_names"])
    count, channels, height, width = images.shape
    soft = (
        "- `soft_labels`: float32 [N, classes], which sum to 1, to be learned in place of "
        "`labels`\n"
        if "soft_labels" in tensors
        else ""
    )
    client = (
        "- `client`: int64 [N], the number of the data owner who made the image\n"
        if "client" in tensors
        else ""
    )
    target = "soft_labels" if soft else "labels"
    measured = _measured(made)
    listed = "\n".join(f"| {number} | {name} |" for number, name in enumerate(names))
    return f"""\
# Synthetic images of {facts["data_set"]}

{count} synthetic images, {channels}×{height}×{width}, of {len(names)} classes, made by {facts["made_by"]}. They were
learned so that models trained on them work on real ones, and need not look like anything.
{measured}
{_promise(report)}
## Files

- `synthetic.safetensors`: what to train on
- `images/NN-CLASS/*.png`: the same images to look at, cut off at black and white; the number is the
  row in `synthetic.safetensors`
{_report_files(report)}- `SHA256SUMS`: hashes of all these files (`sha256sum -c SHA256SUMS`)

`synthetic.safetensors` has

- `images`: float32 [N, {channels}, {height}, {width}] in pixel units: 0 is black, 1 is white. Values outside are
  meant: do not cut them off.
- `labels`: int64 [N], by the table below
{soft}{client}
Models take (images − mean) / std with mean {facts["mean"]} and std {facts["std"]} (in pixel units, by
channel); treat real images alike.

| label | class |
| --- | --- |
{listed}

## To train on them

```python
{training_code(images.shape, len(names), facts, soft=bool(soft))}```

With fedsynth installed, `found = fedsynth.load_synthetic(".")` checks the hashes and gives the same
tensors, and `fedsynth.train_student(net, found.normalised(), found.{target})` trains any
network on them, with changed copies and mixtures.
"""


def _measured(made: _Made) -> str:
    """How good the run's model was, and on which images: private ones stand outside a guarantee."""
    if made.accuracy is None:
        return ""
    whose = "public test images" if made.test == PUBLIC else "test images"
    found = f"{100 * made.accuracy:.1f} % accuracy on {whose}"
    if made.learned:
        return f"\nA model that was trained on them had {found}.\n"
    return (
        f"\nThe run's classifier, which was not trained on them, had {found}, and gave them their\n"
        "soft labels. What a model is worth that is trained on them alone was not measured.\n"
    )


def _promise(report: Mapping[str, Any] | None) -> str:
    """What is guaranteed, in a paragraph."""
    if report is None:
        return textwrap.dedent("""\
            **There is no differential privacy.** These images were learned from real ones, or are
            real ones, and nothing is guaranteed to the people in the data.
            """)
    promise = report.get("guarantee")
    if not promise:
        return (
            f"**Nothing is guaranteed**: {report['verdict']['text']}. `privacy_report.html` says "
            "why.\n"
        )
    unit = report["unit"]["one"]
    several = report["unit"]["does_not_protect"]
    return (
        f"**Differential privacy: ε = {up(promise['epsilon'])} at δ = {promise['delta']:g}**, for "
        f"{unit}. Whatever is\ncomputed from these files has that guarantee, too. "
        "`privacy_report.html` says what it rests on and\nwhat it does not cover.\n"
        f"It is not for {several}.\n"
    )


def _report_files(report: Mapping[str, Any] | None) -> str:
    if report is None:
        return ""
    return "- `privacy_report.html`, `.md`, `.json`: what is guaranteed to whom, and what is not\n"


def training_code(
    shape: Sequence[int], classes: int, facts: Mapping[str, str], *, soft: bool
) -> str:
    """Ten lines of PyTorch that train a small network on the set, from within its folder.

    Args:
        shape: [N, C, H, W] of the images.
        classes: how many.
        facts: the set's.
        soft: whether it has soft labels.
    """
    count, channels, height, width = shape
    target = "soft_labels" if soft else "labels"
    steps = min(3000, 300 + count // 5)
    size = 32 * max(1, height // 4) * max(1, width // 4)
    pool = f"nn.AdaptiveAvgPool2d(({max(1, height // 4)}, {max(1, width // 4)}))"
    return f"""\
import torch
from safetensors.torch import load_file
from torch import nn

data = load_file("synthetic.safetensors")
mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in ({facts["mean"]}, {facts["std"]}))
x, y = (data["images"] - mean) / std, data["{target}"]
net = nn.Sequential(nn.Conv2d({channels}, 32, 3, padding=1), nn.ReLU(), {pool},
                    nn.Flatten(), nn.Linear({size}, {classes}))
optimiser = torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=1e-3)
for step in range({steps}):
    rows = torch.randint(len(x), (64,))
    loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
    optimiser.zero_grad(), loss.backward(), optimiser.step()
print(f"loss {{loss.item():.3f}}, accuracy {{(net(x).argmax(1) == data['labels']).float().mean():.3f}}")
"""
