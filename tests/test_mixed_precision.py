"""Training and distillation in bfloat16 against float32, and the automatic choice of speed."""

from __future__ import annotations

import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedsynth as fs
from fedsynth.federation.context import choose_speed
from fedsynth.methods.fedkf import KnowledgeFusion, TwoModels
from fedsynth.mixed_precision import mixed
from fedsynth.models.registry import build_model
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation.sets import SyntheticSet, train_on_union
from fedsynth.synthesizer.distillation import ensemble
from fedsynth.synthesizer.distillation.generator import make_generator
from fedsynth.training import sgd
from tests.digits import CPU, SPEC, round_context
from tests.quick_runs import folder_of, quick_sections


def network(seed: int, norm: str = "batch") -> nn.Module:
    return build_model(fs.ModelSettings("cnn1", norm=norm), SPEC.image_shape, SPEC.classes, seed)


def weights(model: nn.Module) -> Tensor:
    """Returns all weights; they are in float32."""
    assert all(p.dtype == torch.float32 for p in model.parameters())
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_student_gets_images_of_the_updated_generator() -> None:
    """Autocast caches cast weights: images came from the generator before its step."""
    method = fs.FedKF(generator_batch=16, generator_width=8, generator_lr=0.3, use_kl=True)
    teacher = network(0).state_dict()
    models = TwoModels(teacher, 1.0, teacher)
    context = round_context(number=2, network=network(0), precision=torch.bfloat16)
    fusion = KnowledgeFusion(method, 0, models, {}, context)
    with mixed(CPU, torch.bfloat16):  # as inside of a client's own step
        fusion.train_generator(network(5))
    z = torch.randn(16, 100, generator=torch_generator(0, "distillation noise", 2, 0))
    with torch.no_grad():
        initial = make_generator(SPEC, 0, width=8).normalised(z)
        updated = fusion._generator.normalised(z)
    images = fusion._images
    assert images.dtype == fusion._teacher_logits.dtype == torch.float32
    assert (images - initial).abs().mean() > 10 * (images - updated).abs().mean() > 0


@pytest.fixture
def dtypes(monkeypatch: pytest.MonkeyPatch) -> set[torch.dtype]:
    found: set[torch.dtype] = set()
    convolve = nn.Conv2d._conv_forward

    def record(*args: Any) -> Tensor:
        output = convolve(*args)
        found.add(output.dtype)
        return output

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", record)
    return found


def test_server_distillation_differs_by_rounding(dtypes: set[torch.dtype]) -> None:
    final_weights = []
    settings = ensemble.OneShotSettings(
        generator_steps=2, generator_batch=16, generator_width=8, student_images="last"
    )
    for precision in (torch.float32, torch.bfloat16):
        student = network(9)
        models = [network(0).eval(), network(1, "group").eval()]
        training = ensemble.OneShotDistillation(
            settings, models, ensemble.average_of_logits, student, SPEC, 0, precision=precision
        )
        for epoch in range(2):
            training.train_student(epoch, training.train_generator(epoch))
        assert dtypes == {precision}  # of models, generator and student
        dtypes.clear()
        final_weights.append(weights(student))
    a, b = final_weights
    # 0.12 on processors without AVX-512, which round bf16 otherwise
    assert 0 < (a - b).norm() < 0.2 * (a - weights(network(9))).norm()


@pytest.mark.parametrize("name", ["fedavg", "feddf"])
def test_precision_setting_reaches_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights differ slightly from float32's. Only the distillation of FedDF is in bfloat16."""
    method: Any = fs.FedAvg(local_epochs=2, batch=32, lr=0.1)
    if name == "feddf":
        method = fs.FedDF(proxy="noise", local_epochs=1, server_steps=5)
        monkeypatch.setattr(sgd, "mixed", lambda device, precision: nullcontext())
    model = fs.ModelSettings("cnn1", norm="batch")
    final_weights = []
    for precision in ("fp32", "bf16"):
        settings = fs.RunSettings(method, rounds=1, model=model, precision=precision)
        final_weights.append(weights(fs.simulate(settings, quiet=True).model))
    a, b = final_weights
    assert 0 < (a - b).norm() < 0.2 * a.norm()


