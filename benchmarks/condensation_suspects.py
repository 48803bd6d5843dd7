"""FedAF and FedDM on held-out training images, with one change at a time.

    FEDSYNTH_DATA=DIR OMP_NUM_THREADS=1 python benchmarks/condensation_suspects.py SEED ...

Fashion-MNIST, a fifth of the images at Dir(0.02) among ten clients, a ConvNet of width 32 with
batch norm, 10 images per class, 150 steps, three rounds; accuracy on 5,000 held-out training
images after each round. Image rates are 1000/150 times the paper's, because there are as many
times fewer steps. The changes that no setting makes are in `varied`.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import torch

from fedsynth import FedAF, FedDM, ImageData, Method, from_arrays, load_dataset, resolve, simulate
from fedsynth.data.images import denormalise, normalise
from fedsynth.methods import fedaf, feddm
from library.machine import append, machine, rows_file

STEPS, ROUNDS = 150, 3
LOW, HIGH = 0.2 * 1000 / STEPS, 1.0 * 1000 / STEPS  # the paper's rates of FedAF and of FedDM
SHARED = {"server_epochs": 200, "server_batch": 256, "server_weight_decay": 0.0, "ipc": 10}
SHARED |= {"server_lr": 0.001, "server_momentum": 0.9, "min_examples": 10}
CONDENSED = {**SHARED, "iterations": STEPS, "batch": 64, "image_momentum": 0.9}
AF = {**CONDENSED, "image_lr": LOW, "local_weight": 1e-3, "global_weight": 2.0, "gamma": 0.9}
DM = {**CONDENSED, "image_lr": HIGH, "image_clip": 2.0, "radius": 5.0}
CELLS: dict[str, tuple[str, dict[str, Any], dict[str, bool]]] = {
    "real": ("real", {**SHARED, "radius": 5.0}, {}),
    "feddm": ("feddm", DM, {}),
    "feddm, valid pixels": ("feddm", DM, {"pixels": True}),
    "feddm, rate of FedAF": ("feddm", {**DM, "image_lr": LOW}, {}),
    "feddm, restarts": ("feddm", {**DM, "restart": True}, {}),
    "feddm, running statistics": ("feddm", DM, {"running": True}),
    "feddm, valid pixels, running statistics": ("feddm", DM, {"pixels": True, "running": True}),
    "fedaf": ("fedaf", AF, {}),
    "fedaf, rate of FedDM": ("fedaf", {**AF, "image_lr": HIGH}, {}),
    "fedaf, no knowledge matching": ("fedaf", {**AF, "global_weight": 0.0}, {}),
    "fedaf, knowledge from round 2": ("fedaf", AF, {"late": True}),
    "fedaf, fresh networks in round 1": ("fedaf", AF, {"fresh": True}),
    "fedaf, gamma 0.5": ("fedaf", {**AF, "gamma": 0.5}, {}),
    "fedaf, no collaborative term": ("fedaf", {**AF, "local_weight": 0.0}, {}),
    "fedaf, restarts": ("fedaf", {**AF, "restart": True}, {}),
    "fedaf, running statistics": ("fedaf", AF, {"running": True}),
}


def varied(kind: type[Method], pixels: bool, fresh: bool, late: bool) -> type[Method]:
    """Returns a method with changes that no setting makes.

    Args:
        kind: FedAF, FedDM or Real.
        pixels: the uploaded images are rounded to bytes, as FedAF sends them.
        fresh: the networks of round 1 are new ones, as with γ = 0.
        late: the server matches knowledge from round 2 on.
    """

    class Varied(kind):  # type: ignore[misc, valid-type]
        def client_step(self, message: Any, clients: Any, states: Any, context: Any) -> Any:
            method = self
            if fresh and context.round == 1:
                method = replace(self, gamma=0.0)
            results = super(Varied, method).client_step(message, clients, states, context)
            if not pixels:
                return results
            spec = context.spec
            return [
                (replace(s, images=normalise(denormalise(s.images, spec), spec)), state)
                for s, state in results
            ]

        def server_step(self, state: Any, uploads: Any, context: Any) -> Any:
            method = self
            if late and context.round == 1:
                method = replace(self, global_weight=0.0)
            return super(Varied, method).server_step(state, uploads, context)

    return Varied


def images(seed: int) -> tuple[ImageData, ImageData]:
    """Returns the training images without 5,000 random ones, and these."""
    train, _ = load_dataset("fashion-mnist")
    order = np.random.default_rng(1000 + seed).permutation(len(train.labels))
    parts = [np.sort(order[5000:]), np.sort(order[:5000])]
    pixels, labels = train.images.squeeze(1).numpy(), train.labels.numpy()
    rest, held_out = (from_arrays(pixels[part], labels[part], train.spec) for part in parts)
    return rest, held_out


def main() -> None:
    torch.set_num_threads(1)
    for seed in map(int, sys.argv[1:]):
        data = images(seed)
        for name, (method, values, changes) in CELLS.items():
            settings = resolve(
                {
                    "run": {"method": method, "rounds": ROUNDS, "seed": seed},
                    "partition": {"clients": 10, "kind": "dirichlet", "alpha": 0.02, "subset": 0.2},
                    "model": {"name": "convnet", "norm": "batch", "width": 32, "depth": 3},
                    "method": values,
                }
            )
            print(name, settings.method)
