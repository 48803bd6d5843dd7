"""FedGen: a generator of embeddings, learned by the server from clients' classifiers, regularises
local training (Zhu et al. 2021, 2105.10056).

Server: with the uploaded models it trains G(y, ε) -> embedding on Σ_k w_{k,y}·CE(classifier_k(G(y,
ε)), y) + η·diversity, w_{k,y} client k's share of the round's examples of class y (Eq. 4 there, in
the form of its public code), and sends G with the averaged model. Client:

    CE on its batch  +  α·CE(classifier(G(y', ε)), y')
                     +  β·KL(softmax classifier(G(y, ε)) ‖ p(x)),

where y' is drawn uniformly from the classes that any client has had, and (x, y) are its own
examples; the target is constant. α and β decay by 0.98 each round. The terms start in round 2, when
G exists.

For the last term the noise is a fixed pool for each class and round, and the target is averaged
over it: this gives the gradient of the expectation over ε, and a target that depends only on y. It
matters with differential privacy: if the noise depended on an example's position in the batch, one
more example could change the gradients of others. The middle term sees no data. Label counts are
private: with DP all clients have equal weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.core.client import ClientGroup, ExactClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, public
from fedsynth.core.method import Memory
from fedsynth.core.state import ServerState
from fedsynth.core.uploads import Array, Rule, most_examples
from fedsynth.errors import UploadRejectedError
from fedsynth.evaluation.generated import GENERATOR, GeneratorFacts, describe, tally
from fedsynth.methods.shared.aggregation import AveragingState, average
from fedsynth.methods.shared.client_training import LocalObjective
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.models.on_features import check_learned_embedding
from fedsynth.privacy.disclosure import Disclosure, released
from fedsynth.privacy.requests import check_named, check_tensor
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.distillation.generator import LatentGenerator, make_latent_generator
from fedsynth.synthesizer.distillation.losses import diversity_loss
from fedsynth.training.loop import load_tensors, named_tensors
from fedsynth.validation import check_embedding, check_ranges

DECAY = 0.98
POOL = 16  # noise vectors per class
ASKED = 32  # embeddings per class for a round's facts


@dataclass(frozen=True)
class GeneratorDown(ModelParameters):
    """Sent to clients: w_t, the generator (empty in round 1), and which classes any client has had
    [C] (bool)."""

    generator: Mapping[str, Tensor] = public("sent to clients, never uploaded")
    known: Tensor = public("sent to clients, never uploaded")


@dataclass(frozen=True)
class ModelAndCounts(ModelParameters):
    """The upload: the model, and the client's class counts [C]."""

    counts: Tensor = public("with DP on: ones; with DP off: the numbers of examples of each class")


def ensemble_loss(
    made_ND: Tensor, labels_N: Tensor, weights_KCD: Tensor, biases_KC: Tensor, shares_CK: Tensor
) -> Tensor:
    """Returns Σ_k mean_n share[y_n, k]·CE(W_k G_n + b_k, y_n): the classification loss of the
    embeddings, in which each client's classifier is weighted by its share of the class."""
    logits = torch.einsum("nd,kcd->nkc", made_ND, weights_KCD) + biases_KC
    n, k, c = logits.shape
    each = F.cross_entropy(
        logits.reshape(n * k, c), labels_N.repeat_interleave(k), reduction="none"
    ).view(n, k)
    return (shares_CK[labels_N] * each).sum(dim=1).mean()


@dataclass(frozen=True)
class GeneratorState(AveragingState):
    """The state, with the generator in training.

    Args:
        learner: the generator and its Adam (`named_tensors`); {}: not trained yet.
        known: which classes any client has had, bool [C]; None: not known yet.
    """

    learner: Mapping[str, Tensor] = field(default_factory=dict)
    known: Tensor | None = None


