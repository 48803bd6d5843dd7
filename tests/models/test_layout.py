"""The order of feature maps in memory changes no value, and goes through vmap and autograd."""

from __future__ import annotations

import pytest
import torch

from fedsynth.models.layout import channels_last
from fedsynth.models.registry import ModelSettings, build_model


@pytest.mark.parametrize("channels", [1, 3])
def test_values_stay_and_channels_are_side_by_side(channels: int) -> None:
    x = torch.arange(2.0 * channels * 6).view(2, channels, 2, 3)
    made = channels_last(x)
    assert torch.equal(made, x)
    assert made.stride() == (channels * 6, 1, 3 * channels, channels)
    assert channels_last(made).data_ptr() == made.data_ptr()  # no second copy
    assert channels_last(x[:0]).shape == (0, channels, 2, 3)
    on_gpu = x.to("meta")
    assert channels_last(on_gpu) is on_gpu


def test_it_goes_through_vmap_and_its_gradient_is_the_identitys() -> None:
    x = torch.randn(3, 2, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.vmap(channels_last)(x), x)
    one = x[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad((channels_last(one) * x[1]).sum(), one)
    assert torch.equal(gradient, x[1])


@pytest.mark.parametrize("name", ["lenet5", "cnn1", "cnn2"])
@pytest.mark.parametrize("channels", [1, 3])
def test_networks_with_max_pools_are_those_of_the_usual_order(
    name: str, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and gradients, with ReLU before the pool as it is written in papers."""
    network = build_model(ModelSettings(name), (channels, 28, 28), 10, seed=0).double()
    x = torch.randn(5, channels, 28, 28, generator=torch.Generator().manual_seed(1)).double()
    y = torch.arange(5)
    monkeypatch.setattr("fedsynth.models.small.channels_last", lambda x_NCHW: x_NCHW)
    plain = [layer for layer in network.modules() if isinstance(layer, torch.nn.MaxPool2d)]
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs: (torch.relu(inputs[0]),))
        for layer in plain
    ]
    expected = differentiated(network, x, y)
    for hook in hooks:
        hook.remove()
    monkeypatch.undo()
    for ours, theirs in zip(differentiated(network, x, y), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def differentiated(
    network: torch.nn.Module, x: torch.Tensor, y: torch.Tensor
) -> list[torch.Tensor]:
    """Logits, and the gradients of weights and images."""
    x = x.clone().requires_grad_()
    logits = network.train()(x)
    loss = torch.nn.functional.cross_entropy(logits, y)
    return [logits, *torch.autograd.grad(loss, [x, *network.parameters()])]
