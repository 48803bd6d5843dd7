"""The base class of methods. A method consists of settings, message types and the steps of a round.

The settings are frozen, and the steps are pure functions.

In a round, `broadcast` makes the server's message from the server's state. `client_step` makes each
client's upload and new state from the message and the client's data. `server_step` makes the next
state from the uploads. The engine decides how many clients share one call of `client_step`. The
tensors of expensive steps therefore have a leading client axis, and a single client is a group of
size one.

The class attributes `request`, `upload` and `state` declare the types of the messages and of the
state. The engine checks these types before it calls a step. A step names the declared types in its
signature and does not need to check them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import nn

from fedsynth.core.client import Group
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message, ModelParameters, Tensors
from fedsynth.core.uploads import Rule, model_rules
from fedsynth.data.registry import DatasetSpec
from fedsynth.models.registry import ModelSettings, build_network
from fedsynth.privacy.disclosure import Disclosure
from fedsynth.privacy.plans import FIRST
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
class Method:
    """The base class of all methods. A subclass is a frozen dataclass of validated settings.

    A method implements `broadcast`, `client_step` and `server_step`. The defaults of the other
    hooks
    suit methods that do not need them, such as a first exchange or synthetic images.

    Class attributes:
        name: the method's name in reports, in config files and on the command line.
        summary: a description of one line.
        reference: the paper.
        request: the type of the server's message in a round's main exchange.
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
        first_request: the type of the server's message in the first exchange. None if the method
            has no first exchange.
        first_upload: the type of a client's message in the first exchange. None if the method has
            no first exchange.
        same_releases_every_round: whether every round makes all releases of `release_plans`. If
            False, `round_plans` selects the releases of a round, and all clients must take part in
            every round.
        images_from: a text that states what a run needs in order to make synthetic images. Empty if
            the method makes none.
        learns_from_images: whether the run's model was trained on the images that the run exports.
        heterogeneous: whether clients may use other architectures than the server.
        personal: whether each client ends with a personal model.
        variant_names: the names of the models that `variants` may return.
        takes_model: whether the run's model settings decide the method's network. If False, the
            method has its own network, and a run that sets a model reports that the setting has no
            effect.
        model_sees_data: whether clients run the network on private data. If True, a custom network
            is refused if it mixes the examples of a batch.
        metric_privacy: the status under differential privacy of each metric that `facts` returns. A
            private run fails if `facts` returns a metric that is not declared here.

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
    presets: ClassVar[Presets] = {}

    def __post_init__(self) -> None:
        """Checks the settings against their declared ranges and choices (`fedsynth.validation`)."""
        check_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings by name, as they are written to configs, reports and summaries."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def exchange_types(cls, exchange: str) -> tuple[type[Message] | None, type[Message] | None]:
        """Returns the message types of an exchange: the type of the server's message and of a
        client's message.

        The exchange `exchange` is "first" or "main". Both types are None if the method has no first
        exchange.
        """
        if exchange == FIRST:
            return cls.first_request, cls.first_upload
        return cls.request, cls.upload

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
        """Returns the rules by which the server checks the fields of this client's upload.

        A field without a rule may hold any finite values. The engine checks every tensor once,
        before a step reads it. The rules also determine the largest size of an upload on the wire.

        Args:
            exchange: the exchange, "first" or "main".
            client: the client's index.
            context: the round's context. An implementation reads only its public values.
        """
        _, declared = self.exchange_types(exchange)
        if declared is not None and issubclass(declared, ModelParameters):
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
        """Returns the server's message to the clients of this round.

        By default, the message has the model, and the fields of the state that `request` has too.
        """
        message: dict[str, Any] = {"weight": 1.0}
        for field in fields(self.request):
            if field.name != "weight":
                message[field.name] = getattr(state, field.name)
        return self.request(**message)

    def client_step(
        self, message: Request, clients: Group, states: ClientStates, context: RoundContext
    ) -> Results:
        """Returns each client's upload and new state, in the group's order."""
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

    def final_parameters(self, state: State) -> Tensors:
        """Returns the model that a run ends with.

        By default this is the model in the state, from which the clients start each round.
        """
        parameters: Tensors = state.parameters
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

    def release_plans(self, privacy: PrivacySettings, context: RoundContext) -> Plans:
        """Returns the plans of all private releases that each client makes in a round, the main
        release first.

        The engine calls it before any data are read, and charges each client for every plan. A step
        gets the charged releases by the plan's name (`PrivateClientView.mechanisms`).
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

    # ----------------------------- an exchange with the clients before the main exchange of a round

    first_request: ClassVar[type[Message] | None] = None
    first_upload: ClassVar[type[Message] | None] = None

    def first_broadcast(self, state: State, context: RoundContext) -> Message | None:
        """Returns the server's message of the first exchange, or None if this round has no first
        exchange."""
        return None

    def first_step(
        self, message: Request, clients: Group, states: ClientStates, context: RoundContext
    ) -> Results:
        """Computes the clients' replies to the server's message of the first exchange.

        Returns each client's reply, and the state that this round's `client_step` receives.
        """
        raise NotImplementedError  # abstract

    def first_aggregate(
        self, state: State, replies: Mapping[int, Upload], context: RoundContext
    ) -> ServerState:
        """Returns the server's state after the first exchange.

        Args:
            state: the server's state before the first exchange.
            replies: all replies by client index, in ascending order.
            context: the round's context.
        """
        raise NotImplementedError  # abstract

    # --------------------- methods whose server sees only the sum of the uploads (FedStats, FedSum)

    @property
    def requires_secure_sum(self) -> bool:
        """True if the server sees only the sum of the clients' uploads.

        The server's next state is then computed by `from_sum`.
        """
        return False

    def noise_shares(self, clients: int) -> int:
        """Returns the number H of clients whose noise together protects a sum.

        The privacy cost is computed from the added noise of H clients. If H is 1, each client is
        charged for its own noise only.

        Args:
            clients: the number of clients K.
        """
        return 1

    def sum_releases(self, exchange: str, context: RoundContext) -> Mapping[str, str]:
        """Names the release plan of each upload field that the server sees only as a sum.

        The keys are the names of the fields, and the values are the names of the plans.
        """
        raise NotImplementedError  # abstract

    def from_sum(
        self, exchange: str, state: State, total: Upload, clients: int, context: RoundContext
    ) -> ServerState:
        """Returns the server's state after an exchange in which the server received only a sum.

        Args:
            exchange: the exchange, "first" or "main".
            state: the server's state before the exchange.
            total: a message whose fields are the sums of the uploads' fields, float64.
            clients: the number of uploads that were added.
            context: the round's context.
        """
        raise NotImplementedError  # abstract

    # --------------------------------------- private releases that differ between rounds or clients

    same_releases_every_round: ClassVar[bool] = True

    def round_plans(self, plans: Plans, round: int) -> Plans:
        """Selects the plans whose releases are made in this round, in the order of `plans`.

        By default these are all plans. A method overrides this hook if `same_releases_every_round`
        is False. The result must be public and fixed before any data are read.

        Args:
            plans: all release plans of the method.
            round: the number of the round: 1, 2, …
        """
        return plans

    def client_plans(self, plans: Plans, client: int, context: RoundContext) -> Plans:
        """Returns this client's release plans in this round.

        By default they are the round's `plans`. A method may reduce a plan's number of steps or
        change its dimension, according to public values. The client is then charged for the changed
        plan.
        """
        return plans

    # -------------------- synthetic images that the server makes, for the run folder and for export

    images_from: ClassVar[str] = ""
    learns_from_images: ClassVar[bool] = True

    def synthetic(
        self, state: State, context: RoundContext
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the server's synthetic images and their labels for the run folder.

        The images are normalised, [N, C, H, W], and the labels have the shape [N]. Returns None if
        the server makes no images. With differential privacy the images are computed only from
        released values.
        """
        return None

    def synthetic_soft_labels(self, state: State, context: RoundContext) -> torch.Tensor | None:
        """Returns soft labels [N, classes] of the images that `synthetic` returns.

        Each row sums to 1. Returns None if the images have no soft labels.
        """
        return None

    @property
    def plans_images(self) -> bool:
        """True if a run may end with synthetic images.

        If False, `fedsynth verify` refuses a run folder that contains synthetic images.
        """
        return False

    def produces_synthetic_data(self, counted: Sequence[int]) -> bool:
        """Returns True if `synthetic` always returns images at the end of the run.

        If True, verification requires that the run folder contains the images.

        Args:
            counted: the numbers of the rounds that were completed and not discarded.
        """
        return False

    # -------------- models besides the server's, and networks that the run's settings do not decide

    heterogeneous: ClassVar[bool] = False
    personal: ClassVar[bool] = False
    variant_names: ClassVar[tuple[str, ...]] = ()
    takes_model: ClassVar[bool] = True
    model_sees_data: ClassVar[bool] = True

    def network(self, model: ModelSettings, spec: DatasetSpec, seed: int) -> nn.Module:
        """Returns an untrained network of the architecture that the server and the clients share.

        Args:
            model: the run's model settings.
            spec: the data set's specification.
            seed: the seed of the initial weights.
        """
        return build_network(model, spec, seed)

    def personal_parameters(self, parameters: Tensors, state: ClientState) -> Tensors:
        """Returns the model that a client with this state uses instead of the global model.

        The engine calls it only if `personal` is True.
        """
        return parameters

    def variants(self, state: State) -> Mapping[str, Tensors]:
        """Returns further models of the run, which are evaluated in addition to the global model.

        The keys are names in `variant_names`.
        """
        return {}

    # ------------------------------------ metrics of a round, and facts that a privacy report lists

    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {}

    def facts(self, state: State, context: RoundContext) -> Mapping[str, Any]:
        """Returns additional metrics of a round by name.

        With differential privacy they must be released values that `metric_privacy` declares.
        """
        return {}

    def client_metrics(self, states: Iterable[ClientState]) -> Mapping[str, Any]:
        """Computes additional metrics of a round from its clients' states, in a simulation.

        With differential privacy it may read only values that were computed from the server's
        messages, public noise and released values.
        """
        return {}

    def planned_facts(self, context: RoundContext) -> Mapping[str, Any]:
        """Returns the metrics of a round that follow only from the settings and the round number.

        They are the metrics that `metric_privacy` declares public. Verification recomputes them.
        """
        return {}

    def artefacts(self, state: State) -> Tensors:
        """Returns the server's matrices that are saved in the run folder, by name.

        Each matrix has the shape [classes, clients].
        """
        return {}

    def public_facts(self, spec: DatasetSpec) -> Mapping[str, str]:
        """Returns further facts that the privacy report lists as public, with a reason for each
        fact."""
        return {}

    def public_images(self) -> str:
        """Returns the name of the public data set whose training images the server uses.

        Returns "noise" if the server uses random pixels, and "" if it uses no public images. Steps
        read the images from `RoundContext.proxy`.
        """
        return ""

    def paper_epsilon(self, delta: float, sigma: float) -> Mapping[str, str]:
        """Returns the ε that the method's paper prints for these settings, for the privacy report.

        The keys are "source", "published" and "why it differs". Returns an empty mapping if the
        paper prints no ε.
        """
        return {}
