"""Summarises the rounds of a finished run as curves, and computes published metrics from them.

A curve maps each metric to the list of its values after each round. The name of a metric is its
dotted path in metrics.jsonl, such as "models.oca.local.amp". The list "round" has the numbers of
the rounds. None marks a round in which the metric was not computed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedsynth.data.registry import dataset_spec
from fedsynth.experiments.presets import Number
from fedsynth.experiments.rows import Row

Curve = Mapping[str, Sequence[float | None]]
# The number of bytes in a megabyte of the papers. FedAF's 1.46 MB are 381,450 numbers of four
# bytes.
MEBI = 2**20

FIGURES = ("test_accuracy", "amp", "fm", "wlp")


def round_summary(rows: Sequence[Row], domains: bool) -> dict[str, Any]:
    """Returns the entries of a result row that summarise the rounds of a finished run.

    Args:
        rows: the metrics of each round, as in metrics.jsonl.
        domains: True if each client has the images of one domain. The accuracy of each client is
            then kept.
    """
    last: Row = {"upload_floats": 0, "client_upload_bytes": [0]}
    if rows:
        last = rows[-1]
    return {
        "rounds": len(rows),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "upload_floats": last["upload_floats"],
        "client_upload_bytes": round(statistics.fmean(last["client_upload_bytes"] or [0]), 1),
        "curve": curve_of(rows, domains),
    }


def curve_of(rows: Sequence[Row], domains: bool) -> dict[str, list[float | None]]:
    """Converts the metrics of each round to a curve, which has one list for each metric.

    Args:
        rows: the metrics of each round, as in metrics.jsonl.
        domains: True if each client has the images of one domain. The accuracy of each client is
            then kept.
    """
    flat = [_figures("", row, domains) for row in rows]
    names = dict.fromkeys(name for figures in flat for name in figures)
    curve: dict[str, list[float | None]] = {"round": [row["round"] for row in rows]}
    for name in names:
        curve[name] = [figures.get(name) for figures in flat]
    return curve


def _figures(prefix: str, row: Row, domains: bool) -> dict[str, float]:
    """Returns a mapping from dotted paths to the metrics of one round, rounded to six decimals."""
    figures = {f"{prefix}{name}": row.get(name) for name in FIGURES}
    for name, accuracy in row.get("domain_accuracy", {}).items():
        figures[f"{prefix}domain_accuracy.{name}"] = accuracy
    if domains:
        for client, accuracy in enumerate(row.get("client_accuracy", ())):
            figures[f"{prefix}client.{client}"] = accuracy
    rounded = {name: round(float(n), 6) for name, n in figures.items() if n is not None}
    if "local" in row:
        rounded |= _figures(f"{prefix}local.", row["local"], domains)
    for name, model in row.get("models", {}).items():
        rounded |= _figures(f"{prefix}models.{name}.", model, domains)
    return rounded


def measured(
    number: Number, row: Row, *, variant: str, dataset: str, fedavg: Row | None = None
) -> float | None:
    """Returns the value with which a finished run reproduces a published number.

    The value has the unit of the published number. It is None if the run did not compute it.

    Args:
        number: the published number.
        row: the row of the finished run.
        variant: the final model to which the number refers, if a run has several. Otherwise empty.
        dataset: the name of the data set in this package.
        fedavg: the row of the FedAvg run with the same seed. It is needed for the number of rounds
            until FedAvg's accuracy is reached.
    """
    curve = row["curve"]
    if number.metric == "upload_floats_per_round":
        return float(row["upload_floats"])
    if number.metric == "upload_mb_per_client_per_round":
        return float(row["client_upload_bytes"]) / MEBI
    if number.metric == "rounds_to_fedavg_100_round_amp":
        return None if fedavg is None else _rounds_to(fedavg, curve, variant)
    if number.metric in ("amp_pct", "fm", "wlp_pct"):
        values = _column(curve, variant, f"local.{number.metric.removesuffix('_pct')}")
    elif number.domain:
        values = [_of_domain(curve, number.domain, dataset)]
    else:
        values = _column(curve, variant, "test_accuracy")
    measurements = _recorded(values)
    if not measurements:
        return None
    value = max(measurements) if number.metric.startswith("best_") else measurements[-1]
    return value if number.metric == "fm" else 100 * value


def _column(curve: Curve, variant: str, name: str) -> Sequence[float | None]:
    """Returns the values of a metric after each round.

    They belong to the model `variant` if the run has several final models.
    """
    return curve.get(f"models.{variant}.{name}", curve.get(name, ()))


def _recorded(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _last(curve: Curve, name: str) -> float | None:
    values = _recorded(curve.get(name, ()))
    return values[-1] if values else None


def _of_domain(curve: Curve, domain: str, dataset: str) -> float | None:
    """Returns the last accuracy on a domain, or the mean over all domains for "average".

    If the run evaluated the test splits of the clients, the accuracy is that of the domain's client
    on its test split. Otherwise, it is the accuracy on the domain's part of the test set. Returns
    None if it is missing.
    """
    names = dataset_spec(dataset).domains
    accuracies = {name: _last(curve, f"local.client.{k}") for k, name in enumerate(names)}
    if set(accuracies.values()) == {None}:
        accuracies = {name: _last(curve, f"domain_accuracy.{name}") for name in names}
    if domain != "average":
        return accuracies.get(domain)
    values = _recorded(accuracies.values())
    return sum(values) / len(names) if len(values) == len(names) else None


def _rounds_to(fedavg: Row, curve: Curve, variant: str) -> float | None:
    """Returns the number of rounds until the metric AMP reaches the final AMP of FedAvg.

    Returns the number of rounds plus one if FedAvg's AMP is never reached, and None if an AMP is
    missing.
    """
    targets = _recorded(_column(fedavg["curve"], "aca", "local.amp"))
    amps = _column(curve, variant, "local.amp")
    if not targets or not amps:
        return None
    for number, value in enumerate(amps, start=1):
        if value is not None and value >= targets[-1]:
            return number
    return len(amps) + 1
