"""Training of a group of clients' models on their own data: one client's additions to the loss
(`LocalObjective`), open training by SGD, private training by DP-SGD."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from fedsynth.core.client import ExactClientView, PrivateClientView, chunk
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters
from fedsynth.core.method import Memory
from fedsynth.privacy.dpsgd import DpSgdSettings, ExampleLoss, Penalty
from fedsynth.seeding import torch_generator
from fedsynth.training.loop import State
from fedsynth.training.loop_checkpoint import NullCheckpointer
from fedsynth.training.many_clients import Learner, train_together
from fedsynth.training.optimisers import Optimiser
from fedsynth.training.sgd import BeforeStep, Pull, SgdSettings, steps_of, train_on
from fedsynth.version import __version__

MODEL = "model"
"""The name of the trained model's plan."""
SHARES = 100
"""Parts of a client's training in which progress is reported."""
HASHED = 4096
"""Images that are loaded at a time for a digest."""


@dataclass(frozen=True)
class Trained:
    """The result of a client's training: the upload's weight, and the number of steps."""

    weight: float
    steps: int


def plain_upload(model: nn.Module, trained: Trained) -> tuple[Message, Memory]:
    """Returns the model as the upload, and an empty memory."""
    return ModelParameters(model.state_dict(), trained.weight), {}


@dataclass(frozen=True)
class LocalObjective:
    """One client's additions in a round to plain SGD on its cross-entropy, and the handling of the
    result.

    Args:
        before_step: called with the network in training before each step, for example to train a
            generator; sees no data of the client.
        penalty: (the network in training) -> a scalar added to each step's loss; sees no data of
            the client.
        loss: (network, x [N, C, H, W], y [N]) -> the loss of each example [N], in place of its
            cross-entropy; with differential privacy it must not depend on other examples.
        state: all that `before_step`, `penalty` and `loss` change, random generators included, by
            name: it is saved with the training, and its steps are not recorded. {}: nothing.
        finish: (the trained model, its `Trained`) -> upload and memory.

    >>> from fedsynth import ModelSettings, RunSettings, TrainsLocally, simulate
    >>> class Ridge(TrainsLocally):
    ...     name = "ridge"
    ...     def task(self, client, message, memory, context):
    ...         return LocalObjective(penalty=lambda model: 0.01 * model.classifier.weight.square().sum())
    >>> result = simulate(RunSettings(Ridge(lr=0.1), rounds=1, model=ModelSettings("linear")))
    >>> result.accuracy > 0.5
    True
    """

    before_step: BeforeStep | None = None
    penalty: Penalty | None = None
    loss: ExampleLoss | None = None
    state: State = field(default_factory=dict)
    finish: Callable[[nn.Module, Trained], tuple[Message, Memory]] = plain_upload

    @property
    def plain(self) -> bool:
        """Returns whether training is SGD on the cross-entropy plus at most a `Pull`, so that many
        clients can be trained in one pass."""
        pulled = self.penalty is None or isinstance(self.penalty, Pull)
        return self.loss is None and self.before_step is None and pulled


def train_openly(
    models: Sequence[nn.Module],
    clients: ExactClientView,
    tasks: Sequence[LocalObjective],
    settings: Sequence[SgdSettings],
    context: RoundContext,
    *,
    together: bool,
) -> list[Trained]:
    """Trains the clients' models in place.

    Args:
        models, tasks, settings: of each client of the group.
        together: train in one pass if the tasks allow it; else one after another.
    """
    learners = [
        Learner(
            model,
            clients.examples(position),
            how,
            torch_generator(context.seed, "local training", context.round, client),
            task.penalty,
        )
        for position, (client, model, task, how) in enumerate(
            zip(clients.ids, models, tasks, settings, strict=True)
        )
    ]
    at_once = together and all(task.plain for task in tasks)
    # memory decides how many clients share a step; this must not change a client's precision
    precision = torch.float32 if at_once else context.precision
    if at_once and len(models) > 1:
        train_together(
            learners, clients.images, clients.labels, partial(context.report, "local training")
        )
    else:
        for position, (learner, task) in enumerate(zip(learners, tasks, strict=True)):
            report = partial(_report, context, position, len(models))
            _train_alone(learner, clients, task, context, report, clients.ids[position], precision)
            context.report("local training", SHARES * (position + 1), SHARES * len(models))
    sizes = [len(learner.examples) for learner in learners]
    return [Trained(float(n), steps_of(how, n)) for n, how in zip(sizes, settings, strict=True)]


