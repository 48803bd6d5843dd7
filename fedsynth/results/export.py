"""Exports the synthetic images of a run with their report and a README into a separate folder, and
nothing else (`fedsynth.data.shared_set` has the list).
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image
from safetensors import SafetensorError
from torch import nn

from fedsynth.core.method import Method
from fedsynth.data.files import one_line, read_tensors
from fedsynth.data.shared_set import (
    README,
    TENSORS,
    UNITS,
    SharedSet,
    shared_set,
    write_hashes,
    write_set,
)
from fedsynth.errors import OutputError, UnknownNameError
from fedsynth.federation.run_data import PUBLIC
from fedsynth.methods import method_class
from fedsynth.own_code import is_label
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.files import file_hash, plain_files
from fedsynth.privacy.report.build import write_report
from fedsynth.privacy.report.file import read_json, sound_report
from fedsynth.privacy.report.formatting import format_epsilon
from fedsynth.privacy.report.pages import report_sentences
from fedsynth.results.run_folder import INCOMPLETE, MODEL, PRIVATE_START
from fedsynth.results.saved_model import Architecture, model_of_run, write_model
from fedsynth.results.verification import verify_run
from fedsynth.version import __version__

UNPROTECTED = "unprotected"
_LONGEST_NAME = 60
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,  # the README is Markdown
)
_TEMPLATES.filters["escaped"] = lambda text: re.sub(r"([\\`*_\[\]<>|])", r"\\\1", text)


@dataclass(frozen=True)
class Share:
    """A run's synthetic images, and what is exported with them.

    Attributes:
        found: the images, with their guarantee.
        made_by: the package's version and the method.
        report: the privacy report; None without differential privacy.
        accuracy: the accuracy of the run's model on test images; None: not measured.
        learned: whether that model was trained on these images.
        model: the model and its architecture; None: the model is not exported.
        test: the kind of test images: "public", "private", or "" if the run does not state it.
    """

    found: SharedSet
    made_by: str
    report: dict[str, Any] | None
    accuracy: float | None
    learned: bool
    model: tuple[nn.Module, Architecture] | None
    test: str


def export_run(
    run: str | Path,
    out: str | Path,
    *,
    unprotected: bool = False,
    with_model: bool = False,
    method: type[Method] | None = None,
) -> Path:
    """Writes the part of a finished run that may be released: synthetic images, their report,
    hashes.

    The folder has no settings (except the model's and its method's, with the model), ledgers, paths
    or names of the run, and no number about the private data that the report does not state.

    Args:
        run: the run's folder.
        out: the folder to create.
        unprotected: also export a run without a guarantee, whose images may show real ones.
        with_model: also export the model, with its architecture's settings (`load_model(out)`). It
            is computed from the clients' releases, like the images, and has the same guarantee.
            FedStats' model can label augmented copies of the images for training on them.
        method: the class of a method that fedsynth does not know by name.

    Returns:
        `out`.

    Raises:
        OutputError: the run made no synthetic images, did not finish, or guarantees nothing
            (without `unprotected`); `out` exists, or cannot be written.
        PrivacyError: the run's report does not follow from its ledgers.

    >>> export_run("/no/such/run", "share")
    Traceback (most recent call last):
    fedsynth.errors.OutputError: ...
    """
    folder = Path(run)
    target = Path(out)
    share = _read(folder, unprotected, with_model, method)
    require_new(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # all or nothing: an incomplete folder must never be released
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as place:
            staging = Path(place) / "share"
            staging.mkdir()
            _write(share, staging)
            if target.exists():
                target.rmdir()
            shutil.move(staging, target)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write {target}: {one_line(error)}") from None
    return target


def require_new(target: Path) -> None:
    """Raises an error if a folder is not empty.

    Raises:
        OutputError: names the folder.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OutputError(f"{target} already exists: name a new or empty folder")


# --------------------------------------------------------------------------------------- reading


def _read(folder: Path, unprotected: bool, with_model: bool, method: type[Method] | None) -> Share:
    if not (folder / "summary.json").is_file():
        if folder.suffix == INCOMPLETE and folder.is_dir():
            raise OutputError(f"the run in {folder} did not finish: there is nothing to export")
        raise OutputError(f"{folder} is not the folder of a finished run")
    summary = read_json(folder / "summary.json", "run's summary")
    private = (folder / PRIVATE_START).exists()
    report = _sound_report(folder, method) if private else None
    promise = (report or {}).get("guarantee") or {}
    if not promise and not unprotected:
        lacks = "a mechanism without any guarantee" if private else "no differential privacy"
        raise OutputError(
            f"the run in {folder} had {lacks}: its images may reveal real ones and have no "
            f"guarantee (to export them nevertheless: --{UNPROTECTED}, {UNPROTECTED}=True)"
        )
    name = one_line(summary.get("method"), 60)
    chosen_method = method
    with suppress(UnknownNameError):
        method = method or method_class(name)
    if not (folder / TENSORS).is_file():
        needs = "" if method is None else method.images_from
        why = f"{name} needs {needs} for them" if needs else f"{name} sends models"
        raise OutputError(f"the run in {folder} has no synthetic images: {why}")
    try:
        synthetic = shared_set(*read_tensors(folder / TENSORS))
    except (OSError, ValueError) as error:
        raise OutputError(f"{folder / TENSORS} cannot be used: {one_line(error)}") from None
    if synthetic.clients is not None and len(synthetic.clients.unique()) == 1:
        synthetic = replace(synthetic, clients=None)
    accuracy = summary.get("test_accuracy")
    start = read_json(folder / PRIVATE_START, "start of a run") if private else {}
    return Share(
        replace(synthetic, epsilon=promise.get("epsilon"), delta=promise.get("delta")),
        f"fedsynth {__version__}, {name}",
        report,
        accuracy if type(accuracy) is float else None,
        method is not None and method.learns_from_images,
        model_of_run(folder, synthetic.spec, chosen_method) if with_model else None,
        str(start.get("test_images", "")),
    )


