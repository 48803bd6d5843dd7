"""FedDF: the server distils the clients' averaged logits on unlabelled public images (Lin et al.
2020, arXiv 2006.07242).

The student starts from the average of the clients' parameters, or from a newly initialised network
if the clients have different architectures. Adam with a cosine schedule minimises KL(ensemble ‖
student) on public images (`methods/shared/public_images.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.capabilities import HeterogeneousClients
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Tensors
from fedsynth.core.method import Presets
from fedsynth.methods.shared.ensemble import EnsembleDistillation, EnsembleState
from fedsynth.methods.shared.public_images import DistilsOnPublicImages
from fedsynth.mixed_precision import computed


@dataclass(frozen=True)
class FedDF(EnsembleDistillation, DistilsOnPublicImages, HeterogeneousClients):
    """FedDF: the server trains a student to match the clients' averaged logits on public images.

    The settings are documented in `EnsembleDistillation` and `DistilsOnPublicImages`. The server's
    optimiser, rate and batch are the paper's. The paper takes at most 10,000 steps and stops early
    on validation data. Here, `server_steps` is fixed.

    >>> from fedsynth import FedDF, ModelSettings, RunSettings, simulate
    >>> method = FedDF(proxy="noise", local_epochs=3, batch=32, lr=0.1, server_steps=50)
    >>> result = simulate(RunSettings(method, rounds=1, model=ModelSettings("linear")))
    >>> result.accuracy > 0.6
    True
    """

    name = "feddf"
    summary = "the server distils the clients' averaged logits on public unlabelled images"
    reference = "Lin et al. 2020, FedDF, arXiv 2006.07242"
    presets: ClassVar[Presets] = {"digits": {"server_steps": 300, "proxy": "noise"}}

    start: str = "average"

    def distil(
        self, models: Mapping[int, Tensors], student: nn.Module, context: RoundContext
    ) -> EnsembleState:
        """Trains the student to match the averaged logits on public images (Algorithm 1)."""
        adam = torch.optim.Adam(student.parameters(), self.server_lr)
        schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(adam, max(1, self.server_steps))
        for _ in self.distillation_steps(models, student, adam, context, schedule=schedule):
            schedule.step()
        return EnsembleState({})

    def teach(self, models: Sequence[nn.Module], x: Tensor, context: RoundContext) -> Tensor:
        """Returns the average of the models' logits."""
        return torch.stack([computed(m, x, context.precision) for m in models]).mean(dim=0)
