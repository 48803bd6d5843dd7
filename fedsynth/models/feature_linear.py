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
from fedsynth.features.feature_map import FeatureMap, two_sided
from fedsynth.models.embedding_network import EmbeddingNetwork


class Root(NamedTuple):
    """T of one block: Z [channels, cells] becomes channels·Z·cells."""

    channels: Tensor
    cells: Tensor


class FeatureLinear(EmbeddingNetwork):
    """`forward`: normalised images [N, C, H, W] to logits [N, classes]; only the last layer has
    parameters, the centre is a buffer.

    Args:
        feature_map: φ and its constants.
        spec: specification of the images; their normalisation is undone before φ.
        whitens: whether there is a T, initially the identity.
    """

    dense = False
    largest_activation = 1

    def __init__(
        self, feature_map: FeatureMap, spec: DatasetSpec, *, whitens: bool = False
    ) -> None:
        super().__init__()
        self.feature_map = feature_map
        self.embedding_size = feature_map.dimension
        self.register_buffer("centre", torch.zeros(feature_map.dimension))
        if whitens:
            sizes = chain.from_iterable(feature_map.blocks)
            for name, size in zip(root_names(feature_map.blocks), sizes, strict=True):
                self.register_buffer(name, torch.eye(size))
        self.register_buffer("mean", torch.tensor(spec.mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(spec.std).view(1, -1, 1, 1), persistent=False)
        self.classifier = nn.Linear(feature_map.dimension, spec.classes, bias=False)

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Returns z, [N, d], of norm at most 1."""
        return self.embed_pixels(x_NCHW * self.std + self.mean)  # type: ignore[operator]

    def embed_pixels(self, pixels_NCHW: Tensor) -> Tensor:
        """Returns z of pixels in [0, 1], [N, d]."""
        return self.embed_features(self.feature_map(pixels_NCHW))

    def embed_features(self, features_Nd: Tensor) -> Tensor:
        """Returns z of φ(x), [N, d]."""
        return Embedding.of(dict(self.named_buffers()), self.feature_map)(features_Nd)

    def from_features(self, features_Nd: Tensor) -> Tensor:
        """Returns logits of features φ(x)."""
        return self.classifier(self.embed_features(features_Nd))


def root_names(blocks: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """Returns the names of T's matrices in a model's state: channels' and cells' of each block.

    >>> root_names([(41, 9)])
    ('channels_root_0', 'cells_root_0')
    """
    names: list[str] = []
    for number in range(len(blocks)):
        names += f"channels_root_{number}", f"cells_root_{number}"
    return tuple(names)


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
        roots = []
        names = root_names(features.blocks)
        for channels, cells in zip(names[::2], names[1::2], strict=True):
            if channels in parameters:
                roots.append(Root(parameters[channels], parameters[cells]))
        return cls(parameters["centre"], features.radius, tuple(roots))

    def __call__(self, features_Nd: Tensor) -> Tensor:
        return embedded(features_Nd, self.centre, self.radius, self.roots)

    def same(self, other: Embedding) -> bool:
        """Returns whether all constants are equal."""
        if self.radius != other.radius or len(self.roots) != len(other.roots):
            return False
        return all(map(torch.equal, self._tensors(), other._tensors()))

    def _tensors(self) -> list[Tensor]:
        return [self.centre, *chain.from_iterable(self.roots)]


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
    blocks = []
    start = 0
    for channels, cells in roots:
        stop = start + len(channels) * len(cells)
        block = rows_Nd[:, start:stop].unflatten(1, (len(channels), len(cells)))
        blocks.append(two_sided(channels, block, cells).flatten(1))
        start = stop
    return torch.cat(blocks, dim=1)
