"""One-shot FedAvg, FedDF, DENSE and FedHydra (stratified, and with averages) on MNIST and Fashion-MNIST, for two CPU cores.

    FEDSYNTH_DATA=... python benchmarks/one_shot_table.py [--quick] [--json] [--device cuda] [--datasets mnist] [--only 'seed=1'] [--paper-steps]

The paper's setting (5 clients; Dir(0.5), Dir(0.1), and 2c/c: two disjoint classes a client; SGD 0.01) but for the size: a twentieth of each
class, ConvNets of width 8 with batch norm, 10 local epochs of batch 32, 15 epochs of 10 generator steps with batch 32 and a generator of
width 8, whose learning rate is 0.01 as it has a fortieth of the paper's steps; the student passes over all images so far in each epoch
(`replay`, DENSE's public code) for DENSE and FedHydra alike, and starts from the clients' average as FedDF's does. FedDF distils 200 steps
on the other of the two data sets. The clients are trained once for each row and seed, and every method distils the same models.
Heterogeneous: lenet5, cnn1, cnn2, resnet8 and the ConvNet at Dir(0.5), a ConvNet student; FedAvg cannot average those. Accuracy of the last
epoch; nothing is chosen by the test set. `--paper-steps`: the paper's 200 epochs of 30 generator steps at its rate of 0.001 instead (all else as
above), rows of their own. Resumes: finished rows are lines of results/one_shot_table.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from typing import Any

from fashion_table import RESULTS, summarise
from machine import machine

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.core.messages import ModelParameters
from fedsynth.core.method import ServerState
from fedsynth.data.load import load_dataset
from fedsynth.data.proxy import ProxyImages
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.federation.planning import public_context
from fedsynth.federation.settings import RunSettings, resolve
from fedsynth.federation.simulation import simulate
from fedsynth.methods.one_shot import DistilsEnsemble

LOCAL: dict[str, Any] = {"local_epochs": 10, "batch": 32, "lr": 0.01, "momentum": 0.9}
SERVER: dict[str, Any] = {
    "server_epochs": 15, "generator_steps": 10, "generator_batch": 32, "generator_width": 8, "generator_lr": 0.01,
    "replay": True, "start": "average",
}  # fmt: skip
HYDRA: dict[str, Any] = {**SERVER, "stratification_steps": 15, "stratification_batch": 8}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedDF": ("feddf", {"server_steps": 200, "server_batch": 64}),
    "DENSE": ("dense", SERVER),
    "FedHydra": ("fedhydra", HYDRA),
    "FedHydra (probabilities)": ("fedhydra", {**HYDRA, "outputs": "probabilities"}),
    "FedHydra (Ū_r alone)": ("fedhydra", {**HYDRA, "aggregation": "clients"}),
    "FedHydra (AE)": ("fedhydra", {**HYDRA, "aggregation": "average"}),
}
PAPER_STEPS: dict[str, Any] = {"server_epochs": 200, "generator_steps": 30, "generator_lr": 0.001}
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
    return resolve(
        {
            "run": {"method": method, "rounds": 1, "seed": seed, "device": device},
            "data": {"dataset": dataset},
            "partition": {**PARTITIONS[where], "clients": 5, "subset": 0.05},
            "model": {
                "width": 8,
                "norm": "batch",
                "clients": "lenet5,cnn1,cnn2,resnet8,convnet" if where == "heterogeneous" else "",
            },
            "method": {**LOCAL, **values},
        }
    )


def one_row(
    dataset: str,
    where: str,
    seed: int,
    device: str,
    quick: bool,
    names: list[str],
    steps: dict[str, Any],
) -> dict[str, Any]:
    """Accuracies of FedAvg and the named methods on the same client models."""
    train, test = load_dataset(dataset)
    few = {"local_epochs": 1} if quick else {}
    start = time.perf_counter()
    clients = simulate(
        settings_for(
            dataset, where, seed, device, "dense", {"server_epochs": 0, "start": "average", **few}
        ),
        data=(train, test),
    )
    found: dict[str, Any] = {"clients": time.perf_counter() - start}
    context = public_context(clients.settings, train.spec, next(clients.model.parameters()).device)
    context = replace(context, participants=tuple(range(5)))
    proxy, _ = load_dataset(PROXY[dataset])
    context = replace(context, proxy=ProxyImages(proxy.to(context.device), train.spec))
    test = test.to(context.device)
    if where != "heterogeneous":
        found["FedAvg"] = clients.accuracy  # a student that was not trained is the average
    uploads = [u for u in clients.uploads.values() if isinstance(u, ModelParameters)]
    initial = {
        name: value.to(context.device) for name, value in context.architecture.state_dict().items()
    }
    for name in names:
        method, values = METHODS[name]
        if method == "feddf":
            few = {"server_steps": 2}
        else:
            few, values = {"server_epochs": 1}, {**values, **steps}
        begun = time.perf_counter()
        distils = settings_for(
            dataset, where, seed, device, method, {**values, **(few if quick else {})}
        ).method
        if not isinstance(distils, DistilsEnsemble):
            raise TypeError(f"{method} does not distil")
        state = distils.server_step(ServerState(initial), uploads, context)
        found[name] = accuracy(context.load(state.parameters), test)
        found.setdefault("seconds", {})[name] = round(time.perf_counter() - begun, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--datasets", nargs="+", default=["fashion-mnist", "mnist"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="", help="make only the rows whose name contains this")
    parser.add_argument(
        "--paper-steps", action="store_true", help="200 epochs of 30 generator steps"
    )
    parser.add_argument("--partitions", nargs="+", choices=PARTITIONS, default=list(PARTITIONS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args()
    keep_large_allocations()
    path = RESULTS / f"one_shot_table{'_quick' if options.quick else ''}.jsonl"
    made: dict[str, dict[str, Any]] = {}
    for row in map(json.loads, path.read_text().splitlines() if path.exists() else []):
        made[row["key"]] = {
            **made.get(row["key"], {}),
            **row,
        }  # a later line of a row has methods that came later
    steps, suffix = (PAPER_STEPS, " 200×30") if options.paper_steps else ({}, "")
    table: dict[str, Any] = {}
    for dataset in options.datasets:
        for where in options.partitions:
            for seed in options.seeds:
                key = f"{dataset} {where} seed={seed}{suffix}"
                names = [name for name in options.methods if name not in made.get(key, {})]
                if names and options.only in key:
                    found = one_row(
                        dataset, where, seed, options.device, options.quick, names, steps
                    )
                    row = {"key": key, **found, **machine()}
                    made[key] = {**made.get(key, {}), **row}
                    with path.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(json.dumps(row), file=sys.stderr, flush=True)
            rows = [made.get(f"{dataset} {where} seed={seed}{suffix}") for seed in options.seeds]
            for name in ("FedAvg", *options.methods):
                values = [100 * row[name] for row in rows if row is not None and name in row]
                if len(values) == len(rows):
                    table[f"{dataset}, {where}, {name}"] = summarise(values)
    if options.json:
        print(json.dumps(table, indent=2))
        return
    for name, row in table.items():
        print(f"{name:45} {row['mean']:6.2f} ± {row['sd']:.2f}   {row['values']}")


if __name__ == "__main__":
    main()
