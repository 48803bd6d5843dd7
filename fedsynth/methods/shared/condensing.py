"""Base classes for methods with synthetic images.

The clients condense their data into synthetic images of each class, or the server trains on such
images. The algorithms' steps are in `feddm.py`, `fedaf.py`, `real.py` and `fedsum.py`, and call the
functions of `fedsynth.synthesizer.condensation`.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.client import ClientClassPairs, ExactClientView, Group, PrivateClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.core.method import Method, Plans, Presets, ReleasePlan, Upload
from fedsynth.core.uploads import Rule
from fedsynth.methods.shared import class_sums
from fedsynth.models.layers import check_embedding, has_batch_norm
from fedsynth.privacy.dpsgd import refuse_batch_norm
from fedsynth.privacy.plans import MAIN
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.seeding import forked_rng, torch_generator
from fedsynth.synthesizer.condensation import losses, sets
from fedsynth.synthesizer.condensation.matching import (
    ACTIVATIONS,
    ExactMatcher,
    MatchingObjective,
    NetworkFeatures,
)
from fedsynth.training.loop import resumable
from fedsynth.training.sgd import MomentumSgd, SgdSettings
from fedsynth.validation import in_range, one_of


@dataclass(frozen=True)
class TrainsOnUnion(Method):
    """Settings for a server that trains the global model on the union of all uploaded images
    (FedDM, Eq. 10).

    The training starts from the round's initial weights w_r.

    Args:
        ipc: number of images of each class.
        server_epochs, server_batch, server_lr: epochs, batch size and learning rate of the server's
            SGD on the union. The defaults are the paper's.
        server_momentum, server_weight_decay: momentum and weight decay of the server's SGD on the
            union. The paper does not state them. The defaults are those of distribution matching's
            public code.
    """

    presets: ClassVar[Presets] = {"digits": {"server_epochs": 60}}
    features_refusal = "the server trains the network on images. Use fedstats, which sums features"
    robust_refusal = "the server averages no models, but trains on the images of all clients"

    ipc: int = in_range(10, 1, sets.MAX_IPC)
    server_epochs: int = in_range(500, 0)
    server_batch: int = in_range(256, 1)
    server_lr: float = in_range(0.01, 0)
    server_momentum: float = in_range(0.9, 0, 1)
    server_weight_decay: float = in_range(5e-4, 0)

    def union_sgd(self) -> SgdSettings:
        """Returns the SGD settings for the server's training on the uploaded images."""
        optimiser = MomentumSgd(self.server_lr, self.server_momentum, self.server_weight_decay)
        return SgdSettings(self.server_epochs, self.server_batch, optimiser)

    def upload_rules(self, exchange: str, client: int, context: RoundContext) -> dict[str, Rule]:
        return sets.set_rules(context.spec, self.ipc) if exchange == MAIN else {}

    def check_upload(
        self, exchange: str, upload: Upload, client: int, context: RoundContext
    ) -> None:
        if isinstance(upload, sets.SyntheticSet):
            sets.check_set(upload, self.ipc)


@dataclass(frozen=True)
class TrainsInBall(TrainsOnUnion):
    """Settings for a server that keeps the trained weights close to the current weights.

    The trained weights satisfy ‖w − w_r‖₂ ≤ ρ (FedDM, Eqs. 3 and 23).

    Args:
        radius: ρ, the radius of the ball.
    """

    presets: ClassVar[Presets] = {"cifar100": {"ipc": 5}}  # FedDM's paper

    radius: float = in_range(5.0, 0)

    def union_sgd(self) -> SgdSettings:
        return replace(super().union_sgd(), radius=self.radius)


