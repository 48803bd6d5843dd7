"""FedKF's aggregates and steps, DENSE, FedHydra and FedDF, with absent and different clients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedsynth as fs
from fedsynth import Dense, FedBE, FedDF, FedHydra, FedKF, ModelParameters, PrivacySettings
from fedsynth.config.checks import refuse_own_proxy
from fedsynth.core.client import ExactClientView
from fedsynth.data.images import ImageData, normalise, proxy_images
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import SettingError, UnaccountedReleaseError, UnknownNameError
from fedsynth.experiments.rows import round_summary
from fedsynth.methods.fedkf import TwoModels
from fedsynth.methods.shared.aggregation import AveragingState, average
from fedsynth.methods.shared.ensemble import EnsembleDistillation, EnsembleState
from fedsynth.models.flat import flatten
from fedsynth.seeding import numpy_generator, torch_generator
from fedsynth.synthesizer.distillation.generator import make_generator
from fedsynth.synthesizer.distillation.stratification import stratified_weights
from tests.digits import CPU, SPEC, client_uploads, convnet, digits, private_clients, round_context
from tests.quick_runs import quick_sections
from tests.raising import raises
from tests.rounds import take_step

GENERATOR = {"generator_batch": 5, "latent": 6, "generator_width": 4, "generator_lr": 1e-2}
WEIGHTS = {"distillation": 0.7, "one_hot_weight": 0.3, "activation_weight": 0.2}
FAST = FedKF(local_epochs=2, batch=4, lr=0.1, plain_rounds=0, **GENERATOR, **WEIGHTS)


def context(number: int = 1, device: torch.device = CPU, **changes: Any) -> fs.RoundContext:
    federation = {"clients": 3, "sizes": (10, 20, 30), **changes}
    return round_context(number=number, device=device, nominal=6.0, **federation)


def scalar(value: float, weight: float, device: torch.device = CPU) -> ModelParameters:
    model = {"w": torch.tensor([value], device=device), "count": torch.tensor(3, device=device)}
    return ModelParameters(model, weight)


@pytest.mark.parametrize(
    ("method", "unseen"),
    [
        (FedKF(), 0.0),
        (fs.FedAvg(final="oca"), 0.0),
        (FedKF(oca="all"), 30.0),
        (fs.FedAvg(final="oca", oca="all"), 30.0),
    ],
)
def test_aggregates_with_absent_clients(method: Any, unseen: float, device: torch.device) -> None:
    """K = 3, n = (10, 20, 30), w⁰ = 1; client 0 is active once and client 2 in the last round."""
    state = AveragingState(scalar(1.0, 0.0, device).parameters)
    total = 30 + unseen

    def step(number: int, active: tuple[int, ...], *values: float) -> tuple[float, float]:
        nonlocal state
        new_values = zip(active, values, strict=True)
        uploads = {k: scalar(v, (10.0, 20.0, 30.0)[k], device) for k, v in new_values}
        state = method.server_step(state, uploads, context(number, device, participants=active))  # type: ignore[assignment]
        variants = method.variants(state)
        assert torch.equal(variants["aca"]["w"], state.parameters["w"])
        assert torch.equal(method.final_parameters(state)["w"], variants["oca"]["w"])
        assert int(variants["oca"]["count"]) == 3
        return float(state.parameters["w"]), float(variants["oca"]["w"])

    overall = (10 * 4 + 20 * 7 + unseen * 1) / total
    assert step(1, (0, 1), 4.0, 7.0) == pytest.approx(((10 * 4 + 20 * 7) / 30, overall))
    assert step(2, (1,), 2.0) == pytest.approx((2.0, (10 * 4 + 20 * 2 + unseen * 1) / total))
    assert step(3, (1,), 5.0) == pytest.approx((5.0, (10 * 4 + 20 * 5 + unseen * 1) / total))
    # client 2 joins with the largest share: both readings count all three
    assert step(4, (2,), 8.0) == pytest.approx((8.0, (10 * 4 + 20 * 5 + 30 * 8) / 60))


def test_dropped_clients_count_as_unseen() -> None:
    """With privacy all clients have equal weights."""
    initial = AveragingState(scalar(1.0, 0.0).parameters)
    uploads = {0: scalar(4.0, 10.0), 1: scalar(9.0, 0.0)}
    for oca, sizes, value in (("seen", (10, 20, 30), 4), ("seen", None, 4), ("all", None, 6 / 3)):
        ctx = context(participants=(0, 1), sizes=sizes)
        state: Any = FedKF(oca=oca).server_step(initial, uploads, ctx)
        assert float(state.overall["w"]) == pytest.approx(value)
        assert state.seen.tolist() == [True, False, False]
    assert fs.FedAvg().variants(fs.FedAvg().server_step(initial, {0: scalar(4.0, 1.0)}, ctx)) == {}  # type: ignore[arg-type]


def clients(device: torch.device = CPU) -> ExactClientView:
    return ExactClientView([1], digits(np.arange(10) % 3, device=device), [torch.arange(10)])


def plain_step(method: FedKF, start: Any, teacher: Any, device: torch.device) -> Tensor:
    """Runs Algorithm 1's ClientUpdate in plain torch, with one generator for two rounds."""
    x, y = normalise(clients().data.images, SPEC), clients().data.labels
    generator = make_generator(SPEC, 0, latent=method.latent, width=method.generator_width)
    adam = torch.optim.Adam(generator.parameters(), method.generator_lr)
    batch = method.generator_batch

    def generate(z: Tensor) -> Tensor:
        return (generator(z) - SPEC.mean[0]) / SPEC.std[0]  # type: ignore[no-any-return]

    for number in (1, 2):
        model = convnet(weights=start.state_dict())
        sgd = torch.optim.SGD(model.parameters(), method.lr)
        shuffle = torch_generator(0, "local training", number, 1)
        noise = torch_generator(0, "distillation noise", number, 1, device=device)
        for _ in range(method.local_epochs):
            for part in torch.randperm(10, generator=shuffle).split(method.batch):
                z = torch.randn(batch, method.latent, generator=noise, device=device).cpu()
                f = teacher.embed(generate(z))
                p = torch.softmax(teacher.classifier(f), 1)
                ie = -(p.mean(0) * p.mean(0).log()).sum() / np.log(10)
                oh = -p.gather(1, p.argmax(1, keepdim=True)).log().mean()
                loss_g = -ie + method.one_hot_weight * oh
                loss_g = loss_g - method.activation_weight * f.abs().mean(1).mean()
                if method.use_kl:
                    s, t = torch.log_softmax(model(generate(z)), 1), p.detach()
                    loss_g = loss_g - method.distillation * (t * (t.log() - s)).sum(1).mean()
                take_step(adam, loss_g)
                fake = generate(z).detach()
                t, s = torch.softmax(teacher(fake), 1).detach(), torch.log_softmax(model(fake), 1)
                kl = (t * (t.log() - s)).sum(1).mean()
                loss = nn.functional.cross_entropy(model(x[part]), y[part])
                take_step(sgd, loss + method.distillation * kl)
    return flatten(model)


