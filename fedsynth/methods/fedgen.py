"""FedGen: a generator of embeddings regularises local training (Zhu et al. 2021, arXiv 2105.10056).

The server trains a generator G(y, ε), which maps a label y and noise ε to an embedding, on the
classifiers of the uploaded models. The loss is Σ_k w_{k,y}·CE(classifier_k(G(y, ε)), y) +
η·diversity (Eq. 4, as in the public code). w_{k,y} is client k's share of class y's examples in the
round. The server sends G together with the averaged model. Each client minimises

    CE on its batch  +  α·CE(classifier(G(y', ε)), y')
                     +  β·KL(softmax classifier(G(y, ε)) ‖ p(x)),

where y' is drawn uniformly from the classes seen at any client, and (x, y) are the client's own
examples. The KL term's target is a constant without gradient. α and β decay by a factor of 0.98 in
each round. The last two terms start in round 2, when G exists.

The KL term uses a fixed noise pool for each class and round, and averages the target over the pool.
The target therefore depends only on y. With differential privacy, noise by position in the batch
would let one additional example change the gradients of others. The middle term does not use the
client's data. Class counts are private, so with differential privacy all clients have equal weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.core.client import ExactClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, Tensors, public
from fedsynth.core.method import ClientState
from fedsynth.core.uploads import Array, Rule, check_named, check_tensor, most_examples
from fedsynth.errors import UploadRejectedError
from fedsynth.evaluation import GENERATOR, GeneratorFacts
from fedsynth.evaluation.generated import describe, tally
from fedsynth.methods.shared.aggregation import AveragingState, average
from fedsynth.methods.shared.local import LocalObjective, Trained, TrainsLocally
from fedsynth.models.on_features import check_learned_embedding
from fedsynth.privacy.disclosure import Disclosure, released
from fedsynth.seeding import forked_rng, torch_generator
from fedsynth.synthesizer.distillation.generator import LatentGenerator
from fedsynth.synthesizer.distillation.losses import diversity_loss
from fedsynth.training.loop import load_tensors, named_tensors
from fedsynth.validation import in_range

DECAY = 0.98
POOL = 16  # noise vectors per class
TALLIED = 32  # embeddings per class for a round's facts


@dataclass(frozen=True)
class GeneratorDown(ModelParameters):
    """FedGen's request to the clients: the model w_t and the generator.

    A boolean mask [C] marks the classes seen at any client so far. The generator is empty in round
    1.
    """

    generator: Tensors = public("sent to clients, never uploaded")
    seen_classes: Tensor = public("sent to clients, never uploaded")


@dataclass(frozen=True)
class ModelAndCounts(ModelParameters):
    """A client's upload in FedGen: the model and the class counts [C]."""

    counts: Tensor = public("all 1 with differential privacy, and the classes' sizes without it")


def ensemble_loss(
    h_ND: Tensor, labels_N: Tensor, weights_KCD: Tensor, biases_KC: Tensor, shares_CK: Tensor
) -> Tensor:
    """Computes the clients' classification loss on generated embeddings.

    The loss is Σ_k mean_n share[y_n, k]·CE(W_k G_n + b_k, y_n). Each client's classifier is
    weighted by the client's share of the class's examples.
    """
    logits = torch.einsum("nd,kcd->nkc", h_ND, weights_KCD) + biases_KC
    n, k, c = logits.shape
    labels = labels_N.repeat_interleave(k)
    losses = F.cross_entropy(logits.reshape(n * k, c), labels, reduction="none").view(n, k)
    return (shares_CK[labels_N] * losses).sum(dim=1).mean()


@dataclass(frozen=True)
class GeneratorState(AveragingState):
    """The server's state in FedGen, with the server's generator.

    Args:
        learner: the tensors of the generator and its Adam optimiser, as returned by
            `named_tensors`. The mapping is empty before the generator is trained.
        seen_classes: a boolean mask [C] of the classes seen at any client so far.
    """

    learner: Tensors = field(default_factory=dict)
    seen_classes: Tensor = field(kw_only=True)


