"""Runs a federation's server as a Flower ServerApp.

The app sends the messages of all rounds over Flower's Grid. It is not a Flower Strategy. Strategies
average arrays, whereas here the method computes the next state from its clients' uploads. Flower
starts the app in a separate process on the SuperLink's machine. The app's configuration contains
the run's settings (`fedsynth.deployment.flower.serving.DEFAULTS`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fedsynth.deployment.flower.executor import KIND, from_record, to_record
from fedsynth.deployment.frames import Connection, Timeouts
from fedsynth.deployment.networked_run import NetworkedRun
from fedsynth.deployment.proposal import Proposal
from fedsynth.errors import FedsynthError, MessageError
from fedsynth.results.run_messages import StderrObserver

# The number of seconds between two checks for answers.
POLL_SECONDS = 0.3

app = ServerApp()


class GridTransport:
    """Transports the server's messages and the nodes' answers over Flower's Grid.

    Args:
        grid: the Grid.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.run = ""

    def nodes(self) -> Sequence[int]:
        """Returns the ids of the connected nodes."""
        return sorted(self._grid.get_node_ids())

    def ask(self, messages: Mapping[int, bytes], seconds: float) -> dict[int, bytes | str]:
        """Sends a message to each node, and returns the answers that arrive within `seconds`.

        Later answers are discarded.
        """
        deadline = time.monotonic() + seconds
        ttl = max(1.0, seconds)
        requests = [
            Message(to_record(self.run, frame), node, KIND, ttl=ttl)
            for node, frame in messages.items()
        ]
        waiting: dict[str, int] = {}
        answers: dict[int, bytes | str] = {}
        for node, message_id in zip(messages, self._grid.push_messages(requests), strict=True):
            if message_id:
                waiting[message_id] = node
            else:
                answers[node] = "the node is no longer connected"
        while waiting and time.monotonic() < deadline:
            for message in self._grid.pull_messages(list(waiting)):
                sender = waiting.pop(message.metadata.reply_to_message_id, None)
                if sender is not None:
                    answers[sender] = self._answer(message)
            if waiting:
                time.sleep(POLL_SECONDS)
        return answers

    def _answer(self, message: Message) -> bytes | str:
        """Returns the frame in a node's answer, or the reason why the answer cannot be used."""
        if message.has_error():
            return f"the node does not answer: {message.error.reason!s:.200}"
        try:
            run, frame = from_record(message.content)
        except MessageError as error:
            return str(error)
        if run != self.run:
            return f"the node answered for another run: {run!r:.40}"
        return frame


@app.main()  # type: ignore[untyped-decorator]  # Flower is not type-checked
def main(grid: Grid, context: Context) -> None:
    """Executes the run described by the app's configuration.

    If there is a result file, the path of the run folder is written to it before the first round,
    and afterwards the final path or the error. Flower would print a traceback of the error, so it
    is raised only without such a file.
    """
    result = str(context.run_config["result"])
    outcome: dict[str, str] = {}
    try:
        run = configured_run(grid, context.run_config)
        if result:
            _write(result, {"begun": str(run.folder.path)})
        outcome["folder"] = str(run.run())
    except FedsynthError as error:
        outcome |= {"error": str(error), "code": error.code}
        if not result:
            raise
    finally:
        if result:
            _write(result, outcome)


def _write(result: str, outcome: Mapping[str, str]) -> None:
    Path(result).write_text(json.dumps(outcome), encoding="utf-8")


def configured_run(grid: Grid, config: Mapping[str, Any]) -> NetworkedRun:
    """Creates the run described by the app's configuration."""
    nodes = json.loads(str(config["clients"]))
    clients = {int(node): int(client) for node, client in nodes.items()}
    timeouts = Timeouts(join=float(config["join"]), answer=float(config["answer"]))
    proposal = Proposal.from_json(json.loads(str(config["proposal"])))
    return NetworkedRun(
        proposal,
        Connection(GridTransport(grid), timeouts, clients),
        Path(str(config["output"])),
        StderrObserver(proposal.settings),  # Flower stores this text in its log
        Path(str(config["resume"])) if config["resume"] else None,
    )
