"""The protocol between a server and its clients, independent of how messages are transported.

A server asks all clients to `join`, sends them the `RunTerms`, asks the clients of each round whether
they can take part (`prepare`), announces that it begins (`begin`), and asks for a step (`step`) in
each exchange of the round. `evaluate` and `facts` are questions of a simulation. A client that
cannot, or must not, answers with a `Refusal`.

Both sides have the run's settings: a client uses its own copy, caps included, and refuses a server
with other settings (`agreement`).

Both sides check the messages of an exchange before they compute anything from them. `Server.check`
also checks an upload's fields against the method's rules (`fedsynth.core.uploads`).

An `Observer` receives the events of a run. The command line uses an observer to print progress.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters
from fedsynth.core.method import Method
from fedsynth.core.uploads import check_named
from fedsynth.errors import DivergedError, MessageError
from fedsynth.privacy.errors import RequestRefusedError
from fedsynth.privacy.ledger.ledger import History

BUDGET, REQUEST = "budget", "request"
"""Why clients refuse: their privacy budget would be exceeded; the server's request is invalid."""


@dataclass(frozen=True)
class ClientInfo:
    """The message with which a client joins a run.

    Args:
        client: the index of the client.
        size: n_k; None with differential privacy: private.
        history: the releases of earlier runs on the same records. None: the client has no ledger.
    """

    client: int
    size: int | None = None
    history: History | None = None


@dataclass(frozen=True)
class RunTerms:
    """The settings that a server sends to all clients before the first round. All of them are
    public.

    Args:
        sizes: n_k of all clients; None with differential privacy.
        noise_multiplier: σ, with differential privacy. Each client's charges follow from it and the
            client's own settings.
    """

    sizes: tuple[int, ...] | None = None
    noise_multiplier: float | None = None


@dataclass(frozen=True)
class Refusal:
    """The answer of a client that refuses a request.

    Args:
        client: the index of the client.
        reason: for people.
        kind: BUDGET, which ends a run regularly, or REQUEST, which is an error.
        spent: the client's name, its current ε, and its ε after one more round, if its budget would
            be exceeded and it is in this process.
    """

    client: int
    reason: str
    kind: str = BUDGET
    spent: tuple[str, float, float] | None = None


@dataclass(frozen=True)
class SecureSum:
    """The sum of the uploads of some clients. No party sees the single uploads.

    Args:
        message: a message whose fields are the sums.
        clients: whose uploads were summed, ascending.
        placeholder: a message in place of each single upload.
    """

    message: Message
    clients: tuple[int, ...]
    placeholder: Message


@dataclass(frozen=True)
class Replies:
    """The answers of the clients of a round, by client index.

    Args:
        messages: uploads.
        refusals: the answers of clients that refuse.
        lost: client -> why it did not answer, or answered with an error.
        rejected: client -> why its answer is not a message of the declared type.
        total: the sum of the uploads, if the server sees only the sum.
    """

    messages: Mapping[int, Message] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    lost: Mapping[int, str] = field(default_factory=dict)
    rejected: Mapping[int, str] = field(default_factory=dict)
    total: SecureSum | None = None


@dataclass(frozen=True)
class ClientEvaluation:
    """The metrics of models on one client's test split. They are exact functions of private data.

    Args:
        client: the index of the client.
        size: the number of all its records, training and test.
        tested: the number of examples of its test split.
        right: for each model, the number of correct predictions.
    """

    client: int
    size: int
    tested: int
    right: Mapping[str, int]


def affected_clients(settings: RunSettings, context: RoundContext) -> tuple[int, ...]:
    """Returns the clients whose data influence the outputs of a round. These are the clients that
    take part. Without privacy they are all clients if all test splits are evaluated, or if clients
    are sampled by their sizes."""
    measured = settings.partition.local_test > 0 or settings.sampling == "size"
    if settings.privacy is None and measured:
        return tuple(range(context.clients))
    return context.active


class Exchange(Protocol):
    """Transports requests to clients and their answers back."""

    def join(self) -> Sequence[ClientInfo]:
        """Returns the join messages of all clients in ascending order of their indices."""

    def start(self, terms: RunTerms) -> None:
        """Sends the run terms to every client."""

    def prepare(self, context: RoundContext) -> Sequence[Refusal]:
        """Asks the clients of a round whether they can take part. This happens before any of them
        is charged."""

    def begin(self, context: RoundContext) -> None:
        """Notifies all clients whose data affect the round (`affected_clients`) that it begins. No
        client has refused by then."""

    def step(
        self, phase: str, message: Message, context: RoundContext, clients: Sequence[int]
    ) -> Replies:
        """Sends a request to clients of a round, and returns their replies.

        Args:
            phase: the exchange.
            message: the request.
            context: the context of the round, with all scheduled clients.
            clients: the clients of the round that are still present, ascending.
        """

    def facts(self, context: RoundContext, clients: Sequence[int]) -> Sequence[Mapping[str, Any]]:
        """Returns the metrics of these clients for the round (`Method.client_metrics`). Clients
        that do not answer are left out."""

    def histories(self) -> Sequence[History]:
        """Returns the current ledgers of the clients by client index. The mapping is empty if the
        clients have no ledgers."""

    def evaluate(
        self, models: Mapping[str, Mapping[str, Tensor]], context: RoundContext
    ) -> Sequence[ClientEvaluation]:
        """Evaluates models on the test splits of all clients. Only simulations support this."""


