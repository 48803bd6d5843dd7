"""One-shot FedAvg, FedDF, DENSE and FedHydra on MNIST and Fashion-MNIST, for one CPU core.

    FEDSYNTH_DATA=... python benchmarks/one_shot_table.py [--quick] [--device cuda]
        [--datasets mnist] [--partitions 2c/c] [--methods DENSE] [--seeds 0 1] [--only 'seed=1']
        [--time-budget SECONDS] [--paper-steps] [--generators]

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
2); nothing else is chosen by them.

Rows "P": what P says of real test images, for each reading of Ū_c and several stratifications
(figures for the benchmark alone, as a server has no such images): `right`, the share that P, asked
for an image's own class, gives that class; `obeyed`, the share that P, asked for another class,
gives that other class, though the image is not of it; `truth`, the share that it then still gives
the image's own. `--paper-steps`: the papers' 200 epochs, all else alike, rows of their own.

`--generators`, rows "G": what DENSE's images are after four epochs by the generator's width and
rate. DENSE begins each epoch with a fresh generator, so thirty steps must be enough to make one.

One line of results/one_shot_table.jsonl for each method of a row, so that a further call goes on
where this one ended; nothing is begun after `--time-budget` seconds. `tables.py` prints the tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters
from fedsynth.data.images import ImageData, normalise
from fedsynth.data.load import load_dataset
from fedsynth.data.partition import partition
from fedsynth.data.proxy import ProxyImages
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.evaluation.generated import GENERATOR
from fedsynth.federation.simulation import simulate
from fedsynth.federation.terms.public_context import public_context
from fedsynth.federation.terms.resolve import resolve
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.methods.fedhydra import FedHydra
from fedsynth.methods.shared.aggregation import average
from fedsynth.methods.shared.ensemble import DistilsEnsemble, EnsembleState
from fedsynth.synthesizer.generation.ensembles import Aggregate
from library.machine import machine
from library.one_shot import LOCAL, SERVER
from library.options import add_share, plain_options, rows_file
from library.results import fingerprint

SEEDS = [0, 1, 2, 3, 4]
MOMENTUM: dict[str, Any] = {"server_momentum": 0.9}
# DENSE's own values of FedHydra's settings
LIKE_DENSE: dict[str, Any] = {
    **MOMENTUM,
    "generator_beta1": 0.5,
    "generator_reset": True,
    "learn_noise": True,
    "only_disagreement": True,
    "student_images": "best",
    "replay": True,
    "flips": True,
    "crop": 0.125,
    "hard_weight": 0.0,
}
READINGS: dict[str, dict[str, Any]] = {  # of what FedHydra's words leave open, or rest on
    "raw Ū_c": {"columns": "raw"},
    "Ū_r alone": {"aggregation": "clients"},
    "probabilities": {"outputs": "probabilities"},
    "AE": {"aggregation": "average"},
    "lessons of the average": {"lessons": "average"},
}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedDF": ("feddf", {"server_steps": 200, "server_batch": 64}),
    "DENSE": ("dense", SERVER),
    "DENSE (plain SGD)": ("dense", {**SERVER, "server_momentum": 0.0}),
    "FedHydra": ("fedhydra", SERVER),
    "FedHydra (momentum)": ("fedhydra", {**SERVER, **MOMENTUM}),
    "FedHydra (DENSE's training)": ("fedhydra", {**SERVER, **LIKE_DENSE}),
}
for name, values in READINGS.items():
    METHODS[f"FedHydra ({name})"] = "fedhydra", {**SERVER, **values}
    METHODS[f"FedHydra ({name}, momentum)"] = "fedhydra", {**SERVER, **MOMENTUM, **values}
STRATIFYING = ("FedHydra (raw Ū_c)", "FedHydra", "FedHydra (Ū_r alone)", "FedHydra (AE)")
PAPER_STEPS: dict[str, Any] = {"server_epochs": 200}
GENERATORS: dict[str, dict[str, Any]] = {
    f"width {width}, rate {rate:g}": {"generator_width": width, "generator_lr": rate}
    for width in (8, 64)
    for rate in (0.001, 0.01)
}
FEW_EPOCHS: dict[str, Any] = {"server_epochs": 4}
STRATA: dict[str, dict[str, Any]] = {
    "30 steps, batch 32, rate 0.01": {},
    "30 steps, batch 32, rate 0.001": {"stratification_lr": 0.001},
    "15 steps, batch 8, rate 0.001": {
        "stratification_steps": 15,
        "stratification_batch": 8,
        "stratification_lr": 0.001,
    },
}
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
        context = replace(context, federation=replace(context.federation, proxy=proxy))
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

    def distilled(self, name: str, **changes: Any) -> dict[str, Any]:
        """A method's accuracy, and what its generated images are."""
        context, uploads, test = self.ready()
        method = replace(self.settings(name).method, **changes)
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

    def strata(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """For each stratification: what P of each reading says of real images."""
        context, _, test = self.ready()
        models = self.models()
        for name, values in STRATA.items():
            found = {}
            measured = None
            for reading in STRATIFYING:
                method = replace(self.settings(reading).method, **values)
                if not isinstance(method, FedHydra):
                    raise TypeError(f"{reading} does not stratify")
                if measured is None:  # U does not depend on the reading
                    measured = method.stratify(models, context)
                found[reading] = asked(models, method.aggregate(measured), test)
            yield name, found


@torch.no_grad()
def asked(models: list[nn.Module], aggregate: Aggregate, test: ImageData) -> dict[str, float]:
    """What P says of real images, asked for their class, and for another one (each in turn)."""
    classes = test.spec.classes
    found = {"right": 0, "obeyed": 0, "truth": 0}
    for images, labels in zip(test.images.split(1000), test.labels.split(1000), strict=True):
        x = normalise(images, test.spec)
        logits = torch.stack([model(x) for model in models])
        step = torch.arange(len(labels), device=labels.device) % (classes - 1) + 1
        other = (labels + step) % classes
        found["right"] += int((aggregate(logits, labels).argmax(dim=1) == labels).sum())
        said = aggregate(logits, other).argmax(dim=1)
        found["obeyed"] += int((said == other).sum())
        found["truth"] += int((said == labels).sum())
    return {name: count / len(test) for name, count in found.items()}


def make(row: Row, title: str, names: list[str], lines: Lines, options: argparse.Namespace) -> None:
    """All lines of a row that are not there yet."""

    def key(name: str, of: str, suffix: str = "") -> str:
        """Of a line: where, what, which seed, and a hash of the settings."""
        return (
            f"{title.replace(' seed', f', {name}{suffix}, seed')} {fingerprint(row.settings(of))}"
        )

    if any(lines.wanted(f"P: {key(name, 'clients')}") for name in STRATA):
        for name, found in row.strata():
            lines.add(f"P: {key(name, 'clients')}", found, 0.0)
    if options.generators:
        for name, values in GENERATORS.items():
            title_of_line = f"G: {key(name, 'clients')}"
            if lines.wanted(title_of_line):
                started = time.process_time()
                found = row.distilled("DENSE", **{**values, **FEW_EPOCHS})
                lines.add(title_of_line, found, time.process_time() - started)
        return
    for name in ("clients", *names):
        suffix = " 200×30" if options.paper_steps and name != "clients" else ""
        if lines.wanted(key(name, name, suffix)):
            started = time.process_time()
            row.ready()
            if name != "clients":  # which are not what is timed then
                started = time.process_time()
            found = row.clients() if name == "clients" else row.distilled(name)
            lines.add(key(name, name, suffix), found, time.process_time() - started)


class Lines:
    """The results file: one line for each finished piece of work."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._path = rows_file("one_shot_table", options)
        self._only: str = options.only
        self._end = time.monotonic() + options.time_budget
        self._machine = machine()
        text = self._path.read_text() if self._path.exists() else ""
        self._keys = {json.loads(line)["key"] for line in text.splitlines()}

    def wanted(self, key: str) -> bool:
        """Whether this call is to make the line."""
        return key not in self._keys and self._only in key and time.monotonic() < self._end

    def add(self, key: str, found: dict[str, Any], seconds: float) -> None:
        row = {"key": key, **found, "seconds": round(seconds, 1), **self._machine}
        with self._path.open("a") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._keys.add(key)
        print(json.dumps(row, ensure_ascii=False), file=sys.stderr, flush=True)


def main() -> None:
    parser = plain_options(__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--datasets", nargs="+", default=["fashion-mnist", "mnist"])
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--paper-steps", action="store_true", help="200 epochs")
    parser.add_argument("--generators", action="store_true", help="rows G alone")
    parser.add_argument("--partitions", nargs="+", choices=PARTITIONS, default=list(PARTITIONS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add_share(parser, "rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_large_allocations()
    lines = Lines(options)
    for seed in options.seeds:  # one seed of everything before the next
        for where in options.partitions:
            for dataset in options.datasets:
                row = Row(dataset, where, seed, options)
                make(row, f"{dataset}, {where} seed={seed}", options.methods, lines, options)


if __name__ == "__main__":
    main()
