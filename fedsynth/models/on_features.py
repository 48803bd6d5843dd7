"""Models on the features of a fixed feature map.

The method fedstats computes `FeatureLinear`. Other methods train `OnFeatures`.

The embedding of `FeatureLinear` is z = clip₁(T(φ(x) − m)/R), where φ and R belong to a
`FeatureMap`. The centre m is released by fedstats, and is 0 for other methods. T is the identity or
a whitening transform, which multiplies each block of φ by a symmetric matrix for the channels and
another for the cells (image positions). Some directions of z may then be shortened (`Shortening`).

`OnFeatures` takes vectors z = clip₁(φ(x)/R). The network is linear or has one hidden layer. One
example's gradient in a linear model is (p − y) ⊗ z. Tramèr and Boneh (2021, arXiv 2011.11660) train
such models by DP-SGD.

The feature map is fixed before data are read. An image's vector depends only on the image itself,
and its norm is at most 1.

`regression_step` and `regression_gradients` compute softmax regression's gradient in closed form,
for one network or for many at once. Such small networks spend most of a step in Python and kernel
launches. The mean cross-entropy's gradient is (p − y) ⊗ x, which two matrix products compute with
fewer calls than automatic differentiation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.data.images import pixel_constants
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import SettingError
from fedsynth.features.feature_map import FeatureMap
from fedsynth.models.layers import EmbeddingNetwork, check_embedding
from fedsynth.models.small import Linear
from fedsynth.privacy.row_products import LANES, PaddedLinear, row_product, two_sided

# The whitening matrices for a block's channels and cells. Whitening replaces the block Z [channels,
# cells] by the matrix product channels·Z·cells.
Root = tuple[Tensor, Tensor]


class FeatureLinear(EmbeddingNetwork):
    """A linear model on the features of a fixed feature map.

    The model maps normalised images [N, C, H, W] to logits [N, classes].

    Only the last layer has parameters, which are 0 at first. The centre and the whitening matrices
    are buffers.

    Args:
        feature_map: φ and its constants.
        spec: the images' specification. Normalisation is undone before φ is applied.
        whitens: whether the model has whitening matrices, which are initially the identity.
        directions: the number of directions that may be shortened, initially by nothing.
        bias: whether the last layer has a bias.
    """

    dense = False
    largest_activation = 1

    def __init__(
        self,
        feature_map: FeatureMap,
        spec: DatasetSpec,
        *,
        whitens: bool = False,
        directions: int = 0,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.feature_map = feature_map
        self.embedding_size = feature_map.dimension
        self.register_buffer("centre", torch.zeros(feature_map.dimension))
        if whitens:
            sizes = chain.from_iterable(feature_map.blocks)
            for name, size in zip(root_names(feature_map.blocks), sizes, strict=True):
                self.register_buffer(name, torch.eye(size))
        if directions:
            self.register_buffer("directions", torch.zeros(feature_map.dimension, directions))
            self.register_buffer("shortened", torch.zeros(directions))
        self.register_buffer("mean", torch.tensor(spec.mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(spec.std).view(1, -1, 1, 1), persistent=False)
        self.classifier = nn.Linear(feature_map.dimension, spec.classes, bias=bias)
        for parameter in self.classifier.parameters():
            nn.init.zeros_(parameter)

    @property
    def embedding(self) -> Embedding:
        """The function from features φ to embeddings z."""
        return Embedding.of(dict(self.named_buffers()), self.feature_map)

    def embed(self, x_NCHW: Tensor) -> Tensor:
        """Computes the embeddings z [N, d] of normalised images, with norms of at most 1."""
        return self.embed_pixels(x_NCHW * self.std + self.mean)  # type: ignore[operator]

    def embed_pixels(self, pixels_NCHW: Tensor) -> Tensor:
        """Computes the embeddings z [N, d] of images with pixels in [0, 1]."""
        return self.embedding(self.feature_map(pixels_NCHW))


def root_names(blocks: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """Returns the state-dict names of a model's whitening matrices.

    Each block has one matrix for channels and one for cells.

    >>> root_names([(41, 9)])
    ('channels_root_0', 'cells_root_0')
    """
    kinds = ("channels_root", "cells_root")
    return tuple(f"{kind}_{number}" for number in range(len(blocks)) for kind in kinds)


@dataclass(frozen=True, eq=False)
class Shortening:
    """A linear map that shrinks vectors along some directions.

    The map is x ↦ x − D diag(s) Dᵀ x.

    Args:
        directions: orthonormal columns D, [d, k].
        shortened: the part s of each direction that is removed, [k] in [0, 1).

    >>> halved = Shortening(torch.eye(3)[:, :1], torch.tensor([0.5]))
    >>> halved(torch.ones(1, 3))
    tensor([[0.5000, 1.0000, 1.0000]])
    """

    directions: Tensor
    shortened: Tensor

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor]) -> Shortening | None:
        """Creates the map from a model's buffers. Returns None if the map would be the identity."""
        if "shortened" not in parameters:
            return None
        # a traced graph applies the map in any case, because it cannot depend on values
        if not torch.compiler.is_compiling() and not bool(parameters["shortened"].any()):
            return None
        return cls(parameters["directions"], parameters["shortened"])

    def __call__(self, rows_Nd: Tensor) -> Tensor:
        """Applies the map to each row, independently of the other rows."""
        along_Nk = row_product(rows_Nd, self.directions.T) * self.shortened
        return rows_Nd - row_product(along_Nk, self.directions)


