"""The shape of a privacy report of schema 3: every key, and the type of what stands under it;
nothing else may be there.

What the values are is `verify`'s business. Reports come from strangers, so the shape is checked
before anything looks inside.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

SHOWN = 10  # of a report's faults


DataSet = dict[str, str | int | list[str] | list[float]]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Verdict(_Part):
    text: str
    formal: bool
    reasons: list[str]
    assumptions: list[str]
    warnings: list[str]


class Spread(_Part):
    number: int
    epsilon_min: float
    epsilon_median: float
    epsilon_max: float


class WorstAfterRound(_Part):
    round: int
    epsilon: float


class AfterRound(_Part):
    round: int
    worst: float
    median: float
    clients: dict[str, float]


class KindAlone(_Part):
    quantity: str
    mechanism: str
    epsilon: float


class CurvePoint(_Part):
    delta: float
    epsilon: float


class Attack(_Part):
    false_positive_rate: float
    true_positive_rate_at_most: float


class Group(_Part):
    units: int
    epsilon: float | None
    note: str


class Guarantee(_Part):
    epsilon: float
    delta: float
    worst_client: str
    clients: Spread
    epsilon_by_client: dict[str, float]
    epsilon_by_round_worst_client: list[WorstAfterRound]
    epsilon_by_round: list[AfterRound]
    epsilon_of_each_release_alone: list[KindAlone]
    epsilon_of_delta: list[CurvePoint]
    attack_success: list[Attack]
    groups: list[Group]


class Access(_Part):
    access: str
    status: str
    note: str


class LedgerEntry(_Part):
    """Rows of a ledger that differ in round and client alone."""

    rounds: list[int]
    clients: list[str]
    quantity: str
    mechanism: str
    clipped: str
    noise_multiplier: float
    sensitivity: float
    sample_rate: float
    sampler: str
    steps: int
    dimension: int
    unaccounted: str | None
    unit: str
    noise_standard_deviation: float


class LedgerStart(_Part):
    """Where a client's ledger stood: its rows, and the chain hash over them (None: only in
    memory)."""

    rows: int = Field(ge=0)
    chain: str | None


class LedgerHead(LedgerStart):
    rows_before: int = Field(ge=0)


class CrossCheck(_Part):
    name: str
    epsilon: float | None
    note: str


class Accountant(_Part):
    name: str
    library: str
    computation: str
    discretisation_interval: float | None
    neighbouring_relation: str
    cross_check: CrossCheck | None = None  # missing, where there is no guarantee


class Budget(_Part):
    epsilon_cap: float | None
    epsilon_spent: float
    epsilon_left: float | None
    planned_rounds: int
    rounds_done: int
    at_the_end: str
    note: str


class Audit(_Part):
    """A canary audit: counts, and the bound that follows from them."""

    text: str
    command: str
    method: str
    mechanism: str
    canaries: int = Field(ge=1, le=10**6)  # more would take hours, and memory to check
    guesses: int
    correct: int
    confidence: float
    delta: float
    epsilon_lower_bound: float


class Report(_Part):
    schema_version: int
    verdict: Verdict
    method: str
    mechanism: str
    noise_multiplier: float | None
    guarantee: Guarantee | None
    unit: dict[str, str]
    adjacency: str
    max_records: int | None
    data_set: DataSet
    trust_model: dict[str, str]
    public_items: dict[str, str]
    scope: list[Access]
    ledger: list[LedgerEntry]
    ledger_kept: bool
    ledger_heads: dict[str, LedgerHead]
    accountant: Accountant
    budget: Budget | None
    published: list[dict[str, str]]
    randomness: str
    deviations: list[str]
    not_covered: dict[str, str]
    audit: str | Audit
    provenance: dict[str, str]


class Start(_Part):
    """A run folder's privacy_start.json."""

    schema_version: int
    noise_multiplier: float | None
    data_set: DataSet
    test_images: Literal["public", "private", "none"]
    ledgers: dict[str, LedgerStart]


class Signature(_Part):
    """A run folder's signature.json: base64 of key and signature, SHA-256 by file."""

    fedsynth_signature: int
    algorithm: str
    public_key: str
    files: dict[str, str]
    signature: str


def schema_problems(value: Any, shape: type[BaseModel] = Report) -> list[str]:
    """Keys that are missing or unknown and values of another type, a line each; none: whatever
    reads it can rely on its shape."""
    try:
        shape.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        lines = [_line(one["loc"], one["type"], one["msg"]) for one in found[:SHOWN]]
        return [*lines, f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else lines
    return []


def _line(where: Sequence[int | str], kind: str, message: str) -> str:
    names = (str(part) for part in where)
    path = ".".join(
        name if name.isalnum() or name.isidentifier() else reprlib.repr(name) for name in names
    )
    words = {"missing": "is missing", "extra_forbidden": "is no key of a report"}
    return f"{path or 'it'} {words.get(kind, 'is wrong: ' + message)}"
