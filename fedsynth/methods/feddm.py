"""FedDM: clients send small synthetic sets that match their data's distribution around the global model (arXiv 2207.09653).

Client, every round (Algorithm 1): for T iterations draw w ~ P_w(w_r), draw real batches, and move the synthetic images down
∇ Σ_c L_c (Eq. 9). Server: train w from w_r on the union of all sets, projected onto ‖w − w_r‖ ≤ ρ (Eqs. 3, 10, 23).

With differential privacy the images start from noise, and the matching gradient comes from a mechanism: `residual` or `gradient`
(`fedsynth.synthesizer.condensation.matchers`), charged for T releases a round, send all classes; `features`
(`fedsynth.synthesizer.condensation.feature_sums`),
charged for M releases and the counts, those whose released count is large enough. `paper` is Algorithm 1's own noise, which guarantees
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf, sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.client import ClientGroup, OpenClients, PrivateClients, Segments
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters
from fedsynth.core.method import Memory, Presets, PrivatePlan
from fedsynth.core.validation import check_choices, check_embedding, check_ranges
from fedsynth.methods.shared.union import TrainsInBall
from fedsynth.models.batch_norm import has_batch_norm, with_grouped_statistics
from fedsynth.privacy.dpsgd import refuse_batch_norm
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation.distributions import (
    MATCHINGS,
    DistributionMatcher,
    refuse_private,
)
from fedsynth.synthesizer.condensation.feature_sums import FeatureSumMatcher
from fedsynth.synthesizer.condensation.loop import client_bytes, condense
from fedsynth.synthesizer.condensation.matchers import (
    ClippedMatcher,
    ExactMatcher,
    GradientMatcher,
    Matcher,
    PaperMatcher,
    ResidualMatcher,
)
from fedsynth.synthesizer.condensation.perturbation import READINGS, Perturbations
from fedsynth.synthesizer.condensation.real_batches import SMALL_CLASS, BatchIndices
from fedsynth.synthesizer.condensation.sets import (
    SyntheticSet,
    averaged_start,
    noise_start,
    real_start,
    split_uploads,
    with_kept_images,
)
from fedsynth.synthesizer.condensation.siamese import SiameseAugmentation

IMAGES, COUNTS = "images", "class counts"
"""The names of what a round releases."""


@dataclass(frozen=True)
class FedDM(TrainsInBall):
    """Settings, with the paper's values; those that the paper leaves open say why they are as they are.

    A step uses all synthetic images of a class: with ipc of 10 there is nothing to sample, and its gradient is the exact one.

    Args:
        radius: ρ of the ball around w_r, for the perturbation and for the server's projection. server_*: see `TrainsInBall`.
        ipc: images per class (10 on MNIST and CIFAR-10, 5 on CIFAR-100).
        iterations: T, condensation steps in a round.
        image_lr: η_c. image_momentum: 0, as Algorithm 1 has plain gradient steps (distribution matching's code uses 0.5).
        batch: real images of a class in a step.
        min_examples: a client sends a class if it has at least so many examples of it (inferred from the paper's Table 3). With DP on no rule
            looks at true counts; mechanism `features` takes it as the least released count.
        restart: False keeps S over the rounds: Algorithm 1's ClientUpdate has no initialisation. True goes back to the start images each
            round.
        perturbation: "sphere" (rescaling a Gaussian in 300,000 dimensions always ends on the sphere) or "ball" (uniform radius).
        augment: "none" (the paper mentions none) or "siamese". flip: whether "siamese" may mirror; off, as digits and letters are not
            symmetric.
        small_class: classes smaller than the batch: "all" examples (the exact mean) or "resample".
        logit_weight: weight b of the logits beside the embedding; 1 is Eq. 9.
        start_average: random real images that a start image is the mean of; 1: real images as they are.
        image_clip: clip the norm of each client's image gradient, for stability (FedAF's paper runs FedDM with 2, momentum 0.9 and averaged
            start images); 0: no clipping. Not a privacy mechanism.
        matching, blur: "mean" is Eq. 9; "gaussian", "energy" or "sinkhorn" match the classes' distributions of features by that loss
            (`fedsynth.synthesizer.condensation.distributions`, also for blur's units); not with differential privacy.
        batch_norm: of networks with batch norm, whose statistics in condensation are those of the batch at hand, real and synthetic apart:
            "client" takes all classes of a client together, as distribution matching's code does, "class" each class for itself.
        networks, count_noise: of mechanism `features`: M; and the counts' noise multiplier over that of the M networks' sums together,
            σ/√M, so that counts take 1/(1 + count_noise²) of the budget μ².
    """

    name: ClassVar[str] = "feddm"
    summary: ClassVar[str] = (
        "clients send synthetic sets matched to their data around the global model"
    )
    reference: ClassVar[str] = "Xiong et al. 2023, FedDM, arXiv 2207.09653"
    upload: ClassVar[type[Message]] = SyntheticSet
    protects: ClassVar[tuple[str, ...]] = ("residual", "gradient", "features", "paper")
    presets: ClassVar[Presets] = {
        "digits": {"iterations": 10, "image_lr": 5.0},
        "cifar100": {"ipc": 5},  # the paper's
    }

    ipc: int = 10
    iterations: int = 1000
    image_lr: float = 1.0
    image_momentum: float = 0.0
    batch: int = 256
    min_examples: int = 10
    restart: bool = False
    perturbation: str = "sphere"
    augment: str = "none"
    flip: bool = False
    small_class: str = "all"
    logit_weight: float = 1.0
    start_average: int = 1
    image_clip: float = 0.0
    matching: str = "mean"
    blur: float = 0.25
    batch_norm: str = "client"
    networks: int = 16
    count_noise: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, ipc=(1, inf), batch=(1, inf), iterations=(1, inf), min_examples=(0, inf))
        check_ranges(
            self,
            start_average=(1, inf),
            image_clip=(0, inf),
            networks=(1, inf),
            count_noise=(0.01, inf),
        )
        check_ranges(self, image_lr=(0, inf), image_momentum=(0, 1), logit_weight=(0, inf))
        check_choices(
            self,
            augment=("none", "siamese"),
            perturbation=READINGS,
            small_class=SMALL_CLASS,
            batch_norm=("client", "class"),
            matching=MATCHINGS,
        )
        check_ranges(self, blur=(1e-6, inf))

    def client_bytes(self, context: RoundContext) -> int:
        return client_bytes(context, self.ipc, self.iterations, self.batch)

    def check_model(self, model: nn.Module) -> None:
        check_embedding(self.name, model)

    def client_step(
        self,
        message: ModelParameters,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> list[tuple[Message, Memory]]:
        model = context.load(message.parameters)
        batch_norm = has_batch_norm(model)
        model = with_grouped_statistics(model) if batch_norm else model
        segments = (
            clients.segments()
            if isinstance(clients, PrivateClients)
            else clients.segments(self.min_examples)
        )
        start = self._start(clients, segments, memories, context)
        matcher = self._matcher(clients, segments, context)
        pull = (
            ClippedMatcher(matcher, segments.position.to(context.device), self.image_clip)
            if self.image_clip
            else matcher
        )
        period = self._networks if isinstance(matcher, FeatureSumMatcher) else None
        networks = Perturbations(
            model,
            self.radius,
            reading=self.perturbation,
            seed=context.seed,
            round=context.round,
            device=context.device,
            period=period,
        )
        images = condense(
            start,
            networks.draw,
            pull,
            steps=self.iterations,
            learning_rate=self.image_lr,
            momentum=self.image_momentum,
            logit_weight=self.logit_weight,
            precision=context.precision,
            draw_augmentation=self._augmentation(segments, context, period),
            statistics_S=self._statistics(segments, context) if batch_norm else None,
            memory_bytes=context.memory_bytes // 2,
            compiled=context.compiled
            and isinstance(clients, OpenClients),  # else a record more would change others' kernel
            report=lambda done: context.report("condense", done, self.iterations),
        )
        kept = matcher.kept if isinstance(matcher, FeatureSumMatcher) else None
        uploads = split_uploads(images, segments, len(clients.ids), kept)
        memories = [{"images": s.images} for s in split_uploads(images, segments, len(clients.ids))]
        return list(zip(uploads, memories, strict=True))

    @property
    def _networks(self) -> int:
        """M, or fewer where there are fewer steps to use them."""
        return min(self.networks, self.iterations)

    def private_plans(
        self, privacy: PrivacySettings, context: RoundContext
    ) -> tuple[PrivatePlan, ...]:
        """T releases a round, or M and one of the counts. Default clips are public: in feature space about the norm of a matched residual
        of instance-normalised features, which grows with the root of their number; for `paper` the paper's."""
        refuse_batch_norm(context.architecture)
        refuse_private(self.matching)
        classes, image_shape, width = (
            context.spec.classes,
            context.spec.image_shape,
            sum(self._columns(context)),
        )
        pixels = self.ipc * image_shape[0] * image_shape[1] * image_shape[2]
        mechanism = privacy.mechanism or self.protects[0]
        clipped, clip, columns = {
            "residual": (
                "residual [h(S) − h(x); z(S) − z(x)] of each example, embedding and logits jointly",
                0.25 * sqrt(width),
                width,
            ),
            "features": (
                "features [h(x); z(x)] of each example about the synthetic images' mean, embedding and logits jointly",
                0.25 * sqrt(width),
                width,
            ),
            "gradient": ("image gradient g̃(x) of each example (FedDM, Eq. 15)", 1.0, pixels),
            "paper": ("gradient of each class's batch, not of an example", 5.0, pixels),
        }[mechanism]
        once = mechanism == "features"
        rate = privacy.sample_rate or (
            1.0 if once else min(1.0, self.batch * classes / context.nominal_size)
        )
        plan = PrivatePlan(
            name=IMAGES,
            quantity="class sums of features" if once else "synthetic images",
            mechanism=mechanism,
            clipped=clipped,
            clip=privacy.clip or clip,
            sample_rate=rate,
            steps=self._networks if once else self.iterations,
            dimension=classes * columns,
            groups=classes,
        )
        if not once:
            return (plan,)
        ratio = self.count_noise / sqrt(self._networks)
        counts = PrivatePlan(
            name=COUNTS,
            quantity="class counts",
            mechanism=mechanism,
            clipped="each example counts 1",
            clip=1.0,
            sample_rate=rate,
            steps=1,
            dimension=classes,
            groups=classes,
            noise_ratio=ratio,
        )
        return plan, counts

    def _columns(self, context: RoundContext) -> tuple[int, int]:
        """Coordinates of an embedding and of its logits."""
        classifier: Any = context.architecture.classifier
        return classifier.in_features, classifier.out_features

    def _statistics(self, segments: Segments, context: RoundContext) -> Tensor:
        """Which segments share batch statistics."""
        numbers = segments.position if self.batch_norm == "client" else torch.arange(len(segments))
        return numbers.to(context.device)

    def _start(
        self,
        clients: ClientGroup,
        segments: Segments,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> Tensor:
        kept = [{} if self.restart else memory for memory in memories]
        return with_kept_images(
            lambda: self._fresh_start(clients, segments, context), segments, kept
        )

    def _fresh_start(
        self, clients: ClientGroup, segments: Segments, context: RoundContext
    ) -> Tensor:
        if isinstance(clients, PrivateClients):
            return noise_start(
                clients.ids, segments, self.ipc, clients.spec.image_shape, context.seed
            ).to(context.device)
        if self.start_average > 1:
            return averaged_start(clients, segments, self.ipc, self.start_average, context.seed)
        return real_start(clients, segments, self.ipc, context.seed)

    def _augmentation(
        self, segments: Segments, context: RoundContext, period: int | None
    ) -> Callable[[], Callable[[Tensor, Tensor], Tensor]] | None:
        """Draws each step's transformations by class, from the round's seed: all clients share them, as they share the networks."""
        if self.augment == "none":
            return None
        labels, steps = segments.label.to(context.device), count()
        generator = torch_generator(
            context.seed, "siamese augmentation", context.round, device=context.device
        )

        def draw() -> Callable[[Tensor, Tensor], Tensor]:
            nonlocal generator
            if next(steps) % (period or inf) == 0:
                generator = torch_generator(
                    context.seed, "siamese augmentation", context.round, device=context.device
                )
            transform = SiameseAugmentation(context.spec.classes, generator, flip=self.flip)
            return lambda x_NCHW, segment_N: transform(x_NCHW, labels[segment_N])

        return draw

    def _matcher(self, clients: ClientGroup, segments: Segments, context: RoundContext) -> Matcher:
        if isinstance(clients, OpenClients):
            batches = BatchIndices(
                clients,
                segments,
                self.batch,
                self.iterations,
                small_class=self.small_class,
                seed=context.seed,
                round=context.round,
            )
            exact = ExactMatcher(clients, batches)
            if context.privacy is not None:
                return PaperMatcher(exact, segments, batches, clients.noise(IMAGES))
            if self.matching == "mean":
                return exact
            return DistributionMatcher(exact, self.matching, self.blur)
        plan = clients.plan(IMAGES)
        series = clients.series(IMAGES)
        if plan.mechanism == "features":
            counts = clients.series(COUNTS)
            floor = max(1.0, self.min_examples * plan.sample_rate, 2 * counts[0].deviation)
            return FeatureSumMatcher(clients, series, counts, plan.steps, floor)
        divisor = plan.sample_rate * context.nominal_size / context.spec.classes
        kind = ResidualMatcher if plan.mechanism == "residual" else GradientMatcher
        return kind(clients, series, divisor)
