"""The facts of generated images, against counts by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fedsynth.evaluation.generated import average, describe, tally


def _scores(given: list[int], classes: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(given), classes).float() * 3 - 1


def test_facts_of_a_batch_by_hand() -> None:
    made = tally(_scores([0, 0, 0, 1, 1, 3], 4), torch.tensor([0, 1, 0, 1, 3, 2]))
    assert made.tolist() == [[3, 2, 0, 1], [2, 1, 0, 0]]
    facts = describe(made)
    entropy = -(0.5 * math.log(0.5) + math.log(1 / 3) / 3 + math.log(1 / 6) / 6)
    assert facts["agreement"] == 0.5
    assert facts["class_entropy"] == pytest.approx(entropy)
    assert facts["class_entropy_share"] == pytest.approx(entropy / math.log(4))
    assert facts["classes"] == 3


def test_entropy_spans_nothing_to_everything() -> None:
    assert describe(tally(_scores([2] * 8, 5)))["class_entropy"] == 0.0
    even = describe(tally(_scores(list(range(5)) * 3, 5)))
    assert even["class_entropy_share"] == pytest.approx(1.0)
    assert even["classes"] == 5
    assert "agreement" not in even


def test_undecided_images_are_not_diverse() -> None:
    """Every image's prediction is nearly uniform: the mean prediction's entropy is log C, but all
    images are the same class."""
    scores = torch.full((16, 10), 0.1)
    scores[:, 4] += 1e-3
    assert describe(tally(scores))["class_entropy"] == 0.0


def test_collapsed_generators_are_not_pooled() -> None:
    each = [describe(tally(_scores([c] * 4, 3))) for c in range(3)]
    assert average(each)["class_entropy"] == 0.0
    assert average(each)["classes"] == 1.0
    assert average([]) == {}


def test_the_student_s_share_is_of_the_teacher_s_answers() -> None:
    """Four images, three on which both say the same; what was asked does not matter."""
    eye = torch.eye(3)
    teacher, student = eye[[0, 1, 2, 2]], eye[[0, 1, 2, 0]]
    found = tally(teacher, torch.tensor([1, 1, 1, 1]), student)
    assert found.tolist() == [[1, 1, 2], [0, 1, 0], [1, 1, 1]]
    assert describe(found)["student"] == 0.75
    assert describe(found)["agreement"] == 0.25
