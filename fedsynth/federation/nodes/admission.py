"""Which nodes join a run as which of its clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedsynth.core.frames import LONGEST_HEADER, Frame, parse_nonnegative_int
from fedsynth.errors import MessageError
from fedsynth.federation.exchange.protocol import Joined
from fedsynth.federation.nodes.bundles import unpack
from fedsynth.federation.nodes.client_records import JoinedClient
from fedsynth.federation.nodes.replies import parse_history
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.history import History


class Admission:
    """Takes nodes' answers to a server that asks them to join.

    Args:
        settings: the run's.
        clients: those that have joined; they are added here.
        out: client -> why it declines; added here, too.
        numbers: node -> client, where the server knows it; else empty.
        names: the clients' names when a private run began, in their order; else empty.
    """

    def __init__(
        self,
        settings: RunSettings,
        clients: dict[int, JoinedClient],
        out: dict[int, str],
        numbers: Mapping[int, int],
        names: Sequence[str],
    ) -> None:
        self._private = settings.privacy is not None
        self._everybody = range(settings.partition.clients)
        self._clients = clients
        self._out = out
        self._numbers = numbers
        self._names = names or [f"client-{number:03d}" for number in self._everybody]
        self._named = bool(names)

    @property
    def present(self) -> list[int]:
        """Clients that have joined this process of the server."""
        return sorted(k for k, one in self._clients.items() if one.node is not None)

    def joined(self, client: int) -> Joined:
        """Returns what a client has stated of itself; one that never joined has no records."""
        if client not in self._clients:
            return Joined(client, 0, History(self._names[client]))
        one = self._clients[client]
        return Joined(client, one.size, one.history)

    def admit(self, node: int, answer: bytes | str) -> None:
        """Takes a node's answer.

        Raises:
            MessageError: it is not the answer of a client that may join.
        """
        if isinstance(answer, str):
            raise MessageError(answer)
        if len(answer) > LONGEST_HEADER:
            raise MessageError(f"sends {len(answer)} bytes")
        frame = Frame.from_bytes(unpack(answer)[0])
        client = self._client(node, frame)
        if frame.kind != "answer":
            why = frame.facts.get("reason", frame.facts.get("text"))
            self._out[client] = f"{why!s:.500}"
            return
        size = frame.facts.get("size")
        own = None if size is None else parse_nonnegative_int(size, "size")
        history = parse_history(frame.facts.get("history"))
        self._check_history(client, history)
        known = self._clients.setdefault(client, JoinedClient(own, history))
        if known.size != own:
            raise MessageError(f"it had {known.size} examples, and joins with {own}")
        known.state(history)
        known.node = node
        self._out.pop(client, None)

    def _client(self, node: int, frame: Frame) -> int:
        """Returns which client answers.

        Raises:
            MessageError: none of this run, or one that is connected already.
        """
        client = parse_nonnegative_int(frame.facts.get("client"), "client")
        if client not in self._everybody:
            raise MessageError(f"there is no client {client} in this run")
        if self._numbers and self._numbers.get(node) != client:
            raise MessageError(f"says that it is client {client}, which its key is not for")
        if client in self.present:
            raise MessageError(f"says that it is client {client}, which another one is")
        return client

    def _check_history(self, client: int, history: History | None) -> None:
        """Checks that a client states a ledger under a name of its own.

        Raises:
            MessageError: it states none, or under another name.
        """
        if history is None:
            if self._private:
                raise MessageError("it does not state its ledger")
            return
        name = self._names[client]
        if self._named and history.client != name:
            raise MessageError(
                f"its name is {history.client!r:.80}, and it was {name!r} when the run began"
            )
        others = {other for number, other in enumerate(self._names) if number != client}
        for number, one in self._clients.items():
            if number != client and one.history is not None:
                others.add(one.history.client)
        if history.client in others:
            raise MessageError(f"its name {history.client!r:.80} is another client's")