@pytest.mark.parametrize("matching", ["none", "minibatch", "union"])
def test_server_trains_on_synthetic_images_in_bfloat16(
    matching: str, dtypes: set[torch.dtype]
) -> None:
    """Covers FedAF's knowledge matching, so that its ablations do not differ in precision."""
    images = torch.randn(20, *SPEC.image_shape, generator=torch.Generator().manual_seed(0))
    sets = {0: SyntheticSet(images, torch.arange(20) % 10)}
    model = network(0)
    context = round_context(number=2, network=model, precision=torch.bfloat16)
    soft, has_label = torch.full((10, 10), 0.1), torch.ones(10, dtype=torch.bool)
    settings = {"server_epochs": 2, "server_batch": 10}
    if matching == "none":
        train_on_union(model, sets, fs.FedDM(**settings).union_sgd(), context)
    else:
        method = fs.FedAF(**settings, server_matching=matching, global_weight=1.0)
        method._train_server(model, sets, soft, has_label, context)
    assert dtypes == {torch.bfloat16}
    assert torch.isfinite(weights(model)).all()


def test_generator_gradient_survives_bright_pixels() -> None:
    """In bfloat16 the sigmoid of 7 rounds to 1."""
    generator = make_generator(SPEC, 0, width=4)
    last: Any = generator.body[-1]
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.constant_(last.bias, 7.0)
    with mixed(CPU, torch.bfloat16):
        pixels = generator(torch.randn(4, 100, generator=torch.Generator().manual_seed(0)))
    pixels.sum().backward()
    assert last.bias.grad.item() > 0


FEDDM = {"method": "feddm", "rounds": 2}


def use_machine(able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitates a processor with AMX and a C++ compiler, or without both."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: able)
    monkeypatch.setattr("fedsynth.federation.context.shutil.which", lambda _: able or None)


@pytest.mark.parametrize(
    ("run", "sections", "able", "expected"),
    [
        (FEDDM, {}, True, ("bf16", "on")),
        (FEDDM, {}, False, ("fp32", "off")),
        (FEDDM, {"method": {"iterations": 10}}, True, ("bf16", "off")),
        (FEDDM, {"model": {"width": 32}}, True, ("fp32", "off")),
        (FEDDM, {"model": {"name": "lenet5"}}, True, ("fp32", "off")),
        (FEDDM, {"privacy": {"noise_multiplier": 3.0}}, True, ("fp32", "off")),
        ({"method": "fedavg", "rounds": 2000}, {"method": {}}, True, ("fp32", "off")),
        ({**FEDDM, "precision": "fp32"}, {}, True, ("fp32", "on")),
        ({**FEDDM, "compile": "off"}, {}, True, ("bf16", "off")),
    ],
)
def test_only_wide_condensation_is_accelerated(
    run: Any, sections: Any, able: bool, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_machine(able, monkeypatch)
    defaults = {"model": {"width": 128}, "method": {"iterations": 1000}}
    settings = choose_speed(fs.resolve({"run": run, **defaults, **sections}), torch.device("cpu"))
    assert (settings.precision, settings.compile) == expected


def test_choice_is_printed_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_machine(True, monkeypatch)
    model = {"width": 64, "depth": 1}
    result = fs.simulate(fs.resolve(quick_sections("feddm", model=model)), output=tmp_path)
    assert "speed: run.precision=bf16, run.compile=off" in capsys.readouterr().err
    recorded = tomllib.loads((folder_of(result) / "config.toml").read_text())["run"]
    assert (recorded["precision"], recorded["compile"]) == ("bf16", "off")
