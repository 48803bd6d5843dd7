"""What a client says of its ledger: to the server when it joins, and for the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedsynth.privacy.releases import Release


@dataclass(frozen=True)
class History:
    """The releases that a client's ledger holds. They are public, as is all that a ledger says.

    Attributes:
        client: its name.
        releases: the rows, oldest first.
        chain: the hash over them in the ledger's file, which names exactly these rows, also where
            the file has grown since; None where the ledger is in memory.
    """

    client: str
    releases: tuple[Release, ...] = ()
    chain: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As a JSON-able mapping; `from_json` is its inverse."""
        rows = [row.to_json() for row in self.releases]
        return {"client": self.client, "releases": rows, "chain": self.chain}

    @classmethod
    def from_json(cls, stated: Mapping[str, Any]) -> History:
        """The history that `to_json` gave.

        Raises:
            PrivacySettingError: a row that is none.
        """
        rows = tuple(Release.from_json(row) for row in stated["releases"])
        chain = stated["chain"]
        return cls(str(stated["client"]), rows, None if chain is None else str(chain))
