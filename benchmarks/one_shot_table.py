"""One-shot FedAvg, FedDF, DENSE and FedHydra on MNIST and Fashion-MNIST, for one CPU core.

    FEDSYNTH_DATA=... python benchmarks/one_shot_table.py [--quick] [--device cuda]
        [--datasets mnist] [--partitions 2c/c] [--methods DENSE] [--seeds 0 1] [--only 'seed=1']
        [--time-budget SECONDS] [--paper-steps]

The papers' setting (5 clients; Dir(0.5), Dir(0.1), and 2c/c: two disjoint classes a client; SGD
0.01) but for the size: a twentieth of each class, ConvNets of width 8 with batch norm, 60 local
epochs of batch 32, after which every client gives nearly all its own examples their class (`fit`,
in the rows "clients"); 15 epochs of the papers' 30 generator steps with batch 32 and a generator of
width 8, whose rate is 0.01 as it has a thirteenth of the paper's steps; the student starts from the
clients' average, as FedDF's does. All else is each method's own: FedHydra's student sees the images
of every generator step of the epoch, DENSE's the best batch of every epoch so far. FedDF distils
200 steps on the other of the two data sets. The clients are trained once for each row and seed, and
every method distils the same models. Heterogeneous: lenet5, cnn1, cnn2, resnet8 and the ConvNet at
Dir(0.5), a ConvNet student; FedAvg cannot average those. Accuracy of the last epoch.
The reading of Ū_c and the stratification were found on test images of this very setting (seeds 0 to
2); nothing else is chosen by them. `--paper-steps`: the papers' 200 epochs, all else alike, rows of
their own.

One line of results/one_shot_table.jsonl for each method of a row, so that a further call goes on
where this one ended. What FedHydra's readings, its stratification ("P") and DENSE's generators
("G") are worth is in rows that `git show 04719c52:benchmarks/one_shot_table.py` made.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.data.partition import partition
from fedsynth.data.proxy import ProxyImages
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.evaluation.generated import GENERATOR
from fedsynth.federation.context import public_context
from fedsynth.methods.shared.aggregation import average
from fedsynth.methods.shared.ensemble import DistilsEnsemble, EnsembleState
from fedsynth.simulation.simulate import simulate
from library.one_shot import LOCAL, SERVER
from library.results import Results, fingerprint, start, table_parser

MOMENTUM: dict[str, Any] = {"server_momentum": 0.9}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedDF": ("feddf", {"server_steps": 200, "server_batch": 64}),
    "DENSE": ("dense", SERVER),
    "DENSE (plain SGD)": ("dense", {**SERVER, "server_momentum": 0.0}),
    "FedHydra": ("fedhydra", SERVER),
    "FedHydra (momentum)": ("fedhydra", {**SERVER, **MOMENTUM}),
    "FedHydra (AE)": ("fedhydra", {**SERVER, "aggregation": "average"}),
}
PAPER_STEPS: dict[str, Any] = {"server_epochs": 200}
PARTITIONS: dict[str, dict[str, Any]] = {
    "Dir(0.5)": {"kind": "dirichlet", "alpha": 0.5},
    "Dir(0.1)": {"kind": "dirichlet", "alpha": 0.1},
    "2c/c": {"kind": "classes", "classes_per_client": 2},
    "heterogeneous": {"kind": "dirichlet", "alpha": 0.5},
}
PROXY = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}


def settings_for(
    dataset: str, where: str, seed: int, device: str, method: str, values: dict[str, Any]
) -> RunSettings:
    clients = "lenet5,cnn1,cnn2,resnet8,convnet" if where == "heterogeneous" else ""
    return resolve(
        {
            "run": {"method": method, "rounds": 1, "seed": seed, "device": device},
            "data": {"dataset": dataset},
            "partition": {**PARTITIONS[where], "clients": 5, "subset": 0.05},
            "model": {"width": 8, "norm": "batch", "clients": clients},
            "method": {**LOCAL, **values},
        }
    )


Trained = tuple[RoundContext, dict[int, ModelParameters], ImageData]


class Row:
    """One data set, partition and seed: the trained clients, and what each method makes of them."""

    def __init__(self, dataset: str, where: str, seed: int, options: argparse.Namespace) -> None:
        self._where = dataset, where, seed, options.device
        self._quick: bool = options.quick
        self._steps = PAPER_STEPS if options.paper_steps else {}
        self._trained: Trained | None = None

    def settings(self, name: str) -> RunSettings:
        """Of a method's run, or of the clients' alone: DENSE without an epoch on the server."""
        few: dict[str, Any] = {"local_epochs": 1} if self._quick else {}
        if name == "clients":
            none = {"server_epochs": 0, "start": "average"}
            return settings_for(*self._where, "dense", {**none, **few})
        method, values = METHODS[name]
        if method != "feddf":
            values = {**values, **self._steps}
        if self._quick and method == "feddf":
            few["server_steps"] = 1
        elif self._quick:
            few.update({"server_epochs": 1, "generator_steps": 2})
            few.update({"stratification_steps": 2} if method == "fedhydra" else {})
        return settings_for(*self._where, method, {**values, **few})

    def ready(self) -> Trained:
        """The context of the server's step, the trained clients, and the test images."""
        if self._trained is None:
            self._trained = self._train()
        return self._trained

    def _train(self) -> Trained:
        settings = self.settings("clients")
        train, test = load_dataset(settings.dataset)
        made = simulate(settings, data=(train, test))
        device = next(made.model.parameters()).device
        context = public_context(made.settings, train.spec, device)
        proxy = ProxyImages(load_dataset(PROXY[settings.dataset])[0].to(device), train.spec)
        context = replace(context, proxy=proxy)
        uploads = {k: u for k, u in made.uploads.items() if isinstance(u, ModelParameters)}
        return context, uploads, test.to(device)

    def clients(self) -> dict[str, Any]:
        """The accuracy of the clients' average, where there is one, and the share of its own
        examples that each client gives the right class."""
        context, uploads, test = self.ready()
        settings = self.settings("clients")
        train, _ = load_dataset(settings.dataset)
        classes = train.spec.classes
        origins = train.origins()
        parts = partition(train.labels.numpy(), settings.resolved_partition, classes, *origins)
        own = [train.subset(torch.as_tensor(part)).to(context.device) for part in parts]
        fit = [accuracy(model, mine) for model, mine in zip(self.models(), own, strict=True)]
        alike = context.client_architectures is None
        common = accuracy(context.load(average(uploads)), test) if alike else None
        return {"accuracy": common, "fit": fit}

    def models(self) -> list[nn.Module]:
        """The trained clients, frozen, in evaluation mode."""
        context, uploads, _ = self.ready()
        each = [context.load(u.parameters, client) for client, u in uploads.items()]
        return [model.requires_grad_(False).eval() for model in each]

    def distilled(self, name: str) -> dict[str, Any]:
        """A method's accuracy, and what its generated images are."""
        context, uploads, test = self.ready()
        method = self.settings(name).method
        if not isinstance(method, DistilsEnsemble):
            raise TypeError(f"{name} does not distil")
        device = context.device
        start = {k: v.to(device) for k, v in context.architecture.state_dict().items()}
        state = method.server_step(EnsembleState(start), uploads, context)
        row: dict[str, Any] = {"accuracy": accuracy(context.load(state.parameters), test)}
        facts = method.facts(state, context)
        if GENERATOR in facts:
            row[GENERATOR] = facts[GENERATOR]
        return row


