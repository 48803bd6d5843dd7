"""FedDM and REAL as methods: uploads with and without differential privacy."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth.config.resolve import resolve
from fedsynth.core.client import ExactClientView, PrivateClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.method import Memory
from fedsynth.data.images import normalise
from fedsynth.data.partition import count_matrix, partition
from fedsynth.data.partition_settings import PartitionSettings
from fedsynth.errors import SettingError, UnknownNameError
from fedsynth.federation.server import Server
from fedsynth.methods import METHODS, method_class
from fedsynth.methods.feddm import FedDM, perturbed
from fedsynth.methods.real import Real
from fedsynth.methods.shared.condensing import CondensingMethod
from fedsynth.models.flat import flatten
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.seeding import torch_generator
from fedsynth.simulation.simulate import simulate
from fedsynth.synthesizer.condensation.sets import SyntheticSet, real_start
from fedsynth.training.loop import LoopCheckpointer
from tests.digits import SPEC, client_uploads, convnet, digits, private_clients, round_context
from tests.rounds import play_round

LABELS = np.array([0] * 25 + [1] * 12 + [2] * 3 + [7] * 20)
PARTS = [torch.arange(0, 40), torch.arange(40, 60)]
FAST = FedDM(ipc=2, iterations=2, server_epochs=1)
NOISY = PrivacySettings(noise_multiplier=3.0)


def clients(*ids: int) -> ExactClientView:
    return ExactClientView(ids, digits(LABELS), [PARTS[k] for k in ids])


def upload(
    method: Any, ctx: RoundContext, group: ExactClientView | PrivateClientView, **memory: Any
) -> SyntheticSet:
    """Returns the upload of the group's first client."""
    first = client_uploads(method, ctx, group, [memory for _ in group.ids])[0]
    assert isinstance(first, SyntheticSet)
    return first


def private_client(
    method: FedDM, ctx: RoundContext, ledger: Ledger | None = None, part: torch.Tensor = PARTS[0]
) -> PrivateClientView:
    return private_clients(method, ctx, digits(LABELS), [part], ledger and [ledger])


def test_open_clients_send_classes_of_ten_examples() -> None:
    actual = upload(FAST, round_context(), clients(0))
    assert actual.labels.tolist() == [0, 0, 1, 1]  # 3 examples of class 2 are too few
    assert actual.nbytes == 4 * 64 * 4 + 4 * 8
    every = upload(replace(FAST, min_examples=1), round_context(), clients(0))
    assert every.labels.unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize("mechanism", ["residual", "gradient"])
def test_private_clients_send_every_class(mechanism: str) -> None:
    """The list of classes that a client has is private."""
    ledger = Ledger("0")
    ctx = round_context(replace(NOISY, mechanism=mechanism))
    actual = upload(FAST, ctx, private_client(FAST, ctx, ledger))
    assert actual.labels.tolist() == [c for c in range(10) for _ in range(2)]
    rows = [(r.round, r.mechanism, r.steps, r.noise_multiplier) for r in ledger.releases]
    assert rows == [(1, mechanism, 2, 3.0)]


def test_private_start_is_independent_of_the_data() -> None:
    fixed, ctx = replace(FAST, iterations=1, image_lr=0.0), round_context(NOISY)
    first, other = (
        upload(fixed, ctx, private_client(fixed, ctx, part=part)).images for part in PARTS
    )
    assert torch.equal(first, other)


