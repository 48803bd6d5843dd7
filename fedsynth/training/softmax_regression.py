"""The gradient of softmax regression in closed form, for one network or for many at once.

A step of such a small network spends most of its time in Python and in kernel launches. The
gradient of the mean cross-entropy is (p − y) ⊗ x, which two matrix products compute with fewer
calls than automatic differentiation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedsynth.models.on_features import OnFeatures
from fedsynth.models.small import Linear


def is_softmax_regression(network: nn.Module) -> bool:
    """Returns whether a network is one linear layer, `classifier`, on an embedding without
    parameters."""
    return type(network) is Linear or (type(network) is OnFeatures and network.linear)


def regression_step(layer: nn.Linear, x_BD: Tensor, labels_B: Tensor) -> None:
    """Computes the gradient of the mean cross-entropy of a linear classifier, and writes the
    gradient into `layer.weight.grad` and `layer.bias.grad` in place.

    >>> layer = nn.Linear(1, 2)
    >>> for p in layer.parameters():
    ...     p.data.zero_()
    ...     p.grad = torch.zeros_like(p)
    tensor([[0.],
            [0.]])
    tensor([0., 0.])
    >>> regression_step(layer, torch.ones(1, 1), torch.zeros(1, dtype=torch.int64))
    >>> layer.bias.grad
    tensor([-0.5000,  0.5000])
    """
    with torch.no_grad():
        wrong_BC = layer(x_BD).softmax(dim=1)
        labels_B1 = labels_B[:, None]
        wrong_BC.scatter_add_(1, labels_B1, wrong_BC.new_full((1, 1), -1.0).expand_as(labels_B1))
        wrong_BC /= len(x_BD)
        torch.mm(wrong_BC.T, x_BD, out=layer.weight.grad)
        if layer.bias is not None:
            torch.sum(wrong_BC, 0, out=layer.bias.grad)


def regression_gradients(
    flat_AP: Tensor, x_ABD: Tensor, labels_AB: Tensor, share_AB: Tensor, classes: int
) -> Tensor:
    """Computes the gradient of the weighted cross-entropy of many linear classifiers with respect
    to their weights.

    Args:
        flat_AP: for each learner, the weights [classes·D], followed by the bias [classes] if the
            layer has one.
        x_ABD: the inputs of the layer for each learner's batch.
        labels_AB: the labels, int64.
        share_AB: the weight of each example in the loss of its learner.
        classes: C.

    Returns:
        The gradients [A, P].

    >>> zero, one = torch.zeros(1, 2), torch.ones(1, 1)
    >>> regression_gradients(zero, one[None], torch.zeros(1, 1, dtype=torch.int64), one, classes=2)
    tensor([[-0.5000,  0.5000]])
    """
    width = x_ABD.shape[-1]
    weights = flat_AP[:, : classes * width].unflatten(1, (classes, width))
    bias = flat_AP[:, classes * width :]
    logits = x_ABD @ weights.transpose(1, 2)
    if bias.shape[1]:
        logits += bias[:, None]
    wrong = logits.softmax(dim=2) * share_AB[..., None]
    wrong.scatter_add_(2, labels_AB[..., None], -share_AB[..., None])
    gradient = (wrong.transpose(1, 2) @ x_ABD).flatten(1)
    return torch.cat([gradient, wrong.sum(dim=1)], dim=1) if bias.shape[1] else gradient
