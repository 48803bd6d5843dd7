"""FedAF: federated learning by condensation and knowledge matching (arXiv 2404.18962).

In every round, each client computes the mean logits V_k of each class of its data under the global
model w_r, and soft labels R_k from them (Eqs. 5 and 11). The client then condenses its data into
synthetic images by distribution matching in feature space (Eq. 4). A second term, weighted by
λ_loc, pulls the mean logits of the synthetic images towards the global V (Eq. 10). Each step uses a
newly re-sampled network (Eq. 17).

The server averages V_k and R_k (Eqs. 8 and 12). It then trains the global model from w_r on the
union of all synthetic sets, with the cross-entropy plus λ_glob times the knowledge-matching loss
(Eqs. 13 to 15).

The defaults depart from the paper in four places:

- Eqs. 8 and 12 divide by K. Here the averages are over the clients that have the class, because
  Eq. 5 is undefined for a client without examples of the class.
- V is averaged from the uploads of one round and used in the next one, because App. C counts a
  single upload of S, V and R in a round. Round 1 therefore has no collaborative term. With
  `knowledge_from="first-exchange"`, V is exchanged first, by `first_step` and `first_aggregate`.
- t_c of Eq. 13 is computed from each minibatch and not from all images (`server_matching`).
- Eq. 15 is averaged over the classes (`matching_reduction`), and has no normaliser in the paper.

The paper names F of Eq. 10 (sliced Wasserstein), but not its order. Between two vectors, the
distance of order 1 is a multiple of ‖u − v‖ in expectation (`distance`).

With differential privacy, the images are matched by the mechanism `residual`. V is computed from a
noisy sum of clipped logits and from noisy counts, and R is computed from the released V. Networks
with batch norm are then refused.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.core.client import ClientClassPairs, Group, PrivateClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters, Tensors
from fedsynth.core.method import ClientStates, Results
from fedsynth.data.images import denormalise
from fedsynth.methods.shared.class_sums import class_means, feature_width, private_matching
from fedsynth.methods.shared.fedaf_settings import (
    LOGITS,
    CondensedSet,
    FedAFSettings,
    GlobalLogits,
    KnowledgeState,
    LocalKnowledge,
)
from fedsynth.mixed_precision import computed
from fedsynth.models.flat import FlatNetwork, flatten
from fedsynth.models.layers import with_grouped_statistics
from fedsynth.seeding import forked_rng, torch_generator
from fedsynth.synthesizer.condensation import losses, matching, sets


@dataclass(frozen=True)
class FedAF(FedAFSettings):
    """FedAF: clients condense their data, guided by class-mean logits that the server averages.

    The settings are documented in `FedAFSettings`.

    >>> from fedsynth import FedAF, resolve, simulate
    >>> run, model = {"method": "fedaf", "rounds": 2}, {"width": 16}
    >>> quick = {"ipc": 5, "iterations": 5, "server_lr": 0.05}
    >>> result = simulate(resolve({"run": run, "model": model, "method": quick}))
    >>> list(result.uploads[0].logits.shape), result.accuracy > 0.6  # a row of V_k for each class
    ([10, 10], True)
    """

    name = "fedaf"
    summary = "clients condense data towards class-mean logits, and the server matches soft labels"
    reference = "Wang et al. 2024, FedAF, arXiv 2404.18962"

    # ---------------------------------------- class-mean logits: V_k of a client (Eq. 5), V (Eq. 8)

    def first_step(
        self,
        message: ModelParameters,
        clients: Group,
        states: ClientStates,
        context: RoundContext,
    ) -> Results:
        w_r = context.load(message.parameters).requires_grad_(False).eval()
        results = zip(self._class_logits(w_r, clients, states, context), states, strict=True)
        return [(LocalKnowledge(**V_k), {**state, **V_k}) for V_k, state in results]

    def _class_logits(
        self, w_r: nn.Module, clients: Group, states: ClientStates, context: RoundContext
    ) -> list[dict[str, Tensor]]:
        """Returns V_k [C, C] of each client as "logits" (Eq. 5), and a mask [C] of its classes as
        "present"."""
        if all("logits" in state for state in states):  # released in the first exchange
            return [{name: state[name] for name in ("logits", "present")} for state in states]
        C = context.spec.classes
        V = class_means(clients, w_r, C, LOGITS, context, min_examples=self.min_examples)
        return [{"logits": V_k, "present": present} for V_k, present in V]

    def first_aggregate(
        self, state: KnowledgeState, replies: Mapping[int, LocalKnowledge], context: RoundContext
    ) -> KnowledgeState:
        R = [losses.soft_labels(reply.logits, self.temperature) for reply in replies.values()]
        state, mean_R, present = averaged(state, list(replies.values()), R)
        return replace(state, soft=mean_R, present=present)

    # ---------------------------------------- the client: collaborative data condensation (Eq. 10)

    def client_step(
        self,
        message: GlobalLogits,
        clients: Group,
        states: ClientStates,
        context: RoundContext,
    ) -> Results:
        """Condenses the clients' data into S [pairs, ipc, channels, H, W], the synthetic images of
        all (client, class) pairs."""
        w_r = context.load(message.parameters).requires_grad_(False).eval()
        pairs, C = self.pairs(clients), context.spec.classes
        S = sets.start_images(
            clients, pairs, states, context, self.ipc, self.start_average, self.restart
        )
        V = self._class_logits(w_r, clients, states, context)  # Eq. 5
        matcher = self._matcher(clients, pairs, context)
        networks = resampled(with_grouped_statistics(w_r), self.gamma, context)
        slicing = torch_generator(
            context.seed, "slicing directions", context.round, device=context.device
        )
        thetas = losses.unit_directions(self.directions, C, slicing)
        u = self.features(clients, pairs, context)
        label = pairs.label.to(context.device)
        matched = message.has_logits[label].nonzero().flatten()  # pairs with a v_c; round 1: none
        v, k = message.logits[label[matched]], pairs.position.to(context.device)[matched]

        def distance(u_SC: Tensor) -> Tensor:  # Σ_c F(u_{k,c}, v_c), Eq. 10
            kind, theta = self.distance, next(thetas)
            return losses.collaborative_distance(
                u_SC[matched], v, k, distance=kind, directions_PC=theta
            )

        velocity = torch.zeros_like(S)
        for t in self.steps(clients, S, velocity, context, (networks, thetas)):  # t = 0, …, T − 1
            u.use(next(networks))  # w = γ·w_r + (1 − γ)·w̃, Eq. 17
            gradient = matcher.gradient(t, u, S)  # ∇_S L_DM of a minibatch, Eq. 4
            if self.local_weight and len(matched):  # + λ_loc·∇_S Σ_c F, with u under the same w
                gradient = gradient + losses.logits_gradient(u, S, C, distance, self.local_weight)
            velocity.mul_(self.image_momentum).add_(gradient)
            S.add_(velocity, alpha=-self.image_lr)
        results: Results = []
        for S_k, V_k in zip(sets.split_uploads(S, pairs, len(clients.ids)), V, strict=True):
            results.append((self._upload(S_k, V_k, context), {"images": S_k.images}))
        return results

    def _upload(self, S_k: sets.SyntheticSet, V_k: Tensors, context: RoundContext) -> CondensedSet:
        """Returns the upload of a client: S_k, V_k and R_k (Eq. 11). Pixels are sent as 8 bits, as
        in App. C."""
        v, present = V_k["logits"], V_k["present"]
        if self.knowledge_from == "first-exchange":  # the server has V_k, and computes R_k from it
            v, present = v[:0], present[:0]
        images = S_k.images if context.spec.bounds else denormalise(S_k.images, context.spec)
        return CondensedSet(images, S_k.labels, v, losses.soft_labels(v, self.temperature), present)

    def _matcher(
        self, clients: Group, pairs: ClientClassPairs, context: RoundContext
    ) -> matching.MatchingObjective:
        """Returns the matching loss of embeddings, without logits, which gives ∇_S L_DM (Eq. 4)."""
        width = feature_width(context, logits=False)
        if isinstance(clients, PrivateClientView):
            return private_matching(clients, context, columns=width, min_examples=self.min_examples)
        seed, r = context.seed, context.round
        batches = sets.BatchIndices(
            clients, pairs, self.batch, self.iterations, seed, r, self.small_class
        )
        exact = matching.ExactMatcher(clients, batches, width)
        if self.matching == "mean":
            return exact
        return losses.DistributionMatcher(exact, self.matching, self.blur, width)

    # ------------------------------------ the server: local-global knowledge matching (Eqs. 12-15)

    def server_step(
        self, state: KnowledgeState, uploads: Mapping[int, CondensedSet], context: RoundContext
    ) -> KnowledgeState:
        if state.soft is not None and state.present is not None:  # a first exchange gave R
            R, present = state.soft, state.present
            state = replace(state, soft=None, present=None)
        else:
            sent = list(uploads.values())
            state, R, present = averaged(state, sent, [upload.soft for upload in sent])
        w = context.load(state.parameters)
        self._train_server(w, uploads, R, present, context)
        return replace(state, parameters=w.state_dict())

    def _train_server(
        self,
        w: nn.Module,
        uploads: Mapping[int, CondensedSet],
        R: Tensor,
        present: Tensor,
        context: RoundContext,
    ) -> None:
        """Trains the global model w in place with the loss L_CE + λ_glob·L_LGKM (Eq. 14).

        R are the averaged soft labels [C, C]; `present` [C] marks the classes that have them.
        """

        def weighted_lgkm(logits_NC: Tensor, labels_N: Tensor) -> Tensor:  # λ_glob·L_LGKM
            T, has_images = losses.mean_logits(logits_NC, labels_N)  # Eq. 13, before its softmax
            usable = has_images & present
            loss = losses.knowledge_matching(
                T, R, usable, self.temperature, self.matching_reduction
            )
            return self.global_weight * loss

        def union_matching(network: nn.Module, images: Tensor, labels_N: Tensor) -> Tensor:
            return weighted_lgkm(computed(network, images, context.precision), labels_N)

        def minibatch_loss(network: nn.Module, images: Tensor, labels_N: Tensor) -> Tensor:
            logits = computed(network, images, context.precision)
            return F.cross_entropy(logits, labels_N) + weighted_lgkm(logits, labels_N)

        sgd = self.union_sgd()
        if self.global_weight == 0:
            sets.train_on_union(w, uploads, sgd, context)
        elif self.server_matching == "minibatch":
            sets.train_on_union(w, uploads, sgd, context, minibatch_loss)
        else:
            sets.train_on_union(w, uploads, sgd, context, on_all=union_matching)


def resampled(
    w_r: nn.Module, gamma: float, context: RoundContext, period: int | None = None
) -> Iterator[nn.Module]:
    """Yields the network of each step, with the weights γ·w_r + (1 − γ)·w̃ (Eq. 17).

    `reset_parameters` of each layer initialises w̃. All clients use the same random draws, which
    the paper does not require. With a `period`, they repeat after this number of networks. The same
    network object is yielded each time; w_r is copied.
    """
    network = FlatNetwork(copy.deepcopy(w_r).to(context.device))
    center = network.flat.clone()
    scratch = copy.deepcopy(context.architecture).cpu()
    for step in count():
        if gamma < 1:
            number = step % (period or sys.maxsize)
            with forked_rng(context.seed, "model re-sampling", context.round, number):
                for layer in scratch.modules():
                    if hasattr(layer, "reset_parameters"):
                        layer.reset_parameters()  # type: ignore[operator]
            fresh = flatten(scratch).to(center.device, non_blocking=True)
            torch.lerp(fresh, center, gamma, out=network.flat)
        yield network.module


def averaged(
    state: KnowledgeState, sent: Sequence[CondensedSet | LocalKnowledge], soft: Sequence[Tensor]
) -> tuple[KnowledgeState, Tensor, Tensor]:
    """Averages the logits V_k (Eq. 8) and the soft labels R_k (Eq. 12) of the clients.

    If no client of the round has a class, its row of V is kept.

    `soft` contains R_k of each upload. Returns the state with the new V, R [C, C], and a mask [C]
    of the classes for which R is defined.
    """
    present = [upload.present for upload in sent]
    V, has_logits = losses.average_over_holders([upload.logits for upload in sent], present)
    R, has_labels = losses.average_over_holders(soft, present)
    V = torch.where(has_logits[:, None], V, state.logits)
    has_logits = has_logits | state.has_logits
    return replace(state, logits=V, has_logits=has_logits), R, has_labels
