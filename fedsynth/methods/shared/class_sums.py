"""Sums of vectors over the examples of each class, and class counts.

A vector is computed from each example. Without differential privacy, the sums and counts are exact.
With it, they are noisy and charged. FedAF computes its class-mean logits from them, and FedFM its
anchors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.core.client import ClientGroup, PrivateClientView, chunk
from fedsynth.core.context import RoundContext
from fedsynth.core.uploads import LARGEST, Array, Rule, most_examples
from fedsynth.privacy.plans import ReleasePlan

COUNTS = "class counts"
"""The name of the release plan of the class counts."""

Vectors = Callable[[Tensor], Tensor]
"""A function that maps normalised images [N, C, H, W] to one vector per image [N, D]. Each vector
must depend only on its image. The function is called without gradients."""


@dataclass(frozen=True)
class ClassSums:
    """The class sums and the class counts of one client.

    Args:
        sums: the sum of the vectors of each class, [classes, D].
        counts: the number of examples of each class, [classes].
        noise_std: the standard deviation of the noise of a count, which is 0 if the counts are
            exact.
    """

    sums: Tensor
    counts: Tensor
    noise_std: float

    def means(self, min_examples: float = 1.0) -> tuple[Tensor, Tensor]:
        """Computes the class means [classes, D], and a mask [classes] of the classes that the
        client has.

        The means of all other classes are near zero and must not be used.

        Args:
            min_examples: smallest noisy count with which a private client has a class. In addition,
                the count must be at least 1, and at least twice the standard deviation of its
                noise.
        """
        floor = max(1.0, 2 * self.noise_std)
        if self.noise_std:
            floor = max(floor, min_examples)
        return self.sums / self.counts.clamp_min(floor)[:, None], self.counts >= floor


def sums_plans(
    name: str,
    quantity: str,
    clipped: str,
    *,
    clip: float,
    width: int,
    classes: int,
    noise: float,
    phase: str,
) -> tuple[ReleasePlan, ReleasePlan]:
    """Returns the release plans of the class sums and of the class counts, neither of which
    subsamples the data.

    Args:
        name: the name of the plan of the sums. The plan of the counts has the name `COUNTS`.
        quantity: a description of the summed quantity.
        clipped: a description of the clipped quantity.
        clip: L2 bound on the vector of one example.
        width: D, the dimension of the vectors.
        classes: number of classes.
        noise: noise multiplier of the sums and of the counts, divided by the run's σ.
        phase: the exchange of the round in which they are released.
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
        phase=phase,
    )
    return sums, counts_plan(sums, noise)


def counts_plan(sums: ReleasePlan, noise: float) -> ReleasePlan:
    """Returns the release plan of the class counts that belong to class sums.

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
    """Returns the rules for the fields `sums` and `counts` of an upload.

    With noise, counts may be negative, and both fields may be as large as the noise.

    Args:
        client: the index of the uploading client.
        shape: the shape of the sums.
        plan: the name of the plan of the sums.
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


def class_sums(
    client: ClientGroup, vectors: Vectors, width: int, plan: str, context: RoundContext
) -> ClassSums:
    """Computes the class sums and the class counts of one client.

    Args:
        client: a group of one client. A private client must have been charged for both plans of
            `sums_plans`.
        vectors: computes the vectors of a batch of images.
        width: D, the dimension of the vectors.
        plan: the name of the plan of the sums.
        context: the context of the round.
    """
    if isinstance(client, PrivateClientView):
        series = client.series(COUNTS)
        counts = client.class_sums(
            series, lambda x_NCHW, segment_N: x_NCHW.new_ones(len(x_NCHW), 1)
        )
        noisy = client.class_sums(client.series(plan), lambda x_NCHW, segment_N: vectors(x_NCHW))
        return ClassSums(noisy, counts[:, 0], series[0].noise_std)
    classes = context.spec.classes
    sums = torch.zeros(classes, width, device=context.device)
    counts_C = torch.zeros(classes, device=context.device)
    examples = client.examples(0)
    with torch.no_grad():
        for indices in examples.split(chunk(examples.device)):
            if len(indices):
                members = F.one_hot(client.labels(indices), classes).to(sums.dtype)
                sums = sums + members.T @ vectors(client.images(indices))
                counts_C = counts_C + members.sum(dim=0)
    return ClassSums(sums, counts_C, 0.0)


def class_means(
    clients: ClientGroup,
    vectors: Vectors,
    width: int,
    plan: str,
    context: RoundContext,
    min_examples: float = 1.0,
) -> Sequence[tuple[Tensor, Tensor]]:
    """Computes the class means of each client of the group, as in `ClassSums.means`.

    The arguments are explained in `class_sums` and `ClassSums.means`.
    """
    sums = [class_sums(client, vectors, width, plan, context) for client in clients.split()]
    return [client_sums.means(min_examples) for client_sums in sums]
