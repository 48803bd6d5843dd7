"""Training of a group of clients' models on the clients' data.

A method describes what it adds to a client's loss as a `LocalObjective`. `train_openly` trains by
SGD, without differential privacy. `train_privately` trains by DP-SGD.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import torch
from torch import nn

from fedsynth.core.client import ExactClientView, PrivateClientView, chunk
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters
from fedsynth.core.method import ClientState
from fedsynth.models.flat import FlatNetwork
from fedsynth.privacy.dpsgd import DpSgdSettings, ExampleLoss, Penalty
from fedsynth.seeding import torch_generator
from fedsynth.training import sgd
from fedsynth.training.loop import TRAINED, State
from fedsynth.training.many_clients import Learner, train_together
from fedsynth.version import __version__

# The name of the release plan of the trained model.
MODEL = "model"
# Number of images that are loaded at a time to compute a digest.
DIGEST_IMAGES = 4096
# Number of parts of a client's training after which progress is reported.
PARTS = 100


@dataclass(frozen=True)
class Trained:
    """Facts about one client's finished training, from which the client's upload is made.

    Args:
        weight: the weight of the client's upload in the average.
        steps: the number of steps that the client took.
    """

    weight: float
    steps: int


def plain_upload(model: nn.Module, trained: Trained) -> tuple[Message, ClientState]:
    """Makes the upload of a client that sends only its trained model, with an empty state."""
    return ModelParameters(model.state_dict(), trained.weight), {}


@dataclass(frozen=True)
class LocalObjective:
    """The additions of a method to a client's training on the cross-entropy in one round.

    An objective also makes the client's upload.

    Args:
        before_step: a function that is called with the network in training before each step, for
            example to train a generator. It must not use the client's data.
        penalty: a function that takes the network in training and returns a scalar, which is added
            to the loss of each step. It must not use the client's data.
        loss: a function that replaces the cross-entropy. It takes the network, images x [N, C, H,
            W] and labels y [N], and returns the loss of each example [N]. With differential
            privacy, the loss of an example must not depend on other examples.
        state: the objects that `before_step`, `penalty` and `loss` change, by name, including
            random generators. They are saved in checkpoints, and steps are then not recorded as
            CUDA graphs. The mapping is empty if the functions change nothing.
        make_upload: a function that takes the trained model and its `Trained`, and returns the
            upload and the client's new state. It must not keep the network, which may train for
            another client next.

    >>> from fedsynth import ModelSettings, RunSettings, TrainsLocally, simulate
    >>> class Ridge(TrainsLocally):
    ...     name = "ridge"
    ...     def task(self, client, message, state, context):
    ...         squares = lambda model: model.classifier.weight.square().sum()
    ...         return LocalObjective(penalty=lambda model: 0.01 * squares(model))
    >>> result = simulate(RunSettings(Ridge(lr=0.1), rounds=1, model=ModelSettings("linear")))
    >>> result.accuracy > 0.5
    True
    """

    before_step: sgd.BeforeStep | None = None
    penalty: Penalty | None = None
    loss: ExampleLoss | None = None
    state: State = field(default_factory=dict)
    make_upload: Callable[[nn.Module, Trained], tuple[Message, ClientState]] = plain_upload

    @property
    def plain(self) -> bool:
        """Returns whether many clients with this objective can be trained together.

        This is the case if the loss is the cross-entropy with at most a `Pull` as the penalty.
        """
        pulled = self.penalty is None or isinstance(self.penalty, sgd.Pull)
        return self.loss is None and self.before_step is None and pulled

    @property
    def mean_loss(self) -> sgd.Objective | None:
        """Returns a function that computes the mean of `loss` over a batch. Returns None for the
        cross-entropy."""
        loss = self.loss
        if loss is None:
            return None
        return lambda network, x, y: loss(network, x, y).mean()


def train_openly(
    models: Sequence[nn.Module],
    clients: ExactClientView,
    objectives: Sequence[LocalObjective],
    settings: Sequence[sgd.SgdSettings],
    context: RoundContext,
    *,
    together: bool,
    network: FlatNetwork | None = None,
) -> list[Trained]:
    """Trains the clients' models in place, without differential privacy.

    Args:
        models, objectives, settings: one entry for each client of the group.
        clients: the clients and their data.
        context: the context of the round.
        together: whether to train all models at once if the objectives allow it. Otherwise they are
            trained one after another.
        network: the flat network of the only model, or None.
    """
    learners = []
    trained = []
    for position, client in enumerate(clients.ids):
        examples = clients.examples(position)
        generator = torch_generator(context.seed, "local training", context.round, client)
        learner_sgd, penalty = settings[position], objectives[position].penalty
        learners.append(Learner(models[position], examples, learner_sgd, generator, penalty))
        trained.append(Trained(float(len(examples)), sgd.steps_of(learner_sgd, len(examples))))
    if together and all(objective.plain for objective in objectives):
        # memory decides how many clients share a step; this must not change a client's precision
        context = replace(context, precision=torch.float32)
        if len(models) > 1:
            report = partial(context.report, "local training")
            train_together(learners, clients.images, clients.labels, report)
            return trained
    for position, (learner, objective) in enumerate(zip(learners, objectives, strict=True)):
        single = clients.select(position)
        _train_one(learner, single, objective, context, position, len(models), network)
    return trained


def train_privately(
    models: Sequence[nn.Module],
    clients: PrivateClientView,
    objectives: Sequence[LocalObjective],
    optimiser: sgd.Optimiser,
    context: RoundContext,
) -> list[Trained]:
    """Trains the models in place by DP-SGD.

    Each client takes the number of steps for which it was charged.
    """
    trained = []
    for client, model, objective in zip(clients.split(), models, objectives, strict=True):
        plan = client.plan(MODEL)
        settings = DpSgdSettings(
            optimiser,
            plan.sample_rate * context.nominal_size,
            objective.penalty,
            objective.loss,
            objective.before_step,
        )
        client.fit(client.mechanisms(MODEL), model, settings)
        trained.append(Trained(1.0, plan.steps))
        context.report("local training", len(trained), len(models))
    return trained


def _train_one(
    learner: Learner,
    client: ExactClientView,
    objective: LocalObjective,
    context: RoundContext,
    position: int,
    clients: int,
    network: FlatNetwork | None,
) -> None:
    """Trains the model of one client.

    Progress is reported as a share of the group's work, to which all clients contribute equally.
    """
    examples = learner.examples
    keeper = None
    name = f"train-{client.ids[0]}"
    if objective.plain or objective.state:
        keeper = context.keeper
        # the digest does not cover penalties of other types
        digestible = objective.plain and type(objective.penalty) in (sgd.Pull, type(None))
        if keeper.shares_trainings and digestible:
            name = TRAINED + training_digest(learner, client, context.device, context.precision)

    def report(completed: int, total: int) -> None:
        share = PARTS * completed // total
        context.report("local training", PARTS * position + share, PARTS * clients)

    sgd.train_on(
        network or learner.model,
        lambda indices: client.images(examples[indices]),
        client.labels(examples),
        learner.settings,
        learner.generator,
        report,
        penalty=objective.penalty,
        objective=objective.mean_loss,
        before_step=objective.before_step,
        state=objective.state,
        keeper=keeper,
        name=name,
        precision=context.precision,
    )
    report(1, 1)


def training_digest(
    learner: Learner, client: ExactClientView, device: torch.device, precision: torch.dtype
) -> str:
    """Computes a hash of everything that determines the result of a client's plain training.

    The digest covers the initial model, the data and their order, the optimiser, the penalty, the
    hardware and the versions of the software. Equal digests mean equal results for the networks of
    this
    package, whose `repr` and values define them completely, as long as the version of the package
    is the same.
    """
    digest = hashlib.blake2b(digest_size=16)
    model = learner.model
    pull = learner.penalty if isinstance(learner.penalty, sgd.Pull) else None
    hardware = str(device.type)
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    description = (
        type(model).__qualname__,
        repr(model),
        repr(learner.settings),
        repr(pull and pull.weight),
        __version__,
        torch.__version__,
        hardware,
        torch.backends.cpu.get_cpu_capability(),
        str(torch.get_num_threads()),
        torch.get_float32_matmul_precision(),
        str(precision),
    )
    digest.update("\n".join(description).encode())
    tensors = [*model.parameters(), *model.buffers()]
    if pull is not None:
        tensors += [pull.center, pull.linear]
    tensors += [learner.generator.get_state(), client.labels(learner.examples)]
    images = map(client.images, learner.examples.split(DIGEST_IMAGES))
    for tensor in chain(tensors, images):
        digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def mean_loss(model: nn.Module, client: ExactClientView) -> float:
    """Computes a model's mean cross-entropy on all examples of a group that contains one client.

    The result is 0 if the client has no examples.
    """
    examples = client.examples(0)
    total = 0.0
    with torch.no_grad():
        for indices in examples.split(chunk(examples.device)):
            logits, labels = model(client.images(indices)), client.labels(indices)
            total += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
    return total / max(1, len(examples))
