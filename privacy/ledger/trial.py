"""The ledger of a client in a trial of a private selection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fedsynth.errors import LedgerError
from fedsynth.privacy.accounting import Totals, totals
from fedsynth.privacy.ledger.ledger import History, Ledger, _allow
from fedsynth.privacy.releases import Release


class TrialLedger(Ledger):
    """A ledger that refuses a trial's releases if the row of its selection does not cover them.

    The row was charged before the first trial. The releases of a trial are therefore not written,
    but each must be among the releases of the trial's candidate. A losing trial leaves no trace.

    Args:
        ledger: the client's ledger, whose last row is the selection's.
        history_at_start: the content of the ledger before this row.
        covered: the releases of one trial, with its score.

    Attributes:
        files: the hash of the files that the trial's run has written.
    """

    def __init__(self, ledger: Ledger, history_at_start: History, covered: Totals) -> None:
        super().__init__(ledger.client, dataset=ledger.dataset)
        history = ledger.history()
        chains = () if history.chain is None else (history.chain,)
        self.lines = replace(self.lines, releases=history.releases, chains=chains)
        self.history_at_start = history_at_start
        self.files = ""
        self._covered = covered
        self._released = Totals()

    def charge(
        self,
        release: Release,
        check: Callable[[Sequence[Release], Sequence[Release]], None] = _allow,
    ) -> None:
        """Counts a release of the trial.

        Raises:
            LedgerError: the selection does not cover the release.
        """
        released = self._released + totals([release])
        if not self._covered.covers(released):
            raise LedgerError(
                f"a trial's release of {release.quantity} is not among the releases for which "
                f"the selection was charged to client {self.client!r}. Start the selection again"
            ).with_code("ledger.uncovered")
        self._released = released

    def note_files(self, sha256: str) -> None:
        """Keeps the hash of the files, which is noted in the client's ledger if the trial wins."""
        self.files = sha256
