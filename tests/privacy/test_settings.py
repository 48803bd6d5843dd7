"""Private settings refuse what means nothing, by the name of the setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.privacy.settings import NO_LEDGER, PrivacySettings


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("epsilon", {"epsilon": "8"}),
        ("epsilon", {"epsilon": True}),
        ("max_request_norm", {"noise_multiplier": 1.0, "max_request_norm": 0.0}),
        ("noise_multiplier", {"noise_multiplier": -1.0}),
        ("clip", {"epsilon": 1.0, "clip": float("inf")}),
        ("sample_rate", {"epsilon": 1.0, "sample_rate": 0.0}),
        ("unit", {"epsilon": 1.0, "unit": "household"}),
        ("unit", {"epsilon": 1.0, "unit": "user"}),  # its users' number is not said
        ("mechanism", {"epsilon": 1.0, "mechanism": "paper"}),  # no guarantee, so no ε
        ("ledger", {"epsilon": 1.0, "ledger": "a\0b"}),
        ("ledger", {"epsilon": 1.0, "ledger": "\ud800"}),
        ("ledger", {"epsilon": 1.0, "ledger": ""}),
        ("ledger", {"epsilon": 1.0, "ledger": "None"}),
        ("ledger", {"epsilon": 1.0, "ledger": "~nobody-of-that-name/ledgers"}),
    ],
)
def test_it_is_named(key: str, values: dict[str, Any]) -> None:
    with pytest.raises(PrivacySettingError) as caught:
        PrivacySettings(**values)
    assert (caught.value.section, caught.value.key) == ("privacy", key)
    assert "\n" not in str(caught.value)


def test_noise_or_a_budget_is_needed() -> None:
    with pytest.raises(PrivacySettingError):
        PrivacySettings()


def test_a_ledgers_folder_is_the_same_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative name means another folder once the process has changed its own."""
    monkeypatch.chdir(tmp_path)
    assert PrivacySettings(epsilon=1.0, ledger="kept").ledger_folder == tmp_path / "kept"
    assert PrivacySettings(epsilon=1.0, ledger=NO_LEDGER).ledger_folder is None
