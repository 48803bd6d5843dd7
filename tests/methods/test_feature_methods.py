"""FedFM, FedGen and FedFA+: rounds on a network of two linear layers against NumPy, their losses by
hand, degenerate cases, privacy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.config.resolve import resolve
from fedsynth.core.client import ExactClientView
from fedsynth.core.context import RoundContext
from fedsynth.data.images import from_arrays
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import SettingError
from fedsynth.federation.server import Server
from fedsynth.methods.fedfa_plus import FedFAPlus, StatisticsUp
from fedsynth.methods.fedfm import AnchorState, FedFM, FedFMLite, anchor_losses
from fedsynth.methods.fedgen import (
    DECAY,
    POOL,
    TALLIED,
    FedGen,
    GeneratorDown,
    GeneratorState,
    ensemble_loss,
)
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.models.flat import flatten
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.models.small import LeNet5, Linear
from fedsynth.privacy.dpsgd import cross_entropies
from fedsynth.privacy.errors import UnaccountedReleaseError
from fedsynth.seeding import forked_rng, torch_generator
from fedsynth.simulation.simulate import simulate
from fedsynth.synthesizer.distillation.generator import LatentGenerator
from fedsynth.synthesizer.distillation.losses import diversity_loss
from fedsynth.training.feature_statistics import (
    augmented,
    modulation,
    soft_histogram,
    symmetric_divergence,
)
from fedsynth.training.loop import load_tensors
from tests.methods import tiny
from tests.methods.tiny import LABELS, PARTS, SIZES, Array, X
from tests.rounds import play

Weights = tuple[Array, Array]  # V [3, 4] and W [3, 4]: f = V x, z = W [f; 1]
FULL: dict[str, Any] = {**tiny.FULL, "lr": 0.3}
CPU = torch.device("cpu")
# an epoch is one step on all examples


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.classifier = nn.Linear(4, 3, bias=False), nn.Linear(3, 3)
        self.first.weight.data = torch.linspace(-1, 1.5, 12).view(3, 4)
        self.classifier.weight.data = torch.linspace(1, -0.7, 9).view(3, 3)
        self.classifier.bias.data = torch.tensor([0.1, 0.0, -0.2])

    def embed(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x.flatten(1))
        return h

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.classifier(self.embed(x))
        return z


def as_arrays(parameters: Any) -> Weights:
    V, W, b = (
        torch.as_tensor(parameters[name]).detach().cpu().double().numpy()
        for name in ("first.weight", "classifier.weight", "classifier.bias")
    )
    return V, np.concatenate([W, b[:, None]], axis=1)


START = as_arrays(TwoLayers().state_dict())


def context(number: int, device: torch.device = CPU) -> RoundContext:
    return tiny.context(number, device, TwoLayers())


def rounds(
    method: TrainsLocally,
    device: torch.device = CPU,
    active: Sequence[tuple[int, ...]] = ((0, 1, 2), (0, 1, 2)),
) -> tuple[list[Weights], Any]:
    """The global model after each round, and the last state."""
    models, state, _ = tiny.rounds(method, TwoLayers, device, active)
    return [as_arrays(model) for model in models], state


def features(V: Array, rows: npt.NDArray[np.int64]) -> Array:
    return np.asarray(X[rows] @ V.T)


def with_one(f: Array) -> Array:
    return np.concatenate([f, np.ones((len(f), 1))], axis=1)


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


Pull = Callable[[Array, npt.NDArray[np.int64]], Array]
Extra = Callable[[Array, Array], Array]


def local(
    start: Weights,
    k: int,
    pull: Pull = lambda f, y: f * 0,
    extra: Extra = lambda W, p: p * 0,
    own: Callable[[Array], Array] | None = None,
) -> Weights:
    """Three full-batch steps. pull: gradient of the extra loss in each example's features; extra:
    in its logits; own: in W."""
    V, W = start
    mine = PARTS[k].numpy()
    y = LABELS[mine]
    for _ in range(3):
        f = features(V, mine)
        p = softmax(with_one(f) @ W.T)
        dz = (p - np.eye(3)[y] + extra(W, p)) / len(mine)
        dW = dz.T @ with_one(f) + (0 if own is None else own(W))
        dV = (dz @ W[:, :3] + pull(f, y) / len(mine)).T @ X[mine]
        V, W = V - 0.3 * dV, W - 0.3 * dW
    return V, W


def mean(models: Sequence[Weights], weights: Sequence[float]) -> Weights:
    total = sum(weights)
    V, W = (sum(w * m[i] for w, m in zip(weights, models, strict=True)) / total for i in (0, 1))
    return V, W  # type: ignore[return-value]


def close(actual: Sequence[Weights], expected: Sequence[Weights]) -> None:
    for a, e in zip(actual, expected, strict=True):
        for mine, theirs in zip(a, e, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=3e-5)
    assert np.abs(expected[-1][0] - START[0]).max() > 0.01  # something happened


def guided(anchors: Array, kind: str, weight: float, alpha: float) -> Pull:
    """Returns weight·∂q/∂f of each example, by hand."""

    def pull(f: Array, y: npt.NDArray[np.int64]) -> Array:
        length = np.linalg.norm(f, axis=1, keepdims=True)
        unit = f / length
        a = anchors / np.linalg.norm(anchors, axis=1, keepdims=True)
        d = 2 / 3 * (unit - a[y])
        if kind == "contrastive":
            d = (softmax(unit @ a.T / alpha) - np.eye(3)[y]) @ a / alpha
        return np.asarray(weight * (d - (d * unit).sum(1, keepdims=True) * unit) / length)

    return pull


def latent_generator() -> LatentGenerator:
    """FedGen's generator before its training, by the run's seed."""
    with forked_rng(0, "latent generator initialisation"):
        return LatentGenerator(3, 3)


def class_means(models: Sequence[tuple[int, Array]], previous: Array | None = None) -> Array:
    """Returns the anchors of clients (number, V), weighted by their examples; a missing class keeps
    the previous anchor."""
    f = np.concatenate([features(V, PARTS[k].numpy()) for k, V in models])
    y = np.concatenate([LABELS[PARTS[k].numpy()] for k, _ in models])
    anchors = np.zeros((3, 3)) if previous is None else previous.copy()
    for c in np.unique(y):
        anchors[c] = f[y == c].mean(axis=0)
    return anchors


@pytest.mark.parametrize("kind", ["contrastive", "l2"])
def test_two_rounds_of_fedfm(kind: str, device: torch.device) -> None:
    """Client 0, the only one in round 2, has no example of class 2, whose anchor stays."""
    method = FedFM(**FULL, weight=0.7, matching=kind, temperature=0.4)
    W, expected, anchors = START, [], None
    for ids in ((0, 1, 2), (0,)):
        anchors = class_means([(k, W[0]) for k in ids], anchors)
        pull = guided(anchors, kind, 0.7, 0.4)
        W = mean([local(W, k, pull) for k in ids], [SIZES[k] for k in ids])
        expected.append(W)
    models, state = rounds(method, device, ((0, 1, 2), (0,)))
    close(models, expected)
    np.testing.assert_allclose(state.anchors.cpu().numpy(), anchors, atol=1e-5)


def test_fedfm_lite_makes_its_anchors_after_training(device: torch.device) -> None:
    """One exchange; round 1 is plain, and each client's features are of its own trained model."""
    models = [local(START, k) for k in range(3)]
    first = mean(models, SIZES)
    anchors = class_means([(k, models[k][0]) for k in range(3)])
    pull = guided(anchors, "contrastive", 0.7, 0.4)
    second = mean([local(first, k, pull) for k in range(3)], SIZES)
    method = FedFMLite(**FULL, weight=0.7, temperature=0.4)
    assert method.first_request(AnchorState({}), context(1, device)) is None
    close(rounds(method, device)[0], [first, second])


