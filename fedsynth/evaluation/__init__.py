"""Measures of models and generators.

This file only defines names, and does not import torch.
"""

from typing import Literal, NamedTuple

# The measures of a classifier apart from its accuracy (`classification_measures`).
MEASURES = ("balanced_accuracy", "auroc", "f1", "calibration_error")


class Names(NamedTuple):
    """The metric names of a task, such as `test_accuracy`.

    Attributes:
        test: the measure of the model on the test set.
        common: the same for the common model, if each client ends with a personal one.
        domains: the measure on each domain of the test set.
        clients: the measure on each client's own test split.
    """

    test: str
    common: str
    domains: str
    clients: str


# The names by task. In segmentation, the measure is the mean Dice coefficient of the test images.
NAMES = {
    "classification": Names(
        "test_accuracy", "common_model_accuracy", "domain_accuracy", "client_accuracy"
    ),
    "segmentation": Names("test_dice", "common_model_dice", "domain_dice", "client_dice"),
}
TEST_KEYS = tuple(names.test for names in NAMES.values())
# The measures that a run computes only on request (`RunSettings.measures`, `evaluation.optional`).
CLIENT_MODELS = "client_model_accuracy"
NMI, SILHOUETTE = FEATURE_SPACE = ("nmi", "silhouette")
DISSIMILARITY = "dissimilarity"
OPTIONAL = (CLIENT_MODELS, *FEATURE_SPACE, DISSIMILARITY)
GENERATOR = "generator"  # the key of a generator's measures in the metrics of a round
EPOCHS = "accuracy_by_epoch"  # the key of a student's accuracy after each epoch on the server
# The type of the dictionary that `generated.describe` returns.
GeneratorFacts = dict[
    Literal["agreement", "student", "class_entropy", "class_entropy_share", "classes"], float
]
