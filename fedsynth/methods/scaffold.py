"""SCAFFOLD: control variates correct client drift (Karimireddy et al. 2020, arXiv 1910.06378,
Algorithm 1 with option II).

The server sends its model x and its control variate c, which `Method.broadcast` copies from the
state. Each client takes K_k steps y ← y − η(g_k(y) − c_k + c), and computes c_k⁺ = c_k − c + (x −
y)/(K_k·η). It sends y and Δc = c_k⁺ − c_k. The server computes x ← x + η_g·mean(y − x) and c ← c +
|S|/N·mean(Δc), where S are the clients whose uploads count.

Three points are not in the paper. K_k differs between clients unless `local_steps` or `equal_steps`
is set. With `weight_decay`, g_k includes the decay. A client whose upload the server rejects keeps
c_k⁺ (line 14), because it does not learn of the rejection. In this case, c is the mean of the c_k
without the rejected Δc_k.

With differential privacy, the weights y are releases. c_k is computed only from the releases, the
server's messages and the public K_k. Sending Δc is therefore post-processing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, Tensors, public, released
from fedsynth.core.method import ClientState
from fedsynth.core.uploads import Named, Rule, check_named
from fedsynth.errors import SettingError
from fedsynth.methods.shared.aggregation import AveragingState, average, momentum_step, trainable
from fedsynth.methods.shared.local import LocalObjective, Trained, TrainsLocally
from fedsynth.models.flat import flatten_named
from fedsynth.training.sgd import Pull
from fedsynth.validation import in_range


@dataclass(frozen=True)
class ControlDown(ModelParameters):
    """SCAFFOLD's request to the clients: the model x and the control variate c. An empty
    mapping means c = 0."""

    control: Tensors = public("sent to clients, never uploaded")


@dataclass(frozen=True)
class ControlUp(ModelParameters):
    """A client's upload in SCAFFOLD: the model y, and the change Δc in the control variate."""

    control_change: Tensors = released()


@dataclass(frozen=True)
class ControlState(AveragingState):
    """The server's state in SCAFFOLD, with the control variate c. An empty mapping means c = 0."""

    control: Tensors = field(default_factory=dict)


def controls_of(
    message: ControlDown, state: ClientState, context: RoundContext
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns a client's control variate c_k and the gradient correction c − c_k."""
    c_k: dict[str, Tensor] = {}
    correction: dict[str, Tensor] = {}
    for name in trainable(context):
        zero = torch.zeros_like(message.parameters[name])
        c_k[name] = state.get(name, zero)  # 0 before the client's first round
        correction[name] = message.control.get(name, zero) - c_k[name]
    return c_k, correction


@dataclass(frozen=True)
class TrainsWithControls(TrainsLocally):
    """Base class of SCAFFOLD and FedDC, whose clients train with control variates.

    The following settings come in addition to those of `TrainsLocally`.

    Args:
        momentum: local SGD's momentum. It must be 0, because option II computes the control variate
            from plain SGD steps.
    """

    request = ControlDown
    upload = ControlUp
    state = ControlState
    adam_refusal = "control variates are computed from plain SGD steps"

    momentum: float = 0.0
    lr: float = in_range(0.01, 1e-12)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum:
            reason = (
                f"must be 0 for {self.name}, got {self.momentum}, because control variates need "
                "plain SGD steps. Set method.momentum=0"
            )
            raise SettingError("method", "momentum", reason)

    def check_request(self, message: ControlDown, context: RoundContext) -> None:
        check_named("control", message.control, dict(context.architecture.named_parameters()))

    def upload_rules(self, exchange: str, client: int, context: RoundContext) -> dict[str, Rule]:
        rule = Named.like(dict(context.architecture.named_parameters()))
        return {**super().upload_rules(exchange, client, context), "control_change": rule}

    def task(
        self, client: int, message: ControlDown, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        x = message.parameters
        c_k, correction = controls_of(message, state, context)
        center, linear = (flatten_named(v, context.architecture) for v in (x, correction))
        corrects = Pull(0.0, center, linear)  # line 10: adds c − c_k to the gradient

        def make_upload(model: nn.Module, trained: Trained) -> tuple[Message, ClientState]:
            new = dict(c_k)  # c_k⁺
            if trained.steps:
                for name, y in model.named_parameters():
                    mean_gradient = (x[name] - y.detach()) / (trained.steps * self.lr)
                    new[name] = mean_gradient - correction[name]  # line 12, option II
            delta = {name: new[name] - c_k[name] for name in c_k}
            return ControlUp(model.state_dict(), trained.weight, delta), new  # lines 13, 14

        return LocalObjective(penalty=corrects, make_upload=make_upload)

    def combine(
        self, state: ControlState, uploads: Mapping[int, ControlUp], context: RoundContext
    ) -> ControlState:
        """Averages the models with equal weights, and computes the control variate."""
        mean = average(uploads, uniform=True)
        control: dict[str, Tensor] = {}
        for name in trainable(context):
            total = torch.zeros_like(mean[name])
            for upload in uploads.values():
                total += upload.control_change[name]
            # line 17: |S|/N · mean Δc
            control[name] = state.control.get(name, 0) + total / context.clients
        return replace(state, parameters=mean, control=control)


@dataclass(frozen=True)
class Scaffold(TrainsWithControls):
    """SCAFFOLD: local training in which control variates correct client drift.

    The following settings come in addition to those of `TrainsWithControls`.

    Args:
        server_lr: η_g, the server's learning rate. It is 1 in the paper's experiments. With η_g =
            1, the first round equals FedAvg's with equal weights, because all control variates are
            zero.

    >>> from fedsynth import FedAvg, ModelSettings, RunSettings, Scaffold, simulate
    >>> def floats(method):
    ...     result = simulate(RunSettings(method, rounds=1, model=ModelSettings("linear")))
    ...     return result.metrics[-1]["upload_floats"]
    >>> floats(FedAvg(local_steps=1)), floats(Scaffold(local_steps=1))  # controls, as many again
    (6500, 13000)
    """

    name = "scaffold"
    summary = "control variates correct the drift of local training"
    reference = "Karimireddy et al. 2020, SCAFFOLD, arXiv 1910.06378"

    server_lr: float = in_range(1.0, 0)

    def combine(
        self, state: ControlState, uploads: Mapping[int, ControlUp], context: RoundContext
    ) -> ControlState:
        averaged = super().combine(state, uploads, context)
        # lines 16, 17: x ← x + η_g·(mean − x)
        moved = momentum_step(state, averaged.parameters, context, lr=self.server_lr)
        return replace(moved, control=averaged.control)
