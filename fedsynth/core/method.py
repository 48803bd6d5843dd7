"""The base class of methods. A method consists of settings, message types and the steps of a round.

The settings are frozen, and the steps are pure functions.

In a round, `broadcast` makes the server's message from the server's state. `client_step` makes each
client's upload and new memory from the message and the client's data. `server_step` makes the next
state from the uploads. The engine decides how many clients share one call of `client_step`. The
tensors of expensive steps therefore have a leading client axis, and a single client is a group of
size one.

The class attributes `downlink`, `upload` and `state` declare the types of the messages and of the
state. The engine checks these types before it calls a step. A step names the declared types in its
signature and does not need to check them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import nn

from fedsynth.core.client import ClientGroup
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message, ModelParameters
from fedsynth.core.optional_hooks import Memory as Memory
from fedsynth.core.optional_hooks import OptionalHooks
from fedsynth.core.optional_hooks import Request as Request
from fedsynth.core.optional_hooks import Results as Results
from fedsynth.core.optional_hooks import State as State
from fedsynth.core.optional_hooks import Upload as Upload
from fedsynth.core.uploads import Rule, model_rules
from fedsynth.errors import SettingError
from fedsynth.privacy.disclosure import mechanism_facts
from fedsynth.privacy.mechanisms import BudgetEnforcer, GaussianSumMechanism
from fedsynth.privacy.plans import FIRST, MAIN, ReleaseBudget, charge_round
from fedsynth.privacy.plans import ReleasePlan as ReleasePlan  # part of this interface
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.validation import check_fields, from_mapping

Presets = Mapping[str, Mapping[str, Any]]
"""The type of a method's presets. For each data set, they replace the defaults of some settings.
The presets of the method's base classes apply too."""


