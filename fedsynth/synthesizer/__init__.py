"""Making synthetic data: condensation of clients' images, data-free generators, and stratified
aggregation of what several models say.

The names below are for pipelines of one's own (`examples/custom_pipeline.py`); they are loaded when
first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsynth.synthesizer.condensation.loop import condense
    from fedsynth.synthesizer.condensation.matchers import (
        ExactMatcher,
        GradientMatcher,
        ResidualMatcher,
    )
    from fedsynth.synthesizer.condensation.sets import SyntheticSet, train_on_union
    from fedsynth.synthesizer.generation.ensembles import (
        Stratification,
        average_of_logits,
        stratified_aggregation,
        stratified_weights,
    )
    from fedsynth.synthesizer.generation.generators import Generator, make_generator
    from fedsynth.synthesizer.generation.many_teachers import OneShotDistillation
    from fedsynth.synthesizer.generation.one_teacher import DataFreeDistiller

_HOMES = {
    "DataFreeDistiller": "generation.one_teacher",
    "ExactMatcher": "condensation.matchers",
    "Generator": "generation.generators",
    "GradientMatcher": "condensation.matchers",
    "OneShotDistillation": "generation.many_teachers",
    "ResidualMatcher": "condensation.matchers",
    "Stratification": "generation.ensembles",
    "SyntheticSet": "condensation.sets",
    "average_of_logits": "generation.ensembles",
    "condense": "condensation.loop",
    "make_generator": "generation.generators",
    "stratified_aggregation": "generation.ensembles",
    "stratified_weights": "generation.ensembles",
    "train_on_union": "condensation.sets",
}

__all__ = [
    "DataFreeDistiller",
    "ExactMatcher",
    "Generator",
    "GradientMatcher",
    "OneShotDistillation",
    "ResidualMatcher",
    "Stratification",
    "SyntheticSet",
    "average_of_logits",
    "condense",
    "make_generator",
    "stratified_aggregation",
    "stratified_weights",
    "train_on_union",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedsynth.synthesizer' has no attribute {name!r}")
    return getattr(import_module(f"fedsynth.synthesizer.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
