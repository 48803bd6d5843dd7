"""The base class of FedDF and FedBE, whose servers distil an ensemble on public images.

The public images are the training images of a named dataset, resized to the run's image shape.
Their labels are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth.core.capabilities import PublicImages
from fedsynth.core.context import RoundContext
from fedsynth.data.images import ImageData, normalise
from fedsynth.errors import SettingError
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.mixed_precision import computed
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.distillation.losses import distillation_loss
from fedsynth.validation import in_range


@dataclass(frozen=True)
class DistilsOnPublicImages(TrainsLocally, PublicImages):
    """Base class for methods whose server distils an ensemble on public images.

    The following settings come in addition to those of `TrainsLocally`.

    Args:
        proxy: the public dataset that provides the images, or "noise" for random pixels. There is
            no default, because no choice is right for every run. With differential privacy, it must
            not be the clients' own dataset.
        server_steps: number of steps of the distillation.
        server_batch: number of public images in a step.
        server_lr: initial learning rate of the distillation.
    """

    features_refusal = "the server distils on images. Use fedavg instead"
    masks_refusal = "the server distils class probabilities"
    robust_refusal = "the server distils the clients' models and averages no models"
    oca_refusal = "a run ends with the distilled model"

    proxy: str = ""
    server_steps: int = in_range(2000, 0)
    server_batch: int = in_range(128, 1)
    server_lr: float = in_range(1e-3, 0)

    def public_images(self) -> str:
        return self.proxy

    def check_model(self, model: nn.Module) -> None:
        if not self.proxy:
            reason = (
                "is not set, but the server distils on public images. Name a public data set, or "
                "use 'noise' for random pixels"
            )
            raise SettingError("method", "proxy", reason)

    def images_of(self, context: RoundContext) -> ImageData:
        """Returns the public images."""
        if context.proxy is None:
            reason = f"is None, but {self.name} distils on public images. Pass them as proxy"
            raise SettingError(None, "RoundContext.proxy", reason)
        return context.proxy

    def distillation_steps(
        self,
        teacher: Callable[[Tensor], Tensor],
        student: nn.Module,
        optimiser: torch.optim.Optimizer,
        context: RoundContext,
        **state: Any,
    ) -> Iterator[int]:
        """Takes the distillation steps, which minimise KL(teacher ‖ student).

        Yields each step's number, 0, 1, …, after the step. The student is in training mode during
        the steps, and in evaluation mode afterwards.

        Args:
            teacher: a function from normalised images [N, C, H, W] to the ensemble's logits [N,
                classes]. It is called without gradients.
            student: the model to train, in place.
            optimiser: the optimiser of the student's parameters.
            context: the context of the round.
            state: further objects that change between the steps, by name, saved in checkpoints.
        """
        images = self.images_of(context)
        draws = torch_generator(context.seed, "proxy batches", context.round)
        changed = {"student": student, "optimiser": optimiser, "draws": draws, **state}
        student.train()
        for step in context.server_loop("distillation", self.server_steps, changed):
            indices = torch.randint(len(images), (self.server_batch,), generator=draws)
            pixels = images.images[indices.to(context.device, non_blocking=True)]
            x = normalise(pixels, context.spec)
            with torch.no_grad():
                logits = teacher(x)
            with torch.enable_grad():
                optimiser.zero_grad()
                distillation_loss(logits, computed(student, x, context.precision)).backward()
            optimiser.step()
            yield step
        student.eval()
