"""Class sums of vectors, and class counts.

Each example yields one vector. Without differential privacy, the sums and counts are exact. With
it, they are noisy, and the ledger records them. FedAF computes class-mean logits from them, and
FedFM computes anchors.

Private condensation uses class sums too. A mechanism consists of release plans and of a matching
loss that reads the releases. `residual` and `gradient` release noisy class sums at each of T steps.
`features` releases the noisy class sums under M networks and the class counts, once in a round
(`synthesizer.condensation.private_matchers`). `paper` is Algorithm 1 of FedDM as printed, which
gives no guarantee, and works with the exact data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.core.client import Group, PrivateClientView, chunk
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, released
from fedsynth.core.method import ClientState
from fedsynth.core.uploads import LARGEST, Array, Rule, most_examples
from fedsynth.errors import SettingError
from fedsynth.methods.shared.local import Trained
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.privacy.plans import ReleasePlan
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.synthesizer.condensation import matching, private_matchers

# The name of the class counts' release plan.
COUNTS = "class counts"

# The type of functions that map normalised images [N, C, H, W] to one vector per image [N, D].
# Each vector must depend only on its image. The function is called without gradients.
Vectors = Callable[[Tensor], Tensor]


def sums_plans(
    name: str,
    quantity: str,
    clipped: str,
    *,
    clip: float,
    width: int,
    classes: int,
    noise: float,
    exchange: str,
) -> tuple[ReleasePlan, ReleasePlan]:
    """Plans the private releases of class sums and class counts.

    Neither release subsamples the data.

    Args:
        name: the name of the sums' plan. The counts' plan is named `COUNTS`.
        quantity: a description of the summed quantity.
        clipped: a description of the clipped quantity.
        clip: L2 bound on one example's vector.
        width: D, the dimension of the vectors.
        classes: number of classes.
        noise: noise multiplier of the sums and the counts, divided by the run's σ.
        exchange: the exchange in which they are released.
    """
    sums = ReleasePlan(
        name=name,
        quantity=f"class sums of {quantity}",
        mechanism="sums",
        clipped=clipped,
        clip=clip,
        sample_rate=1.0,
        steps=1,
        dimension=classes * width,
        groups=classes,
        relative_noise_multiplier=noise,
        exchange=exchange,
    )
    return sums, counts_plan(sums, noise)


def counts_plan(sums: ReleasePlan, noise: float) -> ReleasePlan:
    """Returns the planned DP release of the class counts that accompany class sums.

    The counts are a single release, to which each example contributes 1.

    Args:
        sums: the plan of the class sums.
        noise: noise multiplier of the counts, divided by the run's σ.
    """
    return replace(
        sums,
        name=COUNTS,
        quantity="class counts",
        clipped="each example counts 1",
        clip=1.0,
        steps=1,
        dimension=sums.groups,
        relative_noise_multiplier=noise,
    )


def sums_rules(
    client: int,
    shape: tuple[int, ...],
    plan: str,
    context: RoundContext,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Rule]:
    """Returns the server's rules for an upload's fields `sums` and `counts`.

    With noise, counts may be negative, and both fields may be as large as the noise.

    Args:
        client: the index of the uploading client.
        shape: the shape of the sums.
        plan: the name of the sums' plan.
        context: the context of the round.
        dtype: the dtype of the sums and of noisy counts.
    """
    bound = LARGEST * max(1.0, context.noise.get(plan, 0.0), context.noise.get(COUNTS, 0.0))
    sums = Array(shape, dtype, low=-bound, high=bound)
    classes = (context.spec.classes,)
    if context.privacy is not None:
        return {"sums": sums, "counts": replace(sums, shape=classes)}
    largest = min(bound, most_examples(client, context))
    return {"sums": sums, "counts": Array(classes, low=0.0, high=largest)}


def class_counts(clients: Group) -> Tensor:
    """Counts each client's examples of each class, [K, C].

    With differential privacy, the counts are noisy.
    """
    classes = clients.spec.classes
    if isinstance(clients, PrivateClientView):
        noisy = clients.class_sums(clients.mechanisms(COUNTS), private_matchers.ones)
        return noisy.view(len(clients.ids), classes)
    counts = torch.zeros(len(clients.ids), classes, device=clients.data.labels.device)
    for k in range(len(clients.ids)):
        counts[k] = F.one_hot(clients.labels(clients.examples(k)), classes).sum(dim=0)
    return counts


def mechanisms_of(clients: Group, plan: str) -> Sequence[GaussianSumMechanism]:
    """Returns each client's mechanism for a plan, or () without differential privacy."""
    if isinstance(clients, PrivateClientView):
        return clients.mechanisms(plan)
    return ()


