"""The public API for code that defines custom methods.

The API is as stable as that of `fedsynth`.

>>> import torch
>>> from fedsynth.methods.kit import ModelParameters, average
>>> models = {client: ModelParameters({"w": torch.tensor([float(client)])}, 1.0) for client in (1, 2)}
>>> average(models)
{'w': tensor([1.5000])}

Settings (`in_range`, `one_of`), messages and the privacy labels of their fields, states, the
private sums of class vectors, aggregation, training, and the parts of experiments on synthetic
data. Each name is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsynth._lazy_import import lazy_exports

if TYPE_CHECKING:
    from fedsynth.core.capabilities import Measurements as Measurements
    from fedsynth.core.capabilities import TwoExchanges as TwoExchanges
    from fedsynth.core.client import Group as Group
    from fedsynth.core.context import RoundContext as RoundContext
    from fedsynth.core.context import ServerState as ServerState
    from fedsynth.core.messages import Message as Message
    from fedsynth.core.messages import ModelParameters as ModelParameters
    from fedsynth.core.messages import public as public
    from fedsynth.core.messages import released as released
    from fedsynth.core.messages import unprotected as unprotected
    from fedsynth.core.method import ClientState as ClientState
    from fedsynth.core.method import Method as Method
    from fedsynth.core.method import Results as Results
    from fedsynth.data.images import normalise as normalise
    from fedsynth.data.partition import partition as partition
    from fedsynth.data.registry import custom_spec as custom_spec
    from fedsynth.data.registry import dataset_spec as dataset_spec
    from fedsynth.data.text import LETTERS as LETTERS
    from fedsynth.data.text import PLAYS as PLAYS
    from fedsynth.data.text import leaf_form as leaf_form
    from fedsynth.evaluation.accuracy import accuracy as accuracy
    from fedsynth.evaluation.generated import format_facts as format_facts
    from fedsynth.features.public_statistics import measured_map as measured_map
    from fedsynth.features.public_statistics import normalised_map as normalised_map
    from fedsynth.methods.shared.aggregation import AveragingState as AveragingState
    from fedsynth.methods.shared.aggregation import average as average
    from fedsynth.methods.shared.class_sums import class_means as class_means
    from fedsynth.methods.shared.class_sums import feature_width as feature_width
    from fedsynth.methods.shared.class_sums import sums_plans as sums_plans
    from fedsynth.methods.shared.condensing import CondensingMethod as CondensingMethod
    from fedsynth.methods.shared.local import LocalObjective as LocalObjective
    from fedsynth.methods.shared.local import TrainsLocally as TrainsLocally
    from fedsynth.models.convnet import ConvNet as ConvNet
    from fedsynth.models.flat import flatten as flatten
    from fedsynth.models.registry import build_model as build_model
    from fedsynth.privacy.plans import MAIN as MAIN
    from fedsynth.privacy.plans import ReleasePlan as ReleasePlan
    from fedsynth.seeding import torch_generator as torch_generator
    from fedsynth.synthesizer.condensation.losses import (
        average_over_holders as average_over_holders,
    )
    from fedsynth.synthesizer.condensation.sets import SyntheticSet as SyntheticSet
    from fedsynth.synthesizer.condensation.sets import train_on_union as train_on_union
    from fedsynth.synthesizer.distillation.stratification import (
        share_of_clients as share_of_clients,
    )
    from fedsynth.training.sgd import Loss as Loss
    from fedsynth.training.sgd import MomentumSgd as MomentumSgd
    from fedsynth.training.sgd import SgdSettings as SgdSettings
    from fedsynth.training.sgd import train_on as train_on
    from fedsynth.validation import in_range as in_range
    from fedsynth.validation import one_of as one_of
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
