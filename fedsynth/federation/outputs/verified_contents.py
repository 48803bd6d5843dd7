"""What the files of a private run may contain: metrics, summary and tensors, compared with what
the run's plan, its charges and its method's declarations say."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedsynth.data.files import one_line, read_tensors
from fedsynth.data.shared_set import BYTES, FORMAT, NORMALISED
from fedsynth.federation.outputs import privacy_words
from fedsynth.federation.outputs.disclosed import (
    COMMON,
    MEASURED,
    MODELS,
    ON_TEST,
    Declared,
    declared_row,
    declared_summary,
    disclosed,
)
from fedsynth.federation.outputs.lost_clients import LOST, NOT_COUNTED, REJECTED
from fedsynth.federation.outputs.result import own_sources, summarise
from fedsynth.federation.outputs.run_folder import CONFIG, MODEL, SERVER
from fedsynth.federation.outputs.verified_charges import Charges
from fedsynth.federation.terms.run_data import PRIVATE
from fedsynth.federation.terms.run_data import PUBLIC as PUBLIC_TEST
from fedsynth.privacy.disclosure import PUBLIC, SHARE, released
from fedsynth.privacy.files import file_hash
from fedsynth.privacy.verify import differences
from fedsynth.synthesizer.condensation.sets import SyntheticSet

METRICS, SUMMARY, SYNTHETIC = "metrics.jsonl", "summary.json", "synthetic.safetensors"
_MEASURED_ACCURACY = released("measured on public test images", SHARE)


# ----------------------------------------------------------------------------------- metrics.jsonl


def rows_problems(charges: Charges) -> list[str]:
    """Returns what the rows of metrics.jsonl state that may not be shown, or in another shape."""
    return [
        f"metrics.jsonl: round {row['round']} {problem}"
        for row in charges.run.rows
        for problem in _shape_problems(row, charges)
    ]


def metrics_problems(charges: Charges) -> list[str]:
    """Returns where rows of a sound shape differ from the plan, and from what was charged."""
    problems = [
        f"metrics.jsonl: round {row['round']} {problem}"
        for row in charges.run.rows
        for problem in _planned_problems(row, charges)
    ]
    return problems + _epsilon_problems(charges)


def _shape_problems(row: Mapping[str, Any], charges: Charges) -> list[str]:
    """Returns the keys of a row that no private run may show, and values of another shape."""
    run = charges.run
    problems = _undeclared(row, declared_row(type(run.settings.method)))
    if problems:
        return problems
    for name, variant in row.get(MODELS, {}).items():
        if name not in run.settings.method.variant_names:
            problems.append(f"has a model {name!r:.40}, which the method does not make")
        problems += [
            f"{problem} (of model {name!r:.40})" for problem in _undeclared(variant, MEASURED)
        ]
    measured = [row, *row.get(MODELS, {}).values()]
    if run.stated["test_images"] != PUBLIC_TEST and any(
        set(ON_TEST) & set(one) for one in measured
    ):
        problems.append(f"has an accuracy, and the test images are {run.stated['test_images']}")
    for one in measured:
        if set(one.get("domain_accuracy", {})) - set(run.spec.domains):
            problems.append("has the accuracy of a domain that the data set does not have")
    sizes = row.get("client_upload_bytes", [])
    active = charges.plan.participation.in_round(row["round"])
    if len(sizes) > len(active) or sum(sizes) != row.get("upload_bytes"):
        problems.append("has sizes of uploads that do not fit each other")
    return problems


def _undeclared(row: Mapping[str, Any], declared: Declared) -> list[str]:
    """Returns what is wrong with the keys and the shapes of a row."""
    problems = []
    for key, value in row.items():
        if key not in declared or not declared[key].shown:
            problems.append(f"says {key!r:.80}, which may not be shown")
        elif not declared[key].fits(value):
            problems.append(f"says {key} in a shape that was not declared")
    return problems


def _planned_problems(row: Mapping[str, Any], charges: Charges) -> list[str]:
    """Returns where a row differs from what the plan and the run's seed say."""
    number = row["round"]
    run, plan = charges.run, charges.plan
    active = plan.participation.in_round(number)
    method = run.settings.method
    expected = {**method.planned_facts(charges.in_round(number)), **charges.expected_losses(number)}
    if len(active) < run.settings.partition.clients:
        expected["participants"] = list(active)
    planned = {key for key, one in method.discloses.items() if one.kind == PUBLIC}
    planned |= {"participants", LOST, REJECTED, NOT_COUNTED}
    stated = {key: value for key, value in row.items() if key in planned}
    return differences("", expected, stated)


def _epsilon_problems(charges: Charges) -> list[str]:
    """Returns rounds whose ε is not that of the rows that were charged until their end."""
    rows = charges.run.rows
    if not charges.plan.guaranteed(charges.plan.histories):
        return [
            f"metrics.jsonl gives an epsilon in round {row['round']}, where no figure would be true"
            for row in rows
            if "epsilon" in row
        ]
    lost = charges.run.served and any(LOST in row or REJECTED in row for row in rows)
    table = (
        {} if lost else charges.epsilon_by_round()
    )  # what a lost client was charged is not known
    problems = []
    spent = table.get(0, 0.0)
    most = charges.plan.epsilon(charges.now)
    for row in rows:
        spent = table.get(row["round"], spent)
        stated = row.get("epsilon")
        where = f"metrics.jsonl: epsilon of round {row['round']}"
        if stated is None and math.isinf(most):  # another run's release had no guarantee
            continue
        if charges.alone and not lost:
            problems += differences(where, spent, stated)
        elif type(stated) is not float or not spent * 0.999999 <= stated <= most * 1.000001:
            # when exactly another run charged the ledger is not known
            problems.append(f"{where} must be between {spent:.6g} and {most:.6g}")
    return problems