def class_sums(
    clients: Group,
    charged: Sequence[GaussianSumMechanism],
    rows: Callable[[Tensor, Tensor], Tensor],
    width: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Sums each client's rows by class, [K, C, D].

    Args:
        clients: the group of clients.
        charged: the mechanisms that clip and release the sums of private clients.
        rows: computes a row for each image of a batch, from the images and their classes. A row
            must depend only on its image, its class, and public or released values. The function is
            called without gradients.
        width: D, the dimension of the rows.
        dtype: the dtype in which exact sums are computed. They are returned in float32.
    """
    classes = clients.spec.classes
    if isinstance(clients, PrivateClientView):

        def by_pair(x_NCHW: Tensor, pair_N: Tensor) -> Tensor:
            # indices of (client, class) pairs; −1, which is discarded, becomes some class
            return rows(x_NCHW, (pair_N % classes).to(x_NCHW.device, non_blocking=True))

        return clients.class_sums(charged, by_pair).view(len(clients.ids), classes, -1)
    device = clients.data.labels.device
    sums = torch.zeros(len(clients.ids), classes, width, dtype=dtype, device=device)
    with torch.no_grad():
        for k in range(len(clients.ids)):
            for part in clients.examples(k).split(chunk(device)):
                if len(part):
                    labels = clients.labels(part)
                    members = F.one_hot(labels, classes).to(dtype)
                    sums[k] += members.T @ rows(clients.images(part), labels).to(dtype)
    return sums.float()


def sums_and_counts(
    client: Group, vectors: Vectors, width: int, plan: str
) -> tuple[Tensor, Tensor]:
    """Computes the class sums [C, D] and the class counts [C] of one client.

    Args:
        client: a group of one client. A private client must have been charged for both plans of
            `sums_plans`.
        vectors: computes the vectors of a batch of images.
        width: D, the dimension of the vectors.
        plan: the name of the plan of the sums.
    """
    counts = class_counts(client)
    sums = class_sums(client, mechanisms_of(client, plan), lambda x, labels: vectors(x), width)
    return sums[0], counts[0]


def feature_sums(
    model: nn.Module, client: Group, plan: str, context: RoundContext
) -> tuple[Tensor, Tensor]:
    """Computes the class sums [C, D] of a client's features under a model, and the class counts.

    Args:
        model: the model in evaluation mode, whose parameters need no gradients.
        client, plan: as in `sums_and_counts`.
        context: the context of the round.
    """
    embed: Vectors = model.embed  # type: ignore[assignment]
    return sums_and_counts(client, embed, feature_width(context, logits=False), plan)


@dataclass(frozen=True)
class ModelAndSums(ModelParameters):
    """A client's upload with a trained model, class sums of features, and class counts.

    The sums [C, D] are computed by the trained model. The counts have the shape [C].
    """

    sums: Tensor = released()
    counts: Tensor = released()


def uploads_with_sums(
    plan: str, context: RoundContext
) -> Callable[[nn.Module, Trained], tuple[Message, ClientState]]:
    """Returns a function that creates a client's upload, for `LocalObjective.make_upload`.

    The sums run over the client's examples, under its trained model.

    Args:
        plan: the name of the plan of the sums.
        context: the context of the round.
    """

    def make_upload(model: nn.Module, trained: Trained) -> tuple[Message, ClientState]:
        parameters = model.state_dict()
        frozen = context.load(parameters).requires_grad_(False).eval()
        sums, counts = feature_sums(frozen, trained.client, plan, context)
        return ModelAndSums(parameters, trained.weight, sums, counts), {}

    return make_upload


def class_means(
    clients: Group,
    vectors: Vectors,
    width: int,
    plan: str,
    context: RoundContext,
    min_examples: float = 1.0,
) -> Sequence[tuple[Tensor, Tensor]]:
    """Computes the class means [C, D] of each client, and a mask [C] of the valid means.

    All other means are near zero and must not be used.

    Args:
        clients, vectors, width, plan: as in `sums_and_counts`. The group may have several clients.
        context: the context of the round.
        min_examples: smallest noisy count with which a private client has a class. The count must
            also be at least 1, and at least twice its noise's standard deviation.
    """
    noise = context.noise.get(COUNTS, 0.0)
    floor = max(1.0, 2 * noise)
    if noise:
        floor = max(floor, min_examples)
    means = []
    for client in clients.split():
        sums, counts = sums_and_counts(client, vectors, width, plan)
        means.append((sums / counts.clamp_min(floor)[:, None], counts >= floor))
    return means


# The name of the release plan that the synthetic images are matched to. The mechanism `features`
# also has the plan `COUNTS`.
IMAGES = "images"


def feature_width(context: RoundContext, logits: bool) -> int:
    """Returns the dimension of the embedding, or of embedding and logits together.

    Args:
        context: the context of the round, whose network defines the embedding.
        logits: whether the logits are included.
    """
    classifier: Any = context.architecture.classifier
    width: int = classifier.in_features
    return width + classifier.out_features if logits else width


def default_clip(width: int) -> float:
    """Returns a public clipping norm for residuals.

    A residual is the difference between the features of real and synthetic images. The norm is
    close to a residual's typical norm if features are instance-normalised. Their spread per
    coordinate is about the same for all networks, so the norm grows as √width.
    """
    return 0.25 * math.sqrt(width)


def feature_plans(
    privacy: PrivacySettings, context: RoundContext, *, networks: int, count_noise: float
) -> tuple[ReleasePlan, ReleasePlan]:
    """Plans the private releases of the mechanism `features`.

    In a round, there are M releases of class sums and one of the class counts.

    Args:
        privacy: the settings of differential privacy.
        context: the context of the round.
        networks: M.
        count_noise: the counts' noise multiplier, in units of σ/√M, the noise multiplier of all M
            sums together.
    """
    width = feature_width(context, logits=True)
    classes = context.spec.classes
    sums = ReleasePlan(
        name=IMAGES,
        quantity="class sums of features",
        mechanism="features",
        clipped="features [h(x); z(x)] of each example about the synthetic images' mean, "
        "embedding and logits jointly",
        clip=privacy.clip or default_clip(width),
        sample_rate=privacy.sample_rate or 1.0,
        steps=networks,
        dimension=classes * width,
        groups=classes,
    )
    return sums, counts_plan(sums, count_noise / math.sqrt(networks))


def private_matching(
    clients: PrivateClientView,
    context: RoundContext,
    *,
    columns: int | None = None,
    min_examples: float,
) -> matching.MatchingObjective:
    """Returns a loss between real and synthetic images that uses only noisy sums.

    Args:
        clients: the clients, charged for the images or for both `feature_plans`.
        context: the context of the round.
        columns: number of leading feature coordinates that the mechanism `residual` matches. With
            None, it matches all.
        min_examples: smallest released count with which the mechanism `features` sends a class.

    Raises:
        SettingError: the clients were charged for a different mechanism.
    """
    plan = clients.plan(IMAGES)
    mechanisms = clients.mechanisms(IMAGES)
    divisor = plan.sample_rate * context.nominal_size / context.spec.classes
    if plan.mechanism == "residual":
        return private_matchers.ResidualMatcher(clients, mechanisms, divisor, columns)
    if plan.mechanism == "gradient":
        return private_matchers.GradientMatcher(clients, mechanisms, divisor)
    if plan.mechanism != "features":
        raise unsupported(plan.mechanism)
    counts = clients.mechanisms(COUNTS)
    floor = max(1.0, min_examples * plan.sample_rate, 2 * counts[0].noise_std)
    return private_matchers.FeatureSumMatcher(clients, mechanisms, counts, plan.steps, floor)


def unsupported(mechanism: str) -> SettingError:
    """Returns the error for a mechanism that the method does not support."""
    reason = (
        f"must be 'residual', 'gradient', 'features' or 'paper', got {mechanism!r}. Override "
        "`release_plans` and `client_step` in a method with another mechanism"
    )
    return SettingError("privacy", "mechanism", reason)
