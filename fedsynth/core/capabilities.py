"""Optional interfaces that a method can inherit, in addition to the base class `Method`.

A method that has an ability inherits from its class, and the engine asks for it by `isinstance`. A
method whose server needs only the sum of the uploads inherits from `fedsynth.core.sums`. A hook
that is marked as abstract must be written. A run refuses a hook whose class the method does not
inherit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from fedsynth.core.client import Group
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message, ModelParameters, Tensors
from fedsynth.core.method import (
    ClientState,
    ClientStates,
    Method,
    Plans,
    Request,
    Results,
    State,
    Upload,
)
from fedsynth.core.sums import SummedUploads
from fedsynth.core.uploads import Rule, model_rules
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import MessageError
from fedsynth.models.registry import ModelSettings, build_network
from fedsynth.privacy.disclosure import Disclosure
from fedsynth.privacy.plans import FIRST
from fedsynth.seeding import forked_rng


class TwoExchanges(Method):
    """A method whose rounds have a first exchange with the clients before the main exchange.

    Class attributes:
        first_request: the type of the server's message in the first exchange.
        first_upload: the type of a client's message in the first exchange.
    """

    first_request: ClassVar[type[Message]] = ModelParameters
    first_upload: ClassVar[type[Message]]

    def upload_rules(self, exchange: str, client: int, context: RoundContext) -> dict[str, Rule]:
        if exchange == FIRST and issubclass(self.first_upload, ModelParameters):
            return model_rules(client, context)
        return super().upload_rules(exchange, client, context)

    @abstractmethod
    def first_broadcast(self, state: State, context: RoundContext) -> Message | None:
        """Returns the server's message in the first exchange, or None if the round has none."""

    @abstractmethod
    def first_step(
        self, message: Request, clients: Group, states: ClientStates, context: RoundContext
    ) -> Results:
        """Computes the clients' replies in the first exchange from the server's message.

        Returns each client's reply, and the state that the round's `client_step` receives.
        """

    @abstractmethod
    def first_aggregate(
        self, state: State, replies: Mapping[int, Upload], context: RoundContext
    ) -> ServerState:
        """Returns the server's state after the first exchange.

        Args:
            state: the server's state before the first exchange.
            replies: all replies by client index, in ascending order.
            context: the context of the round.
        """


class Exchange(NamedTuple):
    """The message types and the steps of one exchange in a method's round."""

    request: type[Message]
    upload: type[Message]
    broadcast: Callable[[State, RoundContext], Message | None]
    client_step: Callable[[Request, Group, ClientStates, RoundContext], Results]
    server_step: Callable[[State, Mapping[int, Upload], RoundContext], ServerState]


def exchange_of(method: Method, name: str) -> Exchange:
    """Returns the message types and steps of a method's "first" or "main" exchange.

    Raises:
        MessageError: the method has no first exchange.
    """
    if name != FIRST:
        steps = method.broadcast, method.client_step, method.server_step
        return Exchange(method.request, method.upload, *steps)
    if not isinstance(method, TwoExchanges):
        raise MessageError(f"method {method.name} has no {name!r} exchange. Use 'main'")
    first_steps = method.first_broadcast, method.first_step, method.first_aggregate
    return Exchange(method.first_request, method.first_upload, *first_steps)


def upload_types(method: Method | type[Method]) -> tuple[type[Message], ...]:
    """Returns the types of a client's messages in a round, in the order of the exchanges."""
    cls = method if isinstance(method, type) else type(method)
    if issubclass(cls, TwoExchanges):
        return cls.first_upload, cls.upload
    return (cls.upload,)


class VaryingReleases(Method):
    """A method whose private releases differ between rounds.

    All clients must take part in every round.
    """

    @abstractmethod
    def round_plans(self, plans: Plans, round: int, rounds: int) -> Plans:
        """Selects the release plans that apply in one round, in the order of `plans`.

        The result must be public and fixed before any data are read.

        Args:
            plans: all release plans of the method.
            round: the number of the round: 1, 2, …
            rounds: the planned number of rounds.
        """


