"""FedGKD: the average of the latest global models teaches the clients in local training (Yao et
al. 2021, arXiv 2107.00051).

The server keeps the last M global models, and sends w_t together with their average w̄. Each client
minimises CE + γ/2·KL(p(x; w̄) ‖ p(x; w)) on its own examples.

An example's loss depends only on the example and on released models, so DP-SGD clips and charges it
like the cross-entropy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, Tensors, public
from fedsynth.core.method import ClientState
from fedsynth.core.uploads import check_named
from fedsynth.methods.shared.aggregation import AveragingState, average
from fedsynth.methods.shared.local import LocalObjective, TrainsLocally
from fedsynth.validation import in_range


@dataclass(frozen=True)
class TeacherDown(ModelParameters):
    """FedGKD's request to the clients: the model w_t, and the average of the last M models."""

    teacher: Tensors = public("sent to clients, never uploaded")


@dataclass(frozen=True)
class FedGKD(TrainsLocally):
    """FedGKD: local training that also distils the average of the last global models.

    The server's state holds the last M global models in `buffers`, as one tensor [M, …] per
    parameter. The following settings come in addition to those of `TrainsLocally`.

    Args:
        gamma: γ, twice the weight of the distillation. It is 0.2 on CIFAR and 0.001 on EMNIST in
            FedKF's comparison. With 0, the method is FedAvg, weighted by n_k.
        buffer: M, the number of averaged global models. It is 5 in FedKF's comparison.

    >>> from fedsynth import FedGKD, ModelSettings, RunSettings, simulate
    >>> method = FedGKD(gamma=0.2, buffer=2, local_epochs=2, batch=32, lr=0.1)
    >>> result = simulate(RunSettings(method, rounds=3, model=ModelSettings("linear")))
    >>> result.accuracy > 0.7
    True
    """

    name = "fedgkd"
    summary = "local training distilled from the average of the last global models"
    request = TeacherDown
    masks_refusal = "the clients distil class probabilities"
    reference = "Yao et al. 2021, FedGKD, arXiv 2107.00051"

    gamma: float = in_range(0.2, 0)
    buffer: int = in_range(5, 1)

    def check_request(self, message: TeacherDown, context: RoundContext) -> None:
        check_named("teacher", message.teacher, context.architecture.state_dict())

    def broadcast(self, state: AveragingState, context: RoundContext) -> Message:
        teacher = dict(state.parameters)
        for name, values in state.buffers.items():
            if values.is_floating_point():
                teacher[name] = values.double().mean(dim=0).to(values.dtype)
        return TeacherDown(state.parameters, 1.0, teacher)

    def task(
        self, client: int, message: TeacherDown, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        teacher = context.load(message.teacher).requires_grad_(False).eval()

        def loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            logits = network(x)
            with torch.no_grad():
                target = teacher(x).log_softmax(dim=1)
            log_p = logits.log_softmax(dim=1)
            kl = F.kl_div(log_p, target, log_target=True, reduction="none").sum(dim=1)
            return F.cross_entropy(logits, y, reduction="none") + self.gamma / 2 * kl

        return LocalObjective(loss=loss)

    def combine(
        self, state: AveragingState, uploads: Mapping[int, ModelParameters], context: RoundContext
    ) -> AveragingState:
        parameters = average(uploads)
        past: dict[str, Tensor] = {}
        for name, value in parameters.items():
            values = state.buffers.get(name, state.parameters[name][None])
            past[name] = torch.cat([values, value[None]])[-self.buffer :]
        return replace(state, parameters=parameters, buffers=past)
