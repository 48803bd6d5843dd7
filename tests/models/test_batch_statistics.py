"""The order of feature maps in memory, and a batch's statistics, against torch's own operations."""

from __future__ import annotations

import pytest
import torch

from fedsynth.models.convnet import channels_last
from fedsynth.models.layers import batch_statistics
from fedsynth.models.registry import ModelSettings, build_model


def weighed(mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """A function of both that is linear in neither."""
    weights = torch.arange(1.0, len(mean) + 1, device=mean.device, dtype=mean.dtype)
    return (weights * mean**3).sum() + (variance / weights).square().sum()


@pytest.mark.parametrize(("shape", "last"), [((5, 3), False), ((4, 3, 2, 5), True)])
def test_values_and_gradients(shape: tuple[int, ...], last: bool, device: torch.device) -> None:
    """Of features and of feature maps, in both orders of memory."""
    draws = torch.Generator().manual_seed(1)
    x = (torch.randn(shape, generator=draws, dtype=torch.float64) * 2 + 1).to(device)
    if last:
        x = channels_last(x)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    mean, variance = batch_statistics(one)
    axes = [0, *range(2, x.dim())]
    true_variance, true_mean = torch.var_mean(other, dim=axes, unbiased=False)
    torch.testing.assert_close((mean, variance), (true_mean, true_variance))
    weighed(mean, variance).backward()
    weighed(true_mean, true_variance).backward()
    torch.testing.assert_close(one.grad, other.grad)


def test_half_precision_is_summed_in_full() -> None:
    """The statistics of bfloat16 values are float32, and those of the values."""
    draws = torch.Generator().manual_seed(1)
    x = (torch.randn(64, 3, 8, 8, generator=draws) + 4).bfloat16().requires_grad_()
    mean, variance = batch_statistics(x)
    assert mean.dtype == variance.dtype == torch.float32
    true_variance, true_mean = torch.var_mean(x.float(), dim=[0, 2, 3], unbiased=False)
    torch.testing.assert_close(mean, true_mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(variance, true_variance, rtol=1e-4, atol=1e-4)
    weighed(mean, variance).backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


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


@pytest.mark.parametrize(("name", "channels"), [("lenet5", 1), ("cnn1", 3)])
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
