"""FedAF: aggregation-free learning by condensation and knowledge matching (arXiv 2404.18962).

Client, every round: compute class-mean logits V_k and soft labels R_k of its data under w_r (Eqs.
5, 12), and condense: distribution matching only in feature space (Eq. 4) plus λ_loc times the
sliced Wasserstein distance of the synthetic images' mean logits to the global V (Eq. 10), each step
with a re-sampled network (Eq. 17). It sends pixels as uint8, V_k and R_k. Server: average V and R
over the clients that have a class (Eqs. 8, 12), and train on the union of all sets with
cross-entropy plus λ_glob times the knowledge-matching loss (Eqs. 13-15).

V is averaged from a round's uploads and used in the next (App. C counts one upload of S, V and R a
round): round 1 has no collaborative term. `knowledge_from="first-phase"` exchanges V first.

With differential privacy the images go through mechanism `residual`, and V comes from one noisy sum
of clipped logits and noisy counts; R is computed from the released V. Batch norm is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.client import ClientGroup, OpenClients, Segments
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, released
from fedsynth.core.method import Memory, Presets, PrivatePlan, Results
from fedsynth.core.state import ServerState
from fedsynth.core.uploads import Array, Rule
from fedsynth.data.images import denormalise
from fedsynth.methods.shared.class_sums import class_means, sums_plans
from fedsynth.methods.shared.condensing import Condenses
from fedsynth.privacy.plans import FIRST, MAIN
from fedsynth.privacy.requests import check_tensor
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation.knowledge import (
    DISTANCES,
    REDUCTIONS,
    KnowledgeMatcher,
    KnowledgeTerm,
    average_over_holders,
    soft_labels,
    unit_directions,
)
from fedsynth.synthesizer.condensation.matchers import Matcher
from fedsynth.synthesizer.condensation.networks import FeatureMaps, ResampledNetworks
from fedsynth.synthesizer.condensation.sets import (
    SyntheticSet,
    averaged_start,
    set_rules,
    train_on_union,
)
from fedsynth.validation import check_choices, check_ranges

LOGITS = "logit sums"  # the name of the plan of V_k's sums


@dataclass(frozen=True)
class GlobalKnowledge(ModelParameters):
    """Sent to clients: w_r, the averaged logits V [C, C], and a mask [C] of the classes that have
    logits."""

    logits: Tensor = released()
    known: Tensor = released()


@dataclass(frozen=True)
class CondensedSet(SyntheticSet):
    """The upload: uint8 pixels and labels, V_k and R_k [C, C] (float32), and which of their rows
    exist [C] (bool). The last three are empty if V was sent in a first phase, as R follows from
    it."""

    logits: Tensor = released()
    soft: Tensor = released()
    present: Tensor = released()

    def soft_labels(self) -> Tensor | None:
        """Returns R's row of each image's class, or its one-hot class, [N, C]; None without R."""
        if not len(self.soft):
            return None
        hard = torch.eye(len(self.soft), device=self.soft.device)
        rows: Tensor = torch.where(self.present[:, None], self.soft, hard)[self.labels]
        return rows


@dataclass(frozen=True)
class LocalKnowledge(Message):
    """The upload of a first phase: V_k [C, C] and which of its rows exist [C] (bool)."""

    logits: Tensor = released()
    present: Tensor = released()


@dataclass(frozen=True)
class KnowledgeState(ServerState):
    """The state, with V [C, C] and the classes that it exists for, bool [C].

    Args:
        soft, present: within a round, R [C, C] and its classes [C] of a first exchange.
    """

    logits: Tensor | None = None
    known: Tensor | None = None
    soft: Tensor | None = None
    present: Tensor | None = None


@dataclass(frozen=True)
class FedAF(Condenses):
    """Settings, with the paper's values; where it is silent, the reason. What is not named here is
    `Condenses`'s or `TrainsOnUnion`'s: 500 server epochs, batch 256 and momentum 0.9 are the
    paper's (Sec. 5).

    Args:
        server_lr: 1e-3 (Sec. 5).
        server_weight_decay: none (not mentioned).
        image_lr: 1.0 on CIFAR-10, 0.1 on CIFAR-100, 0.2 on Fashion-MNIST.
        matching: "mean" is Eq. 4.
        min_examples: the paper names no such rule, so every class that a client has.
        start_average: the paper writes "average", without a number.
        restart: False, as the paper describes no repeated initialisation.
        gamma: γ of model re-sampling (Eq. 17).
        local_weight: λ_loc; 0 leaves the collaborative term out (an ablation). 1e-4 on CIFAR, 1e-3
            on Fashion-MNIST, 0.01 on DomainNet.
        global_weight: λ_glob; 0 leaves knowledge matching out (an ablation). 1e-2 on CIFAR, 2.0 on
            Fashion-MNIST, 0.1 on DomainNet.
        distance: of Eq. 10, see `sliced_wasserstein`; "point", as u and v are one vector each.
        directions: of distance "rows".
        server_matching: the t_c of Eq. 13 over the "minibatch"'s images of the class, or over the
            "union" of all sets, which is literal and costs a pass over S in every step, or the
            union only in the first step of each "epoch".
        matching_reduction: "mean" or "sum" of Eq. 15 over classes, see `knowledge_matching`.
        matching_norm: batch norm in the pass that t_c comes from: by the "batch", as in training,
            or by the "running" statistics, as in the pass that R came from.
        temperature: τ of the soft labels; the paper gives none: 1 is plain softmax. In short runs
            with λ_glob = 2 larger ones do less harm (docs/results.md).
        knowledge_from: when V is made: averaged from the "previous-round"'s uploads, or in a
            "first-phase" of the same round, under w_r: one more exchange.
        logit_clip: with differential privacy: L2 bound of an example's logits.
        knowledge_noise: with differential privacy: the noise multiplier of the logits' sums and of
            the counts over that of the images' releases; public, as the clip, and not tuned.

    >>> from fedsynth import FedAF, resolve, simulate
    >>> run, model = {"method": "fedaf", "rounds": 2}, {"width": 16}
    >>> quick = {"ipc": 5, "iterations": 5, "server_lr": 0.05}
    >>> result = simulate(resolve({"run": run, "model": model, "method": quick}))
    >>> sent = result.uploads[0]
    >>> list(sent.logits.shape), list(sent.soft.shape)  # a row of class means for each class
    ([10, 10], [10, 10])
    >>> result.accuracy > 0.6
    True
    """

    name: ClassVar[str] = "fedaf"
    summary: ClassVar[str] = (
        "clients condense towards shared class-mean logits, the server matches their soft labels"
    )
    reference: ClassVar[str] = "Wang et al. 2024, FedAF, arXiv 2404.18962"
    upload: ClassVar[type[Message]] = CondensedSet
    downlink: ClassVar[type[Message]] = GlobalKnowledge
    first_downlink: ClassVar[type[Message] | None] = ModelParameters
    first_upload: ClassVar[type[Message] | None] = LocalKnowledge
    state: ClassVar[type[ServerState]] = KnowledgeState
    matches_logits: ClassVar[bool] = False
    presets: ClassVar[Presets] = {
        "digits": {
            "ipc": 10,
            "iterations": 10,
            "image_lr": 5.0,
            "image_momentum": 0.0,
            "server_lr": 0.01,
        }
    }

    temperature: float = 1.0
    knowledge_from: str = "previous-round"
    logit_clip: float = 5.0
    knowledge_noise: float = 5.0
    server_lr: float = 1e-3
    server_weight_decay: float = 0.0
    ipc: int = 50
    image_momentum: float = 0.9
    min_examples: int = 1
    start_average: int = 10
    gamma: float = 0.9
    local_weight: float = 1e-4
    global_weight: float = 1e-2
    distance: str = "point"
    directions: int = 50
    server_matching: str = "minibatch"
    matching_reduction: str = "mean"
    matching_norm: str = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, gamma=(0, 1), local_weight=(0, inf), global_weight=(0, inf))
        check_ranges(self, directions=(1, inf), temperature=(1e-6, inf))
        check_ranges(self, logit_clip=(1e-9, inf), knowledge_noise=(1e-3, inf))
        check_choices(
            self,
            knowledge_from=("previous-round", "first-phase"),
            distance=DISTANCES,
            server_matching=("minibatch", "union", "epoch"),
            matching_reduction=REDUCTIONS,
            matching_norm=("batch", "running"),
        )

    def broadcast(self, state: KnowledgeState, context: RoundContext) -> Message:
        logits, known = state.logits, state.known
        if logits is None or known is None:
            logits = torch.zeros(context.spec.classes, context.spec.classes, device=context.device)
            known = torch.zeros(context.spec.classes, dtype=torch.bool, device=context.device)
        return GlobalKnowledge(state.parameters, 1.0, logits, known)

    def check_request(self, message: ModelParameters, context: RoundContext) -> None:
        if isinstance(message, GlobalKnowledge):  # not the plain model of the first exchange
            classes = context.spec.classes
            check_tensor("logits", message.logits, (classes, classes), torch.float32)
            check_tensor("known", message.known, (classes,), torch.bool)

    def upload_rules(self, phase: str, client: int, context: RoundContext) -> dict[str, Rule]:
        classes = context.spec.classes
        told = 0 if phase == MAIN and self.knowledge_from == "first-phase" else classes
        rules: dict[str, Rule] = {
            "logits": Array((told, classes)),
            "present": Array((told,), torch.bool),
        }
        if phase == FIRST:
            return rules
        soft = Array((told, classes), least=0.0, most=1.0, sums_to_one=True)
        return {**set_rules(context.spec, self.ipc, torch.uint8), **rules, "soft": soft}

    def private_plans(
        self, privacy: PrivacySettings, context: RoundContext
    ) -> tuple[PrivatePlan, ...]:
        """Returns the plans of the images' T releases, of the sums of logits, and of the counts."""
        images = super().private_plans(privacy, context)
        return *images, *sums_plans(
            LOGITS,
            "logits (V and R)",
            "logits z(x) of each example",
            clip=self.logit_clip,
            width=context.spec.classes,
            classes=context.spec.classes,
            noise=self.knowledge_noise,
            phase=FIRST if self.knowledge_from == "first-phase" else MAIN,
        )

    # --------------------------------------------------------------------------------------- client

    def first_request(self, state: KnowledgeState, context: RoundContext) -> Message | None:
        if self.knowledge_from == "first-phase":
            return ModelParameters(state.parameters, 1.0)
        return None

    def first_step(
        self,
        message: ModelParameters,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> Results:
        model = context.load(message.parameters).requires_grad_(False).eval()
        told = self.statistics(model, clients, memories, context)
        return [
            (LocalKnowledge(own["logits"], own["present"]), {**memory, **own})
            for own, memory in zip(told, memories, strict=True)
        ]

    def statistics(
        self,
        model: nn.Module,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> Sequence[Mapping[str, Tensor]]:
        """Returns V_k [C, C] as "logits" (Eq. 5), and which of its rows exist [C] as "present"."""
        if all("logits" in memory for memory in memories):  # released in the first phase
            return memories
        classes = context.spec.classes
        means = class_means(clients, model, classes, LOGITS, context, least=self.min_examples)
        return [{"logits": logits, "present": present} for logits, present in means]

    def open_start(self, clients: OpenClients, segments: Segments, context: RoundContext) -> Tensor:
        return averaged_start(clients, segments, self.ipc, self.start_average, context.seed)

    def feature_maps(
        self, model: nn.Module, segments: Segments, context: RoundContext, period: int | None
    ) -> FeatureMaps:
        networks = ResampledNetworks(
            model,
            context.architecture,
            self.gamma,
            seed=context.seed,
            round=context.round,
            device=context.device,
            period=period,
        )
        return FeatureMaps(networks.draw)

    def objective(
        self, matcher: Matcher, message: GlobalKnowledge, segments: Segments, context: RoundContext
    ) -> Matcher:
        """Returns distribution matching of embeddings (Eq. 4) plus the term of Eq. 10."""
        if self.local_weight == 0 or not bool(message.known.any()):
            return matcher
        label = segments.label.to(context.device)
        generator = torch_generator(
            context.seed, "slicing directions", context.round, device=context.device
        )
        return KnowledgeMatcher(
            matcher,
            message.logits[label],
            segments.position.to(context.device),
            message.known[label],
            weight=self.local_weight,
            logit_weight=1.0,
            distance=self.distance,
            directions=partial(unit_directions, self.directions, context.spec.classes, generator),
        )

    def make_upload(
        self, images: SyntheticSet, statistics: Mapping[str, Tensor], context: RoundContext
    ) -> Message:
        logits, present = statistics["logits"], statistics["present"]
        if self.knowledge_from == "first-phase":  # the server has V, and computes R from it
            logits, present = logits[:0], present[:0]
        pixels = denormalise(images.images, context.spec)
        soft = soft_labels(logits, self.temperature)
        return CondensedSet(pixels, images.labels, logits, soft, present)

    # --------------------------------------------------------------------------------------- server

    def first_aggregate(
        self, state: KnowledgeState, replies: Mapping[int, LocalKnowledge], context: RoundContext
    ) -> KnowledgeState:
        sent = list(replies.values())
        soft = [soft_labels(reply.logits, self.temperature) for reply in sent]
        state, mean_soft, now = _averaged(state, sent, soft)
        return replace(state, soft=mean_soft, present=now)

    def server_step(
        self, state: KnowledgeState, uploads: Mapping[int, CondensedSet], context: RoundContext
    ) -> KnowledgeState:
        if state.soft is not None and state.present is not None:  # of a first exchange
            soft, known = state.soft, state.present
            state = replace(state, soft=None, present=None)
        else:
            sent = list(uploads.values())
            state, soft, known = _averaged(state, sent, [u.soft for u in sent])
        model = context.load(state.parameters)
        self._train_server(model, uploads, soft, known, context)
        return replace(state, parameters=model.state_dict())

    def _train_server(
        self,
        model: nn.Module,
        uploads: Mapping[int, CondensedSet],
        soft: Tensor,
        known: Tensor,
        context: RoundContext,
    ) -> None:
        """Trains the model in place (Eqs. 13 to 15), with R as `soft` for the classes `known`."""
        sgd = self.union_sgd()
        term = KnowledgeTerm(
            soft,
            known,
            self.global_weight,
            self.temperature,
            self.matching_reduction,
            running=self.matching_norm == "running",
            precision=context.precision,
        )
        if self.global_weight == 0:
            train_on_union(model, uploads, sgd, context)
        elif self.server_matching == "minibatch":
            train_on_union(model, uploads, sgd, context, term.with_cross_entropy)
        else:
            once = self.server_matching == "epoch"
            train_on_union(model, uploads, sgd, context, on_all=term, once_an_epoch=once)


def _averaged(
    state: KnowledgeState, sent: Sequence[CondensedSet | LocalKnowledge], soft: Sequence[Tensor]
) -> tuple[KnowledgeState, Tensor, Tensor]:
    """Returns the state with V (Eq. 8), and R with its classes (Eq. 12).

    Classes that none of these clients has keep V's row of an earlier round (partial participation).
    """
    present = [upload.present for upload in sent]
    mean, now = average_over_holders([upload.logits for upload in sent], present)
    mean_soft, _ = average_over_holders(soft, present)
    known = now
    if state.logits is not None and state.known is not None:
        mean = torch.where(now[:, None], mean, state.logits)
        known = now | state.known
    return replace(state, logits=mean, known=known), mean_soft, now
