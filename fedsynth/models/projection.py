"""MOON's projection head, which can be added before the last layer of any network (Li, He and Song
2021, arXiv 2103.16257, Sec. 3.3 and the public code).

The head computes h ↦ W₂·relu(W₁h), where W₁ is a square matrix. The output of the head is the
embedding. A new linear layer maps the embedding to the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedsynth.models.embedding_network import EmbeddingNetwork


class Projected(EmbeddingNetwork):
    """A network with a projection head, which maps normalised images [N, C, H, W] to logits
    [N, classes].

    Args:
        body: a network with `embed` and `classifier`. The classifier is removed from it.
        size: the size of the new embedding, which is 256 in the paper.
        classes: the number of classes.
    """

    dense = True

    def __init__(self, body: nn.Module, size: int, classes: int) -> None:
        super().__init__()
        last: nn.Linear = body.classifier  # type: ignore[assignment]
        name = next(name for name, child in body.named_children() if child is last)
        setattr(body, name, nn.Identity())
        self.body = body
        self.hidden = nn.Linear(last.in_features, last.in_features)
        self.projection = nn.Linear(last.in_features, size)
        self.classifier = nn.Linear(size, classes)
        self.embedding_size = size
        self.largest_activation = body.largest_activation  # type: ignore[assignment]
        self.stage_names = tuple(f"body.{stage}" for stage in getattr(body, "stage_names", ()))

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes the embeddings of normalised images, [N, size]."""
        of_body = self.body.embed(x_NCHW)  # type: ignore[operator]
        return self.projection(torch.relu(self.hidden(of_body)))
