"""What generated images are worth, by the teacher (or ensemble) that they were made for: figures
that show a generator's collapse at once.

`tally` counts a batch's images by the class that the teacher gives them, beside those that were
asked for as just that class. A tally is a small tensor, so that it can be kept in a state or a
memory, and tallies of batches add up. `describe` makes a round's facts of it:

- agreement: the share of images that the teacher gives the class that was asked for (conditional
  generators alone);
- student: the share of images that the student, after it has learned from them, gives the class
  that the teacher gives (of methods that tell `tally` so). Near 1 / C it has learned nothing,
  whatever the images are worth: its hidden units may be dead;
- class_entropy: the entropy of the classes given, in nats; class_entropy_share: the same over log
  C, 1 where all classes are equally frequent;
- classes: how many classes have at least one image.

The classes are the teacher's choices (argmax), not its mean prediction: a batch of images that it
cannot decide on has a mean prediction of high entropy and teaches nothing.

All of it is computed from the teacher, the generator and noise. It is post-processing wherever
those are released or public.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

GENERATOR = "generator"
"""The key of these facts in a round's row of metrics."""
GeneratorFacts = dict[
    Literal["agreement", "student", "class_entropy", "class_entropy_share", "classes"], float
]
"""The shape of these facts."""


def tally(
    scores_NC: Tensor, asked_N: Tensor | None = None, student_NC: Tensor | None = None
) -> Tensor:
    """Counts int64 [2, C]: images that the teacher gives each class, and how many of them were
    asked for as that class; with a student [3, C]: and how many of them it gives that class.

    Args:
        scores_NC: the teacher's logits or probabilities of N generated images.
        asked_N: the class that each image was made for; None, of a generator that is not
            conditional: one row alone [1, C].
        student_NC: the student's logits, of images that were made for classes.
    """
    given_NC = _choices(scores_NC)
    counts = given_NC.sum(dim=0)
    if asked_N is None:
        return counts[None]
    asked_NC = _one_hot(asked_N.to(scores_NC.device), scores_NC.shape[1])
    others = [asked_NC] if student_NC is None else [asked_NC, _choices(student_NC)]
    return torch.stack([counts, *((given_NC & other_NC).sum(dim=0) for other_NC in others)])


def describe(tally_RC: Tensor) -> dict[str, float]:
    """Returns the facts of a tally by name: agreement only where classes were asked for, the
    student's only where it was asked.

    Raises:
        ValueError: there is no image.
    """
    count = int(tally_RC[0].sum())
    if not count:
        raise ValueError("a tally of no image says nothing")
    facts = {}
    for name, right_C in zip(("agreement", "student"), tally_RC[1:], strict=False):
        facts[name] = int(right_C.sum()) / count
    shares = tally_RC[0].double() / count
    entropy = max(0.0, -float(torch.xlogy(shares, shares).sum()))
    classes = len(shares)
    return {
        **facts,
        "class_entropy": entropy,
        "class_entropy_share": entropy / math.log(classes) if classes > 1 else 1.0,
        "classes": int((shares > 0).sum()),
    }


def average(described: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each fact over several generators, such as the clients' own; empty for none.

    Generators that collapse to one class each are seen so; their pooled images would look diverse.
    """
    names = described[0] if described else {}
    return {name: sum(each[name] for each in described) / len(described) for name in names}


def in_words(facts: Mapping[str, float]) -> str:
    """The facts in a few words: "class entropy 0.95 of log C, 10 classes, 83.0 % as asked"."""
    parts = [
        f"class entropy {facts['class_entropy_share']:.2f} of log C",
        f"{facts['classes']:.3g} classes",
    ]
    if "agreement" in facts:
        parts.append(f"{100 * facts['agreement']:.1f} % as asked")
    if "student" in facts:
        parts.append(f"the student agrees on {100 * facts['student']:.1f} %")
    return ", ".join(parts)


def _choices(scores_NC: Tensor) -> Tensor:
    return _one_hot(scores_NC.detach().argmax(dim=1), scores_NC.shape[1])


def _one_hot(classes_N: Tensor, classes: int) -> Tensor:
    """Bool [N, C]; nothing here is read from the device, as a count of indices would be."""
    return classes_N[:, None] == torch.arange(classes, device=classes_N.device)
