"""fedsynth: private dataset condensation and data-free distillation for federated learning.

The names below are loaded when first used, so that importing fedsynth does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedsynth.version import __version__

if TYPE_CHECKING:
    from fedsynth.core.context import RoundContext
    from fedsynth.core.messages import Message, ModelParameters
    from fedsynth.core.method import Method
    from fedsynth.core.state import ServerState
    from fedsynth.data.images import ImageData, from_arrays
    from fedsynth.data.load import load_dataset
    from fedsynth.data.partition import PartitionSettings
    from fedsynth.data.registry import DatasetSpec
    from fedsynth.federation.observer import Observer
    from fedsynth.federation.result import RunResult
    from fedsynth.federation.settings import RunSettings, resolve
    from fedsynth.federation.simulation import simulate
    from fedsynth.methods.dense import Dense
    from fedsynth.methods.fedaf import FedAF
    from fedsynth.methods.fedavg import FedAvg
    from fedsynth.methods.fedavgm import FedAvgM
    from fedsynth.methods.fedbn import FedBN
    from fedsynth.methods.feddf import FedDF
    from fedsynth.methods.feddm import FedDM
    from fedsynth.methods.feddyn import FedDyn
    from fedsynth.methods.fedfa_plus import FedFAPlus
    from fedsynth.methods.fedfm import FedFM, FedFMLite
    from fedsynth.methods.fedgen import FedGen
    from fedsynth.methods.fedgkd import FedGKD
    from fedsynth.methods.fedhydra import FedHydra
    from fedsynth.methods.fedkf import FedKF
    from fedsynth.methods.fednova import FedNova
    from fedsynth.methods.fedprox import FedProx
    from fedsynth.methods.moon import Moon
    from fedsynth.methods.qffl import QFFL
    from fedsynth.methods.real import Real
    from fedsynth.methods.scaffold import Scaffold
    from fedsynth.methods.shared.local import Task, TrainsLocally
    from fedsynth.methods.solo import Solo
    from fedsynth.models.registry import ModelSettings
    from fedsynth.privacy.settings import PrivacySettings
    from fedsynth.synthesizer.generation.one_teacher import DataFreeDistiller

_HOMES = {
    "DataFreeDistiller": "fedsynth.synthesizer.generation.one_teacher",
    "DatasetSpec": "fedsynth.data.registry",
    "Dense": "fedsynth.methods.dense",
    "FedAF": "fedsynth.methods.fedaf",
    "FedAvg": "fedsynth.methods.fedavg",
    "FedAvgM": "fedsynth.methods.fedavgm",
    "FedBN": "fedsynth.methods.fedbn",
    "FedDF": "fedsynth.methods.feddf",
    "FedDM": "fedsynth.methods.feddm",
    "FedDyn": "fedsynth.methods.feddyn",
    "FedFAPlus": "fedsynth.methods.fedfa_plus",
    "FedFM": "fedsynth.methods.fedfm",
    "FedFMLite": "fedsynth.methods.fedfm",
    "FedGKD": "fedsynth.methods.fedgkd",
    "FedGen": "fedsynth.methods.fedgen",
    "FedHydra": "fedsynth.methods.fedhydra",
    "FedKF": "fedsynth.methods.fedkf",
    "FedNova": "fedsynth.methods.fednova",
    "FedProx": "fedsynth.methods.fedprox",
    "ImageData": "fedsynth.data.images",
    "Message": "fedsynth.core.messages",
    "Method": "fedsynth.core.method",
    "ModelParameters": "fedsynth.core.messages",
    "ModelSettings": "fedsynth.models.registry",
    "Moon": "fedsynth.methods.moon",
    "Observer": "fedsynth.federation.observer",
    "PartitionSettings": "fedsynth.data.partition",
    "PrivacySettings": "fedsynth.privacy.settings",
    "QFFL": "fedsynth.methods.qffl",
    "Real": "fedsynth.methods.real",
    "RoundContext": "fedsynth.core.context",
    "RunResult": "fedsynth.federation.result",
    "RunSettings": "fedsynth.federation.settings",
    "Scaffold": "fedsynth.methods.scaffold",
    "ServerState": "fedsynth.core.state",
    "Solo": "fedsynth.methods.solo",
    "Task": "fedsynth.methods.shared.local",
    "TrainsLocally": "fedsynth.methods.shared.local",
    "from_arrays": "fedsynth.data.images",
    "load_dataset": "fedsynth.data.load",
    "resolve": "fedsynth.federation.settings",
    "simulate": "fedsynth.federation.simulation",
}

__all__ = [
    "QFFL",
    "DataFreeDistiller",
    "DatasetSpec",
    "Dense",
    "FedAF",
    "FedAvg",
    "FedAvgM",
    "FedBN",
    "FedDF",
    "FedDM",
    "FedDyn",
    "FedFAPlus",
    "FedFM",
    "FedFMLite",
    "FedGKD",
    "FedGen",
    "FedHydra",
    "FedKF",
    "FedNova",
    "FedProx",
    "ImageData",
    "Message",
    "Method",
    "ModelParameters",
    "ModelSettings",
    "Moon",
    "Observer",
    "PartitionSettings",
    "PrivacySettings",
    "Real",
    "RoundContext",
    "RunResult",
    "RunSettings",
    "Scaffold",
    "ServerState",
    "Solo",
    "Task",
    "TrainsLocally",
    "__version__",
    "from_arrays",
    "load_dataset",
    "resolve",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedsynth' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
