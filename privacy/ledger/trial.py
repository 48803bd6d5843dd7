"""The ledger of a client in one trial of a private selection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fedsynth.errors import LedgerError
from fedsynth.privacy.accounting import Totals, totals
from fedsynth.privacy.ledger.ledger import History, Ledger, Lines, _allow
from fedsynth.privacy.releases import Release


class TrialLedger(Ledger):
    """A ledger that allows only the releases for which the trial's selection was charged.

    The row was charged before the first trial. The releases of a trial are therefore not written,
    but each must be among the releases of the trial's candidate. A losing trial leaves no trace.

    Args:
        ledger: the client's ledger.
        charged: the content of the ledger when the selection was charged. Its last row is the
            selection's. Later rows, of other runs, would reveal when the trial began.
        covered: the releases of one trial, with its score.

    Attributes:
        history_at_start: the content of the ledger before the selection's row.
        files: the hash of the files that the trial's run has written.
    """

    def __init__(self, ledger: Ledger, charged: Lines, covered: Totals) -> None:
        super().__init__(ledger.client, dataset=ledger.dataset)
        self.lines = replace(self.lines, releases=charged.releases, chains=charged.chains)
        chain = charged.chains[-2] if charged.chains else None
        self.history_at_start = History(self.client, charged.releases[:-1], chain)
        self.files = ""
        self.charge_id = ledger.charge_id
        self._covered = covered
        self._released = Totals()

    def charge(
        self,
        release: Release,
        check: Callable[[Sequence[Release], Sequence[Release]], None] = _allow,
    ) -> None:
        """Counts a release in the trial.

        Raises:
            LedgerError: the selection does not cover the release.
        """
        released = self._released + totals([release])
        if not self._covered.covers(released):
            raise LedgerError(
                f"a trial releases {release.quantity}, for which the selection did not charge "
                f"client {self.client!r}. Start the selection again"
            ).with_code("ledger.uncovered")
        self._released = released

    def note_files(self, sha256: str, *, repeated: bool = False) -> None:
        """Stores the hash of the run's files, for the client's ledger if the trial wins."""
        self.files = sha256
