"""Trains networks by minibatch SGD on a data set in memory.

Clients and servers use this module. `many_clients.py` trains many clients at once. On a GPU, a step
is recorded once as a CUDA graph and then replayed, so that launching many small kernels from Python
does not slow down training.

An optimiser has two functions, as in optax. `init` creates the optimiser's state, and `update`
changes the weights by a gradient. Both work in place, so that a step can be recorded as a CUDA
graph. The same optimisers update the weights of one or many networks, synthetic images, and the
weights in DP-SGD. A custom optimiser, such as Adam or SGD with a decaying learning rate, is a
frozen dataclass with these two functions, and can be used wherever `MomentumSgd` is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth.mixed_precision import mixed, widened
from fedsynth.models.flat import FlatNetwork
from fedsynth.models.layers import has_batch_norm
from fedsynth.models.on_features import is_softmax_regression, regression_step
from fedsynth.privacy.dpsgd import BeforeStep
from fedsynth.privacy.dpsgd import (
    Optimiser as Optimiser,  # defined there, as privacy imports no higher package
)
from fedsynth.privacy.dpsgd import Penalty as Penalty
from fedsynth.seeding import forked_rng
from fedsynth.training.loop import LoopCheckpointer, State, resumable

WARM_UP = 3


def recorded(
    step: Callable[[Tensor], None], batch: int, state: Sequence[Tensor]
) -> Callable[[Tensor], None]:
    """Records a training step as a CUDA graph, and returns a function that replays it.

    The returned function takes the batch's indices. If the step cannot be recorded, a warning is
    issued, and the returned function calls `step` directly.

    Args:
        step: a function of indices into the dataset in memory. It must use tensors at fixed
            addresses, and must not wait for the device.
        batch: number of indices in a batch.
        state: all tensors that `step` changes. They are restored after the warm-up runs.
    """
    device = state[0].device
    index = torch.zeros(batch, dtype=torch.int64, device=device)
    initial = list(map(torch.clone, state))
    try:
        replay = _record(partial(step, index), device)
    except RuntimeError as error:
        warnings.warn(
            "training is slower without a CUDA graph, and recording the graph failed: "
            f"{str(error).splitlines()[0]}",
            RuntimeWarning,
            stacklevel=2,
        )
        replay = partial(step, index)
    for tensor, old in zip(state, initial, strict=True):
        tensor.copy_(old)

    def replay_on(indices: Tensor) -> None:
        index.copy_(indices)
        replay()

    return replay_on


def _record(step: Callable[[], None], device: torch.device) -> Callable[[], object]:
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        stream = torch.cuda.Stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                step()
        finally:  # a failed capture may leave its own stream in place
            torch.cuda.set_stream(current)

    def replay() -> None:
        with torch.cuda.device(device):
            graph.replay()

    return replay


@dataclass(frozen=True)
class MomentumSgd:
    """SGD with heavy-ball momentum, as in `torch.optim.SGD`.

    The update is v ← μ·v + g + λ·w, followed by w ← w − η·v.

    Args:
        learning_rate: η.
        momentum: μ. With 0, the update is plain gradient descent.
        weight_decay: λ.

    >>> import torch
    >>> w, sgd = torch.zeros(2), MomentumSgd(learning_rate=0.5, momentum=0.5)
    >>> state = sgd.init(w)
    >>> for _ in range(2):
    ...     sgd.update(w, torch.ones(2), state)
    >>> w
    tensor([-1.2500, -1.2500])
    """

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def init(self, w: Tensor) -> tuple[Tensor, ...]:
        """Creates the optimiser's state (v,), with a velocity v of zero."""
        return (torch.zeros_like(w),)

    def update(self, w: Tensor, gradient: Tensor, state: tuple[Tensor, ...]) -> None:
        """Updates the weights `w` and the velocity in place."""
        (velocity,) = state
        velocity.mul_(self.momentum).add_(gradient)
        if self.weight_decay:
            velocity.add_(w, alpha=self.weight_decay)
        w.add_(velocity, alpha=-self.learning_rate)


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015), as in `torch.optim.Adam`.

    Args:
        learning_rate: η.
        beta1, beta2: the decay rates for the means of the gradient and its square.
        weight_decay: λ. λ·w is added to the gradient.

    >>> import torch
    >>> w, adam = torch.zeros(2), Adam(learning_rate=0.5)
    >>> adam.update(w, torch.tensor([3.0, -0.1]), adam.init(w))
    >>> w  # the first step of each weight has the length η
    tensor([-0.5000,  0.5000])
    """

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0

    def init(self, w: Tensor) -> tuple[Tensor, ...]:
        """Creates the optimiser's state: the first and second moment, and the step count."""
        return torch.zeros_like(w), torch.zeros_like(w), torch.zeros_like(w[..., :1])

    def update(self, w: Tensor, gradient: Tensor, state: tuple[Tensor, ...]) -> None:
        """Updates the weights `w` and the state in place."""
        first, second, steps = state
        if self.weight_decay:
            gradient = gradient.add(w, alpha=self.weight_decay)
        steps.add_(1)
        first.lerp_(gradient, 1 - self.beta1)
        second.lerp_(gradient.square(), 1 - self.beta2)
        root = (second / (1 - self.beta2**steps)).sqrt_().add_(1e-8)
        w.sub_(first / (1 - self.beta1**steps) / root, alpha=self.learning_rate)