@dataclass(frozen=True)
class FedGen(TrainsLocally):
    """FedGen: local training regularised by a generator of embeddings.

    The following settings come in addition to those of `TrainsLocally`.

    Args:
        alpha: α, the weight of the cross-entropy on generated embeddings. It is 10 in the public
            code, which multiplies it by the ratio of `generator_batch` to the batch of images.
        beta: β, the weight of the KL term. It is 10 on MNIST and 1 on EMNIST in the public code.
            With α = 0 and β = 0, the method is FedAvg, weighted by n_k.
        diversity: η, the weight of the generator's diversity loss.
        generator_steps: number of steps of Adam on the server in each round.
        generator_batch: number of embeddings in a step.
        generator_lr: learning rate of Adam for the generator.
        generator_decay: weight decay of Adam for the generator.
        noise: dimension of the generator's noise.
        hidden: width of the generator's hidden layer.

    >>> from fedsynth import FedGen, ModelSettings, RunSettings, simulate
    >>> method = FedGen(alpha=1.0, beta=1.0, local_epochs=2, batch=32, lr=0.1, generator_steps=10)
    >>> result = simulate(RunSettings(method, rounds=2, model=ModelSettings(width=16, depth=2)))
    >>> result.accuracy > 0.5
    True
    """

    name = "fedgen"
    summary = "local training with a generator of embeddings, learned from the clients' classifiers"
    reference = "Zhu, Hong and Zhou 2021, FedGen, arXiv 2105.10056"
    request = GeneratorDown
    upload = ModelAndCounts
    state = GeneratorState
    masks_refusal = "the generator makes features for a class"
    robust_refusal = "the generator learns from each classifier, which a robust rule replaces"
    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {
        **TrainsLocally.metric_privacy,
        GENERATOR: released("the server makes the generator from uploaded models", GeneratorFacts),
    }

    alpha: float = in_range(10.0, 0)
    beta: float = in_range(10.0, 0)
    diversity: float = in_range(1.0, 0)
    generator_steps: int = in_range(50, 1)
    generator_batch: int = in_range(32, 2)
    generator_lr: float = in_range(3e-4, 0)
    generator_decay: float = in_range(1e-2, 0)
    noise: int = in_range(32, 1)
    hidden: int = in_range(256, 1)

    def initial_state(self, parameters: Tensors) -> GeneratorState:
        seen = torch.zeros_like(parameters["classifier.weight"][:, 0], dtype=torch.bool)
        return GeneratorState(parameters, seen_classes=seen)

    def check_model(self, model: nn.Module) -> None:
        check_learned_embedding(self.name, model)

    def check_request(self, message: GeneratorDown, context: RoundContext) -> None:
        check_tensor("seen_classes", message.seen_classes, (context.spec.classes,), torch.bool)
        expected = self._generator(context)
        check_named("generator", message.generator, named_tensors({"generator": expected}))

    def upload_rules(self, exchange: str, client: int, context: RoundContext) -> dict[str, Rule]:
        lowest = float(context.privacy is not None)  # with differential privacy all are 1
        highest = most_examples(client, context)
        counts = Array((context.spec.classes,), low=lowest, high=highest)
        return {**super().upload_rules(exchange, client, context), "counts": counts}

    def check_upload(
        self, exchange: str, upload: ModelAndCounts, client: int, context: RoundContext
    ) -> None:
        total = float(upload.counts.double().sum())
        size = most_examples(client, context)
        if context.privacy is None and total > size:
            reason = f"must sum to at most {size:g}, the client's number of examples, got {total:g}"
            raise UploadRejectedError("counts", reason)
        if upload.weight > 0 and total == 0:
            reason = (
                f"must not all be 0 in an upload with weight {upload.weight:g}. Send the counts"
            )
            raise UploadRejectedError("counts", reason)

    def broadcast(self, state: GeneratorState, context: RoundContext) -> Message:
        learner = state.learner.items()
        generator = {name: value for name, value in learner if name.startswith("generator.")}
        return GeneratorDown(state.parameters, 1.0, generator, state.seen_classes)

    def task(
        self, client: int, message: GeneratorDown, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        def with_counts(model: nn.Module, trained: Trained) -> tuple[Message, ClientState]:
            counts = torch.ones(context.spec.classes, device=context.device)
            if isinstance(trained.client, ExactClientView):
                labels = trained.client.labels(trained.client.examples(0))
                counts = torch.bincount(labels, minlength=context.spec.classes).to(counts.dtype)
            return ModelAndCounts(model.state_dict(), trained.weight, counts), {}

        if not message.generator or not bool(message.seen_classes.any()):
            return LocalObjective(make_upload=with_counts)
        generator = self._generator(context, message.generator).requires_grad_(False).eval()
        seed, number, device = context.seed, context.round, context.device
        decay = DECAY ** (number - 1)
        classes = context.spec.classes
        labels = torch.arange(classes, device=device).repeat_interleave(POOL)
        fixed = torch_generator(seed, "fedgen pool", number, client, device=device)
        pool = generator(labels, self._noise(labels, fixed))
        draws = torch_generator(seed, "fedgen embeddings", number, client, device=device)

        def penalty(network: nn.Module) -> Tensor:
            y = self._labels(message.seen_classes, draws)
            h = generator(y, self._noise(y, draws))
            logits = network.classifier(h)  # type: ignore[operator]
            return self.alpha * decay * F.cross_entropy(logits, y)

        def loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            logits = network(x)
            linear: Any = network.classifier
            target = F.linear(pool, linear.weight.detach(), linear.bias.detach()).softmax(dim=1)
            target = target.view(classes, POOL, classes).mean(dim=1)[y]
            kl = F.kl_div(logits.log_softmax(dim=1), target, reduction="none").sum(dim=1)
            # the generator is not trained on a class that no client had
            kl = torch.where(message.seen_classes[y], kl, 0.0)
            return F.cross_entropy(logits, y, reduction="none") + self.beta * decay * kl

        return LocalObjective(
            penalty=penalty, loss=loss, state={"draws": draws}, make_upload=with_counts
        )

    def combine(
        self, state: GeneratorState, uploads: Mapping[int, ModelAndCounts], context: RoundContext
    ) -> GeneratorState:
        learner, seen = self._train_generator(state, list(uploads.values()), context)
        return replace(state, parameters=average(uploads), learner=learner, seen_classes=seen)

    def facts(self, state: GeneratorState, context: RoundContext) -> Mapping[str, Any]:
        """Measures the new model's accuracy on the generator's embeddings.

        The same number of embeddings is generated for each class seen so far. Both networks come
        from the uploaded models, so the measures are post-processing.
        """
        facts = super().facts(state, context)
        if not bool(state.seen_classes.any()):
            return facts
        generator = self._generator(context, state.learner).eval()
        labels = state.seen_classes.nonzero()[:, 0].repeat_interleave(TALLIED)
        draws = torch_generator(0, "tally of generated embeddings", device=context.device)
        with torch.no_grad():
            h = generator(labels, self._noise(labels, draws))
            logits = context.load(state.parameters).classifier(h)  # type: ignore[operator]
        return {**facts, GENERATOR: describe(tally(logits, labels))}

    def _generator(self, context: RoundContext, learner: Tensors | None = None) -> LatentGenerator:
        """Returns a generator with the given tensors, or a newly initialised generator."""
        classifier: Any = context.architecture.classifier
        with forked_rng(context.seed, "latent generator initialisation"):
            generator = LatentGenerator(
                context.spec.classes, classifier.in_features, self.noise, self.hidden
            ).to(context.device)
        if learner:
            load_tensors({"generator": generator}, learner)
        return generator

    def _noise(self, labels_N: Tensor, generator: torch.Generator) -> Tensor:
        """Draws the noise ε from which the generator makes embeddings, [N, noise]."""
        return torch.randn(len(labels_N), self.noise, generator=generator, device=labels_N.device)

    def _labels(self, classes_C: Tensor, generator: torch.Generator) -> Tensor:
        """Draws a batch of random labels from the classes for which a mask is True."""
        weights = classes_C.to(torch.float32)
        return torch.multinomial(
            weights, self.generator_batch, replacement=True, generator=generator
        )

    def _train_generator(
        self, state: GeneratorState, sent: Sequence[ModelAndCounts], context: RoundContext
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Trains the generator with the models that the clients have uploaded in a round.

        Returns:
            The tensors of the generator and Adam, and a mask [C] of the classes seen so far.
        """
        generator = self._generator(context).train()
        rate = self.generator_lr * DECAY ** (context.round - 1)
        adam = torch.optim.Adam(generator.parameters(), rate, weight_decay=self.generator_decay)
        if state.learner:
            load_tensors({"generator": generator, "adam": adam}, state.learner)
        classifiers: list[Any] = [context.load(u.parameters).classifier for u in sent]
        weights = torch.stack([classifier.weight.detach() for classifier in classifiers])
        biases = torch.stack([classifier.bias.detach() for classifier in classifiers])
        counts = torch.stack([u.counts for u in sent], dim=1)
        shares = counts / counts.sum(dim=1, keepdim=True).clamp_min(1)
        present = counts.sum(dim=1) > 0
        seed, number = context.seed, context.round
        draws = torch_generator(seed, "fedgen training", number, device=context.device)
        loop_state = {"generator": generator, "adam": adam, "draws": draws}
        for _ in context.server_loop("generator", self.generator_steps, loop_state):
            y = self._labels(present, draws)
            noise = self._noise(y, draws)
            h = generator(y, noise)
            loss = ensemble_loss(h, y, weights, biases, shares)
            loss = loss + self.diversity * diversity_loss(noise, h)
            adam.zero_grad()
            loss.backward()
            adam.step()
        seen = present | state.seen_classes
        return named_tensors({"generator": generator, "adam": adam}), seen
