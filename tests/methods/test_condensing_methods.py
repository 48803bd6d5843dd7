"""FedDM, REAL and FedAF: rounds against plain torch, private uploads, and compiled passes."""

from __future__ import annotations

import functools
import runpy
from dataclasses import replace
from math import gamma, pi
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import vector_to_parameters

import fedsynth as fs
from fedsynth import FedAF, FedDM, PrivacySettings, RoundContext
from fedsynth.core.client import ExactClientView
from fedsynth.core.method import ClientState
from fedsynth.data.images import denormalise, normalise
from fedsynth.errors import ForbiddenLayerError, SettingError, UnknownNameError
from fedsynth.federation.server import Server
from fedsynth.methods import METHODS, method_class
from fedsynth.methods.fedaf import CondensedSet
from fedsynth.methods.shared.condensing import perturbed, resampled
from fedsynth.models import convnet as frozen
from fedsynth.models.flat import flatten
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.privacy.plans import MAIN
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation import matching
from fedsynth.synthesizer.condensation.sets import SyntheticSet, real_start
from fedsynth.training.loop import LoopCheckpointer
from tests.digits import CPU, SPEC, client_uploads, convnet, digits, private_clients, round_context
from tests.raising import raises
from tests.rounds import play_round, take_step

LABELS = np.array([0] * 25 + [1] * 12 + [2] * 3 + [7] * 20)
PARTS = [torch.arange(0, 40), torch.arange(40, 60)]
TINY: dict[str, Any] = {"ipc": 2, "iterations": 2, "server_epochs": 1}
FAST = FedDM(**TINY)
NOISY = PrivacySettings(noise_multiplier=3.0)
EXAMPLE: Any = runpy.run_path(f"{Path(__file__).parents[2]}/examples/own_condensation.py")
CONDENSING = [name for name in METHODS if issubclass(method_class(name), fs.CondensingMethod)]
CHANGES: dict[str, Any] = {
    **{"logit_weight": 0.3, "image_momentum": 0.5, "radius": 1.0, "image_clip": 0.01},
    "image_dtype": "uint8",
}


def clients(*ids: int) -> ExactClientView:
    return ExactClientView(ids, digits(LABELS), [PARTS[k] for k in ids])


def upload(method: Any, ctx: RoundContext, group: Any) -> Any:
    return client_uploads(method, ctx, group)[0]


def test_open_clients_send_classes_of_ten_examples() -> None:
    actual = upload(FAST, round_context(), clients(0))
    assert actual.labels.tolist() == [0, 0, 1, 1]  # 3 examples of class 2 are too few
    assert actual.nbytes == 4 * 64 * 4 + 4 * 8
    pixels = upload(replace(FAST, image_dtype="uint8"), round_context(), clients(0))
    assert pixels.nbytes == 4 * 64 + 4 * 8
    every = upload(replace(FAST, min_examples=1), round_context(), clients(0))
    assert every.labels.unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize("mechanism", ["residual", "gradient"])
def test_private_clients_send_every_class(mechanism: str) -> None:
    """A client's list of classes is private, and the start does not depend on its data."""
    ledger, ctx = Ledger("0"), round_context(replace(NOISY, mechanism=mechanism))
    clients = private_clients(FAST, ctx, digits(LABELS), PARTS[:1], [ledger])
    assert upload(FAST, ctx, clients).labels.tolist() == [c for c in range(10) for _ in range(2)]
    rows = [(r.round, r.mechanism, r.steps, r.noise_multiplier) for r in ledger.releases]
    assert rows == [(1, mechanism, 2, 3.0)]
    fixed = replace(FAST, iterations=1, image_lr=0.0)
    groups = (private_clients(fixed, ctx, digits(LABELS), [part]) for part in PARTS)
    assert torch.equal(*(upload(fixed, ctx, group).images for group in groups))


