"""FedAF's settings, messages and release plans. The steps are in `fedsynth/methods/fedaf.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message, ModelParameters, Tensors, released
from fedsynth.core.method import Plans, Presets
from fedsynth.core.uploads import Array, Rule, check_tensor
from fedsynth.data.images import stored_dtype
from fedsynth.methods.shared.class_sums import sums_plans
from fedsynth.methods.shared.condensing import CondensingMethod
from fedsynth.privacy.plans import FIRST, MAIN
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.synthesizer.condensation.losses import DISTANCES, REDUCTIONS
from fedsynth.synthesizer.condensation.sets import SyntheticSet, set_rules
from fedsynth.validation import in_range, one_of

LOGITS = "logit sums"  # the name of the plan of V_k's sums


@dataclass(frozen=True)
class GlobalLogits(ModelParameters):
    """The message to the clients of FedAF: the model w_r and the averaged logits V [C, C].

    V has a row for each class. A mask [C] marks the classes that have logits.
    """

    logits: Tensor = released()
    has_logits: Tensor = released()


@dataclass(frozen=True)
class CondensedSet(SyntheticSet):
    """The upload of a client in FedAF: synthetic images, and the mean logits and soft labels of
    each class.

    The images are uint8 pixels and have labels. The mean logits V_k and the soft labels R_k are
    float32 [C, C]. A boolean mask [C] marks the classes for which V_k and R_k are defined.

    V_k, R_k and the mask are empty if V_k was already sent in a first exchange, because R_k is
    computed from V_k.
    """

    logits: Tensor = released()
    soft: Tensor = released()
    present: Tensor = released()

    def soft_labels(self) -> Tensor | None:
        """Returns the soft label of each image, [N, C], or None if the upload has no R_k.

        The soft label is the row of R_k for the image's class. It is the one-hot label if R_k is
        not defined for this class.
        """
        if not len(self.soft):
            return None
        hard = torch.eye(len(self.soft), device=self.soft.device)
        rows: Tensor = torch.where(self.present[:, None], self.soft, hard)[self.labels]
        return rows


@dataclass(frozen=True)
class LocalKnowledge(Message):
    """The upload of FedAF's first exchange: the client's mean logits V_k of each class, [C, C].

    A boolean mask [C] marks the classes for which V_k is defined.
    """

    logits: Tensor = released()
    present: Tensor = released()


@dataclass(frozen=True)
class KnowledgeState(ServerState):
    """The server's state in FedAF, with the averaged logits V [C, C].

    A boolean mask [C] marks the classes for which V is defined.

    Args:
        soft, present: R [C, C] and the mask [C] of its classes, if a first exchange of this round
            computed them. Otherwise None.
    """

    logits: Tensor
    has_logits: Tensor
    soft: Tensor | None = None
    present: Tensor | None = None


@dataclass(frozen=True)
class FedAFSettings(CondensingMethod):
    """The settings of FedAF.

    The defaults are those of the paper. If the paper leaves a setting open, the reason for the
    default is given below. The remaining settings are documented in `CondensingMethod` and
    `TrainsOnUnion`. The defaults of 50 images per class, 500 server epochs and a server batch of
    256 are from Sec. 5.1, and the momentum of 0.9 is from App. A. The preset for digits is small.

    Args:
        server_lr: learning rate of the server. The default of 1e-3 is that of Sec. 5.
        server_weight_decay: weight decay of the server. The default is 0, because the paper
            mentions none.
        image_lr: learning rate of the images. 1.0 on CIFAR-10, 0.1 on CIFAR-100, and 0.2 on
            Fashion-MNIST.
        matching: what is matched. "mean" is Eq. 4.
        min_examples: smallest number of examples with which a client sends a class. The default is
            1, because the paper names no such rule.
        start_average: number of real images whose mean is a start image. The paper writes "average"
            without a number. The default of 1 was ahead on held-out images (docs/results.md).
        restart: whether the images start again in each round. The default is False, because the
            paper describes no repeated initialisation.
        gamma: γ, the share of the global weights w_r in a re-sampled network (Eq. 17).
        local_weight: λ_loc, the weight of the collaborative term. It is 1e-4 on CIFAR, 1e-3 on
            Fashion-MNIST, and 0.01 on DomainNet. With 0, the term is left out, as an ablation.
        global_weight: λ_glob, the weight of knowledge matching. It is 1e-2 on CIFAR, 2.0 on
            Fashion-MNIST, and 0.1 on DomainNet. With 0, knowledge matching is left out, as an
            ablation.
        distance: the distance in Eq. 10, as explained in `collaborative_distance`. The default is
            "point", because u and v are a single vector each.
        directions: number of random directions of the distance "rows".
        server_matching: over which images the server computes t_c in Eq. 13. "minibatch" uses the
            minibatch's images of the class. "union" uses all synthetic sets, which is the literal
            reading, and costs a pass over S in every step.
        matching_reduction: "mean" or "sum" over the classes in Eq. 15, as explained in
            `knowledge_matching`.
        temperature: τ, the temperature of the soft labels. The paper gives none, and 1 is plain
            softmax. In short runs with λ_glob = 2, larger values do less harm (docs/results.md).
        knowledge_from: when V is computed. With "previous-round", V is the average of the uploads
            of the previous round. With "first-exchange", V is computed under w_r in an additional
            exchange at the start of the same round.
        logit_clip: L2 bound on the logits of an example. It is used only with differential privacy.
        knowledge_noise: noise multiplier of the sums of logits and of the counts, in units of the
            noise multiplier of the images' releases. It is used only with differential privacy.
            This setting and `logit_clip` are public and were not tuned.
    """

    upload = CondensedSet
    request = GlobalLogits
    first_request = ModelParameters
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
        }
    }

    temperature: float = in_range(1.0, 1e-6)
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
    distance: str = one_of(*DISTANCES)
    directions: int = in_range(50, 1)
    server_matching: str = one_of("minibatch", "union")
    matching_reduction: str = one_of(*REDUCTIONS)

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
            **set_rules(context.spec, self.ipc, stored_dtype(context.spec)),
            **rules,
            "soft": soft,
        }

    def release_plans(self, privacy: PrivacySettings, context: RoundContext) -> Plans:
        """Returns the plans of all releases of a client in a round.

        They are the T releases of the images, the sums of logits, and the class counts.
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

    def first_broadcast(self, state: KnowledgeState, context: RoundContext) -> Message | None:
        if self.knowledge_from == "first-exchange":
            return ModelParameters(state.parameters, 1.0)
        return None
