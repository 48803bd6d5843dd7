"""Hooks that only some methods override. `Method` inherits every hook with a default."""

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
"""The tensors that a client keeps between rounds. They never leave the client."""

Results = list[tuple[Message, Memory]]
"""The type of a step's results: the message and the new memory of each client, in the group's
order."""

# Methods narrow these in their signatures to their own `downlink`, `upload`, `state` and so on.
Request = Any
Upload = Any
State = Any


class OptionalHooks:
    """The hooks that a method may override. The default of each hook suits methods that do not need
    it.

    Class attributes:
        first_downlink: the type of the server's message in the first exchange. None if the method
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
    """

    # ----------------------------- an exchange with the clients before the main exchange of a round

    first_downlink: ClassVar[type[Message] | None] = None
    first_upload: ClassVar[type[Message] | None] = None

    def first_request(self, state: State, context: RoundContext) -> Message | None:
        """Returns the server's message of the first exchange, or None if this round has no first
        exchange."""
        return None

    def first_step(
        self,
        message: Request,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> Results:
        """Computes the clients' replies to the server's message of the first exchange.

        Returns each client's reply, and the memory that this round's `client_step` receives.
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

        The privacy cost is computed from the added noise of H clients.

        If H is 1, each client is charged for its own noise only.

        Args:
            clients: the number of clients K.
        """
        return 1

    def sum_releases(self, phase: str, context: RoundContext) -> Mapping[str, str]:
        """Names the release plan of each upload field that the server sees only as a sum.

        The keys are the names of the fields, and the values are the names of the plans.
        """
        raise NotImplementedError  # abstract

    def from_sum(
        self, phase: str, state: State, total: Upload, clients: int, context: RoundContext
    ) -> ServerState:
        """Returns the server's state after an exchange in which the server received only a sum.

        Args:
            phase: the exchange, "first" or "main".
            state: the server's state before the exchange.
            total: a message whose fields are the sums of the uploads' fields, float64.
            clients: the number of uploads that were added.
            context: the round's context.
        """
        raise NotImplementedError  # abstract

    # --------------------------------------- private releases that differ between rounds or clients

    same_releases_every_round: ClassVar[bool] = True

    def round_plans(self, plans: tuple[ReleasePlan, ...], round: int) -> tuple[ReleasePlan, ...]:
        """Selects the plans whose releases are made in this round, in the order of `plans`.

        By default these are all plans. A method overrides this hook if `same_releases_every_round`
        is False. The result must be public and fixed before any data are read.

        Args:
            plans: all release plans of the method.
            round: the number of the round: 1, 2, …
        """
        return plans

    def client_plans(
        self, plans: tuple[ReleasePlan, ...], client: int, context: RoundContext
    ) -> tuple[ReleasePlan, ...]:
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

    def personal_parameters(
        self, parameters: Mapping[str, torch.Tensor], memory: Memory
    ) -> Mapping[str, torch.Tensor]:
        """Returns the model that a client with this memory uses instead of the global model.

        The engine calls it only if `personal` is True.
        """
        return parameters

    def variants(self, state: State) -> Mapping[str, Mapping[str, torch.Tensor]]:
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

    def planned_facts(self, context: RoundContext) -> Mapping[str, Any]:
        """Returns the metrics of a round that follow only from the settings and the round number.

        They are the metrics that `metric_privacy` declares public. Verification recomputes them.
        """
        return {}

    def client_metrics(self, memory: Memory, context: RoundContext) -> Mapping[str, Any]:
        """Computes one client's contribution to the metrics of a round, from the client's memory.

        With differential privacy it may read only values that were computed from the server's
        messages and from public noise (post-processing).
        """
        return {}

    def aggregate_metrics(self, facts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Combines the `client_metrics` of a round's clients into metrics of the round."""
        return {}

    def artefacts(self, state: State) -> Mapping[str, torch.Tensor]:
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
