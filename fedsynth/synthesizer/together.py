"""Local training of many clients in one stream of steps: their weights are rows of one matrix, and each step trains all of them.

A step's cost for a small dense network is that of its Python and its kernel launches, so that a hundred clients at once take little longer
than one. The result is each client's own `train_on`, but for rounding: the same orders of examples, the same steps. Clients with fewer
batches leave the pass earlier; a batch that is not full is filled up with examples of weight zero.

Networks with convolutions are trained one after another: with weights of their own for every client these become grouped convolutions, which
gain little on a CPU or lose (`benchmarks/local_training.py`). Batch norm, dropout and other buffers would mix clients, or draw or keep state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedsynth.models.flat import flatten, load_flat
from fedsynth.synthesizer.training import Penalty, Pull, SgdSettings, steps_of

COPIES = 8  # of a network's parameters while a client trains: weights, gradient, velocity, their updates, the upload


@dataclass(frozen=True)
class Learner:
    """One client's training: `model` is trained in place on the examples `where` (indices [N] into the resident data), in orders that
    `generator`, a CPU generator, draws."""

    model: nn.Module
    where: Tensor
    settings: SgdSettings
    generator: torch.Generator
    penalty: Penalty | None = None


def trains_together(model: nn.Module) -> bool:
    """Whether many networks of this kind are trained faster in one pass, and to the same result: dense layers only."""
    layers = [layer for layer in model.modules() if next(layer.parameters(recurse=False), None) is not None]
    dropout = any(isinstance(layer, nn.modules.dropout._DropoutNd) for layer in model.modules())
    return all(isinstance(layer, nn.Linear) for layer in layers) and not dropout and next(model.buffers(), None) is None


def learner_bytes(model: nn.Module, batch: int, scalars: int) -> int:
    """Memory that one more learner takes in a pass, with batches of so many images of `scalars` numbers."""
    return 4 * (COPIES * sum(p.numel() for p in model.parameters()) + 2 * batch * scalars)


def train_together(
    learners: Sequence[Learner],
    images: Callable[[Tensor], Tensor],
    labels: Callable[[Tensor], Tensor],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Trains the models of all learners in place, as `train_on` would one after another.

    Args:
        learners: at least one, with models of one architecture, for which `trains_together`, on one device.
        images, labels: normalised images [M, C, H, W] and labels [M] of the given indices [M].
        report: (passes done, all passes) of the learner with the most.

    Raises:
        ValueError: settings differ in more than epochs and steps, or have a radius; a penalty is no `Pull`.
    """
    common, pulls = learners[0].settings, [_pull(learner.penalty) for learner in learners]
    if common.radius is not None or any(
        replace(one.settings, epochs=common.epochs, steps=common.steps) != common for one in learners
    ):
        raise ValueError("learners in one pass share batch, learning rate, momentum and weight decay, and have no radius")
    flat_KP = torch.stack([flatten(learner.model) for learner in learners])
    velocity_KP = torch.zeros_like(flat_KP)
    each = [-(-len(learner.where) // common.batch) for learner in learners]  # batches of a pass over all examples
    wanted = [steps_of(learner.settings, n) for learner, n in zip(learners, each, strict=True)]
    passes = max((-(-steps // n) for steps, n in zip(wanted, each, strict=True) if n), default=0)
    for epoch in range(passes):
        left = [max(0, min(n, steps - epoch * n)) for n, steps in zip(each, wanted, strict=True)]
        active = sorted((k for k in range(len(learners)) if left[k]), key=lambda k: -left[k])
        rows = torch.tensor(active, device=flat_KP.device)
        which_ATB, share_ATB = _schedule([learners[k] for k in active], [left[k] for k in active], common.batch)
        flat, velocity, pull = flat_KP[rows], velocity_KP[rows], _joined([pulls[k] for k in active])
        for step in range(which_ATB.shape[1]):
            now = bisect_left(active, -step, key=lambda k: -left[k])  # so many, the first, have a batch yet
            which, w = which_ATB[:now, step], flat[:now]
            x = images(which.flatten())
            grad = _gradients(
                learners[0].model, w, x.view(*which.shape, *x.shape[1:]), labels(which.flatten()), share_ATB[:now, step]
            )
            if pull is not None:
                weight, center, linear = (part[:now] for part in pull)
                grad += linear + weight * (w - center)
            w.sub_(velocity[:now].mul_(common.momentum).add_(grad).add_(w, alpha=common.weight_decay), alpha=common.learning_rate)
        flat_KP[rows], velocity_KP[rows] = flat, velocity
        report(epoch + 1, passes)
    for learner, row in zip(learners, flat_KP, strict=True):
        load_flat(learner.model, row)


def _pull(penalty: Penalty | None) -> Pull | None:
    if penalty is None or isinstance(penalty, Pull):
        return penalty
    raise ValueError("learners in one pass take no penalty but a Pull")


def _schedule(learners: Sequence[Learner], batches: Sequence[int], size: int) -> tuple[Tensor, Tensor]:
    """Of a pass: the examples of each learner's batches, [A, T, B], and each example's share in its batch's mean (0: a filler, or no batch)."""
    orders = [torch.randperm(len(one.where), generator=one.generator).to(one.where.device) for one in learners]
    chosen = [one.where[order[: n * size]] for one, order, n in zip(learners, orders, batches, strict=True)]
    padded = nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=-1)
    padded = nn.functional.pad(padded, (0, -padded.shape[1] % size), value=-1)
    there = padded >= 0
    which = torch.where(there, padded, padded[:, :1])  # fillers are the learner's own
    there_ATB = there.view(len(learners), -1, size)
    share = there_ATB / there_ATB.sum(dim=2, keepdim=True).clamp_min(1)
    return which.view(there_ATB.shape), share


def _joined(pulls: Sequence[Pull | None]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Weights [A, 1], centers and linear parts [A, P] of all learners' pulls; None if nobody has one."""
    some = next((pull for pull in pulls if pull is not None), None)
    if some is None:
        return None
    none = Pull(0.0, torch.zeros_like(some.center), torch.zeros_like(some.linear))
    all_pulls = [pull or none for pull in pulls]
    weights = torch.tensor([[pull.weight] for pull in all_pulls], device=some.center.device, dtype=some.center.dtype)
    return weights, torch.stack([pull.center for pull in all_pulls]), torch.stack([pull.linear for pull in all_pulls])


def _gradients(network: nn.Module, flat_AP: Tensor, x_ABCHW: Tensor, labels_M: Tensor, share_AB: Tensor) -> Tensor:
    """The gradient of each learner's mean cross-entropy with respect to its own row, [A, P]."""
    named = dict(network.named_parameters())
    sizes, shapes = [p.numel() for p in named.values()], [p.shape for p in named.values()]

    def logits(flat_P: Tensor, x_BCHW: Tensor) -> Tensor:
        parts = zip(named, flat_P.split(sizes), shapes, strict=True)
        made: Tensor = functional_call(network, {name: part.view(shape) for name, part, shape in parts}, (x_BCHW,))
        return made

    with torch.enable_grad():
        weights_AP = flat_AP.detach().requires_grad_()
        made = vmap(logits)(weights_AP, x_ABCHW).flatten(0, 1)
        losses = nn.functional.cross_entropy(made, labels_M, reduction="none")
        return torch.autograd.grad(losses @ share_AB.flatten(), weights_AP)[0]
