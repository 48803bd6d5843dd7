"""What every step of a round knows beside its inputs; all of it is public, and all of it pickles.

`Federation` is fixed for the whole run, `Compute` says where and how this process computes, and
`RoundContext` joins them with the round that a step belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from fedsynth.copies import copied
from fedsynth.data.registry import DatasetSpec
from fedsynth.keeping import KeepsNothing, StepKeeper
from fedsynth.privacy.grid import Grid
from fedsynth.privacy.settings import PrivacySettings


class Reporter(Protocol):
    """Told of progress inside a step, and of what people should know."""

    def report(self, phase: str, done: int, total: int) -> None:
        """`done` of `total` steps of a phase; must not synchronise with the device."""

    def note(self, text: str) -> None:
        """A line for people."""


class Silent:
    """A reporter that tells nobody."""

    def report(self, phase: str, done: int, total: int) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


class Notes(Silent):
    """A reporter that keeps what people should know.

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
        """Normalised images [N, C, H, W] at these positions."""


@dataclass(frozen=True)
class Federation:
    """What is public and the same in all rounds.

    Args:
        seed: of everything that is reproducible.
        spec: the data set's specification.
        architecture: an untrained network.
        nominal_size: the public number of records that a client is supposed to have.
        clients: K.
        client_architectures: an untrained network for each client, where they differ; None: all
            have `architecture`.
        privacy: the run's privacy settings, with mechanism and σ; None with DP off.
        noise: the standard deviation of the noise in each coordinate of a release, by the name of
            its plan; {} with DP off.
        grids: what clients round releases to that are added up before anybody sees them, by the
            name of the plan; of others nothing.
        sizes: n_k of all clients, as they say when they join; None with DP on: private.
        proxy: public images, for methods that name a data set of them (`Method.public_images`).
        robust: what takes the place of averages of clients' uploads ("none": nothing does).
        robust_share: β of "trimmed".
        rounds: how many the run is planned to have.
    """

    seed: int
    spec: DatasetSpec
    architecture: nn.Module
    nominal_size: float
    clients: int = 1
    client_architectures: tuple[nn.Module, ...] | None = None
    privacy: PrivacySettings | None = None
    noise: Mapping[str, float] = field(default_factory=dict)
    grids: Mapping[str, Grid] = field(default_factory=dict)
    sizes: tuple[int, ...] | None = None
    proxy: PublicImages | None = None
    robust: str = "none"
    robust_share: float = 0.2
    rounds: int = 1

    def architecture_of(self, client: int) -> nn.Module:
        """The untrained network of this client."""
        if self.client_architectures is None:
            return self.architecture
        return self.client_architectures[client]


@dataclass(frozen=True)
class Compute:
    """Where and how a process computes; it moves results by rounding alone.

    Args:
        device: of all tensors.
        precision: of condensation's passes over real images, plain training and distillation.
        memory_bytes: what the steps of a round should stay within.
        compiled: let torch.compile make the passes where the time goes.
    """

    device: torch.device
    precision: torch.dtype = torch.float32
    memory_bytes: int = 4 * 2**30
    compiled: bool = False


@dataclass(frozen=True)
class RoundContext:
    """What a step of a round knows beside its inputs.

    Args:
        round: 1, 2, …
        federation: what is public and the same in all rounds; its fields can be read here, too.
        compute: where and how this process computes; likewise.
        participants: numbers of this round's clients, ascending; None: all.
        reporter: told of progress.
        keeper: keeps where long loops stand.

    >>> from fedsynth.data.registry import dataset_spec
    >>> network = nn.Linear(64, 10)
    >>> federation = Federation(0, dataset_spec("digits"), network, nominal_size=480.0, clients=3)
    >>> context = RoundContext(1, federation, Compute(torch.device("cpu")))
    >>> context.active, context.spec.classes
    ((0, 1, 2), 10)
    >>> context.load(network.state_dict()) is network  # a copy, with these parameters
    False
    """

    round: int
    federation: Federation
    compute: Compute
    participants: tuple[int, ...] | None = None
    reporter: Reporter = field(default_factory=Silent)
    keeper: StepKeeper = field(default_factory=KeepsNothing)

    @property
    def active(self) -> tuple[int, ...]:
        """Numbers of this round's clients, ascending."""
        if self.participants is None:
            return tuple(range(self.federation.clients))
        return self.participants

    @property
    def server_keeper(self) -> StepKeeper:
        """For the server's loops. With differential privacy a round that is repeated has other
        uploads, so that its loops begin anew."""
        return self.keeper if self.privacy is None else KeepsNothing()

    @property
    def seed(self) -> int:
        return self.federation.seed

    @property
    def spec(self) -> DatasetSpec:
        return self.federation.spec

    @property
    def architecture(self) -> nn.Module:
        return self.federation.architecture

    @property
    def client_architectures(self) -> tuple[nn.Module, ...] | None:
        return self.federation.client_architectures

    @property
    def nominal_size(self) -> float:
        return self.federation.nominal_size

    @property
    def clients(self) -> int:
        return self.federation.clients

    @property
    def privacy(self) -> PrivacySettings | None:
        return self.federation.privacy

    @property
    def noise(self) -> Mapping[str, float]:
        return self.federation.noise

    @property
    def grids(self) -> Mapping[str, Grid]:
        return self.federation.grids

    @property
    def sizes(self) -> tuple[int, ...] | None:
        return self.federation.sizes

    @property
    def proxy(self) -> PublicImages | None:
        return self.federation.proxy

    @property
    def rounds(self) -> int:
        return self.federation.rounds

    @property
    def robust(self) -> str:
        return self.federation.robust

    @property
    def robust_share(self) -> float:
        return self.federation.robust_share

    @property
    def device(self) -> torch.device:
        return self.compute.device

    @property
    def precision(self) -> torch.dtype:
        return self.compute.precision

    @property
    def memory_bytes(self) -> int:
        return self.compute.memory_bytes

    @property
    def compiled(self) -> bool:
        return self.compute.compiled

    def report(self, phase: str, done: int, total: int) -> None:
        """Tells the reporter of progress."""
        self.reporter.report(phase, done, total)

    def note(self, text: str) -> None:
        """Tells the reporter what people should know."""
        self.reporter.note(text)

    def architecture_of(self, client: int) -> nn.Module:
        """The untrained network of this client."""
        return self.federation.architecture_of(client)

    def load(self, parameters: Mapping[str, torch.Tensor], client: int | None = None) -> nn.Module:
        """A network of the run's (or this client's) architecture with these parameters and buffers,
        on the run's device."""
        architecture = self.architecture if client is None else self.architecture_of(client)
        model = copied(architecture).to(self.device)
        model.load_state_dict(dict(parameters))
        return model


def round_context(
    round: int,
    seed: int,
    device: torch.device,
    spec: DatasetSpec,
    architecture: nn.Module,
    nominal_size: float,
    privacy: PrivacySettings | None = None,
    *,
    participants: tuple[int, ...] | None = None,
    reporter: Reporter | None = None,
    compute: Compute | None = None,
    **federation: Any,
) -> RoundContext:
    """A context without a run: for a method's own steps in tests, benchmarks and notebooks.

    Args:
        round: 1, 2, …
        seed, spec, architecture, nominal_size, privacy, federation: see `Federation`.
        device: of all tensors.
        participants, reporter: see `RoundContext`.
        compute: in place of the default one on `device`.
    """
    return RoundContext(
        round,
        Federation(seed, spec, architecture, nominal_size, privacy=privacy, **federation),
        compute or Compute(device),
        participants,
        reporter or Silent(),
    )
