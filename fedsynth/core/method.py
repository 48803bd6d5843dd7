"""The seam for methods: frozen settings, declared messages, a declared state, pure steps.

A round has one exchange with its clients, or two. The main one: `broadcast` makes the server's
message from its state; `client_step` makes every client's upload (and its new memory) from the
message and the client's view of its data; `server_step` makes the next state from the uploads. A
method may have a first exchange before it: `first_request`, every client's `first_step`, and
`first_aggregate`, which makes the state that `broadcast` sees. The engine decides how many clients
go into one `client_step`, so heavy steps are written with a leading client axis and a single client
is a group of one.

What each message and the state are is declared in class attributes (`downlink`, `upload`,
`first_downlink`, `first_upload`, `state`). The engine checks the type of everything before a step
sees it, so a step names the type that it declared in its signature, and asks no further.
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
from fedsynth.privacy.plans import PrivatePlan as PrivatePlan  # part of the seam
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.validation import from_mapping

Memory = Mapping[str, torch.Tensor]
"""What a client keeps between rounds; it never leaves the client."""

Results = list[tuple[Message, Memory]]
"""Message and new memory of each client of a group, in the group's order."""

# What a method's own signatures narrow: its `downlink`, `upload` and so on, and its `state`.
Down = Any
Up = Any
State = Any

Presets = Mapping[str, Mapping[str, Any]]
"""A data set: the settings' values that are a method's defaults there, beside those of its
bases."""


@dataclass(frozen=True)
class ExchangeTypes:
    """The messages of an exchange, down and up; None: the method has no such exchange."""

    downlink: type[Message] | None
    upload: type[Message] | None


