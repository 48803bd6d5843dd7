"""Running sums over several periods, released with correlated noise.

The noise is correlated by a square-root Toeplitz factorisation. Records arrive in up to n periods,
and after each period t a client releases the sum R_t of all clipped vectors so far. In matrix form,
R = A·S with S the sums of the single periods and A the lower triangular matrix of ones. A = B·C,
where B and C are lower triangular Toeplitz matrices with the coefficients c₀ = 1,
c_k = c_{k−1}(2k − 1)/(2k) (Fichtenberger, Henzinger and Upadhyay 2023). The client releases
B·(C·S + Z) = R + B·Z with independent Gaussian rows Z_t. A record of period s adds its vector times
column s of C to C·S. The longest column is the first, with norm ‖c‖ = √(Σ_{k<n} c_k²). With a
standard deviation of σ𝒞‖c‖, all n releases together therefore cost as much as one Gaussian
mechanism with the noise multiplier σ (docs/privacy-proofs.md, Corollary 3b).

Only the increment S_t + Z_t + Σ_{s<t} (c_{t−s} − c_{t−s−1})·Z_s of R_t is computed from records, so
the owner needs the earlier noise but no earlier record or exact sum. A ledger row of period t
states the noise multiplier σ‖c‖/c_{t−1}, which belongs to the influence c_{t−1} of a record of
period 1. After each period, the rows add up to the exact cost of a record of period 1, which is the
largest.

A `ReleaseSequence` stores a client's noise and releases in the private part of the ledger folder.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedsynth.errors import HOSTILE, LedgerError, one_line
from fedsynth.files import create_once, locked_file, read_regular, write_whole
from fedsynth.privacy.mechanisms import BudgetEnforcer, GaussianSumMechanism, Released
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release

# The settings that a period may change. All others are those of period 1.
FREE_SECTIONS = ("data", "report")
FREE_SETTINGS = ("ledger", "nominal_size", "max_records", "device", "memory_gb", "threads")
# The settings of the section "data" that a period may not change.
ENCODING = ("encoder", "encoder_weights", "public_images")
# The settings that `fedsynth synthesize --continue` computes for each period.
_COMPUTED = ("noise_multiplier", "epsilon", "period", "earlier_records")
# The folder of all sequences within the private part of a ledger folder. Names that begin with a
# dot are not lists of records.
SEQUENCES = ".sequences"
MAX_NOISE_BYTES = 2**34
_PERIOD = re.compile(r", period (\d+) of (\d+)$")


def coefficients(count: int) -> list[float]:
    """Returns the first coefficients c₀, c₁, … of the Toeplitz matrix C that correlates the noise.

    >>> coefficients(4)
    [1.0, 0.5, 0.375, 0.3125]
    """
    values = [1.0]
    for k in range(1, count):
        values.append(values[-1] * (2 * k - 1) / (2 * k))
    return values[:count]


def column_norm(periods: int) -> float:
    """Returns ‖c‖, the largest column norm of the matrix C for a number of periods.

    >>> round(column_norm(12) ** 2, 3)
    1.851
    """
    return math.hypot(*coefficients(periods))


def charged_factor(period: int, periods: int) -> float:
    """Returns ‖c‖/c_{t−1}, the ratio of period t's charged noise multiplier to σ."""
    return column_norm(periods) / coefficients(period)[-1]


def sum_factor(period: int) -> float:
    """Returns the ratio of the running sum's noise to the noise charged for period t.

    R_t has noise of standard deviation σ𝒞‖c‖·√(Σ_{k<t} c_k²).
    """
    return coefficients(period)[-1] * column_norm(period)


def in_period(quantity: str, period: int, periods: int) -> str:
    """Returns the ledger's name for a quantity released in one of several periods."""
    return f"{quantity}, period {period} of {periods}"


def period_of(quantity: str) -> tuple[int, int] | None:
    """Parses a quantity's name, and returns (period, number of periods) or None.

    >>> period_of(in_period("sum of features", 3, 12)), period_of("sum of features")
    ((3, 12), None)
    """
    match = _PERIOD.search(quantity)
    return match and (int(match[1]), int(match[2]))


@dataclass(frozen=True)
class PeriodFacts:
    """Public settings of a period, which the client stores before the first charge.

    Attributes:
        noise_multiplier: σ of the run.
        nominal_size: the public number of the period's records.
        settings: the settings of the period's run.
        rows: the number of ledger rows before the period.
        records: the fingerprint of the period's records in the ledger.
        finished: whether the period's run has finished.
    """

    noise_multiplier: float
    nominal_size: float
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rows: int = 0
    records: str = ""
    finished: bool = False


