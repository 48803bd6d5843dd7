"""FedAF and FedDM on held-out training images, with one change at a time.

Fashion-MNIST, a fifth of the images at Dir(0.02) among ten clients, a ConvNet of width 16 with
batch norm, 10 images per class, 150 steps a round; accuracy on 5,000 held-out training images
after each of three rounds. The server's rate is five times the paper's, because there are as many
times fewer epochs. `varied` makes the changes that no setting makes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from fedsynth import FedAF, FedDM, Method, Real, RunSettings, resolve
from fedsynth.methods import fedaf, feddm
from library.grid import Cell, Grid, Row
from library.runs import one_run, tuning_data

STEPS = 150
RATES = (0.2, 1.0, 5.0)
SERVER = {"server_lr": 0.005, "server_momentum": 0.9, "server_weight_decay": 0.0}
REAL = {**SERVER, "server_epochs": 100, "server_batch": 256, "ipc": 10, "min_examples": 10}
CONDENSED = {**REAL, "iterations": STEPS, "batch": 64, "image_momentum": 0.9}
AF = {
    **{**CONDENSED, "image_lr": 1.0, "local_weight": 1e-3, "global_weight": 2.0, "gamma": 0.9},
    "temperature": 1.0,
}
AF4 = {**AF, "temperature": 4.0}
DM = {**CONDENSED, "image_lr": 1.0, "image_clip": 2.0, "radius": 5.0}
VARIANTS: dict[str, tuple[type[Method], dict[str, Any], dict[str, bool]]] = {
    "real": (Real, {**REAL, "radius": 5.0}, {}),
    **{f"feddm, rate {rate}": (FedDM, {**DM, "image_lr": rate}, {}) for rate in RATES},
    **{f"fedaf, rate {rate}": (FedAF, {**AF, "image_lr": rate}, {}) for rate in RATES},
    "feddm, uint8 pixels": (FedDM, {**DM, "image_dtype": "uint8"}, {}),
    "fedaf, no knowledge matching": (FedAF, {**AF, "global_weight": 0.0}, {}),
    "fedaf, temperature 4": (FedAF, AF4, {}),
    "fedaf, rate 0.2, temperature 4": (FedAF, {**AF4, "image_lr": 0.2}, {}),
    "fedaf, a tenth of knowledge matching": (FedAF, {**AF, "global_weight": 0.2}, {}),
    "feddm, running statistics": (FedDM, DM, {"running": True}),
    "feddm, restarts": (FedDM, {**DM, "restart": True}, {}),
    "fedaf, temperature 4, fresh networks in round 1": (FedAF, AF4, {"fresh": True}),
    "fedaf, temperature 4, knowledge from round 2": (FedAF, AF4, {"late": True}),
    "fedaf, temperature 4, running statistics": (FedAF, AF4, {"running": True}),
    "fedaf, temperature 4, restarts": (FedAF, {**AF4, "restart": True}, {}),
    "fedaf, temperature 4, no collaborative term": (FedAF, {**AF4, "local_weight": 0.0}, {}),
}


def varied(kind: type[Method], fresh: bool = False, late: bool = False) -> type[Method]:
    """Returns a method with changes that no setting makes.

    Args:
        kind: FedAF.
        fresh: the networks of round 1 are new ones, as with γ = 0.
        late: the server matches knowledge from round 2 on.
    """

    class Varied(kind):  # type: ignore[misc, valid-type]
        def client_step(self, message: Any, clients: Any, states: Any, context: Any) -> Any:
            method = replace(self, gamma=0.0) if fresh and context.round == 1 else self
            return super(Varied, method).client_step(message, clients, states, context)

        def server_step(self, state: Any, uploads: Any, context: Any) -> Any:
            method = replace(self, global_weight=0.0) if late and context.round == 1 else self
            return super(Varied, method).server_step(state, uploads, context)

    return Varied


def settings(cell: Cell) -> RunSettings:
    kind, values, changes = VARIANTS[cell.variant]
    run = resolve(
        {
            "run": {"method": kind.name, "rounds": 3, "seed": cell.seed},
            "data": {"dataset": "fashion-mnist"},
            "partition": {"clients": 10, "kind": "dirichlet", "alpha": 0.02, "subset": 0.2},
            "model": {"name": "convnet", "norm": "batch", "width": 16, "depth": 3},
            "method": values,
        }
    )
    outside = {name: value for name, value in changes.items() if name != "running"}
    if outside:
        method = varied(kind, **outside)(**vars(run.method))
        run = replace(run, method=method)
    return run


def work(cell: Cell) -> Row:
    data = tuning_data("fashion-mnist")
    if "running" not in VARIANTS[cell.variant][2]:
        return one_run(cell.settings, data)
    # batch norm in evaluation mode, with w_r's running statistics
    with (
        mock.patch.object(feddm, "with_grouped_statistics", lambda network: network),
        mock.patch.object(fedaf, "with_grouped_statistics", lambda network: network),
        mock.patch("fedsynth.methods.shared.condensing.has_batch_norm", return_value=False),
    ):
        return one_run(cell.settings, data)


GRID = Grid(
    axes={"seed": range(3), "variant": list(VARIANTS)},
    key="{variant} seed={seed}",
    settings=settings,
    work=work,
)
