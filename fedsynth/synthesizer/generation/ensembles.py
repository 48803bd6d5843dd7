"""Ensembles of client models as a teacher: FedHydra's stratification and aggregation (arXiv, Eqs. 2
to 11), averages, batch-norm statistics.

u_{k,j} measures how well client k's model can teach class j: the relative decrease of its loss
while a new generator is trained on it. U is [C, m] (classes by clients); Ū_r weights clients for
each class (rows sum to 1), Ū_c weights classes for each client (columns sum to 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from fedsynth.data.registry import DatasetSpec
from fedsynth.models.batch_statistics import batch_statistics
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.generation.generators import make_generator

PAIRS = 64  # generators whose weights, gradients and images are in memory at a time
Aggregate = Callable[[Tensor, Tensor], Tensor]
"""(logits of all models [m, N, C], target labels [N]) -> logits of the ensemble [N, C]."""


def guidance(losses_TCM: Tensor, floor: float) -> Tensor:
    """Returns U [C, m] = (max_t − min_t)/min_t of each pair's loss series (Eqs. 2 and 3).

    Args:
        losses_TCM: loss of every step, class and client.
        floor: lower bound of the denominator, because a minimum near zero would outweigh all
            others.
    """
    least = losses_TCM.amin(dim=0)
    most = losses_TCM.amax(dim=0)
    return (most - least) / least.clamp_min(floor)


def share_of_clients(u_CM: Tensor) -> Tensor:
    """Returns Ū_r: each row divided by its sum (Eqs. 4 and 5); a row of zeros becomes uniform."""
    total = u_CM.sum(dim=1, keepdim=True)
    return torch.where(
        total > 0, u_CM / total.clamp_min(torch.finfo(u_CM.dtype).tiny), 1 / u_CM.shape[1]
    )


def share_of_classes(u_CM: Tensor) -> Tensor:
    """Returns each column divided by its sum (Eqs. 6 and 7); a column of zeros becomes uniform."""
    return share_of_clients(u_CM.T).T


def stratified_weights(u_CM: Tensor, *, in_place: bool = True) -> tuple[Tensor, Tensor]:
    """Returns Ū_r and Ū_c, each [C, m].

    "We first normalize each row of U … Then, we normalize each column of U" (Sec. 3.2): in place,
    so columns are normalised after rows. A class that no model teaches easily then counts as much
    as one that all teach easily. It also prevents that a client's weights concentrate on a few
    classes where a loss falls to near zero, so that u, which is unbounded, is very large.

    Args:
        in_place: False: columns of the raw U, as Eq. 6 is printed.
    """
    by_class = share_of_clients(u_CM)
    return by_class, share_of_classes(by_class if in_place else u_CM)


def stratified_aggregation(
    logits_MNC: Tensor, labels_N: Tensor, by_class_CM: Tensor, by_client_CM: Tensor
) -> Tensor:
    """Returns P = Σ_k Ū_r[y, k]·(F_k(x) ⊙ Ū_c[:, k]) (Eqs. 8 to 11), [N, C].

    Args:
        by_class_CM: Ū_r.
        by_client_CM: Ū_c.
    """
    return torch.einsum("mnc,cm,nm->nc", logits_MNC, by_client_CM, by_class_CM[labels_N])


def stratified_probabilities(
    logits_MNC: Tensor, labels_N: Tensor, by_class_CM: Tensor, by_client_CM: Tensor
) -> Tensor:
    """Returns log P, [N, C], with P the stratified aggregation of the models' probabilities softmax
    F_k(x) instead of their logits. The softmax of log P is P divided by its sum.

    A weight then scales how much a client's vote for a class counts. With logits it scales the
    logit, so that a class of small weight cannot win, however confident the client is.
    """
    mixed = stratified_aggregation(logits_MNC.softmax(dim=2), labels_N, by_class_CM, by_client_CM)
    return mixed.clamp_min(torch.finfo(mixed.dtype).tiny).log()


def average_of_logits(logits_MNC: Tensor, labels_N: Tensor) -> Tensor:
    """Returns the averaging ensemble of DENSE and FedDF, [N, C]."""
    return logits_MNC.mean(dim=0)


@dataclass(frozen=True)
class Stratification:
    """The settings of model stratification, which measures U.

    Args:
        steps: T_G of Algorithm 2.
        batch, latent, width: of the generators; the paper gives none.
        learning_rate: Adam's. The paper has one rate for all generators, 1e-3; at ten times that,
            losses fall far enough within 30 steps to distinguish clients (docs/results.md).
        floor: see `guidance`; the paper has no lower bound.
    """

    steps: int = 30
    batch: int = 32
    learning_rate: float = 1e-2
    latent: int = 100
    width: int = 64
    floor: float = 1e-3

    def measure(
        self,
        models: Sequence[nn.Module],
        spec: DatasetSpec,
        seed: int,
        device: torch.device,
        *,
        batched: bool | None = None,
    ) -> Tensor:
        """Returns U [C, m] (Algorithm 2).

        The generators of up to PAIRS pairs are trained together, from the same weights and the same
        noise, so that their loss series are comparable; each model processes the images of its own
        C generators in one pass.

        Args:
            models: in evaluation mode; their weights are not changed.
            batched: run the generators' passes as one; None: on a GPU. (A CPU's grouped
                convolutions take several times as long as a loop.)
        """
        batched = device.type == "cuda" if batched is None else batched
        at_once = max(1, PAIRS // spec.classes)
        series = [
            self._losses(models[first : first + at_once], spec, seed, device, batched)
            for first in range(0, len(models), at_once)
        ]
        return guidance(torch.cat(series, dim=2), self.floor)

    def _losses(
        self,
        models: Sequence[nn.Module],
        spec: DatasetSpec,
        seed: int,
        device: torch.device,
        batched: bool,
    ) -> Tensor:
        """Returns losses of every step, [T_G, C, m], of some clients."""
        classes = spec.classes
        m = len(models)
        generator = make_generator(
            spec, seed, latent=self.latent, width=self.width, running=False
        ).to(device)
        stacked = {
            name: p.detach()[None].repeat(m * classes, *[1] * p.dim()).requires_grad_()
            for name, p in generator.named_parameters()
        }
        z = torch.randn(
            self.batch,
            self.latent,
            generator=torch_generator(seed, "stratification noise", device=device),
            device=device,
        )
        labels = torch.arange(classes, device=device).repeat_interleave(self.batch)
        adam = torch.optim.Adam(list(stacked.values()), self.learning_rate)
        normalised = _Normalised(generator)
        series = []
        for _ in range(self.steps):
            with torch.enable_grad():
                images = _all_images(normalised, stacked, z, batched)
                per_model = images.reshape(m, classes * self.batch, *spec.image_shape)
                losses = torch.stack(
                    [
                        F.cross_entropy(model(x), labels, reduction="none")
                        .view(classes, self.batch)
                        .mean(dim=1)
                        for model, x in zip(models, per_model, strict=True)
                    ],
                    dim=1,
                )
                adam.zero_grad()
                losses.sum().backward()
            adam.step()
            series.append(losses.detach())
        return torch.stack(series)


def _all_images(
    normalised: nn.Module, stacked: dict[str, Tensor], z: Tensor, batched: bool
) -> Tensor:
    """Returns the images of all generators, whose parameters are stacked, [P, N, C, H, W]."""

    def one(parameters: dict[str, Tensor]) -> Tensor:
        images: Tensor = functional_call(
            normalised, {f"inner.{name}": value for name, value in parameters.items()}, (z,)
        )
        return images

    if batched:
        together: Tensor = vmap(one)(stacked)
        return together
    apart = zip(*[value.unbind() for value in stacked.values()], strict=True)
    return torch.stack([one(dict(zip(stacked, values, strict=True))) for values in apart])


class _Normalised(nn.Module):
    """A generator whose `forward` is `normalised`, for functional calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, z: Tensor) -> Tensor:
        images: Tensor = self.inner.normalised(z)  # type: ignore[operator]
        return images


