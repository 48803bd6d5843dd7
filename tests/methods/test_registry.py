"""The registry lists all methods; names, `import fedsynth`, type checkers and presets follow it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedsynth
from fedsynth._lazy_import import exported_names
from fedsynth.config.resolve import resolve
from fedsynth.core.method import Method
from fedsynth.methods import CLASSES, METHODS, method_class, name_of

PACKAGE = Path(fedsynth.__file__).parent


def test_registered_names_match_the_classes() -> None:
    for name in METHODS:
        cls = method_class(name)
        assert cls.name == name == name_of(cls.__name__)
        assert issubclass(cls, Method)
        assert cls.__module__ == CLASSES[cls.__name__]
        assert getattr(fedsynth, cls.__name__) is cls
        assert cls.__name__ in fedsynth.__all__
    files = {p.stem for p in (PACKAGE / "methods").glob("*.py")} - {"__init__", "registry"}
    assert {module.rpartition(".")[2] for module in CLASSES.values()} == files


def test_exports_equal_the_names_of_type_checkers(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        "import os as os\nfrom a import B\nfrom c.d import E as E\nfrom f import G as H\n"
        "if True:\n    from i import J as J, k as k\nfrom . import L as L\n"
    )
    assert exported_names(file) == {"E": "c.d", "J": "i", "k": "i"}
    exports = exported_names(PACKAGE / "__init__.py")
    assert set(fedsynth.__all__) == set(exports) | set(CLASSES)
    assert {"RunSettings", "simulate", "__version__"} <= set(exports)
    for name in fedsynth.__all__:
        assert getattr(fedsynth, name) is not None


def test_presets_extend_those_of_base_classes() -> None:
    feddf = {"server_steps": 300, "local_epochs": 20, "batch": 32}
    presets = {"fedkf": {"lr": 0.2, "batch": 32}, "feddf": feddf, "fedaf": {"server_epochs": 60}}
    for name, expected in presets.items():
        values = resolve({"run": {"method": name}}).to_mapping()["method"]
        assert expected.items() <= values.items()


PAPERS: dict[str, dict[str, Any]] = {
    "feddm": {  # Secs. 4.1 and App. D.3
        "ipc": 10, "iterations": 1000, "image_lr": 1.0, "image_momentum": 0.0, "batch": 256,
        "radius": 5.0, "server_epochs": 500, "server_batch": 256, "server_lr": 0.01,
        "min_examples": 10, "restart": False, "perturbation": "sphere", "augment": "none",
        "small_class": "all", "logit_weight": 1.0,
    },
    "fedaf": {
        "ipc": 50, "iterations": 1000, "batch": 256, "image_lr": 1.0, "image_momentum": 0.9,
        "gamma": 0.9, "local_weight": 1e-4, "global_weight": 1e-2, "server_epochs": 500,
        "server_batch": 256, "server_lr": 1e-3,
    },
    "fedkf": {
        "local_epochs": 10, "batch": 64, "lr": 0.01, "distillation": 1.0, "one_hot_weight": 0.1,
        "activation_weight": 0.1, "generator_lr": 1e-3, "teacher": "oca", "final": "oca",
    },
    "fedhydra": {
        "local_epochs": 200, "batch": 128, "lr": 0.01, "bn_weight": 1.0, "ad_weight": 0.5,
        "generator_lr": 1e-3, "generator_steps": 30, "server_epochs": 200, "server_lr": 0.01,
        "stratification_steps": 30, "stratification_batch": 32, "stratification_lr": 0.01,
        "student_images": "all", "replay": False, "generator_reset": False, "learn_noise": False,
        "flips": False, "crop": 0, "generator_beta1": 0.9,
    },
    "dense": {
        "only_disagreement": True, "hard_weight": 0, "student_images": "best", "replay": True,
        "generator_reset": True, "learn_noise": True, "flips": True, "crop": 0.125,
        "generator_beta1": 0.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PAPERS)
def test_defaults_equal_the_papers(name: str) -> None:
    method = method_class(name)()
    assert {setting: getattr(method, setting) for setting in PAPERS[name]} == PAPERS[name]
