"""The context of a round's steps besides their inputs; all of it is public and picklable.

A method's server state between rounds: frozen dataclasses that are packed like messages.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from fedsynth.core.messages import Packed
from fedsynth.data.registry import DatasetSpec
from fedsynth.privacy.grid import Grid
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.training.loop import LoopCheckpointer, NullCheckpointer, State, resumable


@dataclass(frozen=True)
class ServerState(Packed):
    """The global model and, in a method's subclass, the rest of its server's state.

    A subclass gives each further field a default, its value before the first round: {}, a number,
    or None.

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


class Reporter(Protocol):
    """Receives the progress of a step, and notes for users."""

    def report(self, phase: str, completed: int, total: int) -> None:
        """Receives that `completed` of `total` steps of a phase are done; must not synchronise with
        the device."""

    def note(self, text: str) -> None:
        """Receives a line for users."""


class Silent:
    """A reporter that reports nothing."""

    def report(self, phase: str, completed: int, total: int) -> None:
        """Does nothing."""

    def note(self, text: str) -> None:
        """Does nothing."""


class Notes(Silent):
    """A reporter that keeps the notes for users.

    Attributes:
        lines: the notes, oldest first.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        """Keeps the line."""
        self.lines.append(text)


class PublicImages(Protocol):
    """Unlabelled images that are declared public."""

    def __len__(self) -> int: ...

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        """Returns normalised images [N, C, H, W] at these positions."""


@dataclass(frozen=True)
class RoundContext:
    """The context of a round's steps, in addition to their inputs. Only `round`, `participants`,
    `reporter` and `keeper` differ between the rounds of a run.

    Args:
        round: 1, 2, …
        seed: seed of all reproducible randomness.
        device: device of all tensors.
        spec: the data set's specification.
        architecture: an untrained network.
        nominal_size: the public number of records that a client is supposed to have.
        privacy: the run's privacy settings, with mechanism and σ; None with DP off.
        clients: K.
        client_architectures: an untrained network for each client, where they differ; None: all
            have `architecture`.
        noise: the standard deviation of the noise in each coordinate of a release, by plan name;
            {} with DP off.
        grids: the grids that releases are rounded to before secure aggregation, by plan name.
        sizes: n_k of all clients, as declared when they join; None with DP on: private.
        proxy: public images, for methods that name a public data set (`Method.public_images`).
        robust: the rule of robust aggregation, or "none".
        robust_share: β of "trimmed".
        rounds: the planned number of rounds.
        participants: indices of this round's clients, ascending; None: all.
        reporter: receives progress.
        keeper: saves checkpoints of long loops.
        precision: precision of condensation's passes over real images, plain training and
            distillation. It changes results by rounding only, as do the next two.
        memory_bytes: the memory bound of a round's steps.
        compiled: whether torch.compile compiles the slowest passes.

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
    proxy: PublicImages | None = None
    robust: str = "none"
    robust_share: float = 0.2
    rounds: int = 1
    participants: tuple[int, ...] | None = None
    reporter: Reporter = field(default_factory=Silent)
    keeper: LoopCheckpointer = field(default_factory=NullCheckpointer)
    precision: torch.dtype = torch.float32
    memory_bytes: int = 4 * 2**30
    compiled: bool = False

    @property
    def active(self) -> tuple[int, ...]:
        """Indices of this round's clients, ascending."""
        if self.participants is None:
            return tuple(range(self.clients))
        return self.participants

    @property
    def loop_keeper(self) -> LoopCheckpointer | None:
        """Saves checkpoints of loops; None with differential privacy: a repeated round has other
        releases, so its loops start from scratch."""
        return self.keeper if self.privacy is None else None

    def server_loop(self, name: str, steps: int, state: State) -> Iterator[int]:
        """Yields the steps of a loop of the server, reports them, and resumes after the last
        checkpoint (`resumable`)."""
        report = partial(self.report, name, total=steps)
        return resumable(steps, state, keeper=self.loop_keeper, name=name, report=report)

    def architecture_of(self, client: int) -> nn.Module:
        """Returns the untrained network of this client."""
        if self.client_architectures is None:
            return self.architecture
        return self.client_architectures[client]

    def report(self, phase: str, completed: int, total: int) -> None:
        """Passes progress to the reporter."""
        self.reporter.report(phase, completed, total)

    def note(self, text: str) -> None:
        """Passes a line for users to the reporter."""
        self.reporter.note(text)

    def load(self, parameters: Mapping[str, torch.Tensor], client: int | None = None) -> nn.Module:
        """Returns a network of the run's (or this client's) architecture with these parameters and
        buffers, on the run's device."""
        architecture = self.architecture if client is None else self.architecture_of(client)
        model = copy.deepcopy(architecture).to(self.device)
        model.load_state_dict(dict(parameters))
        return model
