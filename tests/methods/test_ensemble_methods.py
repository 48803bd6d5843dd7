"""DENSE, FedHydra and FedDF as methods: one round, several, heterogeneous clients, privacy, and
what they leave behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsynth.cli.progress import round_line
from fedsynth.core.context import RoundContext, round_context
from fedsynth.core.messages import ModelParameters
from fedsynth.data.images import from_arrays
from fedsynth.data.proxy import ProxyImages
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import SettingError, UnknownNameError
from fedsynth.evaluation.generated import GENERATOR
from fedsynth.federation.simulation import simulate
from fedsynth.federation.terms.resolve import resolve
from fedsynth.methods.dense import Dense, generated_facts
from fedsynth.methods.feddf import FedDF
from fedsynth.methods.fedhydra import FedHydra
from fedsynth.methods.shared.aggregation import average
from fedsynth.methods.shared.ensemble import DistilsEnsemble, EnsembleState
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy.errors import ForbiddenLayerError, UnaccountedReleaseError
from fedsynth.synthesizer.generation.ensembles import average_of_logits
from fedsynth.synthesizer.generation.many_teachers import OneShotDistillation

SPEC = dataset_spec("digits")
METHODS = ["dense", "fedhydra", "feddf"]
TINY: dict[str, Any] = {
    "server_epochs": 2,
    "generator_steps": 2,
    "generator_width": 4,
    "generator_batch": 8,
    "latent": 5,
}
FAST: dict[str, dict[str, Any]] = {
    "dense": {"local_epochs": 3, **TINY},
    "fedhydra": {"local_epochs": 3, **TINY, "stratification_steps": 3, "stratification_batch": 4},
    "feddf": {"local_epochs": 3, "server_steps": 5, "server_batch": 16, "proxy": "noise"},
}


def run(method: str, rounds: int = 1, privacy: dict[str, Any] | None = None, **model: Any) -> Any:
    sections = {
        "run": {"method": method, "rounds": rounds, "device": "cpu"},
        "model": {"width": 8, "depth": 2, **model},
        "method": FAST[method],
    }
    return resolve({**sections, "privacy": privacy or {}})


@pytest.mark.parametrize("method", METHODS)
def test_one_shot_and_several_rounds(method: str) -> None:
    for rounds in (1, 2):
        result = simulate(run(method, rounds, norm="batch"))
        assert len(result.metrics) == rounds
        assert 0 < result.accuracy <= 1
    again = simulate(run(method, 2, norm="batch"))
    assert again.accuracy == result.accuracy


@pytest.mark.parametrize("method", METHODS)
def test_heterogeneous_clients(method: str) -> None:
    result = simulate(run(method, clients="resnet8, cnn1,convnet"))
    sizes = [sum(v.numel() for v in u.parameters.values()) for u in result.uploads.values()]  # type: ignore[attr-defined]
    assert len(set(sizes)) == 3
    assert sizes[0] == sizes[3]  # dealt out in turn to five clients
    with pytest.raises(SettingError, match="one round"):
        run(method, 2, clients="resnet8,convnet")
    with pytest.raises(SettingError, match="one architecture for all"):
        resolve({"run": {"method": "fedavg", "rounds": 1}, "model": {"clients": "resnet8"}})
    with pytest.raises(UnknownNameError, match="did you mean resnet8"):
        run(method, clients="resnet")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("clients", ["", "resnet8,cnn1"])
def test_with_privacy_the_clients_are_charged_and_the_server_is_not(
    method: str, clients: str
) -> None:
    result = simulate(run(method, privacy={"epsilon": 10.0}, clients=clients))
    assert result.privacy is not None
    promise: Any = result.privacy["guarantee"]
    assert 9.9 < promise["epsilon"] <= 10
    rows: Any = result.privacy["ledger"]
    assert {row["mechanism"] for row in rows} == {"dp-sgd"}
    if clients:
        # each client's own number of parameters
        assert len({row["dimension"] for row in rows}) == 2
    assert not any("running" in name for u in result.uploads.values() for name in u.parameters)  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", METHODS)
def test_batch_norm_statistics_are_refused_with_privacy(method: str) -> None:
    with pytest.raises(ForbiddenLayerError, match="batch norm"):
        simulate(run(method, privacy={"epsilon": 10.0}, norm="batch"))


def context(**changes: Any) -> RoundContext:
    architecture = build_model(ModelSettings(width=4, depth=2), SPEC.image_shape, 10, 0)
    return round_context(
        1,
        0,
        torch.device("cpu"),
        SPEC,
        architecture,
        6.0,
        **{"clients": 2, "participants": (0, 1), **changes},
    )


def uploads() -> dict[int, ModelParameters]:
    return {
        client: ModelParameters(
            build_model(ModelSettings(width=4, depth=2), SPEC.image_shape, 10, seed).state_dict(),
            weight,
        )
        for client, (seed, weight) in enumerate(((1, 1.0), (2, 3.0)))
    }


@pytest.mark.parametrize("method", [Dense(server_epochs=0), FedDF(server_steps=0, proxy="noise")])
def test_without_a_step_the_student_is_where_it_starts(method: DistilsEnsemble) -> None:
    """The n_k-weighted average (FedAvg, one shot), or the server's model."""
    pixels = np.zeros((4, 8, 8), np.uint8)
    proxy = ProxyImages(from_arrays(pixels, np.zeros(4, np.int64), SPEC), SPEC)
    state = EnsembleState(context().architecture.state_dict())
    starts = {
        kind: type(method)(**{**vars(method), "start": kind}) for kind in ("average", "server")
    }
    assert method.start == ("server" if method.name == "dense" else "average")
    for one, expected in (
        (starts["average"], average(uploads())),
        (starts["server"], state.parameters),
    ):
        made = one.server_step(state, uploads(), context(proxy=proxy))
        assert all(torch.equal(made.parameters[name], expected[name]) for name in expected)


