"""The interface of methods: frozen settings, declared messages, a declared state, pure steps.

A round has one or two exchanges with its clients. In the main exchange, `broadcast` makes the
server's message from its state; `client_step` makes each client's upload and its new memory from
the message and the client's view of its data; `server_step` makes the next state from the uploads.
A method may have a first exchange before it: `first_request`, each client's `first_step`, and
`first_aggregate`, which makes the state that `broadcast` sees. The engine decides how many clients
share one `client_step`, so heavy steps have a leading client axis, and a single client is a group
of one.

Class attributes declare the types of the messages and the state (`downlink`, `upload`,
`first_downlink`, `first_upload`, `state`). The engine checks every type before a step runs, so a
step names its declared type in its signature and needs no further check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import nn

from fedsynth.core.client import ClientGroup
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters
from fedsynth.core.state import ServerState
from fedsynth.core.uploads import Rule, model_rules
from fedsynth.data.registry import DatasetSpec
from fedsynth.models.registry import ModelSettings, build_network
from fedsynth.privacy.disclosure import Disclosure
from fedsynth.privacy.plans import FIRST
from fedsynth.privacy.plans import PrivatePlan as PrivatePlan  # part of this interface
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.validation import from_mapping

Memory = Mapping[str, torch.Tensor]
"""What a client keeps between rounds; it never leaves the client."""

Results = list[tuple[Message, Memory]]
"""Message and new memory of each client of a group, in the group's order."""

# Methods narrow these in their signatures to their own `downlink`, `upload`, `state` and so on.
Down = Any
Up = Any
State = Any

Presets = Mapping[str, Mapping[str, Any]]
"""By data set, the settings whose defaults a method changes for it, in addition to those of its
base classes."""


@dataclass(frozen=True)
class ExchangeTypes:
    """The message types of an exchange, down and up; None: the method has no such exchange."""

    downlink: type[Message] | None
    upload: type[Message] | None


