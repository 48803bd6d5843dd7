"""A small model on a fixed feature map, which is linear or has one hidden layer.

The inputs of the model are the vectors z = clip₁(φ(x)/R), whose norm is at most 1. φ and R belong
to a `FeatureMap`. The vector of an image depends only on this image, because the feature map is
fixed before data are read. The gradient of a linear model for one example is (p − y) ⊗ z. Tramèr
and Boneh (2021, arXiv 2011.11660) train such a model by DP-SGD.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedsynth.data.images import pixel_constants
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import SettingError
from fedsynth.features.feature_map import LANES, FeatureMap, filled_up, row_product
from fedsynth.models.embedding_network import EmbeddingNetwork
from fedsynth.models.feature_linear import embedded


class OnFeatures(EmbeddingNetwork):
    """A network on a fixed feature map, which returns logits [N, classes].

    The input is normalised images [N, C, H, W], or vectors z [N, d] that were computed before. The
    feature map is not part of the network's state, so it is never sent.

    Args:
        feature_map: φ and its constants.
        spec: the specification of the images.
        hidden: the number of units in the hidden layer, or 0 for a linear model without a bias. The
            number is rounded up to a multiple of 16. The layer's input is √d·z, because its initial
            weights expect values of about 1. The input is padded with zeros to a multiple of 16.
    """

    dense = True

    def __init__(self, feature_map: FeatureMap, spec: DatasetSpec, hidden: int = 0) -> None:
        super().__init__()
        self.feature_map = feature_map
        self.spec = spec
        d = feature_map.dimension
        # a private run's rows must not depend on their position: see `row_products`
        wide = d + -d % LANES
        hidden += -hidden % LANES
        self.hidden = nn.Linear(wide, hidden) if hidden else nn.Identity()
        self.embedding_size = self.largest_activation = hidden or d
        self.classifier = nn.Linear(self.embedding_size, spec.classes, bias=bool(hidden))

    @property
    def linear(self) -> bool:
        """True if the model is linear. The embedding is then z, which training does not change."""
        return isinstance(self.hidden, nn.Identity)

    def vectors(self, features_Nd: Tensor) -> Tensor:
        """Computes the vectors z [N, d] from features φ(x)."""
        return embedded(features_Nd, 0.0, self.feature_map.radius)

    def embed(self, x: Tensor) -> Tensor:
        """Computes the embeddings [N, embedding_size].

        They are the output of the hidden layer, or z if the model is linear.
        """
        z = x
        if x.dim() == 4:
            mean, std = pixel_constants(self.spec, x.device)
            z = self.vectors(self.feature_map(x * std + mean))
        if self.linear:
            return z
        return torch.relu(self.hidden(filled_up(math.sqrt(z.shape[1]) * z)))

    def from_features(self, features_Nd: Tensor) -> Tensor:
        """Computes the logits [N, classes] from features φ(x)."""
        return self(self.vectors(features_Nd))

    def gradient_factors(self, x: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
        """Returns p − y [N, classes] and z [N, d] of a linear model.

        For each example, their outer product is the gradient of the cross-entropy.
        """
        z = self.embed(x)
        p = row_product(z, self.classifier.weight).softmax(dim=1)
        return p - nn.functional.one_hot(labels_N, p.shape[1]), z


def input_size(network: nn.Module, spec: DatasetSpec) -> int:
    """Returns the number of values in one input of a network.

    These are the coordinates of z for a model on features, and otherwise the pixels of an image.
    """
    if isinstance(network, OnFeatures):
        return network.feature_map.dimension
    return math.prod(spec.image_shape)


def check_learned_embedding(method: str, model: nn.Module) -> None:
    """Raises an error if a model's embedding is fixed, although a method needs a learned embedding.

    Raises:
        SettingError: the model is a linear model on features.
    """
    if isinstance(model, OnFeatures) and model.linear:
        raise SettingError(
            "model",
            "name",
            f"must be mlp with model.features, because {method} needs a learned embedding, and the "
            "embedding of a linear model is the fixed feature map",
        )
