"""Settings and declarations that methods share whose clients condense their data into images, class
by class, or whose servers train on such images; and the housekeeping of their loops.

The steps of an algorithm are on the methods' own pages (`feddm.py`, `fedaf.py`, `real.py`,
`fedsum.py`). They call the functions of `fedsynth.synthesizer.condensation`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.client import ClientClassPairs, ClientGroup, ExactClientView, PrivateClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters
from fedsynth.core.method import Method, Presets, ReleasePlan, State, Upload
from fedsynth.core.uploads import Rule
from fedsynth.methods.shared.private_condensation import image_plan
from fedsynth.models.batch_norm import has_batch_norm
from fedsynth.privacy.dpsgd import refuse_batch_norm
from fedsynth.privacy.plans import MAIN
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.synthesizer.condensation.distributions import MATCHINGS, refuse_private
from fedsynth.synthesizer.condensation.matching import ACTIVATIONS, NetworkFeatures
from fedsynth.synthesizer.condensation.sets import (
    MAX_IPC,
    SMALL_CLASS,
    SyntheticSet,
    check_set,
    set_rules,
)
from fedsynth.training.loop import resumable
from fedsynth.training.sgd import MomentumSgd, SgdSettings
from fedsynth.validation import check_embedding, in_range, one_of


@dataclass(frozen=True)
class TrainsOnUnion(Method):
    """Settings of a server that trains w from w_r on all uploaded images (FedDM, Eq. 10).

    Args:
        server_epochs, server_batch, server_lr: SGD on the union, with the paper's values.
        server_momentum, server_weight_decay: not in the paper; they follow distribution matching's
            public code.
    """

    presets: ClassVar[Presets] = {"digits": {"server_epochs": 60}}
    features_refusal: ClassVar[str] = (
        "its network is trained on condensed images: use fedstats, whose images come from "
        "sums of features"
    )
    robust_refusal: ClassVar[str] = (
        "its server does not average models but trains on the union of the clients' images; "
        "a malicious client affects only the images that it sends"
    )

    server_epochs: int = in_range(500, 0)
    server_batch: int = in_range(256, 1)
    server_lr: float = in_range(0.01, 0)
    server_momentum: float = in_range(0.9, 0, 1)
    server_weight_decay: float = in_range(5e-4, 0)

    def union_sgd(self) -> SgdSettings:
        """Returns the settings of the server's training."""
        optimiser = MomentumSgd(self.server_lr, self.server_momentum, self.server_weight_decay)
        return SgdSettings(self.server_epochs, self.server_batch, optimiser)

    def broadcast(self, state: State, context: RoundContext) -> Message:
        return ModelParameters(state.parameters, 1.0)


@dataclass(frozen=True)
class TrainsInBall(TrainsOnUnion):
    """Settings of a server that stays in ‖w − w_r‖₂ ≤ ρ while it trains (FedDM, Eqs. 3 and 23).

    Args:
        radius: ρ.
    """

    radius: float = in_range(5.0, 0)

    def union_sgd(self) -> SgdSettings:
        return replace(super().union_sgd(), radius=self.radius)


