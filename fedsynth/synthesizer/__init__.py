"""Synthetic data: condensation of clients' images, data-free generators, and stratified aggregation
of several models' logits.

The names below are for custom pipelines (`examples/custom_pipeline.py`). Each name is imported on
first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsynth._lazy_import import lazy_exports

if TYPE_CHECKING:
    from fedsynth.synthesizer.condensation.student import StudentSettings as StudentSettings
    from fedsynth.synthesizer.condensation.student import train_student as train_student
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
    from fedsynth.synthesizer.pipeline import FeatureMatching as FeatureMatching
    from fedsynth.synthesizer.pipeline import GradientMatching as GradientMatching
    from fedsynth.synthesizer.pipeline import ResidualMatching as ResidualMatching
    from fedsynth.synthesizer.pipeline import SyntheticRecords as SyntheticRecords
    from fedsynth.synthesizer.pipeline import condense as condense
    from fedsynth.synthesizer.pipeline import mean_distance as mean_distance
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
