"""A server's proposal for a run, and the client state stored during the run.

The proposal contains the settings of the run and public facts about its data.

A proposal is untrusted input. Nothing in it names a file, a device or a ledger on the owner's
machine, and the owner's records are not read before the proposal was checked
(`fedsynth.deployment.policy`).
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator

from fedsynth.config.checks import check_own_noise, check_quorum
from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.core.sums import sums_securely
from fedsynth.data import registry
from fedsynth.errors import CheckpointError, FedsynthError, MessageError, SettingError, one_line
from fedsynth.evaluation import DISSIMILARITY
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.files import load_json, load_toml, read_text
from fedsynth.results.file_names import SERVED

# The settings that each party chooses for its own machine, such as the device and the folders.
LOCAL_SETTINGS = {
    "run": ("device", "memory_gb", "threads", "compile"),
    "data": ("data_root",),
    "privacy": ("ledger",),
}

STATE = "session.json"
RUN_NAME = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Proposal:
    """A run that a server proposes to data owners.

    Args:
        run: the name of the run, 16 hexadecimal digits. A restarted server keeps this name.
        settings: the settings of the run, without those in `LOCAL_SETTINGS`.
        spec: the public specification of the data set.
    """

    run: str
    settings: RunSettings
    spec: registry.DatasetSpec

    @property
    def agreement(self) -> str:
        """A hash of the run's settings and data set specification.

        Owners approve a run by this hash. Runs with equal settings have equal hashes.
        """
        stated = {**self.to_json(), "run": None}
        text = json.dumps(stated, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Returns the proposal as a JSON-serialisable dict. `from_json` is the inverse."""
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
            spec = registry.spec_from_json(stated["spec"])
            sections = shared_sections(stated["settings"])
            settings = resolve(sections, own_data=_custom_name(spec))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise MessageError(
                f"the received proposal is damaged: {error!r:.120}. Use one version of fedsynth "
                "on all machines"
            ) from None
        except FedsynthError as error:
            raise MessageError(f"the received proposal has invalid settings: {error}") from None
        if not RUN_NAME.fullmatch(run):
            raise MessageError(f"the run's name must be 16 hexadecimal digits, got {run!r:.80}")
        return cls(run, settings, spec)


def read_spec(file: Path) -> registry.DatasetSpec:
    """Reads the specification of custom data from a TOML file.

    Raises:
        SettingError: if the file contains no specification.
    """
    try:
        return registry.spec_from_json(load_toml(file))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"is not a data set specification: {one_line(error)}"
        raise SettingError(None, str(file), reason) from None


def served_proposal(folder: Path) -> Proposal:
    """Reads the proposal of a run from the server's run folder.

    Raises:
        CheckpointError: if the folder has no proposal, or a damaged one.
    """
    file = folder / SERVED
    if not file.is_file():
        raise CheckpointError(
            f"{folder} contains no {SERVED}. Name the folder of a server's interrupted run"
        ).with_code("checkpoint.server")
    with damage_is_named(file):
        return Proposal.from_json(load_json(file))


def new_proposal(
    sections: Mapping[str, Mapping[str, Any]], spec: registry.DatasetSpec | None = None
) -> Proposal:
    """Creates a server's proposal for a new run.

    Args:
        sections: the settings, in sections as for `resolve`.
        spec: the specification of the data. None: that of the data set named in `sections`.

    Raises:
        FedsynthError: if the settings are invalid.
    """
    dataset = spec or registry.dataset_spec(
        str(sections.get("data", {}).get("dataset", registry.DEFAULT_DATASET))
    )
    settings = resolve(sections, own_data=_custom_name(dataset))
    if settings.encoder is not None:
        reason = "has no effect in a deployment, whose nodes read image files. Remove it"
        raise SettingError("data", "encoder", reason)
    check_quorum(settings)
    return Proposal(new_run(), settings, dataset)