@dataclass(frozen=True)
class CondensingMethod(TrainsOnUnion):
    """Base class for methods whose clients condense their data into synthetic images.

    A subclass defines `client_step` and `server_step`. A condensation step uses all of a class's
    synthetic images. With only about ten images per class, sampling would save nothing, and the
    gradient is exact. `TrainsOnUnion` documents the server's settings.

    For networks with batch norm, all synthetic images of a client share batch statistics, and so do
    its real images, as in distribution matching's public code. Batch norm is refused with
    differential privacy.

    Args:
        iterations: T, the number of condensation steps in a round.
        image_lr: η_c, the learning rate of the images.
        image_momentum: momentum of the image updates.
        batch: number of real images per class in a step.
        small_class: how a class with fewer examples than a batch is used. "all" uses all its
            examples, which gives the exact mean. "resample" draws a batch with replacement.
        min_examples: smallest number of examples with which a client sends a class. With a privacy
            guarantee, only released counts are compared with it, never the true ones.
        start_average: number of random real images whose mean is a start image. With 1, the images
            start as real images. With a privacy guarantee, the images start from public noise
            instead.
        restart: whether the images start again in each round. With False, the last round's images
            are improved further.
        matching: the loss between features that FedDM and FedAF minimise: mean, gaussian, energy or
            sinkhorn, or FILE.py:NAME for your own. "mean" matches class-mean features. The others
            match each class's feature distribution (`fedsynth.synthesizer.condensation.losses`),
            and are refused with differential privacy. Your function gets a class's real features
            [B, D] and synthetic features [M, D], and returns a scalar.
        blur: the blur for "gaussian", "energy" and "sinkhorn", in the units that these losses
            define.

    A subclass can change the uploads of another method:

    >>> from fedsynth import FedDM, RunSettings, simulate
    >>> class Rounded(FedDM):
    ...     name = "rounded"
    ...     def client_step(self, *arguments):
    ...         condensed = super().client_step(*arguments)
    ...         return [(replace(s, images=s.images.round()), state) for s, state in condensed]
    >>> method = Rounded(ipc=2, iterations=5, server_epochs=5)
    >>> simulate(RunSettings(method, rounds=1)).uploads[0].images.frac().abs().max()
    tensor(0.)
    """

    upload: ClassVar[type[Message]] = sets.SyntheticSet
    dp_mechanisms: ClassVar[tuple[str, ...]] = ("residual",)
    matches_logits: ClassVar[bool] = True
    """Whether logits are matched in addition to embeddings."""

    iterations: int = in_range(1000, 1)
    image_lr: float = in_range(1.0, 0)
    image_momentum: float = in_range(0.0, 0, 1)
    batch: int = in_range(256, 1)
    small_class: str = one_of(*sets.SMALL_CLASS)
    min_examples: int = in_range(10, 0)
    start_average: int = in_range(1, 1)
    restart: bool = False
    matching: str = losses.MATCHINGS[0]
    blur: float = in_range(0.25, 1e-6)

    def __post_init__(self) -> None:
        losses.check_matching(self.matching)
        super().__post_init__()

    def release_plans(self, privacy: PrivacySettings, context: RoundContext) -> Plans:
        """Returns the planned DP releases of a round: synthetic images.

        A round has T noisy releases, and each of them moves the images by one step. Methods with
        further releases append their plans.
        """
        self.check_private(context)
        mechanism = privacy.mechanism or self.dp_mechanisms[0]
        classes = context.spec.classes
        coordinates = self.ipc * math.prod(context.spec.image_shape)
        if mechanism == "residual":
            coordinates = class_sums.feature_width(context, self.matches_logits)
            clip = class_sums.default_clip(coordinates)
            clipped = "residual h(S) − h(x) of each example's embedding"
            if self.matches_logits:
                clipped = (
                    "residual [h(S) − h(x); z(S) − z(x)] of each example, embedding and logits "
                    "jointly"
                )
        elif mechanism == "gradient":
            clip, clipped = 1.0, "image gradient g̃(x) of each example (FedDM, Eq. 15)"
        elif mechanism == "paper":
            clip, clipped = 5.0, "gradient of each class's batch, not of an example"  # the paper's
        else:
            raise class_sums.unsupported(mechanism)
        rate = min(1.0, self.batch * classes / context.nominal_size)
        plan = ReleasePlan(
            name=class_sums.IMAGES,
            quantity="synthetic images",
            mechanism=mechanism,
            clipped=clipped,
            clip=privacy.clip or clip,
            sample_rate=privacy.sample_rate or rate,
            steps=self.iterations,
            dimension=classes * coordinates,
            groups=classes,
        )
        return (plan,)

    def client_bytes(self, context: RoundContext) -> int:
        """Estimates how many bytes of memory one more client in a group needs.

        The estimate includes a round's batch indices, the synthetic images with their gradient and
        velocity, and the class sums of features. For networks with batch norm, it is the
        activations' size for a whole batch.
        """
        classes = context.spec.classes
        pixels = math.prod(context.spec.image_shape)
        network: Any = context.architecture
        if has_batch_norm(network):
            activation = getattr(network, "largest_activation", pixels)
            return int(4 * ACTIVATIONS * activation * self.batch * classes)
        features = network.classifier.in_features + network.classifier.out_features
        numbers = self.iterations * self.batch + 6 * self.ipc * pixels + 8 * features
        return int(4 * classes * numbers)

    def check_model(self, model: nn.Module) -> None:
        check_embedding(self.name, model)

    def check_private(self, context: RoundContext) -> None:
        """Raises an error if the network or the loss cannot be used with differential privacy.

        Raises:
            ForbiddenLayerError: the network has batch norm.
            SettingError: `matching` compares whole distributions.
        """
        refuse_batch_norm(context.architecture)
        losses.refuse_private(self.matching)

    # ------------------------------------------------------------- housekeeping of a client's step

    def pairs(self, clients: Group) -> ClientClassPairs:
        """Returns the (client, class) pairs for which images are made.

        With a privacy guarantee, these are all pairs, because it is private which classes a client
        has.
        """
        if isinstance(clients, PrivateClientView):
            return clients.pairs()
        return clients.pairs(self.min_examples)

    def matcher(
        self, clients: Group, pairs: ClientClassPairs, context: RoundContext
    ) -> MatchingObjective:
        """Returns the loss between synthetic images and real data.

        With differential privacy, the loss clips, sums and adds noise. Otherwise, it compares a
        batch of each class's real images with all of its synthetic images.
        """
        width = None
        if not self.matches_logits:
            width = class_sums.feature_width(context, logits=False)
        if isinstance(clients, PrivateClientView):
            return class_sums.private_matching(
                clients, context, columns=width, min_examples=self.min_examples
            )
        seed, r = context.seed, context.round
        batches = sets.BatchIndices(
            clients, pairs, self.batch, self.iterations, seed, r, self.small_class
        )
        exact = ExactMatcher(clients, batches, width)
        if self.matching == "mean":
            return exact
        return losses.DistributionMatcher(exact, self.matching, self.blur, width)

    def features(
        self,
        clients: Group,
        pairs: ClientClassPairs,
        context: RoundContext,
        logit_weight: float = 1.0,
    ) -> NetworkFeatures:
        """Returns a function that computes the features of images.

        The features are a network's embedding and its weighted logits. The function's method `use`
        sets the network.

        Args:
            clients: the group of clients.
            pairs: the condensed (client, class) pairs.
            context: the context of the round, which sets the precision and the memory bound.
            logit_weight: b.
        """
        statistics = None
        if has_batch_norm(context.architecture):
            statistics = pairs.position.to(context.device)
        return NetworkFeatures(
            logit_weight=logit_weight,
            precision=context.precision,
            statistics=statistics,
            memory_bytes=context.memory_bytes // 2,
            # with privacy one more record could move others to another kernel, which changes sums
            compiled=context.compiled and isinstance(clients, ExactClientView),
            ipc=self.ipc,
        )

    def steps(
        self,
        clients: Group,
        images_SICHW: Tensor,
        velocity: Tensor,
        context: RoundContext,
        draws: Sequence[Iterator[object]],
    ) -> Iterator[int]:
        """Yields the condensation step numbers t = 0, …, T − 1.

        It also reports the progress and saves checkpoints. Yields nothing if there are no images.
        Private images are limited to the server's range after the last step, because noise has no
        bound.

        Args:
            clients: the group of clients.
            images_SICHW, velocity: tensors that the caller changes in place, saved in checkpoints.
            context: the context of the round.
            draws: random draws that are skipped on resuming, as in `resumable`.
        """
        if not len(images_SICHW):  # no client of the group has a class to send
            return
        yield from resumable(
            self.iterations,
            {"synthetic": images_SICHW, "velocity": velocity},
            keeper=context.loop_keeper,
            name=f"{clients.ids[0]}-{clients.ids[-1]}",
            report=lambda completed: context.report("condense", completed, self.iterations),
            draws=draws,
        )
        if context.privacy is not None:
            images_SICHW.clamp_(-sets.MAX_PIXEL, sets.MAX_PIXEL)


