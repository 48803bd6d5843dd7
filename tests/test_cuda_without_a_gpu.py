"""Every method on a pretended GPU (`tests/fake_cuda.py`): no operation mixes devices, the numbers
are the CPU's, and nothing waits for the device in the loops that promise it (`LOOPS`).

A new method is found by its line in the registry. A wait that a loop needs gets a line in
`IN_LOOPS`, with its reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth.methods import METHODS, method_class
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.training import sgd as cuda_graphs
from fedsynth.training.sgd import MomentumSgd, SgdSettings, train_on
from tests.digits import SPEC, digits
from tests.fake_cuda import CUDA, PACKAGE, CaptureError, DeviceMixError, Wait, pretended_gpu
from tests.families import FAMILIES, by_family
from tests.simulation import test_unchanged as recorded

MOVED = 1e-4
"""How far a number may be from the CPU's, as a share of its scale: on a GPU passes have other
lengths, and so another rounding."""

LOOPS = tuple((file, function) for file, functions in {
    "synthesizer/condensation/matching.py": "NetworkFeatures.use ExactMatcher.gradient "
    "matching_gradient pull_back",
    "synthesizer/condensation/losses.py": "DistributionMatcher.gradient logits_gradient",
    "synthesizer/condensation/private_matchers.py": "ResidualMatcher.gradient "
    "GradientMatcher.gradient FeatureSumMatcher.gradient PaperMatcher.gradient",
    "training/sgd.py": "train_on make_step.<locals>.step",
    "training/many_clients.py": "train_together",
    "methods/fedkf.py": "KnowledgeFusion.train_generator",
    "synthesizer/distillation/ensemble.py": "OneShotDistillation.train_generator "
    "OneShotDistillation.train_student",
    "methods/feddf.py": "FedDF.distil",
    "privacy/dpsgd.py": "dp_sgd",
}.items() for function in functions.split())  # fmt: skip

IN_LOOPS = {  # with the reason
    ("privacy/randomness.py", "SecretGenerator.normal"): "noise is the host's: a copy a release",
    ("data/images.py", "_constants"): "pixel constants, once for each data set",
}

SMALL: dict[str, dict[str, Any]] = {
    "run": {"memory_gb": 1.0},
    "partition": {"clients": 2, "subset": 0.1},
    "model": {"width": 4, "depth": 1},
}
FEW = {
    "local_epochs": 1, "batch": 32, "iterations": 2, "directions": 4, "generator_steps": 2,
    "server_epochs": 2, "server_steps": 2, "stratification_steps": 2,
}  # fmt: skip
HALF = {"sample_rate": 0.5, "noise_multiplier": 4.0}


def small(name: str, protected: bool, **sections: Any) -> recorded.Sections:
    """A case as small as one can be, nearly all with two rounds."""
    merged = {key: {**SMALL.get(key, {}), **sections.get(key, {})} for key in {*SMALL, *sections}}
    if not protected:
        merged["partition"] = {"local_test": 0.2, **merged["partition"]}
    else:
        merged["privacy"] = {**HALF, **merged.get("privacy", {})}
    made = (recorded.private if protected else recorded.case)(name, **merged)
    few = {key: value for key, value in FEW.items() if key in made["method"]}
    if "ipc" in made["method"]:
        few["ipc"] = 1
    if protected and name in ("dense", "fedhydra"):  # generation takes most of the suite's time
        made["run"]["rounds"] = 1
    made["method"] = {**made["method"], **few, **sections.get("method", {})}
    return made


CASES = {
    **{f"{name}, open": small(name, False) for name in METHODS},
    **{f"{k}, private": small(k, True) for k in METHODS if method_class(k).dp_mechanisms},
    "feddm, gradient": small("feddm", True, privacy={"mechanism": "gradient"}),
    "feddm, features": small("feddm", True, privacy={"mechanism": "features"}),
    "feddm, siamese, inside the ball": small(
        "feddm", False, method={"augment": "siamese", "perturbation": "ball"}
    ),
    "feddm, batch norm": small("feddm", False, model={"norm": "batch"}),
    "feddm, distributions": small("feddm", False, method={"matching": "sinkhorn"}),
    "fedaf, rows": small("fedaf", False, method={"distance": "rows"}),
    "fedavg, on features": small("fedavg", False, model={"features": "pixels"}),
    "fedavg, on features, private": small("fedavg", True, model={"features": "pixels"}),
    "moon, on features, private": small("moon", True, model={"features": "pixels", "name": "mlp"}),
    "fedavg, in one pass": small(
        "fedavg", False, model={"name": "linear"}, partition={"clients": 5}, method={"batch": 8}
    ),
}


def unwanted(waits: Sequence[Wait]) -> list[str]:
    """Those in a loop that must not wait."""
    found = set()
    for wait in waits:
        stack = [(file.removeprefix("fedsynth/"), name) for file, name, _ in wait.stack]
        if any(frame in LOOPS for frame in stack) and stack[0] not in IN_LOOPS:
            found.add(str(wait))
    return sorted(found)


def play(
    sections: recorded.Sections, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], list[Wait]]:
    """The numbers of a run on the pretended GPU, and its waits; a graph that cannot be recorded is
    an error here."""
    monkeypatch.setitem(recorded.CASES, "here", sections)
    with pretended_gpu() as gpu, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without a CUDA graph")
        warnings.filterwarnings("ignore", message="Converting a tensor with requires_grad")
        numbers = recorded.numbers(recorded.run("here", monkeypatch))
    assert gpu.operations > 200  # that the run was on it
    return numbers, gpu.waits


QUICK = [f"{name}, open" for name in FAMILIES] + ["fedstats, private", "feddm, private"]


@pytest.mark.parametrize("name", by_family(CASES, QUICK))
def test_a_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """First exchange, client steps, server steps, evaluation on both kinds of test images."""
    found, waits = play(CASES[name], monkeypatch)
    assert not unwanted(waits)
    expected = recorded.numbers(recorded.run("here", monkeypatch))
    assert not list(recorded.differences(name, expected, found, MOVED, 0.01))


def test_the_loops_exist() -> None:
    for file, function in (*LOOPS, *IN_LOOPS):
        root = PACKAGE[1].parent if file.startswith("privacy/") else PACKAGE[0]
        assert f"def {function.split('.')[-1]}(" in (root / file).read_text(encoding="utf-8")


# ----------------------------------------------------------------------------------- broken twins

Update = Callable[[MomentumSgd, Tensor, Tensor, tuple[Tensor, ...]], None]


def twin(monkeypatch: pytest.MonkeyPatch, broken: Callable[[Tensor], object]) -> None:
    """The optimiser with a line more, on each gradient."""
    whole: Update = MomentumSgd.update

    def update(self: MomentumSgd, w: Tensor, gradient: Tensor, state: tuple[Tensor, ...]) -> None:
        broken(gradient)
        whole(self, w, gradient, state)

    monkeypatch.setattr(MomentumSgd, "update", update)


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda gradient: gradient.norm().item(),
    "boolean index": lambda gradient: gradient[gradient > 0],
    "blocking copy": lambda gradient: torch.zeros(3).to(gradient.device),
    "index on the CPU": lambda gradient: gradient[torch.zeros(1, dtype=torch.int64)],
}


@pytest.mark.parametrize("read", READS)
def test_a_wait_in_training_is_seen(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twin(monkeypatch, READS[read])
    monkeypatch.setattr("fedsynth.training.sgd.WORTH_RECORDING", 10**9)
    with pretended_gpu() as gpu:
        trained(CUDA, None)
    assert any("train_on" in line for line in unwanted(gpu.waits))


MIXES: dict[str, Callable[[Tensor], object]] = {
    "a new tensor": lambda gradient: gradient + torch.zeros(gradient.shape),
    "a copy in place": lambda gradient: gradient.add_(torch.ones(len(gradient))),
    "a generator of the CPU": lambda gradient: torch.randn(
        3, generator=torch.Generator(), device=gradient.device
    ),
    "a generator of the GPU": lambda gradient: torch.randn(
        3, generator=torch.Generator(gradient.device)
    ),
}


@pytest.mark.parametrize("mix", MIXES)
def test_a_mix_of_devices_is_seen(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the CPU takes without a word."""
    twin(monkeypatch, MIXES[mix])
    sections = small("fedavg", False)
    monkeypatch.setitem(recorded.CASES, "here", sections)
    recorded.run("here", monkeypatch)
    with pytest.raises(DeviceMixError):
        play(sections, monkeypatch)