def make(row: Row, title: str, results: Results, options: argparse.Namespace) -> None:
    """Makes all rows of one data set, partition and seed that are missing."""

    def key(name: str, settings_of: str) -> str:
        """Returns where, what, which seed, and a hash of the settings."""
        where = title.replace(" seed", f", {name}, seed")
        return f"{where} {fingerprint(row.settings(settings_of))}"

    results.measure(key("clients", "clients"), partial(timed, row.clients))
    for name in options.methods:
        suffix = " 200×30" if options.paper_steps else ""
        work = partial(row.distilled, name)
        results.measure(key(name + suffix, name), partial(timed, work, row.ready))


def timed(
    work: Callable[[], dict[str, Any]], before: Callable[[], object] | None = None
) -> dict[str, Any]:
    """Returns the work's measurements and its CPU seconds, without those of `before`."""
    if before is not None:
        before()
    started = time.process_time()
    row = work()
    return {**row, "seconds": round(time.process_time() - started, 1)}


def main() -> None:
    parser = table_parser(__doc__, "few steps: a test", range(5))
    parser.add_argument("--datasets", nargs="+", default=["fashion-mnist", "mnist"])
    parser.add_argument("--paper-steps", action="store_true", help="200 epochs")
    parser.add_argument("--partitions", nargs="+", choices=PARTITIONS, default=list(PARTITIONS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options, results = start("one_shot_table", parser)
    torch.set_num_threads(1)
    for seed, where, dataset in product(options.seeds, options.partitions, options.datasets):
        row = Row(dataset, where, seed, options)
        make(row, f"{dataset}, {where} seed={seed}", results, options)
    results.show()


if __name__ == "__main__":
    main()
