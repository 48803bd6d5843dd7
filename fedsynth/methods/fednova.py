"""FedNova: each client's update is normalised by the accumulated length of its steps (Wang et al.
2020, arXiv 2007.07481).

Each client computes w_k by τ_k steps of SGD with momentum ρ. The accumulated length is ‖a_k‖₁ =
(τ_k − ρ(1 − ρ^τ_k)/(1 − ρ))/(1 − ρ). The server computes w_{t+1} = w_t − τ_eff Σ_k p_k (w_t −
w_k)/‖a_k‖₁ (Eq. 6 and Sec. 4). There, τ_eff = Σ_k p_k ‖a_k‖₁ and p_k = n_k/n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, public
from fedsynth.core.method import ClientState
from fedsynth.core.uploads import Number, Rule
from fedsynth.errors import SettingError, UploadRejectedError
from fedsynth.methods.shared.aggregation import AveragingState, average, trainable
from fedsynth.methods.shared.local import LocalObjective, Trained, TrainsLocally


@dataclass(frozen=True)
class NormalisedModel(ModelParameters):
    """A client's upload in FedNova: the model, and the length ‖a_k‖₁ of the client's steps."""

    norm: float = public("with differential privacy, the number of steps follows from public sizes")


@dataclass(frozen=True)
class FedNova(TrainsLocally):
    """FedNova: FedAvg in which each client's update is divided by the length of its local steps.

    The settings are documented in `TrainsLocally`. If all clients take the same number of steps,
    the method is FedAvg, weighted by n_k.

    >>> from fedsynth import FedNova, ModelSettings, RunSettings, simulate
    >>> method = FedNova(local_steps=2, momentum=0.5)
    >>> result = simulate(RunSettings(method, rounds=1, model=ModelSettings("linear")))
    >>> result.uploads[0].norm  # the first step moves the model by 1 + 0.5, the second by 1
    2.5
    """

    name = "fednova"
    summary = "FedAvg with updates normalised by each client's number of steps"
    reference = "Wang et al. 2020, FedNova, arXiv 2007.07481"
    upload = NormalisedModel
    adam_refusal = "updates are divided by the length of SGD steps"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum >= 1:
            raise SettingError("method", "momentum", f"must be below 1, got {self.momentum}")

    def task(
        self, client: int, message: ModelParameters, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        def make_upload(model: nn.Module, trained: Trained) -> tuple[Message, ClientState]:
            norm = update_norm(trained.steps, self.momentum)
            return NormalisedModel(model.state_dict(), trained.weight, norm), {}

        return LocalObjective(make_upload=make_upload)

    def upload_rules(self, exchange: str, client: int, context: RoundContext) -> dict[str, Rule]:
        largest = update_norm(self.most_steps(client, context), self.momentum) * (1 + 1e-9)
        return {**super().upload_rules(exchange, client, context), "norm": Number(high=largest)}

    def check_upload(
        self, exchange: str, upload: NormalisedModel, client: int, context: RoundContext
    ) -> None:
        if upload.weight > 0 and upload.norm < update_norm(1, self.momentum) * (1 - 1e-9):
            reason = f"must be at least 1, the length of a single step, got {upload.norm:g}"
            raise UploadRejectedError("norm", reason)

    def combine(
        self, state: AveragingState, uploads: Mapping[int, NormalisedModel], context: RoundContext
    ) -> AveragingState:
        parameters = average(uploads)
        n = sum(u.weight for u in uploads.values())
        tau = sum(u.weight / n * u.norm for u in uploads.values())  # τ_eff
        for name in trainable(context):
            w_t = state.parameters[name]
            step = torch.zeros_like(w_t, dtype=torch.float64)
            for u in uploads.values():
                step += u.weight / n / u.norm * (w_t - u.parameters[name]).double()
            parameters[name] = (w_t.double() - tau * step).to(w_t.dtype)
        return replace(state, parameters=parameters)


def update_norm(steps: int, momentum: float) -> float:
    """Computes ‖a_k‖₁, the accumulated length of `steps` local steps of SGD with momentum.

    >>> update_norm(3, 0.0), update_norm(2, 0.5)
    (3.0, 2.5)
    """
    if momentum == 0:
        return float(steps)
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
