"""What carries a server's messages to nodes, and how long the server waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedsynth.validation import MAX_SECONDS, check_number


class Carrier(Protocol):
    """Carries messages to nodes and back. It knows nodes by numbers of its own.

    Attributes:
        run: the run of the messages; set before anything is sent.
    """

    run: str

    def nodes(self) -> Sequence[int]:
        """Returns the nodes that are connected."""

    def ask(self, messages: Mapping[int, bytes], seconds: float) -> Mapping[int, bytes | str]:
        """Returns the nodes' answers. A node that does not answer in time has a reason instead,
        or nothing."""


@dataclass(frozen=True)
class Timeouts:
    """How long a server waits, in seconds.

    Args:
        join: for all clients to join.
        answer: for the answer to a message, the client's step included.
        look: between two looks for nodes.

    Raises:
        SettingError: a number that is negative, not finite or more than three years.
    """

    join: float = 600.0
    answer: float = 3600.0
    look: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number(None, f"{name}_seconds", value, 0, MAX_SECONDS)
