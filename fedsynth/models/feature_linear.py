"""A linear model on fixed features: the classifier that fedstats computes from class statistics,
and a strong, cheap baseline for methods that train models.

Its embedding is z = clip₁(T(φ(x) − m)/R), with φ and R of a `FeatureMap` and a centre m that
fedstats releases (0 for other methods). T is the identity or whitens z: symmetric matrices for the
channels and the cells of φ's blocks. Each image's z depends only on that image, and has norm at
most 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedsynth.data.registry import DatasetSpec
from fedsynth.features.feature_map import FeatureMap
from fedsynth.features.row_products import two_sided
from fedsynth.models.embedding_network import EmbeddingNetwork


class Root(NamedTuple):
    """T of one block: Z [channels, cells] becomes channels·Z·cells."""

    channels: Tensor
    cells: Tensor


class FeatureLinear(EmbeddingNetwork):
    """`forward`: normalised images [N, C, H, W] to logits [N, classes]; only the last layer has
    parameters, the centre is a buffer.

    Args:
        features: φ and its constants.
        classes: number of classes.
        mean, std: constants of the images' normalisation, which is undone before φ.
        whitens: whether there is a T, initially the identity.
    """

    dense = False
    largest_activation = 1

    def __init__(
        self,
        features: FeatureMap,
        classes: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        *,
        whitens: bool = False,
    ) -> None:
        super().__init__()
        self.features = features
        self.embedding_size = features.dimension
        self.register_buffer("centre", torch.zeros(features.dimension))
        sizes = [size for block in features.blocks for size in block]
        for name, size in zip(root_names(features.blocks), sizes, strict=True) if whitens else ():
            self.register_buffer(name, torch.eye(size))
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1), persistent=False)
        self.classifier = nn.Linear(features.dimension, classes, bias=False)

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Returns z, [N, d], of norm at most 1."""
        return self.embed_pixels(x_NCHW * self.std + self.mean)  # type: ignore[operator]

    def embed_pixels(self, pixels_NCHW: Tensor) -> Tensor:
        """Returns z of pixels in [0, 1], [N, d]."""
        return self.embed_features(self.features(pixels_NCHW))

    def embed_features(self, features_Nd: Tensor) -> Tensor:
        """Returns z of φ(x), [N, d]."""
        return Embedding.of(dict(self.named_buffers()), self.features)(features_Nd)

    @property
    def feature_map(self) -> FeatureMap:
        """φ."""
        return self.features

    def from_features(self, features_Nd: Tensor) -> Tensor:
        """Returns logits of features φ(x)."""
        return self.classifier(self.embed_features(features_Nd))


def root_names(blocks: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """Returns the names of T's matrices in a model's state: channels' and cells' of each block.

    >>> root_names([(41, 9)])
    ('channels_root_0', 'cells_root_0')
    """
    return tuple(
        f"{side}_root_{number}" for number in range(len(blocks)) for side in ("channels", "cells")
    )


@dataclass(frozen=True, eq=False)
class Embedding:
    """A model's map from φ to z: called with φ [N, d], returns z [N, d].

    Args:
        centre: m, [d].
        radius: R.
        roots: T of each block; empty: no T.
    """

    centre: Tensor
    radius: float
    roots: tuple[Root, ...] = ()

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], features: FeatureMap) -> Embedding:
        """Returns the embedding with a model's centre and, if it has them, T's matrices."""
        names = root_names(features.blocks)
        values = [parameters[name] for name in names if name in parameters]
        roots = tuple(Root(*pair) for pair in zip(values[::2], values[1::2], strict=True))
        return cls(parameters["centre"], features.radius, roots)

    def __call__(self, features_Nd: Tensor) -> Tensor:
        return embedded(features_Nd, self.centre, self.radius, self.roots)

    def copy(self) -> Embedding:
        """Returns a copy that shares no tensor."""
        roots = tuple(Root(*(side.clone() for side in root)) for root in self.roots)
        return Embedding(self.centre.clone(), self.radius, roots)

    def same(self, other: Embedding) -> bool:
        """Returns whether all constants are equal."""
        tensors = [self.centre, *chain.from_iterable(self.roots)]
        other_tensors = [other.centre, *chain.from_iterable(other.roots)]
        if self.radius != other.radius or len(tensors) != len(other_tensors):
            return False
        return all(torch.equal(a, b) for a, b in zip(tensors, other_tensors, strict=True))


def embedded(
    features_Nd: Tensor, centre_d: Tensor | float, radius: float, roots: Sequence[Root] = ()
) -> Tensor:
    """Returns z = clip₁(T(φ − m)/R), [N, d]: rows of norm at most 1.

    Args:
        features_Nd: φ.
        centre_d: m.
        radius: R.
        roots: T of each block; empty: no T.

    >>> embedded(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.zeros(2), 1.0).norm(dim=1).tolist()
    [1.0, 0.5]
    """
    scaled = (features_Nd - centre_d) / radius
    if roots:
        scaled = _turned(scaled, roots)
    return scaled / torch.linalg.vector_norm(scaled, dim=1, keepdim=True).clamp_min(1.0)


def _turned(rows_Nd: Tensor, roots: Sequence[Root]) -> Tensor:
    """Returns T of each row; its bits depend only on that row."""
    sizes = [(len(root.channels), len(root.cells)) for root in roots]
    split = rows_Nd.split([a * s for a, s in sizes], dim=1)
    turned = [
        two_sided(root.channels, part.unflatten(1, size), root.cells).flatten(1)
        for part, size, root in zip(split, sizes, roots, strict=True)
    ]
    return torch.cat(turned, dim=1)


def feature_linear(
    features: FeatureMap, spec: DatasetSpec, *, whitens: bool = False
) -> FeatureLinear:
    """Returns the model for a data set's images."""
    return FeatureLinear(features, spec.classes, spec.mean, spec.std, whitens=whitens)
