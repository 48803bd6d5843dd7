"""The base class of methods whose clients send images: the server trains on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters
from fedsynth.core.method import Method, Presets, State, Up
from fedsynth.core.state import ServerState
from fedsynth.synthesizer.condensation.sets import train_on_union
from fedsynth.training.optimisers import MomentumSgd
from fedsynth.training.sgd import Objective, SgdSettings
from fedsynth.validation import check_ranges


@dataclass(frozen=True)
class TrainsOnUnion(Method):
    """A method whose server trains w from w_r on all uploaded images (FedDM, Eq. 10).

    Args:
        server_epochs, server_batch, server_lr: SGD on the union, with the paper's values.
        server_momentum, server_weight_decay: not in the paper; they follow distribution matching's
            public code.
    """

    presets: ClassVar[Presets] = {"digits": {"server_epochs": 60}}
    features_refusal: ClassVar[str] = (
        "its network is trained on condensed images: take fedstats, whose images come from sums of "
        "features"
    )
    robust_refusal: ClassVar[str] = (
        "its server averages no models, it trains on the union of the clients' images, where a "
        "client that lies has the share of the images that it sends"
    )

    server_epochs: int = 500
    server_batch: int = 256
    server_lr: float = 0.01
    server_momentum: float = 0.9
    server_weight_decay: float = 5e-4

    def __post_init__(self) -> None:
        check_ranges(self, server_epochs=(0, inf), server_batch=(1, inf), server_lr=(0, inf))
        check_ranges(self, server_momentum=(0, 1), server_weight_decay=(0, inf))

    def ball(self) -> float | None:
        """Returns ρ of the ball around w_r that the server stays in, or None for no ball."""
        return None

    def union_sgd(self) -> SgdSettings:
        """Returns the settings of the server's training."""
        return SgdSettings(
            self.server_epochs,
            self.server_batch,
            MomentumSgd(self.server_lr, self.server_momentum, self.server_weight_decay),
            self.ball(),
        )

    def server_objective(
        self, uploads: Mapping[int, Up], context: RoundContext
    ) -> Objective | None:
        """Returns the minibatch loss of server training; None: only the cross-entropy."""
        return None

    def broadcast(self, state: State, context: RoundContext) -> Message:
        return ModelParameters(state.parameters, 1.0)

    def server_step(
        self, state: State, uploads: Mapping[int, Up], context: RoundContext
    ) -> ServerState:
        before: ServerState = state
        model = context.load(before.parameters)
        objective = self.server_objective(uploads, context)
        train_on_union(model, uploads, self.union_sgd(), context, objective)
        return replace(before, parameters=model.state_dict())


@dataclass(frozen=True)
class TrainsInBall(TrainsOnUnion):
    """A method whose server stays in ‖w − w_r‖₂ ≤ ρ (FedDM, Eqs. 3 and 23).

    Args:
        radius: ρ.
    """

    radius: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, radius=(0, inf))

    def ball(self) -> float | None:
        return self.radius
