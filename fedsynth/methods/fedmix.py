"""FedMix: clients mix their images with mean images of all clients (Yoon et al. 2021, arXiv
2107.00233).

Each client sends mean images x̄ and mean one-hot labels ȳ, each over M of its examples. The clients
of a round send them before training if one of them has not sent any yet. They are the same in every
round. Every step of local training draws one pair (x̄, ȳ) from any client, and approximates the
loss of MixUp between clients. ℓ(x, y) is an image's cross-entropy.

    NaiveMix   (1 − λ)·ℓ(x', y) + λ·ℓ(x', ȳ)  with x' = (1 − λ)·x + λ·x̄
    FedMix     (1 − λ)·ℓ(x', y) + λ·ℓ(x', ȳ) + λ·⟨∇_x' (1 − λ)·ℓ(x', y), x̄⟩  with x' = (1 − λ)·x

FedMix is the first-order expansion of MixUp in x̄, without the term in λ². Each example has its own
gradient, and the losses are averaged over the batch. The public code in Flower's baselines takes
the gradient of the batch's mean loss and averages again, so its last term is divided by the batch
size once more.

The method cannot run with differential privacy. The mean images are sent without noise, and
FedMix's last term contains second derivatives, for which DP-SGD has no per-example gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.core.capabilities import TwoExchanges
from fedsynth.core.client import ExactClientView, Group, chunk
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, Tensors, public, unprotected
from fedsynth.core.method import ClientState, ClientStates, Results
from fedsynth.core.uploads import Array, Rule, check_tensor, most_examples
from fedsynth.errors import UploadRejectedError
from fedsynth.methods.shared.aggregation import AveragingState
from fedsynth.methods.shared.local import LocalObjective, TrainsLocally
from fedsynth.privacy.plans import FIRST
from fedsynth.seeding import torch_generator
from fedsynth.validation import in_range, one_of


@dataclass(frozen=True)
class MeansAsked(Message):
    """The empty message with which the server of FedMix asks for mean images."""


@dataclass(frozen=True)
class Means(Message):
    """A client's upload in FedMix's first exchange: mean images [m, C, H, W] and labels [m,
    classes].
    """

    images: Tensor = unprotected()
    labels: Tensor = unprotected()


@dataclass(frozen=True)
class MeansDown(ModelParameters):
    """FedMix's request to the clients: the model w_t, and the mean images and labels of all
    clients."""

    images: Tensor = public("sent to clients, never uploaded")
    labels: Tensor = public("sent to clients, never uploaded")


@dataclass(frozen=True)
class MeansState(AveragingState):
    """The server's state in FedMix, with the mean images and labels that each client has sent."""

    images: Tensors = field(default_factory=dict)
    labels: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class FedMix(TrainsLocally, TwoExchanges):
    """FedMix: local training on images mixed with mean images from all clients.

    The following settings come in addition to those of `TrainsLocally`.

    Args:
        ratio: λ, the share of the mean images. Flower's baselines use 0.05 on CIFAR-10, 0.1 on
            CIFAR-100, and 0.2 on FEMNIST. With 0, the method is FedAvg, weighted by n_k.
        mixing: "taylor" for FedMix, or "naive" for NaiveMix, which has a ratio of 0.1 on CIFAR-10.
        averaged: M, the number of examples in a mean. With 0, as in Flower's baselines, each client
            sends a single mean of all its examples. Otherwise it sends ⌊n_k/M⌋ means of at least M
            examples, or one mean if it has fewer than M.

    >>> from fedsynth import FedMix, ModelSettings, RunSettings, simulate
    >>> method, model = FedMix(local_epochs=2, batch=32, lr=0.1), ModelSettings("linear")
    >>> simulate(RunSettings(method, rounds=3, model=model)).accuracy > 0.7
    True
    """

    name = "fedmix"
    summary = "local training on images mixed with the mean images of all clients"
    reference = "Yoon et al. 2021, FedMix, arXiv 2107.00233"
    first_request = MeansAsked
    first_upload = Means
    request = MeansDown
    state = MeansState
    dp_mechanisms = ()
    refusal = "clients send mean images and labels, which no mechanism protects"
    robust_refusal = (
        "clients train on the mean images of others, which a robust rule does not limit"
    )
    features_refusal = "clients send and mix images"
    masks_refusal = "clients mix the labels of classes"

    ratio: float = in_range(0.05, 0, 1)
    mixing: str = one_of("taylor", "naive")
    averaged: int = in_range(0, 0)

    def first_broadcast(self, state: MeansState, context: RoundContext) -> Message | None:
        if all(str(client) in state.images for client in context.active):
            return None
        return MeansAsked()

    def first_step(
        self, message: MeansAsked, clients: Group, states: ClientStates, context: RoundContext
    ) -> Results:
        results: Results = []
        for client, state in zip(clients.split(), states, strict=True):
            results.append((self._means(client, context), state))
        return results

    def _means(self, client: ExactClientView, context: RoundContext) -> Means:
        """Splits a client's examples into random parts, and returns each part's mean."""
        examples, spec = client.examples(0), context.spec
        draws = torch_generator(context.seed, "mean images", client.ids[0])
        order = torch.randperm(len(examples), generator=draws).to(examples.device)
        images = torch.zeros(0, *spec.image_shape, device=examples.device)
        labels = torch.zeros(0, spec.classes, device=examples.device)
        for part in examples[order].tensor_split(self._most_means(len(examples))):
            if len(part):  # none without examples
                sums = [client.images(block).sum(dim=0) for block in part.split(chunk(part.device))]
                images = torch.cat([images, torch.stack(sums).sum(dim=0)[None] / len(part)])
                counts = client.labels(part).bincount(minlength=spec.classes)
                labels = torch.cat([labels, counts[None] / len(part)])
        return Means(images, labels)

    def _most_means(self, examples: float) -> int:
        return max(1, int(examples) // self.averaged) if self.averaged else 1

    def first_aggregate(
        self, state: MeansState, replies: Mapping[int, Means], context: RoundContext
    ) -> MeansState:
        images = {str(client): reply.images for client, reply in replies.items()}
        labels = {str(client): reply.labels for client, reply in replies.items()}
        return replace(state, images={**state.images, **images}, labels={**state.labels, **labels})

    def broadcast(self, state: MeansState, context: RoundContext) -> Message:
        images, labels = (torch.cat(list(sent.values())) for sent in (state.images, state.labels))
        return MeansDown(state.parameters, 1.0, images, labels)

    def task(
        self, client: int, message: MeansDown, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        if not len(message.images):
            return LocalObjective()
        share = self.ratio  # λ
        draws = torch_generator(context.seed, "drawn mean images", context.round, client)

        def loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            drawn = int(torch.randint(len(message.images), (), generator=draws))
            x_mean, y_mean = message.images[drawn], message.labels[drawn]
            mixed = (1 - share) * x
            if self.mixing == "naive":
                mixed = mixed + share * x_mean
            logits = network(mixed.requires_grad_())
            label_losses = (1 - share) * F.cross_entropy(logits, y, reduction="none")
            losses = label_losses + share * F.cross_entropy(
                logits, y_mean.expand_as(logits), reduction="none"
            )
            if self.mixing == "naive":
                return losses
            (gradient,) = torch.autograd.grad(label_losses.sum(), mixed, create_graph=True)
            return losses + share * (gradient * x_mean).flatten(1).sum(dim=1)

        return LocalObjective(loss=loss, state={"draws": draws})

    def check_request(self, message: Message, context: RoundContext) -> None:
        if isinstance(message, MeansDown):
            count, spec = len(message.images), context.spec
            check_tensor("images", message.images, (count, *spec.image_shape), torch.float32)
            check_tensor("labels", message.labels, (count, spec.classes), torch.float32)

    def upload_rules(self, exchange: str, client: int, context: RoundContext) -> dict[str, Rule]:
        rules = super().upload_rules(exchange, client, context)
        if exchange != FIRST:
            return rules
        spec, rows = context.spec, self._most_means(most_examples(client, context))
        images = Array((None, *spec.image_shape), rows=rows)
        labels = Array((None, spec.classes), low=0.0, high=1 + 1e-5, rows=rows, sums_to_one=True)
        return {**rules, "images": images, "labels": labels}

    def check_upload(
        self, exchange: str, upload: Message, client: int, context: RoundContext
    ) -> None:
        if isinstance(upload, Means) and len(upload.images) != len(upload.labels):
            expected, got = len(upload.images), len(upload.labels)
            raise UploadRejectedError(
                "labels", f"must have one row for each of the {expected} images, got {got}"
            )