def train_privately(
    models: Sequence[nn.Module],
    clients: PrivateClientView,
    tasks: Sequence[LocalObjective],
    optimiser: Optimiser,
    context: RoundContext,
) -> list[Trained]:
    """Trains the models in place by DP-SGD, for the steps that each client was charged for."""
    trained = []
    for position, (model, task) in enumerate(zip(models, tasks, strict=True)):
        alone = clients.alone(position)
        plan = alone.plan(MODEL)
        settings = DpSgdSettings(optimiser, plan.sample_rate * context.nominal_size)
        additions = (task.penalty, task.loss, task.before_step)
        alone.fit(alone.series(MODEL), model, plan.steps, settings, *additions)
        trained.append(Trained(1.0, plan.steps))
        context.report("local training", position + 1, len(models))
    return trained


def _report(context: RoundContext, before: int, clients: int, done: int, total: int) -> None:
    """Reports one client's progress as a share of the group's, in which all count equally."""
    share = SHARES * done // total
    context.report("local training", SHARES * before + share, SHARES * clients)


def _train_alone(
    learner: Learner,
    clients: ExactClientView,
    task: LocalObjective,
    context: RoundContext,
    report: Callable[[int, int], None],
    client: int,
    precision: torch.dtype,
) -> None:
    mine = learner.examples
    loss = task.loss
    keeper = context.keeper if task.plain or task.state else NullCheckpointer()
    name = f"train-{client}"
    # a digest covers the data, and penalties of this type only
    covered = task.plain and (task.penalty is None or type(task.penalty) is Pull)
    if keeper.shared is not None and covered and len(mine):
        keeper = keeper.shared
        name = f"train-{training_digest(learner, clients, context.device, precision)}"
    train_on(
        learner.model,
        lambda where: clients.images(mine[where]),
        clients.labels(mine),
        learner.settings,
        learner.generator,
        report,
        penalty=task.penalty,
        objective=None if loss is None else lambda network, x, y: loss(network, x, y).mean(),
        before_step=task.before_step,
        state=task.state,
        keeper=keeper,
        name=name,
        precision=precision,
    )


def training_digest(
    learner: Learner, clients: ExactClientView, device: torch.device, precision: torch.dtype
) -> str:
    """Returns a digest of a plain training: initial model, data, order, optimiser, penalty,
    hardware and versions.

    Equal digests have equal results for networks of this package, which `repr` and values define
    fully, and for one version of it.
    """
    found = hashlib.blake2b(digest_size=16)
    model = learner.model
    pull = learner.penalty if isinstance(learner.penalty, Pull) else None  # the task is `plain`
    words = (
        f"{type(model).__module__}.{type(model).__qualname__}",
        repr(model),
        repr(learner.settings),
        repr(None if pull is None else pull.weight),
        __version__,
        torch.__version__,
        torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type),
        torch.backends.cpu.get_cpu_capability(),
        str(torch.get_num_threads()),
        torch.get_float32_matmul_precision(),
        str(precision),
    )
    found.update("\n".join(words).encode())
    tensors = [
        *model.parameters(),
        *model.buffers(),
        *([] if pull is None else [pull.center, pull.linear]),
        learner.generator.get_state(),
        clients.labels(learner.examples),
        *(clients.images(some) for some in learner.examples.split(HASHED)),
    ]
    for tensor in tensors:
        found.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def mean_loss(model: nn.Module, clients: ExactClientView, position: int) -> float:
    """Returns a model's mean cross-entropy on all examples of one client; 0 if it has none."""
    mine = clients.examples(position)
    total = 0.0
    with torch.no_grad():
        for part in mine.split(chunk(mine.device)):
            total += float(
                nn.functional.cross_entropy(
                    model(clients.images(part)), clients.labels(part), reduction="sum"
                )
            )
    return total / max(1, len(mine))
