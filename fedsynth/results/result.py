"""The result of a run, and the content of its summary.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedsynth.config.settings import RunSettings
from fedsynth.core.messages import Message
from fedsynth.evaluation.generated import GENERATOR
from fedsynth.features.registry import features_source
from fedsynth.federation.run_data import NO_TEST, PRIVATE
from fedsynth.methods import own_source
from fedsynth.models.registry import model_source
from fedsynth.own_code import OwnCode
from fedsynth.results.disclosed import COMMON, LOCAL, MODELS, SOURCES


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Args:
        settings: the run's, with the actual data set name and kind of partition.
        accuracy: of the global model on the test set, in [0, 1]; None without a test set or
            without any round. For a method with personal models (FedBN, SOLO) it is not the
            result: use AMP, in the last row's `local`. On a private test set it is an exact
            function of private data: available here to whoever runs the simulation, but in no
            file outside `simulation_only`.
        metrics: a row for each round.
        model: the final model, on the run's device.
        uploads: the last round's uploads, by client.
        privacy: the privacy report; None without differential privacy.
        folder: the run folder; None if nothing was written.
        summary: the content of summary.json.
        artefacts: matrices [classes, clients] that the server measured, such as FedHydra's
            stratification.
        deviations: the deviations from the plan, such as the reason of an early end.

    >>> from fedsynth import FedAvg, ModelSettings, RunSettings, simulate
    >>> settings = RunSettings(FedAvg(local_steps=1), rounds=2, model=ModelSettings("linear"))
    >>> result = simulate(settings)
    >>> len(result.uploads), result.uploads[0].floats, result.metrics[-1]["upload_floats"]
    (10, 650, 6500)
    >>> result.accuracy == result.metrics[-1]["test_accuracy"], result.privacy, result.folder
    (True, None, None)
    """

    settings: RunSettings
    accuracy: float | None
    metrics: list[dict[str, Any]]
    model: nn.Module
    uploads: dict[int, Message]
    privacy: dict[str, object] | None
    folder: Path | None
    summary: dict[str, Any]
    artefacts: Mapping[str, Tensor] = field(default_factory=dict)
    deviations: tuple[str, ...] = ()


def own_sources(settings: RunSettings) -> dict[str, OwnCode]:
    """Returns the custom code files from which a run's method, model and features were loaded."""
    sources = {"method": own_source(settings.method.name), "model": model_source(settings.model)}
    for name in settings.feature_names:
        sources["features"] = features_source(name) or sources.get("features")
    return {key: code for key, code in sources.items() if code is not None}


def summarise(
    settings: RunSettings,
    metrics: Sequence[Mapping[str, Any]],
    accuracy: float | None,
    *,
    device: str,
    test: str,
    privacy: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Returns the content of summary.json, except the folder; for a private run including what only
    a simulation may show (`fedsynth.results.disclosed`).

    Args:
        metrics: the rounds' rows.
        accuracy: the accuracy of the last model.
        device: torch's name of the device.
        test: the kind of test images: "public", "private" or "none".
        privacy: the privacy section; None without differential privacy.
    """
    method = settings.method
    personal = method.personal
    hidden = privacy is not None and test == PRIVATE
    last: Mapping[str, Any] = metrics[-1] if metrics else {}
    summary: dict[str, Any] = {
        "method": method.name,
        "settings": method.to_dict(),
        "dataset": settings.dataset,
        "rounds": len(metrics),
        "test_accuracy": None if hidden or personal else accuracy,
    }
    if personal and not hidden:
        summary[COMMON] = accuracy
    summary["upload_bytes"] = sum(row["upload_bytes"] for row in metrics)
    summary["upload_floats_per_round"] = last.get("upload_floats", 0)
    summary["device"] = device
    summary["seed"] = settings.seed
    if test == NO_TEST or hidden:
        summary["test_data"] = test
    summary["seconds"] = round(sum(row.get("seconds", 0.0) for row in metrics), 3)
    if "domain_average" in last:
        summary["domain_average"] = last["domain_average"]
    if MODELS in last:
        summary[MODELS] = {
            name: {"test_accuracy": entry["test_accuracy"]}
            for name, entry in last[MODELS].items()
            if "test_accuracy" in entry
        }
    generators = [row[GENERATOR] for row in metrics if GENERATOR in row]
    if generators:
        summary[GENERATOR] = generators[-1]
    if LOCAL in last:
        summary[LOCAL] = {name: last[LOCAL][name] for name in ("amp", "fm", "wlp")}
    if privacy is not None:
        summary["differential_privacy"] = privacy
    if sources := own_sources(settings):
        summary[SOURCES] = {
            key: {"file": entry.file, "name": entry.name, "sha256": entry.sha256}
            for key, entry in sources.items()
        }
    return summary
