"""Trains many clients' models at once, which is faster for small dense networks.

All clients' weights are the rows of one matrix, and each step updates all rows. A small dense
network's step spends most of its time in Python and kernel launches. Training a hundred clients
together therefore takes little longer than training a few.

The result equals that of `train_on` for each client, up to rounding, because each client sees its
examples in the same order and takes the same number of steps. The clients are sorted by their
number of steps, so that the clients in training are always the first rows. When only a few clients
remain, they are trained one after another. A batch that is not full is padded with examples of
weight zero.

`train_on` is used where training together would not be faster: for convolutions, which would become
grouped convolutions with separate weights for each client; for batches so large that arithmetic
takes longer than Python; and for few clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedsynth.data.registry import DatasetSpec
from fedsynth.models.flat import FlatNetwork, flatten, replicator
from fedsynth.models.on_features import (
    input_size,
    is_softmax_regression,
    regression_gradients,
)
from fedsynth.models.registry import parameter_count
from fedsynth.privacy.row_products import PaddedLinear
from fedsynth.training import sgd

FEW = 4  # with fewer clients, a pass costs more than it saves; 2 for softmax regression
LARGE_BATCH = 2**15  # scalars in a batch above which arithmetic outweighs Python
BLOCK = 32  # steps whose batches are laid out at a time
# Number of parameter copies in memory while a client trains: the weights, the gradient, the
# velocity, a penalty, intermediate values and the upload.
COPIES = 15
CACHED_BYTES = 2**26  # of the learners that a CPU trains at once, as its caches are small

ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU)
DENSE = (nn.Linear, PaddedLinear, nn.Flatten, nn.Identity, nn.Sequential, *ACTIVATIONS)


@dataclass(frozen=True)
class Learner:
    """One client's network, examples and training settings.

    Args:
        model: the network, which is trained in place.
        examples: indices [N] of the client's examples in the dataset in memory.
        settings: the settings of SGD.
        generator: a CPU generator that shuffles the examples.
        penalty: a term added to each step's loss.
    """

    model: nn.Module
    examples: Tensor
    settings: sgd.SgdSettings
    generator: torch.Generator
    penalty: sgd.Penalty | None = None


def trains_together(model: nn.Module) -> bool:
    """Returns True if copies of a network can be trained together without changing the results.

    The network must consist of dense layers that neither mix examples nor draw random numbers. A
    layer class from outside torch must declare it by `dense = True`, because its `forward` method
    could do anything.
    """
    for layer in model.modules():
        if type(layer) not in DENSE and not getattr(type(layer), "dense", False):
            return False
    dtypes = {p.dtype for p in model.parameters()}
    return dtypes == {torch.float32} and next(model.buffers(), None) is None


def learner_bytes(model: nn.Module, batch: int, spec: DatasetSpec) -> int | None:
    """Estimates the bytes of memory for each additional learner in joint training.

    Returns None if separate training is as fast, or if only separate training has the correct
    result.

    Args:
        model: the network of each learner.
        batch: number of images in a batch.
        spec: the specification of the images.
    """
    scalars = batch * input_size(model, spec)
    if scalars > LARGE_BATCH or not trains_together(model):
        return None
    return 4 * (COPIES * parameter_count(model) + 3 * scalars + 8 * BLOCK * batch)


def train_together(
    learners: Sequence[Learner],
    images: sgd.LookUp,
    labels: sgd.LookUp,
    report: Callable[[int, int], None] = lambda completed, total: None,
) -> list[Tensor]:
    """Trains copies of all learners' models at once, and returns each learner's weights [P].

    The result is that of `train_on` for each learner, up to rounding. The models do not change.

    Args:
        learners: at least one learner. Learners may have the same model. All models must have the
            same architecture, must be on the same device, and must satisfy `trains_together`. Their
            settings may differ only in epochs and steps, and have no radius.
        images, labels: functions that return the normalised images [M, C, H, W] and the labels [M]
            of the examples at the given indices [M].
        report: called with the number of finished steps and the total number of steps, summed over
            all learners.

    Raises:
        ValueError: a penalty is not a `Pull`.
    """
    common = learners[0].settings
    queues = sorted(map(_Queue, learners), key=lambda queue: -queue.steps)
    steps_K = np.array([queue.steps for queue in queues])  # descending
    starts = {id(model): flatten(model) for model in {learner.model for learner in learners}}
    flat_KP = torch.stack([starts[id(queue.learner.model)] for queue in queues])
    pulls = _stacked_pulls([queue.learner.penalty for queue in queues], flat_KP)
    state = common.optimiser.init(flat_KP)
    completed, total = 0, int(steps_K.sum())
    step = 0
    few = min(FEW, 2) if is_softmax_regression(learners[0].model) else FEW
    # the first `active` learners have steps left
    while (active := int(np.count_nonzero(steps_K > step))) >= few:
        which_SAB, share_SAB = _lay_out(queues[:active], BLOCK)
        looked_up = sgd.fetched(images, labels, list(which_SAB.flatten(1)))
        for share_AB, (x, y) in zip(share_SAB, looked_up, strict=True):
            running = int(np.count_nonzero(steps_K > step))
            w = flat_KP[:running]
            x_ABCHW = x.view(*share_AB.shape, *x.shape[1:])[:running]
            labels_AB = y.view(share_AB.shape)[:running]
            grad = _gradients(learners[0].model, w, x_ABCHW, labels_AB, share_AB[:running])
            if pulls is not None:
                weight, center, linear = (part[:running] for part in pulls)
                grad += linear + weight * (w - center)
            common.optimiser.update(w, grad, tuple(rows[:running] for rows in state))
            completed += running
            step += 1
        report(completed, total)
    weights = {}
    for queue, flat, *rows in zip(queues, flat_KP, *state, strict=True):
        finished = _finish(queue, flat, tuple(rows), images, labels)
        weights[id(queue.learner)] = finished.clone()  # which keeps no other row in memory
    report(total, total)
    return [weights[id(learner)] for learner in learners]


class _Queue:
    """The batches that a learner has not yet trained on."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        batch = learner.settings.batch
        self.per_epoch = learner.settings.steps_per_epoch(len(learner.examples))
        self.steps = self._undrawn = learner.settings.total_steps(len(learner.examples))
        self._drawn = learner.examples.new_empty(0, batch)

    def take(self, limit: int) -> Tensor:
        """Removes the next batches from the queue, at most `limit`.

        Returns their example indices [S, B]. A batch that is not full is padded with −1.
        """
        examples = self.learner.examples
        size = self.learner.settings.batch
        while len(self._drawn) < limit and self._undrawn:
            order = torch.randperm(len(examples), generator=self.learner.generator)
            order = order.to(examples.device, non_blocking=True)
            padded = nn.functional.pad(examples[order], (0, -len(examples) % size), value=-1)
            batches = padded.view(-1, size)[: min(self.per_epoch, self._undrawn)]
            self._undrawn -= len(batches)
            self._drawn = torch.cat([self._drawn, batches]) if len(self._drawn) else batches
        next_batches = self._drawn[:limit]
        self._drawn = self._drawn[limit:]
        return next_batches