def test_anchor_losses_leave_out_classes_without_anchor(device: torch.device) -> None:
    f = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    has_anchor = torch.tensor([True, False, True], device=device)
    anchors, y = torch.eye(3, device=device), torch.tensor([0, 1, 2, 1], device=device)
    for temperature in (None, 0.1):
        q = anchor_losses(f, y, anchors, has_anchor, temperature=temperature)
        assert q[1] == q[3] == 0
        (gradient,) = torch.autograd.grad(q.sum(), f)
        assert gradient.isfinite().all()
        assert gradient[[1, 3]].abs().sum() == 0
    unit = (f / f.norm(dim=1, keepdim=True)).detach().cpu().numpy()
    z = unit[0, [0, 2]] / 0.1  # only the classes with anchors compete
    expected = -np.log(np.exp(z[0]) / np.exp(z).sum())
    np.testing.assert_allclose(float(q[0].detach()), expected, rtol=1e-4)


def test_fedgens_losses_equal_loops() -> None:
    rng = np.random.default_rng(0)
    made, weights, biases = (
        rng.normal(size=(5, 4)),
        rng.normal(size=(2, 3, 4)),
        rng.normal(size=(2, 3)),
    )
    shares, noise, y = rng.random((3, 2)), rng.normal(size=(5, 6)), np.array([0, 1, 2, 2, 0])
    total = 0.0
    for n in range(5):
        for k in range(2):
            z = weights[k] @ made[n] + biases[k]
            total += shares[y[n], k] * (np.log(np.exp(z).sum()) - z[y[n]]) / 5
    t = [torch.tensor(a) for a in (made, y, weights, biases, shares)]
    np.testing.assert_allclose(float(ensemble_loss(*t)), total)
    pairs = [
        -((noise[i] - noise[j]) ** 2).mean() * np.abs(made[i] - made[j]).mean()
        for i in range(5)
        for j in range(5)
    ]
    found = diversity_loss(torch.tensor(noise), torch.tensor(made))
    np.testing.assert_allclose(float(found), np.exp(np.mean(pairs)))