WORTH_RECORDING = 20  # steps
FETCHED = 2**18  # scalars of the images that are looked up at a time
LookUp = Callable[[Tensor], Tensor]  # returns the images or the labels at indices
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class SgdSettings:
    """The settings of minibatch SGD on shuffled examples.

    Args:
        epochs: number of passes over the data.
        batch: number of examples in a step.
        optimiser: the optimiser that updates the weights.
        radius: if given, each step ends with a projection onto the ball ‖w − w_start‖₂ ≤ radius
            (FedDM, Eqs. 3 and 23).
        steps: number of steps. If given, it replaces `epochs`.
        drop_last: whether an epoch leaves out its last batch if it is not full, unless it is the
            only one.
    """

    epochs: int
    batch: int
    optimiser: Optimiser
    radius: float | None = None
    steps: int | None = None
    drop_last: bool = False

    def steps_per_epoch(self, examples: int) -> int:
        """Returns the number of batches in one pass over the examples."""
        if self.drop_last:
            return max(1, examples // self.batch)
        return -(-examples // self.batch)

    def total_steps(self, examples: int) -> int:
        """Returns the number of training steps, or 0 if there are no examples."""
        if not examples:
            return 0
        if self.steps is not None:
            return self.steps
        return self.epochs * self.steps_per_epoch(examples)


@dataclass(frozen=True)
class Pull:
    """A linear and quadratic penalty on a network's weights w, as in FedProx, FedDyn and SCAFFOLD.

    The penalty is ⟨linear, w⟩ + weight/2·‖w − center‖².

    `train_on` adds the penalty's gradient in closed form, without automatic differentiation. DP-SGD
    calls the object like any other `Penalty`. The vectors have shape [P], as returned by `flatten`.
    """

    weight: float
    center: Tensor
    linear: Tensor

    def __call__(self, network: nn.Module) -> Tensor:
        flat = torch.cat([p.reshape(-1) for p in network.parameters()])
        return torch.dot(self.linear, flat) + self.weight / 2 * (flat - self.center).square().sum()

    def add_gradient(self, grad: Tensor, flat: Tensor) -> None:
        """Adds the penalty's gradient, linear + weight·(w − center), to `grad` in place."""
        grad.add_(self.linear).add_(flat - self.center, alpha=self.weight)


@dataclass(frozen=True)
class Objective:
    """The objective function of a network's training, by default the mean cross-entropy.

    Args:
        loss: a function that replaces the cross-entropy. It takes the network in training, images
            [M, C, H, W] and labels [M], and returns a scalar or the loss of each example [M]. It
            must not wait for the device.
        penalty: a function that takes the network in training and returns a scalar, which is added
            to the loss of each step.
        before_step: a function that is called with the network in training before each step, for
            example to train another network.
        state: the objects that the functions change, by name, as in `fedsynth.training.loop.State`.
            They are saved in checkpoints. The mapping is empty if the functions change nothing.
    """

    loss: Loss | None = None
    penalty: Penalty | None = None
    before_step: BeforeStep | None = None
    state: State = field(default_factory=dict)

    @property
    def recordable(self) -> bool:
        """True if steps may be recorded as a CUDA graph."""
        pulled = self.penalty is None or isinstance(self.penalty, Pull)
        return pulled and not self.state and self.before_step is None

    @property
    def plain(self) -> bool:
        """True for the cross-entropy, a penalty that is a `Pull` or None, and no `before_step`.

        Many networks with such an objective can be trained together (`many_clients.py`).
        """
        pulled = self.penalty is None or isinstance(self.penalty, Pull)
        return pulled and self.loss is None and self.before_step is None


CROSS_ENTROPY = Objective()


def train_on(
    model: nn.Module,
    images: LookUp,
    labels_N: Tensor,
    settings: SgdSettings,
    generator: torch.Generator,
    objective: Objective = CROSS_ENTROPY,
    report: Callable[[int, int], None] = lambda completed, total: None,
    keeper: LoopCheckpointer | None = None,
    name: str = "train",
    precision: torch.dtype = torch.float32,
) -> None:
    """Trains a network in place by minibatch SGD.

    The network is left in training mode. Dropout layers draw masks that depend only on
    the seed of `generator`.
    Without examples, it is not changed. On a GPU, steps with full batches are recorded as a CUDA
    graph where possible.

    Args:
        model: the network.
        images: a function that returns the normalised images [M, C, H, W] at the given indices [M],
            which are int64 and on the device of the labels.
        labels_N: all examples' labels.
        settings: the settings of SGD.
        generator: a CPU generator that shuffles each epoch's examples.
        objective: a function that replaces the cross-entropy, a penalty, and their state.
        report: called with the number of finished steps and the total number of steps.
        keeper: saves checkpoints between epochs. An interrupted training resumes from the last
            checkpoint with the same random draws.
        name: the training's name in checkpoints, unique within a round.
        precision: the precision of the logits for the cross-entropy (`fedsynth.mixed_precision`). A
            `loss` chooses its precision itself.
    """
    if not len(labels_N):
        return
    network = FlatNetwork(model, requires_grad=True)
    moments = settings.optimiser.init(network.flat)
    step = make_step(network, moments, settings, objective, precision)
    labels = labels_N.__getitem__
    per_epoch = settings.steps_per_epoch(len(labels_N))
    total_steps = settings.total_steps(len(labels_N))
    seed = generator.initial_seed()
    changed: dict[str, Any] = {"weights": network.flat, "shuffle": generator, **objective.state}
    for number, tensor in enumerate(moments):
        changed[f"optimiser{number}"] = tensor
    for key, buffer in model.named_buffers():
        changed[f"buffer.{key}"] = buffer
    full: Callable[[Tensor], None] | None = None
    full_steps = total_steps * (len(labels_N) // settings.batch) // per_epoch
    if objective.recordable and labels_N.is_cuda and full_steps >= WORTH_RECORDING:
        written = [network.flat, *moments, network.grad, *model.buffers()]
        with forked_rng(seed, "recording", device=labels_N.device):
            full = recorded(lambda i: step(images(i), labels(i)), settings.batch, written)
    for epoch in resumable(
        -(-total_steps // per_epoch),
        changed,
        keeper=keeper,
        name=name,
        report=lambda completed: report(min(total_steps, completed * per_epoch), total_steps),
    ):
        order = torch.randperm(len(labels_N), generator=generator)
        order = order.to(labels_N.device, non_blocking=True)
        steps = min(per_epoch, total_steps - epoch * per_epoch)
        parts = list(order.split(settings.batch)[:steps])
        if len(parts[-1]) == 1 and has_batch_norm(model):
            # the mean loss is the same, and batch norm gets the two values that it needs
            parts = [part.repeat(2) if len(part) == 1 else part for part in parts]
        # dropout layers draw from the global generator
        with forked_rng(seed, "layers", epoch, device=labels_N.device):
            while full is not None and parts and len(parts[0]) == settings.batch:
                full(parts.pop(0))  # leaves at most one part, the last
            for x, y in fetched(images, labels, parts):
                step(x, y)


def fetched(
    images: LookUp, labels: LookUp, parts: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields images and labels for each index batch.

    Several batches are looked up at once, because indexing and normalising a hundred small images
    takes no longer than ten.

    >>> x = torch.arange(6.0)
    >>> parts = torch.tensor([3, 1, 0, 5, 2]).split(2)
    >>> [batch.tolist() for batch, _ in fetched(x.__getitem__, x.__getitem__, parts)]
    [[3.0, 1.0], [0.0, 5.0], [2.0]]
    """
    at_once = 1  # the first look-up shows the size of an image
    first = 0
    while first < len(parts):
        chunk = parts[first : first + at_once]
        indices = torch.cat(list(chunk))
        x, y = images(indices), labels(indices)
        sizes = list(map(len, chunk))
        yield from zip(x.split(sizes), y.split(sizes), strict=True)
        first += len(chunk)
        at_once = max(1, FETCHED // max(1, x[: sizes[0]].numel()))


def make_step(
    network: FlatNetwork,
    state: tuple[Tensor, ...],
    settings: SgdSettings,
    objective: Objective = CROSS_ENTROPY,
    precision: torch.dtype = torch.float32,
) -> Callable[[Tensor, Tensor], None]:
    """Returns a function that performs one training step on a batch of images and labels.

    A step changes `network` and the optimiser's `state` in place. `train_on` explains the
    arguments.
    """
    flat, grad = network.flat, network.grad
    radius = settings.radius
    start = flat if radius is None else flat.clone()
    penalty = objective.penalty
    pull = penalty if isinstance(penalty, Pull) else None
    loss = objective.loss or partial(_cross_entropy, precision=precision)
    closed = objective.loss is None and penalty is pull and is_softmax_regression(network.module)

    def differentiate(x: Tensor, y: Tensor) -> None:
        grad.zero_()
        value = loss(network.module, x, y).mean()
        if penalty is not None and pull is None:
            value = value + penalty(network.module)
        value.backward()

    def differentiate_regression(x: Tensor, y: Tensor) -> None:
        layer: nn.Linear = network.module.classifier  # type: ignore[assignment]
        # into the layer's `grad`s, which are views of `network.grad`
        regression_step(layer, network.module.embed(x), y)  # type: ignore[operator]

    gradient = differentiate_regression if closed else differentiate

    def step(x: Tensor, y: Tensor) -> None:
        if objective.before_step is not None:
            objective.before_step(network.module)
        gradient(x, y)
        with torch.no_grad():
            if pull is not None:
                pull.add_gradient(grad, flat)
            settings.optimiser.update(flat, grad, state)
            if radius is not None:
                project_to_ball(flat, start, radius)

    return step


def _cross_entropy(
    network: nn.Module, x_MCHW: Tensor, labels_M: Tensor, precision: torch.dtype
) -> Tensor:
    with mixed(x_MCHW.device, precision):
        logits = network(x_MCHW)
    return nn.functional.cross_entropy(widened(logits), labels_M)


def project_to_ball(flat_P: Tensor, center: Tensor, radius: float) -> None:
    """Projects weights onto a ball around `center`, in place: ‖flat − center‖₂ ≤ radius.

    The function does not wait for the device.
    """
    offset = flat_P - center
    scale = (radius / torch.linalg.vector_norm(offset).clamp_min(1e-12)).clamp_max(1.0)
    torch.addcmul(center, offset, scale, out=flat_P)
