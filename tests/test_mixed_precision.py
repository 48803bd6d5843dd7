"""Training and distillation whose networks compute in bfloat16 (`--precision bf16`), beside the
same in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from fedsynth import FedAF, FedAvg, FedDF, FedDM, FedKF, ModelSettings, RunSettings, simulate
from fedsynth.core.context import RoundContext
from fedsynth.data.registry import dataset_spec
from fedsynth.methods.fedkf import KnowledgeFusion, TwoModels
from fedsynth.mixed_precision import mixed
from fedsynth.models.registry import build_model
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation.sets import SyntheticSet, train_on_union
from fedsynth.synthesizer.distillation.ensemble import (
    OneShotDistillation,
    OneShotSettings,
    average_of_logits,
)
from fedsynth.synthesizer.distillation.generator import make_generator
from fedsynth.training import sgd

DIGITS = dataset_spec("digits")
CPU = torch.device("cpu")


def network(seed: int, norm: str = "batch") -> nn.Module:
    """A small convolutional network of the digits."""
    return build_model(ModelSettings("cnn1", norm=norm), DIGITS.image_shape, DIGITS.classes, seed)


def weights(model: nn.Module) -> Tensor:
    """All of them, in float32."""
    assert all(p.dtype == torch.float32 for p in model.parameters())
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_student_sees_images_of_the_new_generator() -> None:
    """autocast would keep the cast weights until it ends: images would be those of before the
    step."""
    method = FedKF(generator_batch=16, generator_width=8, generator_lr=0.3, use_kl=True)
    teacher = network(0).state_dict()
    context = RoundContext(2, 0, CPU, DIGITS, network(0), 20.0, precision=torch.bfloat16)
    fusion = KnowledgeFusion(method, 0, TwoModels(teacher, 1.0, teacher), {}, context)
    with mixed(CPU, torch.bfloat16):  # as inside of a client's own step
        fusion.train_generator(network(5))
    draws = torch_generator(0, "distillation noise", 2, 0)
    z = torch.randn(16, 100, generator=draws)
    with torch.no_grad():
        before = make_generator(DIGITS, 0, width=8).normalised(z)
        after = fusion._generator.normalised(z)
    images = fusion._images
    assert images.dtype == fusion._teacher_logits.dtype == torch.float32
    assert (images - before).abs().mean() > 10 * (images - after).abs().mean() > 0


@contextmanager
def convolutions() -> Iterator[set[torch.dtype]]:
    """What comes out of all convolutions in the block."""
    seen: set[torch.dtype] = set()

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, nn.Conv2d):
            seen.add(output.dtype)

    handle = register_module_forward_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


def test_a_server_s_distillation_moves_by_rounding() -> None:
    """The student's way and what it is taught, in both."""
    ends = []
    for precision in (torch.float32, torch.bfloat16):
        student = network(9)
        settings = OneShotSettings(
            generator_steps=2, generator_batch=16, generator_width=8, student_images="last"
        )
        models = [network(0).eval(), network(1, "group").eval()]
        with convolutions() as seen:
            training = OneShotDistillation(
                settings, models, average_of_logits, student, DIGITS, 0, precision=precision
            )
            for epoch in range(2):
                training.train_student(epoch, training.train_generator(epoch))
        assert seen == {precision}  # of models, generator and student
        ends.append(weights(student))
    start = weights(network(9))
    assert not torch.equal(*ends)
    assert (ends[0] - ends[1]).norm() < 0.1 * (ends[0] - start).norm()


@pytest.mark.parametrize("method", [FedAvg(local_epochs=2, batch=32, lr=0.1),
                                    FedDF(proxy="noise", local_epochs=1, server_steps=5)], ids=str)  # fmt: skip
def test_runs_have_it_where_it_is_asked_for(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are near those in float32 and not the same. Of methods that distil only the
    distillation is in bfloat16 here: training is left in float32."""
    if method.name == "feddf":
        monkeypatch.setattr(sgd, "mixed", lambda device, precision: nullcontext())
    ends = []
    for precision in ("fp32", "bf16"):
        model = ModelSettings("cnn1", norm="batch")
        settings = RunSettings(method, rounds=1, model=model, precision=precision)
        ends.append(weights(simulate(settings, quiet=True).model))
    assert not torch.equal(*ends)
    assert (ends[0] - ends[1]).norm() < 0.2 * ends[0].norm()


@pytest.mark.parametrize("matching", ["none", "minibatch", "union"])
def test_a_server_trains_on_synthetic_images_in_it(matching: str) -> None:
    """All of its passes, FedAF's knowledge matching too: else its ablations would differ in
    precision as well."""
    draws = torch.Generator().manual_seed(0)
    images = torch.randn(20, *DIGITS.image_shape, generator=draws)
    sets = {0: SyntheticSet(images, torch.arange(20) % 10)}
    model = network(0)
    context = RoundContext(1, 0, CPU, DIGITS, model, 20.0, precision=torch.bfloat16)
    soft = torch.full((10, 10), 0.1)
    known = torch.ones(10, dtype=torch.bool)
    settings = {"server_epochs": 2, "server_batch": 10}
    with convolutions() as seen:
        if matching == "none":
            train_on_union(model, sets, FedDM(**settings).union_sgd(), context)
        else:
            method = FedAF(**settings, server_matching=matching, global_weight=1.0)
            method._train_server(model, sets, soft, known, context)
    assert seen == {torch.bfloat16}
    assert torch.isfinite(weights(model)).all()


def test_bright_pixels_have_a_gradient() -> None:
    """In bfloat16 the sigmoid of 7 is 1."""
    generator = make_generator(DIGITS, 0, width=4)
    last: Any = generator.body[-1]
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.constant_(last.bias, 7.0)
    with mixed(CPU, torch.bfloat16):
        pixels = generator(torch.randn(4, 100, generator=torch.Generator().manual_seed(0)))
    pixels.sum().backward()
    assert last.bias.grad.item() > 0
