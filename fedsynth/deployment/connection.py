"""The server's connection to the nodes: the transport of messages and the timeouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fedsynth.validation import MAX_SECONDS, check_number


class Transport(Protocol):
    """Carries the server's messages to the nodes and their answers back.

    A transport identifies each node by a number that it chooses itself. This number is not the
    client's index.

    Attributes:
        run: the name of the run that the messages belong to. The server sets it before it sends
            anything.
    """

    run: str

    def nodes(self) -> Sequence[int]:
        """Returns the transport's numbers of the nodes that are connected."""

    def ask(self, messages: Mapping[int, bytes], seconds: float) -> Mapping[int, bytes | str]:
        """Sends a message to each node, waits, and returns the answers.

        If a node does not answer in time, the result contains a reason (text) in place of its
        answer, or no entry for this node.
        """


@dataclass(frozen=True)
class Timeouts:
    """The timeouts of a server, in seconds.

    Args:
        join: how long the server waits for all clients to join.
        answer: how long the server waits for the answer to a message. This includes the client's
            computation.
        poll: the time between two checks for newly connected nodes.

    Raises:
        SettingError: if a number is negative, not finite, or more than three years.
    """

    join: float = 600.0
    answer: float = 3600.0
    poll: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number(None, f"{name}_seconds", value, 0, MAX_SECONDS)


@dataclass(frozen=True)
class Connection:
    """The server's connection to the nodes.

    Args:
        transport: carries messages to the nodes.
        timeouts: how long the server waits for the nodes.
        clients: maps each node to its client, according to the key that the node authenticates
            with. If it is empty, each node states which client it is.
    """

    transport: Transport
    timeouts: Timeouts = field(default_factory=Timeouts)
    clients: Mapping[int, int] = field(default_factory=dict)
