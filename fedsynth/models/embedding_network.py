"""The base class of the package's networks, which consist of an embedding and a classifier."""

from __future__ import annotations

from torch import Tensor, nn

from fedsynth.errors import SettingError


class EmbeddingNetwork(nn.Module):
    """A network whose logits are `classifier(embed(x))`.

    Attributes:
        classifier: the last linear layer.
        embedding_size: the number of values in an embedding.
        largest_activation: the number of values in the largest activation of one image. It is used
            to estimate memory.
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
    """Raises an error if images are too small for an architecture.

    Raises:
        SettingError: a side of the images is smaller than `min_side`.
    """
    _, height, width = image_shape
    if min(height, width) < min_side:
        reason = f"needs images of at least {min_side}×{min_side}, got {height}×{width}"
        raise SettingError("model", "name", reason, value=name)
