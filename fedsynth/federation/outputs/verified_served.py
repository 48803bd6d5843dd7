"""What a report of a run over nodes may say that follows from no seed and no ledger of the
server's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedsynth.federation.outputs.lost_clients import LOST, REJECTED

_NO_PART = re.compile(r"client ([0-9]{1,9}) took no part: .{1,600}")
_UNSTATED = re.compile(
    r"client ([0-9]{1,9}) has not stated its ledger since it was asked for a step in round "
    r"([0-9]{1,9}(?:, [0-9]{1,9})*): counted as charged"
)


class ServedEvidence:
    """What a report of a run over nodes may say of its clients, beside their ledgers.

    Args:
        absent: numbers of the clients that the report has nothing of.
        rows: of metrics.jsonl.
        resumptions: what the report says of them.
        resumed: after which rounds the run was resumed.
        rounds: that were planned.
    """

    def __init__(
        self,
        absent: Sequence[int],
        rows: Sequence[Mapping[str, Any]],
        resumptions: Sequence[str],
        resumed: Sequence[int],
        rounds: int,
    ) -> None:
        self._absent = set(absent)
        self._rows = rows
        self._resumptions = resumptions
        self._resumed = resumed
        self._rounds = rounds

    @property
    def has_losses(self) -> bool:
        """Whether a client was lost, or its answer not used, in any round."""
        return any(LOST in row or REJECTED in row for row in self._rows)

    def deviations(self, stated: Sequence[str], done: int, *, abandoned: bool) -> list[str]:
        """Who took no part, why in the server's words; where the run was resumed; that it ended
        early, likewise; and whose steps were counted as charged without a statement."""
        unstated = [one for one in stated if self._may_be_unstated(one)]
        stated = [one for one in stated if one not in unstated]
        found = [match for one in stated if (match := _NO_PART.fullmatch(one)) is not None]
        first = [match[0] for match in found]
        if sorted(int(match[1]) for match in found) != sorted(self._absent):
            first = [f"client {k} took no part" for k in sorted(self._absent)]
        last: list[str] = []
        if done < self._rounds and not abandoned:
            ended = f"ended after {done} of {self._rounds} rounds: "
            last = [one for one in stated[-1:] if one.startswith(ended)] or [ended]
        return [*first, *self._resumptions, *last, *unstated]

    def _may_be_unstated(self, sentence: str) -> bool:
        """Whether a client may have been silent since the rounds that a sentence names."""
        match = _UNSTATED.fullmatch(sentence)
        if match is None or int(match[1]) in self._absent:
            return False
        for number in map(int, match[2].split(", ")):
            row = self._rows[number - 1] if 1 <= number <= len(self._rows) else {}
            cut_off = number - 1 in self._resumed or number == len(self._rows) + 1
            if not cut_off and match[1] not in row.get(LOST, {}):
                return False
        return True