def test_fedhydra_keeps_u_and_the_run_folder_shows_it(tmp_path: Path) -> None:
    result = simulate(run("fedhydra"), output=tmp_path)
    assert result.folder is not None
    kept = json.loads((result.folder / "artefacts.json").read_text())
    assert np.array(kept["stratification"]).shape == (10, 5)
    np.testing.assert_allclose(np.array(kept["clients_for_class"]).sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(np.array(kept["classes_of_client"]).sum(0), 1, rtol=1e-5)
    assert (result.folder / "stratification.png").read_bytes().startswith(b"\x89PNG")


def test_the_kept_columns_are_of_the_rows_shares() -> None:
    """What weighs a client's classes is Ū_r over its column's sum; `columns=raw` is U over its
    own."""
    for columns in ("in-place", "raw"):
        small = {**TINY, "stratification_steps": 3, "stratification_batch": 4}
        method = FedHydra(**small, columns=columns)  # type: ignore[arg-type]
        state = EnsembleState(context().architecture.state_dict())
        made = method.server_step(state, uploads(), context())
        kept = {name: matrix.numpy() for name, matrix in method.artefacts(made).items()}
        u = kept["stratification"]
        rows = u / u.sum(1, keepdims=True)
        base = rows if columns == "in-place" else u
        np.testing.assert_allclose(kept["clients_for_class"], rows, rtol=1e-5)
        np.testing.assert_allclose(kept["classes_of_client"], base / base.sum(0), rtol=1e-5)
    assert FedHydra().columns == "in-place"


def test_p_weighs_by_the_rows_shares_by_hand() -> None:
    """Two classes, two clients; logits of one image that was asked for as class 0."""
    u = torch.tensor([[3.0, 1.0], [1.0, 9.0]])
    logits, asked = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), torch.tensor([0])
    columns = {
        "in-place": ([0.75 / 0.85, 0.1 / 0.85], [0.25 / 1.15, 0.9 / 1.15]),
        "raw": ([0.75, 0.25], [0.1, 0.9]),
    }
    for kind, ((a, b), (c, d)) in columns.items():
        p = FedHydra(columns=kind).aggregate(u)(logits, asked)
        expected = [0.75 * 1 * a + 0.25 * 3 * c, 0.75 * 2 * b + 0.25 * 4 * d]
        assert p[0].tolist() == pytest.approx(expected)
    alone = FedHydra(aggregation="clients").aggregate(u)(logits, asked)
    assert alone[0].tolist() == pytest.approx([0.75 * 1 + 0.25 * 3, 0.75 * 2 + 0.25 * 4])
    average = FedHydra(aggregation="average").aggregate(u)(logits, asked)
    assert average.tolist() == [[2.0, 3.0]]


