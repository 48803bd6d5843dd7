"""Sums by class of a vector of each example, and how many there are: exact with DP off, charged and noisy with DP on.

FedAF's class-mean logits and FedFM's anchors are both made of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.core.client import ClientGroup, PrivateClients, chunk
from fedsynth.core.method import PrivatePlan, RoundContext

Rows = Callable[[Tensor], Tensor]
"""Normalised images [N, C, H, W] -> a vector of each [N, D], which depends on that image alone; called without graph."""


@dataclass(frozen=True)
class ClassSums:
    """`sums` [classes, D] and `counts` [classes] of one client, and the standard deviation of a count's noise (0: exact)."""

    sums: Tensor
    counts: Tensor
    deviation: float


def sums_plans(
    what: str, each: str, clip: float, width: int, classes: int, noise: float
) -> tuple[PrivatePlan, PrivatePlan]:
    """Of the sums and of the counts, without sampling; `noise`: their noise multiplier over the run's σ."""
    sums = PrivatePlan(f"class sums of {what}", "sums", each, clip, 1.0, 1, classes * width, noise)
    return sums, PrivatePlan(
        "class counts", "sums", "each example counts 1", 1.0, 1.0, 1, classes, noise
    )


def class_sums(
    clients: ClientGroup,
    position: int,
    rows: Rows,
    width: int,
    plans: tuple[PrivatePlan, PrivatePlan] | None,
    context: RoundContext,
) -> ClassSums:
    """The sums of one client of the group.

    Args:
        width: D. plans: of the sums and of the counts; for private clients, whose ledger is charged for one release of each.
    """
    classes = context.spec.classes
    if isinstance(clients, PrivateClients):
        if plans is None:
            raise TypeError("private clients need plans")
        (sums_plan, counts_plan), (_, sigma) = plans, context.protection()
        alone, row = clients.alone(position), counts_plan.release(context.round, sigma)
        held = alone.class_sums(
            alone.charge(row, classes), lambda x_NCHW, segment_N: x_NCHW.new_ones(len(x_NCHW), 1)
        )
        series = alone.charge(sums_plan.release(context.round, sigma), classes)
        noisy = alone.class_sums(series, lambda x_NCHW, segment_N: rows(x_NCHW))
        return ClassSums(noisy, held[:, 0], row.noise_multiplier)
    mine = clients.examples(position)
    sums, counts = (
        torch.zeros(classes, width, device=context.device),
        torch.zeros(classes, device=context.device),
    )
    with torch.no_grad():
        for part in mine.split(chunk(mine.device)):
            if len(part):
                members = F.one_hot(clients.labels(part), classes).to(sums.dtype)
                sums, counts = (
                    sums + members.T @ rows(clients.images(part)),
                    counts + members.sum(dim=0),
                )
    return ClassSums(sums, counts, 0.0)


def class_means(
    clients: ClientGroup,
    rows: Rows,
    width: int,
    plans: tuple[PrivatePlan, PrivatePlan] | None,
    context: RoundContext,
    least: float = 1.0,
) -> Sequence[tuple[Tensor, Tensor]]:
    """Of each client of the group: the mean vector of each class [classes, D], and which classes it has [classes].

    The rows of other classes are near zero, and must not be used.

    Args:
        rows, width, plans: see `class_sums`.
        least: private clients have the classes whose noisy count is at least this, at least 1, and
            at least two deviations of its noise, as noise may make any count.
    """
    found = []
    for position in range(len(clients.ids)):
        own = class_sums(clients, position, rows, width, plans, context)
        floor = max(1.0, least, 2 * own.deviation) if own.deviation else 1.0
        found.append((own.sums / own.counts.clamp_min(floor)[:, None], own.counts >= floor))
    return found
