"""Filters the metrics rows and the summary of a private run: only declared keys may be shown.

The engine declares its keys here, a method declares those of its facts (`Method.metric_privacy`). An
undeclared key is refused; one that only a simulation may show goes only into `simulation_only`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedsynth.core.method import Method
from fedsynth.evaluation.generated import GENERATOR
from fedsynth.federation.round_loop import RoundResult
from fedsynth.privacy.disclosure import (
    COUNT,
    SHARE,
    Disclosure,
    public,
    released,
    simulation_only,
)
from fedsynth.privacy.errors import UnaccountedReleaseError

LOCAL = "local"
"""Key of a row: metrics on the clients' local test splits."""
PRIVATE_TEST = "private_test"
"""Key of a row: metrics on a private test set."""
COMMON = "common_model_accuracy"
"""Key of a row: the test accuracy of the common model, if clients end with personal models."""
ON_TEST = ("test_accuracy", COMMON, "domain_accuracy", "domain_average")
"""Keys of metrics that are measured on the test set."""
SOURCES = "sources"
"""Key of a summary: the custom code files of model and method."""
MODELS = "models"
"""Key of a row: a row for each of the method's variants, by name."""
LOST = "lost"
"""Key of a row: the clients that did not answer, with the reasons."""
REJECTED = "rejected"
"""Key of a row: the clients whose uploads could not be used, with the reasons."""
NOT_COUNTED = "not_counted"
"""Key of a row of a round below the quorum: the exchange, the number of usable uploads, and the
number needed.
"""

Declared = Mapping[str, Disclosure]

_ACCURACY = released("measured of released models, on public test images", SHARE)
_DOMAINS = released("the same for each domain", dict[str, SHARE])
_SIZE = released("the size of what was released", COUNT)
_SIZES = released("the size of what each client released", list[COUNT])
_AS_PLANNED = public("computed from the settings, the plan and the ledgers' rows", Any)
ROW: Declared = {
    "round": public("the schedule is fixed before data are read", COUNT),
    "epsilon": public("computed from the ledgers' rows, which are public", float),
    "participants": public("drawn from the run's seed", list[COUNT]),
    LOST: public("failures are drawn from the run's seed", dict[str, str]),
    REJECTED: released("the error in a released message", dict[str, str]),
    NOT_COUNTED: released("counted from those two", dict[str, str | int]),
    "test_accuracy": _ACCURACY,
    COMMON: _ACCURACY,
    "domain_accuracy": _DOMAINS,
    "domain_average": _ACCURACY,
    MODELS: released("separate rows, with the same privacy", dict[str, dict[str, Any]]),
    "upload_floats": _SIZE,
    "upload_bytes": _SIZE,
    "client_upload_bytes": _SIZES,
    "seconds": simulation_only("how long a step takes depends on the records"),
    LOCAL: simulation_only("accuracies on the clients' own records"),
    PRIVATE_TEST: simulation_only("accuracies on private test images"),
}
"""Keys of a round's row, in addition to those that the method declares."""
MEASURED: Declared = {key: ROW[key] for key in (*ON_TEST, LOCAL, PRIVATE_TEST)}
"""Keys of the row of one of a method's variants."""
_PLANNED_KEYS = ("method", "settings", "dataset", "seed", "test_data", "rounds")
_ROW_KEYS = (COMMON, "domain_average", MODELS, "upload_bytes", "seconds", LOCAL)
SUMMARY: Declared = {
    **dict.fromkeys((*_PLANNED_KEYS, "differential_privacy", SOURCES), _AS_PLANNED),
    **{key: ROW[key] for key in _ROW_KEYS},
    "test_accuracy": released(_ACCURACY.reason, SHARE | None),
    "upload_floats_per_round": _SIZE,
    "device": public("the machine that ran it", str),
    "folder": public("where the run's files are", str),
}
"""Keys of summary.json, in addition to those that the method declares."""


def declared_row(method: type[Method]) -> Declared:
    """Returns the keys that a round's row of this method may have."""
    return {**method.metric_privacy, **ROW}


