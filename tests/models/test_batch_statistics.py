"""A batch's statistics and their gradients against `torch.var_mean` and autograd."""

from __future__ import annotations

import pytest
import torch

from fedsynth.models.batch_statistics import batch_statistics
from fedsynth.models.layout import channels_last


def weighed(mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """A function of both that is linear in neither."""
    weights = torch.arange(1.0, len(mean) + 1, device=mean.device, dtype=mean.dtype)
    return (weights * mean**3).sum() + (variance / weights).square().sum()


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 2, 5), (2, 3, 4)])
@pytest.mark.parametrize("last", [False, True])
def test_values_and_gradients(shape: tuple[int, ...], last: bool, device: torch.device) -> None:
    """Of features and of feature maps, in both orders of memory."""
    draws = torch.Generator().manual_seed(1)
    x = (torch.randn(shape, generator=draws, dtype=torch.float64) * 2 + 1).to(device)
    if last and len(shape) == 4:
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
