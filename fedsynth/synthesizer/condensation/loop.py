"""The condensation loop: T steps of gradient descent on the synthetic images of a group of clients
(FedDM, Algorithm 1)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth.core.client import chunk
from fedsynth.core.context import RoundContext
from fedsynth.keeping import StepKeeper
from fedsynth.models.batch_norm import SharedStatistics, has_batch_norm
from fedsynth.models.frozen import VectorJacobian
from fedsynth.privacy.passes import power_of_two
from fedsynth.synthesizer.condensation.matchers import Matcher, segments_at_once
from fedsynth.training.loop import resumable
from fedsynth.training.optimisers import Optimiser

Augmentation = Callable[[Tensor, Tensor], Tensor]
"""(images, segment of each) -> transformed images."""

CPU_BYTES = 8 * 2**20
GPU_IMAGES = 1024
ACTIVATIONS = 8  # full-size activations that a pass may hold at its widest


class NetworkFeatures:
    """u_w(x) = [h_w(x); b·z_w(x)]: embedding and logits from one forward pass, after the siamese
    augmentation if there is one.

    One object serves all steps of a condensation; `use` sets the step's network.

    Args:
        network: has `embed` and `classifier`; its weights are frozen.
        precision: of the real images' embedding, and of the backward passes for single private
            examples; synthetic images' features and the classifier are always float32.
        statistics_S: for networks with batch norm (`fedsynth.models.batch_norm`): segments with the
            same number share statistics.
        memory_bytes: the most that a pass should take.
        compiled: use torch.compile for the real pass, and for the operations between the
            convolutions of `vjp`. Only passes of full size are compiled, so that shapes depend on
            the run's settings and never on a client's data. Not for private clients: one more
            record would move others of its pass to another kernel, which in bf16 changes the sums.
        ipc: images of a segment; a full pass of `vjp` holds as many whole segments as fit. 0:
            unknown, so that no pass counts as full.
    """

    def __init__(
        self,
        network: nn.Module,
        logit_weight: float,
        augment: Augmentation | None,
        precision: torch.dtype = torch.float32,
        *,
        statistics_S: Tensor | None = None,
        memory_bytes: int = 2**32,
        compiled: bool = False,
        ipc: int = 0,
    ) -> None:
        self._logit_weight = logit_weight
        self._precision = precision
        self._statistics = statistics_S
        self._memory_bytes = memory_bytes
        self._compiled = torch.compile(self._embed) if compiled and statistics_S is None else None
        self._ipc = ipc
        self.mixes = statistics_S is not None
        self._network = network
        self._augment = augment
        self._real = self._reduced(network)

    def use(self, network: nn.Module, augment: Augmentation | None) -> None:
        """Switches to this network; if it is the same object as before, copies its new weights."""
        if network is self._network and self._real is not network:
            with torch.no_grad():
                for mine, new in zip(self._real.parameters(), network.parameters(), strict=True):
                    mine.copy_(new)
        else:
            self._real = self._reduced(network)
        self._network = network
        self._augment = augment

    def _reduced(self, network: nn.Module) -> nn.Module:
        return (
            network
            if self._precision == torch.float32
            else copy.deepcopy(network).to(self._precision)
        )

    def __call__(self, x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        """Returns u [N, D] with the graph to the images."""
        return self._with_logits(
            self._embed(self._network, self._augmented(x_NCHW, segment_N), segment_N)
        )

    def real(self, x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        """Returns u [N, D] without graph, computed channels-last, in the reduced precision, and on
        a CPU in batches that are small enough for the cache."""
        rows = []
        with torch.no_grad():
            at_once = len(x_NCHW) if self.mixes else self.images_at_once(x_NCHW, self._precision)
            for x, segment in zip(x_NCHW.split(at_once), segment_N.split(at_once), strict=True):
                x = self._augmented(x, segment).to(
                    self._precision, memory_format=torch.channels_last
                )
                embed = (
                    self._compiled
                    if self._compiled is not None and len(x) == at_once
                    else self._embed
                )
                rows.append(embed(self._real, x, segment).float())
            return self._with_logits(torch.cat(rows))

    def vjp(
        self, x_NCHW: Tensor, segment_N: Tensor, *, exact: bool = True
    ) -> tuple[Tensor, VectorJacobian]:
        """Returns u [N, D], and a function that pulls vectors [V, N, D] back to the images: the
        network's own `embed_vjp` if it has one, else autograd."""
        leaf = x_NCHW.detach().requires_grad_()
        with torch.enable_grad():
            x = self._augmented(leaf, segment_N)
        own = getattr(self._network, "embed_vjp", None)
        precision = torch.float32 if exact else self._precision
        compiled = self._compiled is not None and self._is_whole(x)
        made = None if own is None or self.mixes else own(x.detach(), precision, compiled=compiled)
        if made is None:
            with torch.enable_grad():
                u = self._with_logits(self._embed(self._network, x, segment_N))
            return u.detach(), lambda g_VND: _gradients(u, leaf, g_VND)
        h, pull = made
        weight: Tensor = self._network.classifier.weight  # type: ignore[assignment,union-attr]
        width = h.shape[1]

        def through(g_VND: Tensor) -> Tensor:
            pulled = pull(g_VND[..., :width] + self._logit_weight * (g_VND[..., width:] @ weight))
            return pulled if x is leaf else _gradients(x, leaf, pulled)

        with torch.no_grad():
            return self._with_logits(h), through

    def _is_whole(self, x_NCHW: Tensor) -> bool:
        """Returns whether this is the number of images in a full pass of `matchers.pull_back`."""
        return self._ipc > 0 and len(x_NCHW) == self._ipc * segments_at_once(
            self, x_NCHW, self._ipc
        )

    def images_at_once(self, x_NCHW: Tensor, precision: torch.dtype = torch.float32) -> int:
        """Returns the number of images in one pass, a power of two. On a CPU it keeps the largest
        activation within 8 MB, where caches and the allocator reuse it. (Passes of private records
        are powers of two as well, so that this size divides them evenly.)"""
        scalars = getattr(self._network, "largest_activation", x_NCHW[0].numel())
        most = min(
            chunk(x_NCHW.device), self._memory_bytes // (ACTIVATIONS * scalars * precision.itemsize)
        )
        cached = GPU_IMAGES if x_NCHW.is_cuda else CPU_BYTES // (scalars * precision.itemsize)
        return power_of_two(min(most, cached))

    def _augmented(self, x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        return x_NCHW if self._augment is None else self._augment(x_NCHW, segment_N)

    def _embed(self, network: nn.Module, x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        if self._statistics is not None:
            SharedStatistics.of(network).assign(self._statistics[segment_N], len(self._statistics))
        if not torch.is_grad_enabled():
            # `to`, not `contiguous`: the latter leaves images of one channel unchanged, and their
            # convolutions then run in NCHW
            x_NCHW = x_NCHW.to(memory_format=torch.channels_last)
        h: Tensor = network.embed(x_NCHW)  # type: ignore[operator]
        return h

    def _with_logits(self, h_ND: Tensor) -> Tensor:
        logits_NC = self._network.classifier(h_ND)  # type: ignore[operator]
        return torch.cat([h_ND, self._logit_weight * logits_NC], dim=1)


def client_bytes(context: RoundContext, ipc: int, iterations: int, batch: int) -> int:
    """Returns roughly the memory that one more client in a condensation takes: the round's block of
    batch indices, the set with its gradient and velocity, and class sums of features; with batch
    norm a whole batch's activations."""
    pixels = (
        ipc
        * context.spec.image_shape[0]
        * context.spec.image_shape[1]
        * context.spec.image_shape[2]
    )
    if has_batch_norm(context.architecture):
        activation = getattr(context.architecture, "largest_activation", pixels // ipc)
        return int(4 * ACTIVATIONS * activation * batch * context.spec.classes)
    classifier: Any = context.architecture.classifier
    features = 4 * 8 * (classifier.in_features + classifier.out_features)
    return int(context.spec.classes * (4 * iterations * batch + 4 * 6 * pixels + features))


def _gradients(outputs: Tensor, leaf: Tensor, vectors: Tensor) -> Tensor:
    """Returns vectors [V, …] of the outputs pulled back to the leaf by autograd, [V, …]."""
    if len(vectors) == 1:
        (one,) = torch.autograd.grad(outputs, leaf, vectors[0], retain_graph=True)
        return one[None]
    (many,) = torch.autograd.grad(outputs, leaf, vectors, is_grads_batched=True, retain_graph=True)
    return many


def condense(
    synthetic_SICHW: Tensor,
    draw_network: Callable[[], nn.Module],
    matcher: Matcher,
    *,
    steps: int,
    optimiser: Optimiser,
    logit_weight: float = 1.0,
    precision: torch.dtype = torch.float32,
    draw_augmentation: Callable[[], Augmentation] | None = None,
    statistics_S: Tensor | None = None,
    memory_bytes: int = 2**32,
    compiled: bool = False,
    report: Callable[[int], None] = lambda step: None,
    keeper: StepKeeper | None = None,
    name: str = "condense",
) -> Tensor:
    """Moves the synthetic images towards the real distribution and returns them, [S, ipc, C, H, W].

    Args:
        synthetic_SICHW: start images, in normalised pixel units; not changed.
        draw_network: draws each step's network, which has `embed` and `classifier` and frozen
            weights.
        matcher: computes the gradient; with differential privacy it is the only part that accesses
            private data.
        optimiser: updates the images; the leading axes, segments and images, are independent.
        precision, statistics_S, memory_bytes, compiled: see `NetworkFeatures`; sums and updates are
            float32.
        report: receives the number of finished steps. The loop itself never waits for the device,
            except for copies of a private matcher's noise, which the host draws.
        keeper: checkpoints images and optimiser under `name` between steps. If this loop was
            interrupted before, it resumes from the checkpoint, with the same draws.
        name: of this loop among all of a round.
    """
    synthetic = synthetic_SICHW.detach().clone()
    if not len(synthetic):  # no client of the group has a class to send
        return synthetic
    state = optimiser.init(synthetic)
    changed = {"synthetic": synthetic, **{f"optimiser{k}": t for k, t in enumerate(state)}}

    def skip(done: int) -> None:
        for _ in range(done):
            draw_network()
            if draw_augmentation is not None:
                draw_augmentation()
        skip_matcher = getattr(matcher, "skip", None)
        if skip_matcher is not None:
            skip_matcher(done)

    features = None
    for step in resumable(steps, changed, keeper=keeper, name=name, report=report, skip=skip):
        network = draw_network()
        augment = draw_augmentation() if draw_augmentation is not None else None
        if features is None:
            features = NetworkFeatures(
                network,
                logit_weight,
                augment,
                precision,
                statistics_S=statistics_S,
                memory_bytes=memory_bytes,
                compiled=compiled,
                ipc=synthetic.shape[1],
            )
        else:
            features.use(network, augment)
        optimiser.update(synthetic, matcher.gradient(step, features, synthetic), state)
    return synthetic
