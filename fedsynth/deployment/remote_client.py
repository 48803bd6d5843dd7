"""A client in another process than its server: it answers frames (`fedsynth.deployment.frames`)
with the replies of its `ClientRuntime`.

Whatever a frame asks, the client uses its own settings, and charges its own ledger first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from fedsynth.core.context import Reporter, RoundContext, Silent
from fedsynth.core.messages import Message
from fedsynth.deployment.frames import Frame, parse_nonnegative_int
from fedsynth.deployment.secure_aggregation.client import Identities
from fedsynth.deployment.secure_aggregation.quantization import SUM, parted
from fedsynth.deployment.secure_exchange import KEYS, SHARES, UNMASK, SumDesk
from fedsynth.errors import MessageError
from fedsynth.federation.client_group import step_alone
from fedsynth.federation.client_runtime import ClientRuntime
from fedsynth.federation.protocol import Models, Refusal, Terms, agreement, declared
from fedsynth.privacy.errors import RequestRefusedError
from fedsynth.privacy.plans import PHASES

Answer = Callable[[Frame], Frame]
FAILED = "the request failed; this client's owner is told why"
"""The only text that a server receives about errors that are not its own."""


class RemoteClient:
    """Answers a server's frames for one client, in the process that has the client's data.

    Args:
        runtime: the client, with its own copy of the run's settings.
        context: public, as `fedsynth.federation.context` makes it from the settings, with
            proxy images where the method names them.
        reporter: receives the progress.
        identities: of all clients, for secure sums; None: see `SumDesk`.

    Attributes:
        done: (round, exchange) of each step that was requested since it joined.
        spent: (round, exchange) of each step that a node answers no more, however often it joins.
        terms: from the server; None: not received yet.
        joined: whether it has joined; set by a process that resumes for another one.
        sums: answers the questions of secure sums, where the server sees only sums.
    """

    def __init__(
        self,
        runtime: ClientRuntime,
        context: RoundContext,
        reporter: Reporter | None = None,
        identities: Identities | None = None,
    ) -> None:
        self._settings = runtime.settings
        self._participation = runtime.settings.schedule()
        self.runtime = runtime
        self._reporter = reporter or Silent()
        self._context = replace(context, reporter=self._reporter)
        self.joined = False
        self.done: set[tuple[int, str]] = set()
        self.spent: set[tuple[int, str]] = set()
        self.terms: Terms | None = None
        self.sums = SumDesk(runtime, agreement(runtime.settings), identities)
        self._answers: dict[str, Answer] = {
            "join": self._join,
            "start": self._start,
            "prepare": self._prepare,
            "begin": self._begin,
            "step": self._step,
            "facts": self._facts,
            "history": self._history,
            "evaluate": self._evaluate,
            KEYS: self._in_sum(self.sums.keys),
            SHARES: self._in_sum(self.sums.shares),
            UNMASK: self._in_sum(self.sums.unmask),
        }

    def answer(self, sent: bytes) -> bytes:
        """Returns the answer to one frame; errors are returned as answers, too.

        The server receives the text only of errors of the message itself. Others may depend on
        records: their text goes only to the reporter.
        """
        number: Any = None
        try:
            frame = Frame.from_bytes(sent)
            number = frame.facts.get("number")
            if frame.kind not in self._answers:
                raise MessageError(f"no client answers {frame.kind!r:.80}")
            answer = self._answers[frame.kind](frame)
        except (MessageError, RequestRefusedError) as error:
            answer = Frame("error", {"text": str(error)})
        except Exception as error:  # of any kind: no answer would distinguish it from other errors
            answer = self._failed(error)
        named = {"client": self.runtime.number, "number": number if type(number) is int else None}
        return replace(answer, facts={**answer.facts, **named}).to_bytes()

    def _failed(self, error: Exception) -> Frame:
        """Returns an error frame without the cause or type of the error, which may depend on
        records or on this machine. The reporter receives them.
        """
        self._reporter.note(f"a request failed: {error!r}")
        return Frame("error", {"text": FAILED})

    def _join(self, frame: Frame) -> Frame:
        if frame.facts.get("agreement") != agreement(self._settings):
            raise MessageError("the server has other settings for this run than the client")
        joined = self.runtime.join()
        self.joined = True
        return Frame(
            "answer",
            {
                "size": joined.size,
                "history": None if joined.history is None else joined.history.to_json(),
            },
        )

    def _start(self, frame: Frame) -> Frame:
        if not self.joined:
            raise RequestRefusedError("a client joins before it is told the terms")
        sizes = frame.facts.get("sizes")
        if sizes is not None:
            if not isinstance(sizes, list) or len(sizes) != self._context.clients:
                raise MessageError("the terms need the size of every client")
            sizes = tuple(parse_nonnegative_int(size, "size") for size in sizes)
        self.take(Terms(sizes, frame.facts.get("noise_multiplier")))
        return Frame("answer", {})

    def take(self, terms: Terms) -> None:
        """Accepts the terms, once.

        Raises:
            RequestRefusedError, LedgerError: as `ClientRuntime.start`.
        """
        self._context = replace(self.runtime.start(terms), reporter=self._reporter)
        self.terms = terms

    def _round(self, frame: Frame) -> RoundContext:
        number = parse_nonnegative_int(frame.facts.get("round"), "round")
        clients = self._context.clients
        named = frame.facts.get("participants")
        if not isinstance(named, list) or not named:
            raise MessageError("a round needs its participants")
        participants = tuple(
            parse_nonnegative_int(participant, "participant") for participant in named
        )
        if list(participants) != sorted(set(participants)) or participants[-1] >= clients:
            raise MessageError(f"the participants must be of the {clients} clients, ascending")
        if not 1 <= number <= self._settings.rounds:
            raise RequestRefusedError(f"the run has {self._settings.rounds} rounds, not {number}")
        # a sum's smallest number of clients follows from the participants, with privacy and without
        fixed = self.runtime.private or self.runtime.sees_sums
        if fixed and participants != self._participation.in_round(number):
            raise RequestRefusedError(f"others take part in round {number} by the run's settings")
        return replace(self._context, round=number, participants=participants)

    def _prepare(self, frame: Frame) -> Frame:
        refusal = self.runtime.prepare(self._round(frame))
        return Frame("answer", {}) if refusal is None else _refused(refusal)

    def _begin(self, frame: Frame) -> Frame:
        self.runtime.begin(self._round(frame))
        return Frame("answer", {})

    def _phase(self, frame: Frame) -> str:
        phase = frame.facts.get("phase")
        if phase not in PHASES:
            raise MessageError(f"a round has no exchange {phase!r:.80}")
        return str(phase)

    def _in_sum(self, answer: Callable[[Frame, str, RoundContext], Frame]) -> Answer:
        """Answers a frame of a sum, once the client has received the terms."""

        def answered(frame: Frame) -> Frame:
            self.runtime.require_terms()
            return answer(frame, self._phase(frame), self._round(frame))

        return answered

    def _step(self, frame: Frame) -> Frame:
        phase = self._phase(frame)
        context = self._round(frame)
        self.runtime.require_terms()
        masked = SUM in frame.facts
        if self.runtime.sees_sums and not masked:
            raise RequestRefusedError("this client's uploads are seen in sums alone")
        sealed, sent = parted(frame.payload) if masked else (b"", frame.payload)
        message = declared(self.runtime.method, phase, "downlink").from_bytes(sent)
        if self.runtime.number not in context.active:
            raise RequestRefusedError("this client takes no part in the round")
        once = self.runtime.private or masked
        if (context.round, phase) in self.done | self.spent and once:
            raise RequestRefusedError(f"round {context.round} was answered before")
        if masked:
            self.sums.receive(frame, phase, context, sealed)
        self.done.add((context.round, phase))

        def step() -> Message | Refusal:
            return step_alone(self.runtime, phase, message.to(context.device), context)

        if masked:
            answer = self.sums.masked(frame, phase, context, step)
            return _refused(answer) if isinstance(answer, Refusal) else answer
        reply = step()
        return (
            _refused(reply) if isinstance(reply, Refusal) else Frame("answer", {}, reply.to_bytes())
        )

    def _facts(self, frame: Frame) -> Frame:
        return Frame("answer", {"facts": dict(self.runtime.facts(self._round(frame)))})

    def _history(self, frame: Frame) -> Frame:
        history = self.runtime.history()
        return Frame("answer", {"history": None if history is None else history.to_json()})

    def _evaluate(self, frame: Frame) -> Frame:
        if self._settings.privacy is not None:
            raise RequestRefusedError("accuracies on a client's own records are not protected")
        context = self._round(frame)
        model = Models.from_bytes(frame.payload).to(context.device)
        return Frame("answer", asdict(self.runtime.evaluate({"model": model.parameters}, context)))


def _refused(refusal: Refusal) -> Frame:
    return Frame("refusal", {"reason": refusal.reason, "kind": refusal.kind})
