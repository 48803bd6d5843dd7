"""SOLO: every client trains a model on its own data, without federation.

Nothing is sent to the server, and a client continues with its own model in each round. The model of
the run remains the initial model. The result of a run is the accuracy of each client's model on
that client's test split (`--local-test`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message, ModelParameters
from fedsynth.core.method import Memory
from fedsynth.errors import SettingError
from fedsynth.methods.shared.client_training import LocalObjective, Trained
from fedsynth.methods.shared.local import TrainsLocally


@dataclass(frozen=True)
class Nothing(Message):
    """The upload of a client, which is empty."""


@dataclass(frozen=True)
class Solo(TrainsLocally):
    """Separate training of every client on its own data.

    The settings are documented in `TrainsLocally`.

    >>> from fedsynth import ModelSettings, PartitionSettings, RunSettings, Solo, simulate
    >>> split = PartitionSettings(local_test=0.2)
    >>> method, model = Solo(local_epochs=5, batch=32), ModelSettings("linear")
    >>> last = simulate(RunSettings(method, rounds=1, partition=split, model=model)).metrics[-1]
    >>> last["upload_bytes"], last["local"]["amp"] > 0.7  # accuracy of own models, on average
    (0, True)
    """

    name = "solo"
    summary = "no federation: each client trains only on its data"
    reference = "the comparison papers' SOLO"
    one_pass = True
    upload = Nothing
    personal = True
    dp_mechanisms = ()
    refusal = (
        "nothing is sent, so there is nothing to protect, and the reported accuracies are exact "
        "functions of private data"
    )
    robust_refusal = "nothing is sent, so there is nothing to average"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.final == "oca":
            reason = "cannot be used with solo, which has no global model"
            raise SettingError("method", "final", reason, value="oca")

    def start_model(
        self, client: int, message: ModelParameters, memory: Memory, context: RoundContext
    ) -> nn.Module:
        return context.load(memory or message.parameters)

    def task(
        self, client: int, message: ModelParameters, memory: Memory, context: RoundContext
    ) -> LocalObjective:
        def make_upload(model: nn.Module, trained: Trained) -> tuple[Message, Memory]:
            return Nothing(), {name: value.clone() for name, value in model.state_dict().items()}

        return LocalObjective(make_upload=make_upload)

    def server_step(
        self, state: ServerState, uploads: Mapping[int, Nothing], context: RoundContext
    ) -> ServerState:
        return state

    def personal_parameters(
        self, parameters: Mapping[str, Tensor], memory: Memory
    ) -> Mapping[str, Tensor]:
        return memory or parameters