@pytest.mark.parametrize(
    "change", [{}, {"networks_per_round": 2}, *({k: v} for k, v in CHANGES.items())]
)
def test_two_rounds_equal_plain_torch(change: dict[str, Any]) -> None:
    """With perturbed networks, images of the previous round, and training in the ball."""
    slow = replace(FAST, iterations=4, server_epochs=2, server_batch=5, server_lr=0.05)
    method = replace(slow, min_examples=1, **change)
    group, base = clients(0, 1), round_context()
    x = normalise(digits(LABELS).images, SPEC)
    server, client_states = Server(method, base.architecture.state_dict()), dict[int, ClientState]()
    model: Any = base.load(server.state.parameters)
    pairs = group.pairs(1)
    S = [s.clone() for s in real_start(group, pairs, 2, 0)]

    def set_weights(network: torch.nn.Module, center: torch.Tensor, offset: torch.Tensor) -> None:
        scale = min(1.0, method.radius / float(offset.norm()))
        vector_to_parameters(center + offset * scale, network.parameters())

    for number in (1, 2):
        uploads = play_round(server, [group], client_states, replace(base, round=number))
        generator = torch_generator(0, "parameter perturbation", number)
        velocity = [torch.zeros_like(s) for s in S]
        start = flatten(model)
        for t in range(4):
            if method.networks_per_round and t % method.networks_per_round == 0:  # from the first
                generator = torch_generator(0, "parameter perturbation", number)
            w: Any = base.load(model.state_dict())
            set_weights(w, start, torch.empty_like(start).normal_(generator=generator))
            gradients = []
            for i, label in enumerate(pairs.label.tolist()):
                part = PARTS[int(pairs.position[i])]
                real = x[part[torch.from_numpy(LABELS)[part] == label]]
                leaf = S[i].clone().requires_grad_()
                h, z = (f(leaf).mean(0) - f(real).mean(0) for f in (w.embed, w))
                loss = h.square().sum() + method.logit_weight**2 * z.square().sum()
                gradients += torch.autograd.grad(loss, leaf)
            for i, gradient in enumerate(gradients):
                rows = [gradients[j] for j in pairs.of(int(pairs.position[i])).tolist()]
                norm = float(torch.stack(rows).norm())  # of all images of a client
                if method.image_clip and norm > method.image_clip:
                    gradient = gradient * method.image_clip / norm
                velocity[i] = method.image_momentum * velocity[i] + gradient
                S[i] = S[i] - method.image_lr * velocity[i]
        sent, labels = torch.cat(S), pairs.label.repeat_interleave(2)
        if method.image_dtype == "uint8":
            sent = denormalise(sent, SPEC)
        union = normalise(sent, SPEC) if method.image_dtype == "uint8" else sent
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        shuffle = torch_generator(0, "server training", number)
        for _ in range(2):
            for part in torch.randperm(len(labels), generator=shuffle).split(5):
                take_step(optimiser, F.cross_entropy(model(union[part]), labels[part]))
                set_weights(model, start, flatten(model) - start)
    images = torch.cat([u.images for u in uploads.values()])
    assert images.dtype == sent.dtype  # a pixel of 8 bits may be rounded otherwise
    step = 1e-4 if images.is_floating_point() else 1.0
    torch.testing.assert_close(images.float(), sent.float(), atol=step, rtol=1e-3)
    final = dict(server.state.parameters)
    torch.testing.assert_close(final, dict(model.state_dict()), atol=1e-4, rtol=1e-3)


def offsets(variant: Any, radius: float = 5.0, steps: int = 8) -> Tensor:
    model = convnet()
    networks: Any = perturbed(model, radius, variant, round_context())
    assert not any(p.requires_grad for p in next(networks).parameters())
    return torch.stack([flatten(next(networks)) - flatten(model) for _ in range(steps)])


