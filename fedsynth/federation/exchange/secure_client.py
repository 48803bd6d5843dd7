"""A client's side of secure sums: the uploads of a method whose server sees their sum alone leave
it masked, and in no other way.

    keys      its keys for this sum
    shares    the others' keys are there; shares of its secrets, closed for each of them
    step      theirs are there; the step itself, charged as every step, and its upload under masks
    unmask    of each client one share, by who is there

Each is answered once a sum, and a sum is for one exchange of one round: what could be asked twice
of the same upload, with others there, would tell it by the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedsynth.core.context import RoundContext
from fedsynth.core.frames import Frame
from fedsynth.core.messages import Message
from fedsynth.errors import MessageError
from fedsynth.federation.exchange.client_runtime import ClientRuntime
from fedsynth.federation.exchange.protocol import Refusal
from fedsynth.federation.exchange.sum_form import SUM, sum_form, sum_terms
from fedsynth.federation.secure_sums.client import Identities, SumClient
from fedsynth.federation.secure_sums.errors import SecureSumError
from fedsynth.federation.secure_sums.parcels import Present, Roster, Sealed


class SumDesk:
    """Answers one client's frames of sums.

    Args:
        runtime: the client.
        agreed: the hash of the run's settings, by the client's own copy.
        identities: of all clients by their numbers; None: the server is trusted to pass on keys as
            they are.
    """

    def __init__(
        self, runtime: ClientRuntime, agreed: str, identities: Identities | None = None
    ) -> None:
        self._runtime = runtime
        self._identities = identities
        self._agreed = agreed
        self._stated: Mapping[str, Any] | None = None
        self._client: SumClient | None = None

    @property
    def standing(self) -> Mapping[str, Any] | None:
        """Where the sum under way stands, with its secrets; None: there is none."""
        if self._client is not None:
            return self._client.to_json()
        return self._stated

    @standing.setter
    def standing(self, stated: Mapping[str, Any] | None) -> None:
        self._stated = stated
        self._client = None

    def keys(self, frame: Frame, phase: str, context: RoundContext) -> Frame:
        """Begins a sum; one that was under way is given up, and its secrets forgotten."""
        terms = self._terms(frame, phase, context)
        client = SumClient(self._place(context), terms, self._known(context))
        answer = Frame("answer", {}, client.keys().to_bytes())
        self._client = client
        self._stated = None
        return answer

    def shares(self, frame: Frame, phase: str, context: RoundContext) -> Frame:
        """Shares of its secrets."""
        client = self._under_way(frame, phase, context)
        return Frame("answer", {}, client.share(Roster.from_bytes(frame.payload)).to_bytes())

    def receive(self, frame: Frame, phase: str, context: RoundContext, sealed: bytes) -> None:
        """Takes the others' shares; before the step, which is not charged where they are too
        few."""
        self._under_way(frame, phase, context).receive(Sealed.from_bytes(sealed))

    def masked(
        self,
        frame: Frame,
        phase: str,
        context: RoundContext,
        step: Callable[[], Message | Refusal],
    ) -> Frame | Refusal:
        """The step's upload under masks, or its refusal."""
        client = self._under_way(frame, phase, context)
        form = sum_form(self._runtime.method, phase, context)
        reply = step()
        if isinstance(reply, Refusal):
            return reply
        return Frame("answer", {}, client.masked(form.encode(reply)).to_bytes())

    def unmask(self, frame: Frame, phase: str, context: RoundContext) -> Frame:
        """What takes masks away; then this client's part of the sum is over, and it forgets."""
        client = self._under_way(frame, phase, context)
        shares = client.unmask(Present.from_bytes(frame.payload))
        self.standing = None
        return Frame("answer", {}, shares.to_bytes())

    def _place(self, context: RoundContext) -> int:
        if self._runtime.number not in context.active:
            raise MessageError("this client takes no part in the round")
        return context.active.index(self._runtime.number)

    def _known(self, context: RoundContext) -> Identities | None:
        """The identities of the round's clients, by their places among them."""
        known = self._identities
        if known is None:
            return None
        places = enumerate(context.active)
        return Identities(known.own, {p: known.others[k] for p, k in places if k in known.others})

    def _terms(self, frame: Frame, phase: str, context: RoundContext) -> Any:
        if not self._runtime.method.sums_alone:
            raise MessageError(f"{self._runtime.method.name} sends its uploads as they are")
        name = str(frame.facts.get(SUM, ""))
        return sum_terms(self._runtime.method, phase, context, name, self._agreed)

    def _under_way(self, frame: Frame, phase: str, context: RoundContext) -> SumClient:
        """The sum that the frame is of.

        Raises:
            SecureSumError: it was not begun here, or is another one.
        """
        terms = self._terms(frame, phase, context)
        if self._client is None and self._stated is not None:
            place = self._place(context)
            known = self._known(context)
            self._client = SumClient.from_json(self._stated, place, terms, known)
        if self._client is None or self._client.terms != terms:
            raise SecureSumError("this client takes no part in such a sum")
        return self._client
