"""Knowledge in logit space beside images: clients tell the class means of their logits, the server averages them.

V_k, the class-mean logits of client k's data under w_r (Eq. 5 of FedAF, arXiv 2404.18962), and its
soft labels R_k go up; the server averages V and R over the clients that have a class (Eqs. 8, 12),
and sends V down with the model. What clients and server do with it is the method's.

With differential privacy V_k is one noisy sum of clipped logits over noisy counts, and R_k is
computed from that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.client import ClientGroup, PrivateClients
from fedsynth.core.messages import Message, ModelParameters, parameters_of, released
from fedsynth.core.method import Memory, PrivatePlan, RoundContext, ServerState
from fedsynth.core.validation import check_choice, check_ranges
from fedsynth.data.images import denormalise
from fedsynth.methods.shared.class_sums import class_means, sums_plans
from fedsynth.methods.shared.condensing import Condenses
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.synthesizer.condensation.knowledge import average_over_holders, soft_labels
from fedsynth.synthesizer.condensation.sets import SyntheticSet


@dataclass(frozen=True)
class GlobalKnowledge(ModelParameters):
    """Down: w_r, and the averaged logits V [C, C] with the classes that they exist for [C] (none in round 1)."""

    logits: Tensor = released()
    known: Tensor = released()


@dataclass(frozen=True)
class CondensedSet(SyntheticSet):
    """Up: uint8 pixels and labels, V_k and R_k [C, C] (float32), and which of their rows exist [C]
    (bool); those are empty where V went up in a first phase, as R follows from it."""

    logits: Tensor = released()
    soft: Tensor = released()
    present: Tensor = released()


@dataclass(frozen=True)
class LocalKnowledge(Message):
    """Up, in a first phase: V_k [C, C] and which of its rows exist [C] (bool)."""

    logits: Tensor = released()
    present: Tensor = released()


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
    answers: ClassVar[type[Message] | None] = LocalKnowledge
    downlink: ClassVar[type[ModelParameters]] = GlobalKnowledge

    temperature: float = 1.0
    knowledge_from: str = "previous-round"
    logit_clip: float = 5.0
    knowledge_noise: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, temperature=(1e-6, inf))
        check_ranges(self, logit_clip=(1e-9, inf), knowledge_noise=(1e-3, inf))
        check_choice("knowledge_from", self.knowledge_from, ("previous-round", "first-phase"))

    def question(self, state: ServerState, context: RoundContext) -> Message | None:
        if self.knowledge_from == "first-phase":
            return ModelParameters(state.parameters, 1.0)
        return None

    def answer(
        self,
        message: Message,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> list[tuple[Message, Memory]]:
        model = context.load(parameters_of(message)).requires_grad_(False).eval()
        told = self.statistics(model, clients, memories, context)
        return [
            (LocalKnowledge(own["logits"], own["present"]), {**memory, **own})
            for own, memory in zip(told, memories, strict=True)
        ]

    def hear(
        self, state: ServerState, answers: Sequence[Message], context: RoundContext
    ) -> ServerState:
        sent = [
            (a.logits, soft_labels(a.logits, self.temperature), a.present)
            for a in answers
            if isinstance(a, LocalKnowledge)
        ]
        return ServerState(state.parameters, _averaged(state, sent))

    def broadcast(self, state: ServerState, context: RoundContext) -> Message:
        classes, device = context.spec.classes, context.device
        logits = state.kept.get("logits", torch.zeros(classes, classes, device=device))
        known = state.kept.get("known", torch.zeros(classes, dtype=torch.bool, device=device))
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
        plans = None
        if isinstance(clients, PrivateClients):
            _, sums, counts = self.private_plans(context.protection()[0], context)
            plans = sums, counts
        classes = context.spec.classes
        means = class_means(clients, model, classes, plans, context, least=self.min_examples)
        return [{"logits": logits, "present": present} for logits, present in means]

    def make_upload(
        self, images: SyntheticSet, statistics: Mapping[str, Tensor], context: RoundContext
    ) -> Message:
        logits, present = statistics["logits"], statistics["present"]
        if self.knowledge_from == "first-phase":  # the server has V, and makes R of it
            logits, present = logits[:0], present[:0]
        pixels = denormalise(images.images, context.spec)
        soft = soft_labels(logits, self.temperature)
        return CondensedSet(pixels, images.labels, logits, soft, present)

    def averaged(self, state: ServerState, uploads: Sequence[Message]) -> Mapping[str, Tensor]:
        """V and R after all uploads of a round, see `_averaged`."""
        if self.knowledge_from == "first-phase":
            return state.kept
        sets = [u for u in uploads if isinstance(u, CondensedSet)]
        return _averaged(state, [(u.logits, u.soft, u.present) for u in sets])

    def private_plans(
        self, privacy: PrivacySettings, context: RoundContext
    ) -> tuple[PrivatePlan, ...]:
        """The images' T releases, the sums of logits, and the counts."""
        each, noise = "logits z(x) of each example", self.knowledge_noise
        classes = context.spec.classes
        return *super().private_plans(privacy, context), *sums_plans(
            "logits (V and R)", each, self.logit_clip, classes, classes, noise
        )


def _averaged(
    state: ServerState, sent: Sequence[tuple[Tensor, Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Eqs. 8 and 12, of what clients sent (V_k, R_k, which rows exist): R as "soft" with the classes "present" now; V as
    "logits" with the classes "known", where classes that none of them has keep an earlier round's row (partial participation)."""
    holders = [present for _, _, present in sent]
    logits, now = average_over_holders([v for v, _, _ in sent], holders)
    soft, _ = average_over_holders([r for _, r, _ in sent], holders)
    known = now
    if "known" in state.kept:
        logits = torch.where(now[:, None], logits, state.kept["logits"])
        known = now | state.kept["known"]
    return {"logits": logits, "known": known, "soft": soft, "present": now}