@pytest.mark.parametrize(
    ("classes", "alpha", "ipc", "shape", "published"),
    [
        (10, 0.5, 10, (1, 28, 28), 635_040),
        (10, 0.5, 10, (3, 32, 32), 2_672_640),
        (100, 0.5, 5, (3, 32, 32), 10_045_440),
        (100, 0.01, 5, (3, 32, 32), 2_135_040),
    ],
)
def test_upload_volume_is_near_table_3(
    classes: int, alpha: float, ipc: int, shape: tuple[int, int, int], published: int
) -> None:
    """The paper drew one partition. Its volume is within 3 standard deviations of our mean over 8
    seeds."""
    labels = np.repeat(np.arange(classes), (60_000 if shape[0] == 1 else 50_000) // classes)
    floats = []
    for seed in range(8):
        parts = partition(labels, PartitionSettings(alpha=alpha, seed=seed), classes)
        uploaded_classes = (count_matrix(labels, parts, classes) >= 10).sum()  # min_examples
        floats.append(uploaded_classes * ipc * np.prod(shape))
    assert abs(np.mean(floats) - published) < 3 * np.std(floats, ddof=1)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"logit_weight": 0.3},
        {"image_momentum": 0.5},
        {"radius": 1.0},
        {"image_clip": 0.01},
        {"networks_per_round": 2},
    ],
)
def test_two_rounds_equal_plain_torch(change: dict[str, float]) -> None:
    """Two clients, two rounds: perturbed networks, full batches, images of the previous round,
    union training in the ball."""
    slow = replace(FAST, iterations=4, server_epochs=2, server_batch=5, server_lr=0.05)
    method = replace(slow, min_examples=1, **change)  # type: ignore[arg-type]
    group, base = clients(0, 1), round_context()
    x = normalise(digits(LABELS).images, SPEC)
    server, memories = Server(method, base.architecture.state_dict()), dict[int, Memory]()
    model: Any = base.load(server.state.parameters)
    segments = group.segments(1)
    S = [s.clone() for s in real_start(group, segments, 2, 0)]

    def set_weights(network: torch.nn.Module, center: torch.Tensor, offset: torch.Tensor) -> None:
        """Sets the network's weights to `center` and an offset, scaled into the ball."""
        scale = min(1.0, method.radius / float(offset.norm()))
        torch.nn.utils.vector_to_parameters(center + offset * scale, network.parameters())

    for number in (1, 2):
        uploads = play_round(server, [group], memories, replace(base, round=number))
        generator = torch_generator(0, "parameter perturbation", number)
        velocity = [torch.zeros_like(s) for s in S]
        start = flatten(model)
        for t in range(4):
            if method.networks_per_round and t % method.networks_per_round == 0:  # from the first
                generator = torch_generator(0, "parameter perturbation", number)
            w: Any = base.load(model.state_dict())
            set_weights(w, start, torch.empty_like(start).normal_(generator=generator))
            gradients = []
            for i, label in enumerate(segments.label.tolist()):
                part = PARTS[int(segments.position[i])]
                real = x[part[torch.from_numpy(LABELS)[part] == label]]
                leaf = S[i].clone().requires_grad_()
                h_loss = (w.embed(leaf).mean(0) - w.embed(real).mean(0)).square().sum()
                z_loss = (w(leaf).mean(0) - w(real).mean(0)).square().sum()
                loss = h_loss + method.logit_weight**2 * z_loss
                gradients += torch.autograd.grad(loss, leaf)
            for i, gradient in enumerate(gradients):
                rows = [gradients[j] for j in segments.of(int(segments.position[i])).tolist()]
                norm = float(torch.stack(rows).norm())  # of all images of a client
                if method.image_clip and norm > method.image_clip:
                    gradient = gradient * method.image_clip / norm
                velocity[i] = method.image_momentum * velocity[i] + gradient
                S[i] = S[i] - method.image_lr * velocity[i]
        union, labels = torch.cat(S), segments.label.repeat_interleave(2)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        shuffle = torch_generator(0, "server training", number)
        for _ in range(2):
            for part in torch.randperm(len(labels), generator=shuffle).split(5):
                optimiser.zero_grad()
                torch.nn.functional.cross_entropy(model(union[part]), labels[part]).backward()
                optimiser.step()
                set_weights(model, start, flatten(model) - start)
    images = torch.cat([u.images for u in uploads.values()])
    torch.testing.assert_close(images, torch.cat(S), atol=1e-4, rtol=1e-3)
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(server.state.parameters[name], expected, atol=1e-4, rtol=1e-3)


def draws(
    variant: str, radius: float = 5.0, steps: int = 8, period: int | None = None
) -> tuple[Tensor, Tensor]:
    model = convnet()
    networks: Any = perturbed(model, radius, variant, round_context(), period)  # type: ignore[arg-type]
    center = flatten(model)
    assert not any(p.requires_grad for p in next(networks).parameters())
    assert all(p.requires_grad for p in model.parameters())
    return center, torch.stack([flatten(next(networks)) - center for _ in range(steps)])


