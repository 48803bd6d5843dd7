"""Decides which of a private run's metrics may be shown.

Every key in a round's metrics and in the summary must be declared with a privacy label. This module
declares the keys that fedsynth itself writes. A method declares the keys of its own metrics in
`Measurements.metric_privacy`. An undeclared key is refused. Values that only a simulation may show
are written only to the folder `simulation_only`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from fedsynth.errors import UnaccountedReleaseError
from fedsynth.evaluation import GENERATOR, MEASURES, NAMES, OPTIONAL, TEST_KEYS, GeneratorFacts
from fedsynth.privacy.disclosure import (
    COUNT,
    PUBLIC,
    SHARE,
    Disclosure,
    public,
    released,
    simulation_only,
)

if TYPE_CHECKING:  # tables of runs, which import no torch, use the declarations
    from fedsynth.core.method import Method
    from fedsynth.federation.server import RoundResult

# keys of a round's metrics
LOCAL = "local"  # the accuracies on the clients' own test splits
PRIVATE_TEST = "private_test"  # the accuracies on a private test set
DOMAIN_MEASURES = "domain_measures"  # the other measures within each domain of the test set
_MAIN = [key for names in NAMES.values() for key in (names.test, names.common)]
_BY_DOMAIN = [names.domains for names in NAMES.values()]
ON_TEST = (*_MAIN, *MEASURES, *_BY_DOMAIN, DOMAIN_MEASURES, "domain_average")
MODELS = "models"  # the metrics of each variant of the method's model, by variant name
LOST = "lost"  # the clients that did not answer, with the reasons
REJECTED = "rejected"  # the clients whose uploads could not be used, with the reasons
NOT_COUNTED = "not_counted"  # the number of usable uploads in a round that had too few
CONFUSION = "confusion_matrix"  # in a summary: by true class (row) and predicted class
GUARANTEE = "differential_privacy"  # in a summary: the privacy guarantee
SOURCES = "sources"  # in a summary: the files with the user's code

Declared = Mapping[str, Disclosure]
_IN_JSON = released("any value that JSON can store", JsonValue)

_ACCURACY = released("measured of released models, on public test images", SHARE)
_DOMAINS = released("the same for each domain", dict[str, SHARE])
_SIZE = released("the size of what was released", COUNT)
_SIZES = released("the size of what each client released", list[COUNT])
_REASON = "computed from the settings, the plan and the ledgers' rows"
# Keys that a round's metrics may have in addition to those that the method declares.
ROW: Declared = {
    "round": public("the schedule is fixed before data are read", COUNT),
    "epsilon": public("computed from the ledgers' rows, which are public", float),
    "participants": public("drawn from the run's seed", list[COUNT]),
    LOST: public("failures are drawn from the run's seed", dict[str, str]),
    REJECTED: released("the error in a released message", dict[str, str]),
    NOT_COUNTED: released("counted from those two", dict[str, str | int]),
    **dict.fromkeys(_MAIN, _ACCURACY),
    **dict.fromkeys(MEASURES, released(_ACCURACY.reason, SHARE | None)),
    **dict.fromkeys(_BY_DOMAIN, _DOMAINS),
    DOMAIN_MEASURES: released(_DOMAINS.reason, dict[str, dict[str, SHARE | None]]),
    "domain_average": _ACCURACY,
    MODELS: released("separate rows, with the same privacy", dict[str, dict[str, Any]]),
    "upload_floats": _SIZE,
    "upload_bytes": _SIZE,
    "client_upload_bytes": _SIZES,
    "seconds": simulation_only("how long a step takes depends on the records", float),
    LOCAL: simulation_only("accuracies on the clients' own records"),
    PRIVATE_TEST: simulation_only("accuracies on private test images"),
    **dict.fromkeys(
        OPTIONAL, simulation_only("measures for experiments, some on clients' records")
    ),
}
# Keys that the metrics of one model variant may have.
MEASURED: Declared = {key: ROW[key] for key in (*ON_TEST, LOCAL, PRIVATE_TEST)}

_ROW_KEYS = (*_MAIN, *MEASURES, "domain_average", MODELS, "upload_bytes", "seconds")
# Keys that summary.json may have. `read_summary` checks the types of those that it reads.
SUMMARY: Declared = {
    **dict.fromkeys(("method", "dataset", "test_data"), public(_REASON, str)),
    **dict.fromkeys(("rounds", "seed"), public(_REASON, COUNT)),
    "settings": public(_REASON, dict[str, Any]),
    GUARANTEE: public(_REASON, dict[str, bool | float | str | None]),
    SOURCES: public(_REASON, dict[str, dict[str, str]]),
    **{key: ROW[key] for key in _ROW_KEYS},
    LOCAL: simulation_only(ROW[LOCAL].reason, dict[str, float]),
    GENERATOR: released("measured of generators that are made from releases", GeneratorFacts),
    **dict.fromkeys(TEST_KEYS, released(_ACCURACY.reason, SHARE | None)),
    CONFUSION: released(_ACCURACY.reason, list[list[COUNT]]),
    "upload_floats_per_round": _SIZE,
    "device": public("the machine that ran it", str),
    "folder": public("where the run's files are", str),
}


def declared_row(method: type[Method]) -> Declared:
    """Returns the metric names that are allowed in a round with this method.

    Each name is mapped to the declaration of its privacy.
    """
    return {**_declared_metrics(method), **ROW}


def _declared_metrics(method: type[Method]) -> Declared:
    from fedsynth.core.capabilities import Measurements  # imports torch

    return method.metric_privacy if issubclass(method, Measurements) else {}


def undeclared(row: Mapping[str, Any], declared: Declared) -> Iterator[str]:
    """Yields a description of each metric that must stay secret or has the wrong type."""
    for key, value in row.items():
        if key not in declared or not declared[key].may_be_shown:
            yield f"contains the undeclared metric {key!r:.80}"
        elif not declared[key].fits(value):
            yield (f"contains {key} with a type or shape that does not match its declaration")


def metric_faults(
    metrics: Mapping[str, Any], declared: Declared | None, *, planned: bool
) -> dict[str, str]:
    """Returns what is wrong with a method's own metrics, by name.

    Metrics with a fault are left out of the run's results. They must not end a run whose round is
    already charged.

    Args:
        metrics: the metrics, as `finite` returns them.
        declared: the privacy label of each metric, or None without differential privacy.
        planned: whether the metrics are `planned_facts`, which must be public.
    """
    faults = {}
    for key, value in metrics.items():
        label = None if declared is None else declared.get(key)
        if key in ROW:
            faults[key] = "its name is reserved. Rename the metric"
        elif not _IN_JSON.fits(value):
            faults[key] = "JSON cannot store it. Return numbers, texts, lists or dicts"
        elif declared is None:
            continue
        elif label is None:
            faults[key] = "it is not declared. Add it with its type to Measurements.metric_privacy"
        elif (label.kind == PUBLIC) != planned:
            faults[key] = "planned_facts must return what is declared public, and nothing else"
        elif label.may_be_shown and not label.fits(value):
            kind = "None or not finite" if value is None else f"of type {type(value).__name__}"
            name = getattr(label.shape, "__name__", label.shape)
            faults[key] = f"it is {kind}, but declared as {name}. Change the value or declaration"
    return faults


def finite(value: Any) -> Any:
    """Returns a JSON-serialisable copy of a value.

    Tensors and arrays become numbers and lists, and keys become texts. None replaces infinities and
    NaN.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(finite, value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@dataclass(frozen=True)
class Disclosed:
    """Metrics, divided into public and simulation-only values.

    Attributes:
        public: the values that may be shown to anyone.
        simulation_only: the values that only a simulation may show. This mapping is empty without
            differential privacy, because all values may then be shown.
    """

    public: Mapping[str, Any]
    simulation_only: Mapping[str, Any] = field(default_factory=dict)


def disclosed(values: Mapping[str, Any], declared: Declared | None) -> Disclosed:
    """Splits metrics into public ones and those that only a simulation may show.

    The metrics of model variants are split in the same way. `public` then contains the part of each
    variant's metrics that may be shown, and `simulation_only` contains all metrics of the variants.

    Args:
        values: the metrics by key.
        declared: the privacy label of each key, or None without differential privacy.

    Raises:
        UnaccountedReleaseError: a key is not declared, or a value does not have the declared type
            or shape.
    """
    if declared is None:
        return Disclosed(dict(values))
    public: dict[str, Any] = {}
    hidden: dict[str, Any] = {}
    for key, value in values.items():
        if key in declared and not declared[key].may_be_shown:
            hidden[key] = value
        else:
            public[key] = value
    for problem in undeclared(public, declared):
        advice = "Declare each metric with its type in `Measurements.metric_privacy`"
        raise UnaccountedReleaseError(f"a metrics row {problem}. {advice}")
    if MODELS in public:
        hidden[MODELS] = public[MODELS]
        public[MODELS] = {
            name: disclosed(row, MEASURED).public for name, row in public[MODELS].items()
        }
    return Disclosed(public, hidden)


def lost_clients(played: RoundResult) -> dict[str, Any]:
    """Returns metrics that state which uploads of a round were not used, and why.

    The clients are in ascending order. If a round was discarded because it had too few uploads, the
    metrics also state how many uploads came and how many were required.
    """
    row: dict[str, Any] = {}
    for key, reasons in ((LOST, played.lost), (REJECTED, played.rejected)):
        if reasons:
            row[key] = {str(client): reasons[client] for client in sorted(reasons)}
    if (missed := played.no_quorum) is not None:
        counts = {"uploads": missed.uploads, "needed": missed.needed}
        row[NOT_COUNTED] = {"exchange": missed.exchange, **counts}
    return row


def lost_in_words(row: Mapping[str, Any]) -> list[str]:
    """Describes a round's unused uploads in words.

    The descriptions are made from the entries that `lost_clients` added to the round's metrics.
    Examples are "lost 0 (crashed)" and "rejected 3 (weight is -1, …)".
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
