"""A guard in front of other people's Flower jobs: a mod of their ClientApp.

    app = ClientApp(mods=[guard_mod])    # first, so that it sees what the other mods return

The folder of the guard comes from the node's configuration, which is the data owner's:

    guard           the folder with guard.toml (`fedsynth.privacy.guard`); default: the environment
                    variable FEDSYNTH_GUARD, for Flower's simulation
    client          the client's name; default: client-000 for partition-id 0, and so on

Flower's SuperNode runs the app that the server sends. So the mod protects an owner who has checked
the app, or who runs an app of their own.

Every answer is written anew. Its arrays pass the guard, with the arrays of the request as the
received model. Its metrics and settings are dropped, or have the nominal values of guard.toml.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.error import Error
from flwr.common.constant import ErrorCode

from fedsynth.errors import FedsynthError, MessageError
from fedsynth.privacy.guard import UpdateGuard

_LOGGER = logging.getLogger(__name__)
STATUS = {"code": 0, "message": ""}  # of the answers of Flower's older clients
FAILED = "the job failed on the client. The reason is in the client's log only"


def guard_mod(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Makes a client's answer private before it leaves, as a mod of a ClientApp.

    Args:
        message: the request.
        context: the client's context, whose node configuration names the guard's folder.
        call_next: the rest of the job.

    Returns:
        The answer. It is an error of one line if the guard refuses it, for example because the
        budget is spent.
    """
    try:
        guard = guard_of(context.node_config)
        request, received = identity(message), _copies(message.content)  # jobs may change both
        answer = call_next(message, context)
        if answer.has_error():
            return Message(Error(ErrorCode.UNKNOWN, FAILED), reply_to=message)
        content = protected(guard, request, received, answer.content)
        return Message(content, reply_to=message)
    except FedsynthError as error:
        _LOGGER.error("%s", error)
        return Message(Error(ErrorCode.UNKNOWN, str(error)), reply_to=message)
    except Exception:  # Flower would send its text, which may show private values
        _LOGGER.exception("the job failed")
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, FAILED), reply_to=message)


def guard_of(config: Mapping[str, Any]) -> UpdateGuard:
    """Opens the guard that a node's configuration names.

    Raises:
        MessageError: the configuration names no folder.
        PrivacyError: the guard cannot be opened.
    """
    folder = config.get("guard") or os.environ.get("FEDSYNTH_GUARD")
    if not folder:
        raise MessageError(
            "the node's configuration names no guard. Add guard, the folder with guard.toml"
        ).with_code("guard.folder")
    name = config.get("client", f"client-{int(config.get('partition-id', 0)):03d}")
    return UpdateGuard(str(folder), str(name))


def identity(message: Message) -> list[object]:
    """Returns what identifies a request besides its arrays, such as the run and the round."""
    meta = message.metadata
    request: list[object] = [meta.run_id, meta.group_id, meta.message_type]
    for name, settings in message.content.config_records.items():
        request.append((name, sorted(settings.items())))
    return request


def protected(
    guard: UpdateGuard,
    request: Sequence[object],
    received: Sequence[Mapping[str, Any]],
    answer: RecordDict,
) -> RecordDict:
    """Returns the content that may leave in place of a job's answer.

    Args:
        guard: the client's guard.
        request: what identifies the request.
        received: the arrays of each array record of the request.
        answer: the content of the job's answer.

    Raises:
        BudgetExceededError: the budget is spent.
        MessageError: answer and request do not have one array record each.
        PrivacyError: the arrays of both differ.
    """
    leaving = RecordDict()
    trained = _copies(answer)
    if trained and (len(received), len(trained)) != (1, 1):
        raise MessageError(
            f"request and answer must have one array record each, got {len(received)} and "
            f"{len(trained)}. Let the job send one model"
        ).with_code("guard.arrays")
    for name, record in answer.items():
        if isinstance(record, ArrayRecord):
            arrays = guard.protect(request, received[0], trained[0])
            leaving[name] = ArrayRecord({key: Array(value) for key, value in arrays.items()})
        else:
            kind = MetricRecord if isinstance(record, MetricRecord) else ConfigRecord
            status = STATUS if name.endswith(".status") else {}
            leaving[name] = kind({**guard.nominal(record), **status})
    return leaving


def _copies(content: RecordDict) -> list[dict[str, Any]]:
    records = content.array_records.values()
    return [{name: np.array(array.numpy()) for name, array in record.items()} for record in records]
