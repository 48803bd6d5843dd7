"""What is exported of a run's synthetic set, and the README for its recipient."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from torch import nn

from fedsynth.data.shared_set import SharedSet
from fedsynth.federation.outputs.saved_model import Architecture
from fedsynth.federation.terms.run_data import PUBLIC
from fedsynth.own_code import is_label
from fedsynth.privacy.formatting import format_epsilon
from fedsynth.privacy.report_pages import protected, secure_aggregation, unprotected, verdict

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
    """A run's synthetic images, and what goes with them.

    Attributes:
        found: the images, with their guarantee.
        made_by: the package's version and the method.
        report: the privacy report; None: the run had no differential privacy.
        accuracy: of the run's model on test images; None: not measured.
        learned: whether that model was trained on these images.
        model: the model and its architecture, to go with them; None: it stays.
        test: what the test images are: "public", "private", or "" where the run does not say.
    """

    found: SharedSet
    made_by: str
    report: dict[str, Any] | None
    accuracy: float | None
    learned: bool
    model: tuple[nn.Module, Architecture] | None
    test: str


def readme(made: Share) -> str:
    """Returns what the recipient reads first."""
    found = made.found
    spec = found.spec
    soft = found.soft_labels is not None
    count = len(found.labels)
    return _TEMPLATES.get_template("share.md.j2").render(
        spec=spec,
        count=count,
        made_by=made.made_by,
        accuracy=None if made.accuracy is None else f"{100 * made.accuracy:.1f}",
        learned=made.learned,
        test="public test images" if made.test == PUBLIC else "test images",
        report=made.report,
        soft=soft,
        clients=found.clients is not None,
        target="soft_labels" if soft else "labels",
        mean=json.dumps(spec.mean),
        std=json.dumps(spec.std),
        pooled=(max(1, spec.height // 4), max(1, spec.width // 4)),
        steps=min(3000, 300 + count // 5),
        model=made.model is not None,
        **_promise(made.report or {}),
        **_code_of(made),
    )


def _promise(report: dict[str, Any]) -> dict[str, Any]:
    """Returns what the README says of the guarantee."""
    promise = report.get("guarantee")
    if not promise:
        return {"guaranteed": False, "verdict": verdict(report) if report else ""}
    return {
        "guaranteed": True,
        "epsilon": format_epsilon(promise["epsilon"]),
        "delta": f"{promise['delta']:g}",
        "protected": protected(report),
        "unprotected": unprotected(report),
        "aggregation": secure_aggregation(report).partition(":")[0],
    }


def _code_of(made: Share) -> dict[str, Any]:
    """Returns what the README says of the model's use, and of code that it needs."""
    own = {} if made.model is None else made.model[1].own
    files = {kind: one.partition("@")[0] for kind, one in own.items() if is_label(one)}
    return {
        "teaches": made.model is not None and made.model[1].teaches,
        "own_code": " and ".join(f"`{name}`" for name in own.values()),
        "own_files": ", ".join(f'{kind}="PATH/{one}"' for kind, one in files.items()),
        "own_features": files.get("features", ""),
    }
