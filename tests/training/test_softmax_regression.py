"""Softmax regression's gradient in closed form beside autograd's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedsynth.data.registry import dataset_spec
from fedsynth.features.registry import feature_map
from fedsynth.models.on_features import OnFeatures, regression_gradients
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.training import many_clients, sgd
from fedsynth.training.many_clients import Learner, train_together
from fedsynth.training.sgd import MomentumSgd, Pull, SgdSettings, train_on

SPEC = dataset_spec("digits")


@pytest.mark.parametrize("bias", [False, True])
def test_it_is_autograds_gradient(bias: bool) -> None:
    """Of learners with weights, batches and shares of their own; a share of 0 counts for
    nothing."""
    draws = torch.Generator().manual_seed(0)
    layers = [nn.Linear(5, 3, bias=bias) for _ in range(4)]
    x = torch.randn(4, 6, 5, generator=draws)
    labels = torch.randint(3, (4, 6), generator=draws)
    share = torch.rand(4, 6, generator=draws)
    share[1, 2:] = 0
    flat = torch.stack([torch.cat([p.flatten() for p in one.parameters()]) for one in layers])
    found = regression_gradients(flat.detach(), x, labels, share, 3)
    for number, layer in enumerate(layers):
        losses = nn.functional.cross_entropy(layer(x[number]), labels[number], reduction="none")
        (losses @ share[number]).backward()
        expected = torch.cat([p.grad.flatten() for p in layer.parameters()])  # type: ignore[union-attr]
        torch.testing.assert_close(found[number], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "features"])
@pytest.mark.parametrize("together", [False, True])
def test_training_is_the_same_with_and_without_it(
    kind: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five clients of sizes that fill no batch, with momentum and a pull."""
    draws = torch.Generator().manual_seed(1)
    shape = SPEC.image_shape
    x = torch.rand(60, *shape, generator=draws)
    y = torch.randint(10, (60,), generator=draws)
    base: nn.Module = OnFeatures(feature_map("pixels", shape), SPEC)
    if kind == "linear":
        base = build_model(ModelSettings("linear"), shape, 10, 0)
    ends = []
    for closed in (True, False):
        if not closed:
            for module in (many_clients, sgd):
                monkeypatch.setattr(module, "is_softmax_regression", lambda network: False)
        made = []
        for client in range(5):
            model = copy.deepcopy(base)
            size = sum(p.numel() for p in model.parameters())
            pull = Pull(0.1, torch.ones(size), torch.full((size,), 0.01))
            settings = SgdSettings(3, 4, MomentumSgd(0.1, 0.9))
            where = torch.arange(client, 60, 5)[: 7 + client]
            generator = torch.Generator().manual_seed(client)
            made.append(Learner(model, where, settings, generator, pull))
        if together:
            train_together(made, lambda rows: x[rows], lambda rows: y[rows])
        else:
            for one in made:
                train_on(
                    one.model,
                    lambda rows, one=one: x[one.examples[rows]],  # type: ignore[misc]
                    y[one.examples],
                    one.settings,
                    one.generator,
                    penalty=one.penalty,
                )
        ends.append([p.detach().clone() for one in made for p in one.model.parameters()])
    for first, second in zip(*ends, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)
