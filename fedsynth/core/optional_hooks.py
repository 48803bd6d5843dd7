"""Hooks that only some methods need, in groups; `Method` inherits all of them with their defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from fedsynth.core.client import ClientGroup
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message
from fedsynth.data.registry import DatasetSpec
from fedsynth.models.registry import ModelSettings, build_network
from fedsynth.privacy.disclosure import Disclosure
from fedsynth.privacy.plans import ReleasePlan

Memory = Mapping[str, torch.Tensor]
"""What a client keeps between rounds; it never leaves the client."""

Results = list[tuple[Message, Memory]]
"""Message and new memory of each client of a group, in the group's order."""

# Methods narrow these in their signatures to their own `downlink`, `upload`, `state` and so on.
Request = Any
Upload = Any
State = Any


class FirstExchange:
    """A first exchange with the clients, before the main one of a round.

    Class attributes:
        first_downlink: type of the server's message in a first exchange; None: the method has none.
        first_upload: type of a client's message in it; None as above.
    """

    first_downlink: ClassVar[type[Message] | None] = None
    first_upload: ClassVar[type[Message] | None] = None

    def first_request(self, state: State, context: RoundContext) -> Message | None:
        """Returns the server's message of a first exchange; None: this round has none."""
        return None

    def first_step(
        self,
        message: Request,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> Results:
        """Returns each client's reply, and its memory for this round's `client_step`."""
        raise NotImplementedError  # abstract

    def first_aggregate(
        self, state: State, replies: Mapping[int, Upload], context: RoundContext
    ) -> ServerState:
        """Returns the state after the first exchange, from all replies by client index,
        ascending."""
        raise NotImplementedError  # abstract


class SecureSums:
    """Uploads of which the server sees only the sum (FedStats, FedSum)."""

    @property
    def requires_secure_sum(self) -> bool:
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
        self, phase: str, state: State, total: Upload, clients: int, context: RoundContext
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


class ReleaseSchedule:
    """Private releases that differ between rounds or clients.

    Class attributes:
        same_releases_every_round: whether every round releases all of `release_plans`; False:
            `round_plans` selects them, and all clients take part in every round.
    """

    same_releases_every_round: ClassVar[bool] = True

    def round_plans(self, plans: tuple[ReleasePlan, ...], round: int) -> tuple[ReleasePlan, ...]:
        """Returns the plans of `plans` that this round (1, 2, …) releases, in their order.

        All of them, unless `same_releases_every_round` is False. The result is public, and fixed
        before any data are read.
        """
        return plans

    def client_plans(
        self, plans: tuple[ReleasePlan, ...], client: int, context: RoundContext
    ) -> tuple[ReleasePlan, ...]:
        """Returns this client's plans in this round, where public values make them differ from the
        round's `plans`.

        A plan may have fewer steps or another dimension; the client is charged for that plan.
        """
        return plans


class SyntheticImages:
    """Synthetic images that the server makes, for the run folder and for export.

    Class attributes:
        images_from: in words, what a run's synthetic images need; empty: the method makes none.
        learns_from_images: whether the run's model was trained on the images that the run exports.
    """

    images_from: ClassVar[str] = ""
    learns_from_images: ClassVar[bool] = True

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

    def produces_synthetic_data(self, counted: Sequence[int]) -> bool:
        """Returns whether `synthetic` is certain to return images at the end; verification then
        requires them in the run folder.

        Args:
            counted: the rounds that counted.
        """
        return False


class OtherModels:
    """Models besides the server's, and networks that the run's settings do not decide.

    Class attributes:
        heterogeneous: whether clients may use other architectures than the server.
        personal: whether each client ends with a personal model.
        variant_names: names of the models that `variants` may return.
        takes_model: whether the run's model settings decide its network; False: the method has its own
            network, and a run that sets a model reports that the setting has no effect.
        model_sees_data: whether clients run the network on private data: a custom network is then refused
            if it mixes the examples of a batch.
    """

    heterogeneous: ClassVar[bool] = False
    personal: ClassVar[bool] = False
    variant_names: ClassVar[tuple[str, ...]] = ()
    takes_model: ClassVar[bool] = True
    model_sees_data: ClassVar[bool] = True

    def network(self, model: ModelSettings, spec: DatasetSpec, seed: int) -> nn.Module:
        """Returns an untrained network of the architecture that server and clients share.

        Args:
            model: the run's model settings.
            spec: the data set's specification.
            seed: seed of the initial weights.
        """
        return build_network(model, spec, seed)

    def personal_parameters(
        self, parameters: Mapping[str, torch.Tensor], memory: Memory
    ) -> Mapping[str, torch.Tensor]:
        """Returns the model that a client with this memory uses in place of the global one; called
        where `personal` is set."""
        return parameters

    def variants(self, state: State) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Returns other models of the same training, by a name of `variant_names`; they are also
        evaluated."""
        return {}


class RoundMetrics:
    """Metrics of a round, and the facts that a privacy report lists.

    Class attributes:
        metric_privacy: for each key of its facts, its status under differential privacy; an
            undeclared key ends a private run.
    """

    metric_privacy: ClassVar[Mapping[str, Disclosure]] = {}

    def facts(self, state: State, context: RoundContext) -> Mapping[str, Any]:
        """Returns additional metrics of a round, by name; with differential privacy only released
        values, which `metric_privacy` declares."""
        return {}

    def planned_facts(self, context: RoundContext) -> Mapping[str, Any]:
        """Returns the metrics of a round that follow only from the settings and the round: the
        public values of `metric_privacy`. Verification recomputes them."""
        return {}

    def client_metrics(self, memory: Memory, context: RoundContext) -> Mapping[str, Any]:
        """Returns a client's metrics of its memory, for the round's metrics.

        With differential privacy it may read only values that were computed from the server's
        messages and public noise (post-processing).
        """
        return {}

    def aggregate_metrics(self, facts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Returns the round's metrics, combined from the `client_metrics` of its clients."""
        return {}

    def artefacts(self, state: State) -> Mapping[str, torch.Tensor]:
        """Returns the server's matrices [classes, clients] for the run folder."""
        return {}

    def public_facts(self, spec: DatasetSpec) -> Mapping[str, str]:
        """Returns further items that the privacy report lists as public, each with the reason."""
        return {}

    def public_images(self) -> str:
        """Returns the data set, declared public, whose training images the server uses; or "noise"
        (random pixels); "": none. Steps read the images from `RoundContext.proxy`."""
        return ""

    def paper_epsilon(self, delta: float, sigma: float) -> Mapping[str, str]:
        """Returns the ε that the method's paper prints for these settings, for the privacy report:
        "source", "published" and "why it differs"; empty: the paper prints none."""
        return {}


class OptionalHooks(
    FirstExchange, SecureSums, ReleaseSchedule, SyntheticImages, OtherModels, RoundMetrics
):
    """All hooks that have a default."""
