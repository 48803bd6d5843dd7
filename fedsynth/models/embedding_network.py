"""The base class of the package's networks: `classifier` on an embedding."""

from __future__ import annotations

from torch import Tensor, nn

from fedsynth.errors import SettingError


class EmbeddingNetwork(nn.Module):
    """A network whose logits are `classifier(embed(x))`.

    Attributes:
        classifier: the last linear layer.
        embedding_size: width of the embedding.
        largest_activation: scalars of an image's largest activation.
    """

    classifier: nn.Linear
    embedding_size: int
    largest_activation: int

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Returns embeddings, [N, embedding_size]."""
        raise NotImplementedError  # abstract

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Returns logits [N, classes] of normalised images [N, C, H, W]."""
        return self.classifier(self.embed(x_NCHW))


def require_size(name: str, image_shape: tuple[int, int, int], min_side: int) -> None:
    """Refuses images that are too small for an architecture.

    Raises:
        SettingError: names the architecture and the smallest side.
    """
    _, height, width = image_shape
    if min(height, width) < min_side:
        reason = f"needs images of at least {min_side}×{min_side}, got {height}×{width}"
        raise SettingError("model", "name", reason, value=name)
