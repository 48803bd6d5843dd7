"""FedKF: knowledge of all clients' models, distilled on each client without data (Zhou et al. 2023,
arXiv 2207.10447).

Server (T1, active-inactive model aggregation): one cache slot for each client's last model ŵ_k; ACA
w averages the round's active clients, OCA ŵ all slots, both weighted by n_k. Active clients get
both: they start from w, and ŵ is the teacher. Client (T2, global-local knowledge fusion), for each
local batch: one step of its generator g(θ_k; ·) down L_G (Eq. 5), then one step of its model w_k
down L_CE + γ·L_KL (Eq. 8), with L_KL on generated images (Eq. 6). The generator, with its
optimiser's state, is the client's memory.

With differential privacy the model is trained by DP-SGD. Teacher and generator come only from the
server's message, public noise and, with `use_kl`, the model's released DP-SGD steps, so the
distillation term is post-processing; n_k weights become uniform.

A round's metrics include the average facts of its clients' generators
(`fedsynth.evaluation.generated`): how the teacher classifies generated images. They are computed
from teacher, generator and public noise, so they are post-processing too. A simulation reads them
from the clients' memories; no message carries them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, public
from fedsynth.core.method import Memory, Presets
from fedsynth.evaluation.generated import GENERATOR, GeneratorFacts, describe, generator_tally
from fedsynth.evaluation.generated import average as average_facts
from fedsynth.methods.shared.aggregation import AveragingState, average, update_cache
from fedsynth.methods.shared.client_training import LocalObjective, plain_upload
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.methods.shared.robust import counted_uploads
from fedsynth.mixed_precision import mixed, widened
from fedsynth.privacy.disclosure import Disclosure, released
from fedsynth.privacy.requests import check_named
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.distillation.generator import descend, make_generator
from fedsynth.synthesizer.distillation.losses import distillation_loss, generator_loss
from fedsynth.training.loop import load_tensors, named_tensors
from fedsynth.validation import check_embedding, in_range, one_of

TALLY = "tally"
"""The memory's key for the tally of generated images, from the client's last training."""


@dataclass(frozen=True)
class TwoModels(ModelParameters):
    """Sent to clients: ACA, and OCA as the teacher (empty in FedKF⁻, whose teacher is ACA)."""

    teacher: Mapping[str, Tensor] = public("sent to clients, never uploaded")


@dataclass(frozen=True)
class FedKF(TrainsLocally):
    """Settings, with the paper's values; where it is silent, the reason.

    A run evaluates both final models, ACA and OCA; with `teacher` that makes the paper's four
    variants of two trainings. What is not named here is `TrainsLocally`'s: lr is 0.01 for LeNet-5,
    0.1 for ResNet-8; no momentum is named. `equal_steps` gives every client equally many steps, as
    the official code does; Algorithm 1 passes over the client's own data.

    Args:
        teacher: "oca", or "aca" (FedKF⁻: half the downlink).
        distillation: γ.
        one_hot_weight: λ1, of a loss scaled as in the official code
            (`synthesizer/distillation/losses.py`).
        activation_weight: λ2, scaled the same way; features are the classifier's inputs (that
            code's LeNet-5 has them one layer earlier).
        use_kl: the generator also seeks images on which the local model differs from the teacher:
            its loss less γ·KL. Not in the paper; the official code does so on CIFAR, not on EMNIST.
        generator_lr: Adam's.
        generator_batch: images of a step; the paper names none: the local batch.
        latent: length of the generator's noise, DAFL's.
        generator_width: channels of its widest layer over two, DAFL's.
        plain_rounds: rounds of plain cross-entropy at first, as the teacher is then w⁰, untrained;
            the official code has one.

    >>> from fedsynth import resolve, simulate
    >>> run = {"method": "fedkf", "rounds": 2, "participation": 0.4}
    >>> result = simulate(resolve({"run": run, "method": {"local_epochs": 1}}))
    >>> sorted(result.metrics[-1]["models"])  # of the active clients, and of all seen so far
    ['aca', 'oca']
    """

    name: ClassVar[str] = "fedkf"
    summary: ClassVar[str] = (
        "clients distil the average of all cached models into theirs, on images of a local "
        "generator"
    )
    reference: ClassVar[str] = "Zhou et al. 2023, FedKF, arXiv 2207.10447"
    features_refusal: ClassVar[str] = (
        "its clients distil on images of a generator: use fedgkd, which distils on the clients' "
        "data"
    )
    presets: ClassVar[Presets] = {
        "digits": {"lr": 0.2, "generator_width": 8, "generator_batch": 32}
    }

    downlink: ClassVar[type[Message]] = TwoModels
    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {
        **TrainsLocally.metric_privacy,
        GENERATOR: released("made from the server's message and public noise", GeneratorFacts),
    }

    batch: int = 64
    momentum: float = 0.0
    final: str = "oca"
    teacher: str = one_of("oca", "aca")
    distillation: float = in_range(1.0, 0)
    one_hot_weight: float = in_range(0.1, 0)
    activation_weight: float = in_range(0.1, 0)
    use_kl: bool = False
    generator_lr: float = in_range(1e-3, 0)
    generator_batch: int = in_range(64, 2)
    latent: int = in_range(100, 1)
    generator_width: int = in_range(64, 1)
    plain_rounds: int = in_range(1, 0)

    def check_model(self, model: nn.Module) -> None:
        check_embedding(self.name, model)

    def keeps_cache(self) -> bool:
        return True

    def check_request(self, message: TwoModels, context: RoundContext) -> None:
        check_named("teacher", message.teacher, context.architecture.state_dict())

    def server_step(
        self, state: AveragingState, uploads: Mapping[int, ModelParameters], context: RoundContext
    ) -> AveragingState:
        """T1: ACA, over the active clients, and OCA, over every client's last model."""
        active = counted_uploads(uploads, state.parameters, context)
        if not active:
            return state
        aca = replace(state, parameters=average(active))  # w^t
        return update_cache(aca, state, uploads, context, all_slots=self.oca == "all")  # ŵ_k, ŵ^t

    def broadcast(self, state: AveragingState, context: RoundContext) -> Message:
        teacher = state.overall if self.teacher == "oca" else {}
        return TwoModels(state.parameters, 1.0, teacher)

    def task(
        self, client: int, message: TwoModels, memory: Memory, context: RoundContext
    ) -> LocalObjective:
        """T2, Algorithm 1's ClientUpdate: SGD on L_CE, with these additions to each step."""
        if context.round <= self.plain_rounds or self.distillation == 0:
            return LocalObjective(
                make_upload=lambda w_k, trained: (plain_upload(w_k, trained)[0], memory)
            )
        fusion = KnowledgeFusion(self, client, message, memory, context)
        return LocalObjective(
            before_step=fusion.train_generator,  # θ_k ← θ_k − β·∇L_G (Eq. 5)
            penalty=lambda w_k: self.distillation * fusion.loss(w_k),  # γ·L_KL (Eqs. 6 and 8)
            state=fusion.state,
            make_upload=lambda w_k, trained: (plain_upload(w_k, trained)[0], fusion.memory()),
        )

    def client_metrics(self, memory: Memory, context: RoundContext) -> Mapping[str, Any]:
        """Returns the facts of the client's generator, if it has one."""
        if TALLY not in memory:
            return {}
        return {GENERATOR: describe(memory[TALLY])}

    def aggregate_metrics(self, facts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Averages the facts over the round's clients that have a generator."""
        generators = [client_facts[GENERATOR] for client_facts in facts if client_facts]
        if not generators:
            return {}
        return {GENERATOR: average_facts(generators)}


class KnowledgeFusion:
    """The teacher ŵ at one client, its generator g(θ_k; ·), and the last generated images.

    Attributes:
        state: all that training the generator changes (`fedsynth.training.loop`).
    """

    def __init__(
        self, method: FedKF, client: int, message: TwoModels, memory: Memory, context: RoundContext
    ) -> None:
        seed, device = context.seed, context.device
        self._method = method
        self._precision = context.precision
        self._teacher: Any = context.load(message.teacher or message.parameters)
        self._teacher.requires_grad_(False).eval()
        # the same initial θ for all clients, as in Algorithm 1
        generator = make_generator(
            context.spec, seed, latent=method.latent, width=method.generator_width
        )
        self._generator = generator.to(device).train()
        self._adam = torch.optim.Adam(self._generator.parameters(), method.generator_lr)
        self._draws = torch_generator(
            seed, "distillation noise", context.round, client, device=device
        )
        self._learner = {"generator": self._generator, "adam": self._adam}
        self.state = {**self._learner, "draws": self._draws}
        if memory:
            load_tensors(self._learner, memory)

    def train_generator(self, w_k: nn.Module) -> None:
        """Takes one step of the generator down L_G (Eqs. 2 to 5), and generates images from the
        same noise z.

        Args:
            w_k: the client's model, which `use_kl` sends the generator against; not changed.
        """
        method = self._method
        z = torch.randn(
            method.generator_batch, method.latent, generator=self._draws, device=self._draws.device
        )
        with mixed(z.device, self._precision):
            x = self._generator.normalised(z)
            features = self._teacher.embed(x)
            logits = widened(self._teacher.classifier(features))
        loss = generator_loss(
            widened(features), logits, method.one_hot_weight, method.activation_weight
        )
        if method.use_kl:
            kl = distillation_loss(logits.detach(), self._logits(w_k, x))
            loss = loss - method.distillation * kl
        descend(loss, self._adam)
        with torch.no_grad():
            with mixed(z.device, self._precision):
                self._images = widened(self._generator.normalised(z))
            self._teacher_logits = self._logits(self._teacher, self._images)

    def loss(self, w_k: nn.Module) -> Tensor:
        """Returns L_KL = KL(ŵ(x) ‖ w_k(x)) on the last generated images x (Eq. 6)."""
        return distillation_loss(self._teacher_logits, self._logits(w_k, self._images))

    def memory(self) -> Memory:
        """Returns the generator, its Adam, and the tally of its images."""
        tally = generator_tally(self._teacher, self._generator)
        return {**named_tensors(self._learner), TALLY: tally}

    def _logits(self, model: nn.Module, x: Tensor) -> Tensor:
        with mixed(x.device, self._precision):
            return widened(model(x))
