"""FedSum: the server condenses a synthetic set from sums of the clients' features.

In FedDM (arXiv 2207.09653), each client condenses its own data, and the server trains on the union
of the sets. The loss Σ_c ‖mean_{D_c} u_w − mean_{S_c} u_w‖² (Eq. 9) depends on the data only
through the class means of features. Over all clients' data, the class means are pooled sums divided
by pooled counts. In FedSum, clients therefore send class sums and counts. The sums are computed
under M networks around the global model, drawn from the round's public seed. The server adds the
sums up, condenses one set S towards the pooled means, and trains on S. A client makes M passes over
its data instead of T steps, and the sums do not depend on how the data are distributed over the
clients.

With differential privacy, the sums under each network are one release of the mechanism `features`,
and the counts are one further release. `private_matchers` documents the sensitivity. The server's
computations on the releases are post-processing. The images start from public noise, with and
without differential privacy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.capabilities import Measurements, SyntheticImages
from fedsynth.core.client import Group
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message, ModelParameters, public, released
from fedsynth.core.method import ClientStates, Plans, Presets, Results, Upload
from fedsynth.core.sums import SummedUploads
from fedsynth.core.uploads import Rule, check_tensor
from fedsynth.data.images import normalise, to_stored
from fedsynth.features.random_images import random_images
from fedsynth.methods.shared import class_sums
from fedsynth.methods.shared.class_sums import COUNTS, IMAGES, feature_width
from fedsynth.methods.shared.condensing import TrainsInBall, perturbed, resampled
from fedsynth.models.layers import check_embedding
from fedsynth.privacy import disclosure
from fedsynth.privacy.dpsgd import refuse_batch_norm
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation import augmentation, matching, sets
from fedsynth.validation import in_range, one_of

# The value of `perturbation` that selects newly initialised networks.
FRESH = "fresh"


@dataclass(frozen=True)
class SumsRequest(ModelParameters):
    """FedSum's request to the clients: the model w_r and the synthetic images S.

    S has the shape [classes · ipc, channels, H, W].

    Clients subtract S's class-mean features from their own features before summing them.
    """

    images: Tensor = public("sent to clients, never uploaded")


@dataclass(frozen=True)
class NetworkSums(Message):
    """A client's upload in FedSum: class sums of features, and class counts.

    The sums under M networks have the shape [M, classes, D], and the counts [classes]. S's
    class-mean features are subtracted before summing.
    """

    sums: Tensor = released()
    counts: Tensor = released()


@dataclass(frozen=True)
class CondensedState(ServerState):
    """The server's state in FedSum, with the synthetic images S.

    S is normalised, [classes · ipc, channels, H, W]. A boolean mask [classes] marks the classes
    with enough data. Both are None before the first round.
    """

    images: Tensor | None = None
    condensed: Tensor | None = None


@dataclass(frozen=True)
class FedSum(TrainsInBall, SummedUploads, SyntheticImages, Measurements):
    """FedSum: the server condenses one synthetic set from sums of the clients' features.

    FedDM's settings have the same meaning here. `TrainsInBall` and `SummedUploads` document the
    remaining settings.

    Args:
        networks: M, the number of networks in a round. A client makes one pass over its data for
            each network.
        iterations: T, the server's number of condensation steps in a round. Step t uses network t
            mod M.
        image_lr: η_c, the learning rate of the images.
        image_momentum: momentum of the image updates.
        min_examples: smallest number of examples over all clients with which a class is used. With
            differential privacy, the released count must also be at least twice its noise's
            standard deviation.
        start: the images' start, "noise" or "random-process". Both are public.
        restart: whether the images start again in each round. With False, the last round's images
            are improved further.
        perturbation: how the networks are drawn. "sphere" draws them from the sphere of radius ρ
            around w_r, and "ball" from the inside of the ball. "fresh" initialises new networks,
            and the server then trains without the bound ρ.
        augment: augmentation of real and synthetic images, "none" or "siamese".
        flip: whether "siamese" may mirror images.
        logit_weight: b, the weight of the logits relative to the embedding.
        count_noise: the counts' noise multiplier, in units of σ/√M, the noise multiplier of all M
            sums together. The setting is used only with differential privacy.

    >>> from fedsynth import FedSum, ModelSettings, PartitionSettings, RunSettings, simulate
    >>> method = FedSum(networks=4, ipc=5, iterations=40, image_lr=5.0, server_epochs=50)
    >>> model, skewed = ModelSettings(width=16, depth=2), PartitionSettings(alpha=0.05)
    >>> result = simulate(RunSettings(method, rounds=2, model=model, partition=skewed))
    >>> list(result.uploads[0].sums.shape)  # of 64 features and ten logits, by network and class
    [4, 10, 74]
    >>> result.accuracy > 0.7
    True
    """

    name = "fedsum"
    summary = "the server condenses one set of images from class sums of features over all clients"
    reference = "FedDM's objective (arXiv 2207.09653, Eq. 9) on pooled class sums"
    request = SumsRequest
    upload = NetworkSums
    state = CondensedState
    dp_mechanisms = ("features",)
    presets: ClassVar[Presets] = {"digits": {"iterations": 100, "image_lr": 5.0}}
    robust_refusal = (
        "the server adds class sums. In a robust rule, clients without examples of a class would "
        "outvote the clients that have examples"
    )
    metric_privacy: ClassVar[Mapping[str, disclosure.Disclosure]] = {
        "condensed_classes": disclosure.released("how many released counts are above their noise")
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

    # -------------------------------------------------------------------- the message and the
    # client

    def broadcast(self, state: CondensedState, context: RoundContext) -> Message:
        return SumsRequest(state.parameters, 1.0, self._images(state, context))

    def client_step(
        self, message: SumsRequest, clients: Group, states: ClientStates, context: RoundContext
    ) -> Results:
        """Computes the class sums of features and the class counts of each client.

        The sums are R_{m,c} = Σ_{x ∈ c} u_m(x) − s_{m,c} [M, C, D], and the counts are n_c [C].

        With differential privacy, each term of R is clipped, and noise is added to R and n.
        """
        w_r = context.load(message.parameters).requires_grad_(False).eval()
        S = self._by_class(message.images, context)
        charged = class_sums.mechanisms_of(clients, IMAGES)
        sums = []
        for m, u_m in enumerate(islice(self._feature_maps(w_r, context), self.networks)):
            s_m = matching.frozen_means(u_m, S)  # s_{m,c} = mean_{S_c} u_m
            rows = partial(_centred, u_m, s_m)
            sums.append(class_sums.class_sums(clients, charged, rows, s_m.shape[1], torch.float64))
            context.report("sums", m + 1, self.networks)
        counts = class_sums.class_counts(clients)
        results = zip(torch.stack(sums, dim=1), counts, states, strict=True)
        return [(NetworkSums(R.clone(), n.clone()), state) for R, n, state in results]

    # ----------------------------------------------------------------------------------- the server

    def from_sum(
        self,
        exchange: str,
        state: CondensedState,
        total: Upload,
        clients: int,
        context: RoundContext,
    ) -> CondensedState:
        """Condenses the synthetic set from the summed uploads, and trains the model on it."""
        S = self._by_class(self._images(state, context), context).clone()
        w_r = context.load(state.parameters).requires_grad_(False).eval()
        maps = self._feature_maps(w_r, context)
        s = torch.stack([matching.frozen_means(next(maps), S) for _ in range(self.networks)])
        floor = self._floor(clients, context)
        condensed = total.counts >= floor
        # target_{m,c} = s_{m,c} + Σ_k R_{k,m,c} / n_c: the class means of all clients' data
        targets = s + (total.sums / total.counts.clamp_min(floor)[:, None]).float()
        velocity = torch.zeros_like(S)
        for t in range(self.iterations):  # S ← S − η_c ∇_S Σ_c ‖mean_{S_c} u_m − target_{m,c}‖²
            target = targets[t % self.networks]
            gradient = matching.matching_gradient(next(maps), S, target, condensed.to(target.dtype))
            velocity.mul_(self.image_momentum).add_(gradient)
            S.add_(velocity, alpha=-self.image_lr)
            context.report("condense", t + 1, self.iterations)
        state = replace(state, images=S.flatten(0, 1), condensed=condensed)
        w = context.load(state.parameters)
        sgd = self.union_sgd()
        if self.perturbation == FRESH:
            sgd = replace(sgd, radius=None)
        sets.train_on_union(w, {0: self._set(state, context)}, sgd, context)
        return replace(state, parameters=w.state_dict())

    def facts(self, state: CondensedState, context: RoundContext) -> Mapping[str, Any]:
        if state.condensed is None:
            return {"condensed_classes": 0}
        return {"condensed_classes": int(state.condensed.sum())}

    def synthetic(
        self, state: CondensedState, context: RoundContext
    ) -> tuple[Tensor, Tensor, None] | None:
        if state.images is None:
            return None
        S = self._set(state, context)
        return S.images, S.labels, None

    def _floor(self, clients: int, context: RoundContext) -> float:
        """Returns the minimum number of examples that a class needs over all clients."""
        noise = 2 * self.pooled_deviation(COUNTS, clients, context)
        rate = context.privacy.sample_rate if context.privacy is not None else None
        return max(1.0, self.min_examples * (rate or 1.0), noise)

    def _feature_maps(
        self, w_r: nn.Module, context: RoundContext
    ) -> Iterator[matching.NetworkFeatures]:
        """Yields the feature function of each network of the round, and then starts again.

        All parties use the same M networks. The function yields the same object each time, with a
        different network.
        """
        if self.perturbation == FRESH:
            networks = resampled(w_r, 0.0, context, self.networks)
        else:
            networks = perturbed(w_r, self.radius, self.perturbation, context, self.networks)
        labels = torch.arange(context.spec.classes)
        augments = augmentation.augmentations(
            self.augment, labels, context, flip=self.flip, period=self.networks
        )
        u = matching.NetworkFeatures(
            logit_weight=self.logit_weight,
            precision=context.precision,
            memory_bytes=context.memory_bytes // 2,
            compiled=context.compiled and context.privacy is None,
            ipc=self.ipc,
        )
        for network, augment in zip(networks, augments, strict=False):
            u.use(network, augment)
            yield u

    def _images(self, state: CondensedState, context: RoundContext) -> Tensor:
        """Returns the normalised initial images of a round, [classes · ipc, channels, H, W]."""
        if state.images is not None and not self.restart:
            return state.images
        generator = torch_generator(context.seed, "fedsum's start images")
        rows = context.spec.classes * self.ipc
        if self.start == "noise":
            images = torch.randn(rows, *context.spec.image_shape, generator=generator)
        else:
            drawn = random_images(rows, context.spec.image_shape, generator)
            images = normalise(to_stored(drawn, context.spec), context.spec)
        return images.to(context.device)

    def _by_class(self, images_NCHW: Tensor, context: RoundContext) -> Tensor:
        """Reshapes the images to [classes, ipc, channels, H, W]."""
        return images_NCHW.view(context.spec.classes, self.ipc, *context.spec.image_shape)

    def _set(self, state: CondensedState, context: RoundContext) -> sets.SyntheticSet:
        """Returns the images and labels of all classes that have enough examples."""
        if state.images is None or state.condensed is None:
            raise ValueError(
                "the server's state contains no images, because no round was completed. Run at "
                "least one round"
            )
        labels = torch.arange(context.spec.classes, device=context.device)
        labels = labels.repeat_interleave(self.ipc)
        condensed = state.condensed[labels]
        return sets.SyntheticSet(state.images[condensed], labels[condensed])

    # --------------------------------------------------------------------------- declarations

    def check_model(self, model: nn.Module) -> None:
        check_embedding(self.name, model)

    def check_request(self, message: SumsRequest, context: RoundContext) -> None:
        rows = context.spec.classes * self.ipc
        check_tensor("images", message.images, (rows, *context.spec.image_shape), torch.float32)

    def upload_rules(self, exchange: str, client: int, context: RoundContext) -> dict[str, Rule]:
        shape = self.networks, context.spec.classes, feature_width(context, logits=True)
        return class_sums.sums_rules(
            client, shape, IMAGES, context, self.sum_dtype(IMAGES, context)
        )

    def sum_releases(self, exchange: str, context: RoundContext) -> Mapping[str, str]:
        return {"sums": IMAGES, "counts": COUNTS}

    def release_plans(self, privacy: PrivacySettings, context: RoundContext) -> Plans:
        """Plans a round's private releases: M releases of class sums, and class counts."""
        refuse_batch_norm(context.architecture)
        plans = class_sums.feature_plans(
            privacy, context, networks=self.networks, count_noise=self.count_noise
        )
        return self.sum_over_clients(plans, privacy, context)

    def client_bytes(self, context: RoundContext) -> int:
        numbers = self.networks * context.spec.classes * feature_width(context, logits=True)
        return 16 * numbers


def _centred(u: matching.NetworkFeatures, s_CD: Tensor, x_NCHW: Tensor, label_N: Tensor) -> Tensor:
    """Subtracts from each image's features the shift s_c of the image's class, [N, D].

    Each row depends only on its image and class.
    """
    return u.real(x_NCHW, label_N) - s_CD[label_N]
