"""Filters the metrics rows and the summary of a private run: only declared keys may be shown.

The engine declares its keys here, a method declares those of its facts (`Method.metric_privacy`). An
undeclared key is refused; one that only a simulation may show goes only into `simulation_only`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
SUMMARY: Declared = {
    **{key: ROW[key] for key in (COMMON, "domain_average", MODELS)},
    **{key: ROW[key] for key in ("upload_bytes", "seconds", LOCAL)},
    "test_accuracy": released(_ACCURACY.reason, SHARE | None),
    **{key: _AS_PLANNED for key in ("method", "settings", "dataset", "seed", "test_data")},
    **{key: _AS_PLANNED for key in ("rounds", "differential_privacy", SOURCES)},
    "upload_floats_per_round": _SIZE,
    "device": public("the machine that ran it", str),
    "folder": public("where the run's files are", str),
}
"""Keys of summary.json, in addition to those that the method declares."""
SUMMARISED = (GENERATOR,)
"""The methods' facts that are also in a summary."""


def declared_row(method: type[Method]) -> Declared:
    """Returns the keys that a round's row of this method may have."""
    return {**method.metric_privacy, **ROW}


def declared_summary(method: type[Method]) -> Declared:
    """Returns the keys that this method's summary may have."""
    facts = {key: label for key, label in method.metric_privacy.items() if key in SUMMARISED}
    return {**facts, **SUMMARY}


def check_facts(facts: Mapping[str, Any], declared: Declared | None) -> Mapping[str, Any]:
    """Returns a method's facts, after checking that their keys are declared and not the engine's.

    Args:
        facts: by name.
        declared: by the method (`Method.metric_privacy`); None without differential privacy.

    Raises:
        UnaccountedReleaseError: a key is the engine's, or the method did not declare it.
    """
    reserved = sorted(ROW.keys() & facts.keys())
    undeclared = [] if declared is None else sorted(facts.keys() - declared.keys())
    for key in (*reserved, *undeclared):
        why = "is reserved" if key in ROW else "is not declared in `Method.metric_privacy`"
        raise UnaccountedReleaseError(f"the metric {key!r} of a method {why}")
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
        shown: what may be public.
        hidden: what only a simulation may show; empty without privacy, when all may be shown.
    """

    shown: Mapping[str, Any]
    hidden: Mapping[str, Any] = field(default_factory=dict)


def disclosed(values: Mapping[str, Any], declared: Declared | None) -> Disclosed:
    """Splits a row into what may be shown and what only a simulation may show.

    The rows of variants are split in the same way: `public` has the part of each row that may be
    shown, `hidden` has the full rows.

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
            raise UnaccountedReleaseError(
                f"{key!r} is in a private run's metrics without a declaration: declare it in "
                "the method's `metric_privacy`, as released or public"
            )
        if not declared[key].shown:
            hidden[key] = value
        elif not declared[key].fits(value):
            raise UnaccountedReleaseError(
                f"{key!r} in a private run's metrics has another shape than declared in the "
                "method's `metric_privacy`"
            )
        elif key == MODELS:
            public[key] = {
                name: dict(disclosed(item, MEASURED).shown) for name, item in value.items()
            }
            hidden[key] = value
        else:
            public[key] = value
    return Disclosed(public, hidden)


def lost_clients(played: RoundResult) -> dict[str, Any]:
    """Returns what a row states about clients whose uploads were not used, in ascending order."""
    row: dict[str, Any] = {}
    for key, reasons in ((LOST, played.lost), (REJECTED, played.rejected)):
        if reasons:
            row[key] = {str(client): reasons[client] for client in sorted(reasons)}
    if played.no_quorum is not None:
        missed = played.no_quorum
        row[NOT_COUNTED] = {
            "exchange": missed.phase,
            "uploads": missed.uploads,
            "needed": missed.needed,
        }
    return row


def lost_in_words(row: Mapping[str, Any]) -> list[str]:
    """Returns what `lost_clients` states, as text: "lost 0 (crashed)", "rejected 3 (weight is -1,
    …)".
    """
    texts = []
    for key in (LOST, REJECTED):
        if key in row:
            clients = [f"{client} ({why})" for client, why in row[key].items()]
            texts.append(f"{key} {', '.join(clients)}")
    if missed := row.get(NOT_COUNTED):
        texts.append(
            f"is discarded: {missed['uploads']} uploads, but {missed['needed']} are required"
        )
    return texts
