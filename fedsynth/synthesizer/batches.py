"""Real minibatches of condensation: one block of indices for all steps of a round, drawn once for each client."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsynth.core.client import OpenClients, Segments
from fedsynth.core.random import torch_generator
from fedsynth.errors import SettingError

SMALL_CLASS = ("all", "resample")


class BatchIndices:
    """B_c for every step and segment: `batch` examples without replacement.

    Classes smaller than the batch: "all" takes every example at every step (the exact mean, at less cost); "resample" draws
    `batch` examples with replacement. A client's draws depend on (seed, round, client) alone, not on who shares its group.

    Args:
        clients, segments: the group and its (client, class) pairs.
        steps: number of condensation steps.
    """

    def __init__(
        self, clients: OpenClients, segments: Segments, batch: int, steps: int, *, small_class: str, seed: int, round: int
    ) -> None:
        if small_class not in SMALL_CLASS:
            raise SettingError(f"small_class must be one of {', '.join(SMALL_CLASS)}, got {small_class!r}")
        blocks: list[Tensor] = []
        for position, client in enumerate(clients.ids):
            generator = torch_generator(seed, "condensation batches", round, client)
            for label in segments.label[segments.of(position)].tolist():
                pool = clients.examples(position, label)
                chosen = _draw(len(pool), batch, steps, small_class, generator)
                blocks.append(pool[chosen.to(pool.device)])
        self.sizes = torch.tensor([block.shape[1] for block in blocks], dtype=torch.int64)
        self._block = torch.cat(blocks, dim=1) if blocks else torch.empty(steps, 0, dtype=torch.int64)
        self._segment = torch.arange(len(blocks)).repeat_interleave(self.sizes).to(self._block.device)

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """(indices into the resident data [N], segment of each [N]) of one step; the segments are the same at every step."""
        return self._block[step], self._segment


def _draw(pool: int, batch: int, steps: int, small_class: str, generator: torch.Generator) -> Tensor:
    """Positions in a class's pool, [steps, min(batch, pool)] ("resample": [steps, batch] where the pool is small)."""
    if pool <= batch:
        if small_class == "resample" and pool < batch:
            return torch.randint(pool, (steps, batch), generator=generator)
        return torch.arange(pool).expand(steps, pool)
    rows: Sequence[Tensor] = [
        torch.rand(min(64, steps - first), pool, generator=generator).topk(batch, dim=1).indices for first in range(0, steps, 64)
    ]
    return torch.cat(list(rows))
