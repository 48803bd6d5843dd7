"""Exports a run's synthetic images into a separate folder for sharing.

The folder contains the images, their privacy report and a README. It contains nothing else from the
run folder. `fedsynth.data.shared_set` lists the files.
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

import numpy as np
import torch
from PIL import Image
from torch import nn

from fedsynth.core.capabilities import ImagesAtEnd
from fedsynth.core.method import Method
from fedsynth.data import shared_set
from fedsynth.data.shared_set import TENSORS, SharedSet
from fedsynth.errors import OutputError, PrivacyError, UnknownNameError, one_line, writing
from fedsynth.evaluation.evidence import Evidence
from fedsynth.federation.run_data import PUBLIC
from fedsynth.files import file_hash, plain_files
from fedsynth.formatting import format_epsilon
from fedsynth.methods import method_class
from fedsynth.own_code import is_label
from fedsynth.privacy.disclosure import SIMULATION_ONLY
from fedsynth.privacy.report.build import write_report
from fedsynth.privacy.report.file import sound_report
from fedsynth.privacy.report.pages import report_sentences
from fedsynth.privacy.report.plots import templates
from fedsynth.results.file_names import MODEL
from fedsynth.results.finished import read_summary
from fedsynth.results.run_folder import PRIVATE_START, private_start
from fedsynth.results.saved_model import Architecture, model_in, write_model
from fedsynth.results.verification import verify_run
from fedsynth.sharing.fidelity import RealImages
from fedsynth.sharing.hub_files import PICTURES, VALUES, write_croissant, write_values
from fedsynth.version import __version__

UNPROTECTED = "unprotected"
_MAX_NAME = 60
EVIDENCE = "evidence"
_NOTE = (
    "exact, in evidence.json, and outside the guarantee. The exporter stated that these images are "
    "public or simulated"
)
_TEMPLATES = templates(Path(__file__).parent / "templates", autoescape=False)  # for Markdown
_TEMPLATES.filters["epsilon"] = format_epsilon
_TEMPLATES.filters["quantile"] = lambda values, share: float(np.quantile(values, share))
_TEMPLATES.filters["escaped"] = lambda text: re.sub(r"([\\`*_\[\]<>|])", r"\\\1", text)


@dataclass(frozen=True)
class Share:
    """The content of an exported folder: synthetic images, privacy report and metadata.

    Attributes:
        synthetic: the images, with their privacy guarantee.
        made_by: the version of fedsynth and the name of the method.
        report: the privacy report, or None without differential privacy.
        accuracy: the accuracy of the run's model on test images, or None if it was not measured.
        trained_on_images: whether the run's model was trained on these synthetic images.
        model: the model and its architecture, or None if the model is not exported.
        public_test: whether the test images are public. False if the run does not state this.
        evidence: the evidence pack, or None if it was not requested.
    """

    synthetic: SharedSet
    made_by: str
    report: dict[str, Any] | None
    accuracy: float | None
    trained_on_images: bool
    model: tuple[nn.Module, Architecture] | None
    public_test: bool
    evidence: Evidence | None = None


def export_run(
    run: str | Path,
    out: str | Path,
    *,
    unprotected: bool = False,
    with_model: bool = False,
    method: type[Method] | None = None,
    real: RealImages | None = None,
) -> Path:
    """Exports the releasable results of a finished run to a new folder.

    The folder contains the synthetic images, their privacy report and hashes of the files. It
    contains no ledgers, no paths or names from the run, and no number about the private data that
    the report does not state. Settings are included only with the model: its own and its method's.

    Args:
        run: the run folder.
        out: the folder to create.
        unprotected: if True, also exports a run without a privacy guarantee. Its images may reveal
            real images.
        with_model: if True, also exports the model and its architecture, so that `load_model(out)`
            can read it. Like the images, the model is computed from the clients' releases, and so
            has the same guarantee. A FedStats model can label augmented copies of the images for
            training.
        method: the class of the run's method, if fedsynth does not know the method by name.
        real: the real images with which the set is compared. The folder then has an evidence pack.

    Returns:
        `out`.

    Raises:
        OutputError: the run made no synthetic images or did not finish, the run has no privacy
            guarantee and `unprotected` is False, or `out` exists or cannot be written.
        PrivacyError: the run's privacy report does not follow from its ledgers.

    >>> export_run("/no/such/run", "share")
    Traceback (most recent call last):
    fedsynth.errors.OutputError: ...
    """
    folder = Path(run)
    target = Path(out)
    require_new(target)
    share = _read(folder, unprotected, with_model, method)
    if real is not None:
        share = replace(share, evidence=real.evidence(share.synthetic))
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        # all or nothing: an incomplete folder must never be released
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as place:
            staging = Path(place) / "share"
            staging.mkdir()
            _write(share, staging)
            if target.exists():
                target.rmdir()
            shutil.move(staging, target)
    return target


def require_new(target: Path) -> None:
    """Checks that a folder does not exist or is empty.

    Raises:
        OutputError: the folder contains files, or the path is a file.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OutputError(f"{target} already exists and is not empty. Choose a new or empty folder")