def test_fedgens_second_round_equals_numpy(device: torch.device) -> None:
    """Given the generator of the server: α·CE on its embeddings (a gradient in W alone) and β·KL to
    its averaged answers, times 0.98."""
    method = FedGen(**FULL, alpha=0.5, beta=0.8, generator_steps=3, generator_batch=4)
    _, state = rounds(method, device, ((0, 1, 2),))
    start, ctx = as_arrays(state.parameters), context(2, device)
    message = method.broadcast(state, ctx)
    assert isinstance(message, GeneratorDown)
    assert message.seen_classes.all()
    generator = latent_generator().to(device)
    load_tensors({"generator": generator}, message.generator)
    generator.eval()

    def embeddings(labels: Tensor, draws: torch.Generator) -> Array:
        noise = torch.randn(len(labels), 32, generator=draws, device=device)
        with torch.no_grad():
            return generator(labels, noise).cpu().double().numpy()  # type: ignore[no-any-return]

    results = method.client_step(message, tiny.clients(device), [{}, {}, {}], ctx)
    for k, (upload, _) in enumerate(results):
        labels = torch.arange(3, device=device).repeat_interleave(POOL)
        pool = embeddings(labels, torch_generator(0, "fedgen pool", 2, k, device=device))
        draws = torch_generator(0, "fedgen embeddings", 2, k, device=device)
        asked = LABELS[PARTS[k].numpy()]

        def extra(W: Array, p: Array, pool: Array = pool, asked: Any = asked) -> Array:
            target = softmax(with_one(pool) @ W.T).reshape(3, POOL, 3).mean(1)[asked]
            return 0.8 * DECAY * (p - target)  # type: ignore[no-any-return]

        def own(W: Array, draws: torch.Generator = draws) -> Array:
            even = torch.ones(3, device=device)
            y = torch.multinomial(even, 4, replacement=True, generator=draws)
            made = with_one(embeddings(y, draws))
            wrong = softmax(made @ W.T) - np.eye(3)[y.cpu().numpy()]
            return np.asarray(0.5 * DECAY * wrong.T @ made / 4)

        expected = local(start, k, extra=extra, own=own)
        for mine, theirs in zip(as_arrays(upload.parameters), expected, strict=True):  # type: ignore[attr-defined]
            np.testing.assert_allclose(mine, theirs, atol=3e-5)
        np.testing.assert_array_equal(upload.counts.cpu().numpy(), np.bincount(asked, minlength=3))  # type: ignore[attr-defined]


