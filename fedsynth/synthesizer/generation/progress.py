"""Where a distillation of several models stands between two epochs: what is kept of it inside a
round, and what it goes on from (`fedsynth.keeping`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor, nn

from fedsynth.synthesizer.generation.generator_memory import remembered, restore

DISTILLATION = "distillation"
"""The name of a kept distillation."""


@dataclass(frozen=True)
class Batch:
    """Generated images [N, C, H, W], the ensemble's logits on them [N, classes], the classes that
    they were asked for [N], and the generator's loss on them."""

    images: Tensor
    answer: Tensor
    labels: Tensor
    loss: Tensor


class Epochs(Protocol):
    """What makes the images."""

    def kept(self) -> dict[str, Tensor]:
        """Where it stands, by name."""

    def put_back(self, epochs: int, kept: Mapping[str, Tensor]) -> None:
        """Goes on after so many epochs from what `kept` gave."""


@dataclass(frozen=True)
class Progress:
    """All that a distillation changes, as named tensors.

    Args:
        student, sgd: the network that learns, and its optimiser.
        shuffle: draws the order of batches.
        epochs: make the images.
        past: those of earlier epochs that later ones see.
        tallies: of the epochs so far, each [epochs, 3, classes].
    """

    student: nn.Module
    sgd: torch.optim.Optimizer
    shuffle: torch.Generator
    epochs: Epochs
    past: list[Batch]
    tallies: list[Tensor]

    def kept(self) -> dict[str, Tensor]:
        """All of it, by name."""
        return {
            **remembered(self.student, self.sgd, "student.", "sgd."),
            **self.epochs.kept(),
            "shuffle": self.shuffle.get_state(),
            "tallies": torch.cat(self.tallies),
            **{
                f"past.{number}.{f.name}": getattr(batch, f.name)
                for number, batch in enumerate(self.past)
                for f in fields(batch)
            },
        }

    def put_back(self, found: tuple[int, Mapping[str, Tensor]] | None) -> int:
        """Puts all of it where it stood; how many epochs are done."""
        if found is None:
            return 0
        done, kept = found
        device = next(self.student.parameters()).device
        restore(self.student, self.sgd, kept, "student.", "sgd.")
        self.epochs.put_back(done, kept)
        self.shuffle.set_state(kept["shuffle"])
        self.tallies[:] = [kept["tallies"].to(device)]
        number = 0
        while f"past.{number}.images" in kept:
            values = (kept[f"past.{number}.{f.name}"].to(device) for f in fields(Batch))
            self.past.append(Batch(*values))
            number += 1
        return done