def has_statistics(model: nn.Module) -> bool:
    """Returns whether a model has batch-norm layers with running statistics."""
    return any(_with_statistics(layer) for layer in model.modules())


def _with_statistics(layer: nn.Module) -> bool:
    return isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is not None


@contextmanager
def batch_norm_matching(models: Sequence[nn.Module]) -> Iterator[Callable[[], Tensor]]:
    """Registers hooks on all batch-norm layers and removes them at the end. Yields a function to
    call after the models' passes, which returns

    L_BN = 1/m Σ_k Σ_l ‖μ_l(x) − μ_{k,l}‖ + ‖σ²_l(x) − σ²_{k,l}‖ (DENSE, Eq. 3; FedHydra, Eq. 14)

    with μ_l(x), σ²_l(x) the batch's statistics at the layer's input and μ_{k,l}, σ²_{k,l} its
    running ones; zero without such layers. (FedHydra's text describes the layers as the
    generator's; they are the client models', as in DENSE.)
    """
    terms: list[Tensor] = []

    def look(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        mean, variance = batch_statistics(inputs[0])
        apart = (mean - layer.running_mean, variance - layer.running_var)  # type: ignore[operator]
        terms.append(sum((torch.linalg.vector_norm(a) for a in apart), mean.new_zeros(())))

    def loss() -> Tensor:
        total = torch.stack(terms).sum() / len(models) if terms else torch.zeros(())
        terms.clear()
        return total

    handles = [
        layer.register_forward_pre_hook(look)
        for model in models
        for layer in model.modules()
        if _with_statistics(layer)
    ]
    try:
        yield loss
    finally:
        for handle in handles:
            handle.remove()
