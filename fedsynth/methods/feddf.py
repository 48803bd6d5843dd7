"""FedDF: the server distils the averaged logits of the clients on unlabelled public images (Lin et
al. 2020, arXiv 2006.07242).

The student starts from the average of the clients' parameters, or from a newly initialised network
if the clients have different architectures. It is trained to minimise KL(ensemble ‖ student) by
Adam with a cosine schedule. The public images are the training images of a named dataset, resized
to the image shape of the run. Their labels are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from fedsynth.core.capabilities import PublicImages
from fedsynth.core.context import RoundContext
from fedsynth.core.method import Presets
from fedsynth.data.images import normalise
from fedsynth.errors import SettingError
from fedsynth.methods.shared.ensemble import EnsembleDistillation, EnsembleState
from fedsynth.mixed_precision import computed
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.distillation.losses import distillation_loss
from fedsynth.validation import in_range


@dataclass(frozen=True)
class FedDF(EnsembleDistillation, PublicImages):
    """FedDF: the server trains a student on public images, towards the clients' averaged logits.

    The defaults are those of the paper.

    Args:
        proxy: the public dataset whose training images are used for the distillation, or "noise"
            for random pixels. There is no default, because no choice is right for every run. With
            differential privacy, it must not be the clients' own dataset.
        server_steps: number of steps of Adam with a cosine schedule. The paper uses at most 10,000
            steps and stops early on validation data. This implementation does not stop early.
        server_batch: number of public images in a step.
        server_lr: initial learning rate of Adam.

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
    proxy: str = ""
    server_steps: int = in_range(2000, 0)
    server_batch: int = in_range(128, 1)
    server_lr: float = in_range(1e-3, 0)

    def public_images(self) -> str:
        return self.proxy

    def check_model(self, model: nn.Module) -> None:
        if not self.proxy:
            reason = "must be a data set with public images, or 'noise' for random pixels"
            raise SettingError("method", "proxy", reason)

    def distil(
        self, models: Sequence[nn.Module], student: nn.Module, context: RoundContext
    ) -> EnsembleState:
        """Trains the student on public images towards the averaged logits (AVGLOGITS in Algorithm
        1)."""
        images = context.proxy
        if images is None:
            raise SettingError(None, "RoundContext.proxy", "must contain public images for feddf")
        adam = torch.optim.Adam(student.parameters(), self.server_lr)
        schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(adam, max(1, self.server_steps))
        draws = torch_generator(context.seed, "proxy batches", context.round)
        state = {"student": student, "adam": adam, "schedule": schedule, "draws": draws}
        student.train()
        for _ in context.server_loop("distillation", self.server_steps, state):
            indices = torch.randint(len(images), (self.server_batch,), generator=draws)
            pixels = images.images[indices.to(context.device, non_blocking=True)]
            x = normalise(pixels, context.spec)
            with torch.no_grad():
                logits = [computed(model, x, context.precision) for model in models]
                teacher = torch.stack(logits).mean(dim=0)
            with torch.enable_grad():
                adam.zero_grad()
                distillation_loss(teacher, computed(student, x, context.precision)).backward()
            adam.step()
            schedule.step()
        student.eval()
        return EnsembleState({})
