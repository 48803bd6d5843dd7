"""Measures the quality of generated images, to show whether a generator has collapsed.

The measures are based on a teacher, which may be an ensemble. `tally` counts the images of a batch
by the class that the teacher predicts, and counts how many of these images were requested as that
class. A tally is a small tensor, so a method can store it in its state, and can add the tallies of
several batches. `describe` computes these measures from a tally:

- agreement: the share of images for which the teacher predicts the requested class. Only
  methods that request classes have this measure.
- student: the share of images for which the student predicts the teacher's class after training on
  them. Only methods that pass the student's logits to `tally` have this measure. If the value is
  near 1/C, the student has learned nothing, however good the images are; its hidden units may be
  dead.
- class_entropy: the entropy of the predicted classes, in nats.
- class_entropy_share: the entropy divided by log C, which is 1 if all classes are equally frequent.
- classes: the number of classes with at least one image.

The class of an image is the argmax of the teacher's prediction. The mean prediction over a batch
would not show a collapse: if the teacher cannot classify the images, their mean prediction has a
high entropy, although the images teach nothing.

All measures are computed from the teacher, the generator and noise. They are post-processing if the
teacher and the generator are released or public.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth.seeding import torch_generator

# Number of images in a tally. With 256 images, the entropy of 26 equally frequent classes is
# underestimated by only about 0.05 nats.
TALLIED = 256


def tally(
    scores_NC: Tensor, requested_N: Tensor | None = None, student_NC: Tensor | None = None
) -> Tensor:
    """Counts generated images by the class that the teacher predicts.

    Args:
        scores_NC: the teacher's logits or probabilities for N generated images.
        requested_N: the class that was requested for each image, or None if no classes were
            requested.
        student_NC: the student's logits, which are used only if `requested_N` is given.

    Returns:
        An int64 tensor of one to three rows and C columns. The first row counts all images by the
        class that the teacher predicts. The second row, which needs `requested_N`, counts the
            images of the first row that were requested as the predicted class. The third row, which
            needs `student_NC`, counts the images of the first row for which the student predicts
            the same class.
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
    """Generates a batch of images, and counts the teacher's predictions by class.

    The result is a tally of shape [1, C].

    The images are generated in training mode, so batch norm uses the statistics of the batch. The
    noise is the same in every call. The call changes neither of the two networks, nor the state of
    any random generator.

    Args:
        teacher: a classifier of normalised images.
        generator: a `synthesizer.distillation.generator.Generator`.
        images: number of images to generate.
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
    """Computes quality measures of generated images from counts of predicted classes.

    The result contains "agreement" only if the tally counts requested classes, and "student" only
    if the tally counts the student's predictions.

    Raises:
        ValueError: the tally contains no image.
    """
    count = int(tally_RC[0].sum())
    if not count:
        raise ValueError(
            "the tally must count at least one generated image, got 0. Generate images first"
        )
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
    """Returns the mean of each measure over several generators, such as those of the clients.

    Averaging the measures reveals generators that have each collapsed to a single class, whereas
    their pooled images would look diverse. The result is empty if there is no generator.
    """
    names = next(iter(described), {})
    return {name: sum(metrics[name] for metrics in described) / len(described) for name in names}


def format_facts(facts: Mapping[str, float]) -> str:
    """Formats quality measures as text.

    An example is "class entropy 0.95 of log C, 10 classes, 83.0 % as requested".
    """
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
    """Returns the one-hot encoding of class labels as a boolean tensor [N, C].

    The comparison does not wait for the device, unlike `torch.nn.functional.one_hot`.
    """
    return classes_N[:, None] == torch.arange(classes, device=classes_N.device)
