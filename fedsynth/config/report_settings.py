"""Settings of a privacy report's first page: user-supplied texts, such as the party responsible for
the run, printed unchanged.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from fedsynth.errors import SettingError

LONGEST = 300
"""Maximum number of characters of a text."""
LONGEST_PERSON = 40
"""Maximum number of characters of the name for a person."""


@dataclass(frozen=True)
class ReportSettings:
    """Texts for a run's privacy report that do not follow from the run. All of them are public.

    Args:
        responsible: the party that answers for the run, for the report's first page.
        purpose: the run's purpose, for the report's first page.
        sites: names of the clients' sites for the report, comma-separated, in the clients' order.
            A single client may name several sites.
        person: the report's name for one person in the data, such as "patient"; empty: "person".

    >>> ReportSettings(sites="Mitte,Nord").site_names(2), ReportSettings(sites="A,B").site_names(1)
    (('Mitte', 'Nord'), ('A, B',))
    """

    section: ClassVar[str] = "report"

    responsible: str = ""
    purpose: str = ""
    sites: str = ""
    person: str = ""

    def __post_init__(self) -> None:
        for name, text in asdict(self).items():
            if not isinstance(text, str):
                raise SettingError("report", name, f"must be text, got {text!r:.80}")
            limit = LONGEST_PERSON if name == "person" else LONGEST
            if name != "sites" and len(text) > limit:
                raise SettingError(
                    "report", name, f"must have at most {limit} characters, got {len(text)}"
                )
            if not text.isprintable():
                raise SettingError("report", name, "must be one line of printable characters")
        if self.sites and not all(self._sites):
            raise SettingError("report", "sites", "must name each site, but one name is empty")
        if any(len(site) > LONGEST for site in self._sites):
            raise SettingError("report", "sites", f"must be names of at most {LONGEST} characters")

    @property
    def _sites(self) -> tuple[str, ...]:
        return tuple(site.strip() for site in self.sites.split(",")) if self.sites else ()

    def check_clients(self, clients: int) -> None:
        """Raises SettingError if there are several clients and not one site for each."""
        if self.sites and clients > 1 and len(self._sites) != clients:
            reason = (
                f"must name each of the {clients} clients' sites, comma-separated; got "
                f"{len(self._sites)}"
            )
            raise SettingError("report", "sites", reason)

    def site_names(self, clients: int) -> tuple[str, ...]:
        """Returns the site, or sites, of each of a run's clients; empty if none was given."""
        if clients == 1 and self.sites:
            return (", ".join(self._sites),)
        return self._sites

    def to_mapping(self) -> dict[str, Any]:
        """Returns the settings that were given."""
        return {name: text for name, text in asdict(self).items() if text}
