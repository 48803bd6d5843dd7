"""Settings of a privacy report's first page: user-supplied texts, such as the party responsible for
the run, printed unchanged.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

from fedsynth.errors import SettingError

MAX_LENGTH = 300
"""Maximum number of characters of a text."""
MAX_PERSON_LENGTH = 40
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
            if not text.isprintable():
                raise SettingError("report", name, "must be one line of printable characters")
        for name, text, limit in (
            ("responsible", self.responsible, MAX_LENGTH),
            ("purpose", self.purpose, MAX_LENGTH),
            ("person", self.person, MAX_PERSON_LENGTH),
            ("sites", max(self._sites, key=len, default=""), MAX_LENGTH),
        ):
            if len(text) > limit:
                reason = f"must have at most {limit} characters, got {len(text)}"
                raise SettingError("report", name, reason)
        if "" in self._sites:
            raise SettingError("report", "sites", "must name each site, but one name is empty")

    @property
    def _sites(self) -> tuple[str, ...]:
        return tuple(map(str.strip, self.sites.split(","))) if self.sites else ()

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
