"""What a private run's rows of metrics, and its summary, may say: what is declared, and no more.

The engine declares its own keys here, a method those of its facts (`Method.discloses`). A key that
nobody declared is refused; one that only a simulation may show goes into `simulation_only` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedsynth.core.method import Method
from fedsynth.evaluation.generated import GENERATOR
from fedsynth.federation.exchange.rounds import Played
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
"""What a row says of the clients' own test splits."""
PRIVATE_TEST = "private_test"
"""What it says of a test set that is private."""
COMMON = "common_model_accuracy"
"""The test accuracy of the common model, where clients end with models of their own."""
ON_TEST = ("test_accuracy", COMMON, "domain_accuracy", "domain_average")
"""What is measured on the test set."""
SOURCES = "sources"
"""What a summary says of files of one's own: a model's, a method's."""
MODELS = "models"
"""A row for each of the method's variants, by name."""
LOST = "lost"
"""Clients that did not answer, and why."""
REJECTED = "rejected"
"""Clients whose upload could not be used, and what is wrong with it."""
NOT_COUNTED = "not_counted"
"""A round below the quorum: the exchange, the uploads that could be used, and those needed."""

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
    REJECTED: released("what is wrong with a message that was released", dict[str, str]),
    NOT_COUNTED: released("counted from those two", dict[str, str | int]),
    "test_accuracy": _ACCURACY,
    COMMON: _ACCURACY,
    "domain_accuracy": _DOMAINS,
    "domain_average": _ACCURACY,
    MODELS: released("rows of their own, of which the same holds", dict[str, dict[str, Any]]),
    "upload_floats": _SIZE,
    "upload_bytes": _SIZE,
    "client_upload_bytes": _SIZES,
    "seconds": simulation_only("how long a step takes depends on the records"),
    LOCAL: simulation_only("accuracies on the clients' own records"),
    PRIVATE_TEST: simulation_only("accuracies on private test images"),
}
"""Keys of a round's row, beside those that the method declares."""
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
"""Keys of summary.json, beside those that the method declares."""
SUMMARISED = (GENERATOR,)
"""The methods' facts that a summary has, too."""


def declared_row(method: type[Method]) -> Declared:
    """What may stand in a round's row of this method."""
    return {**method.discloses, **ROW}


def declared_summary(method: type[Method]) -> Declared:
    """What may stand in its summary."""
    facts = {key: one for key, one in method.discloses.items() if key in SUMMARISED}
    return {**facts, **SUMMARY}


def check_facts(facts: Mapping[str, Any], declared: Declared | None) -> Mapping[str, Any]:
    """A method's facts, which may not stand under keys of the engine's own.

    Args:
        facts: by name.
        declared: by the method (`Method.discloses`); None: the run has no differential privacy.

    Raises:
        UnaccountedReleaseError: a key that is the engine's, or that the method did not declare.
    """
    taken = sorted(ROW.keys() & facts.keys())
    undeclared = [] if declared is None else sorted(facts.keys() - declared.keys())
    for key in (*taken, *undeclared):
        why = "is the engine's own" if key in ROW else "is declared nowhere (`Method.discloses`)"
        raise UnaccountedReleaseError(f"a method's fact {key!r} {why}")
    return facts


def finite(value: Any) -> Any:
    """Returns a value of JSON with None in place of numbers that are not finite, which JSON does
    not have."""
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@dataclass(frozen=True)
class Disclosed:
    """A row of metrics, or a summary, as a run may write it.

    Attributes:
        shown: what may be shown to anybody.
        hidden: what only a simulation may show; empty without privacy, where all may be shown.
    """

    shown: Mapping[str, Any]
    hidden: Mapping[str, Any] = field(default_factory=dict)


def disclosed(values: Mapping[str, Any], declared: Declared | None) -> Disclosed:
    """What may be shown of a row, and what only a simulation may show.

    The rows of variants are split likewise: what may be shown has what may be shown of each, and
    the other has them whole.

    Args:
        values: the row.
        declared: of each key what it is; None: the run has no differential privacy.

    Raises:
        UnaccountedReleaseError: a key that nothing declares, or a value of another shape.
    """
    if declared is None:
        return Disclosed(dict(values))
    shown: dict[str, Any] = {}
    hidden: dict[str, Any] = {}
    for key, value in values.items():
        if key not in declared:
            raise UnaccountedReleaseError(
                f"{key!r} is in a private run's metrics, and nothing declares what it is: a method "
                "declares its facts in `discloses`, as released or public"
            )
        if not declared[key].shown:
            hidden[key] = value
        elif not declared[key].fits(value):
            raise UnaccountedReleaseError(
                f"{key!r} in a private run's metrics has another shape than is declared: a method "
                "declares its facts' shapes in `discloses`"
            )
        elif key == MODELS:
            shown[key] = {name: dict(disclosed(one, MEASURED).shown) for name, one in value.items()}
            hidden[key] = value
        else:
            shown[key] = value
    return Disclosed(shown, hidden)


def lost_clients(played: Played) -> dict[str, Any]:
    """Returns what a row states about clients whose uploads were not used, in ascending order."""
    row: dict[str, Any] = {}
    for key, found in ((LOST, played.lost), (REJECTED, played.rejected)):
        if found:
            row[key] = {str(client): found[client] for client in sorted(found)}
    if played.no_quorum is not None:
        missed = played.no_quorum
        row[NOT_COUNTED] = {
            "exchange": missed.phase,
            "uploads": missed.uploads,
            "needed": missed.needed,
        }
    return row


def lost_in_words(row: Mapping[str, Any]) -> list[str]:
    """Returns the same as text: "lost 0 (crashed)", "rejected 3 (weight is -1, …)"."""
    texts = []
    for key in (LOST, REJECTED):
        if key in row:
            clients = [f"{client} ({why})" for client, why in row[key].items()]
            texts.append(f"{key} {', '.join(clients)}")
    if missed := row.get(NOT_COUNTED):
        texts.append(
            f"does not count: {missed['uploads']} uploads, and {missed['needed']} are needed"
        )
    return texts