@pytest.mark.parametrize(("kind", "use_kl"), [("oca", False), ("aca", True)])
def test_two_client_rounds_equal_plain_torch(kind: str, use_kl: bool, device: torch.device) -> None:
    method = replace(FAST, teacher=kind, use_kl=use_kl)
    start, other = convnet(seed=0), convnet(seed=5)
    parameters, overall = (
        {name: v.to(device) for name, v in net.state_dict().items()} for net in (start, other)
    )
    client_state: Any = {}
    for number in (1, 2):
        ctx = context(number, device)
        message = method.broadcast(AveragingState(parameters, overall=overall), ctx)
        assert type(message) is TwoModels
        ((upload, client_state),) = method.client_step(
            message, clients(device), [client_state], ctx
        )
    model = convnet(weights={name: v.cpu() for name, v in upload.parameters.items()})  # type: ignore[attr-defined]
    expected = plain_step(method, start, other if kind == "oca" else start, device)
    torch.testing.assert_close(flatten(model), expected, atol=2e-4, rtol=1e-3)


def test_fedkf_minus_halves_the_request() -> None:
    state = AveragingState({"w": torch.ones(4)}, overall={"w": torch.zeros(4)})
    messages = [replace(FAST, teacher=kind).broadcast(state, context()) for kind in ("oca", "aca")]
    assert [message.floats for message in messages] == [8, 4]
    plain = fs.FedAvg(local_epochs=2, batch=4, lr=0.1, momentum=0.0)
    methods = (replace(FAST, plain_rounds=1), plain)
    models = [client_uploads(m, context(), clients())[0].parameters for m in methods]
    torch.testing.assert_close(*models, rtol=0, atol=0)


