"""Differential privacy of one run: plan, σ, ledgers, guards, and the context of the report.

Everything here is computed from public settings, before any data are read; the report adds released values only.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedsynth.core.messages import privacy_of_fields
from fedsynth.core.method import Method, RoundContext
from fedsynth.data.partition import clients_or_groups
from fedsynth.data.registry import is_published
from fedsynth.errors import Setting, SettingError, Text, unknown_value
from fedsynth.federation.clients import Clients, planned_ledgers
from fedsynth.federation.participation import Participation
from fedsynth.federation.planned_rounds import PlannedEpsilon, shown_rounds
from fedsynth.federation.settings import RunSettings
from fedsynth.privacy import accounting
from fedsynth.privacy import report_sections as sections
from fedsynth.privacy.accounting import Totals, totals
from fedsynth.privacy.calibration import calibrate_noise_multiplier
from fedsynth.privacy.errors import (
    BudgetExceededError,
    PrivacySettingError,
    UnaccountedReleaseError,
)
from fedsynth.privacy.ledger import Guard, Ledger
from fedsynth.privacy.randomness import DESCRIPTION, SecretGenerator
from fedsynth.privacy.releases import RECORD, USER, Release, check_delta
from fedsynth.privacy.report import SCHEMA_VERSION, ReportContext
from fedsynth.privacy.report_sections import reasons_in_ledgers
from fedsynth.privacy.report_text import up
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.version import __version__

NEIGHBOURS = {
    "add-remove": "added or removed",
    "zero-out": "blanked out",
    "replace-one": "replaced by any other",
}
ONE = {RECORD: "one example", USER: "one user with all examples"}
COUNTED = {RECORD: "records", USER: "users"}
PUBLIC, PRIVATE, NO_TEST = "public", "private", "none"  # what a run's test images are
FOUR_SUMS = "; each value is the sum of four Gaussians, halved: a mitigation of one floating-point attack, not a proof"
NOT_PRIVATE = (
    "FedDM's Algorithm 1 clips the gradient of a batch, not of an example: clipping a mean bounds its norm, not one example's "
    "influence, so the sensitivity is up to 2·clip and not clip/|B|, and the effective noise multiplier is σ/(2|B|)",
    "the synthetic images start from real images, which is a release that nothing accounts for",
    "exactly the classes that a client has are sent, so which classes it has is revealed",
    "batches have a fixed size, a share of n_c that is private, and are not Poisson samples; noise is divided by their sizes",
)


class PrivateRun:
    """The privacy side of a run.

    Args:
        settings: with `privacy` set.
        context: round 1's context, without data.
        clients: whose ledgers are charged. None for a plan: the ledgers that `--dp-ledger` names
            are read, and none is made.
        test: what the test images are: "public", "private" or "none".
        ledgers: the clients' ledgers as they stood when the run began, in place of those that the
            settings name.

    Raises:
        UnaccountedReleaseError: the method uploads something that no mechanism protects, or a
            ledger holds a release without any guarantee and there is a budget to keep to.
        PrivacySettingError: δ too large for the declared number of records, no σ reaches ε, ….
        LedgerError: a kept ledger is for other records.
    """

    def __init__(
        self,
        settings: RunSettings,
        context: RoundContext,
        *,
        clients: Clients | None = None,
        test: str = PUBLIC,
        ledgers: Sequence[Ledger] | None = None,
    ) -> None:
        self._clients, self._test = clients, test
        if settings.privacy is None:
            raise SettingError(None, "privacy", "must be set for a private run")
        self.run, self.method, self.spec = settings, settings.method, context.spec
        check_method(self.method)
        if getattr(self.method, "proxy", "") == context.spec.name:
            raise UnaccountedReleaseError(
                Text(
                    f"{self.method.name} cannot distil on {context.spec.name} with differential "
                    "privacy: those are the clients' own images; name public ones (",
                    Setting("method", "proxy", "noise"),
                    ", or another data set)",
                )
            )
        mechanism = settings.privacy.mechanism or self.method.protects[0]
        if mechanism not in self.method.protects:
            raise unknown_value(
                "privacy",
                "mechanism",
                mechanism,
                self.method.protects,
                f" for {self.method.name}",
            )
        given = settings.privacy.max_records
        self.max_records = context.spec.train_size if given is None else given
        if self.max_records < context.spec.train_size:
            raise PrivacySettingError(
                "privacy",
                "max_records",
                f"is below the {context.spec.train_size} records that the data set declares",
                value=self.max_records,
            )
        check_delta(settings.privacy.delta, self.max_records)
        self.protects = mechanism != "paper"
        privacy = replace(settings.privacy, mechanism=mechanism)
        self.plans = self.method.private_plans(privacy, context)
        self.plan = self.plans[0]
        self.context = context
        self._participation = Participation(
            settings.seed, settings.partition.clients, settings.participation
        )
        self.ledgers = self._open_ledgers(privacy) if ledgers is None else list(ledgers)
        self._before = {ledger.client: len(ledger.releases) for ledger in self.ledgers}
        if self.protects and privacy.epsilon is not None and (reasons := self._spent_without()):
            raise UnaccountedReleaseError(
                Text(
                    f"ε = {privacy.epsilon:g} cannot be kept to: a ledger in {privacy.ledger} "
                    f"holds a release without any guarantee ({reasons[0]}), which nothing takes "
                    "back; with ",
                    Setting("privacy", "noise_multiplier"),
                    " alone the run adds noise and states no ε",
                )
            )
        self.privacy = privacy
        if privacy.noise_multiplier is None:
            privacy = replace(privacy, noise_multiplier=self._calibrate(privacy))
        self.privacy = privacy
        self._make_guards()
        self.secrets = [SecretGenerator(four_sums=privacy.four_sums) for _ in self.ledgers]

    @property
    def _releases(self) -> int:
        """Noisy releases of a client in a round."""
        return sum(plan.steps for plan in self.plans)

    @property
    def guaranteed(self) -> bool:
        """Whether an ε can be stated: the mechanism protects, and so did all in the ledgers."""
        return self.protects and not self._spent_without()

    def _spent_without(self) -> list[str]:
        """What stands in the ledgers without any guarantee, with the reasons."""
        return reasons_in_ledgers({ledger.client: ledger.releases for ledger in self.ledgers})

    def keep_ledgers_in(self, folder: Path) -> None:
        """Moves fresh ledgers, still empty, into files of the run folder; ledgers that `--dp-ledger` names stay where they are."""
        if self.privacy.ledger_folder is None and self._clients is not None:
            self.ledgers = self._clients.fresh_ledgers(folder, self.run)
            self._make_guards()

    def planned(
        self, rounds: Sequence[int] | None = None, noise_multiplier: float | None = None
    ) -> list[Release]:
        """The rows that a client's ledger gets in the given rounds (all by default) if it takes part in them."""
        sigma = self.privacy.noise_multiplier if noise_multiplier is None else noise_multiplier
        reason = None if self.protects else "FedDM's Algorithm 1 as printed"
        return [
            replace(plan.release(r, sigma or 0.0, reason), unit=self.privacy.unit)
            for r in (range(1, self.run.rounds + 1) if rounds is None else rounds)
            for plan in self.plans
        ]

    def charges(self, rounds: Sequence[int]) -> list[Release]:
        """The rows that a client's ledger really gets: of a mechanism without a guarantee the
        chief one of a round."""
        if self.protects:
            return self.planned(rounds)
        return [self.planned([number])[0] for number in rounds]

    def rounds_of(self, client: int, rounds: int) -> tuple[int, ...]:
        """The rounds among the first `rounds` that a client takes part in."""
        return self._participation.rounds_of(client, rounds)

    def planned_epsilon(self) -> float:
        """ε of the worst client after the whole planned run, on top of what its ledger holds."""
        return self.planned_epsilon_by_round()[self.run.rounds]

    def epsilon(self) -> float:
        """ε of the worst client so far."""
        return max(self._spent(spent) for spent in self._histories()[0])

    def planned_epsilon_by_round(self) -> PlannedEpsilon:
        """ε of the worst client after each planned round, on top of what its ledger holds; of a
        long run after its `shown_rounds`."""
        one, plans = self._one_round(), self._plans()

        def after(position: int) -> float:
            return max(self._spent(spent + one.times(mine[position])) for spent, mine in plans)

        return PlannedEpsilon(shown_rounds(self.run.rounds), after)

    def _one_round(self, noise_multiplier: float | None = None) -> Totals:
        """What each client that takes part in a round is charged for it, the same in every one."""
        return totals(self.planned([1], noise_multiplier))

    def _plans(self) -> list[tuple[Totals, list[int]]]:
        """(what a ledger holds, in how many of the first n rounds its client takes part, for each n
        of the run's `shown_rounds`), without clients that others exceed."""
        histories, groups = self._histories()
        most = self._participation.most_rounds(groups, shown_rounds(self.run.rounds))
        return list(zip(histories, most.T.tolist(), strict=True))

    def _spent(self, rows: Totals) -> float:
        return accounting.epsilon(rows, self.privacy.delta, self.privacy.adjacency)

    def check_round(self, number: int) -> None:
        """Asks every guard before anything of a round is charged.

        Raises:
            BudgetExceededError: some client's cap would be exceeded in this round.
        """
        if self.protects:
            for client in self._participation.in_round(number):
                self.guards[client].check(self.planned([number]))

    def allows_round(self, number: int) -> bool:
        """Whether no client's cap would be exceeded in this round."""
        try:
            self.check_round(number)
        except BudgetExceededError:
            return False
        return True

    def check_cap(self) -> None:
        """Refuses a cap that allows no round even where nothing was spent before.

        Raises:
            BudgetExceededError: that is a mistake in the settings, and not a run that ends early.
        """
        if self.protects:
            first = self.ledgers[self._participation.in_round(1)[0]]
            self._guard(Ledger(first.client)).check(
                self.planned([1])
            )  # every client's rows are the same

    def check_ledgers(self, number: int) -> None:
        """Asks whether every ledger of a round can be written, before any is charged: else clients
        would pay for a round that releases nothing.

        Raises:
            LedgerError: one cannot.
        """
        for client in self._participation.in_round(number):
            self.ledgers[client].check_writable()

    def charge_unprotected(self, number: int) -> None:
        """Records a round of the `paper` mechanism, whose ε is infinite, before it runs."""
        if not self.protects:
            for client in self._participation.in_round(number):
                self.ledgers[client].charge(self.charges([number])[0])

    def headline(self) -> list[str]:
        """What the run is about to do, ε first."""
        σ, delta = self.privacy.noise_multiplier, self.privacy.delta
        if not self.protects:
            return [f"no differential privacy guarantee: {NOT_PRIVATE[0]}"]
        if not self.guaranteed:
            why = f"a ledger in {self.privacy.ledger} holds {self._spent_without()[0]}"
            return [
                f"no differential privacy guarantee: {why}",
                f"  mechanism {self.plan.mechanism} adds noise (σ = {σ:.4g}); no ε can be stated",
            ]
        planned = self.planned_epsilon()
        sampling = (
            f"Poisson sampling at q = {self.plan.sample_rate:.3g}"
            if self.plan.sample_rate < 1
            else "all records at each step"
        )
        rounds, releases = _many(self.run.rounds, "round"), _many(self._releases, "release")
        if self.run.participation < 1:
            most = max(mine[-1] for _, mine in self._plans())
            rounds += f" (it takes part in {most} at most)"
        lines = [
            f"privacy: ε = {up(planned, 3)} at δ = {delta:g} for each client over {rounds}, "
            f"{ONE[self.privacy.unit]} {NEIGHBOURS[self.privacy.adjacency]}",
            f"  mechanism {self.plan.mechanism} (σ = {σ:.4g}, clip {self.plan.clip:.4g}), {sampling}, {releases} a round",
        ]
        spent = self.epsilon()
        if spent > 0:
            lines.append(f"  of this, ε = {up(spent, 3)} stands in the ledgers from earlier runs")
        cap = self.privacy.epsilon
        if cap is not None and planned > cap * (1 + 1e-9):
            lines.append(
                f"  the cap ε = {cap:g} is below that: the run ends, in order, before the round that would exceed it"
            )
        if planned > 10 and cap is None:
            lines.append(
                Text(
                    f"  warning: ε = {up(planned, 3)} is a weak guarantee: one example may change "
                    f"the odds of any outcome by a factor of e^{planned:.0f}; a smaller one: ",
                    Setting("privacy", "epsilon", "8"),
                    " in place of ",
                    Setting("privacy", "noise_multiplier"),
                )
            )
        return lines

    def start(self) -> dict[str, Any]:
        """What is public and fixed when the run begins: written down then, so that a run that is
        killed can still be reported."""
        return {
            "schema_version": SCHEMA_VERSION,
            "noise_multiplier": self.privacy.noise_multiplier,
            "data_set": asdict(self.spec),
            "test_images": self._test,
            "ledgers": {
                ledger.client: sections.ledger_head(ledger, self._before[ledger.client])
                for ledger in self.ledgers
            },
        }

    def summary(self) -> dict[str, Any]:
        """What summary.json says of the run's privacy."""
        promise = {"epsilon": self.epsilon(), "delta": self.privacy.delta}
        return {
            "guarantee": self.guaranteed,
            **(promise if self.guaranteed else {}),
            "noise_multiplier": self.privacy.noise_multiplier,
            "mechanism": self.plan.mechanism,
        }

    def report_context(
        self, rounds_done: int, deviations: Sequence[str], *, abandoned: bool = False
    ) -> ReportContext:
        return ReportContext(
            method=self.method.name,
            mechanism=self.plan.mechanism,
            delta=self.privacy.delta,
            max_records=self.max_records,
            adjacency=self.privacy.adjacency,
            unit=self.privacy.unit,
            user_records=self.privacy.user_records,
            epsilon_cap=self.privacy.epsilon,
            planned_rounds=self.run.rounds,
            rounds_done=rounds_done,
            public_items=self._public_items(),
            no_guarantee=() if self.protects else NOT_PRIVATE,
            deviations=tuple(deviations),
            fresh_ledger=self.privacy.ledger_folder is None,
            no_ledger=self._why_no_ledger(),
            randomness=DESCRIPTION + (FOUR_SUMS if self.privacy.four_sums else "")
            if self.protects
            else "noise from the operating system's entropy; batches from the run's seed",
            published=self._published(),
            accesses=self._accesses(),
            test_only_randomness=not all(secret.is_secret for secret in self.secrets),
            provenance=provenance(self.run),
            noise_multiplier=self.privacy.noise_multiplier,
            data_set=asdict(self.spec),
            rows_before=self._before,
            abandoned=abandoned,
        )

    def _open_ledgers(self, privacy: PrivacySettings) -> list[Ledger]:
        if self._clients is None:
            return planned_ledgers(self.run, privacy.ledger_folder)
        if privacy.ledger_folder is None:
            return self._clients.fresh_ledgers(None, self.run)
        return self._clients.kept_ledgers(privacy.ledger_folder, self.run)

    def _make_guards(self) -> None:
        self.guards = [self._guard(ledger) for ledger in self.ledgers]

    def _guard(self, ledger: Ledger) -> Guard:
        privacy = self.privacy
        return Guard(ledger, privacy.delta, privacy.epsilon, privacy.adjacency, privacy.unit)

    def _histories(self) -> tuple[list[Totals], list[int]]:
        """What ledgers hold, each sum once, and which of these each client's ledger holds."""
        found: dict[Totals, int] = {}
        groups = [found.setdefault(totals(ledger.releases), len(found)) for ledger in self.ledgers]
        return list(found), groups

    def _calibrate(self, privacy: PrivacySettings) -> float:
        """σ for which the planned run, on top of what each ledger holds, reaches ε at the client that needs most noise."""
        target, found = privacy.epsilon or math.inf, 0.0
        for spent, mine in self._plans():
            rounds = mine[-1]
            if not rounds:
                continue
            if self._spent(spent) >= target:
                raise BudgetExceededError(
                    f"the budget ε = {target:g} is already spent: a client's ledger stands at {self._spent(spent):.4g}"
                )

            def plan(sigma: float, spent: Totals = spent, rounds: int = rounds) -> Totals:
                return spent + self._one_round(sigma).times(rounds)

            found = max(
                found, calibrate_noise_multiplier(target, privacy.delta, plan, privacy.adjacency)
            )
        return found

    def _public_items(self) -> dict[str, str]:
        spec, context = self.spec, self.context
        split = self.run.partition
        over = (
            "clients"
            if clients_or_groups(split, spec) == split.clients
            else "writers or devices that are published"
        )
        declared = f"the size that the data set's specification declares, over the number of {over}"
        declared += f", times the share {split.subset:g} that is used" if split.subset < 1 else ""
        declared += (
            f", times the share {1 - split.local_test:g} that trains" if split.local_test else ""
        )
        chosen = "declared" if self.privacy.nominal_size else declared
        items = {
            "data set": self._data_set(),
            "classes and image shape": f"{spec.classes} classes, {spec.channels}×{spec.height}×{spec.width}",
            "normalisation": f"constants of the specification {spec.name!r}: mean {spec.mean}, std {spec.std}",
            "architecture and initial weights": f"{self.run.model}, drawn from the run's seed",
            "hyper-parameters": json.dumps(self.run.to_mapping()["method"]),
            "bound on all records": f"{self.max_records} (δ is checked against it)",
            "schedule": f"{_many(self.run.rounds, 'round')} of {_many(self._releases, 'release')}, fixed before data are read",
        }
        if self.run.participation < 1:
            count = len(self._participation.in_round(1))
            items["participation"] = (
                f"{count} of {self.run.partition.clients} clients a round, drawn from the run's seed: no amplification is claimed"
            )
        items["what the server does"] = (
            "training, averaging, distillation and measurements from the uploads and public values alone: post-processing, at no cost"
        )
        if proxy := getattr(self.method, "proxy", ""):
            items["proxy images"] = f"the training images of {proxy}, declared public"
        if not self.protects:
            return items
        fields = privacy_of_fields(self.method.upload)
        return {
            **items,
            "sample rate q": f"{self.plan.sample_rate:.6g}, from public sizes",
            f"nominal {COUNTED[self.privacy.unit]} of a client": (
                f"{context.nominal_size:g} ({chosen}); divisors use it or released counts, never the true number"
            ),
            **{
                f"upload field {name!r}": reason
                for name, (kind, reason) in fields.items()
                if kind == "public"
            },
        }

    def _why_no_ledger(self) -> str:
        if is_published(self.spec):
            return f"{self.spec.name} is a published data set"
        return f"the user declares that the data set {self.spec.name!r} is public"

    def _data_set(self) -> str:
        """Which data set it is, and what is public of it."""
        spec = self.spec
        if is_published(spec):
            return f"{spec.name}, published: {spec.source}"
        if self.privacy.ledger_folder is None:
            return f"{spec.name}: the user's own, declared public by the user"
        return f"{spec.name}: the user's own; its specification is public, its records are not"

    def _accesses(self) -> tuple[tuple[str, str, str], ...]:
        released = [
            (
                f"{plan.quantity}: {plan.clipped}",
                f"mechanism {plan.mechanism}, {_many(plan.steps, 'release')} a round",
            )
            for plan in self.plans
        ]
        private = tuple((what, "accounted", note) for what, note in released)
        if not self.protects:
            private = (
                *((what, "unaccounted", note) for what, note in released),
                (
                    "real images as the start of the synthetic ones",
                    "unaccounted",
                    "released as they are, before any step",
                ),
                ("which classes a client has", "unaccounted", "only those are sent"),
            )
        simulation = "folder simulation_only, and the message of a partition that cannot be made; outside the guarantee"
        splits = (
            (("clients' own test splits, and accuracies on them", "simulation-only", simulation),)
            if self.run.partition.local_test
            else ()
        )
        compared = "by a keyed hash that stays with the ledgers; it decides whether the run begins"
        kept = (("records, compared with those of the ledgers", "simulation-only", compared),)
        return (
            *private,
            *(kept if self.privacy.ledger_folder is not None else ()),
            *splits,
            ("partition into clients, true counts, seconds", "simulation-only", simulation),
            *self._test_access(simulation),
        )

    def _test_access(self, simulation: str) -> tuple[tuple[str, str, str], ...]:
        if self._test == NO_TEST:
            return ()
        if self._test == PRIVATE:
            return (("test set, and accuracies on it", "simulation-only", simulation),)
        whose = f"of the published data set {self.spec.name}"
        if not is_published(self.spec):
            whose = "declared public by the user"
        note = f"{whose}; test accuracy is computed from released models"
        return (("test set", "public", note),)

    def _published(self) -> tuple[Mapping[str, str], ...]:
        if (
            not self.protects
            or self.method.name != "feddm"
            or self.privacy.noise_multiplier is None
        ):
            return ()
        claim = 2 * math.log(1 / self.privacy.delta) / self.privacy.noise_multiplier**2
        return (
            {
                "source": "FedDM (arXiv 2207.09653), Sec. 4.4: σ ≥ sqrt(2 log(1/δ)/ε)",
                "published": f"ε = {claim:.3g}",
                "why it differs": "the formula counts neither steps nor rounds, and its conditions (Poisson sampling, Tq² ≤ ε/2) are not met",
            },
        )


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def check_method(method: Method) -> None:
    """Refuses a method that uploads anything which is neither released nor public.

    Raises:
        UnaccountedReleaseError: names the method, the field and the reason.
    """
    fields = {
        **privacy_of_fields(method.upload),
        **(privacy_of_fields(method.answers) if method.answers else {}),
    }
    bad = [
        f"{name} ({kind})"
        for name, (kind, _) in fields.items()
        if kind not in ("released", "public")
    ]
    if bad or not method.protects:
        why = (
            method.refusal or f"its upload has fields that no mechanism protects: {', '.join(bad)}"
        )
        raise UnaccountedReleaseError(f"{method.name} cannot run with differential privacy: {why}")


def provenance(run: RunSettings) -> dict[str, str]:
    """Versions, and a hash of the resolved settings."""
    config: Any = json.dumps(run.to_mapping(), sort_keys=True)
    packages = ("torch", "opacus", "dp-accounting", "numpy", "randomgen")
    return {
        "config": hashlib.blake2b(config.encode(), digest_size=16).hexdigest(),
        "python": platform.python_version(),
        "fedsynth": __version__,  # also where it runs from a folder, without being installed
        **{name: version(name) for name in packages},
    }
