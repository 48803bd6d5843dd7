"""DENSE, FedHydra and FedDF as methods: rounds, heterogeneous clients, privacy and artefacts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsynth.config.resolve import resolve
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters
from fedsynth.data.images import ProxyImages, denormalise, from_arrays
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import SettingError, UnknownNameError
from fedsynth.methods.dense import Dense
from fedsynth.methods.feddf import FedDF
from fedsynth.methods.fedhydra import FedHydra
from fedsynth.methods.shared.aggregation import average
from fedsynth.methods.shared.ensemble import EnsembleDistillation, EnsembleState
from fedsynth.privacy.errors import UnaccountedReleaseError
from fedsynth.simulation.simulate import simulate
from fedsynth.synthesizer.distillation.stratification import stratified_weights
from tests.digits import SPEC, convnet, digits, round_context

TINY: dict[str, Any] = {
    "server_epochs": 2,
    "generator_steps": 2,
    "generator_width": 4,
    "generator_batch": 8,
    "latent": 5,
}
HYDRA: dict[str, Any] = {**TINY, "stratification_steps": 3, "stratification_batch": 4}
FAST: dict[str, dict[str, Any]] = {
    "dense": {"local_epochs": 1, **TINY},
    "fedhydra": {"local_epochs": 1, **HYDRA},
    "feddf": {"local_epochs": 1, "server_steps": 5, "server_batch": 16, "proxy": "noise"},
}


def run(method: str, rounds: int = 1, **model: Any) -> Any:
    sections = {"run": {"method": method, "rounds": rounds}, "method": FAST[method]}
    return resolve({**sections, "model": {"width": 4, "depth": 2, **model}})


def test_fedhydra_trains_on_heterogeneous_clients(tmp_path: Path) -> None:
    """The run folder also has FedHydra's U and its plot."""
    result = simulate(run("fedhydra", clients="linear, cnn1,convnet"), output=tmp_path)
    sizes = [sum(v.numel() for v in u.parameters.values()) for u in result.uploads.values()]  # type: ignore[attr-defined]
    assert len(set(sizes)) == 3
    assert sizes[0] == sizes[3]  # assigned in turn to five clients
    assert result.folder is not None
    artefacts = json.loads((result.folder / "artefacts.json").read_text())
    assert np.array(artefacts["stratification"]).shape == (10, 5)
    np.testing.assert_allclose(np.array(artefacts["clients_for_class"]).sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(np.array(artefacts["classes_of_client"]).sum(0), 1, rtol=1e-5)
    with pytest.raises(SettingError, match=r"run\.rounds"):
        run("dense", 2, clients="resnet8,convnet")
    with pytest.raises(SettingError, match=r"model\.clients"):
        resolve({"run": {"method": "fedavg", "rounds": 1}, "model": {"clients": "resnet8"}})
    with pytest.raises(UnknownNameError, match="did you mean resnet8"):
        run("dense", clients="resnet")


def context(**changes: Any) -> RoundContext:
    return round_context(nominal=6.0, **{"clients": 2, "participants": (0, 1), **changes})


def uploads() -> dict[int, ModelParameters]:
    return {
        client: ModelParameters(convnet(seed=client + 1).state_dict(), weight)
        for client, weight in enumerate((1.0, 3.0))
    }


def initial_state() -> EnsembleState:
    return EnsembleState(convnet().state_dict())


def proxy_of(pixels: np.ndarray) -> ProxyImages:
    return ProxyImages(from_arrays(pixels, np.zeros(len(pixels), np.int64), SPEC), SPEC)


@pytest.mark.parametrize("method", [Dense(server_epochs=0), FedDF(server_steps=0, proxy="noise")])
def test_student_without_steps_equals_its_start(method: EnsembleDistillation) -> None:
    """The start is the n_k-weighted average (one-shot FedAvg) or the server's model."""
    assert method.start == ("server" if method.name == "dense" else "average")
    proxy_context = context(proxy=proxy_of(np.zeros((4, 8, 8), np.uint8)))
    for kind, expected in (("average", average(uploads())), ("server", initial_state().parameters)):
        new_state = replace(method, start=kind).server_step(
            initial_state(), uploads(), proxy_context
        )  # type: ignore[type-var]
        assert all(torch.equal(new_state.parameters[name], expected[name]) for name in expected)


def test_fedhydra_weights_logits_by_stratification() -> None:
    """Two classes, two clients, and the logits of one image generated for class 0."""
    u = torch.tensor([[3.0, 1.0], [1.0, 9.0]])
    logits, target_class = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), torch.tensor([0])
    columns = {
        "in-place": ([0.75 / 0.85, 0.1 / 0.85], [0.25 / 1.15, 0.9 / 1.15]),
        "raw": ([0.75, 0.25], [0.1, 0.9]),
    }
    for kind, ((a, b), (c, d)) in columns.items():
        weights = stratified_weights(u, in_place=kind == "in-place")
        p = FedHydra(columns=kind).aggregate(*weights)(logits, target_class)
        expected = [0.75 * 1 * a + 0.25 * 3 * c, 0.75 * 2 * b + 0.25 * 4 * d]
        assert p[0].tolist() == pytest.approx(expected)
    separate = FedHydra(aggregation="clients").aggregate(*weights)(logits, target_class)
    assert separate[0].tolist() == pytest.approx([0.75 * 1 + 0.25 * 3, 0.75 * 2 + 0.25 * 4])
    average = FedHydra(aggregation="average").aggregate(*weights)(logits, target_class)
    assert average.tolist() == [[2.0, 3.0]]


