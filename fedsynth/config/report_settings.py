"""Settings for the first page of a privacy report. They are texts from the user, such as the party
responsible for the run, and are printed unchanged.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

from fedsynth.errors import SettingError

MAX_LENGTH = 300
"""The maximum number of characters in a text."""
MAX_PERSON_LENGTH = 40
"""The maximum number of characters in the name for one person."""


@dataclass(frozen=True)
class ReportSettings:
    """Texts for the privacy report of a run, which only the user can provide. All of them are
    public.

    Args:
        responsible: the party that is responsible for the run, for the report's first page.
        purpose: the purpose of the run, for the report's first page.
        sites: the names of the clients' sites for the report, comma-separated, in the order of the
            clients. A single client may name several sites.
        person: the report's word for one person in the data, such as "patient". If it is empty, the
            word is "person".

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
            raise SettingError("report", "sites", "must not contain an empty name between commas")

    @property
    def _sites(self) -> tuple[str, ...]:
        return tuple(map(str.strip, self.sites.split(","))) if self.sites else ()

    def check_clients(self, clients: int) -> None:
        """Raises a SettingError if there are several clients and the number of named sites is
        another one.
        """
        if self.sites and clients > 1 and len(self._sites) != clients:
            reason = (
                f"must name one site for each of the {clients} clients, separated by commas; got "
                f"{len(self._sites)} names"
            )
            raise SettingError("report", "sites", reason)

    def site_names(self, clients: int) -> tuple[str, ...]:
        """Returns the site of each client in a run. A single client may have several. Returns an
        empty tuple if no site was named.
        """
        if clients == 1 and self.sites:
            return (", ".join(self._sites),)
        return self._sites
