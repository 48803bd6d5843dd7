"""FedHydra's model stratification (Algorithm 2) and stratified aggregation (Algorithm 3).

They implement Eqs. 1 to 11. The entries u_{k,j} of the matrix U [C, m] (classes by clients) measure
how well client k's model can teach class j. An entry is the relative decrease of the model's loss
while a new generator is trained on the model. The matrix Ū_r weights the clients for each class,
and its rows sum to 1. The matrix Ū_c weights the classes for each client, and its columns sum to 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedsynth.data.images import pixel_constants
from fedsynth.data.registry import DatasetSpec
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.distillation.generator import Generator, descend, make_generator


def pair_losses(
    model: nn.Module,
    spec: DatasetSpec,
    seed: int,
    device: torch.device,
    *,
    steps: int = 30,
    batch: int = 32,
    learning_rate: float = 1e-3,
    latent: int = 100,
    width: int = 64,
    report: Callable[[int, int], None] = lambda completed, total: None,
) -> Tensor:
    """Trains a generator for each class on one model, and returns its losses: [T_G, C].

    L_{k,j} is model k's loss on its generator's images for class j (Algorithm 2, lines 4 to 15).

    All generators begin with the same weights and noise, so that their losses are comparable, also
    between models. The model processes the images of all C generators in one pass.

    Args:
        model: the model in evaluation mode. Its weights are not changed.
        spec: the data set's specification.
        seed: the seed of the generators' weights and noise.
        device: the device of all tensors.
        steps: T_G of Algorithm 2.
        batch, latent, width: the batch size, noise length and width of the generators. The paper
            does not state them.
        learning_rate: Adam's learning rate. The paper has one rate for all generators, 1e-3.
        report: receives the number of finished steps and the total number.
    """
    classes = spec.classes
    losses_TC = torch.zeros(steps, classes, device=device)
    y = torch.arange(classes, device=device).repeat_interleave(batch)
    mean, std = pixel_constants(spec, device)
    generator = make_generator(spec, seed, latent=latent, width=width, running=False)
    stacked = _repeated(generator.to(device), classes)
    adam = torch.optim.Adam(list(stacked.values()), learning_rate)
    draws = torch_generator(seed, "stratification noise", device=device)
    z = torch.randn(batch, latent, generator=draws, device=device)
    for step in range(steps):
        with torch.enable_grad():
            x = ((_pixels(generator, stacked, z) - mean) / std).flatten(0, 1)
            losses_N = F.cross_entropy(model(x), y, reduction="none")
            losses_C = losses_N.view(classes, -1).mean(dim=1)
            descend(losses_C.sum(), adam)
        losses_TC[step] = losses_C.detach()
        report(step + 1, steps)
    return losses_TC


def _repeated(generator: Generator, count: int) -> dict[str, Tensor]:
    """Stacks `count` copies of a generator's parameters, each [count, …]."""
    stacked = {}
    for name, p in generator.named_parameters():
        stacked[name] = p.detach()[None].repeat(count, *[1] * p.dim()).requires_grad_()
    return stacked


def _pixels(generator: Generator, stacked: dict[str, Tensor], z: Tensor) -> Tensor:
    """Returns all generators' images, [P, N, C, H, W], from stacked parameters.

    The generators take turns, because a joint pass with grouped convolutions takes several times as
    long on a CPU.
    """
    images = []
    for values in zip(*map(Tensor.unbind, stacked.values()), strict=True):
        parameters = dict(zip(stacked, values, strict=True))
        images.append(functional_call(generator, parameters, (z,)))
    return torch.stack(images)


def guidance(losses_TCM: Tensor, floor: float = 1e-8) -> Tensor:
    """Scores how well each of the m models can teach each of the C classes: the matrix U [C, m].

    An entry is (max_t − min_t)/min_t over a (class, client) pair's losses (Eqs. 2 and 3).

    Args:
        losses_TCM: the loss of every step, class and client.
        floor: a lower bound on the denominator, because losses can be exactly 0 in float32. The
            paper has no such bound.

    >>> guidance(torch.tensor([[[4.0, 2.0]], [[1.0, 2.0]]]))  # two steps, one class, two clients
    tensor([[3., 0.]])
    """
    lowest = losses_TCM.amin(dim=0)
    return (losses_TCM.amax(dim=0) - lowest) / lowest.clamp_min(floor)


def share_of_clients(u_CM: Tensor) -> Tensor:
    """Divides each row of U [C, m] by its sum, which gives Ū_r (Eqs. 4 and 5).

    A row of zeros becomes uniform.
    """
    total = u_CM.sum(dim=1, keepdim=True)
    return torch.where(
        total > 0, u_CM / total.clamp_min(torch.finfo(u_CM.dtype).tiny), 1 / u_CM.shape[1]
    )


def stratified_weights(u_CM: Tensor, *, in_place: bool = True) -> tuple[Tensor, Tensor]:
    """Computes FedHydra's two matrices of aggregation weights from U.

    The first, Ū_r, weights the clients for each class. The second, Ū_c, weights the classes for
    each client. Both are [C, m].

    The paper states: "We first normalize each row of U … Then, we normalize each column of U" (Sec.
    3.2). In fedsynth, both are in place, so columns are normalised after rows. A class that no
    model teaches easily then counts as much as a class that all models teach easily. In-place
    normalisation also keeps a client's weights from concentrating on a few classes. Otherwise they
    concentrate where a loss falls to near zero, because u is unbounded and then very large.

    Args:
        u_CM: the matrix U.
        in_place: whether columns are normalised after rows. If False, the columns of the original U
            are normalised, as Eq. 6 is printed.

    >>> stratified_weights(torch.tensor([[3.0, 1.0], [0.0, 1.0]]))[0]  # Ū_r
    tensor([[0.7500, 0.2500],
            [0.0000, 1.0000]])
    """
    by_class = share_of_clients(u_CM)
    columns = by_class if in_place else u_CM
    return by_class, share_of_clients(columns.T).T  # Eqs. 6 and 7


def stratified_aggregation(
    logits_MNC: Tensor, labels_N: Tensor, by_class_CM: Tensor, by_client_CM: Tensor
) -> Tensor:
    """Combines all models' logits into the ensemble's logits P, [N, C] (Eqs. 8 to 11).

    P = Σ_k Ū_r[y, k]·(F_k(x) ⊙ Ū_c[:, k]).

    Args:
        logits_MNC: the logits F_k(x) of all models.
        labels_N: the target labels y.
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
    """Combines the models' probabilities instead of their logits. Returns the logarithm, [N, C].

    P is the stratified aggregation of softmax F_k(x). The softmax of log P is P divided by its sum.
    A weight then scales how much a client's vote for a class counts. With logits, a weight scales
    the logit, so that a class of small weight cannot win, however confident the client is.
    """
    mixed = stratified_aggregation(logits_MNC.softmax(dim=2), labels_N, by_class_CM, by_client_CM)
    return mixed.clamp_min(torch.finfo(mixed.dtype).tiny).log()
