"""Knowledge in logit space beside images: clients tell class-mean logits, the server averages.

V_k, the class-mean logits of client k's data under w_r (Eq. 5 of FedAF, arXiv 2404.18962), and its
soft labels R_k go up; the server averages V and R over the clients that have a class (Eqs. 8, 12),
and sends V down with the model. What clients and server do with it is the method's.

With differential privacy V_k is one noisy sum of clipped logits over noisy counts, and R_k is
computed from that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.client import ClientGroup
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, released
from fedsynth.core.method import Memory, PrivatePlan, Results
from fedsynth.core.state import ServerState
from fedsynth.core.uploads import Array, Rule
from fedsynth.data.images import denormalise
from fedsynth.methods.shared.class_sums import class_means, sums_plans
from fedsynth.methods.shared.condensing import Condenses
from fedsynth.privacy.plans import FIRST, MAIN
from fedsynth.privacy.requests import check_tensor
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.synthesizer.condensation.knowledge import average_over_holders, soft_labels
from fedsynth.synthesizer.condensation.sets import SyntheticSet, set_rules
from fedsynth.validation import check_choices, check_ranges

LOGITS = "logit sums"
"""The name of the plan of what V_k is made of, beside the class counts'."""


@dataclass(frozen=True)
class GlobalKnowledge(ModelParameters):
    """Down: w_r, and the averaged logits V [C, C] with the classes that they exist for [C].

    In round 1 there are none, unless a first exchange made them.
    """

    logits: Tensor = released()
    known: Tensor = released()


@dataclass(frozen=True)
class CondensedSet(SyntheticSet):
    """Up: uint8 pixels and labels, V_k and R_k [C, C] (float32), and which of their rows exist [C]
    (bool); those are empty where V went up in a first phase, as R follows from it."""

    logits: Tensor = released()
    soft: Tensor = released()
    present: Tensor = released()

    def soft_labels(self) -> Tensor | None:
        """R's row of each image's class, or where there is none the class itself, [N, C]; None
        where R stays with the server."""
        if not len(self.soft):
            return None
        hard = torch.eye(len(self.soft), device=self.soft.device)
        rows: Tensor = torch.where(self.present[:, None], self.soft, hard)[self.labels]
        return rows


@dataclass(frozen=True)
class LocalKnowledge(Message):
    """Up, in a first phase: V_k [C, C] and which of its rows exist [C] (bool)."""

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
class SharesKnowledge(Condenses):
    """Condensation whose clients also tell class-mean logits.

    Args:
        temperature: τ of the soft labels; the paper gives none: 1 is plain softmax. In short runs
            with λ_glob = 2 larger ones do less harm (docs/results.md).
        knowledge_from: when V is made: averaged from the "previous-round"'s uploads (App. C counts
            one upload of S, V and R a round; then round 1 has none), or in a "first-phase" of the
            same round, under w_r: one more exchange.
        logit_clip: with differential privacy: L2 bound of an example's logits.
        knowledge_noise: with differential privacy: the noise multiplier of the logits' sums and of
            the counts over that of the images' releases. A public choice, not tuned, as the clip.
    """

    upload: ClassVar[type[Message]] = CondensedSet
    downlink: ClassVar[type[Message]] = GlobalKnowledge
    first_downlink: ClassVar[type[Message] | None] = ModelParameters
    first_upload: ClassVar[type[Message] | None] = LocalKnowledge
    state: ClassVar[type[ServerState]] = KnowledgeState

    temperature: float = 1.0
    knowledge_from: str = "previous-round"
    logit_clip: float = 5.0
    knowledge_noise: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, temperature=(1e-6, inf))
        check_ranges(self, logit_clip=(1e-9, inf), knowledge_noise=(1e-3, inf))
        check_choices(self, knowledge_from=("previous-round", "first-phase"))

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

    def first_aggregate(
        self, state: KnowledgeState, replies: Mapping[int, LocalKnowledge], context: RoundContext
    ) -> KnowledgeState:
        logits = [reply.logits for reply in replies.values()]
        soft = [soft_labels(own, self.temperature) for own in logits]
        present = [reply.present for reply in replies.values()]
        state, mean_soft, now = _averaged(state, logits, soft, present)
        return replace(state, soft=mean_soft, present=now)

    def check_request(self, message: ModelParameters, context: RoundContext) -> None:
        if isinstance(message, GlobalKnowledge):  # and not the first exchange's model alone
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

    def broadcast(self, state: KnowledgeState, context: RoundContext) -> Message:
        classes = context.spec.classes
        device = context.device
        logits = state.logits
        if logits is None:
            logits = torch.zeros(classes, classes, device=device)
        known = state.known
        if known is None:
            known = torch.zeros(classes, dtype=torch.bool, device=device)
        return GlobalKnowledge(state.parameters, 1.0, logits, known)

    def statistics(
        self,
        model: nn.Module,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> Sequence[Mapping[str, Tensor]]:
        """V_k [C, C] as "logits" (Eq. 5), and which of its rows exist [C] as "present"."""
        if all("logits" in memory for memory in memories):  # released in the first phase
            return memories
        classes = context.spec.classes
        means = class_means(clients, model, classes, LOGITS, context, least=self.min_examples)
        return [{"logits": logits, "present": present} for logits, present in means]

    def make_upload(
        self, images: SyntheticSet, statistics: Mapping[str, Tensor], context: RoundContext
    ) -> Message:
        logits = statistics["logits"]
        present = statistics["present"]
        if self.knowledge_from == "first-phase":  # the server has V, and makes R of it
            logits = logits[:0]
            present = present[:0]
        pixels = denormalise(images.images, context.spec)
        soft = soft_labels(logits, self.temperature)
        return CondensedSet(pixels, images.labels, logits, soft, present)

    def averaged(
        self, state: KnowledgeState, uploads: Mapping[int, CondensedSet]
    ) -> tuple[KnowledgeState, Tensor, Tensor]:
        """The state with V, and R [C, C] with its classes [C], after a round's uploads (Eqs. 8,
        12)."""
        if state.soft is not None and state.present is not None:  # of a first exchange
            return replace(state, soft=None, present=None), state.soft, state.present
        sets = uploads.values()
        return _averaged(
            state, [u.logits for u in sets], [u.soft for u in sets], [u.present for u in sets]
        )

    def private_plans(
        self, privacy: PrivacySettings, context: RoundContext
    ) -> tuple[PrivatePlan, ...]:
        """The images' T releases, the sums of logits, and the counts."""
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


def _averaged(
    state: KnowledgeState,
    logits: Sequence[Tensor],
    soft: Sequence[Tensor],
    present: Sequence[Tensor],
) -> tuple[KnowledgeState, Tensor, Tensor]:
    """The state with V, and R with its classes, from all V_k, R_k and which of their rows exist.

    Classes that none of these clients has keep V's row of an earlier round (partial participation).
    """
    mean, now = average_over_holders(logits, present)
    mean_soft, _ = average_over_holders(soft, present)
    known = now
    if state.logits is not None and state.known is not None:
        mean = torch.where(now[:, None], mean, state.logits)
        known = now | state.known
    return replace(state, logits=mean, known=known), mean_soft, now
