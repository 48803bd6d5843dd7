"""FedSum: the server condenses a synthetic set from the sums of all clients' features by class.

In FedDM (arXiv 2207.09653), each client condenses its own data, and the server trains on the union
of the synthetic sets. The loss Σ_c ‖mean_{D_c} u_w − mean_{S_c} u_w‖² (Eq. 9) depends on the data
only through the class means of features. The class means of all clients' data are pooled sums
divided by pooled counts. In FedSum, clients therefore send class sums and counts. The sums are
computed under M networks around the global model, which are drawn from the public seed of the
round. The server adds the sums up, condenses one set S towards the pooled means, and trains on S. A
client makes M passes over its data instead of T steps, and the sums do not depend on how the data
are distributed over the clients.

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
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth.core.client import Group
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.core.method import ClientStates, Results, Upload
from fedsynth.data.images import normalise, to_stored
from fedsynth.features.random_images import random_images
from fedsynth.methods.fedaf import resampled
from fedsynth.methods.feddm import perturbed
from fedsynth.methods.shared.class_sums import (
    COUNTS,
    IMAGES,
    class_counts,
    class_sums,
    mechanisms_of,
)
from fedsynth.methods.shared.fedsum_settings import (
    FRESH,
    CondensedState,
    FedSumSettings,
    NetworkSums,
    SumsRequest,
)
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation import augmentation, matching, sets


@dataclass(frozen=True)
class FedSum(FedSumSettings):
    """FedSum: the server condenses one synthetic set towards class sums of the features of all
    clients.

    The settings are documented in `FedSumSettings`.

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

    # --------------------------------------------------------------------------------- the messages

    def broadcast(self, state: CondensedState, context: RoundContext) -> Message:
        return SumsRequest(state.parameters, 1.0, self._images(state, context))

    # ----------------------------------------------------------------------------------- the client

    def client_step(
        self,
        message: SumsRequest,
        clients: Group,
        states: ClientStates,
        context: RoundContext,
    ) -> Results:
        """Computes the class sums of features and the class counts of each client.

        The sums are R_{m,c} = Σ_{x ∈ c} u_m(x) − s_{m,c} [M, C, D], and the counts are n_c [C].

        With differential privacy, each term of R is clipped, and noise is added to R and n.
        """
        w_r = context.load(message.parameters).requires_grad_(False).eval()
        S = self._by_class(message.images, context)
        charged = mechanisms_of(clients, IMAGES)
        sums = []
        for m, u_m in enumerate(islice(self._feature_maps(w_r, context), self.networks)):
            s_m = matching.frozen_means(u_m, S)  # s_{m,c} = mean_{S_c} u_m
            rows = partial(_centred, u_m, s_m)
            sums.append(class_sums(clients, charged, rows, s_m.shape[1], torch.float64))
            context.report("sums", m + 1, self.networks)
        counts = class_counts(clients)
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
        """Condenses one synthetic set S towards the class means of all clients, and trains the
        model on S."""
        if not self.has_enough_noise(clients, context):
            return state
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
    ) -> tuple[Tensor, Tensor] | None:
        if state.images is None:
            return None
        S = self._set(state, context)
        return S.images, S.labels

    def _floor(self, clients: int, context: RoundContext) -> float:
        """Returns the number of examples over all clients that a class must have to be used."""
        noise = 2 * self.pooled_deviation(COUNTS, clients, context)
        rate = context.privacy.sample_rate if context.privacy is not None else None
        return max(1.0, self.min_examples * (rate or 1.0), noise)

    def _feature_maps(
        self, w_r: nn.Module, context: RoundContext
    ) -> Iterator[matching.NetworkFeatures]:
        """Yields the features u_1, …, u_M under the round's networks, and then starts again with
        u_1.

        All parties use the same networks. The function yields the same object each time, with a
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
        """Returns the normalised images S with which a round starts, [classes · ipc, channels, H,
        W]."""
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
        """Returns the images and labels of the classes that have enough data."""
        if state.images is None or state.condensed is None:
            raise ValueError("the server's state has no images, because no round was completed")
        labels = torch.arange(context.spec.classes, device=context.device)
        labels = labels.repeat_interleave(self.ipc)
        condensed = state.condensed[labels]
        return sets.SyntheticSet(state.images[condensed], labels[condensed])


def _centred(u: matching.NetworkFeatures, s_CD: Tensor, x_NCHW: Tensor, label_N: Tensor) -> Tensor:
    """Returns u(x) − s_c for each image, [N, D]. A row depends only on its image and its class."""
    return u.real(x_NCHW, label_N) - s_CD[label_N]