@dataclass(frozen=True)
class Method:
    """Base class of all methods; a subclass is a frozen dataclass of validated settings.

    Class attributes:
        name: name in reports, config files and on the command line.
        summary: one line.
        reference: the paper.
        downlink: type of the server's message in a round's main exchange.
        upload: type of a client's message in it.
        first_downlink: type of the server's message in a first exchange; None: the method has no
            first exchange.
        first_upload: type of a client's message in it; None as above.
        state: type of the server's state.
        heterogeneous: whether clients may use other architectures than the server.
        personal: whether each client ends with a personal model.
        protects: the mechanisms that can protect it; empty: it cannot run with differential
            privacy, and `refusal` gives the reason.
        robust_refusal: why robust aggregation (`RunSettings.robust`) is refused; empty: it is
            allowed, and `server_step` then gets the uploads that the rule makes.
        features_refusal: why its network cannot use a fixed feature map
            (`ModelSettings.features`); empty: it can, and clients' "images" are then vectors.
        presets: by data set, the changed defaults of these settings.
        even_rounds: whether every round releases all of `private_plans`; False: `round_plans`
            selects them, and all clients take part in every round.
        discloses: for each key of its facts, its status under differential privacy; an undeclared
            key ends a private run.
        model_sees_data: whether clients run the network on private data: a custom network is then
            refused if it mixes the examples of a batch.
        takes_model: whether the run's model settings decide its network; False: the method has its
            own network, and a run that sets a model reports that the setting has no effect.
        variant_names: names of the models that `variants` may return.
        images_from: in words, what a run's synthetic images need; empty: the method makes none.
        learns_from_images: whether the run's model was trained on the images that the run exports.

    >>> from fedsynth import ModelParameters, RunSettings, simulate
    >>> class Untrained(Method):
    ...     name, upload = "untrained", ModelParameters
    ...     def broadcast(self, state, context): return ModelParameters(state.parameters, 1.0)
    ...     def client_step(self, message, clients, memories, context):
    ...         return [(type(message).from_bytes(message.to_bytes()), one) for one in memories]
    ...     def server_step(self, state, uploads, context): return state
    >>> len(simulate(RunSettings(Untrained(), rounds=1)).uploads)
    10
    """

    section: ClassVar[str] = "method"  # section of a config file
    name: ClassVar[str]
    summary: ClassVar[str]
    reference: ClassVar[str]
    heterogeneous: ClassVar[bool] = False
    personal: ClassVar[bool] = False
    downlink: ClassVar[type[Message]] = ModelParameters
    upload: ClassVar[type[Message]]
    first_downlink: ClassVar[type[Message] | None] = None
    first_upload: ClassVar[type[Message] | None] = None
    state: ClassVar[type[ServerState]] = ServerState
    protects: ClassVar[tuple[str, ...]] = ()
    refusal: ClassVar[str] = ""
    robust_refusal: ClassVar[str] = (
        "its server takes no average of models that a rule could replace"
    )
    features_refusal: ClassVar[str] = "its clients or its server work on images themselves"
    presets: ClassVar[Presets] = {}
    even_rounds: ClassVar[bool] = True
    discloses: ClassVar[Mapping[str, Disclosure]] = {}
    model_sees_data: ClassVar[bool] = True
    takes_model: ClassVar[bool] = True
    images_from: ClassVar[str] = ""
    variant_names: ClassVar[tuple[str, ...]] = ()
    learns_from_images: ClassVar[bool] = True

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings by name, as written to configs, reports and summaries."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def exchange_types(cls, phase: str) -> ExchangeTypes:
        """Returns the declared message types of an exchange ("first" or "main")."""
        if phase == FIRST:
            return ExchangeTypes(cls.first_downlink, cls.first_upload)
        return ExchangeTypes(cls.downlink, cls.upload)

    @property
    def sums_alone(self) -> bool:
        """Returns whether the server sees only the sum of its clients' uploads; it then makes its
        state by `from_sum`."""
        return False

    def noise_shares(self, clients: int) -> int:
        """Returns H, the number of clients whose summed noise is charged; 1: each client is
        charged for its own noise.

        Args:
            clients: K.
        """
        return 1

    def sum_releases(self, phase: str, context: RoundContext) -> Mapping[str, str]:
        """Returns the name of its plan for each field of an upload that is seen only as a sum."""
        raise NotImplementedError  # abstract

    def from_sum(
        self, phase: str, state: State, total: Up, clients: int, context: RoundContext
    ) -> ServerState:
        """Returns the state after an exchange in which the server received only the sum of the
        uploads.

        Args:
            phase: "first" or "main".
            state: the state before the exchange.
            total: a message whose fields are the uploads' sums, float64.
            clients: number of summed uploads.
            context: the round's.
        """
        raise NotImplementedError  # abstract

    def initial_state(self, parameters: Mapping[str, torch.Tensor]) -> ServerState:
        """Returns the state before the first round, from the initial model."""
        return self.state(parameters)

    def first_request(self, state: State, context: RoundContext) -> Message | None:
        """Returns the server's message of a first exchange; None: this round has none."""
        return None

    def first_step(
        self,
        message: Down,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> Results:
        """Returns each client's reply, and its memory for this round's `client_step`."""
        raise NotImplementedError  # abstract

    def first_aggregate(
        self, state: State, replies: Mapping[int, Up], context: RoundContext
    ) -> ServerState:
        """Returns the state after the first exchange, from all replies by client index,
        ascending."""
        raise NotImplementedError  # abstract

    def check_request(self, message: Down, context: RoundContext) -> None:
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

    def check_upload(self, phase: str, upload: Up, client: int, context: RoundContext) -> None:
        """Checks that an upload's fields, each of which already passes its rule, fit each other.

        Raises:
            UploadRejectedError: they do not; names the field.
        """

    def broadcast(self, state: State, context: RoundContext) -> Message:
        """Returns the server's message to the clients of this round."""
        raise NotImplementedError  # abstract

    def client_step(
        self,
        message: Down,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> Results:
        """Returns each client's upload and new memory, in the group's order."""
        raise NotImplementedError  # abstract

    def server_step(
        self, state: State, uploads: Mapping[int, Up], context: RoundContext
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
        return state  # type: ignore[no-any-return]

    def final_parameters(self, state: State) -> Mapping[str, torch.Tensor]:
        """Returns the model that a run ends with, where clients start from another model."""
        parameters: Mapping[str, torch.Tensor] = state.parameters
        return parameters

    def personal_parameters(
        self, parameters: Mapping[str, torch.Tensor], memory: Memory
    ) -> Mapping[str, torch.Tensor]:
        """Returns the model that a client with this memory uses in place of the global one; called
        where `personal` is set."""
        return parameters

    def facts(self, state: State, context: RoundContext) -> Mapping[str, Any]:
        """Returns additional metrics of a round, by name; with differential privacy only released
        values, which `discloses` declares."""
        return {}

    def planned_facts(self, context: RoundContext) -> Mapping[str, Any]:
        """Returns the metrics of a round that follow only from the settings and the round: the
        public values of `discloses`. Verification recomputes them."""
        return {}

    def client_facts(self, memory: Memory, context: RoundContext) -> Mapping[str, Any]:
        """Returns a client's metrics of its memory, for the round's metrics.

        With differential privacy it may read only values that were computed from the server's
        messages and public noise (post-processing).
        """
        return {}

    def merge_facts(self, facts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Returns the round's metrics, combined from the `client_facts` of its clients."""
        return {}

    def variants(self, state: State) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Returns other models of the same training, by a name of `variant_names`; they are also
        evaluated."""
        return {}

    def artefacts(self, state: State) -> Mapping[str, torch.Tensor]:
        """Returns the server's matrices [classes, clients] for the run folder."""
        return {}

    def synthetic(
        self, state: State, context: RoundContext
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns images that the server made, [N, C, H, W], normalised, and their labels [N], for
        the run folder; None: it makes none. With differential privacy they come only from released
        values."""
        return None

    def synthetic_soft_labels(self, state: State, context: RoundContext) -> torch.Tensor | None:
        """Returns soft labels [N, classes] of the images of `synthetic`, each row summing to 1;
        None: there are none."""
        return None

    @property
    def plans_images(self) -> bool:
        """Returns True if a run may end with synthetic images; otherwise verify refuses them."""
        return False

    def makes_images(self, counted: Sequence[int]) -> bool:
        """Returns whether `synthetic` is certain to return images at the end; verification then
        requires them in the run folder.

        Args:
            counted: the rounds that counted.
        """
        return False

    def client_bytes(self, context: RoundContext) -> int | None:
        """Returns about how many bytes one more client in a `client_step` takes; None: clients run
        one at a time, because a group gains nothing.

        The engine divides the run's memory bound by it. It does not change results.
        """
        return None

    def network(self, model: ModelSettings, spec: DatasetSpec, seed: int) -> nn.Module:
        """Returns an untrained network of the architecture that server and clients share.

        Args:
            model: the run's model settings.
            spec: the data set's specification.
            seed: seed of the initial weights.
        """
        return build_network(model, spec, seed)

    def public_facts(self, spec: DatasetSpec) -> Mapping[str, str]:
        """Returns further items that the privacy report lists as public, each with the reason."""
        return {}

    def public_images(self) -> str:
        """Returns the data set, declared public, whose training images the server uses; or "noise"
        (random pixels); "": none. Steps read the images from `RoundContext.proxy`."""
        return ""

    def printed_epsilon(self, delta: float, sigma: float) -> Mapping[str, str]:
        """Returns the ε that the method's paper prints for these settings, for the privacy report:
        "source", "published" and "why it differs"; empty: the paper prints none."""
        return {}

    def check_model(self, model: nn.Module) -> None:
        """Raises SettingError if the method cannot work with this architecture."""

    def private_plans(
        self, privacy: PrivacySettings, context: RoundContext
    ) -> tuple[PrivatePlan, ...]:
        """Returns the plans of a round's releases of each client under `privacy`, the main release
        first; called before any data are read.

        Each client is charged for every plan, and a step gets the charged series by name
        (`PrivateClients.series`).
        """
        raise NotImplementedError  # abstract

    def round_plans(self, plans: tuple[PrivatePlan, ...], round: int) -> tuple[PrivatePlan, ...]:
        """Returns the plans of `plans` that this round (1, 2, …) releases, in their order.

        All of them, unless `even_rounds` is False. The result is public, and fixed before any data
        are read.
        """
        return plans

    def client_plans(
        self, plans: tuple[PrivatePlan, ...], client: int, context: RoundContext
    ) -> tuple[PrivatePlan, ...]:
        """Returns this client's plans in this round, where public values make them differ from the
        round's `plans`.

        A plan may have fewer steps or another dimension; the client is charged for that plan.
        """
        return plans

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Returns settings from names and values as read from TOML or text; text is converted to
        the field's type.

        Raises:
            UnknownNameError: no such setting (with the near matches).
            SettingError: a value of the wrong type or outside its range.
        """
        return from_mapping(cls, values, of=cls.name)
