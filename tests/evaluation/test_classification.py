"""Tests of classification measures against their definitions in NumPy."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsynth import load_dataset, resolve, simulate
from fedsynth.data.images import ImageData
from fedsynth.evaluation.classification import (
    CALIBRATION_BINS,
    MEASURES,
    classification_measures,
    confusion_matrix,
    measures_by_domain,
)
from fedsynth.results.verification import verify_run

FAST = {
    "run": {"method": "fedavg", "rounds": 1},
    "method": {"local_epochs": 1, "batch": 64},
    "model": {"name": "linear"},
}


def draw(examples: int = 300, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits and labels; no example has the last class."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, classes - 1, (examples,), generator=generator)
    logits = torch.randn(examples, classes, generator=generator)
    logits[torch.arange(examples), labels] += 0.7
    logits[:20] = logits[20:40]  # ties between examples
    return logits, labels


def area_under_curve(scores: np.ndarray, positive: np.ndarray) -> float:
    """Returns the probability that a positive example has a higher score than a negative one."""
    gaps = scores[positive][:, None] - scores[~positive][None]
    return float(np.mean((gaps > 0) + 0.5 * (gaps == 0)))


def test_measures_equal_their_definitions() -> None:
    logits, labels = draw()
    p = logits.double().softmax(dim=1).numpy()
    y, predicted = labels.numpy(), p.argmax(axis=1)
    recall = [np.mean(predicted[y == c] == c) for c in range(3)]
    auroc = [area_under_curve(p[:, c], y == c) for c in range(3)]
    both = [np.sum((predicted == c) & (y == c)) for c in range(4)]
    f1 = [2 * both[c] / (np.sum(predicted == c) + np.sum(y == c)) for c in range(4)]
    confidence = p.max(axis=1)
    bins = np.ceil(confidence * CALIBRATION_BINS)
    error = 0.0
    for number in np.unique(bins):
        inside = bins == number
        gap = np.mean(predicted[inside] == y[inside]) - np.mean(confidence[inside])
        error += np.mean(inside) * abs(gap)
    expected = [np.mean(recall), np.mean(auroc), np.mean(f1), error]
    measures = classification_measures(logits, labels)
    assert tuple(measures) == MEASURES
    assert list(measures.values()) == pytest.approx(expected, rel=1e-5)
    matrix = np.array(confusion_matrix(logits, labels))
    assert [[np.sum((y == r) & (predicted == c)) for c in range(4)] for r in range(4)] == (
        matrix.tolist()
    )


def test_auroc_of_single_class_is_undefined() -> None:
    logits, _ = draw()
    measures = classification_measures(logits, torch.zeros(len(logits), dtype=torch.long))
    assert measures["auroc"] is None
    assert measures["balanced_accuracy"] == pytest.approx(
        float((logits.argmax(dim=1) == 0).float().mean())
    )


@pytest.mark.parametrize("classes", range(2, 50))
def test_measures_of_perfect_classifiers_are_at_most_one(classes: int) -> None:
    """Regression: averages in float32 gave an F1 of 1.0000001, which a private run refuses."""
    labels = torch.arange(5 * classes) % classes
    logits = 3.0 * torch.nn.functional.one_hot(labels, classes)
    measures = classification_measures(logits, labels)
    assert measures["balanced_accuracy"] == measures["f1"] == 1.0
    assert 1 - 1e-6 < measures["auroc"] <= 1.0


def test_nan_logits_and_one_class_leave_measures_undefined() -> None:
    logits, labels = draw()
    logits[0, 0] = math.nan
    for measures in (
        classification_measures(logits, labels),
        classification_measures(torch.zeros(3, 1), torch.zeros(3, dtype=torch.long)),
    ):
        assert measures["auroc"] is measures["calibration_error"] is None
        assert measures["f1"] is not None


def test_summary_has_measures_and_confusion_matrix() -> None:
    result = simulate(resolve(FAST))
    assert set(MEASURES) <= result.metrics[-1].keys()
    summary = result.summary
    assert {name: summary[name] for name in MEASURES} == {
        name: result.metrics[-1][name] for name in MEASURES
    }
    matrix = np.array(summary["confusion_matrix"])
    assert np.trace(matrix) / matrix.sum() == result.accuracy


def test_common_model_of_personal_methods_has_accuracy_only() -> None:
    model = {"width": 4, "depth": 1, "norm": "batch"}
    result = simulate(resolve(FAST | {"run": {"method": "fedbn", "rounds": 1}, "model": model}))
    assert "common_model_accuracy" in result.summary
    assert not {*MEASURES, "confusion_matrix"} & (result.summary.keys() | result.metrics[-1].keys())


def test_private_run_verifies_only_with_its_confusion_matrix(tmp_path: Path) -> None:
    result = simulate(resolve(FAST | {"privacy": {"noise_multiplier": 3.0}}), output=tmp_path)
    assert result.folder is not None
    assert verify_run(Path(result.folder)).problems == []
    path = Path(result.folder, "summary.json")
    summary = json.loads(path.read_text())
    honest = np.array(summary["confusion_matrix"])
    # the transposed matrix has the same accuracy
    for matrix in (honest - np.eye(10, dtype=int), honest.T, honest * 10**9):
        path.write_text(json.dumps({**summary, "confusion_matrix": matrix.tolist()}))
        [problem] = verify_run(Path(result.folder)).problems
        assert "confusion_matrix" in problem


def test_measures_are_computed_by_domain() -> None:
    """Images of domain 1 have one class, and no image is of domain 2."""
    logits, labels = draw()
    origins = (labels == 2).long()
    _, digits = load_dataset("digits")
    spec = replace(digits.spec, domains=("a", "b", "c"))
    data = ImageData(digits.images[:300], labels, spec, domains=origins)
    measured = measures_by_domain(logits, data)
    assert list(measured) == ["a", "b"]
    assert measured["b"]["auroc"] is None
    assert measured["a"] == classification_measures(logits[labels != 2], labels[labels != 2])
