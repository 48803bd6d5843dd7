"""Data-free distillation of several models into one student, as in DENSE and FedHydra.

This is the server's part of DENSE (Zhang et al. 2022, Algorithm 1) and FedHydra (Algorithm 1, Eqs.
12 to 19). An epoch draws noise z and labels y once. The generator takes several steps down L_CE +
λ1·L_BN + λ2·L_AD on them. Then the student learns the ensemble's predictions P on the generated
images. Everything here is computed only from the models.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.core.context import unmeasured
from fedsynth.data.registry import DatasetSpec
from fedsynth.evaluation.generated import tally
from fedsynth.mixed_precision import computed
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation.augmentation import Views
from fedsynth.synthesizer.distillation import losses
from fedsynth.synthesizer.distillation.generator import descend, make_generator
from fedsynth.validation import check_fields, in_range, one_of

# A function that combines all models' logits [m, N, C] into the ensemble's logits [N, C]. The
# second argument is the target labels [N].
Aggregate = Callable[[Tensor, Tensor], Tensor]


class Batch(NamedTuple):
    """A batch of generated images, with the ensemble's predictions.

    Attributes:
        images: the generated images x̂, [N, C, H, W].
        logits: the ensemble's logits P for the images, [N, classes].
        labels: the target labels y of the images, [N].
        loss: the generator's loss on the images.
    """

    images: Tensor
    logits: Tensor
    labels: Tensor
    loss: Tensor


def average_of_logits(logits_MNC: Tensor, labels_N: Tensor) -> Tensor:
    """Returns the models' average logits [N, C], the ensemble in DENSE (Eq. 1) and FedDF.

    >>> average_of_logits(torch.tensor([[[1.0, 0.0]], [[0.0, 3.0]]]), torch.tensor([0]))
    tensor([[0.5000, 1.5000]])
    """
    return logits_MNC.mean(dim=0)


@dataclass(frozen=True)
class OneShotSettings:
    """The settings of data-free distillation from an ensemble of models.

    The defaults are FedHydra's, with the student's images of DENSE's public code and a public
    repository of FedHydra's first author: the best batches of all epochs so far. In the loop that
    FedHydra's paper states (`student_images` "all", no `replay`, no `generator_reset`, no
    momentum), students forget (docs/reproduction.md). Reasons are given for values that the papers
    do not state.

    Args:
        server_epochs: the number of epochs T_g.
        generator_steps: the number of generator steps T_G in an epoch.
        generator_lr, generator_beta1: the learning rate and β₁ of the generator's Adam. β₁ is 0.5
            in DENSE's public code.
        generator_batch: the number of images that an epoch draws. The default in DENSE's public
            code is 256.
        latent, generator_width: the length of the generator's noise vector and the generator's
            width. DENSE's public code has 256 and 64.
        generator_reset: whether each epoch trains a new generator.
        learn_noise: whether Adam optimises the noise of an epoch together with the generator, as in
            DENSE's public code.
        bn_weight, ad_weight: the weights λ1 and λ2.
        only_disagreement: whether L_AD is DENSE's, which counts only images on which the ensemble
            and the student disagree.
        student_images: the student's training images in an epoch. "best" uses the batch with the
            lowest loss. "all" uses every generator step's batch, with a student step for each
            ("leverages all generated intermediate images", FedHydra, Sec. 2). "last" uses one
            batch, generated after the last step (FedHydra's Algorithm 1 taken literally, with its
            one student step).
        replay: whether the student is trained on the images of all epochs so far instead of only
            those of the current epoch.
        flips, crop: the random views of images, see `Views`. The ensemble receives views while the
            generator is trained. The student and its teacher receive new views in each pass, which
            are cropped only if images are in colour. DENSE's public code also crops CIFAR for the
            student, and flips even digits.
        hard_weight: the weight β. The paper gives none, so it is 1.
        server_lr: the learning rate of the student's SGD.
        server_momentum: the momentum of the student's SGD. FedHydra's paper gives none. 0.9 is that
            of DENSE's public code and the author's repository. Without `replay`, successive images
            hardly differ, momentum adds the steps up, and hidden units may die.
        student_weights: the student's weights at the end of a round. "last" takes them after the
            last epoch, as in the papers. "average" takes their mean over the epochs of the last
            quarter, and is not in the papers. A round's metrics contain both accuracies.
    """

    server_epochs: int = in_range(200, 0)
    generator_steps: int = in_range(30, 1)
    generator_lr: float = in_range(1e-3, 0)
    generator_beta1: float = in_range(0.9, 0, 0.9999)
    generator_batch: int = in_range(128, 2)
    latent: int = in_range(100, 1)
    generator_width: int = in_range(64, 1)
    generator_reset: bool = True
    learn_noise: bool = False
    bn_weight: float = in_range(1.0, 0)
    ad_weight: float = in_range(0.5, 0)
    only_disagreement: bool = False
    student_images: str = one_of("best", "all", "last")
    replay: bool = True
    flips: bool = False
    crop: float = in_range(0.0, 0, 0.5)
    hard_weight: float = in_range(1.0, 0)
    server_lr: float = in_range(0.01, 0)
    server_momentum: float = in_range(0.9, 0, 1)
    student_weights: str = one_of("last", "average")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(eq=False)
class OneShotDistillation:
    """Trains a generator and a student alternately, one epoch at a time.

    Args:
        models: the models F_1 … F_m on the student's device, frozen and in evaluation mode.
        aggregate: computes the ensemble's logits P.
        student: the model F_g, which is trained in place.
        spec: the data set's specification, of which only public facts are read.
        targets: computes the student's target logits. With None, they are P.
        precision: the precision of the networks' passes (`fedsynth.mixed_precision`).
        measure: returns the student's accuracy after an epoch, which is only recorded.

    Attributes:
        average: a network with the student's mean weights and buffers over the last quarter's
            epochs so far.
        accuracies: the results of `measure`, float64 [epochs].
        tallies: prediction counts on each epoch's student images, int64 [epochs, 3, classes], see
            `evaluation.generated`. The student predicts after the epoch.
        state: all objects that an epoch passes on to the next (`resumable`).

    >>> from fedsynth.data.registry import dataset_spec
    >>> models = [nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval() for _ in range(3)]
    >>> sizes = OneShotSettings(server_epochs=2, generator_steps=2, generator_width=4)
    >>> digits = dataset_spec("digits")
    >>> training = OneShotDistillation(sizes, models[:2], average_of_logits, models[2], digits, 0)
    >>> for epoch in range(2):
    ...     training.train_student(epoch, training.train_generator(epoch))
    >>> training.tallies[:, 0].sum(dim=1)  # the new images of each epoch: the best batch
    tensor([128, 128])
    """

    settings: OneShotSettings
    models: Sequence[nn.Module]
    aggregate: Aggregate
    student: nn.Module
    spec: DatasetSpec
    seed: int
    round: int = 1
    _: KW_ONLY
    targets: Aggregate | None = None
    precision: torch.dtype = torch.float32
    measure: Callable[[nn.Module], float] = unmeasured

    def __post_init__(self) -> None:
        settings, seed, number = self.settings, self.seed, self.round
        device = self._device = next(self.student.parameters()).device
        self.student.eval()
        self._draws = torch_generator(seed, "one-shot draws", number, device=device)
        self._view_draws = torch_generator(seed, "one-shot views", number, device=device)
        self._shuffle = torch_generator(seed, "one-shot replay", number)
        self._views = self._student_views = Views(settings.flips, settings.crop)
        if self.spec.channels == 1:
            self._student_views = replace(self._views, crop=0.0)
        rates = settings.server_lr, settings.server_momentum
        self._sgd = torch.optim.SGD(self.student.parameters(), *rates)
        self._batches: list[Batch] = []
        shape = settings.server_epochs, 3, self.spec.classes
        self.tallies = torch.zeros(shape, dtype=torch.int64, device=device)
        self.average = copy.deepcopy(self.student)
        self.accuracies = torch.full(shape[:1], math.nan, dtype=torch.float64)
        self._new_generator(seed, number)
        self.state: dict[str, Any] = {
            "student": self.student,
            "average": self.average,
            "accuracies": self.accuracies,
            "sgd": self._sgd,
            "shuffle": self._shuffle,
            "tallies": self.tallies,
            "draws": self._draws,
            "view_draws": self._view_draws,
        }
        if settings.replay:
            self.state["batches"] = self._batches
        if not settings.generator_reset:
            self.state |= {"generator": self._generator, "adam": self._adam}

    def train_generator(self, epoch: int) -> list[Batch]:
        """Trains the generator for one epoch, and returns the student's batches.

        The generator takes T_G steps (FedHydra, Algorithm 1, lines 13 to 21).
        """
        settings = self.settings
        if settings.generator_reset and epoch:
            self._new_generator(self.seed, self.round, epoch)
        shape = (settings.generator_batch, settings.latent)
        z = torch.randn(shape, generator=self._draws, device=self._device)
        y = torch.randint(self.spec.classes, shape[:1], generator=self._draws, device=self._device)
        optimisers = [self._adam]
        if settings.learn_noise:
            optimisers.append(self._new_adam([z.requires_grad_()]))
        batches: list[Batch] = []
        for _ in range(settings.generator_steps):
            batch = self._generator_step(z, y, optimisers)
            if settings.student_images == "best" and batches:
                batch = _lower_loss(batches.pop(), batch)
            if settings.student_images != "last":
                batches.append(batch)
        if settings.student_images == "last":
            with torch.no_grad():
                x = self._generated(z)
                batches = [Batch(x, self.aggregate(self._logits(x), y), y, y.new_zeros(()))]
        return batches

    def _generator_step(
        self, z: Tensor, y: Tensor, optimisers: Sequence[torch.optim.Optimizer]
    ) -> Batch:
        """Takes one generator step, and returns the batch that was generated before the step."""
        settings = self.settings
        with torch.enable_grad():
            x = self._generated(z)
            view = self._views(x, self.spec, self._view_draws)
            with losses.batch_norm_matching(self.models if settings.bn_weight else []) as bn_loss:
                P = self.aggregate(self._logits(view), y)  # Eq. 12
                loss = F.cross_entropy(P, y)  # L_CE, Eq. 13
                loss = loss + settings.bn_weight * bn_loss()  # Eq. 14
            if settings.ad_weight:  # Eqs. 15 and 16
                loss = loss + settings.ad_weight * losses.adversarial_loss(
                    P, self._student_logits(view), only_disagreement=settings.only_disagreement
                )
            descend(loss, *optimisers)
        return Batch(x.detach(), P.detach(), y, loss.detach())

    def train_student(self, epoch: int, batches: Sequence[Batch]) -> None:
        """Takes one student step for each batch, and counts the epoch's predictions.

        The loss is L_Glo = KL(P ‖ F_g) + β·CE(F_g, argmax P) (FedHydra, Eqs. 17 to 19). With
        `replay`, the batches of earlier epochs are used, too.
        """
        if not self.settings.replay:
            self._batches.clear()
        self._batches += batches
        self.student.train()
        for position in torch.randperm(len(self._batches), generator=self._shuffle).tolist():
            batch = Batch(*(part.to(self._device) for part in self._batches[position]))
            x, P = self._images_and_targets(batch)
            with torch.enable_grad():
                self._sgd.zero_grad()
                losses.student_loss(
                    P, self._student_logits(x), self.settings.hard_weight
                ).backward()
            self._sgd.step()
        self.student.eval()
        with torch.no_grad():
            counts = [tally(b.logits, b.labels, self._student_logits(b.images)) for b in batches]
        self.tallies[epoch] = torch.stack(counts).sum(dim=0)
        self._average_student(epoch)

    def measure_student(self, epoch: int) -> None:
        """Records the student's accuracy after an epoch. Measuring it synchronises with the GPU."""
        self.accuracies[epoch] = self.measure(self.student)

    @torch.no_grad()
    def _average_student(self, epoch: int) -> None:
        """Updates the average of the student's weights, in the last quarter of the epochs."""
        epochs = self.settings.server_epochs
        count = epoch + 1 - (epochs - math.ceil(epochs / 4))
        if count < 1:
            return
        students = self.student.state_dict()
        for name, mean in self.average.state_dict().items():
            if mean.is_floating_point():
                mean.lerp_(students[name], 1 / count)
            else:  # a counter
                mean.copy_(students[name])

    @torch.no_grad()
    def _images_and_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the images and the target logits of one student step.

        If the settings ask for views, new random views of the images are drawn.
        """
        if not self._student_views and self.targets is None:
            return batch.images, batch.logits
        x = self._student_views(batch.images, self.spec, self._view_draws)
        return x, (self.targets or self.aggregate)(self._logits(x), batch.labels)

    def _generated(self, z: Tensor) -> Tensor:
        return computed(self._generator.normalised, z, self.precision)

    def _logits(self, x: Tensor) -> Tensor:
        """Returns the logits of all models, [m, N, C]."""
        return torch.stack([computed(model, x, self.precision) for model in self.models])

    def _student_logits(self, x: Tensor) -> Tensor:
        """Returns the student's logits F_g(x), [N, C]."""
        return computed(self.student, x, self.precision)

    def _new_generator(self, seed: int, *numbers: int) -> None:
        latent, width = self.settings.latent, self.settings.generator_width
        generator = make_generator(self.spec, seed, *numbers, latent=latent, width=width)
        self._generator = generator.to(self._device, non_blocking=True).train()
        self._adam = self._new_adam(generator.parameters())

    def _new_adam(self, parameters: Iterable[Tensor]) -> torch.optim.Adam:
        betas = (self.settings.generator_beta1, 0.999)
        return torch.optim.Adam(parameters, self.settings.generator_lr, betas)


def _lower_loss(first: Batch, second: Batch) -> Batch:
    """Returns the batch with the lower loss, or the first batch if the losses are equal."""
    lower = second.loss < first.loss
    return Batch(*(torch.where(lower, b, a) for a, b in zip(first, second, strict=True)))