# ------------------------------------------------------------------------------------ summary.json


def summary_problems(charges: Charges) -> list[str]:
    """Returns where summary.json, if there is one, is not the summary of the rows."""
    run = charges.run
    stated = run.summary
    if stated is None:
        return []
    settings = run.settings
    test = run.stated["test_images"]
    accuracy = _accuracy(charges)
    promise = privacy_words.summary(charges.plan, charges.now, simulated=not run.served)
    expected = summarise(
        settings,
        run.rows,
        accuracy,
        device=str(stated.get("device"))[:20],
        test=test,
        hidden=test == PRIVATE,
        privacy=promise.to_json(),
    )
    shown = dict(disclosed(expected, declared_summary(type(settings.method))).shown)
    shown["folder"] = str(stated.get("folder"))
    return differences("summary.json", json.loads(json.dumps(shown)), stated)


def _accuracy(charges: Charges) -> float | None:
    """Returns the final model's accuracy: as the last row has it, or as stated where that round
    was not measured."""
    run = charges.run
    if not run.rows or run.stated["test_images"] != PUBLIC_TEST:
        return None
    name = COMMON if run.settings.method.personal else "test_accuracy"
    stated = run.rows[-1].get(name, (run.summary or {}).get(name))
    return stated if isinstance(stated, float) and _MEASURED_ACCURACY.fits(stated) else None


# ------------------------------------------------------------------------------------------- files


def file_problems(charges: Charges, folder: Path) -> list[str]:
    """Returns files that the run must leave and that are missing, files that it cannot leave, and
    tensors of another shape than the run's."""
    run = charges.run
    method = run.settings.method
    counted = [row["round"] for row in run.rows if NOT_COUNTED not in row]
    sends_sets = issubclass(method.upload, SyntheticSet)
    required = {MODEL, CONFIG}
    if run.rows or (run.summary or {}).get("rounds") != 0:
        required.add(METRICS)
    if counted and (sends_sets or method.makes_images(counted)):
        required.add(SYNTHETIC)
    allowed = {*required, METRICS}
    if counted and (sends_sets or method.plans_images):
        allowed.add(SYNTHETIC)
    problems = [f"{name} is missing" for name in sorted(required) if not (folder / name).is_file()]
    for name in (SYNTHETIC, "artefacts.json"):
        if name not in allowed and (folder / name).exists():
            problems.append(f"{name} is there, and the run makes none")
    problems += _model_problems(charges, folder / MODEL)
    if SYNTHETIC in allowed:
        problems += _images_problems(charges, folder / SYNTHETIC, counted)
    sources = {one.file: one.sha256 for one in own_sources(run.settings).values()}
    kept = folder / "sources"
    there = {path.name for path in kept.iterdir()} if kept.is_dir() else set()
    for name in sorted(there | set(sources)):
        if name not in there or name not in sources or file_hash(kept / name) != sources[name]:
            problems.append(f"sources/{name} is not the file that the run was made with")
    return problems


def _model_problems(charges: Charges, file: Path) -> list[str]:
    """Returns how a model's tensors differ from the run's architecture."""
    if not file.is_file():
        return []
    expected = {
        name: list(tensor.shape)
        for name, tensor in charges.run.context.architecture.state_dict().items()
    }
    try:
        tensors, _ = read_tensors(file)
    except (OSError, ValueError) as error:
        return [f"{MODEL} cannot be read: {one_line(error)}"]
    return differences(MODEL, expected, _shapes(tensors))


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def _images_problems(charges: Charges, file: Path, counted: list[int]) -> list[str]:
    """Returns how synthetic images differ from images of the data set, made by the run's clients
    or its server."""
    if not file.is_file():
        return []
    spec = charges.run.spec
    try:
        tensors, facts = read_tensors(file)
        clients = set(tensors["client"].tolist())
        labels = set(tensors["labels"].tolist())
    except (OSError, ValueError, LookupError, TypeError) as error:
        return [f"{SYNTHETIC} cannot be read: {one_line(error)}"]
    shapes = _shapes(tensors)
    count = shapes["labels"][0] if shapes["labels"] else 0
    expected: dict[str, list[int]] = {
        "images": [count, *spec.image_shape],
        "labels": [count],
        "client": [count],
    }
    if "soft_labels" in shapes:
        expected["soft_labels"] = [count, spec.classes]
    problems = differences(SYNTHETIC, expected, shapes)
    stated = {
        "format": FORMAT,
        "pixels": BYTES if facts.get("pixels") == BYTES else NORMALISED,
        "data_set": spec.name,
        "class_names": json.dumps(spec.class_names),
        "mean": json.dumps(spec.mean),
        "std": json.dumps(spec.std),
    }
    problems += differences(f"{SYNTHETIC}: metadata", stated, facts)
    active = charges.plan.participation.in_round(counted[-1])
    if clients - {*active, SERVER} or labels - set(range(spec.classes)):
        problems.append(f"{SYNTHETIC} names clients or classes that there are not")
    return problems
