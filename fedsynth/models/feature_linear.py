"""A linear model on fixed features, which is the classifier that fedstats computes.

The model is also a strong and cheap baseline for methods that train models. Its embedding is
z = clip₁(T(φ(x) − m)/R), where φ and R belong to a `FeatureMap`. The centre m is released by
fedstats, and is 0 for other methods. T is the identity or a whitening transform, which multiplies
each block of φ by a symmetric matrix for its channels and another one for its cells (positions in
the image). The embedding of an image depends only on this image, and its norm is at most 1.
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
    """The matrices that whiten one block of features.

    A block Z [channels, cells] becomes the product channels·Z·cells.
    """

    channels: Tensor
    cells: Tensor


class FeatureLinear(EmbeddingNetwork):
    """A linear model on fixed features, which maps normalised images [N, C, H, W] to logits
    [N, classes].

    Only the last layer has parameters. The centre and the whitening matrices are buffers.

    Args:
        feature_map: φ and its constants.
        spec: the specification of the images. Their normalisation is undone before φ is applied.
        whitens: whether the model has whitening matrices. They are initially the identity.
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
        """Computes the embeddings z [N, d] of normalised images. Their norms are at most 1."""
        return self.embed_pixels(x_NCHW * self.std + self.mean)  # type: ignore[operator]

    def embed_pixels(self, pixels_NCHW: Tensor) -> Tensor:
        """Computes the embeddings z [N, d] of images with pixels in [0, 1]."""
        return self.embed_features(self.feature_map(pixels_NCHW))

    def embed_features(self, features_Nd: Tensor) -> Tensor:
        """Computes the embeddings z [N, d] from features φ(x)."""
        return Embedding.of(dict(self.named_buffers()), self.feature_map)(features_Nd)

    def from_features(self, features_Nd: Tensor) -> Tensor:
        """Computes the logits [N, classes] from features φ(x)."""
        return self.classifier(self.embed_features(features_Nd))


def root_names(blocks: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """Returns the names of the whitening matrices in a model's state, two for each block.

    >>> root_names([(41, 9)])
    ('channels_root_0', 'cells_root_0')
    """
    names: list[str] = []
    for number in range(len(blocks)):
        names += f"channels_root_{number}", f"cells_root_{number}"
    return tuple(names)


@dataclass(frozen=True, eq=False)
class Embedding:
    """A function that maps features φ [N, d] to embeddings z [N, d].

    Args:
        centre: the centre m, [d].
        radius: the radius R of the features.
        roots: the whitening matrices of each block, or an empty tuple without whitening.
    """

    centre: Tensor
    radius: float
    roots: tuple[Root, ...] = ()

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], features: FeatureMap) -> Embedding:
        """Creates the embedding from the centre and the whitening matrices of a model."""
        roots = []
        names = root_names(features.blocks)
        for channels, cells in zip(names[::2], names[1::2], strict=True):
            if channels in parameters:
                roots.append(Root(parameters[channels], parameters[cells]))
        return cls(parameters["centre"], features.radius, tuple(roots))

    def __call__(self, features_Nd: Tensor) -> Tensor:
        return embedded(features_Nd, self.centre, self.radius, self.roots)

    def same(self, other: Embedding) -> bool:
        """Returns True if all constants are equal to those of `other`."""
        if self.radius != other.radius or len(self.roots) != len(other.roots):
            return False
        return all(map(torch.equal, self._tensors(), other._tensors()))

    def _tensors(self) -> list[Tensor]:
        return [self.centre, *chain.from_iterable(self.roots)]


def embedded(
    features_Nd: Tensor, centre_d: Tensor | float, radius: float, roots: Sequence[Root] = ()
) -> Tensor:
    """Computes the embeddings z = clip₁(T(φ − m)/R), [N, d]. Their norms are at most 1.

    Args:
        features_Nd: the features φ.
        centre_d: the centre m.
        radius: the radius R of the features.
        roots: the whitening matrices of each block. Without them, T is the identity.

    >>> embedded(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.zeros(2), 1.0).norm(dim=1).tolist()
    [1.0, 0.5]
    """
    scaled = (features_Nd - centre_d) / radius
    if roots:
        scaled = _turned(scaled, roots)
    return scaled / torch.linalg.vector_norm(scaled, dim=1, keepdim=True).clamp_min(1.0)


def _turned(rows_Nd: Tensor, roots: Sequence[Root]) -> Tensor:
    """Applies the whitening matrices to each row. The result for a row, to the last bit, does not
    depend on the other rows."""
    blocks = []
    start = 0
    for channels, cells in roots:
        stop = start + len(channels) * len(cells)
        block = rows_Nd[:, start:stop].unflatten(1, (len(channels), len(cells)))
        blocks.append(two_sided(channels, block, cells).flatten(1))
        start = stop
    return torch.cat(blocks, dim=1)