def test_fedgens_generator_is_trained_as_in_plain_torch(device: torch.device) -> None:
    method = FedGen(**FULL, generator_steps=4, generator_batch=8)
    _, state = rounds(method, device, ((0, 1, 2),))
    generator = latent_generator().to(device)
    adam = torch.optim.Adam(generator.parameters(), 3e-4, weight_decay=1e-2)
    models = [local(START, k) for k in range(3)]
    counts = torch.tensor(
        np.stack([np.bincount(LABELS[part.numpy()], minlength=3) for part in PARTS]),
        dtype=torch.float32,
    )
    draws = torch_generator(0, "fedgen training", 1, device=device)
    for _ in range(4):
        y = torch.multinomial(torch.ones(3, device=device), 8, replacement=True, generator=draws)
        noise = torch.randn(8, 32, generator=draws, device=device)
        made = generator(y, noise)
        total = diversity_loss(noise, made)
        for k, (_, W) in enumerate(models):
            last = torch.tensor(W, dtype=torch.float32, device=device)
            each = F.cross_entropy(made @ last[:, :3].T + last[:, 3], y, reduction="none")
            share = counts[k] / counts.sum(0)
            total = total + (share.to(device)[y] * each).mean()
        adam.zero_grad()
        total.backward()
        adam.step()
    for name, value in generator.state_dict().items():
        torch.testing.assert_close(state.learner["generator." + name], value, atol=2e-4, rtol=1e-2)


def test_fedgens_facts_are_what_the_new_classifier_makes_of_embeddings() -> None:
    """By plain torch, of classes that somebody has had; with a classifier that always says 2, a
    third as asked, no entropy."""
    method = FedGen(**FULL, generator_steps=4, generator_batch=8)
    _, state = rounds(method, active=((0, 1, 2),))
    ctx = context(1)
    generator = latent_generator()
    load_tensors({"generator": generator}, state.learner)
    asked = torch.arange(3).repeat_interleave(TALLIED)
    draws = torch_generator(0, "tally of generated embeddings")
    noise = torch.randn(len(asked), 32, generator=draws)
    model = ctx.load(state.parameters)
    given = model.classifier(generator.eval()(asked, noise)).argmax(1)  # type: ignore[operator]
    facts = method.facts(state, ctx)["generator"]
    assert facts["agreement"] == pytest.approx(float((given == asked).float().mean()))
    assert facts["classes"] == len(given.unique())
    always = {n: torch.zeros_like(v) for n, v in state.parameters.items()}
    always["classifier.bias"] = torch.tensor([0.0, 0.0, 1.0])
    facts = method.facts(replace(state, parameters=always), ctx)["generator"]
    assert facts["agreement"] == pytest.approx(1 / 3)
    assert facts["class_entropy"] == 0
    assert "generator" not in method.facts(GeneratorState(always), ctx)


def test_a_fedgen_examples_loss_depends_only_on_itself() -> None:
    """What DP-SGD needs: the same example has the same loss in any batch, also after other
    calls."""
    method = FedGen(**FULL, generator_steps=1)
    _, state = rounds(method, active=((0, 1, 2),))
    ctx = context(2)
    task = method.task(0, method.broadcast(state, ctx), {}, ctx)
    assert task.loss is not None
    x = torch.tensor(X, dtype=torch.float32).view(9, 1, 2, 2)
    net, y = TwoLayers(), torch.tensor(LABELS)
    together = task.loss(net, x, y)
    separate = torch.stack([task.loss(net, x[i : i + 1], y[i : i + 1])[0] for i in (4, 0)])
    torch.testing.assert_close(separate, together[[4, 0]])
    assert not torch.allclose(together, cross_entropies(net, x, y))


