"""Synthetic data: condensation of clients' images, data-free generators, and stratified aggregation
of several models' logits.

The names below are for custom pipelines (`examples/custom_pipeline.py`). Each name is imported on
first use.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsynth.lazily import homes

if TYPE_CHECKING:
    from fedsynth.synthesizer.condensation.loop import condense as condense
    from fedsynth.synthesizer.condensation.matchers import ExactMatcher as ExactMatcher
    from fedsynth.synthesizer.condensation.matchers import GradientMatcher as GradientMatcher
    from fedsynth.synthesizer.condensation.matchers import ResidualMatcher as ResidualMatcher
    from fedsynth.synthesizer.condensation.sets import SyntheticSet as SyntheticSet
    from fedsynth.synthesizer.condensation.sets import train_on_union as train_on_union
    from fedsynth.synthesizer.generation.ensembles import Stratification as Stratification
    from fedsynth.synthesizer.generation.ensembles import average_of_logits as average_of_logits
    from fedsynth.synthesizer.generation.ensembles import (
        stratified_aggregation as stratified_aggregation,
    )
    from fedsynth.synthesizer.generation.ensembles import stratified_weights as stratified_weights
    from fedsynth.synthesizer.generation.generators import Generator as Generator
    from fedsynth.synthesizer.generation.generators import make_generator as make_generator
    from fedsynth.synthesizer.generation.many_teachers import (
        OneShotDistillation as OneShotDistillation,
    )
    from fedsynth.synthesizer.generation.one_teacher import DataFreeDistiller as DataFreeDistiller
else:
    _HOMES = homes(Path(__file__))
    __all__ = sorted(_HOMES)

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'fedsynth.synthesizer' has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        return __all__
