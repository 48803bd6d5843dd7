"""FedSum's settings, messages and release plans. The steps are in `fedsynth/methods/fedsum.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message, ModelParameters, public, released
from fedsynth.core.method import Plans, Presets
from fedsynth.core.uploads import Rule, check_tensor
from fedsynth.methods.shared.class_sums import (
    COUNTS,
    IMAGES,
    feature_plans,
    feature_width,
    sums_rules,
)
from fedsynth.methods.shared.condensing import TrainsInBall
from fedsynth.methods.shared.noise_shares import DistributedNoise
from fedsynth.models.layers import check_embedding
from fedsynth.privacy.disclosure import Disclosure
from fedsynth.privacy.disclosure import released as made_of_released
from fedsynth.privacy.dpsgd import refuse_batch_norm
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.synthesizer.condensation import augmentation
from fedsynth.validation import in_range, one_of

# The value of `perturbation` that selects newly initialised networks.
FRESH = "fresh"


@dataclass(frozen=True)
class SumsRequest(ModelParameters):
    """The message to the clients of FedSum: the model w_r and the synthetic images S.

    S has the shape [classes · ipc, channels, H, W].

    Clients subtract the class means of the features of S from their own features before summing
    them.
    """

    images: Tensor = public("sent to clients, never uploaded")


@dataclass(frozen=True)
class NetworkSums(Message):
    """The upload of a client in FedSum: class sums of features under each network, and class
    counts.

    The sums have the shape [M, classes, D], and the counts [classes].

    The class means of the features of S are subtracted from the features.
    """

    sums: Tensor = released()
    counts: Tensor = released()


@dataclass(frozen=True)
class CondensedState(ServerState):
    """The server's state in FedSum, with the synthetic images S.

    S is normalised, [classes · ipc, channels, H, W]. A boolean mask [classes] marks the classes
    with enough data.

    S and the mask are None before the first round.
    """

    images: Tensor | None = None
    condensed: Tensor | None = None


@dataclass(frozen=True)
class FedSumSettings(TrainsInBall, DistributedNoise):
    """The settings of FedSum.

    Settings that FedDM also has mean the same as there. The remaining settings are documented in
    `TrainsInBall` and `DistributedNoise`.

    Args:
        networks: M, the number of networks in a round. A client makes one pass over its data for
            each network.
        iterations: T, the number of condensation steps of the server in a round. Step t uses
            network t mod M.
        image_lr: η_c, the learning rate of the images.
        image_momentum: momentum of the updates of the images.
        min_examples: smallest number of examples over all clients with which a class is used. With
            differential privacy, the released count must also be at least twice the standard
            deviation of its noise.
        start: what the images start from. "noise" and "random-process" images are both public.
        restart: whether the images start again in each round. With False, the images of the last
            round are improved further.
        perturbation: how the networks are drawn. "sphere" draws them from the sphere of radius ρ
            around w_r, and "ball" from the inside of the ball. "fresh" initialises new networks,
            and the server then trains without the bound ρ.
        augment: augmentation of real and synthetic images, "none" or "siamese".
        flip: whether "siamese" may mirror images.
        logit_weight: b, the weight of the logits relative to the embedding.
        count_noise: noise multiplier of the counts, in units of σ/√M. The unit is the noise
            multiplier of the sums under all M networks together. The setting is used only with
            differential privacy.
    """

    request = SumsRequest
    upload = NetworkSums
    state = CondensedState
    dp_mechanisms = ("features",)
    presets: ClassVar[Presets] = {"digits": {"iterations": 100, "image_lr": 5.0}}
    robust_refusal = (
        "the server adds class sums. In a robust rule, clients without examples of a class would "
        "outvote the clients that have examples"
    )
    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {
        "condensed_classes": made_of_released("how many released counts are above their noise")
    }

    networks: int = in_range(16, 1, 10_000)
    iterations: int = in_range(1000, 1)
    image_lr: float = in_range(1.0, 0)
    image_momentum: float = in_range(0.0, 0, 1)
    min_examples: int = in_range(1, 0)
    start: str = one_of("noise", "random-process")
    restart: bool = False
    perturbation: str = one_of("sphere", "ball", FRESH)
    augment: str = one_of(*augmentation.AUGMENTATIONS)
    flip: bool = False
    logit_weight: float = in_range(1.0, 0)
    count_noise: float = in_range(3.0, 0.01)

    def check_model(self, model: nn.Module) -> None:
        check_embedding(self.name, model)

    def check_request(self, message: SumsRequest, context: RoundContext) -> None:
        rows = context.spec.classes * self.ipc
        check_tensor("images", message.images, (rows, *context.spec.image_shape), torch.float32)

    def upload_rules(self, exchange: str, client: int, context: RoundContext) -> dict[str, Rule]:
        shape = self.networks, context.spec.classes, feature_width(context, logits=True)
        return sums_rules(client, shape, IMAGES, context, self.sum_dtype(IMAGES, context))

    def sum_releases(self, exchange: str, context: RoundContext) -> Mapping[str, str]:
        return {"sums": IMAGES, "counts": COUNTS}

    def release_plans(self, privacy: PrivacySettings, context: RoundContext) -> Plans:
        """Returns the plans of M releases of sums in each round, and of one release of the
        counts."""
        refuse_batch_norm(context.architecture)
        plans = feature_plans(
            privacy, context, networks=self.networks, count_noise=self.count_noise
        )
        return self.sum_over_clients(plans, privacy, context)

    def client_bytes(self, context: RoundContext) -> int:
        numbers = self.networks * context.spec.classes * feature_width(context, logits=True)
        return 16 * numbers

    @property
    def plans_images(self) -> bool:
        return True

    def produces_synthetic_data(self, counted: Sequence[int]) -> bool:
        return bool(counted)