def test_modulation_and_histograms_equal_numpy(device: torch.device) -> None:
    stats = np.random.default_rng(1).normal(size=(4, 6)) * np.linspace(0.1, 3, 6)
    v = stats.var(0) + 1e-6
    weight = 1 / (1 + 1 / v)
    np.testing.assert_allclose(
        modulation(torch.tensor(stats, device=device)).cpu().numpy(), 6 * weight / weight.sum()
    )
    np.testing.assert_allclose(modulation(torch.zeros(3, 5)).numpy(), 1)
    z = np.random.default_rng(2).normal(size=(50, 3))
    soft = soft_histogram(torch.tensor(z, device=device), 5, 0.1).cpu().numpy()
    s, cuts = 1 / (1 + np.exp(-z)), np.arange(5) / 5
    logits = (s[..., None] * np.arange(1, 6) - cuts.cumsum()) / 0.1
    e = np.exp(logits - logits.max(2, keepdims=True))
    np.testing.assert_allclose(soft, (e / e.sum(2, keepdims=True)).mean(0))
    hard = soft_histogram(torch.tensor(z), 5, 1e-6).numpy()
    expected = np.stack([np.histogram(s[:, d], bins=5, range=(0, 1))[0] / 50 for d in range(3)])
    np.testing.assert_allclose(hard, expected, atol=1e-6)
    p, q = expected + 0.1, soft + 0.1
    by_hand = ((p * np.log(p / q)).sum(1) + (q * np.log(q / p)).sum(1)).mean() / 2
    np.testing.assert_allclose(
        float(symmetric_divergence(torch.tensor(p), torch.tensor(q))), by_hand
    )


