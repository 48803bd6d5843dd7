"""Computes a published metric from the metrics of a run's rounds.

A curve has a list for each metric of a run's rounds, under its dotted path in metrics.jsonl
("models.oca.local.amp"), and the list "round"; None marks a round that was not evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedsynth.data.registry import dataset_spec
from fedsynth.reproduction.presets import Number

Curve = Mapping[str, Sequence[float | None]]
MEBI = 2**20
"""Bytes of a published megabyte: FedAF's 1.46 MB are 381,450 numbers of four bytes."""
FIGURES = ("test_accuracy", "amp", "fm", "wlp")


def curve_of(rows: Sequence[Mapping[str, Any]], domains: bool) -> dict[str, list[float | None]]:
    """Returns the metrics of a run's rounds as curves.

    Args:
        rows: of metrics.jsonl.
        domains: whether clients are domains, so that each client's accuracy is kept.
    """
    flat = [_figures("", row, domains) for row in rows]
    names = dict.fromkeys(name for figures in flat for name in figures)
    curve: dict[str, list[float | None]] = {"round": [row["round"] for row in rows]}
    for name in names:
        curve[name] = [figures.get(name) for figures in flat]
    return curve


def _figures(prefix: str, row: Mapping[str, Any], domains: bool) -> dict[str, float]:
    """Returns the numbers in a row, by their paths, rounded to six decimals."""
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
    number: Number,
    row: Mapping[str, Any],
    *,
    variant: str,
    dataset: str,
    fedavg: Mapping[str, Any] | None = None,
) -> float | None:
    """Returns the value of a finished run for a published number, in the unit of that number.
    Returns None if the run has no such value.

    Args:
        number: the published one.
        row: the run's.
        variant: which of several final models is measured; empty: the run's.
        dataset: its name in this package.
        fedavg: FedAvg's row of the same seed, for the number of rounds to FedAvg's accuracy.
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
    measurements = [value for value in values if value is not None]
    if not measurements:
        return None
    value = max(measurements) if number.metric.startswith("best_") else measurements[-1]
    return value if number.metric == "fm" else 100 * value


def _column(curve: Curve, variant: str, name: str) -> Sequence[float | None]:
    """Returns a metric of the variant if the run has several final models, otherwise the metric of
    its model."""
    return curve.get(f"models.{variant}.{name}", curve.get(name, ()))


def _last(curve: Curve, name: str) -> float | None:
    values = [value for value in curve.get(name, ()) if value is not None]
    return values[-1] if values else None


def _of_domain(curve: Curve, domain: str, dataset: str) -> float | None:
    """Returns the accuracy on a domain. Clients with personalised models are tested on their own
    test split of the domain, all others on the domain's part of the test set."""
    names = dataset_spec(dataset).domains
    accuracies = {name: _last(curve, f"local.client.{k}") for k, name in enumerate(names)}
    if set(accuracies.values()) == {None}:
        accuracies = {name: _last(curve, f"domain_accuracy.{name}") for name in names}
    if domain != "average":
        return accuracies.get(domain)
    values = [value for value in accuracies.values() if value is not None]
    return sum(values) / len(names) if len(values) == len(names) else None


def _rounds_to(fedavg: Mapping[str, Any], curve: Curve, variant: str) -> float | None:
    """Returns the number of rounds until AMP reaches FedAvg's final AMP. If it never does, returns
    the number of rounds plus one."""
    targets = [value for value in _column(fedavg["curve"], "aca", "local.amp") if value is not None]
    amps = _column(curve, variant, "local.amp")
    if not targets or not amps:
        return None
    for number, value in enumerate(amps, start=1):
        if value is not None and value >= targets[-1]:
            return number
    return len(amps) + 1
