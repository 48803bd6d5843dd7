"""What DENSE, FedHydra and FedDF share: clients train as in FedAvg, and the server distils their models into one.

One round is the one-shot setting. In further rounds clients start from the distilled model, so all must have the server's architecture; in a
single round each client may have one of its own (`ModelSettings.clients`). Homogeneous students start from the clients' average.

With differential privacy the clients train by DP-SGD; all that the server does is computed from their uploads: post-processing. Uploaded
batch-norm statistics would be a release without noise, so batch norm is refused then; group norm takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedsynth.core.messages import Message, ModelParameters
from fedsynth.core.method import Presets, RoundContext, ServerState
from fedsynth.core.validation import check_choices
from fedsynth.errors import SettingError
from fedsynth.methods.shared.aggregation import average
from fedsynth.methods.shared.local import TrainsLocally


@dataclass(frozen=True)
class DistilsEnsemble(TrainsLocally):
    """Settings of FedHydra's comparison: SGD 0.01, batch 128, 200 local epochs; momentum is not named.

    Args:
        start: of the student: "server", the model that clients started from, which is fresh in a one-shot run (FedHydra's Algorithm 1), or
            "average" of the clients' models (FedDF's; with clients of other architectures it is a fresh network too).
    """

    heterogeneous: ClassVar[bool] = True
    presets: ClassVar[Presets] = {"digits": {"local_epochs": 20}}

    local_epochs: int = 200
    batch: int = 128
    momentum: float = 0.9
    start: str = "server"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, start=("average", "server"))
        if self.final == "oca":
            raise SettingError(
                "method",
                "final",
                f"has no meaning for {self.name}, whose final model is the distilled one",
                value="oca",
            )

    def distil(
        self,
        models: Sequence[nn.Module],
        student: nn.Module,
        state: ServerState,
        context: RoundContext,
    ) -> ServerState:
        """Trains `student` in place, and returns what the server keeps beside it (its parameters are filled in)."""
        raise NotImplementedError  # abstract

    def server_step(
        self, state: ServerState, uploads: Sequence[Message], context: RoundContext
    ) -> ServerState:
        sent = [u for u in uploads if isinstance(u, ModelParameters)]
        active = context.participants or range(len(sent))
        models = [
            context.load(u.parameters, client)
            for client, u in zip(active, sent, strict=True)
            if u.weight > 0
        ]
        if not models:
            return state
        alike = context.client_architectures is None
        student = context.load(
            average(sent) if alike and self.start == "average" else state.parameters
        )
        kept = self.distil(models, student, state, context)
        return ServerState(student.state_dict(), kept.kept)
