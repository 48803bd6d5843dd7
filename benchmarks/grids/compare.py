"""All methods on Fashion-MNIST, 10 clients, Dir(0.1), at one budget, for one CPU core: accuracy,
bytes and seconds.

A tenth of each class, a ConvNet of width 8. The budget is passes over a client's own data: 5 rounds
of 5 for methods that send models, batches of 32, SGD without momentum, as SCAFFOLD and q-FFL have
none. The rate of each is the best on 5,000 held-out training images with seed 0 (rows "rate …"), of
0.003, 0.01, 0.03, 0.1 and 0.3, and further ones as long as the best is at an end. FedBN and SOLO
take FedAvg's, and so do one-shot methods, whose clients train once, 100 passes, until they fit
their data. Methods that condense take 5 rounds of 50 steps, ipc 10; FedDM's and FedAF's image rates
are found in the same way, of 0.1, 0.3, 1, 3 and 10. FedAF has the weights that its paper gives for
Fashion-MNIST (1e-3 and 2.0), and FedDC the α that its code has for MNIST (0.1). FedBE's server
takes 200 steps of 64 images, of which SWA averages the last four cycles, and FedDF's as many. All
else that is not named here is each method's default, but for generators, which are small: the
paper's or the public code's, or in CCVR and FedRobust, of whose papers none is known, the best of a
few on the same held-out images. FedBN and SOLO have no common model: their figure is AMP, the
average over the clients' own models on the clients' own test splits, a fifth of their data, which
is another, easier question at Dir(0.1). Five seeds, and three of methods that condense.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

import torch

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.core.capabilities import ImagesAtEnd, PersonalModels
from fedsynth.core.method import Method
from fedsynth.methods import METHODS as REGISTERED
from fedsynth.methods import method_class
from fedsynth.methods.fedcvae import TrainsAutoencoders
from fedsynth.methods.shared.ensemble import DataFreeEnsembleDistillation, EnsembleDistillation
from fedsynth.methods.shared.local import TrainsLocally
from library.grid import Cell, Grid, Row, Rows, best
from library.runs import Data, dataset

Values = dict[str, Any]
LOCAL: Values = {"local_epochs": 5, "batch": 32, "momentum": 0.0}
IMAGES: Values = {"ipc": 10, "server_epochs": 100}
CONDENSE: Values = {"ipc": 10, "iterations": 50, "batch": 64, "server_epochs": 100}
ONCE: Values = {**LOCAL, "local_epochs": 100}
AUTOENCODERS: Values = {"local_epochs": 25, "server_epochs": 5}  # Adam at its paper's rate
SERVER: Values = {
    "server_epochs": 15,
    "generator_steps": 30,
    "generator_batch": 32,
    "generator_width": 8,
    "generator_lr": 0.01,
    "start": "average",
}
METHOD_SETTINGS: dict[str, Values] = {  # in addition to the family's
    "fedkf": {"generator_width": 8, "generator_batch": 32},
    "fedaf": {"server_lr": 0.01, "local_weight": 1e-3, "global_weight": 2.0},
    "feddc": {"alpha": 0.1},
    "feddf": {"server_steps": 200, "server_batch": 64, "proxy": "mnist"},
    "fedbe": {"server_steps": 200, "server_batch": 64, "swa_start": 100, "proxy": "mnist"},
}
# The names of methods in the table, if they differ.
ROWS = {"fedfa-plus": "fedfa+"}
VARIANTS: dict[str, tuple[str, Values]] = {  # name in the table: method, what differs
    "fedfm, l2": ("fedfm", {"matching": "l2"}),
    "fedfm, from round 3": ("fedfm", {"start_round": 3}),
    "fedgen, α = β = 1": ("fedgen", {"alpha": 1.0, "beta": 1.0}),
    "fedfa-l": ("fedfa-plus", {"parts": "augmentation"}),
    "fedfa-h": ("fedfa-plus", {"parts": "alignment"}),
    "fedavg, one shot": ("fedavg", ONCE),
}


def family(method: type[Method]) -> Values:
    """Returns the settings of methods of this kind."""
    if issubclass(method, DataFreeEnsembleDistillation):
        return {**ONCE, **SERVER}
    if issubclass(method, EnsembleDistillation):
        return ONCE
    if issubclass(method, TrainsAutoencoders):
        return AUTOENCODERS
    if issubclass(method, TrainsLocally):
        return LOCAL
    if issubclass(method, ImagesAtEnd):
        return {}
    names = {f.name for f in fields(method)}
    settings = CONDENSE if "iterations" in names else IMAGES
    return {key: value for key, value in settings.items() if key in names}


def _settings(method: str, changes: Values) -> tuple[str, Values]:
    return method, {**family(method_class(method)), **METHOD_SETTINGS.get(method, {}), **changes}


# Name in the table: method, settings.
METHODS: dict[str, tuple[str, Values]] = {
    **{ROWS.get(name, name): _settings(name, {}) for name in REGISTERED},
    **{name: _settings(method, changes) for name, (method, changes) in VARIANTS.items()},
}
# Methods whose clients end with models of their own.
PERSONAL = tuple(
    name
    for name, (method, _) in METHODS.items()
    if issubclass(method_class(method), PersonalModels)
)
SINGLE_ROUND = tuple(
    name
    for name, (method, values) in METHODS.items()
    if issubclass(method_class(method), EnsembleDistillation) or values in (ONCE, AUTOENCODERS)
)
FIVE_SEEDS = (
    *SINGLE_ROUND,
    *(
        name
        for name, (method, _) in METHODS.items()
        if issubclass(method_class(method), TrainsLocally)
    ),
)
TAKE_FEDAVGS_RATE = (*PERSONAL, *SINGLE_ROUND)
LADDER = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
# The ends of the first rates that are tried.
GRIDS = {"lr": (0.003, 0.3), "image_lr": (0.1, 10.0)}

FEW = {"local_epochs": 1, "server_epochs": 1, "server_steps": 1, "iterations": 2}


def knob(name: str) -> str | None:
    """Returns the rate that is tuned, of local training or of images; None: there is none."""
    _, values = METHODS[name]
    if values == AUTOENCODERS:
        return None
    if "local_epochs" in values:
        return "lr"
    return "image_lr" if "iterations" in values else None


def settings_for(name: str, seed: int, rate: float | None, cell: Cell) -> RunSettings:
    """Returns the settings of one run."""
    method, values = METHODS[name]
    tuned = knob(name)
    if rate is not None and tuned is not None:
        values = {**values, tuned: rate}
    if cell.quick:
        values = {**values, **{key: few for key, few in FEW.items() if key in values}}
    rounds = 1 if cell.quick or name in SINGLE_ROUND else 5
    run = {"method": method, "rounds": rounds, "seed": seed, "device": cell.device}
    partition = {"kind": "dirichlet", "alpha": 0.1, "clients": 10, "subset": 0.1}
    if name in PERSONAL:
        partition["local_test"] = 0.2
    return resolve(
        {
            "run": {**run, "evaluate_every": 5},
            "data": {"dataset": "fashion-mnist"},
            "partition": partition,
            "model": {"width": 8, "norm": "batch" if name == "fedbn" else "instance"},
            "method": values,
        }
    )


@cache
def tuning() -> Data:
    """Returns (the other training images, 5,000 random ones)."""
    order = torch.randperm(60_000, generator=torch.Generator().manual_seed(0))
    train = dataset("fashion-mnist")[0]
    return train.subset(order[5000:]), train.subset(order[:5000])


def best_rate(cell: Cell, rows: Rows) -> float | None:
    """Returns the best rate on held-out training images, 0 where there is none; None: another call
    has yet to find it."""
    tuned = knob(cell.method)
    if tuned is None:
        return 0.0
    chosen = "fedavg" if cell.method in TAKE_FEDAVGS_RATE else cell.method
    first, last = (LADDER.index(rate) for rate in GRIDS[knob(chosen) or tuned])
    tried: dict[int, Row | None] = {}
    while True:
        for step in range(first, last + 1):
            if step not in tried:
                settings = settings_for(chosen, 0, LADDER[step], cell)
                tried[step] = rows.run(f"rate {chosen} {LADDER[step]:g}", settings, tuning)
        best_index = best(tried)
        if best_index is None:
            return None
        if best_index == first > 0:
            first -= 1
        elif best_index == last < len(LADDER) - 1:
            last += 1
        else:
            return LADDER[best_index]


GRID = Grid(
    axes={"method": tuple(METHODS), "seed": range(5)},
    key="{method} seed={seed}",
    settings=lambda cell: settings_for(cell.method, cell.seed, cell.chosen, cell),
    choose=best_rate,
    include=lambda cell: cell.seed < 3 or cell.method in FIVE_SEEDS,
    threads=1,
)
