"""Defines the result of a run and the content of summary.json."""

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
        settings: the run's settings. They contain the actual name of the data set and the actual
            kind of partition.
        accuracy: the accuracy of the global model on the test set, in [0, 1]. None if there is no
            test set or no round. For a method with personal models (FedBN, SOLO), this accuracy is
            not the result: use AMP, in `local` in the last round's metrics. On a private test set,
            the accuracy is an exact function of private data. It is available here to whoever runs
            the simulation, but is in no file outside `simulation_only`.
        metrics: the metrics of each round.
        model: the final model, on the run's device.
        uploads: the uploads of the last round, by client.
        privacy: the privacy report, or None without differential privacy.
        folder: the run folder, or None if no files were written.
        summary: the content of summary.json.
        artefacts: matrices [classes, clients] that the server measured, such as FedHydra's
            stratification.
        deviations: sentences that describe how the run deviated from its plan, for example why it
            ended early.

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
    """Returns the files with user code from which the run's method, model and feature maps were
    loaded.
    """
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
    """Returns the content of summary.json, except the path of the run folder.

    For a private run, the result includes values that only a simulation may show.
    `fedsynth.results.disclosed` separates them.

    Args:
        metrics: the metrics of each round.
        accuracy: the accuracy of the final model.
        device: torch's name for the device.
        test: the kind of test images: "public", "private" or "none".
        privacy: the privacy section, or None without differential privacy.
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
