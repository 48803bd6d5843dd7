"""The protocol between a server and its clients, for any transport of messages.

A server asks all clients to join (`join`) and sends them the `RunTerms` (`start`). In each round,
it asks the clients of the round whether they can take part (`prepare`), and announces the begin of
the round (`begin`). Then it asks for a step (`step`) in each exchange of the round. Only a
simulation uses `evaluate`, `gradients` and `client_states`. A client that cannot or must not do
what it is asked answers with a `Refusal`.

The server and each client have their own copies of the run's settings. A client refuses a server
whose settings differ from the client's copy (`agreement`).

Both sides check the messages of an exchange before they compute anything from them. `Server.check`
also checks an upload's fields against the method's rules (`fedsynth.core.uploads`).

An `Observer` receives the events of a run. The command line uses an observer to print progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters
from fedsynth.core.method import ClientState, Method
from fedsynth.core.uploads import check_named
from fedsynth.errors import DivergedError, RequestRefusedError
from fedsynth.evaluation import DISSIMILARITY
from fedsynth.privacy.ledger.ledger import History

# The reasons why a client refuses a request. "budget" means that the request would exceed the
# client's privacy budget, and "request" that the request is invalid.
BUDGET, REQUEST = "budget", "request"


@dataclass(frozen=True)
class ClientInfo:
    """A client's message to join a run.

    Args:
        client: the index of the client.
        size: the number of the client's training records. None in a private run.
        history: the content of the client's ledger. None if the client has no ledger.
    """

    client: int
    size: int | None = None
    history: History | None = None


@dataclass(frozen=True)
class RunTerms:
    """The public values that a server sends to all clients before the first round.

    Args:
        sizes: the number of training records of each client. None in a private run.
        noise_multiplier: the noise multiplier σ of a private run. Each client's charges follow from
            σ and the client's copy of the settings. None in a run without differential privacy.
    """

    sizes: tuple[int, ...] | None = None
    noise_multiplier: float | None = None


@dataclass(frozen=True)
class Refusal:
    """A client's answer that refuses a request.

    Args:
        reason: a sentence that explains the refusal to a person.
        kind: `BUDGET`, which ends the run without an error, or `REQUEST`, which is an error.
        spent: the client's name, its current ε, and its ε after one more round. None if the budget
            is not the reason, or if the client is in another process.
    """

    reason: str
    kind: str = BUDGET
    spent: tuple[str, float, float] | None = None


@dataclass(frozen=True)
class SecureSum:
    """The sum of several clients' uploads. No party sees a single upload.

    Args:
        message: a message whose fields are the sums, float64. It has the size of a masked upload.
        clients: the indices of the clients whose uploads were summed, ascending.
    """

    message: Message
    clients: tuple[int, ...]


@dataclass(frozen=True)
class Replies:
    """Several clients' answers to one request from the server.

    Args:
        messages: a mapping from each client's index to its upload.
        refusals: the refusals of clients.
        lost: a mapping from the index of each client that did not answer, or answered with an
            error, to the reason.
        rejected: a mapping from the index of each client whose answer is not a message of the
            declared type to the reason.
        total: the sum of the uploads, if the server sees only the sum. Otherwise None.
    """

    messages: Mapping[int, Message] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    lost: Mapping[int, str] = field(default_factory=dict)
    rejected: Mapping[int, str] = field(default_factory=dict)
    total: SecureSum | None = None


@dataclass(frozen=True)
class ClientEvaluation:
    """The test results of models on one client's test split.

    They are computed from private data without noise.

    Args:
        client: the index of the client.
        size: the number of the client's training and test records together.
        tested: the number of records in the client's test split.
        right: a mapping from each model's name to the sum of its scores, which is its number of
            correct predictions, or the sum of its Dice coefficients.
    """

    client: int
    size: int
    tested: int
    right: Mapping[str, float]


def affected_clients(settings: RunSettings, context: RoundContext) -> tuple[int, ...]:
    """Returns the indices of the clients whose data influence a round's outputs.

    Usually these are the clients that take part. In a run without differential privacy, they are
    all clients if test splits or gradients are evaluated, or if clients are sampled by their sizes.
    """
    measured = settings.partition.local_test > 0 or DISSIMILARITY in settings.measure_names
    if settings.privacy is None and (measured or settings.sampling == "size"):
        return tuple(range(context.clients))
    return context.active


class Backend(Protocol):
    """Transports the server's requests to the clients, and the clients' answers to the server."""

    def join(self) -> Sequence[ClientInfo]:
        """Asks all clients to join, and returns their messages in the order of their indices."""

    def start(self, terms: RunTerms) -> None:
        """Sends the run terms to every client."""

    def prepare(self, context: RoundContext) -> Sequence[Refusal]:
        """Asks a round's clients whether they can take part, and returns the refusals.

        This happens before any client is charged.
        """

    def begin(self, context: RoundContext) -> None:
        """Tells the clients that a round begins, if their data influence it.

        `affected_clients` states which clients these are. No client has refused to take part. In a
        deployment, a client learns this from the first request of the round.
        """
        return

    def step(
        self, exchange: str, message: Message, context: RoundContext, clients: Sequence[int]
    ) -> Replies:
        """Asks clients to compute a step of the method, and returns their replies.

        Args:
            exchange: the exchange of the round, "first" or "main".
            message: the request, which contains what the step needs from the server.
            context: the context of the round, with all clients that were scheduled for the round.
            clients: the indices of the clients that have not failed in this round, ascending.
        """

    def histories(self) -> Sequence[History]:
        """Returns the current contents of the clients' ledgers, in the order of the clients.

        Clients without a ledger are left out.
        """

    def note_files(self, sha256: str) -> None:
        """Writes the hash of a finished run's files to the ledgers in its folder."""
        return

    def client_states(self, clients: Iterable[int]) -> Iterable[ClientState]:
        """Yields the clients' states between rounds. Only simulations support this method."""
        return ()

    def evaluate(
        self, models: Mapping[str, Mapping[str, Tensor]], context: RoundContext
    ) -> Sequence[ClientEvaluation]:
        """Tests models on all clients' test splits. Only simulations support this method."""
        return ()

    def gradients(
        self, parameters: Mapping[str, Tensor], context: RoundContext
    ) -> Iterable[tuple[int, Tensor]]:
        """Yields each client's number of training records and exact loss gradient.

        Clients without training records are left out.
        """
        return ()


