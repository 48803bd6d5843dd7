"""Checks the contents of a private run's files: compares metrics, summary and tensors with the
run's plan, its charges and its method's declarations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedsynth.data.files import one_line, read_tensors
from fedsynth.data.shared_set import BYTES, NORMALISED, TENSORS, set_facts
from fedsynth.federation.run_data import PUBLIC as PUBLIC_TEST
from fedsynth.privacy.disclosure import PUBLIC
from fedsynth.privacy.files import file_hash
from fedsynth.privacy.report.verify import differences
from fedsynth.results import privacy_summary
from fedsynth.results.disclosed import (
    COMMON,
    LOST,
    MEASURED,
    MODELS,
    NOT_COUNTED,
    ON_TEST,
    REJECTED,
    ROW,
    Declared,
    declared_row,
    declared_summary,
    disclosed,
)
from fedsynth.results.result import own_sources, summarise
from fedsynth.results.run_folder import CONFIG, METRICS, MODEL, SERVER
from fedsynth.results.verified_charges import Charges
from fedsynth.synthesizer.condensation.sets import SyntheticSet


def contents_problems(charges: Charges) -> list[str]:
    """Returns the deviations of metrics.jsonl and summary.json from what the method declares, or,
    if all values are declared, from what the plan and the charges give.
    """
    rows = charges.run.rows
    for check in (_shape_problems, _planned_problems):
        problems = []
        for row in rows:
            problems += [
                f"{METRICS}: round {row['round']} {problem}" for problem in check(row, charges)
            ]
        if problems and check is _shape_problems:
            return problems
    return [*problems, *_epsilon_problems(charges), *_summary_problems(charges)]


# ----------------------------------------------------------------------------------- metrics.jsonl


def _shape_problems(row: Mapping[str, Any], charges: Charges) -> list[str]:
    """Returns the keys of a row that no private run may show, and the values of an undeclared
    shape.
    """
    run = charges.run
    problems = _undeclared(row, declared_row(type(run.settings.method)))
    if problems:
        return problems
    models = row.get(MODELS, {})
    for name, variant in models.items():
        if name not in run.settings.method.variant_names:
            problems.append(f"has a model {name!r:.40}, which the method does not make")
        problems += [
            f"{problem} (of model {name!r:.40})" for problem in _undeclared(variant, MEASURED)
        ]
    test = run.stated["test_images"]
    for values in (row, *models.values()):
        if test != PUBLIC_TEST and set(ON_TEST) & set(values):
            problems.append(f"has an accuracy, and the test images are {test}")
        if set(values.get("domain_accuracy", {})) - set(run.spec.domains):
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
    """Returns the differences between a row and what the plan and the run's seed give."""
    number = row["round"]
    run, plan = charges.run, charges.plan
    active = plan.participation.in_round(number)
    method = run.settings.method
    expected = {**method.planned_facts(charges.in_round(number)), **charges.expected_losses(number)}
    if len(active) < run.settings.partition.clients:
        expected["participants"] = list(active)
    planned = {key for key, label in method.discloses.items() if label.kind == PUBLIC}
    planned |= {"participants", LOST, REJECTED, NOT_COUNTED}
    stated = {key: value for key, value in row.items() if key in planned}
    return differences("", expected, stated)


def _epsilon_problems(charges: Charges) -> list[str]:
    """Returns the rounds whose ε does not follow from the ledger rows charged up to the end of the
    round.
    """
    rows, plan = charges.run.rows, charges.plan
    if not plan.guaranteed(plan.histories):
        stated = [row["round"] for row in rows if "epsilon" in row]
        location = f"{METRICS} gives an epsilon in round"
        return [f"{location} {number}, where no figure would be true" for number in stated]
    # over nodes, what a lost client was charged is unknown
    lost = charges.run.served and any(LOST in row or REJECTED in row for row in rows)
    table = {} if lost else charges.epsilon_by_round()
    problems = []
    spent = table.get(0, 0.0)
    upper = plan.epsilon(charges.now)
    for row in rows:
        spent = table.get(row["round"], spent)
        epsilon = row.get("epsilon")
        location = f"{METRICS}: epsilon of round {row['round']}"
        if epsilon is None and math.isinf(upper):  # another run's release had no guarantee
            continue
        if charges.alone and not lost:
            problems += differences(location, spent, epsilon)
        elif type(epsilon) is not float or not spent * 0.999999 <= epsilon <= upper * 1.000001:
            # the time at which another run charged the ledger is unknown
            problems.append(f"{location} must be between {spent:.6g} and {upper:.6g}")
    return problems


