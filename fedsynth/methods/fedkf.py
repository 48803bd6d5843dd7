"""FedKF: clients train on their own data, and distil the average of all clients' models on
generated images (Zhou et al. 2023, arXiv 2207.10447).

On the server (T1, active-inactive model aggregation), a cache holds the last model ŵ_k of each
client. ACA (active clients aggregated), the model w, is the average over the active clients of the
round. OCA (overall clients aggregated), the model ŵ, is the average over the cache. By default it
includes only the clients that have taken part, as in the official code. With `oca="all"`, it
includes w⁰ for the other clients, as in Algorithm 1. Both averages are weighted by n_k. Active
clients receive both models: they start from w, and ŵ is the teacher.

On a client (T2, global-local knowledge fusion), each local batch takes two steps. The first step
updates the client's generator g(θ_k; ·) down the gradient of L_G (Eq. 5). The second step updates
the client's model w_k down the gradient of L_CE + γ·L_KL (Eq. 8). L_CE is computed on the batch
(Eq. 7), and L_KL on generated images (Eq. 6). The generator and its optimiser's state are kept in
the client's state between rounds.

With differential privacy, the model is trained by DP-SGD, and all clients have equal weight instead
of n_k. The teacher and the generator are computed only from the server's messages, from public
noise and, with `use_kl`, from the released steps of DP-SGD. The distillation term is therefore
post-processing.

In a simulation, a round's metrics include measures of the clients' generators
(`fedsynth.evaluation.generated`), averaged over the clients. They show how the teacher classifies
generated images. They are computed from the teacher, the generator and public noise, so they too
are post-processing. No message contains them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, Tensors, public
from fedsynth.core.method import ClientState, Presets
from fedsynth.core.uploads import check_named
from fedsynth.evaluation import GENERATOR, GeneratorFacts
from fedsynth.evaluation.generated import average as average_facts
from fedsynth.evaluation.generated import describe, generator_tally
from fedsynth.methods.shared.aggregation import AveragingState
from fedsynth.methods.shared.local import LocalObjective, TrainsLocally, plain_upload
from fedsynth.mixed_precision import computed, mixed, widened
from fedsynth.models.layers import check_embedding
from fedsynth.privacy.disclosure import Disclosure, released
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.distillation.generator import descend, make_generator
from fedsynth.synthesizer.distillation.losses import distillation_loss, generator_loss
from fedsynth.training.loop import load_tensors, named_tensors
from fedsynth.validation import in_range, one_of

# The key, in a client's state, of the class counts of images that its generator made after its
# last training.
TALLY = "tally"


@dataclass(frozen=True)
class TwoModels(ModelParameters):
    """FedKF's request to the clients: the model to start from, and the teacher model.

    The first (ACA) averages the active clients' models. The teacher (OCA) averages the latest model
    of each client that has trained so far. In FedKF⁻, ACA is also the teacher, and the field
    `teacher` is empty.
    """

    teacher: Tensors = public("sent to clients, never uploaded")


@dataclass(frozen=True)
class FedKF(TrainsLocally):
    """FedKF: clients also distil the average of all clients' latest models on generated images.

    The defaults are the paper's, unless stated otherwise below. `TrainsLocally` documents the
    remaining settings. The paper uses lr=0.01 for LeNet-5, which is the default, and lr=0.1 for
    ResNet-8. It names no momentum. By default, each client passes over its own data, as in
    Algorithm 1. With `equal_steps`, all clients take the same number of steps, as in the official
    code.

    A run evaluates both final models, ACA and OCA. Two runs, one for each value of `teacher`,
    therefore give the four variants of the paper.

    Args:
        teacher: the model distilled on the clients. "oca" is OCA. "aca" is ACA, which is FedKF⁻ and
            halves the size of the server's request.
        distillation: γ, the weight of L_KL in the loss of the client's model.
        one_hot_weight: λ1, the weight of the one-hot loss L_OH (Eq. 2) of the generator. L_IE
            (Eq. 3) has weight 1 and is divided by log C, as in the official code.
        activation_weight: λ2, the weight of the activation loss L_A (Eq. 4) of the generator. L_A
            is a mean over images and features in place of the norm ‖·‖₁, as in the official code.
            The features are the classifier's inputs, whereas the official LeNet-5 takes them one
            layer earlier.
        use_kl: whether γ·KL(teacher ‖ local model) is subtracted from L_G, so that the generator
            seeks images on which the two models differ. The paper does not mention it. The official
            code does so on CIFAR, but not on EMNIST.
        generator_lr: β, the learning rate of Adam for the generator.
        generator_batch: number of generated images in a step. The paper gives none, and the default
            is the local batch size.
        latent: dimension of the generator's noise. The default is DAFL's.
        generator_width: half the number of channels in the generator's widest layer. The default is
            DAFL's.
        plain_rounds: number of rounds at the start that train on the cross-entropy only, because
            the teacher is still the untrained w⁰. The official code has one such round, and
            Algorithm 1 has none.

    >>> from fedsynth import resolve, simulate
    >>> run = {"method": "fedkf", "rounds": 2, "participation": 0.4}
    >>> result = simulate(resolve({"run": run, "method": {"local_epochs": 1}}))
    >>> sorted(result.metrics[-1]["models"])  # of the active clients, and of all seen so far
    ['aca', 'oca']
    """

    name = "fedkf"
    summary = "clients distil the average of all models into theirs, on images of a local generator"
    reference = "Zhou et al. 2023, FedKF, arXiv 2207.10447"
    masks_refusal = "clients distil on images that are generated for classes"
    features_refusal = "clients distil on generated images. Use fedgkd, which distils on the data"
    presets: ClassVar[Presets] = {
        "digits": {"lr": 0.2, "generator_width": 8, "generator_batch": 32}
    }

    request = TwoModels
    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {
        **TrainsLocally.metric_privacy,
        GENERATOR: released("made from messages, public noise and released steps", GeneratorFacts),
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
        """Returns True, because FedKF averages the latest models of all clients.

        `TrainsLocally.server_step` averages the active clients' models, and then the last models
        ŵ_k of all clients (`update_cache`; technique T1, Steps 0 and 5).
        """
        return True

    def check_request(self, message: TwoModels, context: RoundContext) -> None:
        check_named("teacher", message.teacher, context.architecture.state_dict())

    def broadcast(self, state: AveragingState, context: RoundContext) -> Message:
        teacher = state.overall if self.teacher == "oca" else {}
        return TwoModels(state.parameters, 1.0, teacher)

    def task(
        self, client: int, message: TwoModels, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        """Adds a distillation loss on generated images to a client's local training.

        The loss is γ·L_KL, and the generator is trained too. This is technique T2 (Step 3),
        Algorithm 1's ClientUpdate.
        """
        if context.round <= self.plain_rounds or self.distillation == 0:
            return LocalObjective(
                make_upload=lambda w_k, trained: (plain_upload(w_k, trained)[0], state)
            )
        fusion = KnowledgeFusion(self, client, message, state, context)
        return LocalObjective(
            before_step=fusion.train_generator,  # θ_k ← θ_k − β·∇L_G (Eq. 5)
            penalty=lambda w_k: self.distillation * fusion.loss(w_k),  # γ·L_KL (Eqs. 6 and 8)
            state=fusion.state,
            make_upload=lambda w_k, trained: (plain_upload(w_k, trained)[0], fusion.client_state()),
        )

    def client_metrics(self, states: Iterable[ClientState]) -> Mapping[str, Any]:
        """Averages quality measures of generated images over the clients that have a generator."""
        generators = [describe(state[TALLY]) for state in states if TALLY in state]
        return {GENERATOR: average_facts(generators)} if generators else {}


class KnowledgeFusion:
    """Trains one client's generator and computes the distillation loss on the generated images.

    The object holds the teacher ŵ, the generator g(θ_k; ·) and the latest generated images.

    Attributes:
        state: the objects that training the generator changes, as needed by
            `fedsynth.training.loop`.
    """

    def __init__(
        self,
        method: FedKF,
        client: int,
        message: TwoModels,
        state: ClientState,
        context: RoundContext,
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
        if state:
            load_tensors(self._learner, state)

    def train_generator(self, w_k: nn.Module) -> None:
        """Updates the generator by one step of Adam on L_G (Eqs. 2 to 5), and then generates images
        from the same noise z.

        The images for L_KL come from the updated generator, as in the order of Algorithm 1. The
        costs in the paper's Table IX count only one pass of the generator and the teacher.

        Args:
            w_k: the client's model. Its weights are not changed. With `use_kl`, the generator is
                also trained to produce images on which this model differs from the teacher, and
                these images enter the running statistics of the model's batch norm, as those of
                L_KL do.
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
            kl = distillation_loss(logits.detach(), computed(w_k, x, self._precision))
            loss = loss - method.distillation * kl
        descend(loss, self._adam)
        with torch.no_grad():
            self._images = computed(self._generator.normalised, z, self._precision)
            self._teacher_logits = computed(self._teacher, self._images, self._precision)

    def loss(self, w_k: nn.Module) -> Tensor:
        """Computes L_KL = KL(ŵ(x) ‖ w_k(x)) on the latest generated images x (Eq. 6)."""
        logits = computed(w_k, self._images, self._precision)
        return distillation_loss(self._teacher_logits, logits)

    def client_state(self) -> ClientState:
        """Returns what the client stores: the generator, the generator's optimiser state, and a
        tally of the generated images."""
        tally = generator_tally(self._teacher, self._generator)
        return {**named_tensors(self._learner), TALLY: tally}
