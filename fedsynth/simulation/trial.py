"""One trial of a private selection: a run, and a score of its model.

The selection has already charged the ledgers for both. The score is the number of held-out records
that the run's model classifies correctly, with Gaussian noise of each client. It is released by
`GaussianSumMechanism`, as all releases are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
from torch import Tensor, nn

from fedsynth.core.context import RoundContext
from fedsynth.data.images import normalise
from fedsynth.evaluation.accuracy import scores
from fedsynth.federation.client_runtime import ClientRuntime
from fedsynth.privacy.ledger.trial import TrialLedger
from fedsynth.privacy.mechanisms import BudgetEnforcer, GaussianSumMechanism, Released
from fedsynth.privacy.passes import (
    Parts,
    Units,
    Values,
    noisy_sums,
    padded,
    pass_size,
    values_of_each,
)
from fedsynth.privacy.releases import FULL, RECORD, USER, Release

RECORDS_AT_ONCE = 512
# The fixed cost of a forward pass, in records.
START_OVER_ROW = 4.0


def score_row(noise_multiplier: float, unit: str = RECORD) -> Release:
    """Returns the ledger row that describes the release of a client's score."""
    return Release(
        round=0,
        quantity="number of correct held-out records",
        mechanism="score",
        clipped="1 if a held-out record is classified correctly, else 0",
        noise_multiplier=noise_multiplier,
        sensitivity=1.0,
        sample_rate=1.0,
        sampler=FULL,
        steps=1,
        dimension=1,
        unit=unit,
    )


@dataclass(eq=False)
class Trial:
    """One trial of a private selection.

    Args:
        ledgers: the ledgers of the clients.
        row: the ledger row of a client's score.
        began: the time when the selection began. All trials state it, because their own times would
            reveal their number.
        home: the folder to which the run folder of the best trial is moved. All trials state it.

    Attributes:
        score: the clients' noisy scores, added up. It is −∞ before the run has ended.
    """

    ledgers: Sequence[TrialLedger]
    row: Release
    began: datetime
    home: Path
    score: float = -math.inf

    def measure(
        self, model: nn.Module, clients: Sequence[ClientRuntime], context: RoundContext
    ) -> None:
        """Releases the final model's score on all clients' held-out records."""
        budgets = [client.budget for client in clients if client.budget is not None]
        released = []
        for client, budget in zip(clients, budgets, strict=True):
            guard = BudgetEnforcer(
                budget.ledger, adjacency=budget.plan.privacy.adjacency, unit=self.row.unit
            )
            mechanism = GaussianSumMechanism(self.row, 1, guard, budget.secret)
            released.append(_released(mechanism, model, client, self.row.unit, context))
        self.score = math.fsum(map(float, released))


def _released(
    mechanism: GaussianSumMechanism,
    model: nn.Module,
    client: ClientRuntime,
    unit: str,
    context: RoundContext,
) -> Released:
    """Counts the held-out records that a model classifies correctly, with noise."""
    data, held_out = client.data.resident, client.data.held_out
    users = None
    if unit == USER and data.groups is not None:
        users = data.groups.cpu()[held_out.cpu()]
    expected = context.nominal_size  # more than are held out, and public
    length, count = pass_size(expected, START_OVER_ROW, RECORDS_AT_ONCE, isolated=context.isolated)

    def right(images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            return scores(model(normalise(images, data.spec)), labels)[:, None]

    def values(parts: Parts) -> Sequence[Values]:
        ((_, part),) = parts
        places = held_out.to(data.labels.device)[part.records.to(data.labels.device)]
        inputs = padded(data.images[places], length), padded(data.labels[places], length)
        rows = values_of_each(right, inputs, context.note)[: len(part)]
        return [(rows, torch.zeros(len(part), dtype=torch.int64, device=rows.device))]

    model.eval()
    (released,) = noisy_sums([mechanism], [Units(len(held_out), users)], count, lambda _: values)
    return released