class ReleaseSequence:
    """One client's noise and releases over several periods, in private files.

        PERIOD.json         the facts of a period (`PeriodFacts`)
        PERIOD-QUANTITY     the independent noise Z_t of one release, and the released increment

    Only the current user can read the files (mode 0600). Whoever has the noise can subtract it from
    the releases. The noise is on the disk before a release is returned, and a repeated period
    returns the same release. So a killed period neither draws nor releases twice. Of processes that
    begin the same period with other records or settings, only the last can release.

    Args:
        folder: the private part of the ledger folder.
        client: the client's name.
        period: the current period, from 1.
        periods: the declared number of periods.

    Attributes:
        facts: the facts of the current period, without `rows` and `records`. Set them before the
            first charge.
        rows: the number of ledger rows before the current period.
    """

    def __init__(self, folder: Path, client: str, period: int, periods: int) -> None:
        self.folder = folder / SEQUENCES / client
        self.period = period
        self.periods = periods
        self.facts = PeriodFacts(0.0, 0.0)
        self.rows = 0
        self._begun = ""

    def stored_facts(self, period: int) -> PeriodFacts | None:
        """Returns the public settings of a period, or None if the period has not begun.

        Raises:
            LedgerError: the file is damaged.
        """
        path = self.folder / f"{period:03d}.json"
        try:
            return PeriodFacts(**json.loads(read_regular(path)))
        except FileNotFoundError:
            return None
        except (OSError, *HOSTILE) as error:
            raise _damaged(path, error) from error

    @property
    def has_releases(self) -> bool:
        """True if a release of the current period is stored. It may have been sent already."""
        return any(self.folder.glob(f"{self.period:03d}-*"))

    def is_charged(self, rows: Sequence[Release]) -> bool:
        """Returns True if a ledger row belongs to a release in the current period."""
        return any(period_of(row.quantity) == (self.period, self.periods) for row in rows)

    def begin(self, records: str) -> None:
        """Stores the public settings of the current period before the first charge.

        Raises:
            LedgerError: a release of this period was made with other settings or another σ, or
                period 1 had other settings or another σ.
        """
        facts = replace(self.facts, rows=self.rows, records=records)
        first = self.stored_facts(1)
        if self.period > 1 and first is not None and (changed := _changed(first, facts)):
            raise LedgerError(
                f"{changed} differs from period 1, but all periods have one σ and one sequence of "
                "noise. Use the settings that owner_settings(…, continued=SHARE) returns"
            ).with_code("sequence.changed")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        create_once(self.folder / "lock", b"")  # which only the current user can read
        with locked_file(self.folder / "lock"):
            stored = self.stored_facts(self.period)
            if stored is not None and self.has_releases and _json(stored) != _json(facts):
                raise LedgerError(
                    f"period {self.period} began with other settings. Repeat the period with the "
                    f"settings in {self.folder}"
                ).with_code("sequence.settings")
            self._write(facts)
        self._begun = _json(facts)

    def finish(self) -> None:
        """Records that the current period's run has finished."""
        stored = self.stored_facts(self.period)
        if stored is not None:
            self._write(replace(stored, finished=True))

    def _write(self, facts: PeriodFacts) -> None:
        path = self.folder / f"{self.period:03d}.json"
        write_whole(path, _json(facts).encode(), secret=True)

    def stored(self, period: int, quantity: str) -> dict[str, Tensor] | None:
        """Returns the stored noise and increment of a release, or None if there is no file.

        Raises:
            LedgerError: the file is damaged.
        """
        path = self._path(period, quantity)
        try:
            tensors = load(read_regular(path, MAX_NOISE_BYTES))
        except FileNotFoundError:
            return None
        except Exception as error:  # safetensors has errors of its own
            raise _damaged(path, error) from error
        if tensors.keys() != {"noise", "increment"}:
            raise _damaged(path, "the file contains unexpected tensors")
        return tensors

    def earlier_releases(self, quantity: str) -> list[dict[str, Tensor]]:
        """Returns the stored tensors of all earlier periods' releases, oldest first.

        Raises:
            LedgerError: a file is missing or damaged.
        """
        releases = []
        for period in range(1, self.period):
            tensors = self.stored(period, quantity)
            if tensors is None:
                raise _damaged(self._path(period, quantity), "the file is missing")
            releases.append(tensors)
        return releases

    def store(self, quantity: str, noise: Tensor, increment: Tensor) -> Tensor:
        """Stores a release in the current period, unless one is already stored.

        Returns:
            The increment that is on the disk now.

        Raises:
            LedgerError: another process has begun the period with other records or settings.
        """
        tensors = {"noise": noise.cpu().contiguous(), "increment": increment.cpu().contiguous()}
        with locked_file(self.folder / "lock"):
            facts = self.stored_facts(self.period)
            if facts is None or _json(replace(facts, finished=False)) != self._begun:
                raise LedgerError(
                    f"another process has begun period {self.period} with other records or "
                    "settings. Repeat the period with the records and settings of that process"
                ).with_code("sequence.begun")
            create_once(self._path(self.period, quantity), save(tensors))
        stored = self.stored(self.period, quantity) or tensors
        return stored["increment"]

    def _path(self, period: int, quantity: str) -> Path:
        name = re.sub(r"\W+", "-", _PERIOD.sub("", quantity))
        return self.folder / f"{period:03d}-{name}.safetensors"


