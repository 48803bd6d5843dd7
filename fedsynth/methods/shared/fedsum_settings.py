"""FedSum's settings, messages and declarations; its steps are in `fedsynth/methods/fedsum.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message, ModelParameters, public, released
from fedsynth.core.method import Presets, ReleasePlan
from fedsynth.core.uploads import Rule
from fedsynth.methods.shared.class_sums import COUNTS, sums_rules
from fedsynth.methods.shared.condensing import TrainsInBall
from fedsynth.methods.shared.noise_shares import DistributedNoise
from fedsynth.methods.shared.private_condensation import IMAGES, feature_plans, feature_width
from fedsynth.privacy.disclosure import Disclosure
from fedsynth.privacy.disclosure import released as made_of_released
from fedsynth.privacy.dpsgd import refuse_batch_norm
from fedsynth.privacy.requests import check_tensor
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.synthesizer.condensation.augmentation import AUGMENTATIONS
from fedsynth.synthesizer.condensation.sets import MAX_IPC
from fedsynth.validation import check_embedding, in_range, one_of

FRESH = "fresh"
"""Newly initialised networks, a value of `perturbation`."""


@dataclass(frozen=True)
class SumsRequest(ModelParameters):
    """Sent to clients: w_r, and the images S [classes · ipc, channels, H, W], whose feature means
    the sums are centred on."""

    images: Tensor = public("sent to clients, never uploaded")


@dataclass(frozen=True)
class NetworkSums(Message):
    """The upload: sums of features, centred on S, by network and class [M, classes, D], and counts
    [classes]."""

    sums: Tensor = released()
    counts: Tensor = released()


@dataclass(frozen=True)
class CondensedState(ServerState):
    """The state, with S [classes · ipc, channels, H, W], normalised, and the classes with enough
    data, bool [classes]; None before the first round."""

    images: Tensor | None = None
    condensed: Tensor | None = None


@dataclass(frozen=True)
class SumsFeatures(TrainsInBall, DistributedNoise):
    """FedSum's settings: FedDM's where they mean the same; see `TrainsInBall`, `DistributedNoise`, and

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
    """

    downlink: ClassVar[type[Message]] = SumsRequest
    upload: ClassVar[type[Message]] = NetworkSums
    state: ClassVar[type[ServerState]] = CondensedState
    dp_mechanisms: ClassVar[tuple[str, ...]] = ("features",)
    presets: ClassVar[Presets] = {
        "digits": {"iterations": 100, "image_lr": 5.0},
        "cifar100": {"ipc": 5},
    }
    robust_refusal: ClassVar[str] = (
        "it adds class sums; clients without examples of a class would outvote the others "
        "in a robust rule by coordinate"
    )
    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {
        "condensed_classes": made_of_released("how many released counts are above their noise")
    }

    networks: int = in_range(16, 1, 10_000)
    ipc: int = in_range(10, 1, MAX_IPC)
    iterations: int = in_range(1000, 1)
    image_lr: float = in_range(1.0, 0)
    image_momentum: float = in_range(0.0, 0, 1)
    min_examples: int = in_range(1, 0)
    start: str = one_of("noise", "random-process")
    restart: bool = False
    perturbation: str = one_of("sphere", "ball", FRESH)
    augment: str = one_of(*AUGMENTATIONS)
    flip: bool = False
    logit_weight: float = in_range(1.0, 0)
    count_noise: float = in_range(3.0, 0.01)

    def check_model(self, model: nn.Module) -> None:
        check_embedding(self.name, model)

    def check_request(self, message: SumsRequest, context: RoundContext) -> None:
        rows = context.spec.classes * self.ipc
        check_tensor("images", message.images, (rows, *context.spec.image_shape), torch.float32)

    def upload_rules(self, phase: str, client: int, context: RoundContext) -> dict[str, Rule]:
        shape = self.networks, context.spec.classes, feature_width(context, logits=True)
        return sums_rules(client, shape, IMAGES, context, self.sum_dtype(IMAGES, context))

    def sum_releases(self, phase: str, context: RoundContext) -> Mapping[str, str]:
        return {"sums": IMAGES, "counts": COUNTS}

    def release_plans(
        self, privacy: PrivacySettings, context: RoundContext
    ) -> tuple[ReleasePlan, ...]:
        """Returns the plans of M releases a round, and of one of the counts."""
        refuse_batch_norm(context.architecture)
        plans = feature_plans(
            privacy, context, networks=self.networks, count_noise=self.count_noise
        )
        return self.sum_over_clients(plans, privacy, context)

    def client_bytes(self, context: RoundContext) -> int:
        numbers = self.networks * context.spec.classes * feature_width(context, logits=True)
        return 16 * numbers
