"""All registered methods on a GPU: results equal the CPU's. On a fake one (`tests/fake_cuda.py`),
no operation mixes devices either, and nothing waits for the device in `WAIT_FREE_LOOPS`, except
`ALLOWED_WAITS`."""

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
from fedsynth.training import sgd
from fedsynth.training.sgd import MomentumSgd, SgdSettings, train_on
from tests.conftest import NO_CUDA
from tests.digits import SPEC, digits
from tests.fake_cuda import (
    CUDA,
    PACKAGE,
    CaptureError,
    DeviceMixError,
    Wait,
    drawn_on_cpu,
    fake_gpu,
)
from tests.quick_runs import FAMILIES, by_family
from tests.simulation import test_recorded_numbers as recorded

TOLERANCE = 1e-4  # relative: passes on a GPU have other lengths and rounding
CUDNN_TOLERANCE = 1e-3  # its convolutions round differently, too

WAIT_FREE_LOOPS = tuple((file, function) for file, functions in {
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
    "methods/fedbe.py": "FedBE.distilled",
    "methods/shared/public_images.py": "DistilsOnPublicImages.distillation_steps "
    "DistilsOnPublicImages.server_part.<locals>.logits_of",
    "privacy/dpsgd.py": "dp_sgd",
}.items() for function in functions.split())  # fmt: skip

ALLOWED_WAITS = {  # with the reason
    ("privacy/randomness.py", "SecretGenerator.normal"): "noise is the host's: a copy a release",
    ("core/context.py", "RoundContext.load_frozen"): "the ensemble, once for each round",
    ("privacy/batch_independence.py", "_Passes.of_step"): "a trial, before the first round",
    ("data/images.py", "_constants"): "pixel constants, once for each data set",
}

SMALL: dict[str, dict[str, Any]] = {
    "run": {"memory_gb": 1.0},
    "partition": {"clients": 2, "subset": 0.1},
    "model": {"width": 4, "depth": 1},
}
FEW_STEPS = {
    "local_epochs": 1, "batch": 32, "iterations": 2, "directions": 4, "generator_steps": 2,
    "server_epochs": 2, "server_steps": 2, "stratification_steps": 2, "ipc": 1,
}  # fmt: skip
HALF = {"sample_rate": 0.5, "noise_multiplier": 4.0}


def small(name: str, is_private: bool = False, **sections: Any) -> recorded.Sections:
    """Returns a minimal case, mostly of two rounds."""
    merged = {key: {**SMALL.get(key, {}), **sections.get(key, {})} for key in {*SMALL, *sections}}
    if is_private:
        merged["privacy"] = {**HALF, **merged.get("privacy", {})}
    else:
        merged["partition"] = {"local_test": 0.2, **merged["partition"]}
    case = (recorded.private if is_private else recorded.case)(name, **merged)
    few_steps = {key: value for key, value in FEW_STEPS.items() if key in case["method"]}
    if is_private and name in ("dense", "fedhydra"):  # generation dominates the suite's time
        case["run"]["rounds"] = 1
    case["method"] = {**case["method"], **few_steps, **sections.get("method", {})}
    return case


CASES = {
    **{f"{name}, open": small(name) for name in METHODS},
    **{f"{k}, private": small(k, True) for k in METHODS if method_class(k).dp_mechanisms},
    "feddm, gradient": small("feddm", True, privacy={"mechanism": "gradient"}),
    "feddm, features": small("feddm", True, privacy={"mechanism": "features"}),
    "feddm, siamese": small("feddm", method={"augment": "siamese", "perturbation": "ball"}),
    "feddm, batch norm": small("feddm", model={"norm": "batch"}),
    "feddm, distributions": small("feddm", method={"matching": "sinkhorn"}),
    # averages: a pixel of single images is so near to a boundary of 8 bits that rounding decides it
    "fedaf, rows": small("fedaf", method={"distance": "rows", "start_average": 10}),
    "fedavg, on features": small("fedavg", model={"features": "pixels"}),
    "fedavg, on features, private": small("fedavg", True, model={"features": "pixels"}),
    "moon, on features, private": small("moon", True, model={"features": "pixels", "name": "mlp"}),
    "fedavg, measures": small(
        "fedavg", run={"measures": "client_model_accuracy,silhouette,dissimilarity"}
    ),
    "fedavg, in one pass": small(
        "fedavg", model={"name": "linear"}, partition={"clients": 5}, method={"batch": 8}
    ),
}


def forbidden_waits(waits: Sequence[Wait]) -> list[str]:
    forbidden = set()
    for wait in waits:
        stack = [(file.removeprefix("fedsynth/"), name) for file, name, _ in wait.stack]
        if any(map(WAIT_FREE_LOOPS.__contains__, stack)) and ALLOWED_WAITS.keys().isdisjoint(stack):
            forbidden.add(f"{wait.operation} at {wait.stack[:6]}")
    return sorted(forbidden)