def perturbed(
    w_r: nn.Module, radius: float, variant: str, context: RoundContext, period: int | None = None
) -> Iterator[nn.Module]:
    """Yields each step's network, drawn at random near the global model.

    The weights are w ~ P_w(w_r), where w = w_r + ε and ‖ε‖₂ ≤ ρ (App. D.3, Eq. 24).

    All clients use the same networks, drawn from the round's public seed. In Algorithm 1, each
    client draws its own. The function yields the same network object each time, with different
    weights.

    Args:
        w_r: the global model. It is copied, and the weights of the copy are frozen.
        radius: ρ. With 0, every network is w_r itself.
        variant: "sphere" or "ball". With "sphere", ε ~ N(0, I) is rescaled to length ρ if it is
            longer. With 300,000 parameters, where ‖N(0, I)‖ ≈ 550, it is always longer. With
            "ball", the length of ε is uniform in [0, ρ].
        context: the context of the round.
        period: number of networks before the sequence repeats. With None, it never repeats.
    """
    network, weights = _flat_copy(w_r, context)
    center = weights.clone()
    epsilon = torch.empty_like(center)
    for step in count():
        if step % (period or sys.maxsize) == 0:
            generator = torch_generator(
                context.seed, "parameter perturbation", context.round, device=context.device
            )
        epsilon.normal_(generator=generator)
        norm = torch.linalg.vector_norm(epsilon)
        if variant == "ball":
            scale = radius * torch.rand((), generator=generator, device=norm.device) / norm
        else:
            scale = (radius / norm).clamp_max(1.0)
        torch.addcmul(center, epsilon, scale, out=weights)
        yield network


