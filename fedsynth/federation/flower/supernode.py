"""Flower's SuperNode, which ends when its parent process or its server is gone: `python -m` this,
with its options."""

from __future__ import annotations

import os

from fedsynth.federation.flower.processes import end_with_parent


def main() -> None:
    """`flower-supernode`, with its options."""
    from flwr.supernode.cli.flower_supernode import flower_supernode

    end_with_parent()
    flower_supernode()
    os._exit(1)  # its server is gone, and a thread of its own keeps the process alive


if __name__ == "__main__":
    main()
