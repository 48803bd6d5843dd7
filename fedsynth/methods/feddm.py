"""FedDM: clients send synthetic images that have the same mean features as their data (arXiv
2207.09653).

The code follows Algorithm 1, and the comments name its lines. ClientUpdate (lines 10 to 19) takes T
steps. Each draws a network w ~ P_w(w_r) and batches of real images, and moves the synthetic images
down the gradient of Σ_c L_c (Eq. 9). The server (lines 2 to 8) trains w from w_r on the union of
all synthetic sets. After every step, it projects w onto ‖w − w_r‖ ≤ ρ (Eqs. 3, 10 and 23). The
paper does not specify when to project.

With differential privacy, a mechanism of `fedsynth.synthesizer.condensation.private_matchers`
computes the gradient. `paper` follows lines 15 to 17 as printed: it starts from real images, clips
(line 16) and adds noise (line 17), and gives no guarantee. The other mechanisms replace lines 13 to
17, and their images start from noise. `residual` and `gradient` are charged for T releases per
round, `features` for M releases and the class counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.capabilities import PublishedEpsilon
from fedsynth.core.client import ClientClassPairs, Group, PrivateClientView
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import ModelParameters
from fedsynth.core.method import ClientStates, Plans, Presets, Results
from fedsynth.core.uploads import Rule
from fedsynth.data.images import stored_dtype
from fedsynth.errors import SettingError
from fedsynth.methods.shared.class_sums import IMAGES, feature_plans, feature_width
from fedsynth.methods.shared.condensing import CondensingMethod, TrainsInBall, perturbed
from fedsynth.models.layers import has_batch_norm, with_grouped_statistics
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.synthesizer.condensation import augmentation, matching, private_matchers, sets
from fedsynth.validation import in_range, one_of


@dataclass(frozen=True)
class FedDM(CondensingMethod, TrainsInBall, PublishedEpsilon):
    """FedDM: clients send synthetic images that have the same mean features as their data.

    Random networks around the global model compute the features.

    The defaults are the paper's, and the preset for digits is small. Where the paper leaves a
    setting open, the reason for the default is given below. `CondensingMethod` and `TrainsInBall`
    document the remaining settings.

    Args:
        ipc: number of synthetic images per class. The paper uses 10, and 5 on CIFAR-100.
        min_examples: smallest number of examples with which a client sends a class. The default of
            10 is inferred from Table 3. With the mechanism `features`, it is compared with the
            released count.
        matching: what is matched. "mean" is Eq. 9.
        image_momentum: momentum of the image updates. The default is 0, because Algorithm 1 has
            plain gradient steps. FedAF's paper runs FedDM with 0.9.
        restart: whether images start again in each round. The default is False, because
            ClientUpdate has no initialisation.
        radius: ρ, which bounds the networks' perturbation and the server's training.
        perturbation: how the networks around w_r are drawn. "sphere" is Eq. 24: a Gaussian
            perturbation is rescaled to length ρ if it is longer, which is always the case in
            300,000 dimensions. "ball" is not in the paper: the length is uniform in [0, ρ].
        augment: augmentation of real and synthetic images, "none" (the paper's) or "siamese".
        flip: whether "siamese" may mirror images. Digits and letters are not symmetric.
        logit_weight: b, the factor of the logits in the features [h; b·z]. Their term in Eq. 9 then
            has the weight b². 1 is Eq. 9.
        image_clip: upper bound on the norm of each client's image gradient, for stability; 0 means
            no bound. FedAF's paper runs FedDM with a bound of 2, and does not state on which
            images' gradient. The bound is not a privacy mechanism.
        image_dtype: the type of the images that are sent, "float32" (the paper's) or "uint8" pixels,
            as in FedAF: valid, and a quarter of the bytes.
        networks_per_round: number of networks that the T steps of a round use in turn
            (`NetworkMeansMatcher`). With 0, each step draws a new network and a new minibatch, as
            in the paper. Other values need a network without batch norm, `matching="mean"`, and no
            differential privacy, where the mechanism `features` does the same.
        networks: M, the number of networks of the mechanism `features`.
        count_noise: for `features`, the class counts' noise multiplier, in units of σ/√M, the noise
            multiplier of all M sums together. Counts then use the share 1/(1 + count_noise²) of the
            budget μ².

    >>> from fedsynth import FedDM, ModelSettings, PartitionSettings, RunSettings, simulate
    >>> method = FedDM(ipc=5, iterations=5, image_lr=5.0, server_epochs=50)
    >>> model, iid = ModelSettings(width=16, depth=2), PartitionSettings("iid", clients=2)
    >>> result = simulate(RunSettings(method, rounds=1, model=model, partition=iid))
    >>> list(result.uploads[0].images.shape), result.accuracy > 0.6  # five images of each class
    ([50, 1, 8, 8], True)
    """

    name = "feddm"
    summary = "clients send synthetic images that match their data around the global model"
    reference = "Xiong et al. 2023, FedDM, arXiv 2207.09653"
    dp_mechanisms: ClassVar[tuple[str, ...]] = ("residual", "gradient", "features", "paper")
    presets: ClassVar[Presets] = {
        "digits": {"iterations": 10, "image_lr": 5.0, "server_epochs": 40}
    }

    perturbation: str = one_of("sphere", "ball")
    augment: str = one_of(*augmentation.AUGMENTATIONS)
    flip: bool = False
    logit_weight: float = in_range(1.0, 0)
    image_clip: float = in_range(0.0, 0)
    image_dtype: str = one_of("float32", "uint8")
    networks_per_round: int = in_range(0, 0)
    networks: int = in_range(16, 1)
    count_noise: float = in_range(3.0, 0.01)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.matching != "mean":
            self._refuse_fixed_networks(f"with method.matching={self.matching}")

    # ------------------------------------------------------------------- server, lines 2 to 8

    def server_step(
        self, state: ServerState, uploads: Mapping[int, sets.SyntheticSet], context: RoundContext
    ) -> ServerState:
        """Trains the global model on the union of the clients' synthetic images (lines 7 and 8, Eq.
        10).

        The training starts from w_r and stays within the ball of radius ρ.
        """
        w = context.load(state.parameters)
        sets.train_on_union(w, uploads, self.union_sgd(), context)
        return replace(state, parameters=w.state_dict())

    # ---------------------------------------------------- ClientUpdate(k, w_r, σ), lines 10 to 19

    def client_step(
        self, message: ModelParameters, clients: Group, states: ClientStates, context: RoundContext
    ) -> Results:
        """Condenses a client group's data into synthetic images.

        One batched pass handles all (client, class) pairs.

        S [pairs, ipc, channels, H, W] contains all pairs' synthetic images. The loss L is the sum
        of L_c over the pairs, so each client's images receive the gradient of its own loss.
        """
        w_r = context.load(message.parameters).requires_grad_(False).eval()
        pairs = self.pairs(clients)
        S = sets.start_images(  # last round's S_k, or real images (Sec. 4.1)
            clients, pairs, states, context, self.ipc, self.start_average, self.restart
        )
        matcher = self.matcher(clients, pairs, context)
        networks = perturbed(
            with_grouped_statistics(w_r), self.radius, self.perturbation, context, matcher.period
        )
        augments = augmentation.augmentations(
            self.augment, pairs.label, context, flip=self.flip, period=matcher.period
        )
        u = self.features(clients, pairs, context, self.logit_weight)
        velocity = torch.zeros_like(S)
        client = pairs.position.to(S.device, non_blocking=True)
        for t in self.steps(clients, S, velocity, context, (networks, augments)):  # line 11
            u.use(next(networks), next(augments))  # line 12: w ~ P_w(w_r)
            gradient = matcher.gradient(t, u, S)  # lines 13 to 17: Σ_c ∇_S L_c
            if self.image_clip:  # not in Algorithm 1
                gradient = clipped_by_client(gradient, client, self.image_clip)
            velocity.mul_(self.image_momentum).add_(gradient)
            S.add_(velocity, alpha=-self.image_lr)  # line 19: S_k ← S_k − η_c ∇_S L
        condensed = sets.split_uploads(S, pairs, len(clients.ids))  # S_k, the client's state
        uploads = sets.split_uploads(S, pairs, len(clients.ids), matcher.uploaded)  # line 6
        if self.image_dtype == "uint8":
            uploads = [replace(u, images=sets.as_pixels(u.images, context.spec)) for u in uploads]
        return [(sent, {"images": S.images}) for sent, S in zip(uploads, condensed, strict=True)]

    def upload_rules(self, exchange: str, client: int, context: RoundContext) -> dict[str, Rule]:
        rules = super().upload_rules(exchange, client, context)
        if self.image_dtype == "uint8":
            rules |= sets.set_rules(context.spec, self.ipc, stored_dtype(context.spec))
        return rules

    def matcher(
        self, clients: Group, pairs: ClientClassPairs, context: RoundContext
    ) -> matching.MatchingObjective:
        """Returns the loss between real and synthetic images (lines 13 to 17).

        It is the loss of Eq. 9, or a private version of that loss.
        """
        if isinstance(clients, PrivateClientView):
            return super().matcher(clients, pairs, context)
        if self.networks_per_round:
            networks = min(self.networks_per_round, self.iterations)
            return matching.NetworkMeansMatcher(clients, pairs, networks)
        exact = super().matcher(clients, pairs, context)
        if context.privacy is not None and isinstance(exact, matching.ExactMatcher):
            noise = clients.noise(IMAGES)  # lines 15 to 17 as printed
            return private_matchers.PaperMatcher(exact, pairs, noise)
        return exact

    # --------------------------------------------------------------------------- declarations

    def check_model(self, model: nn.Module) -> None:
        super().check_model(model)
        if has_batch_norm(model):
            self._refuse_fixed_networks("for a network with batch norm")

    def _refuse_fixed_networks(
        self, case: str, remedy: str = "Set method.networks_per_round=0"
    ) -> None:
        if self.networks_per_round:
            reason = f"must be 0 {case}, got {self.networks_per_round}. {remedy}"
            raise SettingError("method", "networks_per_round", reason)

    def paper_epsilon(self, delta: float, sigma: float) -> Mapping[str, str]:
        return {
            "source": "FedDM (arXiv 2207.09653), Sec. 4.4: σ ≥ sqrt(2 log(1/δ)/ε)",
            "published": f"ε = {2 * math.log(1 / delta) / sigma**2:.3g}",
            "why it differs": (
                "the formula counts neither steps nor rounds, and its condition Tq² ≤ ε/2 does not "
                "hold for usual numbers of steps T"
            ),
        }

    def client_bytes(self, context: RoundContext) -> int:
        means = self.networks_per_round * context.spec.classes * feature_width(context, logits=True)
        return super().client_bytes(context) + 4 * means

    def release_plans(self, privacy: PrivacySettings, context: RoundContext) -> Plans:
        """Returns the planned DP releases of a round.

        The mechanism `features` has M releases of class sums and one of the class counts, where M
        is at most the number of steps. Each other mechanism has T releases.
        """
        self._refuse_fixed_networks(
            "with differential privacy",
            "Set privacy.mechanism=features and method.networks instead",
        )
        if privacy.mechanism != "features":
            return super().release_plans(privacy, context)
        self.check_private(context)
        networks = min(self.networks, self.iterations)
        return feature_plans(privacy, context, networks=networks, count_noise=self.count_noise)


def clipped_by_client(gradient: Tensor, client_S: Tensor, bound: float) -> Tensor:
    """Clips the image gradient separately for each client's images.

    The norm is taken over all images of a client together.
    """
    squares = gradient.flatten(1).square().sum(dim=1)
    same = (client_S[:, None] == client_S).to(squares.dtype)
    scale = (bound / (same @ squares).sqrt().clamp_min(1e-12)).clamp_max(1.0)
    return gradient * scale.view(-1, 1, 1, 1, 1)
