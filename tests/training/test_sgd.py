"""Training on resident data equals torch's SGD; softmax regression's gradient equals autograd's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fedsynth.data.registry import dataset_spec
from fedsynth.features.registry import feature_map
from fedsynth.models.convnet import ConvNet
from fedsynth.models.flat import flatten
from fedsynth.models.on_features import OnFeatures, regression_gradients
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.training import many_clients, sgd
from fedsynth.training.many_clients import Learner, train_together
from fedsynth.training.sgd import MomentumSgd, Pull, SgdSettings, recorded, train_on


def problem(norm: str = "instance") -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noqa: TID251
        model = ConvNet((1, 8, 8), 4, width=4, depth=2, norm=norm)
        return model, torch.randn(30, 1, 8, 8), torch.randint(4, (30,))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("norm", "precision", "tolerance"),
    [
        ("instance", torch.float32, 1e-4),
        ("batch", torch.float32, 1e-4),
        ("batch", torch.bfloat16, 1e-2),
    ],
)
def test_recorded_steps_equal_eager_steps(
    norm: str, precision: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares a CUDA graph with eager steps: full and partial batches, projection, running
    statistics, and the casts of bfloat16."""
    trained = []
    for worth in (1, 10**9):
        model, x, y = problem(norm)
        model, x, y = model.cuda(), x.cuda(), y.cuda()
        monkeypatch.setattr("fedsynth.training.sgd.WORTH_RECORDING", worth)
        settings = SgdSettings(4, 8, MomentumSgd(0.1, 0.9, 1e-2), radius=1.0)
        order = torch.Generator().manual_seed(5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train_on(model, x.__getitem__, y, settings, order, precision=precision)
        trained.append(dict(model.state_dict()))
    torch.testing.assert_close(*trained, atol=tolerance, rtol=10 * tolerance)


def test_unrecordable_steps_run_eagerly(
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
def test_last_batch_of_one_example_is_doubled(examples: int) -> None:
    """Batches of two leave one of 5 examples, whose variance over the batch would not exist."""
    layers = [nn.Flatten(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)]
    net = nn.Sequential(*layers)
    x = torch.randn(examples, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    y, expected = torch.arange(examples) % 3, copy.deepcopy(net)
    settings = SgdSettings(1, 2, MomentumSgd(0.1))
    train_on(net, x.__getitem__, y, settings, torch.Generator().manual_seed(1))
    sgd = torch.optim.SGD(expected.parameters(), 0.1)
    for part in torch.randperm(examples, generator=torch.Generator().manual_seed(1)).split(2):
        part = part if len(part) == 2 else torch.cat([part, part])
        sgd.zero_grad()
        nn.functional.cross_entropy(expected(x[part]), y[part]).backward()
        sgd.step()
    torch.testing.assert_close(dict(net.state_dict()), dict(expected.state_dict()))


SPEC = dataset_spec("digits")


@pytest.mark.parametrize("bias", [False, True])
def test_regression_gradient_equals_autograd(bias: bool) -> None:
    """Learners have separate weights, batches and shares; a share of 0 excludes an example."""
    draws = torch.Generator().manual_seed(0)
    layers = [nn.Linear(5, 3, bias=bias) for _ in range(4)]
    x = torch.randn(4, 6, 5, generator=draws)
    labels = torch.randint(3, (4, 6), generator=draws)
    share = torch.rand(4, 6, generator=draws)
    share[1, 2:] = 0
    flat = torch.stack([torch.cat([p.flatten() for p in layer.parameters()]) for layer in layers])
    actual = regression_gradients(flat.detach(), x, labels, share, 3)
    for number, layer in enumerate(layers):
        losses = nn.functional.cross_entropy(layer(x[number]), labels[number], reduction="none")
        (losses @ share[number]).backward()
        expected = torch.cat([p.grad.flatten() for p in layer.parameters()])  # type: ignore[union-attr]
        torch.testing.assert_close(actual[number], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "features"])
@pytest.mark.parametrize("together", [False, True])
def test_closed_form_training_equals_autograd_training(
    kind: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five clients train on partial batches, with momentum and a pull."""
    draws = torch.Generator().manual_seed(1)
    shape = SPEC.image_shape
    x, y = torch.rand(60, *shape, generator=draws), torch.randint(10, (60,), generator=draws)
    base: nn.Module = OnFeatures(feature_map("pixels", shape), SPEC)
    if kind == "linear":
        base = build_model(ModelSettings("linear"), shape, 10, 0)
    size = len(flatten(base))
    pull = Pull(0.1, torch.ones(size), torch.full((size,), 0.01))
    settings = SgdSettings(3, 4, MomentumSgd(0.1, 0.9))
    weights = []
    for closed in (True, False):
        if not closed:
            for module in (many_clients, sgd):
                monkeypatch.setattr(module, "is_softmax_regression", lambda network: False)
        learners = []
        for k in range(5):
            examples, order = torch.arange(k, 60, 5)[: 7 + k], torch.Generator().manual_seed(k)
            learners.append(Learner(copy.deepcopy(base), examples, settings, order, pull))
        if together:
            train_together(learners, x.__getitem__, y.__getitem__)
        else:
            for learner in learners:
                images, labels = x[learner.examples], y[learner.examples]
                train_on(
                    learner.model,
                    images.__getitem__,
                    labels,
                    settings,
                    learner.generator,
                    penalty=pull,
                )
        weights.append(torch.stack([flatten(learner.model) for learner in learners]))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)
