"""Prepares a data owner's next run, which adds the records of a new period."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsynth.data.declaration import FolderSettings
from fedsynth.data.shared_set import check_hashes
from fedsynth.errors import DataFilesMissingError, LedgerError, PrivacySettingError, SettingError
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.folder import PRIVATE, LedgerFolder
from fedsynth.privacy.periods import (
    FREE_SECTIONS,
    FREE_SETTINGS,
    PeriodFacts,
    ReleaseSequence,
    period_of,
)
from fedsynth.privacy.report.file import read_report
from fedsynth.validation import from_mapping

Sections = Mapping[str, Mapping[str, Any]]


def continued_sections(share: Path, sections: Sections) -> dict[str, dict[str, Any]]:
    """Returns the settings for the next period of a sequence.

    They are those of period 1, which are stored with the owner's ledger, with the new data.

    Args:
        share: the shared set of the last period.
        sections: the section "data", `privacy.ledger` if the data's declaration does not state it,
            and the section "report".

    Raises:
        SettingError: the share is that of the last declared period, or a setting belongs to the
            whole sequence. This is raised before a ledger or the data are read.
        LedgerError: the ledger folder does not contain the sequence.
    """
    if not (share / "privacy_report.json").is_file():
        raise DataFilesMissingError(
            f"{share} contains no privacy report. Name a folder written by fedsynth synthesize"
        ).with_code("files.synthetic_set")
    check_hashes(share)
    report = read_report(share)
    pairs = [period_of(entry["quantity"]) for entry in report["ledger"]]
    period, periods = max((pair for pair in pairs if pair), default=(1, 1))
    if period >= periods:
        reason = (
            f"is {periods}, but {share} already contains period {period}. Start a new sequence "
            "with new records and another ledger folder"
        )
        raise SettingError("method", "periods", reason)
    for section, values in sections.items():
        for key in values:
            if section not in FREE_SECTIONS and key not in FREE_SETTINGS:
                reason = "cannot be changed, because it is the same in all periods. Remove it"
                raise SettingError(section, key, reason)
    folder = _ledger_folder(sections)
    (client,) = report["ledger_heads"]
    sequence = ReleaseSequence(folder / PRIVATE, client, period + 1, periods)
    ledger = LedgerFolder(folder).ledgers().get(client)
    facts = [sequence.stored_facts(number) for number in range(1, period + 1)]
    head = report["ledger_heads"][client]
    merged = _merged(sections, _complete(facts, ledger, head["chain"], folder), period + 1)
    merged["privacy"]["ledger"] = str(folder)  # it may have moved since the first period
    return merged


def _complete(
    facts: list[PeriodFacts | None], ledger: Ledger | None, chain: str, folder: Path
) -> list[PeriodFacts]:
    """Returns the public settings of each period that a shared set covers.

    Raises:
        LedgerError: a period is missing, or the ledger is not that of the share.
    """
    complete = [stored for stored in facts if stored is not None]
    if ledger is None or chain not in ledger.lines.chains or len(complete) < len(facts):
        raise LedgerError(
            f"the ledger folder {folder} does not belong to the shared set. Set privacy.ledger to "
            "the folder that was used to create the set"
        ).with_code("sequence.share")
    return complete


def _merged(sections: Sections, facts: list[PeriodFacts], period: int) -> dict[str, dict[str, Any]]:
    merged = {name: dict(values) for name, values in facts[0].settings.items()}
    merged["data"] = {key: value for key, value in merged.get("data", {}).items() if value}
    for key in ("nominal_size", "max_records"):
        merged["privacy"].pop(key, None)
    for name, values in sections.items():
        merged[name] = {**merged.get(name, {}), **values}
    merged["privacy"]["noise_multiplier"] = facts[0].noise_multiplier
    merged["method"]["period"] = period
    merged["method"]["earlier_records"] = sum(stored.nominal_size for stored in facts)
    return merged


def _ledger_folder(sections: Sections) -> Path:
    """Returns the ledger folder that the settings or the data's declaration name."""
    stated = sections.get("privacy", {}).get("ledger")
    data = sections.get("data", {})
    if stated is None and "folder" in data:
        folder_settings = {
            key: data[key] for key in data if key in FolderSettings.__dataclass_fields__
        }
        declaration = from_mapping(FolderSettings, folder_settings).declared()
        stated = None if declaration is None else declaration.ledger
    if stated is None:
        reason = "must be set, because the ledger folder stores earlier noise. Set privacy.ledger"
        raise PrivacySettingError("privacy", "ledger", reason)
    return Path(stated).expanduser()