Side = Literal["request", "upload"]
# The maximum size of the header of an answer to a step. The header has only a few small values.
MAX_FACTS_BYTES = 2**20


def check_declared(method: Method, message: Message | None, declared: type[Message]) -> None:
    """Checks that a message has the type that the method declares.

    Differential privacy was checked only for declared types.

    Raises:
        TypeError: the message has another type.
    """
    if type(message) is not declared:
        raise TypeError(
            f"method {method.name} returned a {type(message).__name__}, but declares messages of "
            f"type {declared.__name__}. Correct the declaration"
        )


def check_finite(tensors: Mapping[str, Tensor], source: str, number: int) -> None:
    """Checks that tensors contain only finite numbers, because a NaN would spread unnoticed.

    Args:
        tensors: the tensors by name.
        source: the owner of the tensors, for the error message, such as "client 3".
        number: the number of the round.

    Raises:
        DivergedError: a tensor has a number that is not finite. The message names the tensor.
    """
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise diverged_error(f"{name} of {source}", number)


def diverged_error(what: str, number: int, problem: str = "is not finite") -> DivergedError:
    """Returns the error for diverged training.

    Args:
        what: the tensor and its owner, such as "weight of client 3".
        number: the number of the round.
        problem: the rest of the sentence about the tensor.
    """
    return DivergedError(
        f"training diverged in round {number}: {what} {problem}. Lower the learning rate "
        "(method.lr, method.image_lr or method.server_lr) or use a smaller model.depth"
    )


def check_model_request(message: Message, context: RoundContext) -> None:
    """Checks that a model sent by the server has the run's architecture.

    A client makes this check before it is charged. Messages without a model pass the check.

    Raises:
        RequestRefusedError: a parameter or buffer of the model is missing, or has another name,
            shape or type than in the run's architecture.
    """
    if not isinstance(message, ModelParameters):
        return
    if not message.parameters:
        raise RequestRefusedError("the server's request contains no model parameters")
    check_named("model", message.parameters, context.architecture.state_dict())


class Observer:
    """Receives a run's events.

    Every method of this class does nothing. Override the methods that you need.

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
        """Called when a run is about to start or resume.

        Args:
            settings: the resolved settings of the run.
            folder: the path that the run folder will have once the run has finished. None if the
                run writes no folder.
        """

    def note(self, text: str) -> None:
        """Called with a line for the user, such as a warning or the reason for the run's end."""

    def step(self, round: int, stage: str, completed: int, total: int) -> None:
        """Called during a round, after `completed` of `total` steps of a stage.

        This method is called often, so it must be fast.
        """

    def round_ended(self, row: Mapping[str, Any]) -> None:
        """Called after each round with the metrics of the round, as in metrics.jsonl.

        In a private run, the metrics do not include values that only a simulation may show.
        """

    def ended(self, summary: Mapping[str, Any] | None) -> None:
        """Called when the run has ended.

        Args:
            summary: the content of summary.json. None if the run failed or was interrupted.
        """