def test_private_generator_is_independent_of_the_data() -> None:
    client_states = []
    ctx = context(2, privacy=PrivacySettings(noise_multiplier=1.0, sample_rate=0.5), sizes=None)
    state = AveragingState(convnet().state_dict(), overall=convnet(seed=5).state_dict())
    for size in (10, 4):
        group = private_clients(FAST, ctx, digits(np.arange(size) % 2))
        ((_, client_state),) = FAST.client_step(FAST.broadcast(state, ctx), group, [{}], ctx)
        client_states.append(client_state)
    torch.testing.assert_close(*client_states, rtol=0, atol=0)


def run(method: str, rounds: int = 1, **model: Any) -> Any:
    partition = {"clients": 5, "subset": 1.0}
    sections = quick_sections(method, run={"rounds": rounds}, model=model, partition=partition)
    return fs.resolve(sections)


def test_fedhydra_trains_on_heterogeneous_clients(tmp_path: Path) -> None:
    result = fs.simulate(run("fedhydra", clients="linear, cnn1,convnet"), output=tmp_path)
    sizes = [sum(v.numel() for v in u.parameters.values()) for u in result.uploads.values()]  # type: ignore[attr-defined]
    assert len(set(sizes)) == 3
    assert sizes[0] == sizes[3]  # assigned in turn to five clients
    assert result.folder is not None
    artefacts = load_file(result.folder / "artefacts.safetensors")
    assert artefacts["stratification"].shape == (10, 5)
    np.testing.assert_allclose(artefacts["clients_for_class"].sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(artefacts["classes_of_client"].sum(0), 1, rtol=1e-5)
    with raises(SettingError, "model.clients"):
        run("dense", 2, clients="resnet8,convnet")
    with raises(SettingError, "model.clients"):
        fs.resolve({"run": {"method": "fedavg", "rounds": 1}, "model": {"clients": "resnet8"}})
    with raises(UnknownNameError, "model.clients"):
        run("dense", clients="resnet")


server_context = partial(round_context, nominal=6.0, clients=2, participants=(0, 1))
INITIAL = EnsembleState(convnet().state_dict())
UPLOADS = {k: ModelParameters(convnet(seed=k + 1).state_dict(), 1.0 + 2 * k) for k in (0, 1)}


def proxy_of(pixels: np.ndarray) -> ImageData:
    return proxy_images(fs.from_arrays(pixels, np.zeros(len(pixels), np.int64), SPEC), SPEC)


NOISE_IMAGES = np.random.default_rng(3).integers(0, 256, (8, 8, 8)).astype(np.uint8)


@pytest.mark.parametrize("kwargs", [{"server_steps": 0}, {"server_steps": 1, "server_lr": 0.0}])
def test_fedbe_without_steps_equals_fedavg(kwargs: Any) -> None:
    fedbe = FedBE(proxy="noise", **kwargs)
    ctx = server_context(proxy=proxy_of(NOISE_IMAGES))
    models = [m.server_step(INITIAL, UPLOADS, ctx).parameters for m in (fedbe, fs.FedAvg())]
    torch.testing.assert_close(*models, rtol=0, atol=0)
    with raises(SettingError, "method.proxy"):
        FedBE().check_model(convnet())


@pytest.mark.parametrize("method", ["dense", "fedhydra"])
def test_round_measures_last_and_averaged_student(method: str) -> None:
    """The setting decides only with which of them the round ends."""
    results = {}
    for name in ("last", "average"):
        settings = run(method)
        changes = {"server_epochs": 8, "server_lr": 0.05, "student_weights": name}
        settings = replace(settings, method=replace(settings.method, **changes))
        results[name] = fs.simulate(settings, quiet=True)
    rows = {name: result.metrics[-1] for name, result in results.items()}
    models = rows["last"]["models"]
    assert models == rows["average"]["models"]
    assert {name: row["test_accuracy"] for name, row in rows.items()} == {
        name: row["test_accuracy"] for name, row in models.items()
    }
    assert rows["last"]["accuracy_by_epoch"] == rows["average"]["accuracy_by_epoch"]
    assert rows["last"]["accuracy_by_epoch"][-1] == models["last"]["test_accuracy"]
    summary = round_summary(results["last"].metrics, domains=False)
    assert summary["accuracy_by_epoch"] == rows["last"]["accuracy_by_epoch"]
    assert summary["curve"]["models.average.test_accuracy"] == [
        pytest.approx(models["average"]["test_accuracy"], abs=1e-6)
    ]


@pytest.mark.parametrize("method", [Dense(server_epochs=0), FedDF(server_steps=0, proxy="noise")])
def test_student_without_steps_equals_its_start(method: EnsembleDistillation) -> None:
    assert method.start == ("server" if method.name == "dense" else "average")
    proxy_context = server_context(proxy=proxy_of(np.zeros((4, 8, 8), np.uint8)))
    for kind, expected in (("average", average(UPLOADS)), ("server", INITIAL.parameters)):
        started: Any = replace(method, start=kind)
        new_state = started.server_step(INITIAL, UPLOADS, proxy_context)
        assert all(torch.equal(new_state.parameters[name], expected[name]) for name in expected)


def test_fedhydra_weights_logits_and_its_lessons_differ() -> None:
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
    method: Any = run("fedhydra").method
    methods = [replace(method, lessons=lessons) for lessons in ("ensemble", "average")]
    states = [m.server_step(INITIAL, UPLOADS, server_context()) for m in methods]
    first, second = (torch.cat([v.flatten() for v in s.parameters.values()]) for s in states)
    assert not torch.equal(first, second)


def test_feddf_student_approaches_the_ensemble() -> None:
    ctx = server_context(proxy=proxy_of(digits(np.arange(64) % 10).images.numpy()))
    clients = [ctx.load(u.parameters).eval() for u in UPLOADS.values()]
    x = normalise(ctx.proxy.images, SPEC)

    def divergence(parameters: Any) -> float:
        student = ctx.load(parameters).eval()
        with torch.no_grad():
            answer = torch.stack([c(x) for c in clients]).mean(0).softmax(1)
            return float((answer * (answer.log() - student(x).log_softmax(1))).sum(1).mean())

    method = FedDF(server_steps=30, server_batch=32, server_lr=1e-2)
    new_state = method.server_step(INITIAL, UPLOADS, ctx)
    assert divergence(new_state.parameters) < divergence(average(UPLOADS)) / 2
    # before anything is trained or charged
    run = {"run": {"method": "feddf", "rounds": 1}}
    with raises(SettingError, "method.proxy"):
        fs.simulate(fs.resolve({**run, "method": {"proxy": ""}}))
    private = {**run, "method": {"proxy": "digits"}, "privacy": {"epsilon": 8.0}}
    with raises(UnaccountedReleaseError, "release.proxy"):
        fs.simulate(fs.resolve(private))


@pytest.mark.parametrize("pair", ["digits-five mnist", "digits-five svhn", "femnist mnist"])
@pytest.mark.parametrize("swapped", [False, True])
def test_proxy_with_images_of_clients_is_refused(pair: str, swapped: bool) -> None:
    """Regression: only the name of the clients' data set was refused."""
    clients, proxy = reversed(pair.split()) if swapped else pair.split()
    with raises(UnaccountedReleaseError, "release.proxy"):
        refuse_own_proxy(FedBE(proxy=proxy), dataset_spec(clients))
    refuse_own_proxy(FedBE(proxy="cifar10"), dataset_spec(clients))


@pytest.mark.parametrize(
    ("distribution", "norm"), [("gaussian", "instance"), ("dirichlet", "batch")]
)
def test_fedbe_step_equals_plain_torch(distribution: str, norm: str, device: torch.device) -> None:
    """Weights are 1 and 3. The average has the student's weights after steps 4 and 6."""
    proxy, nets = proxy_of(NOISE_IMAGES), [convnet(norm, seed=k + 1) for k in (0, 1)]
    ctx = server_context(proxy=proxy.to(device), network=convnet(norm), device=device)
    uploads = {
        k: ModelParameters({n: v.to(device) for n, v in net.state_dict().items()}, 1.0 + 2 * k)
        for k, net in enumerate(nets)
    }
    swa = {"server_steps": 7, "swa_start": 2, "cycle": 2, "server_batch": 5, "server_lr": 0.1}
    draw = {"samples": 2, "distribution": distribution, "spread": 0.6, "concentration": 0.7}
    method = FedBE(**swa, **draw, last_lr=0.04, temperature=0.5, proxy="noise")
    state = method.server_step(AveragingState(uploads[0].parameters), uploads, ctx)

    def mixed(share: float) -> Any:
        pairs = zip(nets[0].state_dict().items(), nets[1].state_dict().values(), strict=True)
        return {
            n: (1 - share) * a + share * b if a.is_floating_point() else a for (n, a), b in pairs
        }

    mean = mixed(0.75)
    models = [mean, *(net.state_dict() for net in nets)]
    for number in range(2):
        seed = 0, "drawn models", 1, number
        if distribution == "dirichlet":
            a, b = numpy_generator(*seed).dirichlet([0.7, 0.7])
            models.append(mixed(3 * b / (a + 3 * b)))
            continue
        model, draws = dict(mean), torch_generator(*seed)
        for (n, p), (_, q) in zip(
            nets[0].named_parameters(), nets[1].named_parameters(), strict=True
        ):
            std = (0.25 * (p - mean[n]) ** 2 + 0.75 * (q - mean[n]) ** 2).sqrt()
            model[n] = (mean[n] + 0.6 * std * torch.randn(p.shape, generator=draws)).detach()
        models.append(model)
    ensemble = [convnet(norm, weights=weights).eval() for weights in models]
    student, draws = convnet(norm, weights=mean).train(), torch_generator(0, "proxy batches", 1)
    sgd = torch.optim.SGD(student.parameters(), momentum=0.9, weight_decay=1e-5)
    x, kept = normalise(proxy.images, SPEC), []
    for rate in (0.1, 0.1, 0.07, 0.04, 0.07, 0.04, 0.07):
        sgd.param_groups[0]["lr"] = rate
        batch = x[torch.randint(len(x), (5,), generator=draws)]
        with torch.no_grad():
            p = torch.stack([m(batch).softmax(1) for m in ensemble]).mean(0) ** 2
        p = p / p.sum(1, keepdim=True)
        take_step(sgd, (p * (p.log() - student(batch).log_softmax(1))).sum(1).mean())
        kept.append(flatten(student).detach().clone())
    averaged = convnet(norm, weights={n: v.cpu() for n, v in state.parameters.items()})
    expected = (kept[3] + kept[5]) / 2
    torch.testing.assert_close(flatten(averaged), expected, atol=1e-4, rtol=1e-3)
    if norm == "batch":  # statistics of all public images, in batches of four
        first = averaged.features[1]
        inputs = averaged.features[0](x)
        torch.testing.assert_close(first.running_mean, inputs.mean((0, 2, 3)), atol=1e-4, rtol=1e-3)


def test_ensemble_excludes_models_of_zero_weight() -> None:
    excluded = {k: replace(upload, weight=0.0) for k, upload in UPLOADS.items()}
    with patch.object(Dense, "distil", return_value=EnsembleState({})) as distil:
        Dense().server_step(INITIAL, {**excluded, 0: UPLOADS[0]}, server_context())
    assert len(distil.call_args.args[0]) == 1
    assert Dense().server_step(INITIAL, excluded, server_context()) is INITIAL
    with raises(SettingError, "method.final"):
        Dense(final="oca")


def test_proxy_images_are_converted_to_the_shape() -> None:
    rgb = dataset_spec("cifar10")
    pixels = np.zeros((2, 3, 32, 32), np.uint8)
    pixels[0, 0], pixels[1] = 255, 100
    to_grey = proxy_images(fs.from_arrays(pixels, np.zeros(2, np.int64), rgb), SPEC)
    x = to_grey.images.double() / 255
    assert x.shape == (2, 1, 8, 8)
    assert x.mean(dim=(1, 2, 3)).tolist() == pytest.approx([0.299, 100 / 255], abs=2e-3)
    fifty = fs.from_arrays(np.full((1, 8, 8), 50, np.uint8), np.zeros(1, np.int64), SPEC)
    y = proxy_images(fifty, rgb).images
    assert y.shape == (1, 3, 32, 32)
    assert set(y.unique().tolist()) <= {49, 50}
