"""Per-class sums of a vector per example, and class counts: exact without DP, charged and noisy
with it.

FedAF's class-mean logits and FedFM's anchors are computed from these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.core.client import ClientGroup, PrivateClientView, chunk
from fedsynth.core.context import RoundContext
from fedsynth.core.uploads import LARGEST, Array, Rule, most_examples
from fedsynth.privacy.plans import MAIN, PrivatePlan

COUNTS = "class counts"
"""The name of the counts' plan."""

Rows = Callable[[Tensor], Tensor]
"""Normalised images [N, C, H, W] -> one vector per image [N, D], which depends only on that image;
called without gradients."""


@dataclass(frozen=True)
class ClassSums:
    """The class sums and counts of one client.

    Args:
        sums: [classes, D].
        counts: [classes].
        deviation: the standard deviation of a count's noise; 0: exact.
    """

    sums: Tensor
    counts: Tensor
    deviation: float


def sums_plans(
    name: str,
    what: str,
    each: str,
    *,
    clip: float,
    width: int,
    classes: int,
    noise: float,
    phase: str,
) -> tuple[PrivatePlan, PrivatePlan]:
    """Returns the plans of the sums and of the counts, without sampling.

    Args:
        name: of the sums' plan; that of the counts is `COUNTS`.
        what: the summed quantity, in words.
        each: the clipped quantity, in words.
        clip: L2 bound of one example's vector.
        width: D of the vectors.
        classes: how many sums there are.
        noise: noise multiplier of sums and counts over the run's σ.
        phase: the exchange that they are released in.
    """
    sums = PrivatePlan(
        name=name,
        quantity=f"class sums of {what}",
        mechanism="sums",
        clipped=each,
        clip=clip,
        sample_rate=1.0,
        steps=1,
        dimension=classes * width,
        groups=classes,
        noise_ratio=noise,
        phase=phase,
    )
    return sums, counts_plan("sums", classes, noise, phase=phase)


def counts_plan(
    mechanism: str, classes: int, noise: float, sample_rate: float = 1.0, phase: str = MAIN
) -> PrivatePlan:
    """Returns the plan of the class counts: one release, in which each example counts 1."""
    return PrivatePlan(
        name=COUNTS,
        quantity="class counts",
        mechanism=mechanism,
        clipped="each example counts 1",
        clip=1.0,
        sample_rate=sample_rate,
        steps=1,
        dimension=classes,
        groups=classes,
        noise_ratio=noise,
        phase=phase,
    )


def sums_rules(client: int, width: int, name: str, context: RoundContext) -> dict[str, Rule]:
    """Returns the rules of an upload's `sums` [classes, width] and `counts` [classes]; with noise
    counts may be negative, and both as large as the noise.

    Args:
        client: the uploading client's index.
        width: D.
        name: of the sums' plan.
        context: the round's.
    """
    classes = context.spec.classes
    noise = max((1.0, context.noise.get(name, 0.0), context.noise.get(COUNTS, 0.0)))
    far = LARGEST * noise
    counts = Array((classes,), least=0.0, most=min(far, most_examples(client, context)))
    if context.privacy is not None:
        counts = Array((classes,), least=-far, most=far)
    return {"sums": Array((classes, width), least=-far, most=far), "counts": counts}


def class_sums(
    clients: ClientGroup,
    position: int,
    rows: Rows,
    width: int,
    name: str,
    context: RoundContext,
) -> ClassSums:
    """Returns the sums of one client of the group.

    Args:
        clients: private ones were charged for the two plans of `sums_plans`.
        position: of the client in the group.
        rows: computes the vectors.
        width: D.
        name: of the sums' plan.
        context: the round's.
    """
    classes = context.spec.classes
    if isinstance(clients, PrivateClientView):
        alone = clients.alone(position)
        counting = alone.series(COUNTS)
        held = alone.class_sums(counting, lambda x_NCHW, segment_N: x_NCHW.new_ones(len(x_NCHW), 1))
        noisy = alone.class_sums(alone.series(name), lambda x_NCHW, segment_N: rows(x_NCHW))
        return ClassSums(noisy, held[:, 0], counting[0].deviation)
    mine = clients.examples(position)
    sums = torch.zeros(classes, width, device=context.device)
    counts = torch.zeros(classes, device=context.device)
    with torch.no_grad():
        for part in mine.split(chunk(mine.device)):
            if len(part):
                members = F.one_hot(clients.labels(part), classes).to(sums.dtype)
                sums = sums + members.T @ rows(clients.images(part))
                counts = counts + members.sum(dim=0)
    return ClassSums(sums, counts, 0.0)


def class_means(
    clients: ClientGroup,
    rows: Rows,
    width: int,
    name: str,
    context: RoundContext,
    least: float = 1.0,
) -> Sequence[tuple[Tensor, Tensor]]:
    """Returns each client's class means [classes, D], and which classes it has [classes].

    The rows of other classes are near zero, and must not be used.

    Args:
        clients, rows, width, name, context: see `class_sums`.
        least: a private client has a class if its noisy count is at least this, at least 1, and at
            least two standard deviations of its noise.
    """
    found = []
    for position in range(len(clients.ids)):
        own = class_sums(clients, position, rows, width, name, context)
        floor = max(1.0, least, 2 * own.deviation) if own.deviation else 1.0
        found.append((own.sums / own.counts.clamp_min(floor)[:, None], own.counts >= floor))
    return found