def test_perturbations_fill_the_sphere_or_the_ball() -> None:
    """Offsets are clipped, not normalised: ‖N(0, I)‖ is about √P, and below ρ it is unchanged."""
    center, offsets = draws("sphere")
    torch.testing.assert_close(offsets.norm(dim=1), torch.full((8,), 5.0), rtol=1e-3, atol=0)
    norms = draws("sphere", radius=1e6)[1].norm(dim=1)
    torch.testing.assert_close(norms, torch.full((8,), len(center) ** 0.5), rtol=0.1, atol=0)
    radii = draws("ball", steps=200)[1].norm(dim=1) / 5
    assert radii.max() <= 1 + 1e-4
    assert radii.mean() == pytest.approx(0.5, abs=0.08)


def test_draws_repeat_after_a_period() -> None:
    first, repeated = draws("sphere")[1], draws("sphere", period=3)[1]
    assert torch.equal(repeated[:2], first[:2])
    assert torch.equal(repeated[3:], repeated[:-3])


class SingleCheckpoint(LoopCheckpointer):
    """Stores the tensors that a loop offers at one step, and loads them."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.stored: tuple[int, dict[str, Tensor]] | None = None

    def load(self, name: str) -> tuple[int, dict[str, Tensor]] | None:
        return self.stored

    def offer(self, name: str, step: int, tensors: Any) -> None:
        if step == self._step and self.stored is None:
            self.stored = step, {key: value.clone() for key, value in tensors().items()}


@pytest.mark.parametrize("step", [1, 3, 5])
def test_interrupted_loop_ends_with_the_same_images(step: int) -> None:
    """A broken version would compute the real means only in the first M steps."""
    store = SingleCheckpoint(step)
    method, ctx = replace(FAST, iterations=7, networks_per_round=3), round_context(keeper=store)
    complete = client_uploads(method, ctx, clients(0, 1))
    assert store.stored is not None
    repeated = client_uploads(method, ctx, clients(0, 1))
    assert all(torch.equal(a.images, b.images) for a, b in zip(complete, repeated, strict=True))


def test_fixed_networks_refuse_unsupported_settings() -> None:
    with pytest.raises(UnknownNameError, match="perturbation"):
        FedDM(perturbation="cube")
    for wrong in ({"networks_per_round": 2, "matching": "energy"}, {"networks_per_round": -1}):
        with pytest.raises(SettingError, match="networks_per_round"):
            FedDM(**wrong)  # type: ignore[arg-type]
    run = {"run": {"method": "feddm", "rounds": 1}, "method": {"networks_per_round": 2}}
    for other in ({"privacy": {"epsilon": 8.0}}, {"model": {"norm": "batch", "width": 8}}):
        with pytest.raises(SettingError, match="networks_per_round"):
            simulate(resolve({**run, **other}))


def test_real_sends_the_same_images_every_round() -> None:
    """They are the images that FedDM starts from."""
    data = digits(LABELS)
    method = Real(ipc=2, min_examples=2)
    first, second = (upload(method, round_context(number=number), clients(0)) for number in (1, 2))
    images = normalise(data.images, SPEC).flatten(1)
    match = (first.images.flatten(1)[:, None] == images[None]).all(dim=2)
    assert match.any(dim=1).all()
    assert torch.equal(data.labels[match.int().argmax(dim=1)], first.labels)
    assert torch.equal(first.images, second.images)
    still = FedDM(ipc=2, min_examples=2, iterations=1, image_lr=0.0)
    assert torch.equal(upload(still, round_context(), clients(0)).images, first.images)


EXAMPLE: dict[str, Any] = runpy.run_path(
    str(Path(__file__).parents[2] / "examples" / "own_condensation.py")
)
CONDENSING = [name for name in METHODS if issubclass(method_class(name), CondensingMethod)]
TINY: dict[str, Any] = {"ipc": 2, "iterations": 2, "server_epochs": 1}


@pytest.mark.parametrize("name", [*CONDENSING, "fedsum", "own"])
def test_private_clients_are_never_compiled(name: str, compiled: list[str]) -> None:
    """A further record would move other records to another kernel."""
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


def test_unknown_mechanisms_are_refused() -> None:
    """It would otherwise use another mechanism's releases."""
    privacy = PrivacySettings(noise_multiplier=1.0, mechanism="mine")
    method = method_class("feddm").from_mapping(TINY)
    with pytest.raises(SettingError, match=r"privacy\.mechanism"):
        method.release_plans(privacy, round_context(privacy))