def _json(facts: PeriodFacts) -> str:
    return json.dumps(asdict(facts), default=str, sort_keys=True)


def _changed(first: PeriodFacts, facts: PeriodFacts) -> str:
    """Returns the name of a setting that differs from period 1, or an empty string.

    A setting that period 1 did not have, in an earlier version of fedsynth, is not compared.
    """
    if facts.noise_multiplier != first.noise_multiplier:
        return "privacy.noise_multiplier"
    current = json.loads(_json(facts))["settings"]
    for section, values in first.settings.items():
        for key, value in values.items():
            free = section == "report" or key in (*FREE_SETTINGS, *_COMPUTED)
            if not free and current.get(section, {}).get(key) != value:
                return f"{section}.{key}"
    return ""


def _damaged(path: Path, reason: object) -> LedgerError:
    return LedgerError(
        f"cannot use {path}, which continuing the running sums requires: "
        f"{one_line(str(reason))}. Restore it from a backup"
    ).with_code("sequence.missing")


@dataclass(frozen=True)
class PeriodEnforcer(BudgetEnforcer):
    """Charges a period's releases only once, even if the period is repeated.

    Args:
        rows: the number of ledger rows before the period.
    """

    rows: int = 0

    def charge(self, release: Release) -> None:
        if replace(release, unit=self.unit) not in self.ledger.releases[self.rows :]:
            super().charge(release)
            return
        with self.ledger.confirm():  # the records are still those of the charge
            pass

    def check_budget(self, rows: Sequence[Release], planned: Sequence[Release]) -> None:
        super().check_budget(rows, [row for row in planned if row not in rows[self.rows :]])


class RunningSumMechanism(GaussianSumMechanism):
    """A charged mechanism that releases the running sum over all periods so far.

    In period 1 it releases the same as `GaussianSumMechanism`.

    Args:
        sequence: the client's earlier noise and releases.
        release, groups, guard, secret: as in `GaussianSumMechanism`. The quantity of the release
            names the period, and the noise multiplier is `charged_factor` times σ.
    """

    def __init__(
        self,
        sequence: ReleaseSequence,
        release: Release,
        groups: int,
        guard: BudgetEnforcer,
        secret: SecretGenerator,
    ) -> None:
        super().__init__(release, groups, guard, secret)
        self._sequence = sequence
        self._fresh = torch.zeros(0)

    def _noise(self, shape: tuple[int, int], device: torch.device) -> Tensor:
        """Computes the noise of the increment, Z_t + Σ_{s<t} (c_{t−s} − c_{t−s−1})·Z_s."""
        c = coefficients(self._sequence.period)
        self._fresh = self._secret.normal(shape, self.noise_std * c[-1])
        noise = self._fresh.clone()
        for age, tensors in enumerate(reversed(self._earlier_releases()), start=1):
            noise += (c[age] - c[age - 1]) * tensors["noise"]
        return noise.to(device)

    def _earlier_releases(self) -> list[dict[str, Tensor]]:
        return self._sequence.earlier_releases(self._release.quantity)

    def release(self) -> Released:
        """Ends the step and returns the running sum [groups, D] in float32.

        The noise and the increment are on the disk before this method returns.
        """
        increment = super().release()
        stored = self._sequence.store(self._release.quantity, self._fresh, increment)
        total = stored.double()
        for tensors in self._earlier_releases():
            total += tensors["increment"].double()
        return Released(total.float().to(increment.device))
