"""What a report of a run over nodes may say that follows from no seed and no ledger of the
server's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedsynth.federation.outputs.lost_clients import LOST, REJECTED

_NO_PART = re.compile(r"client ([0-9]{1,9}) took no part: .{1,600}")


class ServedEvidence:
    """What a report of a run over nodes may say of its clients, beside their ledgers.

    Args:
        absent: numbers of the clients that the report has nothing of.
        rows: of metrics.jsonl.
        resumptions: what the report says of them.
        rounds: that were planned.
    """

    def __init__(
        self,
        absent: Sequence[int],
        rows: Sequence[Mapping[str, Any]],
        resumptions: Sequence[str],
        rounds: int,
    ) -> None:
        self._absent = set(absent)
        self._rows = rows
        self._resumptions = resumptions
        self._rounds = rounds

    @property
    def has_losses(self) -> bool:
        """Whether a client was lost, or its answer not used, in any round."""
        return any(LOST in row or REJECTED in row for row in self._rows)

    def deviations(self, stated: Sequence[str], done: int, *, abandoned: bool) -> list[str]:
        """Who took no part, why in the server's words; where the run was resumed; and that it ended
        early, likewise."""
        found = [match for one in stated if (match := _NO_PART.fullmatch(one)) is not None]
        first = [match[0] for match in found]
        if sorted(int(match[1]) for match in found) != sorted(self._absent):
            first = [f"client {k} took no part" for k in sorted(self._absent)]
        last: list[str] = []
        if done < self._rounds and not abandoned:
            ended = f"ended after {done} of {self._rounds} rounds: "
            last = [one for one in stated[-1:] if one.startswith(ended)] or [ended]
        return [*first, *self._resumptions, *last]
