"""Networks from timm and torchvision, with random or public pretrained weights."""

from __future__ import annotations

from collections.abc import Callable

from opacus.validators import ModuleValidator
from torch import Tensor

from fedsynth.errors import SettingError
from fedsynth.features.feature_map import Shape
from fedsynth.features.pretrained import pretrained_network
from fedsynth.models.layers import EmbeddingNetwork, has_batch_norm
from fedsynth.privacy.row_products import PaddedLinear


class LibraryNetwork(EmbeddingNetwork):
    """A timm or torchvision network with a new last layer.

    The network maps normalised images [N, C, H, W] to logits [N, classes]. Grey images become
    colour images. Images keep their size, unless the network accepts only one size.

    Args:
        name: timm:NAME or torchvision:NAME.
        image_shape: the image shape (C, H, W). C must be 1 or 3.
        classes: the number of classes.
        norm: "own", or "group" to replace each batch norm by a group norm, as DP-SGD needs.
        weights: the setting `model.weights`.

    Raises:
        SettingError: as for `pretrained_network`, or the images do not have 1 or 3 channels.

    >>> network = LibraryNetwork("torchvision:squeezenet1_0", (1, 32, 32), classes=2)
    Traceback (most recent call last):
    fedsynth.errors.SettingError: model.name=torchvision:squeezenet1_0 has no linear layer, ...
    """

    def __init__(
        self, name: str, image_shape: Shape, classes: int, norm: str = "own", weights: str = ""
    ) -> None:
        super().__init__()
        channels, height, width = image_shape
        if channels not in (1, 3):
            reason = f"requires images with 1 or 3 channels, got {channels}. Choose another model"
            raise SettingError("model", "name", reason, value=name)
        loaded = pretrained_network(name, weights, ("model", "name"))
        self.body = loaded.network
        if norm == "group":
            self.body = ModuleValidator.fix(loaded.network)
            if has_batch_norm(self.body):
                reason = (
                    f"is 'group', but {name}'s batch norms cannot be replaced. Use a network "
                    "with layer norm"
                )
                raise SettingError("model", "norm", reason)
        self._prepare: Callable[[Tensor], Tensor] = _in_colour
        if loaded.fixed_size:
            self._prepare = loaded.resized
        self.classifier = PaddedLinear(loaded.dimension, classes)
        self.embedding_size = loaded.dimension
        self.largest_activation = 64 * height * width

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes the embeddings of normalised images, [N, embedding_size]."""
        return self.body(self._prepare(x_NCHW))


def _in_colour(x_NCHW: Tensor) -> Tensor:
    return x_NCHW.expand(-1, 3, -1, -1)