@dataclass(frozen=True)
class FedGen(TrainsLocally):
    """Settings: see `TrainsLocally`, and

    Args:
        alpha: α, 10 in the public code.
        beta: β, 10 on MNIST and 1 on EMNIST there. With α = 0, β = 0 is FedAvg, weighted by n_k.
        diversity: η.
        generator_steps: of Adam on the server, in each round.
        generator_batch: embeddings of a step.
        generator_lr: Adam's.
        generator_decay: Adam's weight decay.
        noise: length of the generator's noise.
        hidden: width of its hidden layer.

    >>> from fedsynth import FedGen, ModelSettings, RunSettings, simulate
    >>> method = FedGen(alpha=1.0, beta=1.0, local_epochs=2, batch=32, lr=0.1, generator_steps=10)
    >>> result = simulate(RunSettings(method, rounds=2, model=ModelSettings(width=16, depth=2)))
    >>> result.accuracy > 0.5
    True
    """

    name: ClassVar[str] = "fedgen"
    summary: ClassVar[str] = (
        "a generator of embeddings, learned from the clients' classifiers, regularises local "
        "training"
    )
    reference: ClassVar[str] = "Zhu, Hong and Zhou 2021, FedGen, arXiv 2105.10056"
    downlink: ClassVar[type[Message]] = GeneratorDown
    upload: ClassVar[type[Message]] = ModelAndCounts
    state: ClassVar[type[ServerState]] = GeneratorState
    robust_refusal: ClassVar[str] = (
        "its server also trains a generator on the classifier of each client"
    )
    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {
        **TrainsLocally.metric_privacy,
        GENERATOR: released("the server makes the generator from uploaded models", GeneratorFacts),
    }

    alpha: float = 10.0
    beta: float = 10.0
    diversity: float = 1.0
    generator_steps: int = 50
    generator_batch: int = 32
    generator_lr: float = 3e-4
    generator_decay: float = 1e-2
    noise: int = 32
    hidden: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(
            self,
            alpha=(0, inf),
            beta=(0, inf),
            diversity=(0, inf),
            generator_steps=(1, inf),
            generator_batch=(2, inf),
        )
        check_ranges(
            self, generator_lr=(0, inf), generator_decay=(0, inf), noise=(1, inf), hidden=(1, inf)
        )

    def check_model(self, model: nn.Module) -> None:
        check_embedding(self.name, model)
        check_learned_embedding(self.name, model)

    def check_request(self, message: GeneratorDown, context: RoundContext) -> None:
        check_tensor("known", message.known, (context.spec.classes,), torch.bool)
        expected = self._generator(context)
        check_named("generator", message.generator, named_tensors({"generator": expected}))

    def upload_rules(self, phase: str, client: int, context: RoundContext) -> dict[str, Rule]:
        least = 0.0 if context.privacy is None else 1.0
        most = most_examples(client, context)
        counts = Array((context.spec.classes,), least=least, most=most)
        return {**super().upload_rules(phase, client, context), "counts": counts}

    def check_upload(
        self, phase: str, upload: ModelAndCounts, client: int, context: RoundContext
    ) -> None:
        total = float(upload.counts.double().sum())
        most = most_examples(client, context)
        if context.privacy is None and total > most:
            raise UploadRejectedError(
                "counts", f"add up to {total:g}, but the client has at most {most:g} examples"
            )
        if upload.weight > 0 and total == 0:
            raise UploadRejectedError("counts", f"are zero, but weight is {upload.weight:g}")

    def broadcast(self, state: GeneratorState, context: RoundContext) -> Message:
        learner = state.learner.items()
        generator = {name: value for name, value in learner if name.startswith("generator.")}
        known = state.known
        if known is None:
            known = torch.zeros(context.spec.classes, dtype=torch.bool, device=context.device)
        return GeneratorDown(state.parameters, 1.0, generator, known)

    def task(
        self, client: int, message: GeneratorDown, memory: Memory, context: RoundContext
    ) -> LocalObjective:
        if not message.generator or not bool(message.known.any()):
            return LocalObjective()
        generator = self._generator(context).requires_grad_(False)
        device = context.device
        load_tensors({"generator": generator}, message.generator)
        generator.eval()
        faded = DECAY ** (context.round - 1)
        classes = context.spec.classes
        labels = torch.arange(classes, device=device).repeat_interleave(POOL)
        fixed = torch_generator(context.seed, "fedgen pool", context.round, client, device=device)
        pool = generator(
            labels, torch.randn(len(labels), self.noise, generator=fixed, device=device)
        )
        draws = torch_generator(
            context.seed, "fedgen embeddings", context.round, client, device=device
        )
        there = message.known.to(torch.float32)

        def penalty(network: nn.Module) -> Tensor:
            y = torch.multinomial(there, self.generator_batch, replacement=True, generator=draws)
            made = generator(y, torch.randn(len(y), self.noise, generator=draws, device=device))
            logits = network.classifier(made)  # type: ignore[operator]
            return self.alpha * faded * F.cross_entropy(logits, y)

        def loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            logits = network(x)
            last: Any = network.classifier
            target = F.linear(pool, last.weight.detach(), last.bias.detach()).softmax(dim=1)
            target = target.view(classes, POOL, classes).mean(dim=1)[y]
            apart = F.kl_div(logits.log_softmax(dim=1), target, reduction="none").sum(dim=1)
            known = message.known[y]  # the generator knows nothing of a class that no client had
            return F.cross_entropy(logits, y, reduction="none") + self.beta * faded * torch.where(
                known, apart, 0.0
            )

        return LocalObjective(
            penalty=penalty if self.alpha else None,
            loss=loss if self.beta else None,
            state={"draws": draws} if self.alpha else {},
        )

    def complete(
        self,
        upload: ModelParameters,
        clients: ClientGroup,
        position: int,
        message: GeneratorDown,
        context: RoundContext,
    ) -> Message:
        counts = torch.ones(context.spec.classes, device=context.device)
        if isinstance(clients, ExactClientView):
            labels = clients.labels(clients.examples(position))
            counts = torch.bincount(labels, minlength=context.spec.classes).to(counts.dtype)
        return ModelAndCounts(upload.parameters, upload.weight, counts)

    def combine(
        self,
        state: GeneratorState,
        uploads: Mapping[int, ModelAndCounts],
        context: RoundContext,
    ) -> GeneratorState:
        learner, known = self._train_generator(state, list(uploads.values()), context)
        return replace(state, parameters=average(uploads), learner=learner, known=known)

    def facts(self, state: GeneratorState, context: RoundContext) -> Mapping[str, Any]:
        """Returns how the new model classifies embeddings of the generator sent to clients.

        Each class that any client has had gets the same number of embeddings. Post-processing: the
        generator comes from the uploaded models.
        """
        facts = super().facts(state, context)
        if not state.learner or state.known is None:
            return facts
        generator = self._generator(context)
        device = context.device
        load_tensors({"generator": generator}, state.learner)
        asked = state.known.nonzero()[:, 0].repeat_interleave(ASKED)
        draws = torch_generator(0, "tally of generated embeddings", device=device)
        with torch.no_grad():
            noise = torch.randn(len(asked), self.noise, generator=draws, device=device)
            made = generator.eval()(asked, noise)
            scores = context.load(state.parameters).classifier(made)  # type: ignore[operator]
        return {**facts, GENERATOR: describe(tally(scores, asked))} if len(asked) else facts

    def _generator(self, context: RoundContext) -> LatentGenerator:
        last: Any = context.architecture.classifier
        made = make_latent_generator(
            context.spec.classes,
            last.in_features,
            context.seed,
            noise=self.noise,
            hidden=self.hidden,
        )
        return made.to(context.device)

    def _train_generator(
        self, state: GeneratorState, sent: Sequence[ModelAndCounts], context: RoundContext
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Returns the generator and its Adam after this round, and which classes any client has had
        so far."""
        generator = self._generator(context).train()
        device = context.device
        rate = self.generator_lr * DECAY ** (context.round - 1)
        adam = torch.optim.Adam(generator.parameters(), rate, weight_decay=self.generator_decay)
        if state.learner:
            load_tensors({"generator": generator, "adam": adam}, state.learner)
        models = [context.load(u.parameters).classifier for u in sent]
        weights, biases = (
            torch.stack([getattr(m, name).detach() for m in models]) for name in ("weight", "bias")
        )
        counts = torch.stack([u.counts for u in sent], dim=1)
        shares = counts / counts.sum(dim=1, keepdim=True).clamp_min(1)
        here = counts.sum(dim=1) > 0
        draws = torch_generator(context.seed, "fedgen training", context.round, device=device)
        state_of_loop = {"generator": generator, "adam": adam, "draws": draws}
        for _ in context.server_loop("generator", self.generator_steps, state_of_loop):
            y = torch.multinomial(
                here.to(torch.float32), self.generator_batch, replacement=True, generator=draws
            )
            noise = torch.randn(len(y), self.noise, generator=draws, device=device)
            adam.zero_grad()
            made = generator(y, noise)
            total = ensemble_loss(
                made, y, weights, biases, shares
            ) + self.diversity * diversity_loss(noise, made)
            total.backward()
            adam.step()
        known = here if state.known is None else here | state.known
        return named_tensors({"generator": generator, "adam": adam}), known
