"""Measures of models and of generators. Reading their names here imports no torch."""

from typing import Literal

# The measures of a classifier apart from its accuracy (`classification_measures`).
MEASURES = ("balanced_accuracy", "auroc", "f1", "calibration_error")
GENERATOR = "generator"  # the key of a generator's measures in the metrics of a round
# The type of the dictionary that `generated.describe` returns.
GeneratorFacts = dict[
    Literal["agreement", "student", "class_entropy", "class_entropy_share", "classes"], float
]
