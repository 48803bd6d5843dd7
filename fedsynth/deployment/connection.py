"""A server's connection to nodes: the transport of its messages, and how long it waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fedsynth.validation import MAX_SECONDS, check_number


class Transport(Protocol):
    """Carries messages to nodes and back. It identifies nodes by its own numbers.

    Attributes:
        run: the run of the messages; set before anything is sent.
    """

    run: str

    def nodes(self) -> Sequence[int]:
        """Returns the nodes that are connected."""

    def ask(self, messages: Mapping[int, bytes], seconds: float) -> Mapping[int, bytes | str]:
        """Returns the nodes' answers. A node that does not answer in time has a reason instead
        of an answer, or no entry."""


@dataclass(frozen=True)
class Timeouts:
    """The timeouts of a server, in seconds.

    Args:
        join: until all clients have joined.
        answer: until a message is answered, including the client's step.
        poll: between two polls for connected nodes.

    Raises:
        SettingError: a number that is negative, not finite or more than three years.
    """

    join: float = 600.0
    answer: float = 3600.0
    poll: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number(None, f"{name}_seconds", value, 0, MAX_SECONDS)


@dataclass(frozen=True)
class Connection:
    """The server's connection to nodes.

    Args:
        transport: carries messages to the nodes.
        timeouts: how long the server waits for them.
        clients: node -> client, by the keys that nodes authenticate with; empty: each node states
            its client.
    """

    transport: Transport
    timeouts: Timeouts = field(default_factory=Timeouts)
    clients: Mapping[int, int] = field(default_factory=dict)
