"""Who answers for a run, for the first page of its privacy report: said by the user, and printed as
it was said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from fedsynth.errors import SettingError

LONGEST = 300
"""Characters of a text."""


@dataclass(frozen=True)
class ReportSettings:
    """What a run's privacy report says beside what follows from the run. All of it is public.

    Args:
        responsible: the party that answers for the run, for the report's first page.
        purpose: the run's purpose, for the report's first page.
        sites: names of the clients' sites for the report, comma-separated, in the clients' order.

    >>> ReportSettings(sites="Mitte, Nord").site_names(["client-000", "client-001"])
    {'client-000': 'Mitte', 'client-001': 'Nord'}
    """

    section: ClassVar[str] = "report"

    responsible: str = ""
    purpose: str = ""
    sites: str = ""

    def __post_init__(self) -> None:
        for name, text in asdict(self).items():
            if not isinstance(text, str):
                raise SettingError("report", name, f"must be text, got {text!r:.80}")
            if name != "sites" and len(text) > LONGEST:
                raise SettingError(
                    "report", name, f"must be of at most {LONGEST} characters, got {len(text)}"
                )
            if not text.isprintable():
                raise SettingError("report", name, "must be one line of printable characters")
        if self.sites and not all(self._sites):
            raise SettingError("report", "sites", "must name each site: a name is empty")
        if any(len(one) > LONGEST for one in self._sites):
            raise SettingError("report", "sites", f"must be names of at most {LONGEST} characters")

    @property
    def _sites(self) -> tuple[str, ...]:
        return tuple(one.strip() for one in self.sites.split(",")) if self.sites else ()

    def check_clients(self, clients: int) -> None:
        """Raises SettingError where the sites are not as many as the clients."""
        if self.sites and len(self._sites) != clients:
            raise SettingError(
                "report",
                "sites",
                f"must name each of the {clients} clients' sites, comma-separated; got "
                f"{len(self._sites)}",
            )

    def site_names(self, clients: Sequence[str], first: int = 0) -> dict[str, str]:
        """Returns the sites' names by client; empty where none was given.

        Args:
            clients: names of some clients of the run, which follow each other.
            first: the number of the first of them.
        """
        return dict(zip(clients, self._sites[first:], strict=False))

    def to_mapping(self) -> dict[str, Any]:
        """What was given: the settings of a run that gives nothing are those of an earlier one."""
        return {name: text for name, text in asdict(self).items() if text}