@dataclass(frozen=True)
class Method(OptionalHooks):
    """The base class of all methods. A subclass is a frozen dataclass of validated settings.

    A method implements `broadcast`, `client_step` and `server_step`. Hooks that only some methods
    need, such as a first exchange or synthetic images, are in `fedsynth.core.optional_hooks`.

    Class attributes:
        name: the method's name in reports, in config files and on the command line.
        summary: a description of one line.
        reference: the paper.
        downlink: the type of the server's message in a round's main exchange.
        upload: the type of a client's message in a round's main exchange.
        state: the type of the server's state.
        dp_mechanisms: the names of the mechanisms that can protect the method. If empty, the method
            cannot run with differential privacy, and `refusal` gives the reason.
        robust_refusal: the reason why robust aggregation (`RunSettings.robust`) is refused. If
            empty, robust aggregation is allowed, and `server_step` receives the uploads that the
            robust rule computes.
        features_refusal: the reason why the method's network cannot use a fixed feature map
            (`ModelSettings.features`). If empty, it can, and the clients' "images" are then feature
            vectors.
        presets: for each data set, the settings whose defaults the method changes.

    >>> from fedsynth import ModelParameters, RunSettings, simulate
    >>> class Untrained(Method):
    ...     name, upload = "untrained", ModelParameters
    ...     def broadcast(self, state, context): return ModelParameters(state.parameters, 1.0)
    ...     def client_step(self, message, clients, memories, context):
    ...         return [(type(message).from_bytes(message.to_bytes()), m) for m in memories]
    ...     def server_step(self, state, uploads, context): return state
    >>> len(simulate(RunSettings(Untrained(), rounds=1)).uploads)
    10
    """

    section: ClassVar[str] = "method"  # section of a config file
    name: ClassVar[str]
    summary: ClassVar[str]
    reference: ClassVar[str]
    downlink: ClassVar[type[Message]] = ModelParameters
    upload: ClassVar[type[Message]]
    state: ClassVar[type[ServerState]] = ServerState
    dp_mechanisms: ClassVar[tuple[str, ...]] = ()
    refusal: ClassVar[str] = ""
    robust_refusal: ClassVar[str] = (
        "the server averages no models, so a robust rule would have no effect"
    )
    features_refusal: ClassVar[str] = "the clients or the server use the images directly"
    presets: ClassVar[Presets] = {}

    def __post_init__(self) -> None:
        """Checks the settings against their declared ranges and choices (`fedsynth.validation`)."""
        check_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings by name, as they are written to configs, reports and summaries."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def exchange_types(cls, phase: str) -> tuple[type[Message] | None, type[Message] | None]:
        """Returns the message types of an exchange: the type of the server's message and of a
        client's message.

        The exchange `phase` is "first" or "main". Both types are None if the method has no first
        exchange.
        """
        if phase == FIRST:
            return cls.first_downlink, cls.first_upload
        return cls.downlink, cls.upload

    def initial_state(self, parameters: Mapping[str, torch.Tensor]) -> ServerState:
        """Returns the server's state before the first round.

        Args:
            parameters: the initial model's parameters and buffers by name.
        """
        return self.state(parameters)

    def check_request(self, message: Request, context: RoundContext) -> None:
        """Checks that the server's message has the tensors that the client's step expects.

        The check runs before any charge. The engine itself checks the model that a message
        contains. If a method's messages have other tensors, the method checks the shapes of these
        tensors, because an unexpected shape could mix the examples of a private step.

        Raises:
            RequestRefusedError: a tensor is not as expected. The error names the field.
        """

    def upload_rules(self, phase: str, client: int, context: RoundContext) -> dict[str, Rule]:
        """Returns the rules by which the server checks the fields of this client's upload.

        A field without a rule may hold any finite values. The engine checks every tensor once,
        before a step reads it. The rules also determine the largest size of an upload on the wire.

        Args:
            phase: the exchange, "first" or "main".
            client: the client's index.
            context: the round's context. An implementation reads only its public values.
        """
        _, declared = self.exchange_types(phase)
        if declared is not None and issubclass(declared, ModelParameters):
            return model_rules(client, context)
        return {}

    def check_upload(self, phase: str, upload: Upload, client: int, context: RoundContext) -> None:
        """Checks that the fields of an upload are consistent with each other.

        Each field has already passed its own rule (`upload_rules`).

        Raises:
            UploadRejectedError: the fields are inconsistent. The error names the field.
        """

    def broadcast(self, state: State, context: RoundContext) -> Message:
        """Returns the server's message to the clients of this round."""
        raise NotImplementedError  # abstract

    def client_step(
        self,
        message: Request,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> Results:
        """Returns each client's upload and new memory, in the group's order."""
        raise NotImplementedError  # abstract

    def server_step(
        self, state: State, uploads: Mapping[int, Upload], context: RoundContext
    ) -> ServerState:
        """Returns the server's next state.

        Args:
            state: the server's state before this step.
            uploads: all uploads of the round by client index, in ascending order.
            context: the round's context.
        """
        raise NotImplementedError  # abstract

    def at_end(self, state: State, context: RoundContext) -> ServerState:
        """Does the server's final work, such as making images, and returns the resulting state.

        It is called after the last round. A run can end before the planned number of rounds if the
        privacy budget is used up. With differential privacy the final work uses only released
        values, so it needs no further budget.

        Args:
            state: the server's state after the last round.
            context: the context of the last round.
        """
        return state

    def final_parameters(self, state: State) -> Mapping[str, torch.Tensor]:
        """Returns the model that a run ends with.

        By default this is the model in the state, from which the clients start each round.
        """
        parameters: Mapping[str, torch.Tensor] = state.parameters
        return parameters

    def client_bytes(self, context: RoundContext) -> int | None:
        """Estimates how many bytes of memory each client of a group needs during `client_step`.

        The engine divides the run's memory bound by this number to choose the size of a group. The
        number does not change results. None means that clients run one at a time, for methods that
        gain nothing from groups.
        """
        return None

    def check_model(self, model: nn.Module) -> None:
        """Raises SettingError if the method cannot use this network architecture."""

    def release_plans(
        self, privacy: PrivacySettings, context: RoundContext
    ) -> tuple[ReleasePlan, ...]:
        """Returns the plans of all private releases that each client makes in a round, the main
        release first.

        The engine calls it before any data are read, and charges each client for every plan. A step
        gets the charged releases by the plan's name (`PrivateClientView.series`).
        """
        raise NotImplementedError  # abstract

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Creates the method's settings from names and values that were read from TOML or text.

        Text is converted to the field's type.

        Raises:
            UnknownNameError: the method has no setting with this name. The error lists similar
                names.
            SettingError: a value has the wrong type or is outside its range.
        """
        return from_mapping(cls, values, of=cls.name)


def charge_for(
    method: Method,
    context: RoundContext,
    clients: Sequence[int],
    guards: Sequence[BudgetEnforcer],
    secrets: Sequence[SecretGenerator],
    phase: str = MAIN,
) -> list[ReleaseBudget[GaussianSumMechanism]]:
    """Charges each client's privacy budget for the releases of one exchange, in code outside a run.

    In a run, each client's budget (`fedsynth.federation.client_runtime`) charges the client
    according to the run's plan.

    Args:
        method: the method, which plans the releases.
        context: the round's context. Its privacy settings must have a noise multiplier.
        clients: the clients' indices.
        guards: each client's ledger and budget cap, in the order of `clients`.
        secrets: each client's secret random generator, in the same order.
        phase: the exchange, "first" or "main".

    Raises:
        SettingError: the context has no privacy settings or no noise multiplier, or a planned
            mechanism has no privacy guarantee.
        BudgetExceededError: the charge would exceed a client's cap. The clients before this client
            stay charged.
    """
    privacy = context.privacy
    if privacy is None or privacy.noise_multiplier is None:
        raise SettingError("privacy", "noise_multiplier", "must be set before clients are charged")
    plans = method.round_plans(method.release_plans(privacy, context), context.round)
    if not all(mechanism_facts(plan.mechanism).guaranteed for plan in plans):
        reason = "must guarantee differential privacy. Only then can clients be charged"
        raise SettingError("privacy", "mechanism", reason)
    charged = []
    for client, guard, secret in zip(clients, guards, secrets, strict=True):
        client_plans = method.client_plans(plans, client, context)
        noise = privacy.noise_multiplier
        charged.append(charge_round(client_plans, context.round, noise, guard, secret, phase=phase))
    return charged
