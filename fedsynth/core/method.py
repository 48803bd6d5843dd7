"""The seam for methods: frozen settings, frozen messages, pure steps.

A round is: `broadcast` makes the server's message from its state; `client_step` makes every client's upload (and its new memory) from the
message and the client's view of its data; `server_step` makes the next state from the uploads. A method may have a first phase before that:
`question`, every client's `answer`, and `hear`, which makes the state that `broadcast` sees. The engine decides how many clients go into
one `client_step`, so heavy steps are written with a leading client axis and a single client is a group of one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import nn

from fedsynth.core.client import ClientGroup
from fedsynth.core.messages import Message
from fedsynth.core.validation import from_mapping
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import SettingError
from fedsynth.privacy.releases import Release
from fedsynth.privacy.settings import PrivacySettings

Memory = Mapping[str, torch.Tensor]
"""What a client keeps between rounds; it never leaves the client."""


class StepReporter(Protocol):
    """Hears of progress inside a step; must not synchronise with the device."""

    def __call__(self, phase: str, done: int, total: int) -> None: ...


class PublicImages(Protocol):
    """Unlabelled images that are declared public."""

    def __len__(self) -> int: ...

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        """Normalised images [N, C, H, W] at these positions."""


@dataclass(frozen=True)
class RoundContext:
    """What every step of a round knows beside its inputs; all of it is public.

    Args:
        round: 1, 2, …
        architecture: an untrained network; `load` puts received parameters into a copy of it.
        nominal_size: the public number of records that a client is supposed to have.
        clients: K. participants: numbers of this round's clients, ascending, as the uploads come; None: all.
        client_architectures: an untrained network for each client, where they differ; None: all have `architecture`.
        proxy: public images, for methods that name a data set of them (`proxy`).
        note: hears of what people should know.
        sizes: n_k of all clients, as they announce when they join; None with DP on: private.
        privacy: with the noise multiplier that the run uses; None with DP off.
        precision: of passes over real images that need no gradient.
        memory_bytes: what the steps of a round should stay within.
        compiled: let torch.compile make the passes where the time goes.
    """

    round: int
    seed: int
    device: torch.device
    spec: DatasetSpec
    architecture: nn.Module
    nominal_size: float
    privacy: PrivacySettings | None = None
    precision: torch.dtype = torch.float32
    memory_bytes: int = 4 * 2**30
    compiled: bool = False
    clients: int = 1
    participants: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None
    client_architectures: tuple[nn.Module, ...] | None = None
    proxy: PublicImages | None = None
    report: StepReporter = lambda phase, done, total: None
    note: Callable[[str], None] = lambda text: None

    def architecture_of(self, client: int) -> nn.Module:
        """The untrained network of this client."""
        return (
            self.architecture
            if self.client_architectures is None
            else self.client_architectures[client]
        )

    def protection(self) -> tuple[PrivacySettings, float]:
        """The settings of private clients, and the run's σ.

        Raises:
            SettingError: there are none.
        """
        if self.privacy is None or self.privacy.noise_multiplier is None:
            raise SettingError("privacy", "noise_multiplier", "must be set for private clients")
        return self.privacy, self.privacy.noise_multiplier

    def load(self, parameters: Mapping[str, torch.Tensor], client: int | None = None) -> nn.Module:
        """A network of the run's (or this client's) architecture with these parameters and buffers, on the run's device."""
        model = copy.deepcopy(
            self.architecture if client is None else self.architecture_of(client)
        ).to(self.device)
        model.load_state_dict(dict(parameters))
        return model


@dataclass(frozen=True)
class ServerState:
    """The global model's parameters and buffers, on the run's device, and what else a method's server keeps between rounds."""

    parameters: Mapping[str, torch.Tensor]
    kept: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PrivatePlan:
    """What a method will release of each client in a round, known before any data are read.

    Args:
        quantity, mechanism, clipped: words for ledger and report.
        clip: L2 bound 𝒞 of one example's contribution.
        sample_rate: q of Poisson sampling.
        steps: releases in a round.
        dimension: coordinates of one release.
        noise_ratio: the release's noise multiplier over the run's σ.
    """

    quantity: str
    mechanism: str
    clipped: str
    clip: float
    sample_rate: float
    steps: int
    dimension: int
    noise_ratio: float = 1.0

    def release(
        self, round: int, noise_multiplier: float, unaccounted: str | None = None
    ) -> Release:
        """The ledger's row for one round at the run's noise multiplier σ."""
        return Release(
            round=round,
            quantity=self.quantity,
            mechanism=self.mechanism,
            clipped=self.clipped,
            noise_multiplier=noise_multiplier * self.noise_ratio,
            sensitivity=self.clip,
            sample_rate=self.sample_rate,
            sampler="poisson" if self.sample_rate < 1 else "full",
            steps=self.steps,
            dimension=self.dimension,
            unaccounted=unaccounted,
        )


