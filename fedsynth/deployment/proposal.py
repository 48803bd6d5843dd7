"""A server's proposal to data owners, which contains the settings of a run and public facts about
its data.

A proposal is untrusted input. Nothing in it names a file, a device or a ledger on the owner's
machine, and the owner's records are not read before the proposal was checked
(`fedsynth.deployment.policy`).
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedsynth.config.checks import check_own_noise, check_quorum
from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.data.files import one_line
from fedsynth.data.registry import (
    DATASETS,
    DEFAULT_DATASET,
    DatasetSpec,
    dataset_spec,
    spec_from_json,
)
from fedsynth.errors import FedsynthError, MessageError, SettingError
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.protocol import agreement
from fedsynth.privacy.files import load_toml

LOCAL_SETTINGS = {
    "run": ("device", "memory_gb", "threads", "compile"),
    "data": ("data_root",),
    "privacy": ("ledger",),
}
"""The settings that each party chooses for its own machine, such as the device and the folders."""
RUN_NAME = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Proposal:
    """A run as a server proposes it.

    Args:
        run: the name of the run, 16 hexadecimal digits. A restarted server keeps this name.
        settings: the settings of the run, without those in `LOCAL_SETTINGS`.
        spec: the public specification of the data set.
    """

    run: str
    settings: RunSettings
    spec: DatasetSpec

    @property
    def agreement(self) -> str:
        """A hash of everything that an owner agrees to. Runs with the same settings have the same
        hash.
        """
        text = json.dumps([agreement(self.settings), asdict(self.spec)], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Converts the proposal to a mapping of JSON values. `from_json` is the inverse."""
        return {
            "run": self.run,
            "settings": shared_sections(self.settings.to_mapping()),
            "spec": asdict(self.spec),
        }

    @classmethod
    def from_json(cls, stated: Any) -> Proposal:
        """Reads a proposal that a server has sent.

        Raises:
            MessageError: if it is not a valid proposal.
        """
        try:
            run = str(stated["run"])
            spec = spec_from_json(stated["spec"])
            sections = shared_sections(stated["settings"])
            settings = resolve(sections, own_data=_custom_name(spec))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise MessageError(f"the received proposal is damaged: {error!r:.120}") from None
        except FedsynthError as error:
            raise MessageError(f"the received proposal has invalid settings: {error}") from None
        if not RUN_NAME.fullmatch(run):
            raise MessageError(f"the run's name must be 16 hexadecimal digits, got {run!r:.80}")
        return cls(run, settings, spec)


def new_proposal(sections: Mapping[str, Mapping[str, Any]], spec: Path | None = None) -> Proposal:
    """Creates a server's proposal for a new run.

    Args:
        sections: the settings, in sections as for `resolve`.
        spec: a TOML file with the specification of custom data. None: the data set named in
            `sections` is used.

    Raises:
        FedsynthError: if the settings are invalid, or the file contains no specification.
    """
    if spec is None:
        dataset = dataset_spec(str(sections.get("data", {}).get("dataset", DEFAULT_DATASET)))
    else:
        try:
            dataset = spec_from_json(load_toml(spec))
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"is not a valid data set specification: {one_line(error)}"
            raise SettingError(None, str(spec), reason) from None
    settings = resolve(sections, own_data=_custom_name(dataset))
    if settings.method.requires_secure_sum:
        check_quorum(settings)
    return Proposal(new_run(), settings, dataset)


def check_executable(proposal: Proposal, context: RoundContext) -> None:
    """Refuses a run that no client may take part in. The check uses only public values.

    Args:
        proposal: the proposed run.
        context: the public context of round 1.

    Raises:
        FedsynthError, PrivacyError: if the method cannot run privately, if its privacy plan is
            invalid, or if its noise is designed for a secure sum that the run does not use.
    """
    run = proposal.settings
    if run.privacy is None:
        if run.partition.local_test:
            raise SettingError("partition", "local_test", "must be 0 in a deployment")
        return
    plan = PrivacyPlan.checked(run, context)
    if not run.method.requires_secure_sum:
        check_own_noise(plan.plans)


def new_run() -> str:
    """Creates a unique name for a run."""
    return secrets.token_hex(8)


def _custom_name(spec: DatasetSpec) -> str | None:
    """Returns the name of a custom data set, or None if the data set comes with the package."""
    if DATASETS.get(spec.name) == spec or spec.name.startswith("synthetic("):
        return None
    return spec.name


def shared_sections(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Removes the settings in `LOCAL_SETTINGS` from sections of settings.

    >>> shared_sections({"run": {"rounds": 2, "device": "cuda"}, "privacy": {"ledger": "/x"}})
    {'run': {'rounds': 2}}
    """
    shared = {}
    for section, values in sections.items():
        local = LOCAL_SETTINGS.get(section, ())
        shared[section] = {key: value for key, value in values.items() if key not in local}
    return {section: values for section, values in shared.items() if values}