def run_on_fake_gpu(
    sections: recorded.Sections, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], list[Wait]]:
    """Returns a run's numbers and waits. A graph that cannot be recorded is an error."""
    monkeypatch.setitem(recorded.CASES, "here", sections)
    with fake_gpu() as gpu, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without a CUDA graph")
        warnings.filterwarnings("ignore", message="Converting a tensor with requires_grad")
        numbers = recorded.numbers(recorded.run("here", monkeypatch))
    assert gpu.operations > 200  # the run used the GPU
    return numbers, gpu.waits


QUICK = [f"{name}, open" for name in FAMILIES]
QUICK += ["fedstats, private", "feddm, private", "fedavg, measures"]


@pytest.mark.parametrize("name", by_family(CASES, QUICK))
def test_runs_on_gpu_equal_cpu_without_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers the first exchange, client and server steps, and evaluation on both kinds of
    images."""
    actual, waits = run_on_fake_gpu(CASES[name], monkeypatch)
    assert not forbidden_waits(waits)
    expected = recorded.numbers(recorded.run("here", monkeypatch))
    assert not list(recorded.differences(name, expected, actual, TOLERANCE, 0.01, TOLERANCE))


@pytest.mark.cuda
@NO_CUDA
@pytest.mark.parametrize("name", CASES)
def test_runs_on_cuda_equal_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    computed = []
    for device in ("cpu", "cuda"):
        sections = {**CASES[name], "run": {**CASES[name]["run"], "device": device}}
        monkeypatch.setitem(recorded.CASES, "here", sections)
        with drawn_on_cpu():
            computed.append(recorded.numbers(recorded.run("here", monkeypatch)))
    assert torch.cuda.max_memory_allocated() > before + 2**16  # the run used the GPU
    assert not list(recorded.differences(name, *computed, CUDNN_TOLERANCE, 0.01, CUDNN_TOLERANCE))


def test_listed_loops_exist() -> None:
    for file, function in (*WAIT_FREE_LOOPS, *ALLOWED_WAITS):
        root = PACKAGE[1].parent if file.startswith("privacy/") else PACKAGE[0]
        assert f"def {function.split('.')[-1]}(" in (root / file).read_text(encoding="utf-8")


def break_optimiser(monkeypatch: pytest.MonkeyPatch, broken: Callable[[Tensor], object]) -> None:
    """Adds a broken operation on each gradient to the optimiser."""
    update: Any = MomentumSgd.update
    monkeypatch.setattr(MomentumSgd, "update", lambda *args: (broken(args[2]), update(*args)))


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda gradient: gradient.norm().item(),
    "boolean index": lambda gradient: gradient[gradient > 0],
    "blocking copy": lambda gradient: torch.zeros(3).to(gradient.device),
    "index on the CPU": lambda gradient: gradient[torch.zeros(1, dtype=torch.int64)],
}


@pytest.mark.parametrize("read", READS)
def test_waits_in_training_are_detected(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_optimiser(monkeypatch, READS[read])
    monkeypatch.setattr(sgd, "WORTH_RECORDING", 10**9)
    with fake_gpu() as gpu:
        trained_weights(CUDA, None)
    assert any("train_on" in line for line in forbidden_waits(gpu.waits))


MIXES: dict[str, Callable[[Tensor], object]] = {
    "a new tensor": lambda gradient: gradient + torch.zeros(gradient.shape),
    "a copy in place": lambda gradient: gradient.add_(torch.ones(len(gradient))),
    "a generator of the CPU": lambda g: torch.randn(
        3, generator=torch.Generator(), device=g.device
    ),
    "a generator of the GPU": lambda g: torch.randn(3, generator=torch.Generator(g.device)),
}


@pytest.mark.parametrize("mix", MIXES)
def test_mixed_devices_are_detected(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU accepts these operations."""
    break_optimiser(monkeypatch, MIXES[mix])
    trained_weights("cpu", None)
    with fake_gpu(), pytest.raises(DeviceMixError):
        trained_weights(CUDA, None)


def trained_weights(device: torch.device | str, radius: float | None) -> list[Tensor]:
    """Returns a network's parameters after 40 steps on full batches and 10 on partial batches."""
    data = digits(np.arange(90) % 10).to(device)
    model = build_model(ModelSettings("linear"), SPEC.image_shape, 10, 0).to(device)
    images = data.images.float().div(255)
    settings = SgdSettings(10, 20, MomentumSgd(0.5, 0.9, 1e-3), radius)
    train_on(model, images.__getitem__, data.labels, settings, torch.Generator().manual_seed(1))
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("radius", [None, 0.5])
def test_recorded_steps_equal_cpu(radius: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded graph repeats its operations on the same memory."""
    recordings: list[object] = []
    record = sgd.recorded
    monkeypatch.setattr(sgd, "recorded", lambda *args: recordings.append(args) or record(*args))
    expected = trained_weights("cpu", radius)
    with fake_gpu(), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        actual = trained_weights(CUDA, radius)
    assert len(recordings) == 1
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_waits_end_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    break_optimiser(monkeypatch, READS["item"])
    with fake_gpu(), pytest.warns(RuntimeWarning, match="without a CUDA graph"):
        trained_weights(CUDA, None)
    with fake_gpu() as gpu:
        tensor = torch.ones(2, device="cuda")
        with pytest.raises(CaptureError):
            gpu.record(lambda: float(tensor.sum()) and None, CUDA)
