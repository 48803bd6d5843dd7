"""A hash of the settings that decide a result: finished runs are found again by it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.settings import PrivacySettings

SPEED = ("compile", "memory_gb", "threads", "device", "data_root")
"""What changes how long a run takes, or where its data lie, and not its result."""
FIRST: dict[str, dict[str, Any]] = {"fedhydra": {"server_momentum": 0.9}}
"""By method, the first defaults of settings that have another one by now."""


def fingerprint(settings: RunSettings, without: tuple[str, ...] = ()) -> str:
    """Eight hexadecimal digits of the settings that decide a result.

    Args:
        settings: a run's.
        without: settings that do not count either, by name.
    """
    config = json.dumps(distinctive(settings, without), sort_keys=True)
    return hashlib.blake2b(config.encode(), digest_size=4).hexdigest()


def distinctive(settings: RunSettings, without: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """What differs from defaults and decides the result: a setting that a later version adds does
    not make old rows strangers.

    Defaults are those that a setting had first: who changes one enters the old in `FIRST`, so that
    rows made with it are still of what they were made with.
    """
    method = type(settings.method)()
    defaults = RunSettings(
        method, privacy=None if settings.privacy is None else PrivacySettings(epsilon=1.0)
    ).to_mapping()
    defaults["method"] = {**defaults["method"], **FIRST.get(method.name, {})}
    left_out = (*SPEED, *without)
    return {
        section: {
            k: v
            for k, v in values.items()
            if k not in left_out and (k == "method" or v != defaults.get(section, {}).get(k))
        }
        for section, values in settings.to_mapping().items()
    }
