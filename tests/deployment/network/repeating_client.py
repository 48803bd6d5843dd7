"""A data owner's node whose noise can be repeated: so a run with differential privacy over nodes
can be compared with one in one process. It is Python of the owner's own; nothing that a server
sends, no setting and no environment makes a node do this, and its report says "not private"."""

import sys
from pathlib import Path
from typing import Any

from fedsynth.deployment.flower.joining import Door, join
from fedsynth.deployment.node import Node
from fedsynth.deployment.policy import ANY, Owner
from fedsynth.deployment.record_source import PartOf
from fedsynth.privacy.randomness import SecretGenerator
from tests.simulation.test_unchanged import RepeatableNoise


def main() -> None:
    server, number, home, authority, key = sys.argv[1:]

    def secret() -> SecretGenerator:
        noise: Any = RepeatableNoise(int(number))
        return SecretGenerator(test_only=noise)

    def say(text: str) -> None:
        print(text, flush=True)

    owner = Owner(approved=frozenset({ANY}))
    node = Node(int(number), Path(home), PartOf(), owner, device="cpu", say=say, secret=secret)
    join(node, Door(server, Path(authority), Path(key)))


if __name__ == "__main__":
    main()