def test_perturbations_fill_the_sphere_or_the_ball() -> None:
    """Offsets are clipped, not normalised: ‖N(0, I)‖ is about √P, and below ρ it is unchanged."""
    norms, free = offsets("sphere").norm(dim=1), offsets("sphere", radius=1e6).norm(dim=1)
    torch.testing.assert_close(norms, torch.full((8,), 5.0), rtol=1e-3, atol=0)
    root = len(flatten(convnet())) ** 0.5
    torch.testing.assert_close(free, torch.full((8,), root), rtol=0.1, atol=0)
    radii = offsets("ball", steps=200).norm(dim=1) / 5
    assert radii.max() <= 1 + 1e-4
    assert radii.mean() == pytest.approx(0.5, abs=0.08)


@pytest.mark.parametrize("step", [1, 3, 5])
def test_interrupted_loop_ends_with_the_same_images(step: int) -> None:
    """A broken version would compute the real means only in the first M steps."""
    stored: list[Any] = []

    def offer(name: str, number: int, tensors: Any) -> None:
        if number == step and not stored:
            stored.append((number, {key: value.clone() for key, value in tensors().items()}))

    store = Mock(LoopCheckpointer, offer=offer, load=lambda name: next(iter(stored), None))
    method, ctx = replace(FAST, iterations=7, networks_per_round=3), round_context(keeper=store)
    complete = client_uploads(method, ctx, clients(0, 1))
    assert stored
    repeated = client_uploads(method, ctx, clients(0, 1))
    assert all(torch.equal(a.images, b.images) for a, b in zip(complete, repeated, strict=True))


def test_unsupported_settings_are_refused() -> None:
    with raises(UnknownNameError, "method.perturbation"):
        FedDM(perturbation="cube")
    # it would otherwise use another mechanism's releases
    unknown = PrivacySettings(noise_multiplier=1.0, mechanism="mine")
    with raises(SettingError, "privacy.mechanism"):
        FAST.release_plans(unknown, round_context(unknown))
    for wrong in ({"networks_per_round": 2, "matching": "energy"}, {"networks_per_round": -1}):
        with raises(SettingError, "method.networks_per_round"):
            FedDM(**wrong)  # type: ignore[arg-type]
    run = {"run": {"method": "feddm", "rounds": 1}, "method": {"networks_per_round": 2}}
    for other in ({"privacy": {"epsilon": 8.0}}, {"model": {"norm": "batch", "width": 8}}):
        with raises(SettingError, "method.networks_per_round"):
            fs.simulate(fs.resolve({**run, **other}))


def test_real_sends_the_same_images_every_round() -> None:
    """They are the images that FedDM starts from."""
    data, method = digits(LABELS), fs.Real(ipc=2, min_examples=2)
    first, second = (upload(method, round_context(number=number), clients(0)) for number in (1, 2))
    match = (first.images[:, None] == normalise(data.images, SPEC)).flatten(2).all(dim=2)
    assert match.any(dim=1).all()
    assert torch.equal(data.labels[match.int().argmax(dim=1)], first.labels)
    assert torch.equal(first.images, second.images)
    still = FedDM(ipc=2, min_examples=2, iterations=1, image_lr=0.0)
    assert torch.equal(upload(still, round_context(), clients(0)).images, first.images)


