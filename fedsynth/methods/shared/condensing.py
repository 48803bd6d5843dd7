"""The base class of methods whose clients condense their data into images, class by class.

A method defines the networks that embed real and synthetic images (`feature_maps`). It may add
terms to the loss (`objective`) and fields to the upload (`statistics`, `make_upload`; with
differential privacy `private_plans` has an entry for each release). The rest is here: initial
images, real batches, the mechanism's matcher, batch norm, the loop, the images that a client keeps,
and the upload. The server trains on the union of all sets (`TrainsOnUnion`).

With differential privacy the images start from noise and all classes are sent. Only the matcher and
`statistics` access the data, through releases that are charged first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.client import ClientGroup, OpenClients, PrivateClients, Segments
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters
from fedsynth.core.method import Down, Memory, PrivatePlan, Results, Up
from fedsynth.core.uploads import Rule
from fedsynth.methods.shared.private_condensation import (
    IMAGES,
    Matching,
    feature_width,
    image_plan,
    private_matching,
)
from fedsynth.methods.shared.union import TrainsOnUnion
from fedsynth.models.batch_norm import has_batch_norm, with_grouped_statistics
from fedsynth.privacy.dpsgd import refuse_batch_norm
from fedsynth.privacy.plans import MAIN
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.synthesizer.condensation.distributions import (
    MATCHINGS,
    DistributionMatcher,
    refuse_private,
)
from fedsynth.synthesizer.condensation.loop import client_bytes, condense
from fedsynth.synthesizer.condensation.matchers import ExactMatcher, Matcher, PaperMatcher
from fedsynth.synthesizer.condensation.networks import FeatureMaps
from fedsynth.synthesizer.condensation.sets import (
    MOST_IPC,
    SMALL_CLASS,
    BatchIndices,
    SyntheticSet,
    averaged_start,
    check_set,
    noise_start,
    real_start,
    set_rules,
    split_uploads,
    with_kept_images,
)
from fedsynth.training.optimisers import MomentumSgd
from fedsynth.validation import check_choices, check_embedding, check_ranges


@dataclass(frozen=True)
class Condenses(TrainsOnUnion):
    """Condensation on the clients, and training on the union of their sets on the server.

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

    A custom method defines the networks that embed the images in a step:
    >>> from fedsynth import ModelSettings, RunSettings, simulate
    >>> class OneNetwork(Condenses):
    ...     name = "one-network"
    ...     def feature_maps(self, model, segments, context, period):
    ...         return FeatureMaps(lambda: model)
    >>> method = OneNetwork(ipc=2, iterations=5, image_lr=5.0, server_epochs=50)
    >>> result = simulate(RunSettings(method, rounds=1, model=ModelSettings(width=16, depth=2)))
    >>> result.accuracy > 0.5
    True
    """

    upload: ClassVar[type[Message]] = SyntheticSet
    protects: ClassVar[tuple[str, ...]] = ("residual",)
    matches_logits: ClassVar[bool] = True
    """Whether logits are matched in addition to embeddings."""

    ipc: int = 10
    iterations: int = 1000
    image_lr: float = 1.0
    image_momentum: float = 0.0
    batch: int = 256
    small_class: str = "all"
    min_examples: int = 10
    start_average: int = 1
    restart: bool = False
    batch_norm: str = "client"
    matching: str = "mean"
    blur: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, ipc=(1, MOST_IPC), iterations=(1, inf), batch=(1, inf))
        check_ranges(self, image_lr=(0, inf), image_momentum=(0, 1), blur=(1e-6, inf))
        check_ranges(self, min_examples=(0, inf), start_average=(1, inf))
        check_choices(self, small_class=SMALL_CLASS, batch_norm=("client", "class"))
        check_choices(self, matching=MATCHINGS)

    # ------------------------------------------------------------------ what methods differ in

    def feature_maps(
        self, model: nn.Module, segments: Segments, context: RoundContext, period: int | None
    ) -> FeatureMaps:
        """Returns the round's networks, drawn from its public seed, so that all clients share them.

        Args:
            model: w_r, frozen; with batch norm, one with grouped statistics.
            segments: of the images, (client, class) pairs.
            context: the round's.
            period: the number of steps after which the draws must repeat; None: never.
        """
        raise NotImplementedError  # abstract

    def objective(
        self, matcher: Matcher, message: Down, segments: Segments, context: RoundContext
    ) -> Matcher:
        """Returns the images' loss: the matcher, the only part that sees data, and any other terms.

        Args:
            matcher: of the setting `matching`, or of the mechanism.
            message: what the server sent.
            segments: of the images, (client, class) pairs.
            context: the round's.
        """
        return matcher

    def statistics(
        self,
        model: nn.Module,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> Sequence[Mapping[str, Tensor]]:
        """Returns further statistics of each client's data to upload, by name.

        Those of private clients come from charged series (`class_sums`). They are computed before
        the images are condensed.

        Args:
            model: w_r, frozen, in evaluation mode.
            clients: the group.
            memories: of its clients.
            context: the round's.
        """
        return [{} for _ in clients.ids]

    def make_upload(
        self, images: SyntheticSet, statistics: Mapping[str, Tensor], context: RoundContext
    ) -> Message:
        """Returns a client's upload.

        Args:
            images: its condensed images, normalised, with labels.
            statistics: what `statistics` returned for it.
            context: the round's.
        """
        return images

    def open_start(self, clients: OpenClients, segments: Segments, context: RoundContext) -> Tensor:
        """Returns the initial images [S, ipc, C, H, W] of open clients."""
        if self.start_average > 1:
            return averaged_start(clients, segments, self.ipc, self.start_average, context.seed)
        return real_start(clients, segments, self.ipc, context.seed)

    def private_plans(
        self, privacy: PrivacySettings, context: RoundContext
    ) -> tuple[PrivatePlan, ...]:
        """Returns the images' releases; a method with more releases appends them."""
        self.check_private(context)
        plan = image_plan(
            privacy.mechanism or self.protects[0],
            privacy,
            context,
            ipc=self.ipc,
            steps=self.iterations,
            batch=self.batch,
            logits=self.matches_logits,
        )
        return (plan,)

    # ------------------------------------------------------------------------------ what they share

    def upload_rules(self, phase: str, client: int, context: RoundContext) -> dict[str, Rule]:
        return set_rules(context.spec, self.ipc) if phase == MAIN else {}

    def check_upload(self, phase: str, upload: Up, client: int, context: RoundContext) -> None:
        if phase == MAIN and isinstance(upload, SyntheticSet):
            check_set(upload, self.ipc)

    def client_bytes(self, context: RoundContext) -> int:
        return client_bytes(context, self.ipc, self.iterations, self.batch)

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

    def client_step(
        self,
        message: ModelParameters,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> Results:
        model = context.load(message.parameters).requires_grad_(False).eval()
        segments = self._segments(clients)
        start = self._start(clients, segments, memories, context)
        matching = self._matching(clients, segments, context)
        statistics = self.statistics(model, clients, memories, context)
        mixes = has_batch_norm(model)
        network = with_grouped_statistics(model) if mixes else model
        maps = self.feature_maps(network, segments, context, matching.period)
        images = condense(
            start,
            maps.draw_network,
            self.objective(matching.matcher, message, segments, context),
            steps=self.iterations,
            optimiser=MomentumSgd(self.image_lr, self.image_momentum),
            logit_weight=maps.logit_weight,
            precision=context.precision,
            draw_augmentation=maps.draw_augmentation,
            statistics_S=self._sharing(segments, context) if mixes else None,
            memory_bytes=context.memory_bytes // 2,
            compiled=may_compile(clients, context),
            report=lambda done: context.report("condense", done, self.iterations),
            keeper=context.keeper if context.privacy is None else None,
            name=f"{clients.ids[0]}-{clients.ids[-1]}",
        )
        kept = split_uploads(images, segments, len(clients.ids))
        sent = split_uploads(images, segments, len(clients.ids), matching.kept)
        return [
            (self.make_upload(upload, told, context), {"images": own.images})
            for upload, told, own in zip(sent, statistics, kept, strict=True)
        ]

    def _segments(self, clients: ClientGroup) -> Segments:
        if isinstance(clients, PrivateClients):
            return clients.segments()
        return clients.segments(self.min_examples)

    def _start(
        self,
        clients: ClientGroup,
        segments: Segments,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> Tensor:
        """Returns the images that each client kept, or new initial images."""

        def fresh() -> Tensor:
            if isinstance(clients, OpenClients):
                return self.open_start(clients, segments, context)
            noise = noise_start(
                clients.ids, segments, self.ipc, clients.spec.image_shape, context.seed
            )
            return noise.to(context.device)

        return with_kept_images(fresh, segments, [{}] * len(memories) if self.restart else memories)

    def _matching(
        self, clients: ClientGroup, segments: Segments, context: RoundContext
    ) -> Matching:
        columns = None if self.matches_logits else feature_width(context, logits=False)
        if isinstance(clients, PrivateClients):
            return private_matching(
                clients, context, columns=columns, min_examples=self.min_examples
            )
        batches = BatchIndices(
            clients,
            segments,
            self.batch,
            self.iterations,
            small_class=self.small_class,
            seed=context.seed,
            round=context.round,
        )
        exact = ExactMatcher(clients, batches, columns)
        if context.privacy is not None:  # a mechanism without a guarantee
            return Matching(PaperMatcher(exact, segments, batches, clients.noise(IMAGES)))
        if self.matching == "mean":
            return Matching(exact)
        return Matching(DistributionMatcher(exact, self.matching, self.blur, columns))

    def _sharing(self, segments: Segments, context: RoundContext) -> Tensor:
        """Returns a group number per segment [S]; segments of one group share batch statistics."""
        numbers = segments.position if self.batch_norm == "client" else torch.arange(len(segments))
        return numbers.to(context.device)


def may_compile(clients: ClientGroup, context: RoundContext) -> bool:
    """Returns whether torch.compile may be used: never for private clients.

    There one more record could move others to another kernel, which in bf16 changes the sums.
    """
    return context.compiled and isinstance(clients, OpenClients)
