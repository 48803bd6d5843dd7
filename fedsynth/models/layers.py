"""Parts of networks: a base class, MOON's projection head, and norm layers.

The package's networks consist of an embedding and a classifier. MOON's head can be added before any
network's last layer (Li, He and Song 2021, arXiv 2103.16257, Sec. 3.3 and the public code). The
head computes h ↦ W₂·relu(W₁h), where W₁ is a square matrix. The head's output is the embedding. A
new linear layer maps the embedding to the logits.

In condensation, one forward pass may contain several clients' images. Distribution matching with
batch norm uses the current batch's statistics, which should cover only one client's real images, or
only its synthetic images. `GroupedBatchNorm` therefore normalises each image only by its own
group's statistics. Real and synthetic images are never in one pass. Running statistics are neither
used nor updated.

`batch_statistics` computes channel means and variances, with gradients, in few passes over memory.
`torch.var_mean` with autograd takes ten times as long on a CPU (docs/speed.md).
"""

from __future__ import annotations

import copy
from types import UnionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedsynth.errors import SettingError
from fedsynth.mixed_precision import widened
from fedsynth.privacy.row_products import PaddedLinear


class EmbeddingNetwork(nn.Module):
    """A network whose logits are `classifier(embed(x))`.

    Attributes:
        classifier: the last linear layer.
        embedding_size: the number of values in an embedding.
        largest_activation: the number of values in an image's largest activation, used to estimate
            memory.
    """

    classifier: nn.Linear
    embedding_size: int
    largest_activation: int

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes the embeddings of normalised images, [N, embedding_size]."""
        raise NotImplementedError  # abstract

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Computes the logits [N, classes] of normalised images [N, C, H, W]."""
        return self.classifier(self.embed(x_NCHW))


def require_size(name: str, image_shape: tuple[int, int, int], min_side: int) -> None:
    """Checks that images are large enough for an architecture.

    Raises:
        SettingError: an image side is smaller than `min_side`.
    """
    _, height, width = image_shape
    if min(height, width) < min_side:
        reason = (
            f"requires at least {min_side}×{min_side} pixels, got {height}×{width}. Choose "
            "another model"
        )
        raise SettingError("model", "name", reason, value=name)


class Projected(EmbeddingNetwork):
    """A network with MOON's projection head between its embedding and its last layer.

    The network maps normalised images [N, C, H, W] to logits [N, classes].

    Args:
        body: a network with `embed` and `classifier`. The classifier is removed.
        size: the size of the new embedding (256 in the paper).
        classes: the number of classes.
    """

    dense = True

    def __init__(self, body: nn.Module, size: int, classes: int) -> None:
        super().__init__()
        last: nn.Linear = body.classifier  # type: ignore[assignment]
        body.classifier = nn.Identity()
        self.body = body
        self.hidden = PaddedLinear(last.in_features, last.in_features)
        self.projection = PaddedLinear(last.in_features, size)
        self.classifier = PaddedLinear(size, classes)
        self.embedding_size = size
        self.largest_activation = body.largest_activation  # type: ignore[assignment]
        self.stage_names = tuple(f"body.{stage}" for stage in getattr(body, "stage_names", ()))

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes the embeddings of normalised images, [N, size]."""
        of_body = self.body.embed(x_NCHW)  # type: ignore[operator]
        return self.projection(torch.relu(self.hidden(of_body)))


class SharedStatistics(nn.Module):
    """The assignment of images to groups for the batch norms of a network.

    Each `GroupedBatchNorm` normalises a group's images by the group's own statistics. All batch
    norms in a network share one object.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights_GN = torch.empty(0, 0)
        self.group_N = torch.empty(0, dtype=torch.int64)

    @staticmethod
    def of(network: nn.Module) -> SharedStatistics:
        """Returns the `SharedStatistics` object that the batch norms of a network share.

        `with_grouped_statistics` must have made the network.
        """
        return next(layer for layer in network.modules() if isinstance(layer, SharedStatistics))

    def assign(self, group_N: Tensor, groups: int) -> None:
        """Sets the group of each image for the next forward pass.

        Groups are integers [N] in [0, groups).
        """
        self.group_N = group_N
        members = (torch.arange(groups, device=group_N.device)[:, None] == group_N[None, :]).float()
        self.weights_GN = members / members.sum(dim=1, keepdim=True).clamp_min(1)


