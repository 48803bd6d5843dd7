"""Batch norm in condensation: many clients in one pass, with separate statistics.

Distribution matching with batch norm uses the statistics of the current batch: one client's real
images, or its synthetic ones. If a pass contains several clients, each image is normalised only by
the statistics of its own group of images; real and synthetic images never share a pass. Running
statistics are neither used nor updated.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


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
