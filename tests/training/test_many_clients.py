"""Many clients' training in one pass equals each client's own, and what cannot be trained so is
found out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fedsynth.models.flat import flatten, load_flat
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.models.small import Linear
from fedsynth.training.many_clients import (
    Learner,
    learner_bytes,
    train_together,
    trains_together,
    worth_batching,
)
from fedsynth.training.sgd import MomentumSgd, Pull, SgdSettings, train_on

SIZES = (7, 1, 0, 23, 10, 5)
DRAWS = torch.Generator().manual_seed(0)
IMAGES, LABELS = torch.randn(60, 1, 4, 4, generator=DRAWS), torch.randint(3, (60,), generator=DRAWS)


def two_layers() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noqa: TID251
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3))


def pull(seed: int, size: int, device: torch.device | str = "cpu") -> Pull:
    center, linear = torch.randn(2, size, generator=torch.Generator().manual_seed(seed)).to(device)
    return Pull(0.3 * seed, center, 0.1 * linear)


def learners(
    settings: Callable[[int], SgdSettings],
    penalties: bool = False,
    sizes: Sequence[int] = SIZES,
    device: torch.device | str = "cpu",
) -> list[Learner]:
    """Clients with models of their own, as SOLO's are, and data of their own out of one resident
    tensor."""
    found, order = [], torch.randperm(60, generator=torch.Generator().manual_seed(1))
    for k, size in enumerate(sizes):
        model = two_layers().to(device)
        weights = flatten(model)
        load_flat(model, weights + 0.01 * k)
        where, order = order[:size].to(device), order[size:]
        extra = pull(k, len(weights), device) if penalties and k % 2 else None
        draws = torch.Generator().manual_seed(10 + k)
        found.append(Learner(model, where, settings(k), draws, extra))
    return found


def apart(each: list[Learner], images: Tensor, labels: Tensor) -> list[Tensor]:
    """The oracle: one after another."""
    for one in each:
        x, y = images[one.examples], labels[one.examples]
        train_on(one.model, x.__getitem__, y, one.settings, one.generator, penalty=one.penalty)
    return [flatten(one.model) for one in each]


@pytest.mark.parametrize(
    "settings",
    [
        lambda k: SgdSettings(3, 5, MomentumSgd(0.1, 0.9, 1e-2)),
        lambda k: SgdSettings(1 + 2 * k % 5, 5, MomentumSgd(0.1, 0.9)),  # stragglers
        lambda k: SgdSettings(1, 5, MomentumSgd(0.1, 0.9, 1e-2), steps=7),
        lambda k: SgdSettings(2, 64, MomentumSgd(0.1)),
    ],
)
@pytest.mark.parametrize("few", [1, 4])
def test_equals_each_clients_own_training(
    settings: Callable[[int], SgdSettings],
    few: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With all steps shared, or the last clients alone."""
    images, labels = IMAGES.to(device), LABELS.to(device)
    monkeypatch.setattr("fedsynth.training.many_clients.FEW", few)
    monkeypatch.setattr("fedsynth.training.many_clients.BLOCK", 2)
    together = learners(settings, True, device=device)
    starts = [flatten(one.model) for one in together]
    train_together(together, lambda i: images[i], lambda i: labels[i])
    oracle = apart(learners(settings, True, device=device), images, labels)
    for size, one, start, expected in zip(SIZES, together, starts, oracle, strict=True):
        torch.testing.assert_close(flatten(one.model), expected, atol=2e-6, rtol=1e-5)
        assert torch.equal(start, flatten(one.model)) == (size == 0)


@pytest.mark.parametrize("few", [1, 4])
def test_clients_without_data_and_progress(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsynth.training.many_clients.FEW", few)
    monkeypatch.setattr("fedsynth.training.many_clients.BLOCK", 1)
    each = learners(lambda k: SgdSettings(2, 5, MomentumSgd(0.1)), sizes=(0, 0))
    before = [flatten(one.model) for one in each]
    train_together(each, IMAGES.__getitem__, LABELS.__getitem__)
    assert all(torch.equal(flatten(one.model), w) for one, w in zip(each, before, strict=True))
    seen: list[tuple[int, int]] = []
    each = learners(lambda k: SgdSettings(1 + k, 5, MomentumSgd(0.1)), sizes=(3, 8))
    train_together(each, IMAGES.__getitem__, LABELS.__getitem__, lambda *at: seen.append(at))
    assert seen == ([(2, 5), (3, 5), (4, 5), (5, 5), (5, 5)] if few == 1 else [(5, 5)])


def test_a_pulls_gradient_is_that_of_its_value() -> None:
    model = two_layers()
    one = pull(3, flatten(model).numel())
    one(model).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    grad = torch.ones_like(expected)
    one.add_gradient(grad, flatten(model))
    torch.testing.assert_close(grad - 1, expected, atol=1e-5, rtol=1e-4)


def test_what_is_not_common_is_refused() -> None:
    for settings in (
        lambda k: SgdSettings(1, 5, MomentumSgd(0.1 + k)),
        lambda k: SgdSettings(1, 5 + k, MomentumSgd(0.1)),
        lambda k: SgdSettings(1, 5, MomentumSgd(0.1), radius=1.0),
    ):
        with pytest.raises(ValueError, match="must have the same batch size and optimiser"):
            train_together(learners(settings), IMAGES.__getitem__, LABELS.__getitem__)
    one = learners(lambda k: SgdSettings(1, 5, MomentumSgd(0.1)))[0]
    odd = Learner(one.model, one.examples, one.settings, one.generator, lambda net: torch.zeros(()))
    with pytest.raises(ValueError, match="only penalties of type Pull"):
        train_together([odd], IMAGES.__getitem__, LABELS.__getitem__)


def test_which_networks() -> None:
    dense = nn.Linear(4, 3)
    projected = ModelSettings(width=4, depth=1, projection=8)
    yes = [
        Linear((1, 4, 4), 3),
        two_layers(),
        build_model(ModelSettings("linear", projection=8), (1, 4, 4), 3, 0),
    ]
    no = [
        build_model(projected, (1, 8, 8), 3, 0),
        nn.Sequential(dense, nn.BatchNorm1d(3)),
        nn.Sequential(dense, nn.BatchNorm1d(3, affine=False, track_running_stats=False)),
        nn.Sequential(dense, nn.Dropout(0.5)),
        nn.Sequential(dense, nn.RReLU()),
        nn.Linear(4, 3).double(),
        type("Own", (nn.Sequential,), {})(dense, nn.ReLU()),  # its forward could do anything
    ]
    assert [trains_together(one) for one in yes + no] == [True] * 3 + [False] * 7
    assert worth_batching(dense, 2**15 // 4, 4)
    assert not worth_batching(dense, 2**15 // 4 + 1, 4)


@pytest.mark.parametrize("penalties", [False, True])
def test_memory_that_is_said(penalties: bool) -> None:
    """What a pass takes at most, counted by torch's profiler, stays within what is said of it."""
    each = learners(lambda k: SgdSettings(2, 5, MomentumSgd(0.1, 0.9)), penalties, (10,) * 6)
    said = sum(learner_bytes(one.model, 5, 16) for one in each)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        train_together(each, IMAGES.__getitem__, LABELS.__getitem__)
    held = most = 0
    for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert 0 < most <= said
