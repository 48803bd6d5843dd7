"""The base class of methods. A method consists of settings, message types and the steps of a round.

The settings are frozen, and the steps are pure functions.

In a round, `broadcast` makes the server's message from the server's state. `client_step` makes each
client's upload and new state from the message and the client's data. `server_step` makes the next
state from the uploads. The engine decides how many clients share one call of `client_step`. The
tensors of expensive steps therefore have a leading client axis, and a single client is a group of
size one.

The class attributes `request`, `upload` and `state` declare the message and state types. The engine
checks the types before it calls a step. A step names the declared types in its signature and does
not need to check them again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from torch import nn

from fedsynth.core.client import Group
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message, ModelParameters, Tensors
from fedsynth.core.uploads import Rule, model_rules
from fedsynth.privacy.plans import MAIN
from fedsynth.privacy.plans import Plans as Plans  # part of this interface
from fedsynth.privacy.plans import ReleasePlan as ReleasePlan
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.validation import check_fields, from_mapping

# The tensors that a client keeps between rounds. They never leave the client.
ClientState = Tensors

# The state of each client, in the group's order.
ClientStates = Sequence[ClientState]

# The type of a step's results: the message and the new state of each client, in the group's
# order.
Results = list[tuple[Message, ClientState]]

# Methods narrow these in their signatures to their own `request`, `upload`, `state` and so on.
Request = Any
Upload = Any
State = Any

# The type of a method's presets. For each data set, they replace the defaults of some settings.
# The presets of the method's base classes apply too.
Presets = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Method(ABC):
    """The base class of all methods. A subclass is a frozen dataclass of validated settings.

    A method sets `name` and `upload`, and implements `client_step`, `server_step` and, with
    `dp_mechanisms`, `release_plans`. The defaults of the other hooks suit most methods. A method
    with further abilities, such as a second exchange in a round or synthetic images, also inherits
    from a class of `fedsynth.core.capabilities`.

    Class attributes:
        name: the method's name in reports, in config files and on the command line.
        summary: a description of one line.
        reference: the paper.
        request: the type of the server's message in a round.
        upload: the type of a client's message in a round.
        state: the type of the server's state.
        dp_mechanisms: the names of the mechanisms that can protect the method. If empty, the method
            cannot run with differential privacy, and `refusal` gives the reason.
        robust_refusal: the reason why robust aggregation (`RunSettings.robust`) is refused. If
            empty, robust aggregation is allowed, and `server_step` receives the uploads that the
            robust rule computes.
        features_refusal: the reason why the method's network cannot use a fixed feature map
            (`ModelSettings.features`). If empty, it can, and the clients' "images" are then feature
            vectors. Only these methods accept records that are tokens.
        masks_refusal: the reason why the method cannot train on masks, for segmentation. If empty,
            it can.
        presets: for each data set, the settings whose defaults the method changes.

    >>> from fedsynth import ModelParameters, RunSettings, simulate
    >>> class Untrained(Method):
    ...     name, upload = "untrained", ModelParameters
    ...     def broadcast(self, state, context): return ModelParameters(state.parameters, 1.0)
    ...     def client_step(self, message, clients, states, context):
    ...         return [(type(message).from_bytes(message.to_bytes()), m) for m in states]
    ...     def server_step(self, state, uploads, context): return state
    >>> len(simulate(RunSettings(Untrained(), rounds=1)).uploads)
    10
    """

    section: ClassVar[str] = "method"  # section of a config file
    name: ClassVar[str]
    summary: ClassVar[str]
    reference: ClassVar[str]
    request: ClassVar[type[Message]] = ModelParameters
    upload: ClassVar[type[Message]]
    state: ClassVar[type[ServerState]] = ServerState
    dp_mechanisms: ClassVar[tuple[str, ...]] = ()
    refusal: ClassVar[str] = ""
    robust_refusal: ClassVar[str] = "the server averages no models, so a robust rule has no effect"
    features_refusal: ClassVar[str] = "the clients or the server use the images directly"
    masks_refusal: ClassVar[str] = "the clients or the server use the classes of images"
    presets: ClassVar[Presets] = {}

    def __post_init__(self) -> None:
        """Checks the settings against their declared ranges and choices (`fedsynth.validation`)."""
        check_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings by name, as written to config files, reports and summaries."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def initial_state(self, parameters: Tensors) -> ServerState:
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

    def upload_rules(self, exchange: str, client: int, context: RoundContext) -> dict[str, Rule]:
        """Returns the rules by which the server validates each field of a client's upload.

        A field without a rule may hold any finite values. The engine checks every tensor once,
        before a step reads it. The rules also determine the largest size of an upload on the wire.

        Args:
            exchange: the exchange, "first" or "main".
            client: the client's index.
            context: the round's context. An implementation reads only its public values.
        """
        if exchange == MAIN and issubclass(self.upload, ModelParameters):
            return model_rules(client, context)
        return {}

    def check_upload(
        self, exchange: str, upload: Upload, client: int, context: RoundContext
    ) -> None:
        """Checks that the fields of an upload are consistent with each other.

        Each field has already passed its own rule (`upload_rules`).

        Raises:
            UploadRejectedError: the fields are inconsistent. The error names the field.
        """

    def broadcast(self, state: State, context: RoundContext) -> Message:
        """Returns the server's message to the round's clients.

        By default, the message has the model, and the fields of the state that `request` has too.
        """
        message: dict[str, Any] = {"weight": 1.0}
        for field in fields(self.request):
            if field.name != "weight":
                message[field.name] = getattr(state, field.name)
        return self.request(**message)

    def later_request(self, message: Request, context: RoundContext) -> Request:
        """Returns an example of a later round's request, for testing a client's step.

        A trial before a private run computes a client's step of the first round. A method overrides
        this hook if some fields are empty in the first round's request, and clients later compute
        further values of each example from them.

        Args:
            message: the request of the first round.
            context: the context of the trial.
        """
        return message

    @abstractmethod
    def client_step(
        self, message: Request, clients: Group, states: ClientStates, context: RoundContext
    ) -> Results:
        """Returns each client's upload and new state, in the group's order."""

    @abstractmethod
    def server_step(
        self, state: State, uploads: Mapping[int, Upload], context: RoundContext
    ) -> ServerState:
        """Returns the server's next state.

        Args:
            state: the server's state before this step.
            uploads: all uploads of the round by client index, in ascending order.
            context: the round's context.
        """

    def final_parameters(self, state: State) -> Tensors:
        """Returns the run's final model.

        By default this is the model in the state, from which the clients start each round.
        """
        parameters: Tensors = state.parameters
        return parameters

    def client_bytes(self, context: RoundContext) -> int | None:
        """Estimates how many bytes of memory each client of a group needs during `client_step`.

        The engine divides the run's memory bound by the returned number to choose the group size.
        The group size does not change results. None means that clients run one at a time, for
        methods that gain nothing from groups.
        """
        return None

    def client_cost(self, examples: int, context: RoundContext) -> float:
        """Estimates the relative duration of a client's step, given its number of examples.

        A simulation on several ranks shares out the clients by it, in the context of round 1. It
        does not change results.
        """
        return examples

    def check_model(self, model: nn.Module) -> None:
        """Raises SettingError if the method cannot use the network architecture."""

    def release_plans(self, privacy: PrivacySettings, context: RoundContext) -> Plans:
        """Returns the planned DP releases of a client in a round.

        The plan of the main release comes first. The engine calls it before any data are read, and
        charges each client for every plan. A step gets the charged releases by the plan's name
        (`PrivateClientView.mechanisms`). A method with `dp_mechanisms` must override it.
        """
        return ()

    def client_plans(self, plans: Plans, client: int, context: RoundContext) -> Plans:
        """Returns the planned DP releases of one client in the current round.

        By default they are the round's `plans`. A method may reduce a plan's number of steps or
        change its dimension, according to public values. The client is then charged for the changed
        plan.
        """
        return plans

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Creates the method's settings from names and values read from TOML or text.

        Text is converted to the field's type.

        Raises:
            UnknownNameError: the method has no setting with this name. The error lists similar
                names.
            SettingError: a value has the wrong type or is outside its range.
        """
        return from_mapping(cls, values, of=cls.name)
