"""A server's proposal to data owners: a run's settings and the public facts of its data.

It is untrusted input: nothing in it names a file, a device or a ledger of the owner's machine, and
nothing is built from it before it was checked (`fedsynth.deployment.policy`).
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
"""Settings of where a party computes and what it stores: each party has its own values."""
RUN_NAME = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Proposal:
    """A run as a server proposes it.

    Args:
        run: the run's name, which a restarted server keeps: 16 hexadecimal digits.
        settings: without the settings in `LOCAL_SETTINGS`.
        spec: the data set's specification, public.
    """

    run: str
    settings: RunSettings
    spec: DatasetSpec

    @property
    def agreement(self) -> str:
        """A hash of all that an owner agrees to; runs of the same settings have the same hash."""
        text = json.dumps([agreement(self.settings), asdict(self.spec)], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-able mapping; `from_json` is its inverse."""
        return {
            "run": self.run,
            "settings": shared_sections(self.settings.to_mapping()),
            "spec": asdict(self.spec),
        }

    @classmethod
    def from_json(cls, stated: Any) -> Proposal:
        """Returns the proposal that a server sent.

        Raises:
            MessageError: it is not a valid proposal.
        """
        try:
            run = str(stated["run"])
            spec = spec_from_json(stated["spec"])
            sections = shared_sections(stated["settings"])
            settings = resolve(sections, own_data=_custom_name(spec))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise MessageError(f"the proposal of a run is damaged: {error!r:.120}") from None
        except FedsynthError as error:
            raise MessageError(f"the proposal of a run has invalid settings: {error}") from None
        if not RUN_NAME.fullmatch(run):
            raise MessageError(f"a run's name has 16 hexadecimal digits, got {run!r:.80}")
        return cls(run, settings, spec)


def new_proposal(sections: Mapping[str, Mapping[str, Any]], spec: Path | None = None) -> Proposal:
    """Returns the proposal of a server for a new run with these settings.

    Args:
        sections: as `resolve` takes them.
        spec: a TOML file with the specification of custom data; None: that of the data set in
            `sections`.

    Raises:
        FedsynthError: invalid settings, or a file without a specification.
    """
    if spec is None:
        dataset = dataset_spec(str(sections.get("data", {}).get("dataset", DEFAULT_DATASET)))
    else:
        try:
            dataset = spec_from_json(load_toml(spec))
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"is not a valid specification: {one_line(error)}"
            raise SettingError(None, str(spec), reason) from None
    settings = resolve(sections, own_data=_custom_name(dataset))
    if settings.method.requires_secure_sum:
        check_quorum(settings)
    return Proposal(new_run(), settings, dataset)


def check_executable(proposal: Proposal, context: RoundContext) -> None:
    """Refuses a run that no client may take part in, by public values.

    Args:
        proposal: the run's.
        context: public, of round 1.

    Raises:
        FedsynthError, PrivacyError: the method cannot run privately, its plan is invalid, or its
            noise needs a sum that is not made.
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
    """Returns a unique name for a run."""
    return secrets.token_hex(8)


def _custom_name(spec: DatasetSpec) -> str | None:
    """Returns the name of a data set that is not in the package; None: it is in the package."""
    if DATASETS.get(spec.name) == spec or spec.name.startswith("synthetic("):
        return None
    return spec.name


def shared_sections(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns sections of settings without the settings in `LOCAL_SETTINGS`.

    >>> shared_sections({"run": {"rounds": 2, "device": "cuda"}, "privacy": {"ledger": "/x"}})
    {'run': {'rounds': 2}}
    """
    shared = {}
    for section, values in sections.items():
        local = LOCAL_SETTINGS.get(section, ())
        shared[section] = {key: value for key, value in values.items() if key not in local}
    return {section: values for section, values in shared.items() if values}
