"""A data owner's node that answers one message with nonsense, where a file `break` stands in its
home: what a damaged, or lying, client may send."""

import sys
from dataclasses import dataclass
from pathlib import Path

from fedsynth.federation.flower.joining import Door, join
from fedsynth.federation.nodes.node import Node
from fedsynth.federation.nodes.own_data import PartOf
from fedsynth.federation.nodes.policy import ANY, Owner


@dataclass
class Breaking(Node):
    """Breaks once."""

    def answer(self, run: str, sent: bytes) -> bytes:
        answered = super().answer(run, sent)
        if b'"kind": "step"' in sent and (self.home / "break").exists():
            (self.home / "break").unlink()
            return b"\xff" * 40
        return answered


def main() -> None:
    server, number, home, authority, key = sys.argv[1:]
    owner = Owner(approved=frozenset({ANY}))
    say = lambda text: print(text, flush=True)  # noqa: E731
    node = Breaking(int(number), Path(home), PartOf(), owner, device="cpu", say=say)
    join(node, Door(server, Path(authority), Path(key)))


if __name__ == "__main__":
    main()
