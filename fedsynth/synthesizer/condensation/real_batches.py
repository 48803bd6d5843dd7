"""Real minibatches of condensation: one block of indices for all steps of a round, drawn once for
each client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsynth.core.client import OpenClients, Segments
from fedsynth.seeding import torch_generator
from fedsynth.validation import check_choice

SMALL_CLASS = ("all", "resample")


class BatchIndices:
    """B_c for every step and segment: `batch` examples without replacement.

    Classes smaller than the batch: "all" takes every example at every step (the exact mean, at less
    cost); "resample" draws `batch` examples with replacement. A client's draws depend on (seed,
    round, client) alone, not on who shares its group.

    Args:
        clients, segments: the group and its (client, class) pairs.
        steps: number of condensation steps.

    Attributes:
        sizes: examples of each segment in a step, on the CPU.
        segment: of each row, on the data's device.
        divisors: `sizes` there, [S, 1].
    """

    def __init__(
        self,
        clients: OpenClients,
        segments: Segments,
        batch: int,
        steps: int,
        *,
        small_class: str,
        seed: int,
        round: int,
    ) -> None:
        check_choice("method", "small_class", small_class, SMALL_CLASS)
        blocks: list[Tensor] = []
        for position, client in enumerate(clients.ids):
            generator = torch_generator(seed, "condensation batches", round, client)
            for label in segments.label[segments.of(position)].tolist():
                pool = clients.examples(position, label)
                chosen = _draw(len(pool), batch, steps, small_class, generator)
                blocks.append(pool[chosen.to(pool.device)])
        self.sizes = torch.tensor([block.shape[1] for block in blocks], dtype=torch.int64)
        empty = torch.empty(steps, 0, dtype=torch.int32)
        self._block = (
            torch.cat([block.to(torch.int32) for block in blocks], dim=1) if blocks else empty
        )
        self._where = torch.arange(len(blocks)).repeat_interleave(self.sizes)
        self.segment = self._where.to(self._block.device)
        self.divisors = self.sizes.to(self._block.device, torch.float32)[:, None]

    def at(self, step: int) -> Tensor:
        """Indices into the resident data [N] of one step; their segments are `segment` [N] at every
        step, ascending."""
        return self._block[step].to(torch.int64)

    def pieces(self, size: int) -> list[Piece]:
        """A step's batch cut into runs of at most `size` images."""
        starts = range(0, len(self._where), size)
        stops = [min(start + size, len(self._where)) for start in starts]
        return [
            Piece(
                slice(start, stop), slice(int(self._where[start]), int(self._where[stop - 1]) + 1)
            )
            for start, stop in zip(starts, stops, strict=True)
        ]


@dataclass(frozen=True)
class Piece:
    """Some rows of a step's batch, and the segments that they belong to."""

    rows: slice
    segments: slice


def _draw(
    pool: int, batch: int, steps: int, small_class: str, generator: torch.Generator
) -> Tensor:
    """Positions in a class's pool, [steps, min(batch, pool)] ("resample": [steps, batch] where the
    pool is small)."""
    if pool <= batch:
        if small_class == "resample" and pool < batch:
            return torch.randint(pool, (steps, batch), generator=generator)
        return torch.arange(pool).expand(steps, pool)
    rows: Sequence[Tensor] = [
        torch.rand(min(64, steps - first), pool, generator=generator).topk(batch, dim=1).indices
        for first in range(0, steps, 64)
    ]
    return torch.cat(list(rows))