def _lay_out(queues: Sequence[_Queue], steps: int) -> tuple[Tensor, Tensor]:
    """Takes all learners' next batches, for joint training.

    Returns the example indices [S, A, B], and each example's weight in its batch's mean. The weight
    is 0 for padding, and for a learner without a batch in a step.
    """
    padded = nn.utils.rnn.pad_sequence([queue.take(steps) for queue in queues], padding_value=-1)
    present = padded >= 0
    share = present / present.sum(dim=2, keepdim=True).clamp_min(1)
    padded = torch.where(present, padded, padded[:1, :, :1])  # pads with the learner's examples
    return padded, share


def _finish(
    queue: _Queue, flat: Tensor, state: tuple[Tensor, ...], images: sgd.LookUp, labels: sgd.LookUp
) -> Tensor:
    """Trains a learner for its remaining steps, and returns its weights [P]."""
    learner = queue.learner
    remaining = queue.take(queue.steps)
    if not len(remaining):
        return flat
    network = FlatNetwork(replicator(learner.model)(flat), requires_grad=True)
    objective = sgd.Objective(penalty=learner.penalty)
    step = sgd.make_step(network, state, learner.settings, objective)
    size = learner.settings.batch
    # the size of an epoch's last batch, which may not be full
    last = min(size, len(learner.examples) - size * (queue.per_epoch - 1))
    parts = []
    for number, batch in enumerate(remaining, start=queue.steps - len(remaining) + 1):
        parts.append(batch[: size if number % queue.per_epoch else last])
    for x, y in sgd.fetched(images, labels, parts):
        step(x, y)
    return network.flat


def _stacked_pulls(
    penalties: Sequence[sgd.Penalty | None], flat_KP: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Stacks the terms of the learners' penalties. Each penalty must be a `Pull` or None.

    Returns the weights [K, 1], the centers [K, P] and the linear parts [K, P]. Returns None if no
    learner has a penalty.
    """
    if all(penalty is None for penalty in penalties):
        return None
    weights_K1 = flat_KP.new_zeros(len(flat_KP), 1)
    centers_KP, linear_KP = torch.zeros_like(flat_KP), torch.zeros_like(flat_KP)
    for number, penalty in enumerate(penalties):
        if isinstance(penalty, sgd.Pull):
            weights_K1[number] = penalty.weight
            centers_KP[number] = penalty.center
            linear_KP[number] = penalty.linear
        elif penalty is not None:
            raise ValueError(
                "a learner's penalty is neither None nor a Pull. Use train_on for other penalties"
            )
    return weights_K1, centers_KP, linear_KP


def _gradients(
    network: nn.Module, flat_AP: Tensor, x_ABCHW: Tensor, labels_AB: Tensor, share_AB: Tensor
) -> Tensor:
    """Computes the gradient of each learner's mean cross-entropy with respect to its weights, [A,
    P].
    """
    if is_softmax_regression(network):
        classes: int = network.classifier.out_features  # type: ignore[assignment,union-attr]
        x_MD = network.embed(x_ABCHW.flatten(0, 1))  # type: ignore[operator]
        x_ABD = x_MD.unflatten(0, x_ABCHW.shape[:2])
        return regression_gradients(flat_AP, x_ABD, labels_AB, share_AB, classes)
    named = dict(network.named_parameters())
    sizes = list(map(Tensor.numel, named.values()))

    def logits(flat_P: Tensor, x_BCHW: Tensor) -> Tensor:
        weights = {}
        for (name, p), part in zip(named.items(), flat_P.split(sizes), strict=True):
            weights[name] = part.view(p.shape)
        return functional_call(network, weights, (x_BCHW,))

    with torch.enable_grad():
        weights_AP = flat_AP.detach().requires_grad_()
        outputs = vmap(logits)(weights_AP, x_ABCHW).flatten(0, 1)
        losses = nn.functional.cross_entropy(outputs, labels_AB.flatten(), reduction="none")
        return torch.autograd.grad(losses @ share_AB.flatten(), weights_AP)[0]
