"""The context that each step of a round receives, and the base class for a method's server state.

Everything in the context is public and can be pickled. A server state is a frozen dataclass that is
serialised in the same way as a message.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedsynth.core.messages import Packed, Tensors
from fedsynth.data.images import ImageData
from fedsynth.data.registry import DatasetSpec
from fedsynth.privacy.randomness import Grid
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.training.loop import LoopCheckpointer, State, resumable


@dataclass(frozen=True)
class ServerState(Packed):
    """The base class of what the server stores between rounds, such as the global model.

    A subclass gives each further field a default value, which the field has before the first round.
    The default is {}, a number or None.

    Args:
        parameters: the model's parameters and buffers by name, on the run's device.

    >>> import torch
    >>> @dataclass(frozen=True)
    ... class Averaged(ServerState):
    ...     rounds: int = 0
    >>> state = Averaged({"weight": torch.ones(2, 3)}, rounds=4)
    >>> Averaged.from_bytes(state.to_bytes()).rounds
    4
    """

    parameters: Mapping[str, Tensor]


def _ignore(*_values: object, **_named: object) -> None:
    """Ignores progress events and notes."""


def unmeasured(_model: nn.Module) -> float:
    """Returns NaN, for models whose accuracy is not measured."""
    return math.nan


# A function (tensors that all parts need, the context, the parts) that yields the parts' results.
AllRanks = Callable[[Tensors, "RoundContext", Sequence[Tensors]], Iterator[Tensors]]


@dataclass(frozen=True)
class RoundContext:
    """The public settings and values of a round, which every step of the round receives.

    Only `round`, `participants`, `report`, `note`, `measure`, `keeper` and `all_ranks` differ
    between the rounds of a run.

    Args:
        round: the number of the round: 1, 2, …
        seed: the seed of all reproducible randomness.
        device: the device of all tensors.
        spec: the data set's specification.
        architecture: an untrained network.
        nominal_size: the public number of records that a client is supposed to have.
        privacy: the run's privacy settings, with the mechanism and σ. None without differential
            privacy (DP).
        clients: the number of clients K.
        client_architectures: an untrained network for each client, if the clients' architectures
            differ. None if all clients use `architecture`.
        noise: for each plan name, the standard deviation of the noise in each coordinate of a
            release. Empty without DP.
        grids: for each plan name, the grid to which releases are rounded before secure aggregation.
        sizes: the number of examples n_k that each client declares when it joins. None with DP,
            where these numbers are private.
        proxy: public images, for methods that use a public data set (`Method.public_images`).
        robust: the rule of robust aggregation, or "none".
        robust_share: β of the rule "trimmed".
        rounds: the planned number of rounds.
        participants: the indices of this round's clients, ascending. None if all clients take part.
        report: receives (stage, completed, total) after `completed` of `total` steps of a stage. It
            must not wait for the device.
        note: receives lines of text for users.
        measure: returns the accuracy of a model on the test set, which a step may only record. It
            is NaN if there is no test set, or if the test images are private and the run has DP.
        keeper: saves checkpoints of long loops.
        all_ranks: computes parts of the server's step at all ranks of a simulation (`ServerParts`).
            None in a single process.
        precision: the numeric type of condensation's passes over real images, of plain training and
            of distillation. It changes results only by rounding, as do `memory_bytes` and
            `compiled`.
        memory_bytes: the memory in bytes that a round's steps may use.
        compiled: whether torch.compile compiles the slowest passes.
        isolated: whether the passes of private clients have one record each, because the bits of a
            record's value would otherwise depend on its position (`fedsynth.privacy.passes`).

    >>> from fedsynth.data.registry import dataset_spec
    >>> network, cpu = nn.Linear(64, 10), torch.device("cpu")
    >>> context = RoundContext(1, 0, cpu, dataset_spec("digits"), network, 480.0, clients=3)
    >>> context.active, context.spec.classes
    ((0, 1, 2), 10)
    >>> context.load(network.state_dict()) is network  # a copy, with these parameters
    False
    """

    round: int
    seed: int
    device: torch.device
    spec: DatasetSpec
    architecture: nn.Module
    nominal_size: float
    privacy: PrivacySettings | None = None
    clients: int = 1
    client_architectures: tuple[nn.Module, ...] | None = None
    noise: Mapping[str, float] = field(default_factory=dict)
    grids: Mapping[str, Grid] = field(default_factory=dict)
    sizes: tuple[int, ...] | None = None
    proxy: ImageData | None = None
    robust: str = "none"
    robust_share: float = 0.2
    rounds: int = 1
    participants: tuple[int, ...] | None = None
    report: Callable[..., None] = _ignore
    note: Callable[[str], None] = _ignore
    measure: Callable[[nn.Module], float] = unmeasured
    keeper: LoopCheckpointer = field(default_factory=LoopCheckpointer)
    all_ranks: AllRanks | None = None
    precision: torch.dtype = torch.float32
    memory_bytes: int = 4 * 2**30
    compiled: bool = False
    isolated: bool = False

    @property
    def active(self) -> tuple[int, ...]:
        """The indices of the round's clients, ascending."""
        if self.participants is None:
            return tuple(range(self.clients))
        return self.participants

    @property
    def loop_keeper(self) -> LoopCheckpointer | None:
        """The object that saves checkpoints during a loop.

        It is None with differential privacy, because a repeated private round draws new noise and
        starts its loops from the beginning.
        """
        return self.keeper if self.privacy is None else None

    def server_loop(self, name: str, steps: int, state: State) -> Iterator[int]:
        """Yields the step numbers of a loop on the server, and reports each completed step.

        After an interruption the loop resumes after the last checkpoint (`resumable`).
        """

        def report(completed: int) -> None:
            self.report(name, completed, steps)

        return resumable(steps, state, keeper=self.loop_keeper, name=name, report=report)

    def architecture_of(self, client: int) -> nn.Module:
        """Returns the untrained network of one client."""
        if self.client_architectures is None:
            return self.architecture
        return self.client_architectures[client]

    def load_frozen(self, models: Mapping[int, Tensors]) -> list[nn.Module]:
        """Returns the clients' networks, in evaluation mode and without gradients.

        Args:
            models: the parameters and buffers by client.
        """
        loaded = (self.load(parameters, client) for client, parameters in models.items())
        return [model.requires_grad_(False).eval() for model in loaded]

    def load(self, parameters: Mapping[str, torch.Tensor], client: int | None = None) -> nn.Module:
        """Returns a network with the given parameters and buffers, on the run's device.

        The network has the client's architecture, or the run's architecture if `client` is None.
        """
        architecture = self.architecture if client is None else self.architecture_of(client)
        model = copy.deepcopy(architecture).to(self.device)
        model.load_state_dict(dict(parameters))
        return model