def _sound_report(folder: Path, method: type[Method] | None) -> dict[str, Any]:
    """Returns the run's report; it must follow from its ledgers."""
    problems = verify_run(folder, method=method).problems
    if problems:
        raise PrivacyError(
            f"the privacy report of {folder} does not follow from its settings and ledgers "
            f"({one_line(problems[0])}): fedsynth privacy verify {folder} prints the details"
        )
    return sound_report(folder)


# --------------------------------------------------------------------------------------- writing


def _write(share: Share, out: Path) -> None:
    synthetic = share.found
    facts = {
        "made_by": share.made_by,
        "epsilon": json.dumps(synthetic.epsilon),
        "delta": json.dumps(synthetic.delta),
    }
    write_set(
        out / TENSORS,
        synthetic.images,
        synthetic.labels,
        synthetic.spec,
        pixels=UNITS,
        clients=synthetic.clients,
        soft_labels=synthetic.soft_labels,
        facts=facts,
    )
    _draw(synthetic, out / "images")
    if share.model is not None:
        network, architecture = share.model
        write_model(out / MODEL, network, architecture)
    (out / README).write_text(readme(share), "utf-8")
    if share.report is not None:
        names = plain_files(out, leave_out=["images"])
        files = {name: file_hash(out / name) for name in names}
        write_report({**share.report, "files": files, "exported": True}, out)
    write_hashes(out)


def readme(share: Share) -> str:
    """Returns the README, which the recipient reads first."""
    synthetic, spec = share.found, share.found.spec
    count = len(synthetic.labels)
    report = share.report or {}
    promise = report.get("guarantee") or {}
    text = report_sentences(report) if report else None
    sources = {} if share.model is None else share.model[1].own
    files = {kind: label.partition("@")[0] for kind, label in sources.items() if is_label(label)}
    return _TEMPLATES.get_template("share.md.j2").render(
        made=share,
        spec=spec,
        count=count,
        accuracy=None if share.accuracy is None else f"{100 * share.accuracy:.1f}",
        test="public test images" if share.test == PUBLIC else "test images",
        target="labels" if synthetic.soft_labels is None else "soft_labels",
        mean=json.dumps(spec.mean),
        std=json.dumps(spec.std),
        pooled=(max(1, spec.height // 4), max(1, spec.width // 4)),
        steps=min(3000, 300 + count // 5),
        verdict=text.verdict() if text and not promise else "",
        epsilon=format_epsilon(promise["epsilon"]) if promise else "",
        delta=f"{promise['delta']:g}" if promise else "",
        protected=text.protected() if text and promise else "",
        unprotected=text.unprotected() if text and promise else "",
        aggregation=text.secure_aggregation().partition(":")[0] if text and promise else "",
        teaches=share.model is not None and share.model[1].teaches,
        own_code=" and ".join(f"`{name}`" for name in sources.values()),
        own_files=", ".join(f'{kind}="PATH/{label}"' for kind, label in files.items()),
        own_features=files.get("features", ""),
    )


def folder_names(class_names: Sequence[str]) -> list[str]:
    """Returns a folder's name for each class, in the classes' order.

    >>> folder_names(["T-shirt/top", "Trouser"])
    ['00-T-shirt_top', '01-Trouser']
    """
    digits = max(2, len(str(len(class_names) - 1)))
    plain = [re.sub(r"[^\w.+-]", "_", name)[:_LONGEST_NAME] for name in class_names]
    return [f"{number:0{digits}d}-{name}" for number, name in enumerate(plain)]


def _draw(synthetic: SharedSet, folder: Path) -> None:
    """Writes each image as a PNG into its class's folder, if the images have 1 or 3 channels."""
    if synthetic.spec.channels not in (1, 3):
        return
    pixels = (synthetic.images * 255).round().clamp(0, 255).to(torch.uint8).numpy()
    names = folder_names(synthetic.spec.class_names)
    for row, label in enumerate(synthetic.labels.tolist()):
        (folder / names[label]).mkdir(parents=True, exist_ok=True)
        image = pixels[row, 0] if synthetic.spec.channels == 1 else pixels[row].transpose(1, 2, 0)
        # numbered as in the tensors, so that the two can be compared
        Image.fromarray(image).save(folder / names[label] / f"{row:05d}.png")