def test_the_student_may_learn_the_average_on_images_of_p(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []
    original = OneShotDistillation.fit

    def look(*args: Any, lessons: Any = None, **more: Any) -> Any:
        given.append(lessons is average_of_logits)
        return original(*args, lessons=lessons, **more)

    monkeypatch.setattr(OneShotDistillation, "fit", look)
    small: dict[str, Any] = {**TINY, "stratification_steps": 2, "stratification_batch": 4}
    state = EnsembleState(context().architecture.state_dict())
    for lessons in ("ensemble", "average"):
        FedHydra(**small, lessons=lessons).server_step(state, uploads(), context())
    assert given == [False, True]


@pytest.mark.parametrize("method", ["dense", "fedhydra"])
def test_a_round_says_what_its_generated_images_are(method: str, tmp_path: Path) -> None:
    """In the round's row, the summary, the round's line and the table; also with a budget."""
    for privacy in ({}, {"epsilon": 10.0}):
        settings = run(method, 2, privacy=privacy)
        result = simulate(settings, output=tmp_path)
        for row in result.metrics:
            said = row[GENERATOR]
            shares = {"agreement", "student", "class_entropy_share"}
            assert set(said) == {*shares, "class_entropy", "classes"}
            assert all(0 <= said[share] <= 1 for share in shares)
            assert 1 <= said["classes"] <= 10
            share = f"{100 * said['agreement']:.1f} % as asked"
            assert share in round_line(row, settings)
        assert result.summary[GENERATOR] == result.metrics[-1][GENERATOR]
    assert GENERATOR not in simulate(run("feddf")).metrics[0]


def test_agreement_is_of_the_student_s_images() -> None:
    """One model that names every image 3: a tenth is as asked, and one class is there."""

    class Three(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (
                5.0 * torch.nn.functional.one_hot(x.new_full((len(x),), 3).long(), 10) + 0 * x.sum()
            )

    student = build_model(ModelSettings(width=4, depth=2), SPEC.image_shape, 10, 0)
    method = Dense(**{**TINY, "server_epochs": 3, "generator_batch": 200})
    tallies = method.fit_student([Three()], student, average_of_logits, context())
    said = generated_facts(EnsembleState({}, tallies=tallies))
    assert said["agreement"] == pytest.approx(0.1, abs=0.05)
    assert (said["class_entropy"], said["classes"]) == (0, 1)


@pytest.mark.parametrize("dead", [False, True])
def test_a_student_that_learns_nothing_is_seen(dead: bool) -> None:
    """One whose features are all zero, as dead units make them, says one class of every image."""

    projection = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))

    class Projected(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1) @ projection

    student = build_model(ModelSettings("linear"), SPEC.image_shape, 10, 0)
    if dead:
        student.register_forward_pre_hook(lambda module, given: (0 * given[0],))
    steps = {"server_epochs": 10, "generator_steps": 10, "generator_batch": 64}
    method = FedHydra(**{**TINY, **steps, "conditional": True, "generator_lr": 0.02})
    tallies = method.fit_student([Projected()], student, average_of_logits, context())
    said = generated_facts(EnsembleState({}, tallies=tallies))
    assert (said["student"] < 0.3) == dead
    by_hand = [int(epoch[2].sum()) / int(epoch[0].sum()) for epoch in tallies]
    assert said["student"] == pytest.approx(by_hand[-1])  # the last tenth


def test_stratified_and_averaged_aggregation_differ() -> None:
    models = [
        FedHydra(
            **{**TINY, "stratification_steps": 3, "stratification_batch": 4, "aggregation": kind}
        )  # type: ignore[arg-type]
        .server_step(EnsembleState(context().architecture.state_dict()), uploads(), context())
        .parameters["classifier.weight"]
        for kind in ("stratified", "average")
    ]
    assert not torch.allclose(*models)


