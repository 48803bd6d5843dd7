"""Differential privacy for the values that data owners release.

The package contains the mechanisms, the accounting, the ledgers and the reports. The names below
are the stable interface for custom pipelines (docs/library.md). Each name is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsynth._lazy_import import lazy_exports

if TYPE_CHECKING:
    from fedsynth.errors import BudgetExceededError as BudgetExceededError
    from fedsynth.errors import PrivacyError as PrivacyError
    from fedsynth.privacy.accounting import calibrate_noise_multiplier as calibrate_noise_multiplier
    from fedsynth.privacy.accounting import epsilon as epsilon
    from fedsynth.privacy.function_audit import audit as audit
    from fedsynth.privacy.guard import UpdateGuard as UpdateGuard
    from fedsynth.privacy.ledger import Ledger as Ledger
    from fedsynth.privacy.ledger import read_ledger as read_ledger
    from fedsynth.privacy.owner import DataOwner as DataOwner
    from fedsynth.privacy.plans import ReleasePlan as ReleasePlan
    from fedsynth.privacy.releases import Release as Release
    from fedsynth.privacy.settings import PrivacySettings as PrivacySettings
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
