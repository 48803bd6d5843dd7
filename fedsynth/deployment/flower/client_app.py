"""The ClientApp: for Flower's own simulation, and for SuperNodes that run the app they receive.

Each message may start a fresh process, so no state stays in this one: a client's state is
in the files of its home (`fedsynth.deployment.session`), and not in Flower's context, which
goes through the SuperNode with each message, and is lost with it.

A data owner whose ledger must hold whatever a server sends starts `fedsynth client` instead
(`fedsynth.deployment.flower.executor`), which never runs a received app.

The node's configuration (`--node-config`) may contain the following; in a simulation Flower itself
sets the first:

    partition-id    the client's index
    home            the folder of its ledgers
    data            a folder of its images by class; default: its part of the data set
    policy          the file of its policy; default: everything is approved (trials)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedsynth.deployment.flower.executor import from_record, reply
from fedsynth.deployment.node import Node
from fedsynth.deployment.policy import ANY, Owner, Policy
from fedsynth.deployment.record_source import ClassFolders, DatasetPart, Source
from fedsynth.errors import MessageError

app = ClientApp()


@app.query()  # type: ignore[untyped-decorator]  # Flower is not type-checked
def answer(message: Message, context: Context) -> Message:
    """Returns the answer to a server's message."""
    run, frame = from_record(message.content)
    node = node_of(context.node_config, str(context.run_config.get("home", "")))
    return reply(run, node.answer(run, frame), message)


def node_of(config: Mapping[str, Any], homes: str = "") -> Node:
    """Returns the node of a configuration.

    Args:
        config: as in this module's docstring.
        homes: for trials, the folder in which each client has its home, if `config` has none.

    Raises:
        MessageError: an owner's data or policy without a home: a server, which sets `homes`, would
            choose the ledger.
    """
    if "home" not in config and {"data", "policy"} & set(config):
        raise MessageError("a node with its own data or policy needs its own home folder")
    number = int(config["partition-id"])
    home = Path(str(config.get("home", Path(homes or "homes") / f"client-{number:03d}")))
    source: Source = DatasetPart()
    owner = Owner(approved=frozenset({ANY}))
    if "data" in config:
        source = ClassFolders(Path(str(config["data"])))
    if "policy" in config:
        owner = Owner(Policy.read(Path(str(config["policy"]))))
    return Node(number, home, source, owner)
