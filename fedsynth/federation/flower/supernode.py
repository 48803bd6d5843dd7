"""Flower's SuperNode, which ends when who has started it is gone: `python -m` this, with its
options."""

from __future__ import annotations

from fedsynth.federation.flower.processes import end_with_parent


def main() -> None:
    """`flower-supernode`, with its options."""
    from flwr.supernode.cli.flower_supernode import flower_supernode

    end_with_parent()
    flower_supernode()


if __name__ == "__main__":
    main()
