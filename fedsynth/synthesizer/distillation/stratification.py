"""FedHydra's model stratification (Algorithm 2) and stratified aggregation (Algorithm 3): Eqs. 2 to
11.

u_{k,j} measures how well client k's model can teach class j: the relative decrease of its loss
while a new generator is trained on it. U is [C, m] (classes by clients); Ū_r weights clients for
each class (rows sum to 1), Ū_c weights classes for each client (columns sum to 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from fedsynth.data.images import pixel_constants
from fedsynth.data.registry import DatasetSpec
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.distillation.generator import Generator, descend, make_generator
from fedsynth.training.loop import State

PAIRS = 64
"""Generators whose weights, gradients and images are in memory at a time."""


def pair_losses(
    models: Sequence[nn.Module],
    spec: DatasetSpec,
    seed: int,
    device: torch.device,
    *,
    steps: int = 30,
    batch: int = 32,
    learning_rate: float = 1e-2,
    latent: int = 100,
    width: int = 64,
    batched: bool | None = None,
    loop: Callable[[str, int, State], Iterable[int]] = lambda name, steps, state: range(steps),
) -> Tensor:
    """Returns L_{k,j}, the losses of model k on images of its generator for class j, at every step
    of the generator's training, [T_G, C, m] (Algorithm 2, lines 4 to 15).

    All generators begin with the same weights and noise, so that their losses are comparable. Those
    of up to PAIRS pairs are trained together; each model processes the images of its own C
    generators in one pass.

    Args:
        models: in evaluation mode; their weights are not changed.
        steps: T_G of Algorithm 2.
        batch, latent, width: of the generators; the paper gives none.
        learning_rate: Adam's. The paper has one rate for all generators, 1e-3; at ten times that,
            losses fall far enough within 30 steps to distinguish clients (docs/results.md).
        batched: run the generators' passes as one; None: on a GPU. (A CPU's grouped convolutions
            take several times as long as a loop.)
        loop: (name, steps, what changes) -> 0, 1, …: `RoundContext.server_loop`, for checkpoints.
    """
    classes = spec.classes
    if batched is None:
        batched = device.type == "cuda"
    at_once = max(1, PAIRS // classes)
    losses_TCM = torch.zeros(steps, classes, len(models), device=device)
    y = torch.arange(classes, device=device).repeat_interleave(batch)
    mean, std = pixel_constants(spec, device)
    groups = ceil(len(models) / at_once)
    for group in loop("stratification", groups, {"losses": losses_TCM}):
        members = slice(at_once * group, at_once * (group + 1))
        m = len(models[members])
        generator = make_generator(spec, seed, latent=latent, width=width, running=False)
        stacked = _repeated(generator.to(device), m * classes)
        adam = torch.optim.Adam(list(stacked.values()), learning_rate)
        draws = torch_generator(seed, "stratification noise", device=device)
        z = torch.randn(batch, latent, generator=draws, device=device)
        for step in range(steps):
            with torch.enable_grad():
                pixels = _pixels(generator, stacked, z, batched)
                images = ((pixels - mean) / std).reshape(m, classes * batch, *spec.image_shape)
                losses = []
                for model, x in zip(models[members], images, strict=True):
                    losses_N = F.cross_entropy(model(x), y, reduction="none")
                    losses.append(losses_N.view(classes, -1).mean(dim=1))
                losses_CM = torch.stack(losses, dim=1)
                descend(losses_CM.sum(), adam)
            losses_TCM[step, :, members] = losses_CM.detach()
    return losses_TCM


def _repeated(generator: Generator, count: int) -> dict[str, Tensor]:
    """Returns the parameters of `count` generators that begin alike, each [count, …]."""
    stacked = {}
    for name, p in generator.named_parameters():
        stacked[name] = p.detach()[None].repeat(count, *[1] * p.dim()).requires_grad_()
    return stacked


def _pixels(generator: Generator, stacked: dict[str, Tensor], z: Tensor, batched: bool) -> Tensor:
    """Returns the images of all generators, whose parameters are stacked, [P, N, C, H, W]."""

    def pixels(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(generator, parameters, (z,))

    if batched:
        return vmap(pixels)(stacked)
    generators = zip(*[value.unbind() for value in stacked.values()], strict=True)
    return torch.stack([pixels(dict(zip(stacked, values, strict=True))) for values in generators])


def guidance(losses_TCM: Tensor, floor: float = 1e-3) -> Tensor:
    """Returns U [C, m] = (max_t − min_t)/min_t of each pair's losses (Eqs. 2 and 3).

    Args:
        losses_TCM: loss of every step, class and client.
        floor: lower bound of the denominator, because a minimum near zero would outweigh all
            others; the paper has none.

    >>> guidance(torch.tensor([[[4.0, 2.0]], [[1.0, 2.0]]]))  # two steps, one class, two clients
    tensor([[3., 0.]])
    """
    lowest = losses_TCM.amin(dim=0)
    return (losses_TCM.amax(dim=0) - lowest) / lowest.clamp_min(floor)


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

    >>> stratified_weights(torch.tensor([[3.0, 1.0], [0.0, 1.0]]))[0]  # Ū_r
    tensor([[0.7500, 0.2500],
            [0.0000, 1.0000]])
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

    >>> logits, label = torch.ones(2, 1, 2), torch.tensor([0])
    >>> weights = torch.tensor([[0.8, 0.2], [0.5, 0.5]])
    >>> stratified_aggregation(logits, label, weights, weights)
    tensor([[0.6800, 0.5000]])
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
