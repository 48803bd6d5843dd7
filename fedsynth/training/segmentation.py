"""The loss and the evaluation measure for segmentation.

The labels are masks with a class for each pixel. The loss is ½·(cross-entropy + 1 − Dice), and the
measure is the Dice coefficient, as in the public codes of HarmoFL and FedFA. Both average over all
classes, including the background. There are two differences. The codes compute the loss's Dice
coefficient over all pixels of a batch. Here it is computed for each image, so that an example's
loss depends only on the example. If a class is neither in the mask nor in the prediction, the
measure is 1. The codes return 0, but are applied only to images with foreground.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMOOTH = 1e-5  # of the codes' loss


def losses(logits_NCHW: Tensor, masks_NHW: Tensor) -> Tensor:
    """Computes each image's loss ½·(cross-entropy + 1 − Dice of the probabilities), [N]."""
    masks = masks_NHW.long()
    cross_entropy = F.cross_entropy(logits_NCHW, masks, reduction="none").mean(dim=(1, 2))
    p = logits_NCHW.softmax(dim=1)
    truth = F.one_hot(masks, p.shape[1]).movedim(3, 1)
    both, total = (p * truth).sum(dim=(2, 3)), (p + truth).sum(dim=(2, 3))
    return (cross_entropy + 1 - ((2 * both + SMOOTH) / (total + SMOOTH)).mean(dim=1)) / 2


def dice(logits_NCHW: Tensor, masks_NHW: Tensor) -> Tensor:
    """Computes each image's Dice coefficient, averaged over the classes, float64 [N].

    For a class with the predicted pixels A and the true pixels B, it is 2·|A ∩ B|/(|A| + |B|), or 1
    if both are empty.

    >>> logits = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).view(1, 2, 1, 2)  # predicts 1 and 0
    >>> dice(logits, torch.tensor([[[1, 1]]])).item()  # (0 + 2/3)/2
    0.3333333333333333
    """
    predicted = logits_NCHW.argmax(dim=1)
    values = []
    for label in range(logits_NCHW.shape[1]):
        a, b = predicted == label, masks_NHW == label
        both = (a & b).sum(dim=(1, 2)).double()
        total = (a.sum(dim=(1, 2)) + b.sum(dim=(1, 2))).double()
        values.append(torch.where(total > 0, 2 * both / total, 1.0))
    return torch.stack(values).mean(dim=0)


def example_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Computes each example's loss [N]: cross-entropy for classes, `losses` for masks."""
    if labels.dim() == 1:
        return F.cross_entropy(logits, labels, reduction="none")
    return losses(logits, labels)


def network_losses(network: nn.Module, x_NCHW: Tensor, labels: Tensor) -> Tensor:
    """Computes each example's loss [N] under a network."""
    return example_losses(network(x_NCHW), labels)