# --------------------------------------------------------------------------------------- reading


def _read(folder: Path, unprotected: bool, with_model: bool, method: type[Method] | None) -> Share:
    report = verified_report(folder, unprotected=unprotected, method=method)
    summary = read_summary(folder)
    guarantee = (report or {}).get("guarantee") or {}
    name = one_line(summary.get("method"), 60)
    kind = method
    if kind is None:
        with suppress(UnknownNameError):
            kind = method_class(name)
    made_at_end = kind is not None and issubclass(kind, ImagesAtEnd)
    if not (folder / TENSORS).is_file():
        advice = f"{name} makes none. Export its"
        if made_at_end:
            advice = "none were requested. Run again with method.ipc=400, or export its"
        raise OutputError(
            f"the run in {folder} contains no images, because {advice} model (--onnx)"
        )
    synthetic = shared_set.read_set(folder / TENSORS)
    if synthetic.clients is not None and len(synthetic.clients.unique()) == 1:
        synthetic = replace(synthetic, clients=None)
    return Share(
        replace(synthetic, epsilon=guarantee.get("epsilon"), delta=guarantee.get("delta")),
        f"fedsynth {__version__}, {name}",
        report,
        summary.get("test_accuracy"),
        kind is not None and not made_at_end,
        model_in(folder, method) if with_model else None,
        report is not None and private_start(folder).test_images == PUBLIC,
    )


def verified_report(
    folder: Path, *, unprotected: bool, method: type[Method] | None
) -> dict[str, Any] | None:
    """Verifies a finished run's privacy report and returns it.

    The report must follow from the run's settings and ledgers. Without differential privacy, the
    result is None.

    Raises:
        OutputError: the run has not finished, or has no guarantee and `unprotected` is False.
        PrivacyError: the report does not follow from the run's settings and ledgers.
    """
    if not (folder / "summary.json").is_file():
        raise OutputError(f"{folder} contains no summary.json. Name a finished run's folder")
    report = None
    if (folder / PRIVATE_START).exists():
        problems = verify_run(folder, method=method).problems
        if problems:
            raise PrivacyError(
                f"the privacy report of {folder} does not match its settings and ledgers: "
                f"{one_line(str(problems[0]))}. To see all, run fedsynth privacy verify {folder}"
            ).with_code("export.report")
        report = sound_report(folder)
    if not unprotected and not (report or {}).get("guarantee"):
        raise OutputError(
            f"the run in {folder} has no privacy guarantee, so an export may reveal real images. "
            f"To export it nevertheless, set --{UNPROTECTED} or {UNPROTECTED}=True"
        ).with_code("export.no_guarantee")
    return report


# --------------------------------------------------------------------------------------- writing


