"""Classification measures other than accuracy, computed from a classifier's logits.

The values equal torchmetrics' (whose import takes seconds), except that a confidence of 1 is in the
last bin of the calibration error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsynth.evaluation import MEASURES

# The names of the measures, in the order of `classification_measures`.
# The number of bins of the calibration error, as in Guo et al. 2017.
CALIBRATION_BINS = 15


def classification_measures(logits_NC: Tensor, labels_N: Tensor) -> dict[str, float | None]:
    """Computes measures of a classifier from its logits.

    Args:
        logits_NC: the logits [N, C] of N ≥ 1 examples.
        labels_N: the true classes [N], integers in [0, C).

    Returns:
        The measures by name, each in [0, 1]:

        - `balanced_accuracy`, the mean recall of the classes that have examples;
        - `auroc`, the mean area under the ROC curve of these classes, each against all others;
        - `f1`, the mean F1 score of the classes that have examples or are predicted;
        - `calibration_error`, the expected calibration error of the predicted class (Guo et al.
          2017, arXiv 1706.04599, Eq. 3), with 15 bins.

        `auroc` is None if all examples have the same class. `auroc` and `calibration_error` are
        None if C = 1, or if a logit is NaN or infinite.

    >>> logits = torch.tensor([[2.0, 0.0], [0.5, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> measures = classification_measures(logits, torch.tensor([0, 0, 1, 1]))
    >>> round(measures["balanced_accuracy"], 3), round(measures["auroc"], 3)
    (0.75, 0.75)
    """
    classes = logits_NC.shape[1]
    measures = dict.fromkeys(MEASURES) | rates(confusion_matrix(logits_NC, labels_N))
    if classes == 1 or not bool(logits_NC.isfinite().all()):
        return measures
    # float64, so that confident predictions do not tie at a probability of 1
    probabilities = logits_NC.double().softmax(dim=1)
    present = labels_N.unique().tolist()
    if len(present) > 1:
        areas = [_auroc(probabilities[:, label], labels_N == label) for label in present]
        measures["auroc"] = sum(areas) / len(areas)
    measures["calibration_error"] = _calibration_error(probabilities, labels_N)
    return measures


def _auroc(scores_N: Tensor, positive_N: Tensor) -> float:
    """Returns the Mann–Whitney statistic: the share of (positive, negative) pairs in which the
    positive example has the higher score. Ties count one half.
    """
    _, group_N, counts = scores_N.unique(return_inverse=True, return_counts=True)
    mean_ranks = counts.cumsum(0) - (counts - 1) / 2
    positives = int(positive_N.sum())
    rank_sum = float(mean_ranks.double()[group_N][positive_N].sum())
    pairs = positives * (len(scores_N) - positives)
    return (rank_sum - positives * (positives + 1) / 2) / pairs


def _calibration_error(probabilities_NC: Tensor, labels_N: Tensor) -> float:
    confidence, predicted = probabilities_NC.max(dim=1)
    bounds = torch.arange(CALIBRATION_BINS + 1).to(confidence) / CALIBRATION_BINS
    bins = torch.bucketize(confidence, bounds)  # as in Guo et al., a bin has its upper bound
    gaps = (predicted == labels_N).double() - confidence
    sums = torch.zeros(len(bounds) + 1, dtype=gaps.dtype, device=gaps.device)
    return float(sums.index_add_(0, bins, gaps).abs().sum()) / len(labels_N)


def rates(matrix: list[list[int]]) -> dict[str, float | None]:
    """Computes the balanced accuracy and the F1 score from a confusion matrix.

    >>> rates([[2, 0], [1, 1]])["balanced_accuracy"]
    0.75
    """
    counts_CC = torch.tensor(matrix, dtype=torch.float64)
    correct = counts_CC.diagonal()
    true, predicted = counts_CC.sum(dim=1), counts_CC.sum(dim=0)
    recall = (correct / true)[true > 0]
    f1 = (2 * correct / (true + predicted))[true + predicted > 0]
    return {"balanced_accuracy": float(recall.mean()), "f1": float(f1.mean())}


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
