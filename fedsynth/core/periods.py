"""Methods whose clients release running sums of records that arrive in periods.

Each period is a run of one round. The clients' mechanisms add the sums of the new records to those
of earlier periods (`fedsynth.privacy.periods`), so the server recomputes its results from the sums
of all periods so far.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self, TypeGuard

from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.method import Method
from fedsynth.core.sums import Pool, SummedUploads
from fedsynth.errors import SettingError
from fedsynth.privacy.periods import charged_factor, in_period, sum_factor
from fedsynth.privacy.plans import Plans
from fedsynth.validation import in_range

MAX_PERIODS = 999


@dataclass(frozen=True)
class SumsOverPeriods(SummedUploads):
    """A method that adds the sums of new records to its earlier private sums.

    Args:
        periods: the declared number of periods, whose releases share one budget. With 1, nothing is
            continued. With more, a run has one round, and each record may be in one period only.
        period: the number of the period, from 1. It is set by `owner_settings(…, continued=SHARE)`.
        earlier_records: the public number of a client's records in all earlier periods. It is set
            like `period`.
    """

    periods: int = in_range(1, 1, MAX_PERIODS)
    period: int = in_range(1, 1, MAX_PERIODS)
    earlier_records: float = in_range(0.0, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period > self.periods:
            reason = (
                f"must be at most method.periods={self.periods}, because the budget is divided "
                "among these periods. Start a new sequence with new records and another ledger "
                "folder"
            )
            raise SettingError("method", "period", reason, value=self.period)
        if self.periods > 1 and self.requires_secure_sum:
            reason = "must be 'own' with several periods. Set method.aggregation=own"
            raise SettingError("method", "aggregation", reason, value=self.aggregation)

    def all_periods(self) -> Self:
        """Returns the method for a single run with the privacy cost of all periods together."""
        return replace(self, periods=1, period=1)

    def over_periods(
        self, plans: Plans, continued: tuple[str, ...], context: RoundContext
    ) -> Plans:
        """Returns the planned DP releases of the current period.

        Args:
            plans: the plans of a run without periods.
            continued: the names of the plans whose sums later periods continue. The others are
                released in period 1 only.
            context: the public context of the run.

        Raises:
            SettingError: a run with several periods has several rounds.
        """
        if self.periods == 1:
            return plans
        if context.rounds != 1:
            reason = (
                "must be 1 with several periods, because further rounds would need the records of "
                "earlier periods. Set run.rounds=1"
            )
            raise SettingError("run", "rounds", reason, value=context.rounds)
        factor = charged_factor(self.period, self.periods)
        # the expected signal is that of the running sum, whose noise differs from the row's
        gain = self.total_records(context) / context.nominal_size / sum_factor(self.period)
        result = []
        for plan in plans:
            quantity = in_period(plan.quantity, self.period, self.periods)
            noise = plan.relative_noise_multiplier
            if plan.name in continued:
                noise *= factor
            elif self.period > 1:
                continue
            signal = None if plan.signal is None else plan.signal * gain
            changed = replace(plan, quantity=quantity, signal=signal)
            result.append(replace(changed, relative_noise_multiplier=noise))
        return tuple(result)

    def total_records(self, context: RoundContext) -> float:
        """Returns the public number of a client's records in all periods so far."""
        return context.nominal_size + self.earlier_records

    def pooled_deviation(self, plan: str, clients: int, context: RoundContext) -> float:
        return sum_factor(self.period) * super().pooled_deviation(plan, clients, context)

    def pooled(self, sums_D: Tensor, clients: int, plan: str, context: RoundContext) -> Pool:
        records = self.total_records(context) * clients
        return Pool(sums_D, self.pooled_deviation(plan, clients, context), records)


def has_periods(method: Method) -> TypeGuard[SumsOverPeriods]:
    """Returns True if the run belongs to a sequence of several periods."""
    return isinstance(method, SumsOverPeriods) and method.periods > 1
