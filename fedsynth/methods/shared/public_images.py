"""The base class of FedDF and FedBE, whose servers distil an ensemble on public images.

The public images are the training images of a named dataset, resized to the run's image shape.
Their labels are not used.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth.core.capabilities import PublicImages, ServerParts
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Tensors, flattened, unflattened
from fedsynth.data.images import ImageData, normalise
from fedsynth.errors import SettingError
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.mixed_precision import computed
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.distillation.losses import distillation_loss
from fedsynth.validation import in_range

# The number of batches in a part of the server's step that a rank computes at a time.
BATCHES = 8


@dataclass(frozen=True)
class DistilsOnPublicImages(TrainsLocally, PublicImages, ServerParts):
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
        models: Mapping[int, Tensors],
        student: nn.Module,
        optimiser: torch.optim.Optimizer,
        context: RoundContext,
        **state: Any,
    ) -> Iterator[int]:
        """Takes the distillation steps, which minimise KL(ensemble ‖ student).

        Yields each step's number, 0, 1, …, after the step. The student is in training mode during
        the steps, and in evaluation mode afterwards.

        Args:
            models: the parameters and buffers of the ensemble's models, by number. If clients have
                different architectures, the number of a model is its client.
            student: the model to train, in place.
            optimiser: the optimiser of the student's parameters.
            context: the context of the round.
            state: further objects that change between the steps, by name, saved in checkpoints.
        """
        count = len(self.images_of(context))
        draws = torch_generator(context.seed, "proxy batches", context.round)
        shape = (self.server_steps, self.server_batch)
        batches = torch.randint(count, shape, generator=draws)
        changed = {"student": student, "optimiser": optimiser, **state}
        student.train()
        teach, taught = self.in_parts(flattened(models), context), None
        for step in context.server_loop("distillation", self.server_steps, changed):
            taught = taught or _logits(teach, batches[step:])
            x, logits = self._images(batches[step], context), next(taught)
            with torch.enable_grad():
                optimiser.zero_grad()
                distillation_loss(logits, computed(student, x, context.precision)).backward()
            optimiser.step()
            yield step
        student.eval()

    def _images(self, indices: Tensor, context: RoundContext) -> Tensor:
        pixels = self.images_of(context).images[indices.to(context.device, non_blocking=True)]
        return normalise(pixels, context.spec)

    def server_part(self, shared: Tensors, context: RoundContext) -> Callable[[Tensors], Tensors]:
        models = context.load_frozen(unflattened(shared))

        @torch.no_grad()
        def logits_of(part: Tensors) -> Tensors:
            images = (self._images(indices, context) for indices in part["batches"])
            return {"logits": torch.stack([self.teach(models, x, context) for x in images])}

        return logits_of

    @abstractmethod
    def teach(self, models: Sequence[nn.Module], x: Tensor, context: RoundContext) -> Tensor:
        """Returns the ensemble's logits [N, classes] for normalised images [N, C, H, W].

        Args:
            models: the ensemble's models, in evaluation mode.
            x: the images.
            context: the context of the round.
        """


def _logits(teach: Callable[..., Iterator[Tensors]], batches: Tensor) -> Iterator[Tensor]:
    """Yields the ensemble's logits of each batch of indices, which are computed in parts."""
    for result in teach([{"batches": part} for part in batches.split(BATCHES)]):
        yield from result["logits"]
