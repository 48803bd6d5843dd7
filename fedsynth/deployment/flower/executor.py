"""Answers a SuperNode's messages at a data owner's, in the owner's own process.

By itself, a SuperNode runs the app that comes with a message: any code that the server sends, which
no ledger would bind. So the SuperNode is started with `--isolation process`, in which it runs
nothing and leaves its tasks to other processes; this module takes them. It answers with the package
that the owner has installed, never installs or imports the received app, and does not take tasks of
other kinds (agents, connectors, models). The records stay in one process, and a message starts
none.

Flower has no public API for this: the module uses the SuperNode's Runtime API as Flower's own
executor of this version does.

Conversion of our messages to Flower's, and back: bytes and the run's name in a `ConfigRecord`.

Nothing else of Flower's records is used: its arrays are for models that are averaged, and ours are
checked against the methods' own declarations (`fedsynth.core.messages`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.error import Error
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import RetryInvoker, make_simple_http_retry_invoker
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedsynth.errors import MessageError

RECORD = "fedsynth"
KIND = "query"
"""Flower's type of our messages: it names no training, so that no strategy processes them."""


def to_record(run: str, frame: bytes) -> RecordDict:
    """Returns the run's name and a frame in Flower's form."""
    return RecordDict({RECORD: ConfigRecord({"run": run, "frames": frame})})


def from_record(content: RecordDict) -> tuple[str, bytes]:
    """Returns the run's name and the frame.

    Raises:
        MessageError: it is not our message.
    """
    try:
        record: Any = content[RECORD]
        run, frame = record["run"], record["frames"]
    except (KeyError, TypeError) as error:
        raise MessageError(f"not a valid fedsynth message: {error!r:.80}") from None
    if not (isinstance(run, str) and isinstance(frame, bytes)):
        raise MessageError("not a valid fedsynth message: its record has other types")
    return run, frame


def request(run: str, frame: bytes, node: int, seconds: float) -> Message:
    """Returns a message to a node, which expires after `seconds`."""
    return Message(to_record(run, frame), node, KIND, ttl=seconds)


def reply(run: str, frame: bytes, to: Message) -> Message:
    """Returns the answer to a message."""
    return Message(to_record(run, frame), reply_to=to)


ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
RETRY_SECONDS = 30.0
"""How long a SuperNode that does not answer is retried."""
POLL_SECONDS = 0.2
"""Seconds between two polls for a task."""

Answer = Callable[[str, bytes], bytes]
"""(run, frame) -> the answer's frame, as `Node.answer`."""


def serve_tasks(
    address: str, secret: bytes, answer: Answer, is_running: Callable[[], bool]
) -> None:
    """Answers a SuperNode's messages, one at a time.

    Args:
        address: of the SuperNode's Runtime API, HOST:PORT on this machine.
        secret: shared with the SuperNode: no other process on this machine takes its tasks.
        answer: the node's.
        is_running: called between messages; False ends the loop.
    """
    authentication = SuperExecAuthHttpInterceptor(
        master_secret=secret, protected_methods=frozenset({ACQUIRE})
    )
    request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    with closing(_client(address, "SuperExec", authentication, None)) as client:
        while is_running():
            token = ""
            with suppress(httpx.HTTPError):  # the SuperNode is starting or ending
                token = client.AcquireTask(request).token
            if token:
                _execute(address, token, answer)
            else:
                time.sleep(POLL_SECONDS)


def _client(
    address: str, component: str, authentication: object, retry: RetryInvoker | None
) -> RuntimeHttpClient:
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,  # the connection stays on this machine
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name=component), authentication],
        retry_invoker=retry,
    )


def _execute(address: str, token: str, answer: Answer) -> None:
    """Answers one message. A SuperNode waits for an answer to each, so there is always one.

    If the SuperNode has ended meanwhile, the node keeps its answer for the server.
    """
    retry = make_simple_http_retry_invoker()
    retry.max_time = RETRY_SECONDS
    client = _client(address, "flwr-clientapp", RuntimeTokenHttpInterceptor(token), retry)
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    try:
        message, context, _, _ = pull_task_input(client)
        push_message(client, _reply(message, answer), context)
        push_task_output(client, context, SubStatus.COMPLETED, details="")
    except (httpx.HTTPError, RunNotRunningException) as error:
        print(f"an answer was rejected: {error!r:.200}", file=sys.stderr, flush=True)
    finally:
        if heartbeat.is_running:
            heartbeat.stop()
        client.close()


def _reply(message: Message, answer: Answer) -> Message:
    """Returns the answer to a message, or an error for a foreign one."""
    try:
        if message.has_error():
            raise MessageError("an error is not a request")
        run, frame = from_record(message.content)
    except MessageError as error:
        return Message(Error(ErrorCode.UNKNOWN, str(error)), reply_to=message)
    return reply(run, answer(run, frame), message)
