"""FedAF's settings, messages and declarations; its steps are in `fedsynth/methods/fedaf.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message, ModelParameters, released
from fedsynth.core.method import Presets, ReleasePlan
from fedsynth.core.uploads import Array, Rule
from fedsynth.methods.shared.class_sums import sums_plans
from fedsynth.methods.shared.condensing import CondensingMethod
from fedsynth.privacy.plans import FIRST, MAIN
from fedsynth.privacy.requests import check_tensor
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.synthesizer.condensation.knowledge import DISTANCES, REDUCTIONS
from fedsynth.synthesizer.condensation.sets import SyntheticSet, set_rules
from fedsynth.validation import in_range, one_of

LOGITS = "logit sums"  # the name of the plan of V_k's sums


@dataclass(frozen=True)
class GlobalLogits(ModelParameters):
    """Sent to clients: w_r, the averaged logits V [C, C], and a mask [C] of the classes that have
    logits."""

    logits: Tensor = released()
    has_logits: Tensor = released()


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
    has_logits: Tensor | None = None
    soft: Tensor | None = None
    present: Tensor | None = None


@dataclass(frozen=True)
class FedAFSettings(CondensingMethod):
    """FedAF's settings, with the paper's values; where it is silent, the reason. What is not named
    here is `CondensingMethod`'s or `TrainsOnUnion`'s: 500 server epochs, batch 256 and momentum 0.9 are
    the paper's (Sec. 5).

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
        distance: of Eq. 10, see `collaborative_distance`; "point", as u and v are one vector each.
        directions: of distance "rows".
        server_matching: the t_c of Eq. 13 over the "minibatch"'s images of the class, or over the
            "union" of all sets, which is literal and costs a pass over S in every step.
        matching_reduction: "mean" or "sum" of Eq. 15 over classes, see `knowledge_matching`.
        temperature: τ of the soft labels; the paper gives none: 1 is plain softmax. In short runs
            with λ_glob = 2 larger ones do less harm (docs/results.md).
        knowledge_from: when V is made: averaged from the "previous-round"'s uploads, or in a
            "first-phase" of the same round, under w_r: one more exchange.
        logit_clip: with differential privacy: L2 bound of an example's logits.
        knowledge_noise: with differential privacy: the noise multiplier of the logits' sums and of
            the counts over that of the images' releases; public, as the clip, and not tuned.
    """

    upload: ClassVar[type[Message]] = CondensedSet
    downlink: ClassVar[type[Message]] = GlobalLogits
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

    temperature: float = in_range(1.0, 1e-6)
    knowledge_from: str = one_of("previous-round", "first-phase")
    logit_clip: float = in_range(5.0, 1e-9)
    knowledge_noise: float = in_range(5.0, 1e-3)
    server_lr: float = 1e-3
    server_weight_decay: float = 0.0
    ipc: int = 50
    image_momentum: float = 0.9
    min_examples: int = 1
    start_average: int = 10
    gamma: float = in_range(0.9, 0, 1)
    local_weight: float = in_range(1e-4, 0)
    global_weight: float = in_range(1e-2, 0)
    distance: str = one_of(*DISTANCES)
    directions: int = in_range(50, 1)
    server_matching: str = one_of("minibatch", "union")
    matching_reduction: str = one_of(*REDUCTIONS)

    def check_request(self, message: ModelParameters, context: RoundContext) -> None:
        if isinstance(message, GlobalLogits):  # not the plain model of the first exchange
            classes = context.spec.classes
            check_tensor("logits", message.logits, (classes, classes), torch.float32)
            check_tensor("has_logits", message.has_logits, (classes,), torch.bool)

    def upload_rules(self, phase: str, client: int, context: RoundContext) -> dict[str, Rule]:
        rows = classes = context.spec.classes
        if phase == MAIN and self.knowledge_from == "first-phase":
            rows = 0
        rules: dict[str, Rule] = {
            "logits": Array((rows, classes)),
            "present": Array((rows,), torch.bool),
        }
        if phase == FIRST:
            return rules
        soft = Array((rows, classes), low=0.0, high=1.0, sums_to_one=True)
        return {**set_rules(context.spec, self.ipc, torch.uint8), **rules, "soft": soft}

    def release_plans(
        self, privacy: PrivacySettings, context: RoundContext
    ) -> tuple[ReleasePlan, ...]:
        """Returns the plans of the images' T releases, of the sums of logits, and of the counts."""
        images = super().release_plans(privacy, context)
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

    def first_request(self, state: KnowledgeState, context: RoundContext) -> Message | None:
        if self.knowledge_from == "first-phase":
            return ModelParameters(state.parameters, 1.0)
        return None

    def broadcast(self, state: KnowledgeState, context: RoundContext) -> GlobalLogits:
        """Returns w_r, and V (Eq. 9), which is empty in round 1."""
        V, has_logits = state.logits, state.has_logits
        if V is None or has_logits is None:
            C = context.spec.classes
            V = torch.zeros(C, C, device=context.device)
            has_logits = torch.zeros(C, dtype=torch.bool, device=context.device)
        return GlobalLogits(state.parameters, 1.0, V, has_logits)