def check_executable(proposal: Proposal, context: RoundContext) -> None:
    """Refuses a run that every client would reject. The check uses only public values.

    Args:
        proposal: the proposed run.
        context: the public context of round 1.

    Raises:
        FedsynthError: if the method cannot run privately, if its privacy plan is invalid, or if its
            noise is designed for a secure sum that the run does not use.
    """
    run = proposal.settings
    if run.privacy is None:
        if run.partition.local_test:
            share = run.partition.local_test
            reason = f"must be 0 in a deployment, got {share:g}. Set it to 0"
            raise SettingError("partition", "local_test", reason)
        if DISSIMILARITY in run.measure_names:
            reason = f"contains {DISSIMILARITY}, which a deployment cannot compute. Remove it"
            raise SettingError("run", "measures", reason)
        return
    plan = PrivacyPlan.checked(run, context)
    if not sums_securely(run.method):
        check_own_noise(plan.plans)


def new_run() -> str:
    """Creates a unique name for a run."""
    return secrets.token_hex(8)


def _custom_name(spec: registry.DatasetSpec) -> str | None:
    """Returns the name of a custom data set, or None if the data set comes with the package."""
    if registry.DATASETS.get(spec.name) == spec or spec.name.startswith("synthetic("):
        return None
    return spec.name


def shared_sections(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the settings except those that each machine sets for itself (`LOCAL_SETTINGS`).

    >>> shared_sections({"run": {"rounds": 2, "device": "cuda"}, "privacy": {"ledger": "/x"}})
    {'run': {'rounds': 2}}
    """
    shared: dict[str, dict[str, Any]] = {}
    for section, values in sections.items():
        for key, value in values.items():
            if key not in LOCAL_SETTINGS.get(section, ()):
                shared.setdefault(section, {})[key] = value
    return shared


def _stored_proposal(stated: Any) -> Proposal:
    if isinstance(stated, Proposal):
        return stated
    return Proposal.from_json(stated)


class State(BaseModel):
    """The information that a client's node stores, so that a new process can continue the run.

    The client's state is stored in files of its own.

    Args:
        proposal: the proposal that the owner has accepted.
        client: the client's index in the run.
        initial_rows: the number of entries in the ledger when the client first joined the run.
        warnings: the warnings from the trial step that the client made when it joined.
        isolated: whether each pass has only one record, as the trial step requires.
        sigma: σ, which is calibrated once for a run. None: the client has not received it yet.
        attempts: how often each step was taken, across restarts. The keys are "ROUND-EXCHANGE".
        steps: the (round, exchange) pairs of all steps since the client joined.
        client_state: the round after which the client's current client state was stored. 0: the
            client has no client state.
        recorded: see `ClientRuntime.recorded`.
        pending: the round in `ClientRuntime.pending`.
    """

    model_config = ConfigDict(extra="forbid")

    proposal: Annotated[
        Proposal, PlainValidator(_stored_proposal), PlainSerializer(Proposal.to_json)
    ]
    client: int
    initial_rows: int
    warnings: list[str] = []
    isolated: bool = False
    sigma: float | None = None
    attempts: dict[str, int] = {}
    steps: set[tuple[int, str]] = set()
    client_state: int = 0
    recorded: int = 0
    pending: int | None = None


def read_state(folder: Path) -> State | None:
    """Reads the client's state from a run's folder. Returns None if no state was written yet.

    Raises:
        CheckpointError: if the state is damaged. A damaged state is not treated as a missing state,
            because the client may already have answered requests.
    """
    if not (folder / STATE).is_file():
        return None
    with damage_is_named(folder):
        return State.model_validate_json(read_text(folder / STATE))


@contextmanager
def damage_is_named(folder: Path) -> Iterator[None]:
    """Converts errors that a damaged folder causes to a CheckpointError."""
    try:
        yield
    except (OSError, ValueError, MessageError) as error:
        raise CheckpointError(
            f"{folder} is damaged: {error!r:.120}. Restore it from a backup"
        ) from None