def test_lessons_setting_changes_the_student() -> None:
    students = [
        FedHydra(**HYDRA, lessons=lessons)
        .server_step(initial_state(), uploads(), context())
        .parameters
        for lessons in ("ensemble", "average")
    ]
    assert not all(torch.equal(students[0][name], students[1][name]) for name in students[0])


def test_feddf_student_approaches_the_ensemble() -> None:
    ctx = context(proxy=proxy_of(digits(np.arange(64) % 10).images.numpy()))
    clients = [ctx.load(u.parameters).eval() for u in uploads().values()]
    x = ctx.proxy(torch.arange(64))  # type: ignore[misc]

    def divergence(parameters: Any) -> float:
        student = ctx.load(parameters).eval()
        with torch.no_grad():
            answer = torch.stack([c(x) for c in clients]).mean(0).softmax(1)
            return float((answer * (answer.log() - student(x).log_softmax(1))).sum(1).mean())

    method = FedDF(server_steps=30, server_batch=32, server_lr=1e-2)
    new_state = method.server_step(initial_state(), uploads(), ctx)
    assert divergence(new_state.parameters) < divergence(average(uploads())) / 2
    # before anything is trained or charged
    with pytest.raises(SettingError, match=r"method\.proxy must be a data set"):
        simulate(resolve({"run": {"method": "feddf", "rounds": 1}, "method": {"proxy": ""}}))


def test_client_images_are_refused_as_proxy() -> None:
    run = {"run": {"method": "feddf", "rounds": 1}, "method": {"proxy": "digits"}}
    with pytest.raises(UnaccountedReleaseError, match="images come from this data set"):
        simulate(resolve({**run, "privacy": {"epsilon": 8.0}}))


def test_ensemble_excludes_models_of_zero_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    ensemble_sizes: list[int] = []
    monkeypatch.setattr(
        Dense,
        "distil",
        lambda self, models, student, ctx: ensemble_sizes.append(len(models)) or EnsembleState({}),
    )
    first, second = uploads().values()
    state = initial_state()
    Dense().server_step(state, {0: first, 1: replace(second, weight=0.0)}, context())
    assert ensemble_sizes == [1]
    excluded = {0: replace(first, weight=0.0), 1: replace(second, weight=0.0)}
    assert Dense().server_step(state, excluded, context()) is state
    with pytest.raises(SettingError, match="final must be 'aca'"):
        Dense(final="oca")


def test_proxy_images_are_converted_to_the_shape() -> None:
    rgb = dataset_spec("cifar10")
    pixels = np.zeros((2, 3, 32, 32), np.uint8)
    pixels[0, 0], pixels[1] = 255, 100
    to_grey = ProxyImages(from_arrays(pixels, np.zeros(2, np.int64), rgb), SPEC)
    assert len(to_grey) == 2
    x = denormalise(to_grey(torch.tensor([0, 1])), SPEC).double() / 255
    assert x.shape == (2, 1, 8, 8)
    assert x.mean(dim=(1, 2, 3)).tolist() == pytest.approx([0.299, 100 / 255], abs=2e-3)
    fifty = from_arrays(np.full((1, 8, 8), 50, np.uint8), np.zeros(1, np.int64), SPEC)
    y = denormalise(ProxyImages(fifty, rgb)(torch.tensor([0])), rgb)
    assert y.shape == (1, 3, 32, 32)
    assert set(y.unique().tolist()) <= {49, 50}
