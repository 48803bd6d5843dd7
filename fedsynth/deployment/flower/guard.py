"""A Flower ClientApp whose answers are made differentially private.

The job need not use fedsynth. Its `ClientApp` becomes a `GuardedClientApp`:

    app = GuardedClientApp()

The folder of the guard comes from the node's configuration, which is the data owner's:

    guard           the folder with guard.toml (`fedsynth.privacy.guard`); default: the environment
                    variable FEDSYNTH_GUARD, for Flower's simulation
    client          the client's name; default: client-000 for partition-id 0, and so on

Flower's SuperNode runs the app that the server sends. So the guard protects an owner who has
checked the app, or who runs an app of their own. Flower sends the text of an error that an app's
file raises while it is imported, before there is an app. So the file should read no data then.

Every answer is rebuilt from checked parts. Its arrays pass the guard, with the arrays of the
request as the received model. Its metrics are the nominal values of guard.toml. The names of its
records follow from the request, and it has no text of the job, since a job could state records in
either.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.error import Error
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from fedsynth.errors import BudgetExceededError, MessageError
from fedsynth.privacy.guard import Arrays, UpdateGuard

_LOGGER = logging.getLogger(__name__)
STATUS = {"code": 0, "message": ""}  # of the answers of Flower's older clients
_COUNTED = {"num_examples": MetricRecord, "metrics": ConfigRecord, "status": ConfigRecord}
# The records with which Flower's older clients answer, by the prefix of the request's records.
OLDER: dict[str, dict[str, type]] = {
    "fitins": {"parameters": ArrayRecord, **_COUNTED},
    "evaluateins": {"loss": MetricRecord, **_COUNTED},
    "getparametersins": {"parameters": ArrayRecord, "status": ConfigRecord},
    "getpropertiesins": {"properties": ConfigRecord, "status": ConfigRecord},
}
# Numbers that the servers of these clients require, in records of these names.
OLDER_NUMBERS = ("num_examples", "loss")
FAILED = "the client sends no answer. The reason is in the client's log only"


class GuardedClientApp(ClientApp):  # type: ignore[misc]  # Flower is not type-checked
    """A `ClientApp` that makes each answer private before it is sent.

    Its arguments and decorators are those of `ClientApp`. The guard encloses all mods and the
    lifespan.
    """

    def __call__(self, message: Message, context: Context) -> Message:
        """Returns the private answer to a request.

        The answer is an error of one line if the guard refuses it, for example because the budget
        is spent. The error has no text of the job.

        Args:
            message: the request.
            context: the client's context, whose node configuration names the guard's folder.
        """
        original = deepcopy(message)  # jobs may change a request, and answers copy its metadata
        reason = FAILED
        try:
            guard = guard_of(context.node_config)
            answer = self._answer(message, context)
            content = protected(guard, identity(original), original.content, answer)
            return Message(content, reply_to=original)
        except BudgetExceededError as error:
            reason = str(error)
            _LOGGER.error("%s", error)
        except Exception as error:
            _LOGGER.error("%s", error)
        return Message(Error(ErrorCode.UNKNOWN, reason), reply_to=original)

    def _answer(self, message: Message, context: Context) -> list[Arrays]:
        """Runs the job, and returns the arrays of each array record in its answer.

        Raises:
            MessageError: the job failed, whatever it raised.
        """
        try:
            return _copies(super().__call__(message, context).content)
        except (Exception, SystemExit):
            _LOGGER.exception("the job failed")
            raise MessageError(
                "the client's training code raised an error. Read the error in the client's log"
            ).with_code("guard.job") from None


def guard_of(config: Mapping[str, Any]) -> UpdateGuard:
    """Creates a client's `UpdateGuard` from the node's configuration.

    Raises:
        MessageError: the configuration names no folder.
        PrivacyError: the guard cannot be opened.
    """
    folder = config.get("guard") or os.environ.get("FEDSYNTH_GUARD")
    if not folder:
        raise MessageError(
            "the node's configuration does not set guard. Add guard='FOLDER', where FOLDER "
            "contains guard.toml"
        ).with_code("guard.folder")
    name = config.get("client", f"client-{int(config.get('partition-id', 0)):03d}")
    return UpdateGuard(str(folder), str(name))


def identity(message: Message) -> list[object]:
    """Returns the metadata that identify a request, such as its run and round."""
    meta = message.metadata
    request: list[object] = [meta.run_id, meta.group_id, meta.message_type]
    for name, settings in message.content.config_records.items():
        request.append((name, sorted(settings.items())))
    return request


def protected(
    guard: UpdateGuard,
    request: Sequence[object],
    received_content: RecordDict,
    trained: Sequence[Arrays],
) -> RecordDict:
    """Makes a job's answer private, and returns the content that is sent instead.

    Args:
        guard: the client's guard.
        request: what identifies the request.
        received_content: the content of the request.
        trained: the arrays of each array record in the job's answer.

    Raises:
        BudgetExceededError: the budget is spent.
        MessageError: answer and request do not have one array record each, or guard.toml lacks a
            nominal number.
        PrivacyError: the arrays of both differ.
    """
    received = _copies(received_content)
    if trained and (len(received), len(trained)) != (1, 1):
        raise MessageError(
            f"the request has {len(received)} array records and the answer has {len(trained)}, but "
            "each must have exactly one. Send one model in both (initial_parameters of the "
            "server's strategy)"
        ).with_code("guard.arrays")
    records, leaving = _records(received_content), RecordDict()
    for name, kind in records.items():
        if kind is not ArrayRecord:
            leaving[name] = kind(_nominal(guard, name))
    for name, kind in records.items():  # last, as nothing may be refused after the charge
        if kind is ArrayRecord and trained:
            arrays = guard.protect(request, received[0], trained[0])
            leaving[name] = ArrayRecord({key: Array(value) for key, value in arrays.items()})
    return leaving


def _nominal(guard: UpdateGuard, record: str) -> dict[str, Any]:
    """Returns the public content of a record of metrics.

    Raises:
        MessageError: guard.toml lacks a number without which Flower's server refuses the answer.
    """
    name = record.partition("res.")[2]
    if name == "status":
        return STATUS
    nominal: dict[str, Any] = dict(guard.nominal)
    if "num-examples" not in nominal and not name:
        _LOGGER.warning("guard.toml has no nominal num-examples, which Flower's FedAvg requires")
    if "num-examples" in nominal and name:
        nominal.setdefault("num_examples", nominal["num-examples"])  # its name in older answers
    if name in OLDER_NUMBERS and name not in nominal:
        raise MessageError(
            f"guard.toml has no nominal {name}, which NumPyClient answers must contain. Add it to "
            "[nominal]"
        ).with_code("guard.nominal")
    return nominal


def _records(received_content: RecordDict) -> dict[str, type]:
    """Returns the names and types of the records in the answer to a request."""
    prefix = next(iter(received_content), "").partition(".")[0]
    if prefix in OLDER:
        answered = prefix.removesuffix("ins") + "res"
        return {f"{answered}.{name}": kind for name, kind in OLDER[prefix].items()}
    return {**dict.fromkeys(received_content.array_records, ArrayRecord), "metrics": MetricRecord}


def _copies(content: RecordDict) -> list[Arrays]:
    records = content.array_records.values()
    return [{name: np.array(array.numpy()) for name, array in record.items()} for record in records]
