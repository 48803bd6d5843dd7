"""Methods by name. The registry holds strings, so that listing methods imports neither torch nor any method."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedsynth.errors import unknown_name

if TYPE_CHECKING:
    from fedsynth.core.method import Method

METHODS = {
    "feddm": "fedsynth.methods.feddm:FedDM",
    "fedaf": "fedsynth.methods.fedaf:FedAF",
    "fedavg": "fedsynth.methods.fedavg:FedAvg",
    "fedavgm": "fedsynth.methods.fedavgm:FedAvgM",
    "fedbn": "fedsynth.methods.fedbn:FedBN",
    "feddyn": "fedsynth.methods.feddyn:FedDyn",
    "fedfm": "fedsynth.methods.fedfm:FedFM",
    "fedfm-lite": "fedsynth.methods.fedfm:FedFMLite",
    "fedgen": "fedsynth.methods.fedgen:FedGen",
    "fedfa-plus": "fedsynth.methods.fedfa_plus:FedFAPlus",
    "fedgkd": "fedsynth.methods.fedgkd:FedGKD",
    "fednova": "fedsynth.methods.fednova:FedNova",
    "fedprox": "fedsynth.methods.fedprox:FedProx",
    "moon": "fedsynth.methods.moon:Moon",
    "qffl": "fedsynth.methods.qffl:QFFL",
    "scaffold": "fedsynth.methods.scaffold:Scaffold",
    "solo": "fedsynth.methods.solo:Solo",
    "dense": "fedsynth.methods.dense:Dense",
    "feddf": "fedsynth.methods.feddf:FedDF",
    "fedhydra": "fedsynth.methods.fedhydra:FedHydra",
    "fedkf": "fedsynth.methods.fedkf:FedKF",
    "real": "fedsynth.methods.real:Real",
}


def method_class(name: str) -> type[Method]:
    """The class of a registered method, whose name may be in any case.

    Raises:
        UnknownNameError: no such method; names the near matches.
    """
    name = name.lower()
    if name not in METHODS:
        raise unknown_name("method", name, METHODS, "run", "method")
    module, _, attribute = METHODS[name].partition(":")
    found: Any = getattr(import_module(module), attribute)
    return found  # type: ignore[no-any-return]
