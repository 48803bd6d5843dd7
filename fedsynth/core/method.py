"""The interface of methods: frozen settings, declared messages, a declared state, pure steps.

In a round, `broadcast` makes the server's message from its state; `client_step` makes each client's
upload and its new memory from the message and the client's view of its data; `server_step` makes
the next state from the uploads. The engine decides how many clients share one `client_step`, so
heavy steps have a leading client axis, and a single client is a group of one.

Class attributes declare the types of the messages and the state (`downlink`, `upload`, `state`).
The engine checks every type before a step runs, so a step names its declared type in its signature
and needs no further check.
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
from fedsynth.privacy.plans import FIRST
from fedsynth.privacy.plans import ReleasePlan as ReleasePlan  # part of this interface
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.validation import check_fields, from_mapping

Presets = Mapping[str, Mapping[str, Any]]
"""By data set, the settings whose defaults a method changes for it, in addition to those of its
base classes."""


@dataclass(frozen=True)
class ExchangeTypes:
    """The message types of an exchange, down and up; None: the method has no such exchange."""

    downlink: type[Message] | None
    upload: type[Message] | None


@dataclass(frozen=True)
class Method(OptionalHooks):
    """Base class of all methods; a subclass is a frozen dataclass of validated settings.

    A method implements `broadcast`, `client_step` and `server_step`. Hooks that only some methods
    need, such as a first exchange or synthetic images, are in `fedsynth.core.optional_hooks`.

    Class attributes:
        name: name in reports, config files and on the command line.
        summary: one line.
        reference: the paper.
        downlink: type of the server's message in a round's main exchange.
        upload: type of a client's message in it.
        state: type of the server's state.
        dp_mechanisms: the mechanisms that can protect it; empty: it cannot run with differential
            privacy, and `refusal` gives the reason.
        robust_refusal: why robust aggregation (`RunSettings.robust`) is refused; empty: it is
            allowed, and `server_step` then gets the uploads that the rule makes.
        features_refusal: why its network cannot use a fixed feature map
            (`ModelSettings.features`); empty: it can, and clients' "images" are then vectors.
        presets: by data set, the changed defaults of these settings.

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
        "its server does not average models, so a robust rule has no effect"
    )
    features_refusal: ClassVar[str] = "its clients or server use the images directly"
    presets: ClassVar[Presets] = {}

    def __post_init__(self) -> None:
        """Refuses settings outside their declared ranges and choices (`fedsynth.validation`)."""
        check_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings by name, as written to configs, reports and summaries."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def exchange_types(cls, phase: str) -> ExchangeTypes:
        """Returns the declared message types of an exchange ("first" or "main")."""
        if phase == FIRST:
            return ExchangeTypes(cls.first_downlink, cls.first_upload)
        return ExchangeTypes(cls.downlink, cls.upload)

    def initial_state(self, parameters: Mapping[str, torch.Tensor]) -> ServerState:
        """Returns the state before the first round, from the initial model."""
        return self.state(parameters)

    def check_request(self, message: Request, context: RoundContext) -> None:
        """Checks, before any charge, that a request's tensors are those that a step expects.

        The engine checks the model itself. A method whose requests have other tensors checks their
        shapes: an unexpected shape could mix the examples of a private step.

        Raises:
            RequestRefusedError: they are not; names the field.
        """

    def upload_rules(self, phase: str, client: int, context: RoundContext) -> dict[str, Rule]:
        """Returns the server's rule for each field of this client's upload in an exchange.

        A field without a rule may hold any finite values. The engine checks every tensor once,
        before any step sees it. The largest size of an upload on the wire also follows from the
        rules.

        Args:
            phase: "first" or "main".
            client: the client's index.
            context: the round's; only public values of it are read.
        """
        declared = self.exchange_types(phase).upload
        if declared is not None and issubclass(declared, ModelParameters):
            return model_rules(client, context)
        return {}

    def check_upload(self, phase: str, upload: Upload, client: int, context: RoundContext) -> None:
        """Checks that an upload's fields, each of which already passes its rule, fit each other.

        Raises:
            UploadRejectedError: they do not; names the field.
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
        """Returns the next state from all uploads of the round, by client index, ascending."""
        raise NotImplementedError  # abstract

    def at_end(self, state: State, context: RoundContext) -> ServerState:
        """Returns the server's state after final work, such as making images.

        It is called after the last round, which may come before the planned number of rounds
        (exhausted budget). With differential privacy it uses only released values, so it costs
        nothing.

        Args:
            state: the state after the last round.
            context: the last round's.
        """
        return state

    def final_parameters(self, state: State) -> Mapping[str, torch.Tensor]:
        """Returns the model that a run ends with, where clients start from another model."""
        parameters: Mapping[str, torch.Tensor] = state.parameters
        return parameters

    def client_bytes(self, context: RoundContext) -> int | None:
        """Returns about how many bytes one more client in a `client_step` takes; None: clients run
        one at a time, because a group gains nothing.

        The engine divides the run's memory bound by it. It does not change results.
        """
        return None

    def check_model(self, model: nn.Module) -> None:
        """Raises SettingError if the method cannot work with this architecture."""

    def release_plans(
        self, privacy: PrivacySettings, context: RoundContext
    ) -> tuple[ReleasePlan, ...]:
        """Returns the plans of a round's releases of each client under `privacy`, the main release
        first; called before any data are read.

        Each client is charged for every plan, and a step gets the charged series by name
        (`PrivateClientView.series`).
        """
        raise NotImplementedError  # abstract

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Returns settings from names and values as read from TOML or text; text is converted to
        the field's type.

        Raises:
            UnknownNameError: no such setting (with the near matches).
            SettingError: a value of the wrong type or outside its range.
        """
        return from_mapping(cls, values, of=cls.name)