def _write(share: Share, out: Path) -> None:
    synthetic = share.synthetic
    facts = {
        "made_by": share.made_by,
        "epsilon": json.dumps(synthetic.epsilon),
        "delta": json.dumps(synthetic.delta),
    }
    shared_set.write_set(
        out / TENSORS,
        synthetic.images,
        synthetic.labels,
        synthetic.spec,
        pixels=shared_set.UNITS,
        clients=synthetic.clients,
        soft_labels=synthetic.soft_labels,
        facts=facts,
    )
    if synthetic.spec.can_be_drawn:
        _draw(synthetic, out / "images")
    else:
        write_values(synthetic, out)
    guarantee = "without a privacy guarantee"
    if synthetic.epsilon is not None:
        guarantee = f"with ε = {format_epsilon(synthetic.epsilon)} at δ = {synthetic.delta:g}"
    title = f"{len(synthetic.labels)} synthetic {synthetic.spec.examples}"
    write_croissant(synthetic, out, f"{title}, made by {share.made_by}, {guarantee}")
    if share.model is not None:
        write_model(out / MODEL, *share.model)
    (out / shared_set.README).write_text(readme(share, file_hash(out / TENSORS)), "utf-8")
    report = share.report
    if share.evidence is not None:
        pack = json.dumps(share.evidence.to_json(), indent=1, ensure_ascii=False)
        (out / f"{EVIDENCE}.json").write_text(f"{pack}\n", "utf-8")
        page = _TEMPLATES.get_template("evidence.md.j2").render(e=share.evidence)
        (out / f"{EVIDENCE}.md").write_text(page, "utf-8")
        access = {
            "access": "training and held-out images",
            "status": SIMULATION_ONLY,
            "note": _NOTE,
        }
        report = report and {**report, "scope": [*report["scope"], access]}
    if report is not None:
        files = {name: file_hash(out / name) for name in plain_files(out, leave_out=["images"])}
        write_report({**report, "files": files, "exported": True}, out)
    shared_set.write_hashes(out)


def readme(share: Share, tensor_hash: str) -> str:
    """Returns an exported folder's README for its recipients.

    Args:
        share: the exported set.
        tensor_hash: the hash of its file `synthetic.safetensors`.
    """
    spec, report = share.synthetic.spec, share.report
    count = len(share.synthetic.labels)
    architecture = share.model and share.model[1]
    code = architecture.custom_parts if architecture else {}
    return _TEMPLATES.get_template("share.md.j2").render(
        share=share,
        synthetic=share.synthetic,
        spec=spec,
        count=count,
        guarantee=report and report["guarantee"],
        sentences=report and report_sentences(report),
        test="public test images" if share.public_test else "test images",
        target="labels" if share.synthetic.soft_labels is None else "soft_labels",
        mean=json.dumps(spec.mean),
        std=json.dumps(spec.std),
        pooled=(max(1, spec.height // 4), max(1, spec.width // 4)),
        steps=min(3000, 300 + count // 5),
        teaches=architecture and architecture.teaches,
        code=code,
        # the cache of `datasets` knows a folder by its name and this part of the README
        config=tensor_hash[:12],
        beyond=bool(((share.synthetic.images < 0) | (share.synthetic.images > 1)).any()),
        loaded=PICTURES if spec.can_be_drawn else VALUES,
        files={part: name.partition("@")[0] for part, name in code.items() if is_label(name)},
    )


def folder_names(class_names: Sequence[str]) -> list[str]:
    """Returns each class's image-folder name, in class order.

    >>> folder_names(["T-shirt/top", "Trouser"])
    ['00-T-shirt_top', '01-Trouser']
    """
    digits = max(2, len(str(len(class_names) - 1)))
    names = []
    for number, name in enumerate(class_names):
        plain = re.sub(r"[^\w.+-]", "_", name)[:_MAX_NAME]
        names.append(f"{number:0{digits}d}-{plain}")
    return names


def _draw(synthetic: SharedSet, folder: Path) -> None:
    """Writes each synthetic image as a PNG file into the folder of the image's class."""
    images_NCHW = (synthetic.images * 255).round().clamp(0, 255).to(torch.uint8)
    images_NHWC = images_NCHW.permute(0, 2, 3, 1).squeeze(3).numpy()  # grey images: [N, H, W]
    names = folder_names(synthetic.spec.class_names)
    for row, label in enumerate(synthetic.labels.tolist()):
        (folder / names[label]).mkdir(parents=True, exist_ok=True)
        # numbered as in the tensors, so that the two can be compared
        Image.fromarray(images_NHWC[row]).save(folder / names[label] / f"{row:05d}.png")