@dataclass(frozen=True)
class CondensingMethod(TrainsOnUnion):
    """Settings of condensation on the clients. A method defines `client_step` and `server_step`.

    A step uses all synthetic images of a class: with ipc of 10 there is nothing to sample, and its
    gradient is the exact one. The server's settings are `TrainsOnUnion`'s.

    Args:
        ipc: synthetic images per class.
        iterations: T, condensation steps in a round.
        image_lr: η_c, of the images.
        image_momentum: of the images' gradient steps.
        batch: real images of a class in a step.
        small_class: classes smaller than the batch: "all" examples (the exact mean) or "resample".
        min_examples: a client sends a class if it has at least this many examples of it. With
            differential privacy released counts are compared with it, never true ones.
        start_average: random real images that a start image is the mean of; 1: real images as they
            are. With differential privacy images start from public noise.
        restart: False keeps S over the rounds; True goes back to the start images each round.
        batch_norm: of networks with batch norm, whose statistics in condensation are those of the
            batch at hand, real and synthetic apart: "client" takes all classes of a client
            together, as distribution matching's code does, "class" each class for itself. Refused
            with differential privacy.
        matching: what condensation matches: "mean" (class means of features), "gaussian", "energy"
            or "sinkhorn". The last three match the classes' distributions of features by that loss
            (`fedsynth.synthesizer.condensation.distributions`); not with differential privacy.
        blur: of those losses, in their units.

    A method can change what another one uploads:

    >>> from fedsynth import FedDM, ModelSettings, RunSettings, simulate
    >>> class Rounded(FedDM):
    ...     name = "rounded"
    ...     def client_step(self, *arguments):
    ...         condensed = super().client_step(*arguments)
    ...         return [(replace(s, images=s.images.round()), memory) for s, memory in condensed]
    >>> settings = RunSettings(Rounded(ipc=2), rounds=1, model=ModelSettings(width=8, depth=2))
    >>> simulate(settings).uploads[0].images.frac().abs().max()
    tensor(0.)
    """

    upload: ClassVar[type[Message]] = SyntheticSet
    dp_mechanisms: ClassVar[tuple[str, ...]] = ("residual",)
    matches_logits: ClassVar[bool] = True
    """Whether logits are matched in addition to embeddings."""

    ipc: int = in_range(10, 1, MAX_IPC)
    iterations: int = in_range(1000, 1)
    image_lr: float = in_range(1.0, 0)
    image_momentum: float = in_range(0.0, 0, 1)
    batch: int = in_range(256, 1)
    small_class: str = one_of(*SMALL_CLASS)
    min_examples: int = in_range(10, 0)
    start_average: int = in_range(1, 1)
    restart: bool = False
    batch_norm: str = one_of("client", "class")
    matching: str = one_of(*MATCHINGS)
    blur: float = in_range(0.25, 1e-6)

    def release_plans(
        self, privacy: PrivacySettings, context: RoundContext
    ) -> tuple[ReleasePlan, ...]:
        """Returns the images' releases; a method with more releases appends them."""
        self.check_private(context)
        plan = image_plan(
            privacy.mechanism or self.dp_mechanisms[0],
            privacy,
            context,
            ipc=self.ipc,
            steps=self.iterations,
            batch=self.batch,
            logits=self.matches_logits,
        )
        return (plan,)

    def upload_rules(self, phase: str, client: int, context: RoundContext) -> dict[str, Rule]:
        return set_rules(context.spec, self.ipc) if phase == MAIN else {}

    def check_upload(self, phase: str, upload: Upload, client: int, context: RoundContext) -> None:
        if phase == MAIN and isinstance(upload, SyntheticSet):
            check_set(upload, self.ipc)

    def client_bytes(self, context: RoundContext) -> int:
        """Returns roughly the memory of one more client: the round's block of batch indices, the
        set with its gradient and velocity, and class sums of features; with batch norm a whole
        batch's activations."""
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
        """Refuses settings that no mechanism protects.

        Raises:
            ForbiddenLayerError: batch norm.
            SettingError: a matching of whole distributions.
        """
        refuse_batch_norm(context.architecture)
        refuse_private(self.matching)

    # ------------------------------------------------------------- housekeeping of a client's step

    def pairs(self, clients: ClientGroup) -> ClientClassPairs:
        """Returns the (client, class) pairs that have images. With differential privacy all of
        them, as a client's set of classes is private."""
        if isinstance(clients, PrivateClientView):
            return clients.segments()
        return clients.segments(self.min_examples)

    def features(
        self,
        clients: ClientGroup,
        pairs: ClientClassPairs,
        context: RoundContext,
        logit_weight: float = 1.0,
    ) -> NetworkFeatures:
        """Returns u_w = [h_w; b·z_w] with the run's precision and memory; `use` sets w."""
        statistics = None
        if has_batch_norm(context.architecture):
            statistics = pairs.position.to(context.device)
            if self.batch_norm == "class":
                statistics = torch.arange(len(pairs), device=context.device)
        return NetworkFeatures(
            logit_weight=logit_weight,
            precision=context.precision,
            statistics_S=statistics,
            memory_bytes=context.memory_bytes // 2,
            # with privacy one more record could move others to another kernel, which changes sums
            compiled=context.compiled and isinstance(clients, ExactClientView),
            ipc=self.ipc,
        )

    def steps(
        self,
        clients: ClientGroup,
        images_SICHW: Tensor,
        velocity: Tensor,
        context: RoundContext,
        draws: Sequence[Iterator[object]],
    ) -> Iterator[int]:
        """Yields t = 0, …, T − 1 with progress and checkpoints; none if there are no images.

        Args:
            clients: the group.
            images_SICHW, velocity: changed in place by the caller, and saved in checkpoints.
            context: the round's.
            draws: see `resumable`.
        """
        if not len(images_SICHW):  # no client of the group has a class to send
            return
        yield from resumable(
            self.iterations,
            {"synthetic": images_SICHW, "velocity": velocity},
            keeper=context.loop_keeper,
            name=f"{clients.ids[0]}-{clients.ids[-1]}",
            report=partial(context.report, "condense", total=self.iterations),
            draws=draws,
        )
