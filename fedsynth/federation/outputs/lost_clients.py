"""What a round's row says of the clients whose uploads were not used, and a line of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsynth.federation.exchange.rounds import Played

LOST = "lost"
"""Of each client that did not answer, why."""
REJECTED = "rejected"
"""Of each client whose upload could not be used, what is wrong with it."""
NOT_COUNTED = "not_counted"
"""Of a round below the quorum: the exchange, the uploads that could be used, and those needed."""


def lost_clients(played: Played) -> dict[str, Any]:
    """Of the row, where there is anything to say: clients stand by their numbers, ascending."""
    row: dict[str, Any] = {}
    for key, found in ((LOST, played.lost), (REJECTED, played.rejected)):
        if found:
            row[key] = {str(client): found[client] for client in sorted(found)}
    if played.no_quorum is not None:
        missed = played.no_quorum
        row[NOT_COUNTED] = {
            "exchange": missed.phase,
            "uploads": missed.uploads,
            "needed": missed.needed,
        }
    return row


def lost_in_words(row: Mapping[str, Any]) -> list[str]:
    """The same in a few words: "lost 0 (crashed)", "rejected 3 (weight is -1, …)"."""
    said = [
        f"{key} {', '.join(f'{client} ({why})' for client, why in row[key].items())}"
        for key in (LOST, REJECTED)
        if key in row
    ]
    if NOT_COUNTED in row:
        missed = row[NOT_COUNTED]
        said.append(
            f"does not count: {missed['uploads']} uploads, and {missed['needed']} are needed"
        )
    return said
