"""Answers a SuperNode's messages at a data owner's, in the owner's own process.

By itself, a SuperNode runs the app that comes with a message: any code that the server sends, which
no ledger would bind. So the SuperNode is started with `--isolation process`, in which it runs
nothing and leaves its tasks to other processes; this module takes them. It answers with the package
that the owner has installed, never installs or imports the received app, and does not take tasks of
other kinds (agents, connectors, models). The records stay in one process, and a message starts
none.

Flower has no public API for this: the module uses the SuperNode's Runtime API as Flower's own
executor of this version does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import httpx
from flwr.app import Message
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
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedsynth.deployment.flower.records import from_record, reply
from fedsynth.errors import MessageError

ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
GONE_SECONDS = 30.0
"""How long a SuperNode that does not answer is retried."""
LOOK = 0.2
"""Seconds between two polls for a task."""

Answer = Callable[[str, bytes], bytes]
"""(run, frames) -> the answers' frames, as `Node.answer`."""


@dataclass(frozen=True)
class Executor:
    """Takes a SuperNode's tasks.

    Args:
        address: of the SuperNode's Runtime API, HOST:PORT on this machine.
        secret: shared with the SuperNode: no other process on this machine takes its tasks.
        answer: the node's.
    """

    address: str
    secret: bytes
    answer: Answer

    def serve(self, going: Callable[[], bool]) -> None:
        """Answers messages, one at a time.

        Args:
            going: called between messages; False ends the loop.
        """
        signed = SuperExecAuthHttpInterceptor(
            master_secret=self.secret, protected_methods=frozenset({ACQUIRE})
        )
        version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
        client = self._client(version, signed, persistent=False)
        request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        try:
            while going():
                token = ""
                with suppress(httpx.HTTPError):  # the SuperNode is starting or ending
                    token = client.AcquireTask(request).token
                if token:
                    self._take(token)
                else:
                    time.sleep(LOOK)
        finally:
            client.close()

    def _client(self, *interceptors: object, persistent: bool = True) -> RuntimeHttpClient:
        invoker = make_simple_http_retry_invoker()
        invoker.max_time = GONE_SECONDS
        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=True,  # it never leaves the machine
            root_certificates=None,
            interceptors=list(interceptors),
            retry_invoker=invoker if persistent else None,
        )

    def _take(self, token: str) -> None:
        """Answers one message. A SuperNode waits for an answer to each, so there is always one.

        If the SuperNode has ended meanwhile, the node keeps its answer for the server.
        """
        version = RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
        client = self._client(version, RuntimeTokenHttpInterceptor(token))
        beat = HeartbeatSender(make_task_heartbeat_fn_http(client))
        try:
            beat.start()
            message, context, _, _ = pull_task_input(client)
            answered = self._answered(message)
            push_message(client, answered, context)
            push_task_output(
                client=client, context=context, sub_status=SubStatus.COMPLETED, details=""
            )
        except (httpx.HTTPError, RunNotRunningException) as error:
            print(f"an answer was rejected: {error!r:.200}", file=sys.stderr, flush=True)
        finally:
            if beat.is_running:
                beat.stop()
            client.close()

    def _answered(self, message: Message) -> Message:
        """Returns the answer to a message, or an error for a foreign one."""
        try:
            if message.has_error():
                raise MessageError("an error is not a request")
            run, sent = from_record(message.content)
        except MessageError as error:
            return Message(Error(ErrorCode.UNKNOWN, str(error)), reply_to=message)
        return reply(run, self.answer(run, sent), message)