@dataclass(frozen=True, eq=False)
class Embedding:
    """A function that maps features φ [N, d] to embeddings z [N, d].

    Args:
        centre: the centre m, [d].
        radius: the radius R of the features.
        roots: each block's whitening matrices, or an empty tuple without whitening.
        shortening: the map that shortens some directions, or None. Its results have norm 1.
    """

    centre: Tensor
    radius: float
    roots: tuple[Root, ...] = ()
    shortening: Shortening | None = None

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], features: FeatureMap) -> Embedding:
        """Creates the embedding from a model's centre and whitening matrices."""
        roots = []
        names = root_names(features.blocks)
        for channels, cells in zip(names[::2], names[1::2], strict=True):
            if channels in parameters:
                roots.append((parameters[channels], parameters[cells]))
        shortening = Shortening.of(parameters)
        return cls(parameters["centre"], features.radius, tuple(roots), shortening)

    def __call__(self, features_Nd: Tensor) -> Tensor:
        z_Nd = embedded(features_Nd, self.centre, self.radius, self.roots)
        if self.shortening is None:
            return z_Nd
        return F.normalize(self.shortening(z_Nd), dim=1)

    def same(self, other: Embedding) -> bool:
        """Returns True if both embeddings have equal constants."""
        tensors, other_tensors = self._tensors(), other._tensors()
        if self.radius != other.radius or len(tensors) != len(other_tensors):
            return False
        return all(map(torch.equal, tensors, other_tensors))

    def _tensors(self) -> list[Tensor]:
        tensors = [self.centre, *chain.from_iterable(self.roots)]
        if self.shortening is not None:
            tensors += [self.shortening.directions, self.shortening.shortened]
        return tensors


def embedded(
    features_Nd: Tensor, centre_d: Tensor | float, radius: float, roots: Sequence[Root] = ()
) -> Tensor:
    """Computes embeddings z [N, d] of norm at most 1 from features φ.

    The embeddings are z = clip₁(T(φ − m)/R), where T multiplies by the whitening matrices.

    Args:
        features_Nd: the features φ.
        centre_d: the centre m.
        radius: the radius R of the features.
        roots: each block's whitening matrices. If empty, T is the identity.

    >>> embedded(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.zeros(2), 1.0).norm(dim=1).tolist()
    [1.0, 0.5]
    """
    scaled = (features_Nd - centre_d) / radius
    if roots:
        scaled = _turned(scaled, roots)
    return scaled / torch.linalg.vector_norm(scaled, dim=1, keepdim=True).clamp_min(1.0)


def _turned(rows_Nd: Tensor, roots: Sequence[Root]) -> Tensor:
    """Multiplies each feature row by the whitening matrices.

    A row's result does not depend on other rows, to the last bit.
    """
    blocks = []
    start = 0
    for channels, cells in roots:
        stop = start + len(channels) * len(cells)
        block = rows_Nd[:, start:stop].unflatten(1, (len(channels), len(cells)))
        blocks.append(two_sided(channels, block, cells).flatten(1))
        start = stop
    return torch.cat(blocks, dim=1)


