"""Per-class sums of a vector per example, and class counts: exact without DP, charged and noisy
with it.

FedAF's class-mean logits and FedFM's anchors are computed from these.
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
"""The name of the counts' plan."""

Vectors = Callable[[Tensor], Tensor]
"""Normalised images [N, C, H, W] -> one vector per image [N, D], which depends only on that image;
called without gradients."""


@dataclass(frozen=True)
class ClassSums:
    """The class sums and counts of one client.

    Args:
        sums: [classes, D].
        counts: [classes].
        noise_std: the standard deviation of a count's noise; 0: exact.
    """

    sums: Tensor
    counts: Tensor
    noise_std: float

    def means(self, min_examples: float = 1.0) -> tuple[Tensor, Tensor]:
        """Returns the class means [classes, D], and which classes the client has [classes].

        The rows of other classes are near zero, and must not be used.

        Args:
            min_examples: a private client has a class if its noisy count is at least this, at least
                1, and at least two standard deviations of its noise.
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
    """Returns the plans of the sums and of the counts, without sampling.

    Args:
        name: of the sums' plan; that of the counts is `COUNTS`.
        quantity: the summed quantity, in words.
        clipped: the clipped quantity, in words.
        clip: L2 bound of one example's vector.
        width: D of the vectors.
        classes: how many sums there are.
        noise: noise multiplier of sums and counts over the run's σ.
        phase: the exchange that they are released in.
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
    """Returns the plan of the class counts that belong to class sums: one release, in which each
    example counts 1."""
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
    """Returns the rules of an upload's `sums` and `counts` [classes]; with noise counts may be
    negative, and both as large as the noise.

    Args:
        client: the uploading client's index.
        shape: of the sums.
        plan: the name of the sums' plan.
        context: the round's.
        dtype: of sums and noisy counts.
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
    """Returns the sums of one client.

    Args:
        client: a group of one; a private client was charged for the two plans of `sums_plans`.
        vectors: computes the vectors.
        width: D.
        plan: the name of the sums' plan.
        context: the round's.
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
    """Returns `ClassSums.means` of each client of the group; see there and `class_sums`."""
    sums = [class_sums(client, vectors, width, plan, context) for client in clients.split()]
    return [client_sums.means(min_examples) for client_sums in sums]
