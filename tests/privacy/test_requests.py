"""A private client looks at the server's message before it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fedsynth.config.resolve import resolve
from fedsynth.core.messages import Message
from fedsynth.core.uploads import check_numbers
from fedsynth.methods.fedaf import FedAF
from fedsynth.privacy.errors import RequestRefusedError
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.simulation.simulate import simulate


def test_the_norm_is_of_all_tensors_together() -> None:
    arrays = [("a", torch.full((9,), 2.0)), ("b", torch.full((16,), 2.0)), ("n", torch.tensor([7]))]
    check_numbers(arrays, 10.0)  # sqrt(36 + 64)
    check_numbers(arrays, None)
    with pytest.raises(RequestRefusedError, match="got 10"):
        check_numbers(arrays, 9.99)
    with pytest.raises(RequestRefusedError, match=r"got 4\.808e\+38"):  # no overflow
        check_numbers([("a", torch.full((2,), 3.4e38))], 1e38)
    for value in (float("nan"), float("inf")):
        with pytest.raises(RequestRefusedError, match=r"parameters\.w .*not finite"):
            check_numbers([("parameters.w", torch.tensor([1.0, value]))], None)


def test_a_run_refuses_before_anything_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    charged = []
    init = GaussianSumMechanism.__init__

    def counted(self: GaussianSumMechanism, *args: Any) -> None:
        if type(self) is GaussianSumMechanism:  # a trial on public images has a subclass of its own
            charged.append(1)
        init(self, *args)

    monkeypatch.setattr(GaussianSumMechanism, "__init__", counted)
    sections = {
        "run": {"method": "fedavg", "rounds": 1},
        "method": {"local_steps": 1},
        "privacy": {"noise_multiplier": 3.0, "max_request_norm": 0.01},
    }
    with pytest.raises(RequestRefusedError, match="max_request_norm"):
        simulate(resolve(sections))
    assert charged == []
    sections["privacy"]["max_request_norm"] = 1e3
    simulate(resolve(sections))
    assert charged


@dataclass(frozen=True)
class Proximal(Message):
    mu: float


def test_a_plain_number_of_a_message_is_checked() -> None:
    check_numbers(Proximal(mu=0.1).numbers(), None)
    with pytest.raises(RequestRefusedError, match=r"mu .*not finite"):
        check_numbers(Proximal(mu=float("nan")).numbers(), None)


def test_a_question_of_the_first_phase_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    first_request = FedAF.first_request

    def hostile(self: FedAF, state: Any, context: Any) -> Any:
        asked: Any = first_request(self, state, context)
        next(tensor for _, tensor in asked.arrays()).fill_(float("inf"))
        return asked

    monkeypatch.setattr(FedAF, "first_request", hostile)
    monkeypatch.setattr(FedAF, "first_step", None)  # nobody answers
    method = {"knowledge_from": "first-phase"}
    sections = {"run": {"method": "fedaf", "rounds": 1}, "privacy": {"noise_multiplier": 3.0}}
    with pytest.raises(RequestRefusedError, match="not finite"):
        simulate(resolve({**sections, "method": method}))
