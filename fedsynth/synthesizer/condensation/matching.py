"""Distribution matching, which moves synthetic images so that their mean features match real ones.

For a class c, a network w and a feature map u_w(x) = [h_w(x); b·z_w(x)] (embedding and logits), the
loss is

    L_c = ‖ mean_{B_c} u_w − mean_{S_c} u_w ‖²,      L = Σ_c L_c

(FedDM, Eq. 9; FedAF, Eq. 4), and one step needs ∇_S L (`matching_gradient`). All (client, class)
pairs in a client group share one pass. `synthetic` is [S, ipc, C, H, W], and `pair_N` contains the
pair index of each image in the real batch.

Real images are embedded without a graph, and the network's weights are frozen. A vector-Jacobian
product (`fedsynth.models.convnet`, or autograd for other networks) pulls gradients back to the
synthetic images.

A `MatchingObjective` maps (step, features, synthetic) to ∇_S L, or to a private estimate of ∇_S L
(`private_matchers`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth.core.client import ClientClassPairs, ExactClientView, chunk
from fedsynth.models.convnet import VectorJacobian
from fedsynth.models.layers import SharedStatistics
from fedsynth.privacy.passes import power_of_two
from fedsynth.privacy.row_products import row_product
from fedsynth.synthesizer.condensation.augmentation import Augmentation
from fedsynth.synthesizer.condensation.sets import BatchIndices

CPU_BYTES = 8 * 2**20
GPU_IMAGES = 1024
ACTIVATIONS = 8  # full-size activations in memory at a pass's widest layer


@dataclass(eq=False)
class NetworkFeatures:
    """A network's image features for condensation.

    The features are u_w(x) = [h_w(x); b·z_w(x)]: the embedding and the scaled logits.

    The embedding and the logits come from one forward pass, after siamese augmentation if it is
    used. One object serves all condensation steps, and `use` sets a step's network.

    Args:
        network: a network with `embed` and `classifier`, whose weights are frozen. If None, `use`
            must be called first.
        logit_weight: b.
        augment: transforms real and synthetic images. If None, images are not transformed.
        precision: the precision of real images' embeddings and per-example backward passes.
            Synthetic images' features and the classifier are always float32.
        statistics: for networks with batch norm (`fedsynth.models.layers`), a number for each
            (client, class) pair. Pairs with the same number share batch statistics.
        memory_bytes: the memory bound of a pass, in bytes.
        compiled: whether torch.compile is used for passes over real images, and for the operations
            between the convolutions of `vjp`. Only passes of full size are compiled, so that shapes
            depend on the run's settings and never on a client's data. It must be False for private
            clients. One more record would move other records of its pass to another kernel, which
            changes the sums in bf16.
        ipc: the number of images per (client, class) pair. A full pass of `vjp` contains as many
            whole pairs as fit. 0 means unknown, so that no pass counts as full.

    Attributes:
        mixes: whether an image's features depend on the other images of its pass (batch norm). If
            True, a pass must contain all images of a client group.
    """

    network: InitVar[nn.Module | None] = None
    logit_weight: float = 1.0
    augment: InitVar[Augmentation | None] = None
    precision: torch.dtype = torch.float32
    _: KW_ONLY
    statistics: Tensor | None = None
    memory_bytes: int = 2**32
    compiled: InitVar[bool] = False
    ipc: int = 0

    def __post_init__(
        self, network: nn.Module | None, augment: Augmentation | None, compiled: bool
    ) -> None:
        self.mixes = self.statistics is not None
        self._embed_compiled = None
        if compiled and not self.mixes:
            self._embed_compiled = torch.compile(self._embed)
        self._network: Any = None
        self._real: Any = None
        if network is not None:
            self.use(network, augment)

    def use(self, network: nn.Module, augment: Augmentation | None = None) -> None:
        """Sets the network and the augmentation for the following calls.

        If the network is the same object as before, its new weights are copied.
        """
        self._augment = augment
        if network is not self._network:
            self._network = self._real = network
            if self.precision != torch.float32:
                self._real = copy.deepcopy(network).to(self.precision)
        elif self._real is not network:
            with torch.no_grad():
                for p, new in zip(self._real.parameters(), network.parameters(), strict=True):
                    p.copy_(new)

    def __call__(self, x_NCHW: Tensor, pair_N: Tensor) -> Tensor:
        """Returns images' features u [N, D], differentiable with respect to the images."""
        return self._with_logits(
            self._embed(self._network, self._augmented(x_NCHW, pair_N), pair_N)
        )

    def real(self, x_NCHW: Tensor, pair_N: Tensor) -> Tensor:
        """Computes real images' features u [N, D] without an autograd graph, in channels-last
        layout and reduced precision.

        On a CPU, the batches fit into the cache.
        """
        rows = []
        with torch.no_grad():
            at_once = len(x_NCHW)
            if not self.mixes:
                at_once = self.images_at_once(x_NCHW, self.precision)
            for x, pair in zip(x_NCHW.split(at_once), pair_N.split(at_once), strict=True):
                x = self._augmented(x, pair)
                x = x.to(self.precision, memory_format=torch.channels_last)
                embed = self._embed
                if self._embed_compiled is not None and len(x) == at_once:
                    embed = self._embed_compiled
                rows.append(embed(self._real, x, pair).float())
            return self._with_logits(torch.cat(rows))

    def vjp(
        self, x_NCHW: Tensor, pair_N: Tensor, *, exact: bool = True
    ) -> tuple[Tensor, VectorJacobian]:
        """Returns the features u [N, D], and a function that computes their vector-Jacobian
        products.

        The function maps vectors [V, N, D] to [V, N, C, H, W]. It uses the network's `embed_vjp` if
        the network has this method, and otherwise autograd.
        """
        leaf = x_NCHW.detach().requires_grad_()
        with torch.enable_grad():
            x = self._augmented(leaf, pair_N)
        embed_vjp = getattr(self._network, "embed_vjp", lambda *_, **options: None)
        precision = torch.float32 if exact else self.precision
        full = self.ipc * pairs_at_once(self, x, max(1, self.ipc))
        compiled = self._embed_compiled is not None and len(x) == full
        embedded = embed_vjp(x.detach(), precision, compiled=compiled)
        if embedded is None:
            with torch.enable_grad():
                u = self._with_logits(self._embed(self._network, x, pair_N))
            return u.detach(), lambda g_VND: _gradients(u, leaf, g_VND)
        h, pull = embedded
        weight: Tensor = self._network.classifier.weight
        width = h.shape[1]

        def through(g_VND: Tensor) -> Tensor:
            through_logits = self.logit_weight * row_product(g_VND[..., width:], weight.T)
            pulled = pull(g_VND[..., :width] + through_logits)
            return pulled if x is leaf else _gradients(x, leaf, pulled)

        with torch.no_grad():
            return self._with_logits(h), through

    def images_at_once(self, x_NCHW: Tensor, precision: torch.dtype = torch.float32) -> int:
        """Returns the number of images in one pass, a power of two.

        On a CPU, a pass's largest activation stays within 8 MB, so that caches and the allocator
        can reuse the memory. Passes over private records are powers of two as well, and therefore
        divide evenly.
        """
        scalars = getattr(self._network, "largest_activation", x_NCHW[0].numel())
        image_bytes = scalars * precision.itemsize
        cached = GPU_IMAGES if x_NCHW.is_cuda else CPU_BYTES // image_bytes
        in_memory = self.memory_bytes // (ACTIVATIONS * image_bytes)
        return power_of_two(min(chunk(x_NCHW.device), in_memory, cached))

    def _augmented(self, x_NCHW: Tensor, pair_N: Tensor) -> Tensor:
        if self._augment is None:
            return x_NCHW
        return self._augment(x_NCHW, pair_N)

    def _embed(self, network: nn.Module, x_NCHW: Tensor, pair_N: Tensor) -> Tensor:
        if self.statistics is not None:
            SharedStatistics.of(network).assign(self.statistics[pair_N], len(self.statistics))
        if not torch.is_grad_enabled():
            # `to`, not `contiguous`: the latter leaves images of one channel unchanged, and their
            # convolutions then run in NCHW
            x_NCHW = x_NCHW.to(memory_format=torch.channels_last)
        return network.embed(x_NCHW)  # type: ignore[operator]

    def _with_logits(self, h_ND: Tensor) -> Tensor:
        return torch.cat([h_ND, self.logit_weight * self._network.classifier(h_ND)], dim=1)