# ------------------------------------------------------------------------------------ summary.json


def _summary_problems(charges: Charges) -> list[str]:
    """Returns the differences between summary.json, if present, and the summary of the rows."""
    run, summary = charges.run, charges.run.summary
    if summary is None:
        return []
    settings = run.settings
    test = run.stated["test_images"]
    accuracy = None  # from the last row, or as stated if that round was not measured
    if run.rows and test == PUBLIC_TEST:
        name = COMMON if settings.method.personal else "test_accuracy"
        stated = run.rows[-1].get(name, summary.get(name))
        accuracy = stated if isinstance(stated, float) and ROW[name].fits(stated) else None
    promise = privacy_summary.summary(charges.plan, charges.now, simulated=not run.served)
    expected = summarise(
        settings,
        run.rows,
        accuracy,
        device=str(summary.get("device"))[:20],
        test=test,
        privacy=promise.to_json(),
    )
    public = dict(disclosed(expected, declared_summary(type(settings.method))).shown)
    public["folder"] = str(summary.get("folder"))
    return differences("summary.json", json.loads(json.dumps(public)), summary)


# ------------------------------------------------------------------------------------------- files


def file_problems(charges: Charges, folder: Path) -> list[str]:
    """Returns the files that the run must leave but that are missing, the files that it cannot
    leave, and the tensors whose shapes do not fit the run.
    """
    run = charges.run
    method = run.settings.method
    counted = [row["round"] for row in run.rows if NOT_COUNTED not in row]
    sends_sets = issubclass(method.upload, SyntheticSet)
    required = {MODEL, CONFIG}
    if run.rows or (run.summary or {}).get("rounds") != 0:
        required.add(METRICS)
    if counted and (sends_sets or method.makes_images(counted)):
        required.add(TENSORS)
    makes_images = bool(counted) and (sends_sets or method.plans_images)
    problems = [f"{name} is missing" for name in sorted(required) if not (folder / name).is_file()]
    unexpected = ["artefacts.json"] if makes_images else [TENSORS, "artefacts.json"]
    for name in unexpected:
        if (folder / name).exists():
            problems.append(f"{name} is there, and the run makes none")
    problems += _model_problems(charges, folder / MODEL)
    if makes_images:
        problems += _images_problems(charges, folder / TENSORS, counted)
    sources = {code.file: code.sha256 for code in own_sources(run.settings).values()}
    sources_folder = folder / "sources"
    names = {path.name for path in sources_folder.iterdir()} if sources_folder.is_dir() else set()
    for name in sorted(names | set(sources)):
        if (
            name not in names
            or name not in sources
            or file_hash(sources_folder / name) != sources[name]
        ):
            problems.append(f"sources/{name} is not the file that the run was made with")
    return problems


def _model_problems(charges: Charges, file: Path) -> list[str]:
    """Returns the differences between a model's tensors and the run's architecture."""
    if not file.is_file():
        return []
    try:
        tensors, _ = read_tensors(file)
    except (OSError, ValueError) as error:
        return [f"{MODEL} cannot be read: {one_line(error)}"]
    expected = _shapes(charges.run.context.architecture.state_dict())
    return differences(MODEL, expected, _shapes(tensors))


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def _images_problems(charges: Charges, file: Path, counted: list[int]) -> list[str]:
    """Returns the differences between the synthetic images and images of the data set, made by the
    run's clients or its server.
    """
    if not file.is_file():
        return []
    spec = charges.run.spec
    try:
        tensors, facts = read_tensors(file)
        clients = set(tensors["client"].tolist())
        labels = set(tensors["labels"].tolist())
    except (OSError, ValueError, LookupError, TypeError) as error:
        return [f"{TENSORS} cannot be read: {one_line(error)}"]
    count = tensors["labels"].numel()
    expected = {"images": [count, *spec.image_shape], "labels": [count], "client": [count]}
    if "soft_labels" in tensors:
        expected["soft_labels"] = [count, spec.classes]
    pixels = BYTES if facts.get("pixels") == BYTES else NORMALISED
    problems = differences(TENSORS, expected, _shapes(tensors))
    problems += differences(f"{TENSORS}: metadata", set_facts(spec, pixels), facts)
    active = charges.plan.participation.in_round(counted[-1])
    if clients - {*active, SERVER} or labels - set(range(spec.classes)):
        problems.append(f"{TENSORS} names clients or classes that there are not")
    return problems
