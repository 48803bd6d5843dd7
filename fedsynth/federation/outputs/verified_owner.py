"""What a data owner's own report of a run over nodes must say, made again from the owner's folder:
its settings, what they began with, and the owner's ledger.

The server's folder has a report of its own (`fedsynth.federation.outputs.verification`). An owner
knows its own ledger alone: σ is what the server has told, and how many rounds there were, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedsynth.data.registry import DatasetSpec
from fedsynth.federation.outputs.report_context import owner_context
from fedsynth.federation.terms.privacy_plan import PrivacyPlan
from fedsynth.federation.terms.public_context import public_context
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.held_rows import held_rows
from fedsynth.privacy.history import History
from fedsynth.privacy.report import NOT_PRIVATE
from fedsynth.privacy.report_file import read_json
from fedsynth.privacy.report_schema import Began
from fedsynth.privacy.verify import report_problems

OWNER = "owner.json"
"""Of an owner's report: which client it was, and after how many rounds the run ended."""


@dataclass(frozen=True)
class OwnersRun:
    """An owner's folder.

    Args:
        settings: of config.toml.
        spec: the data set's.
        start: privacy_start.json, of a sound shape.
        client: its number.
        rounds: that have ended, as the server has said.
    """

    settings: RunSettings
    spec: DatasetSpec
    start: Mapping[str, Any]
    client: int
    rounds: int

    def problems(
        self, report: Mapping[str, Any], folder: Path, ledger: Path | None
    ) -> tuple[list[str], list[str]]:
        """Everything in which folder and report differ, and what was compared.

        Args:
            report: of a sound shape.
            folder: that it is in.
            ledger: the owner's folder of ledgers; None: the one that this folder is in.

        Raises:
            PrivacyError: a file does not fit the others.
        """
        started = self.start["ledgers"]
        if set(report["ledger_heads"]) != set(started) or len(started) != 1:
            raise PrivacyError(
                "an owner's report is of one client, the one that the run began with"
            )
        [name] = started
        home = folder.resolve().parents[1] if ledger is None else ledger
        held = held_rows(report, home, exact=False)
        before = held.rows[name][: started[name]["rows"]]
        problems = list(held.problems)
        if held.starts.get(name, started[name]["chain"]) != started[name]["chain"]:
            problems.append(f"{name}: the ledger is not the one that the run began with")
        plan = self._plan()
        secret = report["verdict"]["text"] != NOT_PRIVATE
        context = owner_context(
            plan,
            self.client,
            History(name, before),
            self.rounds,
            secret=secret,
            began=Began(**self.start["run"]),
            warnings=self.start["warnings"],
        )
        problems += self._uncharged(plan, held.rows[name][len(before) :])
        return [*problems, *report_problems(report, context, held, folder)], [held.note]

    def _plan(self) -> PrivacyPlan:
        """What the client was charged by: σ is the run's, or as the server has told it."""
        context = public_context(self.settings, self.spec, torch.device("cpu"))
        plan = PrivacyPlan.checked(self.settings, context)
        told = self.start["noise_multiplier"]
        own = plan.privacy.noise_multiplier
        if not self.settings.partition.clients > self.client >= 0:
            raise PrivacyError(f"the run has no client {self.client}")
        if type(told) is not float or told <= 0 or (own is not None and own != told):
            raise PrivacyError(f"the run began with σ = {told}, and its settings say {own}")
        return replace(plan, privacy=replace(plan.privacy, noise_multiplier=told))

    def _uncharged(self, plan: PrivacyPlan, since: Any) -> list[str]:
        """A run whose ledger has nothing of it, though the server has ended rounds."""
        context = public_context(self.settings, self.spec, torch.device("cpu"))
        planned = {
            row
            for number in plan.participation.rounds_of(self.client, plan.run.rounds)
            for row in plan.client_rows(self.client, replace(context, round=number))
        }
        if since and not planned & set(since):
            return ["the ledger has no row that this run's settings charge, and it has new ones"]
        return []


def owners_numbers(file: Path, rounds: int) -> tuple[int, int]:
    """Which client, and after how many rounds.

    Raises:
        PrivacyError: the file is damaged.
    """
    stated = read_json(file, "facts of an owner's report")
    values = (stated.get("client"), stated.get("rounds"))
    if set(stated) != {"client", "rounds"} or any(type(one) is not int for one in values):
        raise PrivacyError(f"{file.name} must have a client's number and the number of rounds")
    client, ended = int(stated["client"]), int(stated["rounds"])
    if not 0 <= ended <= rounds:
        raise PrivacyError(f"{file.name} says {ended} rounds, and the run has {rounds}")
    return client, ended
