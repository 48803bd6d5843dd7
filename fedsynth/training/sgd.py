"""SGD on images that are resident on the device: the server's on synthetic sets, and clients'.

(`many_clients.py` trains many clients in one pass.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fedsynth.keeping import StepKeeper
from fedsynth.mixed_precision import mixed, widened
from fedsynth.models.batch_norm import has_batch_norm
from fedsynth.models.flat import FlatNetwork, load_flat
from fedsynth.training.cuda_graphs import recorded
from fedsynth.training.loop import resumable
from fedsynth.training.optimisers import Optimiser
from fedsynth.training.softmax_regression import is_softmax_regression, regression_step

WORTH_RECORDING = 20  # steps
FETCHED = 2**18  # numbers of images that are looked up at a time
Penalty = Callable[[nn.Module], Tensor]
Objective = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class SgdSettings:
    """Training in shuffled minibatches.

    Args:
        epochs: passes over the data.
        batch: examples of a step.
        optimiser: what a step does with its gradient.
        radius: project onto the ball ‖w − w_start‖₂ ≤ radius after every step (FedDM, Eqs. 3 and
            23); None: no projection.
        steps: stop after so many, however many passes over the data they are; None: after
            `epochs` passes.
    """

    epochs: int
    batch: int
    optimiser: Optimiser
    radius: float | None = None
    steps: int | None = None


@dataclass(frozen=True)
class Pull:
    """⟨linear, w⟩ + weight/2·‖w − center‖², a penalty that needs no graph: FedProx's, FedDyn's and
    SCAFFOLD's. All [P], as `flatten` gives them.

    `train_on` adds the gradient in closed form; as a `Penalty` it is called like any other
    (DP-SGD).
    """

    weight: float
    center: Tensor
    linear: Tensor

    def __call__(self, network: nn.Module) -> Tensor:
        flat = torch.cat([p.reshape(-1) for p in network.parameters()])
        return torch.dot(self.linear, flat) + self.weight / 2 * (flat - self.center).square().sum()

    def add_gradient(self, grad: Tensor, flat: Tensor) -> None:
        """Adds linear + weight·(w − center) to `grad`, in place."""
        grad.add_(self.linear).add_(flat - self.center, alpha=self.weight)


def train_on(
    model: nn.Module,
    images: Callable[[Tensor], Tensor],
    labels_N: Tensor,
    settings: SgdSettings,
    generator: torch.Generator,
    report: Callable[[int, int], None] = lambda done, total: None,
    penalty: Penalty | None = None,
    objective: Objective | None = None,
    stateful: bool = False,
    keeper: StepKeeper | None = None,
    name: str = "train",
    precision: torch.dtype = torch.float32,
) -> None:
    """Trains `model` in place; on a GPU full batches are steps of a CUDA graph.

    Args:
        images: normalised images [M, C, H, W] of the given positions [M] (int64, on the labels'
            device).
        labels_N: labels of all examples.
        generator: a CPU generator; shuffles every epoch.
        penalty: (the network in training) -> a scalar that is added to each step's loss. It may
            draw or keep state, so that its steps are not recorded, but for a `Pull`'s.
        objective: in place of the mean cross-entropy: (the network in training, images [M, C, H,
            W], labels [M]) -> scalar; waits for nothing.
        stateful: the objective draws or keeps state: its steps are not recorded either.
        keeper: keeps weights and optimiser under `name` between epochs, and has them if this
            training was cut off before: then it goes on from there, with the same draws. Penalty
            and objective must be without state.
        name: of this training among all of a round.
        precision: of the network's pass for the cross-entropy (`fedsynth.mixed_precision`); an
            objective says its own.
    """
    if not len(labels_N):
        return
    network = FlatNetwork(model, requires_grad=True)
    network.module.train()
    state = settings.optimiser.init(network.flat)
    step = make_step(network, state, settings, penalty, objective, precision)
    labels = labels_N.__getitem__
    each = batches_of(len(labels_N), settings.batch)
    wanted = steps_of(settings, len(labels_N))
    full: Callable[[Tensor], None] | None = None
    recordable = (penalty is None or isinstance(penalty, Pull)) and not stateful
    whole_batches = settings.epochs * (len(labels_N) // settings.batch)
    changed = {
        "weights": network.flat,
        **{f"optimiser{k}": tensor for k, tensor in enumerate(state)},
        **{f"buffer.{key}": tensor for key, tensor in network.module.named_buffers()},
        "shuffle": generator,
    }
    if recordable and labels_N.is_cuda and whole_batches >= WORTH_RECORDING:
        written = [network.flat, *state, network.grad, *network.module.buffers()]
        full = _recorded(
            lambda where: step(images(where), labels(where)),
            settings.batch,
            written,
            labels_N.device,
        )
    # a last piece of one example goes in twice: the same mean loss, and batch norm has the two
    # values that it needs
    normalises = has_batch_norm(network.module)
    for epoch in resumable(
        -(-wanted // each),
        changed,
        keeper=keeper,
        name=name,
        report=lambda done: report(min(wanted, done * each), wanted),
    ):
        order = torch.randperm(len(labels_N), generator=generator)
        order = order.to(labels_N.device, non_blocking=True)
        parts = [
            part.repeat(2) if len(part) == 1 and normalises else part
            for part in order.split(settings.batch)[: wanted - epoch * each]
        ]
        if full is not None:
            whole = [part for part in parts if len(part) == settings.batch]
            for part in whole:
                full(part)
            parts = parts[len(whole) :]  # at most the last one
        for x, y in fetched(images, labels, parts):
            step(x, y)
    load_flat(model, network.flat)
    for key, buffer in model.named_buffers():
        buffer.copy_(network.module.get_buffer(key))


def fetched(
    images: Callable[[Tensor], Tensor], labels: Callable[[Tensor], Tensor], parts: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels of each batch of indices, looked up for some batches at once: of ten small
    images, indexing and normalising take as long as of a hundred.

    >>> x = torch.arange(6.0)
    >>> parts = torch.tensor([3, 1, 0, 5, 2]).split(2)
    >>> [batch.tolist() for batch, _ in fetched(x.__getitem__, x.__getitem__, parts)]
    [[3.0, 1.0], [0.0, 5.0], [2.0]]
    """
    at_once = 1  # how large an image is shows the first look-up
    first = 0
    while first < len(parts):
        some = parts[first : first + at_once]
        where = torch.cat(list(some))
        x, y = images(where), labels(where)
        sizes = [len(part) for part in some]
        yield from zip(x.split(sizes), y.split(sizes), strict=True)
        first += len(some)
        at_once = max(1, FETCHED // max(1, x[: sizes[0]].numel()))


def make_step(
    network: FlatNetwork,
    state: tuple[Tensor, ...],
    settings: SgdSettings,
    penalty: Penalty | None = None,
    objective: Objective | None = None,
    precision: torch.dtype = torch.float32,
) -> Callable[[Tensor, Tensor], None]:
    """A step on a batch's images and labels, which changes `network` and the optimiser's `state` in
    place.

    Arguments are as of `train_on`.
    """
    flat = network.flat
    grad = network.grad
    start = flat.clone()
    pull = penalty if isinstance(penalty, Pull) else None
    value_of = objective or partial(_cross_entropy, precision=precision)
    closed = objective is None and penalty is pull and is_softmax_regression(network.module)

    def differentiate(x: Tensor, y: Tensor) -> None:
        grad.zero_()
        module = network.module
        value = value_of(module, x, y)
        if penalty is not None and pull is None:
            value = value + penalty(module)
        value.backward()

    def differentiate_regression(x: Tensor, y: Tensor) -> None:
        layer: nn.Linear = network.module.classifier  # type: ignore[assignment]
        # into the layer's `grad`s, which are views of `network.grad`
        regression_step(layer, network.module.embed(x), y)  # type: ignore[operator]

    gradient = differentiate_regression if closed else differentiate

    def step(x: Tensor, y: Tensor) -> None:
        gradient(x, y)
        with torch.no_grad():
            if pull is not None:
                pull.add_gradient(grad, flat)
            settings.optimiser.update(flat, grad, state)
            if settings.radius is not None:
                project_to_ball(flat, start, settings.radius)

    return step


def _cross_entropy(
    network: nn.Module, x_MCHW: Tensor, labels_M: Tensor, precision: torch.dtype
) -> Tensor:
    with mixed(x_MCHW.device, precision):
        logits = network(x_MCHW)
    return nn.functional.cross_entropy(widened(logits), labels_M)


def batches_of(examples: int, batch: int) -> int:
    """Batches of a pass over so many examples, of which the last may not be full."""
    return -(-examples // batch)


def steps_of(settings: SgdSettings, examples: int) -> int:
    """Steps in all, with so many examples; none without any."""
    if not examples:
        return 0
    if settings.steps is not None:
        return settings.steps
    return settings.epochs * batches_of(examples, settings.batch)


def _recorded(
    step: Callable[[Tensor], None], batch: int, state: Sequence[Tensor], device: torch.device
) -> Callable[[Tensor], None]:
    """`step` for full batches as a CUDA graph over one index buffer."""
    index = torch.zeros(batch, dtype=torch.int64, device=device)
    replay = recorded(lambda: step(index), state)

    def full(where: Tensor) -> None:
        index.copy_(where)
        replay()

    return full


def project_to_ball(flat_P: Tensor, center: Tensor, radius: float) -> None:
    """Moves `flat_P`, in place, to the nearest point with ‖flat − center‖₂ ≤ radius; does not wait
    for the device."""
    offset = flat_P - center
    scale = (radius / torch.linalg.vector_norm(offset).clamp_min(1e-12)).clamp_max(1.0)
    torch.addcmul(center, offset, scale, out=flat_P)
