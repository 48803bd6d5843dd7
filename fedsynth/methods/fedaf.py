"""FedAF: federated learning by condensation and knowledge matching (arXiv 2404.18962).

In every round, each client computes its class-mean logits V_k under the global model w_r, and from
them soft labels R_k (Eqs. 5 and 11). It then condenses its data into synthetic images by
distribution matching in feature space (Eq. 4). A second term, weighted by λ_loc, pulls the mean
logits of the synthetic images towards the global V (Eq. 10). Each step uses a newly re-sampled
network (Eq. 17).

The server averages V_k and R_k (Eqs. 8 and 12). It then trains the global model from w_r on the
union of all synthetic sets, with the cross-entropy plus λ_glob times the knowledge-matching loss
(Eqs. 13 to 15).

The defaults depart from the paper in five places:

- Eqs. 8 and 12 divide by K. Here only clients with examples of the class are averaged, because Eq.
  5 is undefined for the others.
- V is averaged from one round's uploads and used in the next, because App. C counts a single upload
  of S, V and R per round. Round 1 therefore has no collaborative term. With
  `knowledge_from="first-exchange"`, V is exchanged first, by `first_step` and `first_aggregate`.
- t_c of Eq. 13 is computed from each minibatch and not from all images (`server_matching`).
- Eq. 15 is averaged over the classes (`matching_reduction`), and has no normaliser in the paper.
- An image starts as a real image, not as the average of several (`start_average`).

The paper names Eq. 10's distance F (sliced Wasserstein), but not its order. Between two vectors,
the distance of order 1 is a multiple of ‖u − v‖ in expectation (`distance`). The paper does not say
how batch norm computes the two: u has the statistics of its batch, and v the running statistics.

With differential privacy, the mechanism `residual` matches the images. V is computed from a noisy
sum of clipped logits and from noisy counts, and R from the released V. Networks with batch norm are
then refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.core.capabilities import TwoExchanges
from fedsynth.core.client import Group
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message, ModelParameters, Tensors, released
from fedsynth.core.method import ClientStates, Plans, Presets, Results
from fedsynth.core.uploads import Array, Rule, check_tensor
from fedsynth.data.images import stored_dtype
from fedsynth.methods.shared.class_sums import class_means, sums_plans
from fedsynth.methods.shared.condensing import CondensingMethod, resampled
from fedsynth.mixed_precision import computed
from fedsynth.models.layers import with_grouped_statistics
from fedsynth.privacy.plans import FIRST, MAIN
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation import losses, sets
from fedsynth.validation import in_range, one_of

LOGITS = "logit sums"  # the release plan's name for V_k's sums


@dataclass(frozen=True)
class GlobalLogits(ModelParameters):
    """FedAF's request: the model w_r, and the averaged class-mean logits V [C, C].

    V has a row for each class. A mask [C] marks the classes with logits.
    """

    logits: Tensor = released()
    has_logits: Tensor = released()


@dataclass(frozen=True)
class CondensedSet(sets.SyntheticSet):
    """A client's upload in FedAF: synthetic images, class-mean logits and class-mean soft labels.

    The labelled images are uint8 pixels. The mean logits V_k and the soft labels R_k are float32
    [C, C]. A boolean mask [C] marks the classes for which V_k and R_k are defined.

    V_k, R_k and the mask are empty if V_k was already sent in a first exchange, because R_k is
    computed from V_k.
    """

    logits: Tensor = released()
    soft: Tensor = released()
    present: Tensor = released()

    def soft_labels(self) -> Tensor | None:
        """Returns a soft label for each image [N, C], or None if the client sent no soft labels.

        An image's soft label is the row of R_k for its class, or the one-hot label if R_k is not
        defined for the class.
        """
        if not len(self.soft):
            return None
        hard = torch.eye(len(self.soft), device=self.soft.device)
        rows: Tensor = torch.where(self.present[:, None], self.soft, hard)[self.labels]
        return rows


@dataclass(frozen=True)
class LocalKnowledge(Message):
    """A client's upload in FedAF's first exchange: the class-mean logits V_k [C, C].

    A boolean mask [C] marks the classes for which V_k is defined.
    """

    logits: Tensor = released()
    present: Tensor = released()


@dataclass(frozen=True)
class KnowledgeState(ServerState):
    """The server's state in FedAF, with the averaged logits V [C, C].

    A boolean mask [C] marks the classes for which V is defined.

    Args:
        soft, present: R [C, C] and the mask [C] of its classes, if the round's first exchange
            computed them. Otherwise None.
    """

    logits: Tensor
    has_logits: Tensor
    soft: Tensor | None = None
    present: Tensor | None = None


@dataclass(frozen=True)
class FedAF(CondensingMethod, TwoExchanges):
    """FedAF: clients share class-mean logits, and condense their data into synthetic images.

    The defaults are the paper's for CIFAR-10. `resolve` sets its values for CIFAR-100,
    Fashion-MNIST and DomainNet. Where the paper leaves a setting open, the reason for the default
    is given below. `CondensingMethod` and `TrainsOnUnion` document the remaining settings. The
    defaults of 50 images per class, 500 server epochs and a server batch of 256 are from Sec. 5.1,
    and the momentum of 0.9 is from App. A. The preset for digits is small.

    Args:
        server_lr: the server's learning rate. The default of 1e-3 is from Sec. 5.
        server_weight_decay: the server's weight decay. The default is 0, because the paper mentions
            none.
        image_lr: the images' learning rate: 1.0 on CIFAR-10, 0.1 on CIFAR-100, and 0.2 on
            Fashion-MNIST.
        matching: what is matched. "mean" is Eq. 4.
        min_examples: smallest number of examples with which a client sends a class. The default is
            1, because the paper states no minimum.
        start_average: number of real images whose mean is a start image. The paper writes "average"
            without a number. The default of 1 was best on held-out images (docs/results.md).
        restart: whether the images start again in each round. The default is False, because the
            paper describes no repeated initialisation.
        gamma: γ, the share of the global weights w_r in a re-sampled network (Eq. 17). The random
            weights are those that `reset_parameters` of each layer draws. Other parameters, such as
            a transformer's position bias, keep their first values.
        local_weight: λ_loc, the weight of the collaborative term. It is 1e-4 on CIFAR, 1e-3 on
            Fashion-MNIST, and 0.01 on DomainNet. With 0, the term is left out, as an ablation.
        global_weight: λ_glob, the weight of knowledge matching. It is 1e-2 on CIFAR, 2.0 on
            Fashion-MNIST, and 0.1 on DomainNet. With 0, knowledge matching is left out, as an
            ablation.
        distance: the distance in Eq. 10, as explained in `collaborative_distance`. The default is
            "point", because u and v are a single vector each.
        directions: number of random directions of the distance "rows".
        server_matching: the images over which the server computes t_c in Eq. 13. "minibatch" uses
            the class's images in the minibatch. "union" uses all synthetic sets, which is the
            literal reading, and costs a pass over S in every step.
        matching_reduction: "mean" or "sum" over the classes in Eq. 15, as explained in
            `knowledge_matching`.
        temperature: τ, the temperature of the soft labels. The paper gives none. With 1, which is
            plain softmax, and λ_glob = 2, knowledge matching costs accuracy on held-out images. The
            default of 4 does not (docs/results.md).
        knowledge_from: when V is computed. With "previous-round", V is the average over the
            previous round's uploads. With "first-exchange", V is computed under w_r in an
            additional exchange at the start of the same round.
        logit_clip: L2 bound on an example's logits. It is used only with differential privacy.
        knowledge_noise: noise multiplier of the logit sums and the counts, in units of the image
            releases' noise multiplier. It is used only with differential privacy. Neither
            `knowledge_noise` nor `logit_clip`, which are public, was tuned.

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
    upload = CondensedSet
    request = GlobalLogits
    first_upload = LocalKnowledge
    state = KnowledgeState
    matches_logits = False
    presets: ClassVar[Presets] = {
        "digits": {
            "ipc": 10,
            "iterations": 10,
            "image_lr": 5.0,
            "image_momentum": 0.0,
            "server_lr": 0.01,
        },
        "fashion-mnist": {"image_lr": 0.2, "local_weight": 1e-3, "global_weight": 2.0},
        "cifar100": {"image_lr": 0.1},
        "domainnet-10": {"local_weight": 1e-2, "global_weight": 0.1},
    }

    temperature: float = in_range(4.0, 1e-6)
    knowledge_from: str = one_of("previous-round", "first-exchange")
    logit_clip: float = in_range(5.0, 1e-9)
    knowledge_noise: float = in_range(5.0, 1e-3)
    server_lr: float = 1e-3
    server_weight_decay: float = 0.0
    ipc: int = 50
    image_momentum: float = 0.9
    min_examples: int = 1
    gamma: float = in_range(0.9, 0, 1)
    local_weight: float = in_range(1e-4, 0)
    global_weight: float = in_range(1e-2, 0)
    distance: str = one_of(*losses.DISTANCES)
    directions: int = in_range(50, 1)
    server_matching: str = one_of("minibatch", "union")
    matching_reduction: str = one_of(*losses.REDUCTIONS)

    # ---------------------------------------- class-mean logits: V_k of a client (Eq. 5), V (Eq. 8)

    def first_broadcast(self, state: KnowledgeState, context: RoundContext) -> Message | None:
        if self.knowledge_from == "first-exchange":
            return ModelParameters(state.parameters, 1.0)
        return None

    def first_step(
        self, message: ModelParameters, clients: Group, states: ClientStates, context: RoundContext
    ) -> Results:
        w_r = context.load(message.parameters).requires_grad_(False).eval()
        results = zip(self._class_logits(w_r, clients, states, context), states, strict=True)
        return [(LocalKnowledge(**V_k), {**state, **V_k}) for V_k, state in results]

    def _class_logits(
        self, w_r: nn.Module, clients: Group, states: ClientStates, context: RoundContext
    ) -> list[dict[str, Tensor]]:
        """Computes each client's class-mean logits (Eq. 5), as the fields of `LocalKnowledge`."""
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
        self, message: GlobalLogits, clients: Group, states: ClientStates, context: RoundContext
    ) -> Results:
        """Condenses the clients' data into synthetic images for each (client, class) pair.

        The images S of all pairs have the shape [pairs, ipc, channels, H, W].
        """
        w_r = context.load(message.parameters).requires_grad_(False).eval()
        pairs, C = self.pairs(clients), context.spec.classes
        S = sets.start_images(
            clients, pairs, states, context, self.ipc, self.start_average, self.restart
        )
        V = self._class_logits(w_r, clients, states, context)  # Eq. 5
        matcher = self.matcher(clients, pairs, context)
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
        """Returns a client's upload: synthetic images, class-mean logits and soft labels.

        The images have 8 bits (App. C). The soft labels are computed from the logits (Eq. 11).
        """
        v, present = V_k["logits"], V_k["present"]
        if self.knowledge_from == "first-exchange":  # the server has V_k, and computes R_k from it
            v, present = v[:0], present[:0]
        images = sets.as_pixels(S_k.images, context.spec)
        return CondensedSet(images, S_k.labels, v, losses.soft_labels(v, self.temperature), present)

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

        R are the averaged soft labels [C, C]. `present` [C] marks the classes with soft labels.
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

    # --------------------------------------------------------------------------- declarations

    def initial_state(self, parameters: Tensors) -> KnowledgeState:
        C = len(parameters["classifier.weight"])
        V = parameters["classifier.weight"].new_zeros(C, C)
        return KnowledgeState(parameters, V, V.new_zeros(C, dtype=torch.bool))

    def check_request(self, message: ModelParameters, context: RoundContext) -> None:
        if isinstance(message, GlobalLogits):  # not the plain model of the first exchange
            classes = context.spec.classes
            check_tensor("logits", message.logits, (classes, classes), torch.float32)
            check_tensor("has_logits", message.has_logits, (classes,), torch.bool)

    def upload_rules(self, exchange: str, client: int, context: RoundContext) -> dict[str, Rule]:
        rows = classes = context.spec.classes
        if exchange == MAIN and self.knowledge_from == "first-exchange":
            rows = 0
        rules: dict[str, Rule] = {
            "logits": Array((rows, classes)),
            "present": Array((rows,), torch.bool),
        }
        if exchange == FIRST:
            return rules
        soft = Array((rows, classes), low=0.0, high=1.0, sums_to_one=True)
        return {
            **sets.set_rules(context.spec, self.ipc, stored_dtype(context.spec)),
            **rules,
            "soft": soft,
        }

    def release_plans(self, privacy: PrivacySettings, context: RoundContext) -> Plans:
        """Plans a round's private releases: the images, logit sums and class counts.

        The images are released T times.
        """
        images = super().release_plans(privacy, context)
        return *images, *sums_plans(
            LOGITS,
            "logits (V and R)",
            "logits z(x) of each example",
            clip=self.logit_clip,
            width=context.spec.classes,
            classes=context.spec.classes,
            noise=self.knowledge_noise,
            exchange=FIRST if self.knowledge_from == "first-exchange" else MAIN,
        )


def averaged(
    state: KnowledgeState, sent: Sequence[CondensedSet | LocalKnowledge], soft: Sequence[Tensor]
) -> tuple[KnowledgeState, Tensor, Tensor]:
    """Averages all clients' class-mean logits V_k (Eq. 8) and soft labels R_k (Eq. 12).

    If no client of the round has a class, V keeps its row.

    `soft` contains each upload's R_k. Returns the state with the new V, R [C, C], and a mask [C] of
    the classes for which R is defined.
    """
    present = [upload.present for upload in sent]
    V, has_logits = losses.average_over_holders([upload.logits for upload in sent], present)
    R, has_labels = losses.average_over_holders(soft, present)
    V = torch.where(has_logits[:, None], V, state.logits)
    has_logits = has_logits | state.has_logits
    return replace(state, logits=V, has_logits=has_logits), R, has_labels
