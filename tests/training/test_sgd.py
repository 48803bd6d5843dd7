"""Training on resident data equals torch's own SGD, and stays in the ball."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fedsynth.models.convnet import ConvNet
from fedsynth.models.flat import flatten
from fedsynth.training.sgd import MomentumSgd, SgdSettings, recorded, train_on


def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noqa: TID251
        model = ConvNet((1, 8, 8), 4, width=4, depth=2)
        return model, torch.randn(30, 1, 8, 8), torch.randint(4, (30,))


def test_projection_holds_after_training() -> None:
    model, x, y = problem()
    start = flatten(model)
    settings = SgdSettings(20, 8, MomentumSgd(0.5), radius=0.3)
    train_on(model, lambda i: x[i], y, settings, torch.Generator().manual_seed(5))
    distance = (flatten(model) - start).norm()
    assert 0.29 < distance <= 0.3 * (1 + 1e-5)


def test_no_examples_means_no_step() -> None:
    model, x, y = problem()
    start = flatten(model)
    train_on(model, lambda i: x[i], y[:0], SgdSettings(2, 8, MomentumSgd(0.5)), torch.Generator())
    assert torch.equal(flatten(model), start)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("norm", "precision", "apart"),
    [
        ("instance", torch.float32, 1e-4),
        ("batch", torch.float32, 1e-4),
        ("batch", torch.bfloat16, 1e-2),
    ],
)
def test_a_recorded_step_is_the_same_step(
    norm: str, precision: torch.dtype, apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA graph against eager steps, with full and partial batches, projection and running
    statistics; in bfloat16, too, whose casts are recorded."""
    _, x, y = problem()
    x, y, trained = x.cuda(), y.cuda(), []
    for worth in (1, 10**9):
        with torch.random.fork_rng():
            torch.manual_seed(0)  # noqa: TID251
            model = ConvNet((1, 8, 8), 4, width=4, depth=2, norm=norm).cuda()
        monkeypatch.setattr("fedsynth.training.sgd.WORTH_RECORDING", worth)
        settings = SgdSettings(4, 8, MomentumSgd(0.1, 0.9, 1e-2), radius=1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            order = torch.Generator().manual_seed(5)
            train_on(model, lambda i: x[i], y, settings, order, precision=precision)
        trained.append(model)
    for one, other in zip(
        trained[0].state_dict().values(), trained[1].state_dict().values(), strict=True
    ):
        torch.testing.assert_close(one, other, atol=apart, rtol=10 * apart)


def test_what_cannot_be_recorded_runs_as_it_is_and_nothing_was_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = torch.zeros(3)

    def refuse(step: Callable[[], None], device: torch.device) -> None:
        step()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("fedsynth.training.sgd._record", refuse)
    with pytest.warns(RuntimeWarning, match="without a CUDA graph"):
        replay = recorded(lambda indices: state.add_(indices), 3, [state])
    assert torch.equal(state, torch.zeros(3))
    replay(torch.tensor([1, 2, 3]))
    assert state.tolist() == [1, 2, 3]


@pytest.mark.parametrize("examples", [5, 1])
def test_a_last_piece_of_one_example_goes_through_batch_norm_twice(examples: int) -> None:
    """Batches of two: 5 examples leave one over, whose variance over the batch would not exist; so
    does a client of one example."""
    layers = [nn.Flatten(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)]
    net = nn.Sequential(*layers)
    x = torch.randn(examples, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    y, theirs = torch.arange(examples) % 3, copy.deepcopy(net)
    settings = SgdSettings(1, 2, MomentumSgd(0.1))
    train_on(net, lambda i: x[i], y, settings, torch.Generator().manual_seed(1))
    sgd = torch.optim.SGD(theirs.parameters(), 0.1)
    for part in torch.randperm(examples, generator=torch.Generator().manual_seed(1)).split(2):
        part = part if len(part) == 2 else torch.cat([part, part])
        sgd.zero_grad()
        nn.functional.cross_entropy(theirs(x[part]), y[part]).backward()
        sgd.step()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value)