Presets = Mapping[str, Mapping[str, Any]]
"""A data set: the settings' values that are a method's defaults there, beside those of its bases."""


@dataclass(frozen=True)
class Method:
    """Base of all methods; a subclass is a frozen dataclass of validated settings.

    Class attributes: `name`; `summary`, a line for people; `reference`; `upload`, the type of a client's message; `answers`, that of its
    message in a first phase, for methods that have one; `heterogeneous`, whether clients may have other architectures than the server;
    `personal`, whether clients end with models of their own; `protects`, the mechanisms that can protect it (empty: it cannot run with
    differential privacy, and `refusal` says why); `presets`, by data set what it changes of these settings.
    """

    section: ClassVar[str] = "method"  # of a config file
    name: ClassVar[str]
    summary: ClassVar[str]
    reference: ClassVar[str]
    heterogeneous: ClassVar[bool] = False
    personal: ClassVar[bool] = False
    upload: ClassVar[type[Message]]
    answers: ClassVar[type[Message] | None] = None
    protects: ClassVar[tuple[str, ...]] = ()
    refusal: ClassVar[str] = ""
    presets: ClassVar[Presets] = {}

    def question(self, state: ServerState, context: RoundContext) -> Message | None:
        """The server's message of a first phase; None: the round has none."""
        return None

    def answer(
        self,
        message: Message,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> list[tuple[Message, Memory]]:
        """Answer and memory, for this round's `client_step`, of each client of the group."""
        raise NotImplementedError  # abstract

    def hear(
        self, state: ServerState, answers: Sequence[Message], context: RoundContext
    ) -> ServerState:
        """The state after the first phase, from all answers in the order of client numbers."""
        raise NotImplementedError  # abstract

    def broadcast(self, state: ServerState, context: RoundContext) -> Message:
        """The server's message to the clients of this round."""
        raise NotImplementedError  # abstract

    def client_step(
        self,
        message: Message,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> list[tuple[Message, Memory]]:
        """Upload and new memory of each client of the group, in the group's order."""
        raise NotImplementedError  # abstract

    def server_step(
        self, state: ServerState, uploads: Sequence[Message], context: RoundContext
    ) -> ServerState:
        """The next state from all uploads of the round, in the order of client numbers."""
        raise NotImplementedError  # abstract

    def final_parameters(self, state: ServerState) -> Mapping[str, torch.Tensor]:
        """The model that a run ends with, where it is not the one that clients start from."""
        return state.parameters

    def personal_parameters(
        self, parameters: Mapping[str, torch.Tensor], memory: Memory
    ) -> Mapping[str, torch.Tensor]:
        """The model that a client with this memory uses itself in place of the global one; asked where `personal` is set."""
        return parameters

    def facts(self, state: ServerState, context: RoundContext) -> Mapping[str, Any]:
        """What else a round's row of metrics says, by name: public values, or with differential privacy off any."""
        return {}

    def client_facts(self, memories: Sequence[Memory], context: RoundContext) -> Mapping[str, Any]:
        """What a round's row says of what its clients now keep, by name: a simulation reads their memories.

        In a real federation these memories stay where they are, and no message carries the facts. With
        differential privacy on only values may be read that were computed from the server's messages and
        public noise (post-processing), for the row belongs to the run folder, which may be shown.
        """
        return {}

    def variants(self, state: ServerState) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Other models of the same training, by name, to be evaluated beside it."""
        return {}

    def artefacts(self, state: ServerState) -> Mapping[str, torch.Tensor]:
        """Matrices of the server, [classes, clients], that belong into the run folder."""
        return {}

    def client_bytes(self, context: RoundContext) -> int | None:
        """Memory that one more client in a `client_step` takes, about; None: clients go one at a time, as nothing is gained by a group.

        The engine divides the run's memory bound by it. It has no influence on what is computed.
        """
        return None

    def check_model(self, model: nn.Module) -> None:
        """Raises SettingError if the method cannot work with this architecture."""

    def private_plans(
        self, privacy: PrivacySettings, context: RoundContext
    ) -> tuple[PrivatePlan, ...]:
        """What a round releases of each client under `privacy`, the chief release first; asked before any data are read."""
        raise NotImplementedError  # abstract

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Settings from names and values as TOML or text gives them; text is converted to the field's type.

        Raises:
            UnknownNameError: no such setting (with the near matches).
            SettingError: a value of the wrong type or outside its range.
        """
        return from_mapping(cls, values, of=cls.name)