def test_two_rounds_of_fedfa_plus_equal_plain_torch() -> None:
    """Both parts on a ConvNet of two stages; the statistics and histograms of two clients come back
    as γ and π. On the CPU (TF32)."""
    spec = dataset_spec("digits")
    images = np.random.default_rng(0).integers(0, 256, (8, 1, 8, 8)).astype(np.uint8)
    parts = [torch.arange(3), torch.arange(3, 8)]
    clients = ExactClientView([0, 1], from_arrays(images, np.arange(8), spec), parts)

    def network(parameters: Any = None) -> Any:
        made = build_model(ModelSettings(width=4, depth=2), spec.image_shape, 10, 0)
        made.load_state_dict(parameters or made.state_dict())
        return made

    method = FedFAPlus(
        **{**FULL, "lr": 0.05}, probability=1.0, align_weight=0.5, bins=4, bin_temperature=0.1
    )
    server, memories = Server(method, dict(network().state_dict())), dict[int, Any]()
    for number in (1, 2):
        ctx = RoundContext(number, 0, CPU, spec, network(), 4.0, clients=2)
        uploads = play(server, [clients], memories, ctx)
        assert all(type(u) is StatisticsUp for u in uploads.values())

    net, pi = network(), None
    gammas: Any = [[None, None], [None, None]]
    kept: Any = [[[None, None], [None, None]] for _ in parts]
    for number in (1, 2):
        models: list[Any] = []
        for k, part in enumerate(parts):
            mine = network(net.state_dict())
            noise = torch_generator(0, "augmentation", number, k)
            sgd = torch.optim.SGD(mine.parameters(), 0.05)
            order = torch_generator(0, "local training", number, k)
            for _ in range(3):
                batch = part[torch.randperm(len(part), generator=order)]
                h, y = clients.images(batch), clients.labels(batch)
                for stage in range(2):
                    h = mine.features[4 * stage : 4 * stage + 4](h)
                    statistics = [h.mean((2, 3)), (h.var((2, 3), correction=0) + 1e-6).sqrt()]
                    new = []
                    for i, s in enumerate(statistics):
                        before, now = kept[k][stage][i], s.detach().mean(0)
                        kept[k][stage][i] = now if before is None else 0.99 * before + 0.01 * now
                        gamma = gammas[stage][i]
                        wide = (2 if gamma is None else gamma + 1) * (s.var(0, correction=0) + 1e-6)
                        new.append(s + torch.randn(s.shape, generator=noise) * wide.sqrt())
                    h = (h - statistics[0][..., None, None]) / statistics[1][..., None, None]
                    h = h * new[1][..., None, None] + new[0][..., None, None]
                total = F.cross_entropy(mine.classifier(h.flatten(1)), y)
                if pi is not None:
                    soft = soft_histogram(h.flatten(1), 4, 0.1)
                    total = total + 0.5 * symmetric_divergence(soft, pi)
                sgd.zero_grad()
                total.backward()  # type: ignore[no-untyped-call]
                sgd.step()
            models.append(mine)
        with torch.no_grad():
            each = [
                soft_histogram(m.embed(clients.images(p)), 4, 0.1)
                for m, p in zip(models, parts, strict=True)
            ]
        pi = torch.stack(each).mean(0)
        for stage in (0, 1):
            for i in (0, 1):
                gammas[stage][i] = modulation(torch.stack([kept[k][stage][i] for k in (0, 1)]))
        a, b = (model.state_dict() for model in models)
        net = network({name: (a[name] + b[name]) / 2 for name in a})
    state: Any = server.state
    made = torch.cat([state.parameters[name].flatten() for name, _ in net.named_parameters()])
    torch.testing.assert_close(made, flatten(net), atol=1e-4, rtol=1e-3)
    own = {f"{s}.features.{m}" for s in ("mean", "std") for m in (3, 7)}
    assert set(state.statistics) == {"histogram", *own}


@pytest.mark.parametrize("name", ["convnet", "lenet5", "resnet8"])
def test_stages_of_every_network_are_feature_maps_that_an_augmentation_changes(name: str) -> None:
    """`stage_names` name submodules whose outputs are [N, C, H, W]; the hooks go, also after an
    error."""
    settings = ModelSettings(name, width=4, norm="", projection=5 if name == "lenet5" else 0)
    net: Any = build_model(settings, (3, 64, 64), 10, 0).eval()
    seen: dict[str, Tensor] = {}
    layers: Any = {s: (lambda out, s=s: seen.setdefault(s, out) * 2) for s in net.stage_names}
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = net.embed(x)
        with augmented(net, layers):
            assert not torch.allclose(plain, net.embed(x))
        with pytest.raises(RuntimeError), augmented(net, layers):
            raise RuntimeError
        torch.testing.assert_close(net.embed(x), plain)
    assert set(seen) == set(net.stage_names)
    assert all(out.dim() == 4 for out in seen.values())


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(SettingError, match="stage_names"):
        FedFAPlus().check_model(Linear((1, 2, 2), 3))
    FedFAPlus(parts="alignment").check_model(Linear((1, 2, 2), 3))
    FedFAPlus().check_model(LeNet5((1, 28, 28), 10))
    for method in (FedFM(), FedFMLite(), FedGen(), FedFAPlus()):
        with pytest.raises(SettingError, match="`embed`"):
            method.check_model(nn.Linear(2, 2))
    with pytest.raises(UnaccountedReleaseError, match="mix the examples of a batch"):
        simulate(
            resolve({"run": {"method": "fedfa-plus", "rounds": 1}, "privacy": {"epsilon": 8.0}})
        )
    private = {"privacy": {"epsilon": 8.0}, "method": {"start_round": 2}}
    with pytest.raises(SettingError, match=r"method\.start_round must be 1"):
        simulate(resolve({"run": {"method": "fedfm", "rounds": 1}, **private}))