def test_feddf_moves_the_student_to_the_ensemble_on_its_proxy() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 8, 8)).astype(np.uint8)
    proxy = ProxyImages(from_arrays(pixels, np.zeros(64, np.int64), SPEC), SPEC)
    ctx = context(proxy=proxy)
    clients = [ctx.load(u.parameters).eval() for u in uploads().values()]
    x = proxy(torch.arange(64))

    def apart(parameters: Any) -> float:
        student = ctx.load(parameters).eval()
        with torch.no_grad():
            answer = torch.stack([c(x) for c in clients]).mean(0).softmax(1)
            return float((answer * (answer.log() - student(x).log_softmax(1))).sum(1).mean())

    state = EnsembleState(ctx.architecture.state_dict())
    before = apart(average(uploads()))
    made = FedDF(server_steps=30, server_batch=32, server_lr=1e-2).server_step(
        state, uploads(), ctx
    )
    assert apart(made.parameters) < before / 2
    # before anything is trained or charged
    with pytest.raises(SettingError, match=r"method\.proxy must name"):
        simulate(resolve({"run": {"method": "feddf", "rounds": 1}, "method": {"proxy": ""}}))


def test_the_clients_own_images_are_no_public_proxy() -> None:
    settings = resolve(
        {
            "run": {"method": "feddf", "rounds": 1},
            "method": {"proxy": "digits"},
            "privacy": {"epsilon": 8.0},
        }
    )
    with pytest.raises(UnaccountedReleaseError, match="the clients' own images"):
        simulate(settings)


def test_models_that_do_not_count_are_not_in_the_ensemble(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        Dense,
        "distil",
        lambda self, models, student, state, ctx: seen.append(len(models)) or EnsembleState({}),
    )
    one, two = uploads().values()
    state = EnsembleState(context().architecture.state_dict())
    Dense().server_step(state, {0: one, 1: replace(two, weight=0.0)}, context())
    assert seen == [1]
    nobody = {0: replace(one, weight=0.0), 1: replace(two, weight=0.0)}
    assert Dense().server_step(state, nobody, context()) is state
    with pytest.raises(SettingError, match="no meaning"):
        Dense(final="oca")


def test_proxy_images_are_brought_to_the_shape() -> None:
    rgb, grey = dataset_spec("cifar10"), SPEC
    pixels = np.zeros((2, 3, 32, 32), np.uint8)
    pixels[0, 0], pixels[1] = 255, 100
    to_grey = ProxyImages(from_arrays(pixels, np.zeros(2, np.int64), rgb), grey)
    x = to_grey(torch.tensor([0, 1])) * grey.std[0] + grey.mean[0]
    assert x.shape == (2, 1, 8, 8)
    assert float(x[0].mean()) == pytest.approx(0.299, abs=2e-3)
    assert float(x[1].mean()) == pytest.approx(100 / 255, abs=2e-3)
    to_rgb = ProxyImages(
        from_arrays(np.full((1, 8, 8), 50, np.uint8), np.zeros(1, np.int64), grey), rgb
    )
    y = to_rgb(torch.tensor([0]))
    assert y.shape == (1, 3, 32, 32)
    assert (
        float(
            (y * torch.tensor(rgb.std).view(3, 1, 1) + torch.tensor(rgb.mean).view(3, 1, 1)).std()
        )
        < 1e-5
    )
    assert len(to_grey) == 2


def test_settings_are_the_papers_and_validated() -> None:
    m = FedHydra()
    assert (m.local_epochs, m.batch, m.lr, m.bn_weight, m.ad_weight, m.generator_lr) == (
        200,
        128,
        0.01,
        1.0,
        0.5,
        1e-3,
    )
    assert (m.generator_steps, m.server_epochs, m.server_lr, m.stratification_steps) == (
        30,
        200,
        0.01,
        30,
    )
    assert (m.stratification_batch, m.stratification_lr) == (32, 0.01)
    assert (m.student_images, m.replay, m.generator_reset, m.learn_noise) == (
        "all",
        False,
        False,
        False,
    )
    assert (m.flips, m.crop, m.generator_beta1) == (False, 0, 0.9)
    assert Dense().only_disagreement
    assert Dense().hard_weight == 0
    d = Dense()
    assert (d.student_images, d.replay, d.generator_reset, d.learn_noise) == (
        "best",
        True,
        True,
        True,
    )
    assert (d.flips, d.crop, d.generator_beta1) == (True, 0.125, 0.5)
    with pytest.raises(UnknownNameError, match="did you mean stratified"):
        FedHydra(aggregation="stratifed")
    with pytest.raises(SettingError, match="generator_steps"):
        Dense(generator_steps=0)
