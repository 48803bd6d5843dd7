"""Answers a SuperNode's messages in the data owner's process.

The module also converts messages to and from Flower's format, and defines the ClientApp.

By itself, a SuperNode runs the app in each message. The app is the server's code, which could
ignore the owner's ledger. Therefore `fedsynth client` starts the SuperNode with `--isolation
process`, which leaves the tasks to other processes, and `serve_tasks` takes the tasks.
`serve_tasks` answers with the installed package, never installs or imports an app that it receives,
and takes no tasks of other kinds (agents, connectors, models). All messages are answered in one
process, which keeps the records in memory.

Flower has no public API for external executors. The module uses the SuperNode's Runtime API like
the installed Flower version's own executor.

A message in Flower's format is a `ConfigRecord` with the bytes of a frame and the name of the run.
Other kinds of records are not used. Flower's array records are meant for models to be averaged,
whereas the package checks the arrays in a message against the method's declaration
(`fedsynth.core.messages`).

The ClientApp `app` is for Flower's simulation and for SuperNodes that run the app that they
receive. Each message may start a fresh process. A client's state is therefore stored in files in
its home folder (`fedsynth.deployment.session`). It is not stored in Flower's context, which passes
through the SuperNode with each message and is lost with the SuperNode. The node's configuration
(`--node-config`) may contain these values. In a simulation, Flower sets the first one.

    partition-id    the index of the client
    home            the folder of the client's ledgers
    data            a folder of the client's images by class; default: a part of the data set
    policy          the file of the owner's policy; default: every run is approved (for trials)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.app.error import Error
from flwr.clientapp import ClientApp
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

from fedsynth.deployment.frames import SAME_VERSION
from fedsynth.deployment.node import ClassFolders, DatasetPart, Node, Source
from fedsynth.deployment.policy import ANY, Owner, Policy
from fedsynth.errors import MessageError

RECORD = "fedsynth"
# The message type for Flower. It does not say "train", so no Flower strategy processes the
# messages.
KIND = "query"


def to_record(run: str, frame: bytes) -> RecordDict:
    """Packs a run's name and a message into a Flower record. `from_record` is the inverse."""
    return RecordDict({RECORD: ConfigRecord({"run": run, "frames": frame})})


def from_record(content: RecordDict) -> tuple[str, bytes]:
    """Reads the run's name and the message from a Flower record.

    Raises:
        MessageError: if the record is not a message of this package.
    """
    try:
        record: Any = content[RECORD]
        run, frame = record["run"], record["frames"]
    except (KeyError, TypeError) as error:
        raise MessageError(
            f"the received message is missing 'run' or 'frames' ({error!r:.80}). {SAME_VERSION}"
        ) from None
    if not (isinstance(run, str) and isinstance(frame, bytes)):
        raise MessageError(
            "the received message must contain text as 'run' and bytes as 'frames', got "
            f"{type(run).__name__} and {type(frame).__name__}. {SAME_VERSION}"
        )
    return run, frame


ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
# How many seconds calls to a SuperNode that does not answer are repeated.
RETRY_SECONDS = 30.0
# The number of seconds between two checks for a task.
POLL_SECONDS = 0.2

# A function that maps (run, frame) to the frame of the answer, such as `Node.answer`.
Answer = Callable[[str, bytes], bytes]


def serve_tasks(
    address: str, secret: bytes, answer: Answer, is_running: Callable[[], bool]
) -> None:
    """Answers the messages that a SuperNode has received from the server, one at a time.

    Args:
        address: the address of the SuperNode's Runtime API, HOST:PORT on this machine.
        secret: a secret that only this process and the SuperNode know. No other process on this
            machine can take the tasks.
        answer: answers a message, such as `Node.answer`.
        is_running: is called between messages. The loop ends when it returns False.
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
    """Answers one of the SuperNode's messages.

    Every message gets an answer, because the SuperNode waits for an answer.

    If the SuperNode has ended in the meantime, the node keeps its answer. It sends this answer when
    the server repeats the request.
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
        text = f"cannot pass an answer to the SuperNode: {error!r:.200}"
        print(text, file=sys.stderr, flush=True)
    finally:
        if heartbeat.is_running:
            heartbeat.stop()
        client.close()


def _reply(message: Message, answer: Answer) -> Message:
    """Answers a message of a fedsynth server. Other messages are answered with an error."""
    try:
        if message.has_error():
            raise MessageError("the server sent an error message. Read the server's log")
        run, frame = from_record(message.content)
    except MessageError as error:
        return Message(Error(ErrorCode.UNKNOWN, str(error)), reply_to=message)
    return Message(to_record(run, answer(run, frame)), reply_to=message)


app = ClientApp()


@app.query()  # type: ignore[untyped-decorator]  # Flower is not type-checked
def answer(message: Message, context: Context) -> Message:
    """Answers a server's message. This function is the ClientApp's entry point."""
    run, frame = from_record(message.content)
    node = node_of(context.node_config, str(context.run_config.get("home", "")))
    return Message(to_record(run, node.answer(run, frame)), reply_to=message)


def node_of(config: Mapping[str, Any], homes: str = "") -> Node:
    """Creates a data owner's node, given Flower's node configuration.

    Args:
        config: the node's configuration, as described at the top of this module.
        homes: the folder that contains each client's home, for trials. It is used if `config` names
            no home.

    Raises:
        MessageError: if `config` names data or a policy but no home. The server sets `homes`, so it
            would choose the owner's ledger.
    """
    if "home" not in config and {"data", "policy"} & set(config):
        raise MessageError(
            "--node-config sets data or policy, but not home. Add home='FOLDER' for the ledgers"
        )
    number = int(config["partition-id"])
    home = Path(str(config.get("home", Path(homes or "homes") / f"client-{number:03d}")))
    source: Source = DatasetPart()
    owner = Owner(approved=frozenset({ANY}))
    if "data" in config:
        source = ClassFolders(Path(str(config["data"])))
    if "policy" in config:
        owner = Owner(Policy.read(Path(str(config["policy"]))))
    return Node(number, home, owner, source=source)
