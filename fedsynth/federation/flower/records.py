"""Our messages as Flower's, and back: bytes in a `ConfigRecord`, beside the name of the run.

Nothing else of Flower's records is used: its arrays are for models that are averaged, and ours are
checked by the methods' own declarations (`fedsynth.core.messages`).
"""

from __future__ import annotations

from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from fedsynth.errors import MessageError

RECORD = "fedsynth"
KIND = "query"
"""Flower's type of our messages: it names no training, so that no strategy takes them for one."""


def to_record(run: str, sent: bytes) -> RecordDict:
    """What is sent, as Flower carries it.

    Args:
        run: the run's name.
        sent: the bytes.
    """
    return RecordDict({RECORD: ConfigRecord({"run": run, "frames": sent})})


def from_record(content: RecordDict) -> tuple[str, bytes]:
    """The run's name, and the bytes.

    Raises:
        MessageError: it is no message of ours.
    """
    try:
        record: Any = content[RECORD]
        run = record["run"]
        sent = record["frames"]
    except (KeyError, TypeError) as error:
        raise MessageError(f"no message of fedsynth: {error!r:.80}") from None
    if not (isinstance(run, str) and isinstance(sent, bytes)):
        raise MessageError("no message of fedsynth: its record has other types")
    return run, sent


def request(run: str, sent: bytes, node: int, seconds: float) -> Message:
    """A message to a node, which nobody answers any more when its time is over."""
    return Message(to_record(run, sent), node, KIND, ttl=seconds)


def reply(run: str, sent: bytes, to: Message) -> Message:
    """The answer to a message."""
    return Message(to_record(run, sent), reply_to=to)
