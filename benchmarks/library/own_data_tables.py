"""The table of docs/own-data.md."""

from __future__ import annotations

from collections.abc import Callable

from library.rows import lines, table


def _own_images() -> str:
    body = [
        [
            row["case"].removesuffix(" pixels"),
            f"{row['describe_seconds']:.0f} s",
            f"{row['synthesize_seconds']:.0f} s",
            f"{100 * row['accuracy']:.1f}",
        ]
        for row in lines("own_images")
    ]
    return table(["pixels a side", "`describe`", "`synthesize`", "test accuracy"], body)


TABLES: dict[str, Callable[[], str]] = {"own-images": _own_images}
SENTENCES: list[tuple[str, str, Callable[[], list[str]]]] = []