Side = Literal["downlink", "upload"]
MAX_FACTS_BYTES = 2**20
"""Size limit of the header of an answer to a step, whose values are few and small."""


def agreement(settings: RunSettings) -> str:
    """Returns a hash of all settings that the server and its clients must have in common.

    It omits where a party computes, and where a client keeps its ledgers.
    """
    shared = settings.to_mapping()
    for key in ("device", "memory_gb", "compile"):
        shared["run"].pop(key, None)
    shared["data"].pop("data_root", None)
    shared.get("privacy", {}).pop("ledger", None)
    if not shared.get("privacy", True):  # one side of an open run keeps a ledger
        del shared["privacy"]
    text = json.dumps(shared, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def declared(method: Method, phase: str, side: Side) -> type[Message]:
    """Returns the message type that a method declares for one exchange.

    Raises:
        MessageError: the method has no such exchange.
    """
    downlink, upload = method.exchange_types(phase)
    expected = downlink if side == "downlink" else upload
    if expected is None:
        raise MessageError(f"method {method.name} has no {phase} exchange")
    return expected


def check_declared(method: Method, message: Message, declared: type[Message]) -> None:
    """Checks that a message has the type that the method declares. Only declared types were checked
    for differential privacy.

    Raises:
        TypeError: `message` is of another type.
    """
    if type(message) is not declared:
        raise TypeError(
            f"method {method.name} must send messages of type {declared.__name__}, got "
            f"{type(message).__name__}"
        )


def check_finite(tensors: Mapping[str, Tensor], source: str, number: int) -> None:
    """Checks that a result is finite. A NaN would otherwise spread unnoticed. The check runs once
    per result, outside the inner loops.

    Raises:
        DivergedError: names the round, the tensor and its owner.
    """
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise diverged_error(f"{name} of {source}", number)


def diverged_error(what: str, number: int, problem: str = "is not finite") -> DivergedError:
    """Returns the error for an optimisation that has diverged.

    Args:
        what: the tensor and its owner.
        number: the number of the round.
        problem: the symptom.
    """
    return DivergedError(
        f"training diverged in round {number}: {what} {problem}. Lower the learning rate "
        "(method.lr, method.image_lr or method.server_lr) or use a smaller model.depth"
    )


def check_model_request(message: Message, context: RoundContext) -> None:
    """Checks that a model from the server has the run's architecture. The check runs before
    anything is charged.

    Raises:
        RequestRefusedError: another name, shape or type of a parameter or buffer.
    """
    if not isinstance(message, ModelParameters):
        return
    if not message.parameters:
        raise RequestRefusedError("the server did not send a model")
    check_named("model", message.parameters, context.architecture.state_dict())


class Observer:
    """Receives the events of a run. Every method does nothing; override those that you need.

    >>> from fedsynth import FedAvg, ModelSettings, RunSettings, simulate
    >>> class Bytes(Observer):
    ...     def round_ended(self, row):
    ...         print(f"round {row['round']}: {row['upload_floats']} numbers were sent")
    >>> settings = RunSettings(FedAvg(local_steps=1), rounds=2, model=ModelSettings("linear"))
    >>> result = simulate(settings, observer=Bytes())
    round 1: 6500 numbers were sent
    round 2: 6500 numbers were sent
    """

    def started(self, settings: RunSettings, folder: Path | None) -> None:
        """Called when a run is about to start or to resume with these settings.

        Args:
            settings: the resolved settings of the run.
            folder: what the run's folder is called once it has finished; None: it leaves none.
        """

    def note(self, text: str) -> None:
        """Called with a line for the user, such as a warning or the reason why the run ended."""

    def step(self, round: int, phase: str, completed: int, total: int) -> None:
        """Called during a round, after `completed` of `total` steps of a phase. This is called
        often, so it must be cheap."""

    def round_ended(self, row: Mapping[str, Any]) -> None:
        """Called with the metrics of a round, as in metrics.jsonl. In a private run, they do not
        include simulation-only values."""

    def ended(self, summary: Mapping[str, Any] | None) -> None:
        """Called when the run has ended. `summary` is the content of summary.json, or None if the
        run failed."""
