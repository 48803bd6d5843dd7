"""One message of a server to a node: a question, the frames before and after it, and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedsynth.core.frames import Frame
from fedsynth.core.messages import LENGTH_BYTES
from fedsynth.errors import MessageError
from fedsynth.federation.nodes.bundles import pack, unpack
from fedsynth.federation.nodes.client_records import JoinedClient
from fedsynth.federation.nodes.replies import parse_history, parse_reply
from fedsynth.privacy.plans import MAIN

MAX_FRAMES = 6
"""In one message: start, prepare, begin, the question, facts and history."""


@dataclass(frozen=True)
class Request:
    """A message to one client.

    Args:
        client: its number.
        question: the frame whose answer is wanted.
        before: frames that the client answers first.
        first: the number of the message's first frame; those that follow count on.
    """

    client: int
    question: Frame
    before: Sequence[Frame]
    first: int

    @property
    def is_step(self) -> bool:
        """Whether it asks for a step, for which the client may be charged."""
        return self.question.kind == "step"

    def to_bytes(self) -> bytes:
        """Returns the frames as one message."""
        frames = [*self.before, self.question, *_following(self.question)]
        return pack(
            [
                replace(one, facts={**one.facts, "number": self.first + position}).to_bytes()
                for position, one in enumerate(frames)
            ]
        )

    def read(self, sent: bytes | str, known: JoinedClient, max_bytes: int) -> Frame:
        """Returns the answer to the question.

        Args:
            sent: what came, or why nothing did.
            known: the client, which takes the statements that came with it.
            max_bytes: the size limit.

        Raises:
            MessageError: there is no answer.
        """
        if isinstance(sent, str):
            raise MessageError(sent)
        if len(sent) > max_bytes + LENGTH_BYTES:
            raise MessageError(f"sends {len(sent)} bytes, above the {max_bytes} that it may")
        frames = [Frame.from_bytes(one) for one in unpack(sent)]
        for number, frame in enumerate(frames, self.first):
            stated = (frame.facts.get("client"), frame.facts.get("number"))
            if stated != (self.client, number):
                raise MessageError(f"was asked request {number}, and {stated!r:.80} answers")
        known.started = known.started or frames[0].kind == "answer"
        question = len(self.before)
        if len(frames) <= question:
            if self.is_step:
                known.unstated.pop()  # it has refused what comes before the step
            reply = parse_reply(frames[-1])
            if reply.kind == "answer":
                raise MessageError("does not answer all that it was asked")
            return reply
        for position, frame in enumerate(frames):
            if position != question and frame.kind == "answer":
                _take_statements(known, frame)
        return parse_reply(frames[question])


def _following(frame: Frame) -> list[Frame]:
    """Returns what follows a question: after a round's step, what the round's metrics need."""
    if frame.kind != "step" or frame.facts["phase"] != MAIN:
        return []
    header = {key: frame.facts[key] for key in ("round", "participants")}
    return [Frame("facts", header), Frame("history", {})]


def _take_statements(client: JoinedClient, frame: Frame) -> None:
    """Takes the facts and the ledger that came with an answer.

    Raises:
        MessageError: the ledger is damaged, or does not continue the one that was stated before.
    """
    if "facts" in frame.facts:
        client.facts = frame.facts
    if "history" in frame.facts:
        client.state(parse_history(frame.facts["history"]))
