"""Computes a published metric from the curve of a run.

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
    """Returns the curve of a run's rows.

    Args:
        rows: of metrics.jsonl.
        domains: whether clients are domains, so that each client's accuracy is kept.
    """
    flat = [dict(_figures("", row, domains)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    curve: dict[str, list[float | None]] = {"round": [row["round"] for row in rows]}
    for name in names:
        column = [row.get(name) for row in flat]
        curve[name] = [None if value is None else round(value, 6) for value in column]
    return curve


def _figures(prefix: str, row: Mapping[str, Any], domains: bool) -> list[tuple[str, float]]:
    figures: list[tuple[str, float]] = []
    for name in FIGURES:
        if row.get(name) is not None:
            figures.append((f"{prefix}{name}", float(row[name])))
    for name, value in row.get("domain_accuracy", {}).items():
        figures.append((f"{prefix}domain_accuracy.{name}", float(value)))
    if domains:
        accuracies = row.get("client_accuracy", ())
        figures += [(f"{prefix}client.{k}", a) for k, a in enumerate(accuracies) if a is not None]
    if "local" in row:
        figures += _figures(f"{prefix}local.", row["local"], domains)
    for name, model in row.get("models", {}).items():
        figures += _figures(f"{prefix}models.{name}.", model, domains)
    return figures


def measured(
    number: Number,
    row: Mapping[str, Any],
    *,
    variant: str,
    dataset: str,
    fedavg: Mapping[str, Any] | None = None,
) -> float | None:
    """Returns a finished run's value of a published number, in its unit, or None.

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
        name = number.metric.removesuffix("_pct")
        value = _last(curve, variant, f"local.{name}")
        return value if value is None or name == "fm" else 100 * value
    if number.domain:
        return _of_domain(curve, number.domain, dataset)
    values = [v for v in _column(curve, variant, "test_accuracy") if v is not None]
    if not values:
        return None
    return 100 * (max(values) if number.metric.startswith("best_") else values[-1])


def _column(curve: Curve, variant: str, name: str) -> Sequence[float | None]:
    """Returns a metric of the variant if there are several models, otherwise of the model."""
    return curve.get(f"models.{variant}.{name}", curve.get(name, ()))


def _last(curve: Curve, variant: str, name: str) -> float | None:
    values = [value for value in _column(curve, variant, name) if value is not None]
    return values[-1] if values else None


def _of_domain(curve: Curve, domain: str, dataset: str) -> float | None:
    """Returns the accuracy on a domain: on its client's own test split if there is one (clients
    with personalised models have only these), otherwise on the domain's part of the test set."""
    domains = dataset_spec(dataset).domains
    personal = {name: _last(curve, "", f"local.client.{k}") for k, name in enumerate(domains)}
    common = {name: _last(curve, "", f"domain_accuracy.{name}") for name in domains}
    accuracies = personal if any(value is not None for value in personal.values()) else common
    names = domains if domain == "average" else (domain,)
    values = [accuracies.get(name) for name in names]
    percentages = [100 * value for value in values if value is not None]
    return (
        sum(percentages) / len(percentages) if values and len(percentages) == len(values) else None
    )


def _rounds_to(fedavg: Mapping[str, Any], curve: Curve, variant: str) -> float | None:
    """Returns the number of rounds until AMP reaches FedAvg's last one; if it never does, the
    number of rounds plus one."""
    level = _last(fedavg["curve"], "aca", "local.amp")
    reached = list(_column(curve, variant, "local.amp"))
    if level is None or not reached:
        return None
    for number, value in zip(curve["round"], reached, strict=True):
        if value is not None and value >= level and number is not None:
            return float(number)
    return float(len(reached) + 1)
