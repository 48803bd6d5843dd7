"""Transports a server's messages to nodes, and sets how long the server waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fedsynth.validation import MAX_SECONDS, check_number


class Carrier(Protocol):
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
        look: between two polls for connected nodes.

    Raises:
        SettingError: a number that is negative, not finite or more than three years.
    """

    join: float = 600.0
    answer: float = 3600.0
    look: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number(None, f"{name}_seconds", value, 0, MAX_SECONDS)


@dataclass(frozen=True)
class Post:
    """The server's connection to nodes.

    Args:
        carrier: transports messages to the nodes.
        timeouts: how long the server waits for them.
        numbers: node -> client, by the keys that nodes authenticate with; empty: each node states
            its client's number.
    """

    carrier: Carrier
    timeouts: Timeouts = field(default_factory=Timeouts)
    numbers: Mapping[int, int] = field(default_factory=dict)
