"""Forward and backward passes of a client's batch, compared with FedKF's Table IX.

The convention is the paper's: a pass through the first and the last layer is one, a pass through
the last layer alone is a half. It counts teachers, and generators of FedGen without their training.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from fedsynth import resolve
from fedsynth.core.client import ExactClientView
from fedsynth.experiments.presets import Cell, preset
from fedsynth.federation.server import Server
from tests.digits import convnet, digits, round_context
from tests.rounds import play_round

FEDKF = {"latent": 6, "generator_width": 3, "generator_batch": 8}
SETTINGS: dict[str, dict[str, Any]] = {"fedkf": FEDKF, "fedkf-": {**FEDKF, "teacher": "aca"}}
# the layers at which passes are counted, by their numbers of inputs
WEIGHTS = {
    (nn.Conv2d, 1): ("classifier", 0.5),  # its first layer
    (nn.Linear, 16): ("classifier", 0.5),  # its last layer
    (nn.Linear, 6): ("generator", 1.0),  # FedKF's: noise
    (nn.Linear, 32 + 10): ("generator", 1.0),  # FedGen's: noise and label
}
# Fewer passes are printed for FedKF: the generator's images, and the teacher's logits, serve both
# its own step and the client's. Here they are made again after that step, as in Algorithm 1.
REMADE = {"classifier_forward_passes": 1, "generator_forward_passes": 1}


def passes(name: str, steps: int) -> Counter[str]:
    """Counts the passes in the second round of one client."""
    changes = {"batch": 8, "momentum": 0.0, "local_steps": steps, **SETTINGS.get(name, {})}
    method = resolve({"run": {"method": name.removesuffix("-")}, "method": changes}).method
    server = Server(method, convnet().state_dict())
    clients = [ExactClientView([0], digits([0, 1] * 20), [torch.arange(40)])]
    counts: Counter[str] = Counter()

    def count(layer: Any, inputs: Any, output: Tensor) -> None:
        size = getattr(layer, "in_channels", getattr(layer, "in_features", 0))
        kind = nn.Conv2d if isinstance(layer, nn.Conv2d) else nn.Linear
        network, weight = WEIGHTS.get((kind, size), ("", 0.0))
        backward = {f"{network}_backward_passes": weight}
        counts.update({f"{network}_forward_passes": weight})
        if output.requires_grad:
            output.register_hook(lambda _: counts.update(backward))

    states: dict[int, Any] = {}
    for number in (1, 2):
        counts.clear()
        with register_module_forward_hook(count):
            context = round_context(number=number, clients=1, sizes=(40,))
            play_round(server, clients, states, context)
    return counts


@pytest.mark.parametrize("cell", preset("fedkf:table9").cells, ids=lambda cell: cell.method)
def test_passes_are_those_of_table_ix(cell: Cell) -> None:
    once, twice = (passes(cell.method, steps) for steps in (1, 2))
    more = REMADE if cell.method in SETTINGS else {}
    assert len(cell.numbers) == 4
    for number in cell.numbers:
        expected = number.value + more.get(number.metric, 0)
        assert twice[number.metric] - once[number.metric] == expected, number.metric
