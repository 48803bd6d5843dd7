"""Measures of a classifier other than accuracy, computed by torchmetrics from its logits."""

from __future__ import annotations

import torch
from torch import Tensor

MEASURES = ("balanced_accuracy", "auroc", "f1", "calibration_error")
"""The names of the measures, in the order of `classification_measures`."""
CALIBRATION_BINS = 15
"""The number of bins of the calibration error, as in Guo et al. 2017."""


def classification_measures(logits_NC: Tensor, labels_N: Tensor) -> dict[str, float | None]:
    """Computes measures of a classifier that do not depend on the class frequencies alone.

    Args:
        logits_NC: the logits [N, C] of N ≥ 1 examples.
        labels_N: the true classes [N], integers in [0, C).

    Returns:
        The measures by name, each in [0, 1]:

        - `balanced_accuracy`, the mean recall of the classes that have examples;
        - `auroc`, the mean area under the ROC curve of these classes, each against all others, or
          None if all examples have the same class;
        - `f1`, the mean F1 score of the classes that have examples or are predicted;
        - `calibration_error`, the expected calibration error of the predicted class (Guo et al.
          2017, arXiv 1706.04599, Eq. 3), with 15 bins.

    >>> logits = torch.tensor([[2.0, 0.0], [0.5, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> measures = classification_measures(logits, torch.tensor([0, 0, 1, 1]))
    >>> round(measures["balanced_accuracy"], 3), round(measures["auroc"], 3)
    (0.75, 0.75)
    """
    from torchmetrics.functional import classification as functional

    classes = logits_NC.shape[1]
    # float64, so that confident predictions do not tie at a probability of 1
    probabilities = logits_NC.double().softmax(dim=1)
    present = torch.bincount(labels_N, minlength=classes) > 0
    recall = functional.multiclass_accuracy(probabilities, labels_N, classes, average=None)
    auroc = None
    if int(present.sum()) > 1:
        areas = []
        for label in present.nonzero().flatten().tolist():
            is_label = (labels_N == label).long()
            areas.append(functional.binary_auroc(probabilities[:, label], is_label))
        auroc = float(torch.stack(areas).mean())
    f1 = functional.multiclass_f1_score(probabilities, labels_N, classes, average="macro")
    error = functional.multiclass_calibration_error(
        probabilities, labels_N, classes, n_bins=CALIBRATION_BINS
    )
    balanced = float(recall[present].mean())
    return dict(zip(MEASURES, (balanced, auroc, float(f1), float(error)), strict=True))


def confusion_matrix(logits_NC: Tensor, labels_N: Tensor) -> list[list[int]]:
    """Counts the examples of each true class (row) and predicted class (column).

    >>> confusion_matrix(torch.tensor([[2.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
    [[1, 0], [1, 0]]
    """
    classes = logits_NC.shape[1]
    pairs = labels_N * classes + logits_NC.argmax(dim=1)
    counts = torch.bincount(pairs, minlength=classes**2)
    matrix: list[list[int]] = counts.view(classes, classes).tolist()
    return matrix