class OnFeatures(EmbeddingNetwork):
    """A trainable network on the features of a fixed feature map.

    The network returns logits [N, classes].

    The input is normalised images [N, C, H, W], or precomputed vectors z [N, d]. The feature map is
    not part of the network's state, so it is never sent.

    Args:
        feature_map: φ and its constants.
        spec: the specification of the images.
        hidden: the number of hidden units, or 0 for a linear model without a bias. The number is
            rounded up to a multiple of 16. The hidden layer's input is √d·z, because initial
            weights expect values of about 1.
    """

    dense = True

    def __init__(self, feature_map: FeatureMap, spec: DatasetSpec, hidden: int = 0) -> None:
        super().__init__()
        self.feature_map = feature_map
        self.spec = spec
        d = feature_map.dimension
        hidden += -hidden % LANES
        self.hidden = PaddedLinear(d, hidden) if hidden else nn.Identity()
        self.embedding_size = self.largest_activation = hidden or d
        self.classifier = PaddedLinear(self.embedding_size, spec.classes, bias=bool(hidden))

    @property
    def linear(self) -> bool:
        """True if the model is linear.

        Its embedding is then z, which training does not change.
        """
        return isinstance(self.hidden, nn.Identity)

    def vectors(self, features_Nd: Tensor) -> Tensor:
        """Computes the vectors z [N, d] from features φ(x)."""
        return embedded(features_Nd, 0.0, self.feature_map.radius)

    def embed(self, x: Tensor) -> Tensor:
        """Computes the embeddings [N, embedding_size].

        The embeddings are the output of the hidden layer, or z if the model is linear.
        """
        z = x
        if x.dim() == 4:
            mean, std = pixel_constants(self.spec, x.device)
            z = self.vectors(self.feature_map(x * std + mean))
        if self.linear:
            return z
        return torch.relu(self.hidden(math.sqrt(z.shape[1]) * z))

    def from_features(self, features_Nd: Tensor) -> Tensor:
        """Computes the logits [N, classes] from features φ(x)."""
        return self(self.vectors(features_Nd))


def input_size(network: nn.Module, spec: DatasetSpec) -> int:
    """Returns a network's input size for one image.

    For `OnFeatures`, it is the dimension of z, and for other networks the number of pixels.
    """
    if isinstance(network, OnFeatures):
        return network.feature_map.dimension
    return math.prod(spec.image_shape)


def check_learned_embedding(method: str, model: nn.Module) -> None:
    """Checks that a model has a trainable embedding.

    Raises:
        SettingError: as for `check_embedding`, or the model is a linear model on features.
    """
    check_embedding(method, model)
    if isinstance(model, OnFeatures) and model.linear:
        reason = (
            f"has no trainable embedding, which {method} needs. Set model.name=mlp, or unset "
            "model.features"
        )
        raise SettingError("model", "name", reason)


def is_softmax_regression(network: nn.Module) -> bool:
    """Returns True for softmax regression: one linear layer on a parameter-free embedding."""
    return type(network) is Linear or (type(network) is OnFeatures and network.linear)


def regression_step(layer: nn.Linear, x_BD: Tensor, labels_B: Tensor) -> None:
    """Computes a linear classifier's mean cross-entropy gradient in closed form.

    The gradient is written to `layer.weight.grad` and `layer.bias.grad` in place.

    >>> layer = nn.Linear(1, 2)
    >>> for p in layer.parameters():
    ...     p.data.zero_()
    ...     p.grad = torch.zeros_like(p)
    tensor([[0.],
            [0.]])
    tensor([0., 0.])
    >>> regression_step(layer, torch.ones(1, 1), torch.zeros(1, dtype=torch.int64))
    >>> layer.bias.grad
    tensor([-0.5000,  0.5000])
    """
    with torch.no_grad():
        wrong_BC = layer(x_BD).softmax(dim=1)
        labels_B1 = labels_B[:, None]
        wrong_BC.scatter_add_(1, labels_B1, wrong_BC.new_full((1, 1), -1.0).expand_as(labels_B1))
        wrong_BC /= len(x_BD)
        torch.mm(wrong_BC.T, x_BD, out=layer.weight.grad)
        if layer.bias is not None:
            torch.sum(wrong_BC, 0, out=layer.bias.grad)


def regression_gradients(
    flat_AP: Tensor, x_ABD: Tensor, labels_AB: Tensor, share_AB: Tensor, classes: int
) -> Tensor:
    """Computes many linear classifiers' weight gradients at once, in closed form.

    Each classifier's loss is a weighted cross-entropy.

    Args:
        flat_AP: each learner's weights [classes·D], followed by the bias [classes] if there is one.
        x_ABD: the layer inputs for each learner's batch.
        labels_AB: the labels, int64.
        share_AB: the examples' weights in their learners' losses.
        classes: C.

    Returns:
        The gradients [A, P].

    >>> zero, one = torch.zeros(1, 2), torch.ones(1, 1)
    >>> regression_gradients(zero, one[None], torch.zeros(1, 1, dtype=torch.int64), one, classes=2)
    tensor([[-0.5000,  0.5000]])
    """
    width = x_ABD.shape[-1]
    weights = flat_AP[:, : classes * width].unflatten(1, (classes, width))
    bias = flat_AP[:, classes * width :]
    logits = x_ABD @ weights.transpose(1, 2)
    if bias.shape[1]:
        logits += bias[:, None]
    wrong = logits.softmax(dim=2) * share_AB[..., None]
    wrong.scatter_add_(2, labels_AB[..., None], -share_AB[..., None])
    gradient = (wrong.transpose(1, 2) @ x_ABD).flatten(1)
    return torch.cat([gradient, wrong.sum(dim=1)], dim=1) if bias.shape[1] else gradient
