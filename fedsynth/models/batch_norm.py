"""Batch norm for condensation, in which one pass may contain the images of several clients.

Distribution matching with batch norm uses the statistics of the current batch, which consists of
one client's real images or of its synthetic images. If a pass contains several clients, each image
is normalised only by the statistics of its group of images. Real and synthetic images are never in
one pass. Running statistics are neither used nor updated.

`batch_statistics` computes the mean and variance of each channel, with gradients, in few passes
over memory. `torch.var_mean` with autograd needs ten times as long on a CPU (docs/speed.md).
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
    """States which images of the next pass share statistics.

    All batch norms of a network use the same object.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights_GN = torch.empty(0, 0)
        self.group_N = torch.empty(0, dtype=torch.int64)

    @staticmethod
    def of(network: nn.Module) -> SharedStatistics:
        """Returns the object that the batch norms of a network use.

        Raises:
            ValueError: the network was not made by `with_grouped_statistics`.
        """
        for module in network.modules():
            if isinstance(module, SharedStatistics):
                return module
        raise ValueError("the network has no grouped batch norm")

    def assign(self, group_N: Tensor, groups: int) -> None:
        """Sets the group of each image in the next pass: integers [N] in [0, groups)."""
        self.group_N = group_N
        members = (torch.arange(groups, device=group_N.device)[:, None] == group_N[None, :]).float()
        self.weights_GN = members / members.sum(dim=1, keepdim=True).clamp_min(1)


class GroupedBatchNorm(nn.Module):
    """Batch norm that normalises each group of images by the statistics of this group.

    The input is [N, C, H, W] or [N, C]. The affine parameters are shared with `layer`.
    """

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
        """Returns, for each image, the mean over the images of its group, [N, C]."""
        return (self.shared.weights_GN @ values_NC)[self.shared.group_N]


def has_batch_norm(network: nn.Module) -> bool:
    """Returns True if a network has a batch norm layer."""
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in network.modules())


def with_grouped_statistics(network: nn.Module) -> nn.Module:
    """Returns a copy of a network in which each batch norm is a `GroupedBatchNorm`.

    The order of the parameters stays the same. A network without batch norm is returned itself.
    """
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
    """Computes the mean [C] and the biased variance [C] of each channel, over all other axes.

    The results are float32 for inputs in float32 or bfloat16, and float64 for inputs in float64.
    They can be differentiated once, and not under `vmap`.

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
        """Computes the gradient from ∂mean/∂x = 1/n and ∂variance/∂x = 2·(x − mean)/n.

        The kernel of batch norm, called with a variance of 1, computes this sum.
        """
        x, mean = ctx.saved_tensors
        n = x.numel() // x.shape[1]
        by_mean, by_variance = (g / n for g in gradients)
        return F.batch_norm(
            x, mean, torch.ones_like(mean), 2 * by_variance, by_mean, training=False, eps=0.0
        )
