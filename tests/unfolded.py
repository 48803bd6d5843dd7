"""The rows of a report's ledger section, as tests compare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsynth.privacy.held_rows import stated_rows
from fedsynth.privacy.releases import Release


def unfolded(report: Mapping[str, Any]) -> dict[str, list[Release]]:
    """Each client's rows, from the folded ledger of the report, by round."""
    rows = stated_rows(report)
    return {client: sorted(some, key=lambda row: row.round) for client, some in rows.items()}
