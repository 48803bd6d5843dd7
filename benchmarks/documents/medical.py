"""Private classifiers of medical images: docs/results.md."""

from __future__ import annotations

from library.pivot import Axis, Table, figure_of

METHODS = {
    "fedstats": "FedStats",
    "fedsum": "FedSum",
    "feddm": "FedDM, `features`",
    "fedavg": "DP-FedAvg, linear on features",
}
DATASETS = {"pneumonia": "chest X-rays", "brain-mri": "brain MRI"}
BUDGETS = ("1", "3", "8")


def _measures(value: str) -> Axis:
    return [(title, {"method": method, "value": value}) for method, title in METHODS.items()]


_COLUMNS: Axis = [
    (f"{title}, ε = {epsilon}", {"dataset": dataset, "epsilon": epsilon})
    for dataset, title in DATASETS.items()
    for epsilon in BUDGETS
]
_ROWS = {
    "file": "medical",
    "key": "{dataset} {method} eps={epsilon}",
    "seeds": range(5),
    "digits": 1,
}
TABLES = {
    "medical-auroc": Table(_measures("auroc"), _COLUMNS, _ROWS, corner="AUROC"),
    "medical-balanced-accuracy": Table(
        _measures("balanced_accuracy"),
        _COLUMNS,
        {**_ROWS, "show": figure_of, "form": ".1f"},
        corner="balanced accuracy, mean",
    ),
}
