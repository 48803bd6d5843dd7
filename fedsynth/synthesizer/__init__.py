"""Methods that make synthetic data, for custom pipelines (`examples/custom_pipeline.py`).

They cover condensation of clients' images, generators trained without data, and stratified
aggregation of several models' logits. Each name below is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsynth._lazy_import import lazy_exports

if TYPE_CHECKING:
    from fedsynth.synthesizer.condensation.student import StudentSettings as StudentSettings
    from fedsynth.synthesizer.condensation.student import train_student as train_student
    from fedsynth.synthesizer.distillation.data_free import DataFreeDistiller as DataFreeDistiller
    from fedsynth.synthesizer.distillation.ensemble import (
        OneShotDistillation as OneShotDistillation,
    )
    from fedsynth.synthesizer.distillation.ensemble import OneShotSettings as OneShotSettings
    from fedsynth.synthesizer.distillation.ensemble import average_of_logits as average_of_logits
    from fedsynth.synthesizer.distillation.generator import Generator as Generator
    from fedsynth.synthesizer.distillation.generator import make_generator as make_generator
    from fedsynth.synthesizer.distillation.losses import activation_loss as activation_loss
    from fedsynth.synthesizer.distillation.losses import distillation_loss as distillation_loss
    from fedsynth.synthesizer.distillation.losses import (
        information_entropy_loss as information_entropy_loss,
    )
    from fedsynth.synthesizer.distillation.losses import one_hot_loss as one_hot_loss
    from fedsynth.synthesizer.distillation.stratification import guidance as guidance
    from fedsynth.synthesizer.distillation.stratification import pair_losses as pair_losses
    from fedsynth.synthesizer.distillation.stratification import (
        stratified_aggregation as stratified_aggregation,
    )
    from fedsynth.synthesizer.distillation.stratification import (
        stratified_weights as stratified_weights,
    )
    from fedsynth.synthesizer.pipeline import FeatureMatching as FeatureMatching
    from fedsynth.synthesizer.pipeline import GradientMatching as GradientMatching
    from fedsynth.synthesizer.pipeline import ResidualMatching as ResidualMatching
    from fedsynth.synthesizer.pipeline import SyntheticRecords as SyntheticRecords
    from fedsynth.synthesizer.pipeline import condense as condense
    from fedsynth.synthesizer.pipeline import mean_distance as mean_distance
    from fedsynth.synthesizer.pipeline import sliced_wasserstein as sliced_wasserstein
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
