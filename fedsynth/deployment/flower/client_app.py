"""The ClientApp, for Flower's simulation and for SuperNodes that run the app that they receive.

Each message may start a fresh process. A client's state is therefore stored in files in its home
folder (`fedsynth.deployment.session`). It is not stored in Flower's context, which passes through
the SuperNode with each message and is lost with the SuperNode.

A data owner who does not trust the server starts `fedsynth client` instead
(`fedsynth.deployment.flower.executor`). It never runs an app that a server sends, so the owner's
ledger holds whatever the server does.

The node's configuration (`--node-config`) may contain these values. In a simulation, Flower sets
the first one.

    partition-id    the index of the client
    home            the folder of the client's ledgers
    data            a folder of the client's images by class; default: a part of the data set
    policy          the file of the owner's policy; default: every run is approved (for trials)
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
    """Answers a message from the server."""
    run, frame = from_record(message.content)
    node = node_of(context.node_config, str(context.run_config.get("home", "")))
    return reply(run, node.answer(run, frame), message)


def node_of(config: Mapping[str, Any], homes: str = "") -> Node:
    """Creates a node from a configuration.

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
            "the node's configuration sets data or policy, so it must also set home, the folder of "
            "the client's ledgers"
        )
    number = int(config["partition-id"])
    home = Path(str(config.get("home", Path(homes or "homes") / f"client-{number:03d}")))
    source: Source = DatasetPart()
    owner = Owner(approved=frozenset({ANY}))
    if "data" in config:
        source = ClassFolders(Path(str(config["data"])))
    if "policy" in config:
        owner = Owner(Policy.read(Path(str(config["policy"]))))
    return Node(number, home, source, owner)