# ------------------------------------------------------------------------------------- CUDA graphs


def trained(device: torch.device | str, radius: float | None) -> list[Tensor]:
    """A small network's parameters after 40 steps on full batches and 10 on a rest."""
    data = digits(np.arange(90) % 10).to(device)
    model = build_model(ModelSettings("linear"), SPEC.image_shape, 10, 0).to(device)
    images = data.images.float().div(255)
    settings = SgdSettings(10, 20, MomentumSgd(0.5, 0.9, 1e-3), radius)
    train_on(model, images.__getitem__, data.labels, settings, torch.Generator().manual_seed(1))
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("radius", [None, 0.5])
def test_recorded_steps_train_alike(radius: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's operations, repeated on the same memory without Python, train as the CPU does."""
    made: list[object] = []
    whole = cuda_graphs.recorded
    monkeypatch.setattr(
        "fedsynth.training.sgd.recorded", lambda *args: made.append(args) or whole(*args)
    )
    expected = trained("cpu", radius)
    with pretended_gpu(), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = trained(CUDA, radius)
    assert len(made) == 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_wait_ends_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    twin(monkeypatch, READS["item"])
    with pretended_gpu(), pytest.warns(RuntimeWarning, match="without a CUDA graph"):
        trained(CUDA, None)
    with pretended_gpu() as gpu:
        one = torch.ones(2, device="cuda")
        with pytest.raises(CaptureError):
            gpu.record(lambda: float(one.sum()) and None, CUDA)
