"""FedBN: FedAvg whose batch-norm layers stay on the clients (Li et al. 2021, arXiv 2102.07623).

Each client trains the global model with its own batch-norm layers, and sends all other parameters.
The server averages these parameters with weight 1/K for each client (Algorithm 1).

A run's result is AMP: the clients' average accuracy on their own test splits, with their own
batch-norm layers. The global model's accuracy is meaningless, because it keeps the initial
batch-norm layers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from fedsynth.core.capabilities import PersonalModels
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, Tensors
from fedsynth.core.method import ClientState
from fedsynth.core.uploads import Named, Rule
from fedsynth.errors import SettingError
from fedsynth.methods.shared.aggregation import AveragingState, average
from fedsynth.methods.shared.local import LocalObjective, Trained, TrainsLocally


def local_names(model: nn.Module) -> set[str]:
    """Returns the names of all parameters and buffers in batch-norm layers."""
    names: set[str] = set()
    for layer, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            names.update(module.state_dict(prefix=f"{layer}." if layer else ""))
    return names


def shared_values(values: Tensors, model: nn.Module) -> dict[str, Tensor]:
    """Returns a state dict without the entries of batch-norm layers."""
    local = local_names(model)
    return {name: value for name, value in values.items() if name not in local}


@dataclass(frozen=True)
class FedBN(TrainsLocally, PersonalModels):
    """FedBN: FedAvg in which each client has its own batch-norm layers.

    `TrainsLocally` documents the settings. The method needs a network with batch norm
    (`model.norm=batch`). It refuses other networks, with which it would be FedAvg with equal
    weights.

    >>> from fedsynth import FedBN, ModelSettings, PartitionSettings, RunSettings, simulate
    >>> model = ModelSettings(depth=2, width=8, norm="batch")
    >>> method = FedBN(local_epochs=3, batch=32, lr=0.1)
    >>> split = PartitionSettings(local_test=0.2)
    >>> result = simulate(RunSettings(method, rounds=2, partition=split, model=model))
    >>> len(result.model.state_dict()) - len(result.uploads[0].parameters)  # two batch norms' five
    10
    >>> result.metrics[-1]["local"]["amp"] > 0.4  # accuracy of the clients' own models, on average
    True
    """

    name = "fedbn"
    summary = "FedAvg whose batch-norm layers stay on the clients"
    reference = "Li et al. 2021, FedBN, arXiv 2102.07623"
    dp_mechanisms = ()
    features_refusal = "a model on features has no batch-norm layers. Use fedavg instead"
    refusal = "batch norm mixes a batch's examples, so no clip bounds the influence of one example"

    def check_model(self, model: nn.Module) -> None:
        if not local_names(model):
            reason = (
                "must be 'batch' for fedbn, because the network contains no batch-norm layers to "
                "keep on the clients. Set model.norm=batch"
            )
            raise SettingError("model", "norm", reason)

    def start_model(
        self, client: int, message: ModelParameters, state: ClientState, context: RoundContext
    ) -> nn.Module:
        return context.load({**message.parameters, **state})

    def task(
        self, client: int, message: ModelParameters, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        def make_upload(model: nn.Module, trained: Trained) -> tuple[Message, ClientState]:
            state = copy.deepcopy(model.state_dict())
            batch_norms = {name: state[name] for name in local_names(model)}
            return ModelParameters(shared_values(state, model), trained.weight), batch_norms

        return LocalObjective(make_upload=make_upload)

    def upload_rules(self, exchange: str, client: int, context: RoundContext) -> dict[str, Rule]:
        network = context.architecture
        rule = Named.like(shared_values(network.state_dict(), network))
        return {**super().upload_rules(exchange, client, context), "parameters": rule}

    def combine(
        self, state: AveragingState, uploads: Mapping[int, ModelParameters], context: RoundContext
    ) -> AveragingState:
        """Averages uploads with equal weights (Algorithm 1). Batch norms stay unchanged."""
        return replace(state, parameters={**state.parameters, **average(uploads, uniform=True)})

    def personal_parameters(self, parameters: Tensors, state: ClientState) -> Tensors:
        return {**parameters, **state}
