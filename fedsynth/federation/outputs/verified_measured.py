"""What metrics.jsonl and summary.json of a private run say, against what it charged and what its
method may show."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from fedsynth.federation.outputs import privacy_words
from fedsynth.federation.outputs.disclosed import (
    MODELS,
    ON_TEST,
    SOURCES,
    Declared,
    declared_row,
    declared_summary,
)
from fedsynth.federation.outputs.result import own_sources
from fedsynth.federation.outputs.verified_charges import Charges
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.verify import differences


def metrics_problems(charges: Charges, *, losses: bool) -> list[str]:
    """Of metrics.jsonl: nothing but what may be shown, and the ε of each round.

    Args:
        losses: clients of a run over nodes were lost, so that when they were charged is not known.
    """
    declared = declared_row(type(charges.run.settings.method))
    problems = [
        f"metrics.jsonl: round {row['round']} says {key}, which may not be shown"
        for row in charges.run.rows
        for key in _not_shown(row, declared)
    ]
    return problems + charges.loss_problems() + _epsilon_problems(charges, losses=losses)


def _epsilon_problems(charges: Charges, *, losses: bool) -> list[str]:
    """The ε of each round, from the rows that were charged until its end."""
    if not charges.plan.guaranteed(charges.plan.histories):
        return [
            f"metrics.jsonl gives an epsilon in round {row['round']}, where no figure would be true"
            for row in charges.run.rows
            if "epsilon" in row
        ]
    table = charges.epsilon_by_round()
    alone = not any(charges.foreign.values())
    if losses:
        table = {}  # what a lost client was charged for is known later
        alone = False
    problems = []
    spent = table.get(0, 0.0)
    most = charges.plan.epsilon(charges.now)
    for row in charges.run.rows:
        spent = table.get(row["round"], spent)
        stated = row.get("epsilon")
        if stated is None and math.isinf(most):  # another run's release had no guarantee
            continue
        if alone:
            problems += differences(
                f"metrics.jsonl: epsilon of round {row['round']}", spent, stated
            )
        elif type(stated) is not float or not spent * 0.999999 <= stated <= most * 1.000001:
            problems.append(  # when exactly another run charged the ledger is not known
                f"metrics.jsonl: epsilon of round {row['round']} must be between {spent:.6g} "
                f"and {most:.6g}"
            )
    return problems


def summary_problems(charges: Charges) -> list[str]:
    """Of summary.json, where there is one."""
    summary = charges.run.summary
    if summary is None:
        return []
    settings = charges.run.settings
    method = settings.method
    expected = {
        "method": method.name,
        "settings": json.loads(json.dumps(method.to_dict())),
        "dataset": settings.dataset,
        "rounds": charges.done,
        "seed": settings.seed,
        "differential_privacy": privacy_words.summary(
            charges.plan, charges.now, simulated=not charges.run.served
        ).to_json(),
    }
    unknown = _not_shown(summary, declared_summary(type(method)))
    return [
        *_accuracy_problems(charges),
        *(f"summary.json: {key} is no key of a summary" for key in unknown),
        *_source_problems(charges.run.settings, summary.get(SOURCES, {})),
        *(
            text
            for key, value in expected.items()
            for text in differences(f"summary.json: {key}", value, summary.get(key))
        ),
    ]


def _source_problems(settings: RunSettings, stated: Any) -> list[str]:
    """Files of one's own that are not those that the run was made with."""
    if not isinstance(stated, dict):
        return ["summary.json: sources must be a table"]
    return [
        f"summary.json: the {key}'s file {one.file} is another than the run's"
        for key, one in own_sources(settings).items()
        if not isinstance(stated.get(key), dict) or stated[key].get("sha256") != one.sha256
    ]


def _accuracy_problems(charges: Charges) -> list[str]:
    """Accuracies on test images that are private, or that are none, stand nowhere here."""
    summary = charges.run.summary or {}
    test = charges.run.start["test_images"]
    if test == "public":
        last = charges.run.rows[-1] if charges.run.rows else {}
        if "test_data" in summary:
            return ["summary.json says that there are no public test images"]
        ended_early = len(charges.run.rows) < charges.run.settings.rounds
        if ended_early and "test_accuracy" not in last:  # measured once more, after the last round
            return []
        return differences(
            "summary.json: test_accuracy", last.get("test_accuracy"), summary.get("test_accuracy")
        )
    problems = differences("summary.json: test_data", test, summary.get("test_data"))
    problems += differences("summary.json: test_accuracy", None, summary.get("test_accuracy"))
    return problems + [
        f"{_of(row)} has an accuracy, and the test images are {test}"
        for row in (summary, *charges.run.rows)
        if _measured_on_test(row)
    ]


def _measured_on_test(row: Mapping[str, Any]) -> bool:
    """Whether a row, or one of its models' rows, has what is measured on the test images."""
    models = row.get(MODELS, {})
    within = models.values() if isinstance(models, dict) else (models,)
    rows = (row, *(one for one in within if isinstance(one, dict)))
    return any(one.get(key) is not None for one in rows for key in ON_TEST)


def _of(row: Mapping[str, Any]) -> str:
    return f"metrics.jsonl: round {row['round']}" if "round" in row else "summary.json"


def _not_shown(row: Mapping[str, Any], declared: Declared) -> list[str]:
    """Keys of a row, or of one of its models' rows, that no private run may show."""
    models = row.get(MODELS, {})
    within = models.values() if isinstance(models, dict) else ()
    keys = [*row, *(key for one in within if isinstance(one, dict) for key in one)]
    return sorted({key for key in keys if key not in declared or not declared[key].shown})