@dataclass(frozen=True)
class Method:
    """Base of all methods; a subclass is a frozen dataclass of validated settings.

    Class attributes:
        name: for people, and for config files and the command line.
        summary: one line.
        reference: the paper.
        downlink: type of the server's message in a round's main exchange.
        upload: type of a client's.
        first_downlink: type of the server's message in a first exchange; None: the method never has
            one.
        first_upload: type of a client's, likewise.
        state: type of the server's state.
        heterogeneous: whether clients may have other architectures than the server.
        personal: whether clients end with models of their own.
        protects: the mechanisms that can protect it; empty: it cannot run with differential
            privacy, and `refusal` says why.
        robust_refusal: why robust aggregation (`RunSettings.robust`) is refused; empty: the uploads
            that its step gets are then made by the rule.
        features_refusal: why its network cannot stand on a fixed feature map
            (`ModelSettings.features`); empty: it can, and clients' "images" are then vectors.
        presets: by data set, what it changes of these settings' defaults.
        even_rounds: whether every round releases all of `private_plans`; False: `round_plans` says
            which, and all clients take part in every round.
        discloses: of each key of its facts what it is with differential privacy; a key that is not
            declared ends a private run.
        model_sees_data: whether clients compute on private data with the network: one of the user's
            own is then refused where it mixes the examples of a batch.
        takes_model: whether the run's model settings decide its network; False: it has one of its
            own, and a run that sets a model says that this changes nothing.
        variant_names: of the models that `variants` may return.
        images_from: in words, what a run's synthetic images need; empty: the method makes none.
        learns_from_images: whether the run's model was trained on the images that it hands over.

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

    section: ClassVar[str] = "method"  # of a config file
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
        """Returns the settings, by name, as configs, reports and summaries state them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def exchange_types(cls, phase: str) -> ExchangeTypes:
        """The declared messages of one of a round's exchanges ("first" or "main")."""
        if phase == FIRST:
            return ExchangeTypes(cls.first_downlink, cls.first_upload)
        return ExchangeTypes(cls.downlink, cls.upload)

    @property
    def sums_alone(self) -> bool:
        """Whether the server is to see the sum of its clients' uploads, and none of them: it then
        makes its state by `from_sum`."""
        return False

    def noise_shares(self, clients: int) -> int:
        """H: the noise that is charged is that of so many clients together; 1: each one's own.

        Args:
            clients: K.
        """
        return 1

    def sum_releases(self, phase: str, context: RoundContext) -> Mapping[str, str]:
        """Of each field of an upload whose sum alone is seen the name of its plan."""
        raise NotImplementedError  # abstract

    def from_sum(
        self, phase: str, state: State, total: Up, clients: int, context: RoundContext
    ) -> ServerState:
        """The state after an exchange of which the server has the sum of the uploads.

        Args:
            phase: "first" or "main".
            state: before it.
            total: a message whose fields are the uploads' sums, float64.
            clients: of how many.
            context: the round's.
        """
        raise NotImplementedError  # abstract

    def initial_state(self, parameters: Mapping[str, torch.Tensor]) -> ServerState:
        """The state before the first round, from the initial model."""
        return self.state(parameters)

    def first_request(self, state: State, context: RoundContext) -> Message | None:
        """The server's message of a first exchange; None: this round has none."""
        return None

    def first_step(
        self,
        message: Down,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> Results:
        """Reply of each client of the group, and its memory for this round's `client_step`."""
        raise NotImplementedError  # abstract

    def first_aggregate(
        self, state: State, replies: Mapping[int, Up], context: RoundContext
    ) -> ServerState:
        """The state after the first exchange, from all replies by client number, ascending."""
        raise NotImplementedError  # abstract

    def check_request(self, message: Down, context: RoundContext) -> None:
        """Refuses a request whose tensors are not what a step expects, before any charge.

        The model itself is checked by the engine. A method whose requests have other tensors
        checks their shapes: one that is odd could mix the examples of a private step.

        Raises:
            RequestRefusedError: names the field.
        """

    def upload_rules(self, phase: str, client: int, context: RoundContext) -> dict[str, Rule]:
        """What the server expects of each field of this client's upload in an exchange.

        A field without a rule may be anything finite. Every tensor is looked at once, before any
        step sees it; the most bytes of an upload on a wire follow from the rules, too.

        Args:
            phase: "first" or "main".
            client: its number.
            context: the round's; all that is read of it is public.
        """
        declared = self.exchange_types(phase).upload
        if declared is not None and issubclass(declared, ModelParameters):
            return model_rules(client, context)
        return {}

    def check_upload(self, phase: str, upload: Up, client: int, context: RoundContext) -> None:
        """Refuses an upload whose fields do not fit each other; each of them keeps to its rule.

        Raises:
            UploadRejectedError: names the field.
        """

    def broadcast(self, state: State, context: RoundContext) -> Message:
        """The server's message to the clients of this round."""
        raise NotImplementedError  # abstract

    def client_step(
        self,
        message: Down,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> Results:
        """Upload and new memory of each client of the group, in the group's order."""
        raise NotImplementedError  # abstract

    def server_step(
        self, state: State, uploads: Mapping[int, Up], context: RoundContext
    ) -> ServerState:
        """The next state from all uploads of the round, by client number, ascending."""
        raise NotImplementedError  # abstract

    def at_end(self, state: State, context: RoundContext) -> ServerState:
        """What the server makes of its state after the last round, which a run may reach before
        all rounds are played (a budget that is spent): images, say. With differential privacy it
        has released values alone, and so costs nothing.

        Args:
            state: after that round.
            context: that round's.
        """
        return state  # type: ignore[no-any-return]

    def final_parameters(self, state: State) -> Mapping[str, torch.Tensor]:
        """The model that a run ends with, where it is not the one that clients start from."""
        found: Mapping[str, torch.Tensor] = state.parameters
        return found

    def personal_parameters(
        self, parameters: Mapping[str, torch.Tensor], memory: Memory
    ) -> Mapping[str, torch.Tensor]:
        """The model that a client with this memory uses itself in place of the global one; asked
        where `personal` is set."""
        return parameters

    def facts(self, state: State, context: RoundContext) -> Mapping[str, Any]:
        """Returns what else a round's row of metrics states, by name; with differential privacy
        only released values, which `discloses` declares."""
        return {}

    def planned_facts(self, context: RoundContext) -> Mapping[str, Any]:
        """Returns what a round's row states that follows only from the settings and the round:
        the public values of `discloses`. Verification computes them again."""
        return {}

    def client_facts(self, memory: Memory, context: RoundContext) -> Mapping[str, Any]:
        """What a client of the round says of what it now keeps, for the round's row.

        With differential privacy on only values may be read that were computed from the server's
        messages and public noise (post-processing).
        """
        return {}

    def merge_facts(self, facts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """What the round's row says, from the `client_facts` of its clients."""
        return {}

    def variants(self, state: State) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Returns other models of the same training, by a name of `variant_names`, which are
        evaluated, too."""
        return {}

    def artefacts(self, state: State) -> Mapping[str, torch.Tensor]:
        """Matrices of the server, [classes, clients], that belong into the run folder."""
        return {}

    def synthetic(
        self, state: State, context: RoundContext
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Images that the server made itself, [N, C, H, W], normalised, and their labels [N], for
        the run folder; None: it makes none. With differential privacy they come from released
        values alone."""
        return None

    def synthetic_soft_labels(self, state: State, context: RoundContext) -> torch.Tensor | None:
        """Soft labels [N, classes] of the images of `synthetic`, rows of sum 1; None: it has
        none."""
        return None

    @property
    def plans_images(self) -> bool:
        """Returns True if a run may end with synthetic images; otherwise verify refuses them."""
        return False

    def makes_images(self, counted: Sequence[int]) -> bool:
        """Returns whether `synthetic` surely has images at the end, for verification: a run folder
        without them lacks something.

        Args:
            counted: the rounds that counted.
        """
        return False

    def client_bytes(self, context: RoundContext) -> int | None:
        """Memory that one more client in a `client_step` takes, about; None: clients go one at a
        time, as nothing is gained by a group.

        The engine divides the run's memory bound by it. It has no influence on what is computed.
        """
        return None

    def network(self, model: ModelSettings, spec: DatasetSpec, seed: int) -> nn.Module:
        """An untrained network of the architecture that server and clients share.

        Args:
            model: the run's settings of it.
            spec: the data set's.
            seed: of the initial weights.
        """
        return build_network(model, spec, seed)

    def public_facts(self, spec: DatasetSpec) -> Mapping[str, str]:
        """What else the privacy report lists as public: an item, and why it is."""
        return {}

    def public_images(self) -> str:
        """The data set whose training images the server computes with, declared public, or "noise"
        (random pixels); "": none. A step finds them in `RoundContext.proxy`."""
        return ""

    def printed_epsilon(self, delta: float, sigma: float) -> Mapping[str, str]:
        """What the method's paper prints as ε for these settings and why it differs, for the
        privacy report: "source", "published" and "why it differs"; empty: nothing."""
        return {}

    def check_model(self, model: nn.Module) -> None:
        """Raises SettingError if the method cannot work with this architecture."""

    def private_plans(
        self, privacy: PrivacySettings, context: RoundContext
    ) -> tuple[PrivatePlan, ...]:
        """What a round releases of each client under `privacy`, the chief release first; asked
        before any data are read.

        Each client is charged for each of them, and a step gets the charged series by name
        (`PrivateClients.series`).
        """
        raise NotImplementedError  # abstract

    def round_plans(self, plans: tuple[PrivatePlan, ...], round: int) -> tuple[PrivatePlan, ...]:
        """Those of `plans` that the round with this number (1, 2, …) releases, in their order.

        All of them, unless `even_rounds` is False; the answer is public, and fixed before any data
        are read.
        """
        return plans

    def client_plans(
        self, plans: tuple[PrivatePlan, ...], client: int, context: RoundContext
    ) -> tuple[PrivatePlan, ...]:
        """What this client releases in this round, where public values make it another than
        `plans`, which are those of the round.

        It may take fewer steps, and have another dimension; it is charged for that.
        """
        return plans

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Settings from names and values as TOML or text gives them; text is converted to the
        field's type.

        Raises:
            UnknownNameError: no such setting (with the near matches).
            SettingError: a value of the wrong type or outside its range.
        """
        return from_mapping(cls, values, of=cls.name)
