"""Quality measures of generated images, based on their teacher (or ensemble); they make a
generator's collapse visible.

`tally` counts a batch's images by the class that the teacher predicts, and how many of them were
requested as that class. A tally is a small tensor, so a state or a memory can hold it, and tallies
of batches can be added. `describe` computes a round's facts from it:

- agreement: the share of images for which the teacher predicts the requested class (only
  conditional generators);
- student: the share of images for which the student, after it has learned from them, predicts the
  teacher's class (only methods that pass it to `tally`). Near 1 / C it has learned nothing,
  however good the images are: its hidden units may be dead;
- class_entropy: the entropy of the predicted classes, in nats; class_entropy_share: the entropy
  divided by log C, 1 if all classes are equally frequent;
- classes: the number of classes with at least one image.

Classes are the teacher's argmax, not its mean prediction: a batch of images that it cannot classify
has a mean prediction of high entropy and teaches nothing.

All facts are computed from the teacher, the generator and noise. They are post-processing wherever
those are released or public.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedsynth.seeding import torch_generator

GENERATOR = "generator"
"""The key of these facts in a round's metrics."""
GeneratorFacts = dict[
    Literal["agreement", "student", "class_entropy", "class_entropy_share", "classes"], float
]
"""The shape of these facts."""
TALLIED = 256
"""Images of a tally: enough that 26 equal classes are 3.2 and not 3.1 nats."""


def tally(
    scores_NC: Tensor, requested_N: Tensor | None = None, student_NC: Tensor | None = None
) -> Tensor:
    """Returns counts int64 [2, C]: the images for which the teacher predicts each class, and those
    of them that were requested as that class. With a student [3, C]: also those of the first row
    for which the student predicts that class.

    Args:
        scores_NC: the teacher's logits or probabilities of N generated images.
        requested_N: the class requested for each image; None for an unconditional generator, which
            has only the first row [1, C].
        student_NC: the student's logits, for images with requested classes.
    """
    classes = scores_NC.shape[1]
    teacher_NC = _one_hot(scores_NC.detach().argmax(dim=1), classes)
    rows = [teacher_NC.sum(dim=0)]
    if requested_N is not None:
        requested_NC = _one_hot(requested_N.to(scores_NC.device), classes)
        rows.append((teacher_NC & requested_NC).sum(dim=0))
        if student_NC is not None:
            predicted_NC = _one_hot(student_NC.detach().argmax(dim=1), classes)
            rows.append((teacher_NC & predicted_NC).sum(dim=0))
    return torch.stack(rows)


@torch.no_grad()
def generator_tally(teacher: nn.Module, generator: Any, images: int = TALLIED) -> Tensor:
    """Returns the counts of the teacher's predictions on a batch of generated images, [1, C].

    The batch is generated as in training, with batch statistics in batch norm, from noise that is
    always the same. Neither network changes, nor any random stream.

    Args:
        generator: a `synthesizer.distillation.generator.Generator`.
    """
    device = next(generator.parameters()).device
    draws = torch_generator(0, "tally of generated images", device=device)
    z = torch.randn(images, generator.latent, generator=draws, device=device)
    mode = teacher.training
    # a copy, because the pass updates the running statistics
    logits = teacher.eval()(copy.deepcopy(generator).train().normalised(z))
    teacher.train(mode)
    return tally(logits)


def describe(tally_RC: Tensor) -> dict[str, float]:
    """Returns the facts of a tally by name: "agreement" only if it counts requested classes,
    "student" only if it counts the student's.

    Raises:
        ValueError: there is no image.
    """
    count = int(tally_RC[0].sum())
    if not count:
        raise ValueError("cannot evaluate zero images")
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
    """Returns the mean of each fact over several generators, such as the clients'; empty for none.

    This reveals generators that each collapse to one class; their pooled images would look diverse.
    """
    names = described[0] if described else {}
    return {name: sum(metrics[name] for metrics in described) / len(described) for name in names}


def format_facts(facts: Mapping[str, float]) -> str:
    """Returns the facts as text: "class entropy 0.95 of log C, 10 classes, 83.0 % as requested"."""
    parts = [
        f"class entropy {facts['class_entropy_share']:.2f} of log C",
        f"{facts['classes']:.3g} classes",
    ]
    if "agreement" in facts:
        parts.append(f"{100 * facts['agreement']:.1f} % as requested")
    if "student" in facts:
        parts.append(f"the student agrees on {100 * facts['student']:.1f} %")
    return ", ".join(parts)


def _one_hot(classes_N: Tensor, classes: int) -> Tensor:
    """Returns a bool [N, C] without reading from the device, which a count of indices would do."""
    return classes_N[:, None] == torch.arange(classes, device=classes_N.device)
