"""A linear model on fixed features: the classifier that class statistics give (fedstats), and a
strong, cheap baseline for methods that train models.

Its embedding is z = clip₁((φ(x) − m)/R), with φ and R of a `FeatureMap` and a centre m that fedstats
releases (0 for other methods): each image's z depends on that image alone, and has norm at most 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedsynth.data.registry import DatasetSpec
from fedsynth.features.feature_map import FeatureMap


class FeatureLinear(nn.Module):
    """`forward`: normalised images [N, C, H, W] to logits [N, classes]; parameters are those of the
    last layer alone, the centre is a buffer.

    Args:
        features: φ and its constants.
        classes: number of classes.
        mean, std: of the images' normalisation, which is undone before φ.
    """

    dense = False
    largest_activation = 1

    def __init__(
        self,
        features: FeatureMap,
        classes: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> None:
        super().__init__()
        self.features = features
        self.embedding_size = features.dimension
        self.register_buffer("centre", torch.zeros(features.dimension))
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1), persistent=False)
        self.classifier = nn.Linear(features.dimension, classes, bias=False)

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """z, [N, d], of norm at most 1."""
        return self.embed_pixels(x_NCHW * self.std + self.mean)  # type: ignore[operator]

    def embed_pixels(self, pixels_NCHW: Tensor) -> Tensor:
        """z of pixels in [0, 1], [N, d]."""
        return embedded(self.features(pixels_NCHW), self.centre, self.features.radius)  # type: ignore[arg-type]

    @property
    def feature_map(self) -> FeatureMap:
        """φ."""
        return self.features

    def from_features(self, features_Nd: Tensor) -> Tensor:
        """Logits of features φ(x)."""
        logits: Tensor = self.classifier(
            embedded(features_Nd, self.centre, self.features.radius)  # type: ignore[arg-type]
        )
        return logits

    def forward(self, x_NCHW: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.embed(x_NCHW))
        return logits


def embedded(features_Nd: Tensor, centre_d: Tensor | float, radius: float) -> Tensor:
    """z = clip₁((φ − m)/R), [N, d]: rows of norm at most 1.

    >>> embedded(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.zeros(2), 1.0).norm(dim=1).tolist()
    [1.0, 0.5]
    """
    scaled = (features_Nd - centre_d) / radius
    z: Tensor = scaled / torch.linalg.vector_norm(scaled, dim=1, keepdim=True).clamp_min(1.0)
    return z


def feature_linear(features: FeatureMap, spec: DatasetSpec) -> FeatureLinear:
    """The model on a data set's images."""
    return FeatureLinear(features, spec.classes, spec.mean, spec.std)
