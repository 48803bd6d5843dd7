"""FedHydra's stratification of clients that are trained as in its paper's tables.

The full-size cells with five clients, all images and 200 local epochs; distillation is left out but
for an epoch. A row has the clients' class counts, U, Ū_r and Ū_c, and how often the prediction P
(Eq. 8) has the true class as its largest entry on test images, if that class is asked for. Clients
trained by `fedsynth reproduce` of the same code are read from --cache (OUTPUT/runs/trained-COMMIT).
"""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import torch

from fedsynth.config.settings import RunSettings
from fedsynth.core.messages import ModelParameters
from fedsynth.data.partition import count_matrix, partition
from fedsynth.evaluation.accuracy import predict
from fedsynth.experiments.presets import preset
from fedsynth.models.registry import build_model
from fedsynth.simulation.simulate import simulate
from fedsynth.synthesizer.distillation.stratification import stratified_aggregation
from library.grid import Cell, Grid, Row
from library.runs import dataset

TABLES = {"2 classes per client": "fedhydra:table2", "dirichlet(0.1)": "fedhydra:table1"}


def settings(cell: Cell) -> RunSettings:
    """Returns a table's settings for FedHydra, with one epoch of distillation."""
    table = preset(TABLES[cell.partition])
    (published,) = table.select(
        dataset=cell.dataset, partition=cell.partition, method="fedhydra", clients="5"
    )
    changes: dict[str, dict[str, Any]] = {
        "run": {"device": cell.device},
        "method": {"server_epochs": 1},
    }
    if cell.quick:
        changes["method"] |= {"local_epochs": 1, "generator_width": 4, "stratification_steps": 2}
        changes["partition"] = {"subset": 0.01}
    return table.settings(published, cell.seed, changes)


def _rounded(matrix: torch.Tensor) -> list[list[float]]:
    return [[float(f"{value:.4g}") for value in row] for row in matrix.tolist()]


def work(cell: Cell) -> Row:
    """Measures the clients' models, or reads models that another run has trained."""
    train, test = dataset(cell.settings.dataset)
    with TemporaryDirectory() as folder:
        run = simulate(
            cell.settings, data=(train, test), output=folder, trained=cell.cache, quiet=True
        )
    models = [sent for sent in run.uploads.values() if isinstance(sent, ModelParameters)]
    logits_MNC = []
    for sent in models:
        model = build_model(cell.settings.model, train.spec, train.spec.classes, seed=0)
        model.load_state_dict(sent.parameters)
        logits_MNC.append(predict(model, test))
    weights = [run.artefacts[name] for name in ("clients_for_class", "classes_of_client")]
    P = stratified_aggregation(torch.stack(logits_MNC), test.labels, *weights)
    labels = train.labels.numpy()
    parts = partition(labels, cell.settings.resolved_partition, train.spec.classes)
    return {
        "right": (P.argmax(dim=1) == test.labels).double().mean().item(),
        "class_counts": count_matrix(labels, parts, train.spec.classes).tolist(),
        **{name: _rounded(matrix) for name, matrix in run.artefacts.items()},
    }


GRID = Grid(
    axes={"dataset": ("mnist", "fashion_mnist"), "partition": list(TABLES), "seed": (0,)},
    key="{dataset} {partition} seed={seed}",
    settings=settings,
    work=work,
)
