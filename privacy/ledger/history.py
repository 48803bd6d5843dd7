"""The ledger contents that a client sends to the server when it joins, and that reports use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedsynth.privacy.releases import Release


@dataclass(frozen=True)
class History:
    """The releases in a client's ledger. They are public, like everything in a ledger.

    Attributes:
        client: the client's name.
        releases: the rows, oldest first.
        chain: the chain hash over them in the ledger's file, which identifies exactly these rows
            even if the file has grown since; None if the ledger is in memory.
    """

    client: str
    releases: tuple[Release, ...] = ()
    chain: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-able mapping; `from_json` is the inverse."""
        return {**vars(self), "releases": [row.to_json() for row in self.releases]}

    @classmethod
    def from_json(cls, stated: Mapping[str, Any]) -> History:
        """Returns the history that `to_json` encoded.

        Raises:
            PrivacySettingError: a row is invalid.
        """
        rows = tuple(map(Release.from_json, stated["releases"]))
        return cls(str(stated["client"]), rows, stated["chain"] and str(stated["chain"]))
