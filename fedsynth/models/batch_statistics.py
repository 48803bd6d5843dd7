"""A batch's mean and variance for each channel, differentiable, in few passes over its maps.

`torch.var_mean` with autograd takes several passes, and its reduction is slow on a CPU: forward and
backward together take ten times as long (docs/speed.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fedsynth.mixed_precision import widened


def batch_statistics(x_NC: Tensor) -> tuple[Tensor, Tensor]:
    """Returns means [C] and biased variances [C] over all axes but the second.

    They are float32 for feature maps in float32 or bfloat16, and float64 for float64. They are
    differentiable once, and not under `vmap`.

    >>> mean, variance = batch_statistics(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    >>> mean.tolist(), variance.tolist()
    ([2.0, 0.0], [1.0, 0.0])
    """
    return _Statistics.apply(x_NC)


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = torch.ops.aten.batch_norm_update_stats(widened(x), None, None, 0.0)
        ctx.save_for_backward(x, mean)
        return mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """∂mean/∂x = 1/n and ∂variance/∂x = 2·(x − mean)/n: batch norm's own kernel, with a
        variance of 1."""
        x, mean = ctx.saved_tensors
        n = x.numel() // x.shape[1]
        by_mean, by_variance = (g / n for g in gradients)
        return F.batch_norm(
            x, mean, torch.ones_like(mean), 2 * by_variance, by_mean, training=False, eps=0.0
        )