def declared_summary(method: type[Method]) -> Declared:
    """Returns the keys that this method's summary may have."""
    if GENERATOR in method.metric_privacy:
        return {GENERATOR: method.metric_privacy[GENERATOR], **SUMMARY}
    return SUMMARY


def undeclared(row: Mapping[str, Any], declared: Declared) -> Iterator[str]:
    """Yields what is wrong with the keys and the shapes of a row that was shown."""
    for key, value in row.items():
        if key not in declared or not declared[key].may_be_shown:
            yield f"has {key!r:.80}, which may not be shown"
        elif not declared[key].fits(value):
            yield f"has {key} in a shape that was not declared"


def check_facts(facts: Mapping[str, Any], declared: Declared | None) -> Mapping[str, Any]:
    """Returns a method's facts, after checking that their keys are declared and not the engine's.

    Args:
        facts: by name.
        declared: by the method (`Method.metric_privacy`); None without differential privacy.

    Raises:
        UnaccountedReleaseError: a key is the engine's, or the method did not declare it.
    """
    for key in facts:
        if key in ROW:
            raise UnaccountedReleaseError(f"the metric {key!r} of a method is reserved")
        if declared is not None and key not in declared:
            raise UnaccountedReleaseError(f"the metric {key!r} is not in `Method.metric_privacy`")
    return facts


def finite(value: Any) -> Any:
    """Returns a JSON value with None in place of non-finite numbers, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@dataclass(frozen=True)
class Disclosed:
    """A row of metrics, or a summary, as a run may write it.

    Attributes:
        public: what may be shown.
        simulation_only: what only a simulation may show; empty without privacy, when all may be
            shown.
    """

    public: Mapping[str, Any]
    simulation_only: Mapping[str, Any] = field(default_factory=dict)


def disclosed(values: Mapping[str, Any], declared: Declared | None) -> Disclosed:
    """Splits a row into what may be shown and what only a simulation may show.

    The rows of variants are split in the same way: `public` has the part of each row that may be
    shown, `simulation_only` has the full rows.

    Args:
        values: the row.
        declared: the disclosure of each key; None without differential privacy.

    Raises:
        UnaccountedReleaseError: a key is undeclared, or a value has another shape than declared.
    """
    if declared is None:
        return Disclosed(dict(values))
    public: dict[str, Any] = {}
    hidden: dict[str, Any] = {}
    for key, value in values.items():
        if key not in declared:
            raise UnaccountedReleaseError(f"the metric {key!r} is not in `Method.metric_privacy`")
        if not declared[key].may_be_shown:
            hidden[key] = value
        elif not declared[key].fits(value):
            reason = "has another shape than `Method.metric_privacy` declares"
            raise UnaccountedReleaseError(f"the metric {key!r} {reason}")
        else:
            public[key] = value
    if MODELS in public:
        hidden[MODELS] = public[MODELS]
        public[MODELS] = {
            name: disclosed(row, MEASURED).public for name, row in public[MODELS].items()
        }
    return Disclosed(public, hidden)


def lost_clients(played: RoundResult) -> dict[str, Any]:
    """Returns what a row states about clients whose uploads were not used, in ascending order."""
    row: dict[str, Any] = {}
    for key, reasons in ((LOST, played.lost), (REJECTED, played.rejected)):
        if reasons:
            row[key] = {str(client): reasons[client] for client in sorted(reasons)}
    if (missed := played.no_quorum) is not None:
        counts = {"uploads": missed.uploads, "needed": missed.needed}
        row[NOT_COUNTED] = {"exchange": missed.phase, **counts}
    return row


def lost_in_words(row: Mapping[str, Any]) -> list[str]:
    """Returns what `lost_clients` states, as text: "lost 0 (crashed)", "rejected 3 (weight is -1,
    …)".
    """
    texts = []
    for key in (LOST, REJECTED):
        if key in row:
            clients = ", ".join(f"{client} ({reason})" for client, reason in row[key].items())
            texts.append(f"{key} {clients}")
    if NOT_COUNTED in row:
        uploads, needed = row[NOT_COUNTED]["uploads"], row[NOT_COUNTED]["needed"]
        texts.append(f"is discarded: {uploads} uploads, but {needed} are required")
    return texts
