"""FedSum: FedDM's objective from class sums of M shared networks, pooled before one condensation.

In FedDM (arXiv 2207.09653) each client condenses its own data, and the server trains on the union.
Its loss, Σ_c ‖mean_{D_c} u_w − mean_{S_c} u_w‖² (Eq. 9), depends on the data only through the class
means of features, and class means of all clients' data are pooled sums over pooled counts. So here
clients send class sums under M networks around the global model, drawn from the round's public
seed, with their counts. The server adds them up, condenses one set S towards the pooled means, and
trains on it. A client makes M passes over its data in place of T steps, and the partition makes no
difference to the sums.

With differential privacy each network's sums are one release of mechanism `features`
(`fedsynth.synthesizer.condensation.feature_sums`), and the counts one more; what the server does
with them costs nothing. Images start from public noise, with or without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.client import ClientGroup, PrivateClients
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, public, released
from fedsynth.core.method import Memory, Presets, PrivatePlan, Results
from fedsynth.core.state import ServerState
from fedsynth.core.uploads import LARGEST, Array, Rule, most_examples
from fedsynth.data.images import normalise
from fedsynth.features.random_images import random_images
from fedsynth.methods.shared.class_sums import COUNTS
from fedsynth.methods.shared.condensing import may_compile
from fedsynth.methods.shared.noise_shares import SharesNoise
from fedsynth.methods.shared.private_condensation import (
    IMAGES,
    feature_plans,
    feature_width,
)
from fedsynth.methods.shared.union import TrainsInBall
from fedsynth.privacy.disclosure import Disclosure
from fedsynth.privacy.disclosure import released as made_of_released
from fedsynth.privacy.dpsgd import refuse_batch_norm
from fedsynth.privacy.requests import check_tensor
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation.feature_sums import (
    SharedNetworks,
    TargetMatcher,
    centres,
    sums_of,
)
from fedsynth.synthesizer.condensation.loop import condense
from fedsynth.synthesizer.condensation.networks import AUGMENTATIONS, FRESH, READINGS, maps_around
from fedsynth.synthesizer.condensation.sets import MOST_IPC, SyntheticSet, train_on_union
from fedsynth.training.optimisers import MomentumSgd
from fedsynth.validation import check_choices, check_embedding, check_ranges

STARTS = ("noise", "random-process")
"""Initial images: normal noise, or random-process images. Both are public."""


@dataclass(frozen=True)
class SumsRequest(ModelParameters):
    """Sent to clients: w_r, and the images S [classes · ipc, C, H, W], whose feature means the sums
    are centred on."""

    images: Tensor = public("goes down, not up")


@dataclass(frozen=True)
class NetworkSums(Message):
    """The upload: sums of features, centred on S, by network and class [M, classes, D], and counts
    [classes]."""

    sums: Tensor = released()
    counts: Tensor = released()


@dataclass(frozen=True)
class CondensedState(ServerState):
    """The state, with S [classes · ipc, C, H, W], normalised, and the classes with enough data,
    bool [classes]; None before the first round."""

    images: Tensor | None = None
    kept: Tensor | None = None


@dataclass(frozen=True)
class FedSum(TrainsInBall, SharesNoise):
    """Settings: FedDM's where they mean the same; see `TrainsInBall`, `SharesNoise`, and

    Args:
        networks: M, passes of a client over its data in a round.
        ipc: images per class.
        iterations: T, condensation steps of the server in a round; step t looks through network t
            mod M.
        image_lr: η_c, of the images.
        image_momentum: of the images' gradient steps.
        min_examples: images of a class are trained on if clients together have this many examples
            of it. With differential privacy their released count must also reach twice its noise.
        start: what images start from, "noise" or "random-process" images; both are public.
        restart: False keeps S over the rounds; True goes back to the start images each round.
        perturbation: networks on the "sphere" of radius ρ around w_r, inside the "ball", or "fresh"
            ones, newly initialised; with those the server trains outside any ball.
        augment: "none" or "siamese".
        flip: whether "siamese" may mirror.
        logit_weight: weight b of the logits relative to the embedding.
        count_noise: with differential privacy: the counts' noise multiplier over that of the M
            networks' sums together, σ/√M.

    >>> from fedsynth import FedSum, ModelSettings, PartitionSettings, RunSettings, simulate
    >>> method = FedSum(networks=4, ipc=5, iterations=40, image_lr=5.0, server_epochs=50)
    >>> model, skewed = ModelSettings(width=16, depth=2), PartitionSettings(alpha=0.05)
    >>> result = simulate(RunSettings(method, rounds=2, model=model, partition=skewed))
    >>> list(result.uploads[0].sums.shape)  # of 64 features and ten logits, by network and class
    [4, 10, 74]
    >>> result.accuracy > 0.7
    True
    """

    name: ClassVar[str] = "fedsum"
    summary: ClassVar[str] = (
        "class sums of shared networks' features; the server pools them and condenses once"
    )
    reference: ClassVar[str] = "FedDM's objective (arXiv 2207.09653, Eq. 9) on pooled class sums"
    downlink: ClassVar[type[Message]] = SumsRequest
    upload: ClassVar[type[Message]] = NetworkSums
    state: ClassVar[type[ServerState]] = CondensedState
    protects: ClassVar[tuple[str, ...]] = ("features",)
    presets: ClassVar[Presets] = {
        "digits": {"iterations": 100, "image_lr": 5.0},
        "cifar100": {"ipc": 5},
    }
    robust_refusal: ClassVar[str] = (
        "it adds up sums of which many clients have none of a class, and by coordinates these "
        "would outvote the others"
    )
    discloses: ClassVar[Mapping[str, Disclosure]] = {
        "condensed_classes": made_of_released("how many released counts are above their noise")
    }

    networks: int = 16
    ipc: int = 10
    iterations: int = 1000
    image_lr: float = 1.0
    image_momentum: float = 0.0
    min_examples: int = 1
    start: str = "noise"
    restart: bool = False
    perturbation: str = "sphere"
    augment: str = "none"
    flip: bool = False
    logit_weight: float = 1.0
    count_noise: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_aggregation()
        check_ranges(self, networks=(1, 10_000), ipc=(1, MOST_IPC), iterations=(1, inf))
        check_ranges(self, image_lr=(0, inf), image_momentum=(0, 1), min_examples=(0, inf))
        check_ranges(self, logit_weight=(0, inf), count_noise=(0.01, inf))
        check_choices(self, start=STARTS, augment=AUGMENTATIONS, perturbation=(*READINGS, FRESH))

    def ball(self) -> float | None:
        return None if self.perturbation == FRESH else self.radius

    def check_model(self, model: nn.Module) -> None:
        check_embedding(self.name, model)

    # --------------------------------------------------------------------------------- the messages

    def broadcast(self, state: CondensedState, context: RoundContext) -> Message:
        return SumsRequest(state.parameters, 1.0, self._images(state, context))

    def check_request(self, message: SumsRequest, context: RoundContext) -> None:
        rows = context.spec.classes * self.ipc
        check_tensor("images", message.images, (rows, *context.spec.image_shape), torch.float32)

    def upload_rules(self, phase: str, client: int, context: RoundContext) -> dict[str, Rule]:
        classes = context.spec.classes
        noise = max(1.0, context.noise.get(IMAGES, 0.0), context.noise.get(COUNTS, 0.0))
        far = LARGEST * noise
        counts = Array((classes,), least=0.0, most=most_examples(client, context))
        if context.privacy is not None:
            counts = Array((classes,), least=-far, most=far)
            counts = replace(counts, dtype=self.sum_dtype(COUNTS, context))
        shape = (self.networks, classes, feature_width(context, logits=True))
        dtype = self.sum_dtype(IMAGES, context)
        return {"sums": Array(shape, dtype, least=-far, most=far), "counts": counts}

    def sum_releases(self, phase: str, context: RoundContext) -> Mapping[str, str]:
        return {"sums": IMAGES, "counts": COUNTS}

    # ----------------------------------------------------------------------------------- the client

    def private_plans(
        self, privacy: PrivacySettings, context: RoundContext
    ) -> tuple[PrivatePlan, ...]:
        """Returns the plans of M releases a round, and of one of the counts."""
        refuse_batch_norm(context.architecture)
        plans = feature_plans(
            privacy, context, networks=self.networks, count_noise=self.count_noise
        )
        return self.added_up(plans, privacy, context)

    def client_bytes(self, context: RoundContext) -> int:
        numbers = self.networks * context.spec.classes * feature_width(context, logits=True)
        return 16 * numbers

    def client_step(
        self,
        message: SumsRequest,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> Results:
        model = context.load(message.parameters).requires_grad_(False).eval()
        series = None
        if isinstance(clients, PrivateClients):
            series = (clients.series(IMAGES), clients.series(COUNTS))
        sums, counts = sums_of(
            clients,
            series,
            self._networks(model, context, compiled=may_compile(clients, context)),
            self._by_class(message.images, context),
            lambda done: context.report("sums", done, self.networks),
        )
        return [
            (NetworkSums(own.clone(), held.clone()), memory)
            for own, held, memory in zip(sums, counts, memories, strict=True)
        ]

    # ----------------------------------------------------------------------------------- the server

    def server_step(
        self, state: CondensedState, uploads: Mapping[int, NetworkSums], context: RoundContext
    ) -> ServerState:
        return SharesNoise.server_step(self, state, uploads, context)

    def from_sum(
        self,
        phase: str,
        state: CondensedState,
        total: NetworkSums,
        clients: int,
        context: RoundContext,
    ) -> CondensedState:
        if not self.enough(clients, context):
            return state
        model = context.load(state.parameters)
        frozen = context.load(state.parameters).requires_grad_(False).eval()
        start = self._by_class(self._images(state, context), context)
        networks = self._networks(frozen, context)
        floor = self._floor(clients, context)
        kept = total.counts >= floor
        means = total.sums / total.counts.clamp_min(floor)[:, None]
        targets = centres(networks, start) + means.float()
        draw_network, draw_augmentation = networks.draws()
        images = condense(
            start,
            draw_network,
            TargetMatcher(targets, kept),
            steps=self.iterations,
            optimiser=MomentumSgd(self.image_lr, self.image_momentum),
            logit_weight=self.logit_weight,
            draw_augmentation=draw_augmentation,
            report=lambda done: context.report("condense", done, self.iterations),
            memory_bytes=context.memory_bytes // 2,
            # it sees only released sums; still not compiled with DP, as documented
            compiled=context.compiled and context.privacy is None,
        ).flatten(0, 1)
        made = replace(state, images=images, kept=kept)
        train_on_union(model, {0: self._set(made, context)}, self.union_sgd(), context)
        return replace(made, parameters=model.state_dict())

    def facts(self, state: CondensedState, context: RoundContext) -> Mapping[str, Any]:
        return {"condensed_classes": 0 if state.kept is None else int(state.kept.sum())}

    def synthetic(
        self, state: CondensedState, context: RoundContext
    ) -> tuple[Tensor, Tensor] | None:
        if state.images is None:
            return None
        made = self._set(state, context)
        return made.images, made.labels

    @property
    def plans_images(self) -> bool:
        return True

    def makes_images(self, counted: Sequence[int]) -> bool:
        return bool(counted)

    def _floor(self, clients: int, context: RoundContext) -> float:
        """Returns the least pooled count with which a class is used."""
        noise = 2 * self.pooled_deviation(COUNTS, clients, context)
        rate = 1.0
        if context.privacy is not None:
            rate = context.privacy.sample_rate or 1.0
        return max(1.0, self.min_examples * rate, noise)

    def _networks(
        self, model: nn.Module, context: RoundContext, compiled: bool = False
    ) -> SharedNetworks:
        """Returns the round's M networks, which are the same for all parties."""
        labels = torch.arange(context.spec.classes)

        def draws() -> tuple[Callable[[], nn.Module], Callable[[], Any] | None]:
            maps = maps_around(
                model,
                labels,
                context,
                radius=self.radius,
                reading=self.perturbation,
                augment=self.augment,
                flip=self.flip,
                logit_weight=self.logit_weight,
                period=self.networks,
            )
            return maps.draw_network, maps.draw_augmentation

        return SharedNetworks(
            draws,
            self.networks,
            self.logit_weight,
            context.precision,
            context.memory_bytes // 2,
            compiled,
        )

    def _images(self, state: CondensedState, context: RoundContext) -> Tensor:
        """Returns S at the start of a round, [classes · ipc, C, H, W], normalised."""
        if state.images is not None and not self.restart:
            return state.images
        generator = torch_generator(context.seed, "fedsum's start images")
        rows = context.spec.classes * self.ipc
        if self.start == "noise":
            images = torch.randn(rows, *context.spec.image_shape, generator=generator)
        else:
            drawn = random_images(rows, context.spec.image_shape, generator)
            images = normalise(drawn.mul(255).round().to(torch.uint8), context.spec)
        return images.to(context.device)

    def _by_class(self, images_NCHW: Tensor, context: RoundContext) -> Tensor:
        """Returns the images as [classes, ipc, C, H, W]."""
        return images_NCHW.view(context.spec.classes, self.ipc, *context.spec.image_shape)

    def _set(self, state: CondensedState, context: RoundContext) -> SyntheticSet:
        """Returns the images of the classes with enough data."""
        if state.images is None or state.kept is None:
            raise ValueError("no round has made images yet")
        labels = torch.arange(context.spec.classes, device=context.device)
        labels = labels.repeat_interleave(self.ipc)
        where = state.kept[labels]
        return SyntheticSet(state.images[where], labels[where])