class SyntheticImages(Method):
    """A method whose server makes synthetic images, to be saved in the run folder and exported."""

    @abstractmethod
    def synthetic(
        self, state: State, context: RoundContext
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Returns the server's synthetic images, their labels and their soft labels.

        The images are normalised, [N, C, H, W], the labels have the shape [N], and the soft labels
        [N, classes], or None. Returns None if the run has no images. With differential privacy the
        images are computed only from released values.
        """

    def check_images(self) -> None:
        """Raises an error if the run might not make any synthetic images.

        Raises:
            SettingError: the setting that a run with images needs.
        """


class ImagesAtEnd(SyntheticImages):
    """A method whose server makes synthetic images after the last round.

    The run's model is not trained on them.
    """

    @abstractmethod
    def at_end(self, state: State, context: RoundContext) -> ServerState:
        """Makes the images, and returns the server's state that contains them.

        It is called after the last round. A run can end before the planned number of rounds if the
        privacy budget is used up. With differential privacy the images are made only from released
        values, so they need no further budget.

        Args:
            state: the server's state after the last round.
            context: the context of the last round.
        """


class HeterogeneousClients(Method):
    """A method whose clients may use other architectures than the server."""


class PersonalModels(Method):
    """A method that ends with a personal model for each client."""

    @abstractmethod
    def personal_parameters(self, parameters: Tensors, state: ClientState) -> Tensors:
        """Returns the parameters of a client's personal model.

        The client uses this model instead of the global model.
        """


class OwnNetwork(Method):
    """A method that replaces the run's model with its own network.

    The network's inputs are public features, and the clients do not run it on private data. A run
    that sets a model reports that the setting has no effect.
    """

    @abstractmethod
    def network(self, spec: DatasetSpec) -> nn.Module:
        """Returns an untrained network for the images of a data set."""

    def public_facts(self, spec: DatasetSpec) -> Mapping[str, str]:
        """Returns additional public facts for the privacy report.

        The keys name the facts. Each value describes a fact, and why it is public.
        """
        return {}


class ExtendsNetwork(Method):
    """A method that adds layers to the run's model. They are trained and sent with the model."""

    @abstractmethod
    def add_layers(self, network: nn.Module, spec: DatasetSpec) -> nn.Module:
        """Returns an untrained network that includes the added layers.

        It is the same network with further attributes, or a network around it. Initial weights come
        from torch's global generator, which is seeded by the run.
        """


def network_of(method: Method, model: ModelSettings, spec: DatasetSpec, seed: int) -> nn.Module:
    """Builds the untrained network that the server and the clients train.

    Args:
        method: the method.
        model: the run's model settings.
        spec: the data set's specification.
        seed: the seed of the initial weights.
    """
    if isinstance(method, OwnNetwork):
        return method.network(spec)
    network = build_network(model, spec, seed)
    if isinstance(method, ExtendsNetwork):
        with forked_rng(seed, "added layers"):
            return method.add_layers(network, spec)
    return network


class Measurements(Method):
    """A method that adds its own metrics to the run's metrics.

    Class attributes:
        metric_privacy: each round metric's status under differential privacy. A private
            run leaves out, with a warning, a metric that is not declared here.
        variant_names: the names of the models that `variants` may return.
    """

    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {}
    variant_names: ClassVar[tuple[str, ...]] = ()

    def facts(self, state: State, context: RoundContext) -> Mapping[str, Any]:
        """Returns the metrics that the method adds in a round, by name.

        With differential privacy they must be released values that `metric_privacy` declares.
        """
        return {}

    def client_metrics(self, states: Iterable[ClientState]) -> Mapping[str, Any]:
        """Computes metrics of a round from the clients' states, in simulations only.

        With differential privacy it may read only values that were computed from the server's
        messages, public noise and released values.
        """
        return {}

    def planned_facts(self, context: RoundContext) -> Mapping[str, Any]:
        """Returns a round's metrics that depend only on the settings and the round number.

        They are the metrics that `metric_privacy` declares public. Verification recomputes them.
        """
        return {}

    def variants(self, state: State) -> Mapping[str, Tensors]:
        """Returns further models by name, to be evaluated in addition to the global model."""
        return {}

    def artefacts(self, state: State) -> Tensors:
        """Returns matrices to be saved in the run folder, by name.

        Each matrix has the shape [classes, clients].
        """
        return {}


class PublicImages(Method):
    """A method whose server uses the public images in `RoundContext.proxy`."""

    @abstractmethod
    def public_images(self) -> str:
        """Returns the name of the public data set whose training images the server uses.

        Returns "noise" if the server uses random pixels.
        """


class PublishedEpsilon(Method):
    """A method whose paper claims a differential privacy guarantee ε."""

    @abstractmethod
    def paper_epsilon(self, delta: float, sigma: float) -> Mapping[str, str]:
        """Returns the ε that the method's paper claims for the run's settings.

        The privacy report quotes it. The keys are "source", "published" and "why it differs".
        """


class ServerParts(Method):
    """A method whose server step has parts that do not depend on each other.

    In a simulation on several ranks, all ranks compute them.
    """

    @abstractmethod
    def server_part(self, shared: Tensors, context: RoundContext) -> Callable[[Tensors], Tensors]:
        """Returns the function that computes a part's result from the part's tensors.

        The result must be the same at each rank.

        Args:
            shared: the tensors that all parts need.
            context: the context of the round.
        """

    def in_parts(
        self, shared: Tensors, context: RoundContext
    ) -> Callable[[Sequence[Tensors]], Iterator[Tensors]]:
        """Returns a function that yields each part's result, in order.

        Other ranks compute their parts in advance.
        """
        if context.all_ranks is not None:
            return partial(context.all_ranks, shared, context)
        return partial(map, self.server_part(shared, context))


def unused_hooks(method: Method) -> Iterator[str]:
    """Yields the names of hooks that the method defines, but that are never called.

    A hook is called only if the method inherits from the hook's class.
    """
    called = {*dir(SummedUploads), *method.to_dict()}
    for capability in CAPABILITIES:
        if isinstance(method, capability):
            called.update(vars(capability), capability.__annotations__)
    for capability in CAPABILITIES:
        for name in {**vars(capability), **capability.__annotations__}:
            if hasattr(method, name) and name not in called:
                yield f"{name} of {capability.__name__}"


CAPABILITIES: tuple[type[Method], ...] = (
    *(TwoExchanges, VaryingReleases, SyntheticImages, ImagesAtEnd, PersonalModels, OwnNetwork),
    *(ExtendsNetwork, Measurements, PublicImages, PublishedEpsilon, ServerParts),
)
