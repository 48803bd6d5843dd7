"""fedsynth: private dataset condensation and data-free distillation for federated learning.

>>> from fedsynth import resolve, simulate
>>> run, model = {"method": "feddm", "rounds": 1}, {"width": 8}
>>> result = simulate(resolve({"run": run, "model": model, "privacy": {"epsilon": 8}}))
>>> result.privacy["guarantee"]["epsilon"] <= 8
True

The names below are loaded at first use, so that importing fedsynth does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsynth._lazy_import import lazy_exports
from fedsynth.methods import CLASSES
from fedsynth.version import __version__ as __version__

if TYPE_CHECKING:
    from fedsynth.config.resolve import resolve as resolve
    from fedsynth.config.settings import RunSettings as RunSettings
    from fedsynth.core.context import RoundContext as RoundContext
    from fedsynth.core.context import ServerState as ServerState
    from fedsynth.core.messages import Message as Message
    from fedsynth.core.messages import ModelParameters as ModelParameters
    from fedsynth.core.method import Method as Method
    from fedsynth.data.declaration import FolderSettings as FolderSettings
    from fedsynth.data.images import ImageData as ImageData
    from fedsynth.data.images import from_arrays as from_arrays
    from fedsynth.data.load import load_dataset as load_dataset
    from fedsynth.data.own_data import OwnerData as OwnerData
    from fedsynth.data.own_data import load_records as load_records
    from fedsynth.data.partition_settings import PartitionSettings as PartitionSettings
    from fedsynth.data.registry import DatasetSpec as DatasetSpec
    from fedsynth.data.shared_set import SharedSet as SharedSet
    from fedsynth.data.shared_set import load_synthetic as load_synthetic
    from fedsynth.experiments.presets import load_preset as load_preset
    from fedsynth.features.encoding import EncoderSettings as EncoderSettings
    from fedsynth.federation.protocol import Observer as Observer
    from fedsynth.methods import register_method as register_method
    from fedsynth.methods.registry import *  # noqa: F403
    from fedsynth.methods.shared.condensing import CondensingMethod as CondensingMethod
    from fedsynth.methods.shared.local import LocalObjective as LocalObjective
    from fedsynth.methods.shared.local import TrainsLocally as TrainsLocally
    from fedsynth.models.registry import ModelSettings as ModelSettings
    from fedsynth.models.registry import register_model as register_model
    from fedsynth.privacy.settings import PrivacySettings as PrivacySettings
    from fedsynth.results.run_record import RunResult as RunResult
    from fedsynth.results.saved_model import load_model as load_model
    from fedsynth.sharing.export import export_run as export_run
    from fedsynth.sharing.fidelity import RealImages as RealImages
    from fedsynth.sharing.fidelity import fidelity_of_set as fidelity_of_set
    from fedsynth.sharing.onnx_export import export_onnx as export_onnx
    from fedsynth.sharing.student import student_of_set as student_of_set
    from fedsynth.simulation.simulate import owner_settings as owner_settings
    from fedsynth.simulation.simulate import simulate as simulate
    from fedsynth.simulation.simulate import synthesize as synthesize
    from fedsynth.synthesizer.condensation.student import StudentSettings as StudentSettings
    from fedsynth.synthesizer.condensation.student import train_student as train_student
    from fedsynth.synthesizer.distillation.data_free import DataFreeDistiller as DataFreeDistiller
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__, __file__, CLASSES)
