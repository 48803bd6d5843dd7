"""A small model on a fixed feature map: a linear one, or one with a hidden layer.

It is trained on z = clip₁(φ(x)/R), of norm at most 1, with φ and R of a `FeatureMap`: a function of
one image only, fixed before data are read. The per-example gradient of a linear model is
(p − y) ⊗ z (Tramèr & Boneh 2021, arXiv 2011.11660, train such a model by DP-SGD).
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
    """`forward`: precomputed vectors z [N, d] or normalised images [N, C, H, W] to logits
    [N, classes]. It has no buffers: φ is never sent.

    Args:
        feature_map: φ and its constants.
        spec: specification of the images.
        hidden: units of a hidden layer, rounded up to a multiple of 16. Its input is √d·z
            (coordinates of about 1, as its initial weights expect), padded with zeros to such a
            multiple. 0: the model is linear, without a bias.
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
        """True if the embedding is z, which training does not change."""
        return isinstance(self.hidden, nn.Identity)

    def vectors(self, features_Nd: Tensor) -> Tensor:
        """Returns z of features φ(x), [N, d]."""
        return embedded(features_Nd, 0.0, self.feature_map.radius)

    def embed(self, x: Tensor) -> Tensor:
        """Returns z or the hidden layer's output, [N, embedding_size]."""
        z = x
        if x.dim() == 4:
            mean, std = pixel_constants(self.spec, x.device)
            z = self.vectors(self.feature_map(x * std + mean))
        if self.linear:
            return z
        return torch.relu(self.hidden(filled_up(math.sqrt(z.shape[1]) * z)))

    def from_features(self, features_Nd: Tensor) -> Tensor:
        """Returns logits of features φ(x)."""
        return self(self.vectors(features_Nd))

    def gradient_factors(self, x: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
        """Returns p − y [N, classes] and z [N, d] of a linear model: the gradient of an example's
        cross-entropy is their outer product."""
        z = self.embed(x)
        p = row_product(z, self.classifier.weight).softmax(dim=1)
        return p - nn.functional.one_hot(labels_N, p.shape[1]), z


def input_size(network: nn.Module, spec: DatasetSpec) -> int:
    """Returns the number of scalars in one of the network's inputs: pixels, or coordinates of z."""
    if isinstance(network, OnFeatures):
        return network.feature_map.dimension
    return math.prod(spec.image_shape)


def check_learned_embedding(method: str, model: nn.Module) -> None:
    """Refuses a linear model on features, for methods whose loss needs a learned embedding.

    Raises:
        SettingError: the model is one; suggests another.
    """
    if isinstance(model, OnFeatures) and model.linear:
        raise SettingError(
            "model",
            "name",
            f"must be mlp on features: {method} needs a learned embedding, but the embedding "
            "of a linear model is the fixed feature map",
        )