def _gradients(outputs: Tensor, leaf: Tensor, vectors: Tensor) -> Tensor:
    """Computes vector-Jacobian products by autograd, one product for each of V vectors."""
    if len(vectors) == 1:
        return torch.autograd.grad(outputs, leaf, vectors[0], retain_graph=True)[0][None]
    return torch.autograd.grad(outputs, leaf, vectors, is_grads_batched=True, retain_graph=True)[0]


def pull_back(
    features: NetworkFeatures,
    synthetic_SICHW: Tensor,
    cotangents: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Backpropagates gradients of mean features to the synthetic images, [S, ipc, C, H, W].

    Here v_c is the gradient with respect to the pair's mean features, and J_c the Jacobian of
    mean_{S_c} u. A pair's images affect only its own mean. A pass can therefore contain few pairs,
    which keeps it in a CPU's cache. With batch norm, one pass contains all pairs.

    Args:
        features: computes u.
        synthetic_SICHW: the synthetic images.
        cotangents: a function (means [G, D] of some pairs, pair indices) -> v [G, D].
    """
    out = torch.empty_like(synthetic_SICHW)
    ipc = synthetic_SICHW.shape[1]
    for numbers in passes(features, synthetic_SICHW):
        images = synthetic_SICHW[numbers]
        u, pull = features.vjp(images.flatten(0, 1), numbers.repeat_interleave(ipc))
        means = u.unflatten(0, (len(numbers), ipc)).mean(dim=1)
        vectors = (cotangents(means, numbers) / ipc).repeat_interleave(ipc, dim=0)
        out[numbers] = pull(vectors[None])[0].view_as(images)
    return out


def frozen_means(features: NetworkFeatures, synthetic_SICHW: Tensor) -> Tensor:
    """Returns the synthetic images' mean features for each (client, class) pair, [S, D], detached.

    The passes are the same as in `pull_back`.
    """
    ipc = synthetic_SICHW.shape[1]
    means = []
    with torch.no_grad():
        for numbers in passes(features, synthetic_SICHW):
            images = synthetic_SICHW[numbers].flatten(0, 1)
            u = features(images, numbers.repeat_interleave(ipc))
            means.append(u.unflatten(0, (len(u) // ipc, ipc)).mean(dim=1))
    return torch.cat(means)


def passes(features: NetworkFeatures, synthetic_SICHW: Tensor) -> tuple[Tensor, ...]:
    """Returns the indices of the (client, class) pairs in each pass."""
    pairs, ipc = synthetic_SICHW.shape[:2]
    at_once = pairs
    if not features.mixes:
        at_once = pairs_at_once(features, synthetic_SICHW[0], ipc)
    return torch.arange(pairs, device=synthetic_SICHW.device).split(at_once)


def pairs_at_once(features: NetworkFeatures, x_NCHW: Tensor, ipc: int) -> int:
    """Returns how many (client, class) pairs of `ipc` images fit in one pass.

    It does not depend on the total number of pairs.
    """
    return max(1, features.images_at_once(x_NCHW) // ipc)


def pair_sums(values_ND: Tensor, pair_N: Tensor, pairs: int) -> Tensor:
    """Sums the rows of each group, [pairs, D].

    A matrix product computes the sums, which is deterministic on CUDA.

    Args:
        values_ND: the rows.
        pair_N: each row's group index.
        pairs: the number of groups.
    """
    return torch.nn.functional.one_hot(pair_N, pairs).to(values_ND.dtype).T @ values_ND


def matching_gradient(
    features: NetworkFeatures,
    synthetic_SICHW: Tensor,
    target_SD: Tensor,
    weight_S: Tensor | None = None,
) -> Tensor:
    """Returns the matching loss's gradient with respect to the synthetic images.

    It is ∇_S Σ_c ‖target_c − mean_{S_c} u_w‖² (FedDM, Eq. 9), [S, ipc, C, H, W].

    Args:
        features: computes u_w.
        synthetic_SICHW: the synthetic images.
        target_SD: mean_{B_c} u_w of the real images. With fewer columns than u, only its first
            coordinates are matched, such as embeddings without logits (FedAF, Eq. 4).
        weight_S: the weight of each pair's loss. With None, all weights are 1.
    """
    width = target_SD.shape[1]

    def cotangents(means_GD: Tensor, numbers_G: Tensor) -> Tensor:
        gradient = 2 * (means_GD[:, :width] - target_SD[numbers_G])
        if weight_S is not None:
            gradient = gradient * weight_S[numbers_G, None]
        return nn.functional.pad(gradient, (0, means_GD.shape[1] - width))

    return pull_back(features, synthetic_SICHW, cotangents)


class MatchingObjective:
    """Base class for objects that compute a condensation step's gradient.

    Attributes:
        period: the number of steps after which networks and augmentations must repeat. With None,
            they need not repeat.
        uploaded: whether each (client, class) pair's images are uploaded, bool [S]. With None, all
            are uploaded.
    """

    period: int | None = None
    uploaded: Tensor | None = None

    def gradient(self, step: int, features: NetworkFeatures, synthetic: Tensor) -> Tensor:
        """Returns a step's gradient with respect to the images, [S, ipc, C, H, W]."""
        raise NotImplementedError  # abstract


@dataclass(eq=False)
class ExactMatcher(MatchingObjective):
    """Matches the mean features of synthetic images to those of real minibatches.

    It is not differentially private.

    Args:
        clients, batches: the client group and each step's real batches.
        columns: the number of leading coordinates of u that are matched. If None, all are matched.
    """

    clients: ExactClientView
    batches: BatchIndices
    columns: int | None = None

    def real_means(self, step: int, features: NetworkFeatures) -> Tensor:
        """Computes each (client, class) pair's mean features of a step's real images, [S, D].

        No autograd graph is built.
        """
        sums = torch.zeros(())
        for rows, pairs, u in self._pieces(step, features):
            if not sums.dim():  # the first piece shows the width of u_w
                sums = u.new_zeros(len(self.batches.sizes), u.shape[1])
            number = self.batches.pair[rows] - pairs.start
            sums[pairs] += pair_sums(u, number, pairs.stop - pairs.start)
        return sums / self.batches.divisors.to(sums.dtype)

    def real_rows(self, step: int, features: NetworkFeatures) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the features of the step's real images, [N, D], without an autograd graph.

        Also returns each image's (client, class) pair index [N], ascending, and the number of
        images per pair [S], on the CPU.
        """
        rows = [u for _, _, u in self._pieces(step, features)]
        return torch.cat(rows), self.batches.pair, self.batches.sizes

    def _pieces(
        self, step: int, features: NetworkFeatures
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yields a step's batch in pieces that fit into memory.

        A piece consists of a batch slice, its slice of (client, class) pairs, and its images' u_w.
        """
        indices = self.batches.at(step)
        size = len(indices) if features.mixes else chunk(indices.device)
        first = 0
        for pair in self.batches.pair_on_cpu.split(size):
            rows = slice(first, first + len(pair))
            images = self.clients.images(indices[rows])
            u = features.real(images, self.batches.pair[rows])
            yield rows, slice(int(pair[0]), int(pair[-1]) + 1), u
            first = rows.stop

    def gradient(self, step: int, features: NetworkFeatures, synthetic: Tensor) -> Tensor:
        real = self.real_means(step, features)[:, : self.columns]
        return matching_gradient(features, synthetic, real)


class NetworkMeansMatcher(MatchingObjective):
    """Matches synthetic images to the mean features of all of a client's data, without privacy.

    It uses FedDM's Eq. 9 over M networks in turn, without minibatch noise. Real images take M·n
    forward passes in a round instead of T·C·batch.

    Args:
        clients: the clients whose examples are averaged.
        pairs: the condensed (client, class) pairs.
        networks: the number of networks M.
    """

    def __init__(self, clients: ExactClientView, pairs: ClientClassPairs, networks: int) -> None:
        self.period = self._networks = networks
        batches = BatchIndices(clients, pairs, max([1, *clients.sizes()]), 1, seed=0, round=0)
        self._exact = ExactMatcher(clients, batches)
        self._targets: dict[int, Tensor] = {}

    def gradient(self, step: int, features: NetworkFeatures, synthetic: Tensor) -> Tensor:
        number = step % self._networks
        if number not in self._targets:  # in the first pass, or the first one after a resume
            self._targets[number] = self._exact.real_means(0, features)
        return matching_gradient(features, synthetic, self._targets[number])