@pytest.mark.parametrize("name", [*CONDENSING, "fedsum", "own"])
def test_private_clients_are_never_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record more would move others to another kernel. With ipc 2 no pass is partial."""
    compiled: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda f, **_: compiled.append(f.__name__) or f)
    monkeypatch.setattr(matching, "CPU_BYTES", 2 * 4 * 8 * 8 * 4)  # two images a pass
    # a separate cache: its functions are not compiled
    monkeypatch.setattr(frozen, "_parts", functools.cache(frozen._parts.__wrapped__))
    method = (EXAMPLE["ProtoDM"] if name == "own" else method_class(name)).from_mapping(TINY)
    data = digits(np.array([0] * 12 + [1] * 15 + [3] * 3))
    for mechanism in method.dp_mechanisms:
        privacy = PrivacySettings(noise_multiplier=1.0, mechanism=mechanism)
        if mechanism != "paper":  # which sees open clients, and guarantees nothing
            ctx = round_context(privacy, compiled=True)
            client_uploads(method, ctx, private_clients(method, ctx, data))
    clients = ExactClientView([0], data, [torch.arange(30)])
    client_uploads(method, round_context(compiled=False), clients)
    assert compiled == []  # nor open clients by default
    client_uploads(method, round_context(compiled=True), clients)
    functions = ["_embed"] if name == "fedsum" else ["_back", "_between", "_embed"]
    assert sorted(compiled) == functions


@pytest.mark.parametrize("mechanism", ["residual", "gradient"])
def test_the_server_accepts_images_that_are_mostly_noise(mechanism: str) -> None:
    method = replace(FAST, image_lr=1e12)
    ctx = round_context(PrivacySettings(noise_multiplier=1.0, mechanism=mechanism))
    images = upload(method, ctx, private_clients(method, ctx, digits(LABELS))).images
    rule: Any = method.upload_rules(MAIN, 0, ctx)["images"]
    assert (float(images.min()), float(images.max())) == (rule.low, rule.high)
    exact = upload(method, round_context(), clients(0)).images  # a divergence is still refused
    assert float(exact.abs().max()) > rule.high


FEW = digits([0, 0, 0, 1, 1, 1, 1, 2, 0, 0, 1, 1])
FEW_PARTS = [torch.arange(8), torch.arange(8, 12)]  # client 1 lacks class 2; both lack 3 … 9
SERVER: dict[str, Any] = {"server_epochs": 2, "server_batch": 4, "server_lr": 0.05}
WEIGHTS = {"local_weight": 0.3, "global_weight": 0.7, "temperature": 2.0}
FEDAF = FedAF(ipc=2, iterations=3, image_lr=0.5, start_average=2, **SERVER, **WEIGHTS)
context = functools.partial(round_context, nominal=6.0, clients=2)


def run_rounds(method: FedAF, active: Any, device: torch.device = CPU) -> tuple[list[Any], Any]:
    server = Server(method, context().architecture.to(device).state_dict())
    client_states, states, uploads = dict[int, Any](), [], dict[int, Any]()
    for number, ids in enumerate(active, 1):
        clients = ExactClientView(ids, FEW.to(device), [FEW_PARTS[k] for k in ids])
        ctx = context(number=number, device=device, participants=ids)
        uploads = play_round(server, [clients], client_states, ctx)
        states.append(server.state)
    return states, uploads


def knowledge_loss(method: FedAF, z: Tensor, truth: Tensor, soft: Any, classes: Any) -> Tensor:
    """Returns λ Σ_c (KL(R ‖ T) + KL(T ‖ R)) / 2 (Eqs. 13 to 15)."""
    total = torch.zeros(())
    for c in classes:
        t, r = torch.softmax(z[truth == c].mean(0) / method.temperature, 0), soft[c]
        total = total + ((r - t) * (r / t).log()).sum() / 2
    return method.global_weight * total


def plain_rounds(method: FedAF, count: int) -> tuple[Tensor, list[Tensor]]:
    """Computes the rounds equation by equation: (w, pixels of each client)."""
    x, y = normalise(FEW.images, SPEC), FEW.labels
    C = [[0, 1, 2], [0, 1]]
    model, images, V = context().architecture, {}, None
    for number in range(1, count + 1):
        ctx, net = context(number=number), model
        with torch.no_grad():
            z = net(x)
        # Eqs. 5 and 8
        v = [{c: z[part][y[part] == c].mean(0) for c in C[k]} for k, part in enumerate(FEW_PARTS)]
        average = {c: torch.stack([z[c] for z in v if c in z]).mean(0) for c in C[0]}
        if method.knowledge_from == "first-exchange":
            V = average
        pixels = []
        for k, part in enumerate(FEW_PARTS):
            if k not in images:
                generator = torch_generator(0, "averaged start images", k)
                classes = [x[part[y[part] == c]] for c in C[k]]
                drawn = [z[torch.randint(len(z), (4,), generator=generator)] for z in classes]
                images[k] = torch.stack(drawn).view(-1, 2, 2, 1, 8, 8).mean(2)
            S, velocity = images[k].clone(), torch.zeros_like(images[k])
            draws = resampled(net, method.gamma, ctx)
            for _ in range(method.iterations):
                w: Any = next(draws)
                leaf = S.clone().requires_grad_()
                loss = torch.zeros(())
                for i, c in enumerate(C[k]):
                    h, real = w.embed(leaf[i]), w.embed(x[part[y[part] == c]])
                    loss = loss + (h.mean(0) - real.mean(0)).square().sum()  # Eq. 4
                    if V is not None:
                        u = w.classifier(h).mean(0)
                        factor = gamma(10 / 2) / gamma(11 / 2) / pi**0.5
                        loss = loss + method.local_weight * factor * (u - V[c]).norm()  # Eq. 10
                (gradient,) = torch.autograd.grad(loss, leaf)
                velocity = method.image_momentum * velocity + gradient
                S = S - method.image_lr * velocity
            images[k] = S
            pixels.append(denormalise(S.flatten(0, 1), SPEC))
        V = average
        soft = [{c: torch.softmax(v[k][c] / method.temperature, 0) for c in C[k]} for k in (0, 1)]
        # Eq. 12
        R = {c: torch.stack([s[c] for s in soft if c in s]).mean(0) for c in C[0]}
        union = normalise(torch.cat(pixels), SPEC)
        labels = torch.cat([torch.tensor(C[k]).repeat_interleave(2) for k in (0, 1)])
        model = convnet(weights=net.state_dict())
        optimiser = torch.optim.SGD(model.parameters(), method.server_lr, method.server_momentum)
        shuffle = torch_generator(0, "server training", number)
        for _ in range(method.server_epochs):
            for part in torch.randperm(len(labels), generator=shuffle).split(method.server_batch):
                logits, truth = model(union[part]), labels[part]
                loss = F.cross_entropy(logits, truth)
                if method.server_matching != "minibatch":
                    logits, truth = model(union), labels
                present = truth.unique().tolist()
                share = 1 if method.matching_reduction == "sum" else 1 / len(present)
                knowledge = knowledge_loss(method, logits, truth, R, present)
                take_step(optimiser, loss + share * knowledge)
        model.requires_grad_(True)
    return flatten(model), pixels


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gamma", 0.9),
        ("gamma", 0.0),
        ("knowledge_from", "first-exchange"),
        ("server_matching", "union"),
        ("matching_reduction", "sum"),
    ],
)
def test_two_fedaf_rounds_equal_plain_torch(field: str, value: Any, device: torch.device) -> None:
    method = replace(FEDAF, **{field: value})
    states, uploads = run_rounds(method, ((0, 1), (0, 1)), device)
    expected, pixels = plain_rounds(method, 2)
    for k, theirs in enumerate(pixels):
        assert uploads[k].images.dtype == torch.uint8
        # rounding to a pixel may fall either way
        assert (uploads[k].images.cpu().int() - theirs.int()).abs().max() <= 1
    model = convnet(weights=dict(states[-1].parameters))
    torch.testing.assert_close(flatten(model), expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("server_matching", ["minibatch", "union"])
def test_server_step_with_batch_norm_equals_plain_torch(server_matching: str) -> None:
    method = replace(FEDAF, server_batch=12, server_epochs=1, server_matching=server_matching)
    ctx = context(network=convnet("batch"))
    images, labels = normalise(FEW.images, SPEC), FEW.labels
    soft = torch.softmax(torch.arange(100.0).view(10, 10).sin(), 1)
    model, plain = (ctx.load(ctx.architecture.state_dict()) for _ in range(2))
    has_labels = torch.arange(10) != 1
    method._train_server(model, {0: SyntheticSet(images, labels)}, soft, has_labels, ctx)
    logits = plain.train()(images)
    # class 1 has no soft label, the others no image
    knowledge = knowledge_loss(method, logits, labels, soft, [0, 2]) / 2
    loss = F.cross_entropy(logits, labels) + knowledge
    take_step(torch.optim.SGD(plain.parameters(), method.server_lr), loss)
    torch.testing.assert_close(flatten(model), flatten(plain), atol=1e-5, rtol=1e-4)


def test_missing_classes_leave_the_averaged_logits() -> None:
    """Bytes follow App. C: pixels as uint8, V and R as float32, plus labels and flags."""
    (state,), uploads = run_rounds(FEDAF, ((0, 1),))
    first, second = uploads[0], uploads[1]
    masks = torch.stack([first.present, second.present, state.has_logits])
    assert masks.nonzero()[:, 1].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    torch.testing.assert_close(state.logits[2], first.logits[2])  # client 1's row is not in it
    torch.testing.assert_close(state.logits[0], (first.logits[0] + second.logits[0]) / 2)
    assert first.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert first.nbytes == 6 * 64 + 6 * 8 + 2 * 10 * 10 * 4 + 10


def test_resampling_interpolates_and_repeats() -> None:
    model, rng_state = convnet(seed=1), torch.get_rng_state()

    def draws(gamma: float, **options: Any) -> list[Tensor]:
        networks = resampled(model, gamma, context(), **options)
        return [flatten(next(networks)) for _ in range(4)]

    fresh, mixed, center = draws(0.0), draws(0.9), flatten(model)
    assert not torch.equal(fresh[0], fresh[1])
    for f, m in zip(fresh, mixed, strict=True):
        torch.testing.assert_close(m, 0.9 * center + 0.1 * f)
    assert torch.equal(draws(1.0)[3], center)
    assert torch.equal(draws(0.5, period=2)[3], draws(0.5)[1])
    assert torch.equal(rng_state, torch.get_rng_state())


@pytest.mark.parametrize("knowledge_from", ["previous-round", "first-exchange"])
def test_logits_of_absent_clients_persist(knowledge_from: str) -> None:
    states, _ = run_rounds(replace(FEDAF, knowledge_from=knowledge_from), ((0,), (1,)))
    assert [s.has_logits.nonzero().flatten().tolist() for s in states] == [[0, 1, 2]] * 2
    assert torch.equal(states[0].logits[2], states[1].logits[2])


def private_upload(sigma: float) -> tuple[CondensedSet, list[Any]]:
    ctx, ledger = context(privacy=PrivacySettings(noise_multiplier=sigma)), Ledger("0")
    (upload,) = client_uploads(FEDAF, ctx, private_clients(FEDAF, ctx, FEW, ledgers=[ledger]))
    return upload, list(ledger.releases)


def test_private_clients_charge_every_release() -> None:
    release = GaussianSumMechanism.release
    with patch.object(GaussianSumMechanism, "release", autospec=True, side_effect=release) as spy:
        upload, rows = private_upload(2.0)
    assert sorted((r.quantity, r.steps, r.sensitivity, r.noise_multiplier) for r in rows) == [
        ("class counts", 1, 1.0, 10.0),
        ("class sums of logits (V and R)", 1, 5.0, 10.0),
        ("synthetic images", 3, 0.25 * 16**0.5, 2.0),
    ]
    assert spy.call_count == 3 + 1 + 1
    # every class, also missing ones
    assert upload.labels.tolist() == [c for c in range(10) for _ in range(2)]
    # R is computed from the released V
    torch.testing.assert_close(upload.soft, torch.softmax(upload.logits / 2.0, dim=1))
    normed = context(network=convnet("batch"))
    with pytest.raises(ForbiddenLayerError):
        FEDAF.release_plans(PrivacySettings(noise_multiplier=1.0), normed)
    # counts of 5, 6 and 1 reach the floor of 1, so V is the mean; missing classes are marked
    upload, _ = private_upload(1e-9)
    with torch.no_grad():
        z = convnet()(normalise(FEW.images, SPEC))
    for c in range(3):
        expected = z[c == FEW.labels].mean(0)
        torch.testing.assert_close(upload.logits[c], expected, atol=1e-5, rtol=1e-4)
    assert upload.present.tolist() == [True] * 3 + [False] * 7
