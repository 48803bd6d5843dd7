"""Batch norm in condensation: many clients in one pass, with separate statistics.

Distribution matching with batch norm uses the statistics of the current batch: one client's real
images, or its synthetic ones. If a pass contains several clients, each image is normalised only by
the statistics of its own group of images; real and synthetic images never share a pass. Running
statistics are neither used nor updated.

A batch's mean and variance for each channel, differentiable, in few passes over its maps.

`torch.var_mean` with autograd takes several passes, and its reduction is slow on a CPU: forward and
backward together take ten times as long (docs/speed.md).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fedsynth.mixed_precision import widened


class SharedStatistics(nn.Module):
    """The groups of images that share statistics in the next pass; one object for all layers of a
    network."""

    def __init__(self) -> None:
        super().__init__()
        self.weights_GN = torch.empty(0, 0)
        self.group_N = torch.empty(0, dtype=torch.int64)

    @staticmethod
    def of(network: nn.Module) -> SharedStatistics:
        """Returns the network's instance.

        Raises:
            ValueError: the network does not come from `with_grouped_statistics`.
        """
        for module in network.modules():
            if isinstance(module, SharedStatistics):
                return module
        raise ValueError("the network has no grouped batch norm")

    def assign(self, group_N: Tensor, groups: int) -> None:
        """Sets the group (0, 1, …, groups − 1) of each image [N] of the next pass."""
        self.group_N = group_N
        members = (torch.arange(groups, device=group_N.device)[:, None] == group_N[None, :]).float()
        self.weights_GN = members / members.sum(dim=1, keepdim=True).clamp_min(1)


class GroupedBatchNorm(nn.Module):
    """Batch norm of [N, C, H, W] or [N, C] in training mode within each group of images; it shares
    the layer's affine parameters."""

    def __init__(self, layer: nn.BatchNorm1d | nn.BatchNorm2d, shared: SharedStatistics) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.eps = layer.eps
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        x_NCHW = x if x.dim() == 4 else x[:, :, None, None]
        mean = self._by_group(x_NCHW.mean(dim=(2, 3), dtype=torch.float32))
        centred = x_NCHW - mean[:, :, None, None].to(x_NCHW.dtype)
        scale = torch.rsqrt(
            self._by_group(centred.square().mean(dim=(2, 3), dtype=torch.float32)) + self.eps
        )
        scale = (scale * self.weight).to(x_NCHW.dtype)
        return (centred * scale[:, :, None, None] + self.bias[:, None, None]).view(x.shape)

    def _by_group(self, values_NC: Tensor) -> Tensor:
        """Returns the group's mean for each image, [N, C]."""
        return (self.shared.weights_GN @ values_NC)[self.shared.group_N]


def has_batch_norm(network: nn.Module) -> bool:
    """Returns whether a network has a batch norm."""
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in network.modules())


def with_grouped_statistics(network: nn.Module) -> nn.Module:
    """Returns a copy in which each batch norm is a `GroupedBatchNorm`, with its parameters in the
    same order; a network without batch norm itself."""
    if not has_batch_norm(network):
        return network
    network = copy.deepcopy(network)
    shared = SharedStatistics()
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
                setattr(parent, name, GroupedBatchNorm(layer, shared))
    return network


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
