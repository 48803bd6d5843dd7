"""The ServerApp: a run's rounds over Flower's Grid.

It is not a Strategy: Flower's strategies average arrays, and here the method computes the next
state from its clients' uploads. Flower starts it in a separate process on the SuperLink's machine,
with a run's settings in its configuration:

    proposal    the run's, as JSON
    output      the parent folder of run folders
    resume      the folder of the run to resume; ""
    numbers     which client each node is, as JSON {"node": client}; "{}": each node states it
    join, answer    how many seconds the server waits
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fedsynth.deployment.carrier import Post, Timeouts
from fedsynth.deployment.flower.records import from_record, request
from fedsynth.deployment.networked_run import Served, serve
from fedsynth.deployment.proposal import Proposal
from fedsynth.errors import FedsynthError, MessageError
from fedsynth.federation.observer import Observer

LOOK = 0.3
"""Seconds between two polls for answers."""
DONE = "done.json"
"""In the output folder: the run folder's path, for the process that started it; or the error."""

app = ServerApp()


class OverGrid:
    """Transports messages over Flower's Grid.

    Args:
        grid: Flower's.
        look: seconds between two polls for answers.
    """

    def __init__(self, grid: Grid, look: float = LOOK) -> None:
        self._grid = grid
        self._look = look
        self.run = ""

    def nodes(self) -> Sequence[int]:
        """Returns the connected nodes."""
        return sorted(self._grid.get_node_ids())

    def ask(self, messages: Mapping[int, bytes], seconds: float) -> dict[int, bytes | str]:
        """Sends all messages, and returns the answers that arrive in time; later ones are
        dropped.
        """
        ends = time.monotonic() + seconds
        sent = {
            node: request(self.run, content, node, max(1.0, seconds))
            for node, content in messages.items()
        }
        named = list(self._grid.push_messages(sent.values()))
        waiting = {name: node for name, node in zip(named, sent, strict=True) if name}
        answers: dict[int, bytes | str] = dict.fromkeys(
            set(sent) - set(waiting.values()), "is gone"
        )
        while waiting and time.monotonic() < ends:
            for message in self._grid.pull_messages(list(waiting)):
                node = waiting.pop(message.metadata.reply_to_message_id, None)
                if node is not None:
                    answers[node] = self._answer(message)
            if waiting:
                time.sleep(self._look)
        return answers

    def _answer(self, message: Message) -> bytes | str:
        """Returns a node's answer, or why there is none."""
        if message.has_error():
            return f"does not answer: {message.error.reason!s:.200}"
        try:
            run, sent = from_record(message.content)
        except MessageError as error:
            return str(error)
        return sent if run == self.run else f"answers for run {run!r:.40}"


class Said(Observer):
    """Prints a run's messages, which Flower stores in its log."""

    def note(self, text: str) -> None:
        print(text, flush=True)

    def round_ended(self, row: Mapping[str, Any]) -> None:
        print(json.dumps(dict(row)), flush=True)


@app.main()  # type: ignore[untyped-decorator]  # Flower is not type-checked
def main(grid: Grid, context: Context) -> None:
    """Runs the configured run, and writes where its folder is."""
    config = context.run_config
    output = Path(str(config["output"]))
    try:
        served = played(grid, config)
    except FedsynthError as error:
        _leave(output, str(config["token"]), {"error": str(error)})
        raise
    _leave(output, str(config["token"]), {"folder": str(served.folder)})


def played(grid: Grid, config: Mapping[str, Any]) -> Served:
    """Runs the run of a configuration.

    Args:
        grid: Flower's.
        config: see this module's docstring.
    """
    proposal = Proposal.from_json(json.loads(str(config["proposal"])))
    numbers = {int(node): int(k) for node, k in json.loads(str(config["numbers"])).items()}
    timeouts = Timeouts(join=float(config["join"]), answer=float(config["answer"]))
    resume = str(config["resume"])
    return serve(
        proposal,
        Post(OverGrid(grid), timeouts, numbers),
        Path(str(config["output"])),
        observer=Said(),
        resume=Path(resume) if resume else None,
    )


def _leave(output: Path, token: str, facts: Mapping[str, str]) -> None:
    """Writes how the run ended, for the process that started it; `token` identifies the start."""
    output.mkdir(parents=True, exist_ok=True)
    (output / f".{token}-{DONE}").write_text(json.dumps(dict(facts)), encoding="utf-8")