class GroupedBatchNorm(nn.Module):
    """A batch norm that normalises each group of images by the group's own statistics.

    The input is [N, C, …]. The affine parameters, if there are any, are shared with `layer`.
    """

    def __init__(self, layer: nn.BatchNorm1d | nn.BatchNorm2d, shared: SharedStatistics) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.eps = layer.eps
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        # the layout of images, whatever the input is, as its strides decide the bits of sums
        x_NCHW = x if x.dim() == 4 else x.reshape(*x.shape[:2], -1, 1)
        mean = self._by_group(x_NCHW.mean(dim=(2, 3), dtype=torch.float32))
        centred = x_NCHW - mean[:, :, None, None].to(x_NCHW.dtype)
        scale = torch.rsqrt(
            self._by_group(centred.square().mean(dim=(2, 3), dtype=torch.float32)) + self.eps
        )
        if self.weight is not None:
            scale = scale * self.weight
        normalised = centred * scale.to(x_NCHW.dtype)[:, :, None, None]
        if self.bias is not None:
            normalised = normalised + self.bias[:, None, None]
        return normalised.view(x.shape)

    def _by_group(self, values_NC: Tensor) -> Tensor:
        """Averages values by group. Each image gets its group's mean, [N, C]."""
        return (self.shared.weights_GN @ values_NC)[self.shared.group_N]


def has_batch_norm(network: nn.Module) -> bool:
    """Returns True if a network contains batch norm."""
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in network.modules())


def with_grouped_statistics(network: nn.Module) -> nn.Module:
    """Copies a network, with a `GroupedBatchNorm` in place of each batch norm.

    The parameter order stays the same. A network without batch norm is returned unchanged, without
    a copy.
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
    """Computes each channel's mean [C] and biased variance [C] over all other axes.

    Results are float32 for float32 or bfloat16 inputs, and float64 for float64 inputs. They can be
    differentiated once, and not under `vmap`.

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
        """Computes the gradient with respect to x: ∂mean/∂x = 1/n, ∂variance/∂x = 2·(x − mean)/n.

        Batch norm's kernel, called with a variance of 1, computes the sum of both terms.
        """
        x, mean = ctx.saved_tensors
        n = x.numel() // x.shape[1]
        by_mean, by_variance = (g / n for g in gradients)
        ones = torch.ones_like(mean)
        # not `F.batch_norm`, which refuses eps = 0 in torch 2.11
        return torch.batch_norm(x, 2 * by_variance, by_mean, mean, ones, False, 0.0, 0.0, False)


def group_norm(channels: int) -> nn.GroupNorm:
    """Creates a group norm with at most 32 groups, as Wu and He (2018) and Opacus use it."""
    return nn.GroupNorm(next(g for g in (32, 16, 8, 4, 2, 1) if channels % g == 0), channels)


def check_embedding(
    method: str, model: nn.Module, last: type[nn.Module] | UnionType = nn.Linear
) -> None:
    """Checks that a network has an embedding and a classifier.

    Required are a function `embed` and a layer `classifier` of the type `last`, whose weights are
    `classifier.weight` in the network's state.

    Raises:
        SettingError: `embed` or `classifier` is missing, or the network's output is not
            `classifier(embed(x))`.
    """
    layer = dict(model.named_children()).get("classifier")
    if not (hasattr(model, "embed") and isinstance(layer, last)):
        reason = (
            f"must be a network with `embed` and a linear `classifier` for {method}. Define "
            "embed(x) and self.classifier = nn.Linear(embedding_size, classes)"
        )
        raise SettingError("model", "name", reason)
    if not getattr(model, "classifies_embeddings", True):
        reason = f"must return classifier(embed(x)) from `forward` for {method}. Correct `forward`"
        raise SettingError("model", "name", reason)