def resampled(
    w_r: nn.Module, gamma: float, context: RoundContext, period: int | None = None
) -> Iterator[nn.Module]:
    """Yields each step's network, a mixture of the global model and a random network.

    The weights are γ·w_r + (1 − γ)·w̃, with random w̃ (Eq. 17). `reset_parameters` of each layer
    initialises w̃. All clients use the same random draws, which the paper does not require. With a
    `period`, the draws repeat after `period` networks. The same network object is yielded each
    time, and w_r is copied.
    """
    network, weights = _flat_copy(w_r, context)
    center = weights.clone()
    scratch = copy.deepcopy(context.architecture).cpu().requires_grad_(False)
    for step in count():
        if gamma < 1:
            number = step % (period or sys.maxsize)
            with forked_rng(context.seed, "model re-sampling", context.round, number):
                for layer in scratch.modules():
                    if hasattr(layer, "reset_parameters"):
                        layer.reset_parameters()  # type: ignore[operator]
            fresh = _vector(scratch).to(center.device, non_blocking=True)
            torch.lerp(fresh, center, gamma, out=weights)
        yield network


def _flat_copy(w: nn.Module, context: RoundContext) -> tuple[nn.Module, Tensor]:
    """Copies a network to the device. Returns the copy and its weights as one vector [P].

    The copy's frozen parameters share the memory of the vector.
    """
    network = copy.deepcopy(w).to(context.device).requires_grad_(False).eval()
    weights = _vector(network)
    nn.utils.vector_to_parameters(weights, network.parameters())
    return network, weights


def _vector(network: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(map(Tensor.contiguous, network.parameters()))
