"""What a server proposes to data owners: a run's settings and the public facts of its data.

It comes from a stranger: nothing in it names a file, a device or a ledger of the owner's machine,
and nothing is made of it before it was checked (`fedsynth.federation.nodes.policy`).
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

from fedsynth.data.files import one_line
from fedsynth.data.registry import (
    DATASETS,
    DEFAULT_DATASET,
    DatasetSpec,
    dataset_spec,
    spec_from_json,
)
from fedsynth.errors import FedsynthError, MessageError, SettingError
from fedsynth.federation.exchange.protocol import agreement
from fedsynth.federation.terms.checks import check_quorum
from fedsynth.federation.terms.resolve import resolve
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.files import load_toml

OWN = {
    "run": ("device", "memory_gb", "threads", "compile"),
    "data": ("data_root",),
    "privacy": ("ledger",),
}
"""Settings that say where a party computes and what it keeps: each party's own."""
_NAME = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Proposal:
    """A run as a server proposes it.

    Args:
        run: names the run, also where its server is restarted: 16 hexadecimal digits.
        settings: without anything of `OWN`.
        spec: the data set's specification, public.
    """

    run: str
    settings: RunSettings
    spec: DatasetSpec

    @property
    def agreement(self) -> str:
        """A hash of all that an owner agrees to; another run of the same settings has the same."""
        text = json.dumps([agreement(self.settings), asdict(self.spec)], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """As a JSON-able mapping; `from_json` is its inverse."""
        return {
            "run": self.run,
            "settings": shared_sections(self.settings.to_mapping()),
            "spec": asdict(self.spec),
        }

    @classmethod
    def from_json(cls, stated: Any) -> Proposal:
        """The proposal that a server states.

        Raises:
            MessageError: it is none.
        """
        try:
            run = stated["run"]
            if not isinstance(run, str) or not _NAME.fullmatch(run):
                raise MessageError(f"a run's name has 16 hexadecimal digits, got {run!r:.80}")
            spec = spec_from_json(stated["spec"])
            sections = shared_sections(stated["settings"])
            settings = resolve(sections, own_data=own_name(spec))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise MessageError(f"the proposal of a run is damaged: {error!r:.120}") from None
        except MessageError:
            raise
        except FedsynthError as error:
            raise MessageError(f"the proposal of a run has unsound settings: {error}") from None
        return cls(run, settings, spec)


def own_proposal(sections: Mapping[str, Mapping[str, Any]], spec: Path | None = None) -> Proposal:
    """The proposal of a server that has these settings; for a new run.

    Args:
        sections: as `resolve` takes them.
        spec: a TOML file with the specification of own data; None: that of the data set which
            `sections` name.

    Raises:
        FedsynthError: unsound settings, or a file that says no specification.
    """
    if spec is None:
        found = dataset_spec(str(sections.get("data", {}).get("dataset", DEFAULT_DATASET)))
    else:
        try:
            found = spec_from_json(load_toml(spec))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SettingError(
                None, str(spec), f"says no specification: {one_line(error)}"
            ) from None
    settings = resolve(sections, own_data=own_name(found))
    if settings.method.sums_alone:
        check_quorum(settings)
    return Proposal(new_run(), settings, found)


def new_run() -> str:
    """A name for a run; nobody else's."""
    return secrets.token_hex(8)


def own_name(spec: DatasetSpec) -> str | None:
    """The data set's name where it is none of the package's; None: it is one of these."""
    known = DATASETS.get(spec.name) == spec or spec.name.startswith("synthetic(")
    return None if known else spec.name


def shared_sections(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sections of settings without what is each party's own.

    >>> shared_sections({"run": {"rounds": 2, "device": "cuda"}, "privacy": {"ledger": "/x"}})
    {'run': {'rounds': 2}}
    """
    kept = {
        name: {key: value for key, value in values.items() if key not in OWN.get(name, ())}
        for name, values in sections.items()
    }
    return {name: values for name, values in kept.items() if values}
