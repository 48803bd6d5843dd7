"""FedDM as a method: who sends what, with and without differential privacy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedsynth.core.charging import charge_for
from fedsynth.core.client import OpenClients, PrivateClients
from fedsynth.core.context import RoundContext, round_context
from fedsynth.core.method import Memory
from fedsynth.core.state import ServerState
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.partition import count_matrix, partition
from fedsynth.data.partition_settings import PartitionSettings
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import SettingError, UnknownNameError
from fedsynth.evaluation.volume import condensation_floats
from fedsynth.federation.exchange.server import Server
from fedsynth.federation.simulation import simulate
from fedsynth.federation.terms.resolve import resolve
from fedsynth.methods.feddm import FedDM
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy.allowance import Allowance, UnaccountedNoise
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.plans import MAIN
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.synthesizer.condensation.sets import SyntheticSet
from tests.rounds import play

SPEC = dataset_spec("digits")
LABELS = np.array([0] * 25 + [1] * 12 + [2] * 3 + [7] * 20)
PARTS = [torch.arange(0, 40), torch.arange(40, 60)]
FAST = FedDM(ipc=2, iterations=2, server_epochs=1)


def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (60, 1, 8, 8)).astype(np.uint8)


def context(privacy: PrivacySettings | None = None, seed: int = 0) -> RoundContext:
    architecture = build_model(ModelSettings(width=4, depth=2), SPEC.image_shape, 10, 0)
    return round_context(
        1, seed, torch.device("cpu"), SPEC, architecture, nominal_size=30.0, privacy=privacy
    )


def upload(
    method: FedDM,
    ctx: RoundContext,
    clients: OpenClients | PrivateClients,
    memory: dict[str, torch.Tensor] | None = None,
) -> SyntheticSet:
    state = ServerState(ctx.architecture.state_dict())
    (first, _), *_rest = method.client_step(
        method.broadcast(state, ctx), clients, [memory or {} for _ in clients.ids], ctx
    )
    assert isinstance(first, SyntheticSet)
    return first


def open_clients(ids: tuple[int, ...] = (0,)) -> OpenClients:
    return OpenClients(ids, from_arrays(images(), LABELS, SPEC), [PARTS[k] for k in ids])


def private_clients(
    method: FedDM,
    ctx: RoundContext,
    ledger: Ledger | None = None,
    data: ImageData | None = None,
    part: torch.Tensor = PARTS[0],
) -> PrivateClients:
    guards = [Guard(ledger or Ledger("0"), 1e-5, None)]
    charged = charge_for(method, ctx, [0], guards, [SecretGenerator()])
    return PrivateClients([0], data or from_arrays(images(), LABELS, SPEC), [part], charged)


def test_open_clients_send_the_classes_with_at_least_ten_examples() -> None:
    sent = upload(FAST, context(), open_clients())
    assert sent.labels.tolist() == [0, 0, 1, 1]  # 3 examples of class 2 are too few
    assert sent.images.shape == (4, 1, 8, 8)
    assert sent.floats == 4 * 64
    assert sent.nbytes == 4 * 64 * 4 + 4 * 8
    assert upload(
        replace(FAST, min_examples=1), context(), open_clients()
    ).labels.unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize("mechanism", ["residual", "gradient"])
def test_private_clients_send_every_class_whatever_they_have(mechanism: str) -> None:
    """Catches: exact class list. One charged row a round, of T steps; nothing in the upload shows
    the minimum count rule."""
    ledger = Ledger("0")
    privacy = PrivacySettings(noise_multiplier=3.0, mechanism=mechanism)
    ctx = context(privacy)
    sent = upload(FAST, ctx, private_clients(FAST, ctx, ledger))
    assert sent.labels.tolist() == [c for c in range(10) for _ in range(2)]
    assert [(r.round, r.mechanism, r.steps, r.noise_multiplier) for r in ledger.releases] == [
        (1, mechanism, 2, 3.0)
    ]


def test_private_start_has_nothing_of_the_data() -> None:
    """Catches: real-image start. With no step the upload is the public noise, equal for other
    data."""
    privacy = PrivacySettings(noise_multiplier=3.0)
    method = replace(FAST, iterations=1, image_lr=0.0)
    ctx = context(privacy)
    first = upload(method, ctx, private_clients(method, ctx))
    others = from_arrays(255 - images(), LABELS, SPEC)
    other = private_clients(method, ctx, data=others, part=PARTS[1])
    assert torch.equal(first.images, upload(method, ctx, other).images)


def test_the_private_plan_depends_on_public_sizes_alone() -> None:
    """Catches: q or steps from true counts."""
    privacy = PrivacySettings(noise_multiplier=3.0)
    (plan,) = replace(FAST, batch=2).private_plans(privacy, context())
    assert plan.sample_rate == pytest.approx(2 * 10 / 30)
    assert plan.steps == 2
    assert plan.dimension == 10 * (4 * 4 + 10)
    assert FAST.private_plans(privacy, context())[0].sample_rate == 1.0


def test_the_same_seed_repeats_open_uploads_and_never_private_ones() -> None:
    assert torch.equal(
        upload(FAST, context(), open_clients()).images,
        upload(FAST, context(), open_clients()).images,
    )
    assert not torch.equal(
        upload(FAST, context(), open_clients()).images,
        upload(FAST, context(seed=1), open_clients()).images,
    )
    privacy = PrivacySettings(noise_multiplier=3.0)
    ctx = context(privacy)
    assert not torch.equal(
        upload(FAST, ctx, private_clients(FAST, ctx)).images,
        upload(FAST, ctx, private_clients(FAST, ctx)).images,
    )


def test_images_are_kept_over_rounds_or_restarted() -> None:
    still = replace(FAST, image_lr=0.0)
    kept = upload(still, context(), open_clients(), {"images": torch.full((4, 1, 8, 8), 7.0)})
    assert (kept.images == 7).all()
    restarted = upload(
        replace(still, restart=True),
        context(),
        open_clients(),
        {"images": torch.full((4, 1, 8, 8), 7.0)},
    )
    assert not (restarted.images == 7).any()


@pytest.mark.parametrize(
    "change",
    [{"augment": "siamese"}, {"perturbation": "ball"}, {"small_class": "resample", "batch": 20}],
)
def test_groups_do_not_change_the_uploads(change: dict[str, object]) -> None:
    method = replace(FAST, **change)  # type: ignore[arg-type]
    ctx = context()
    state = ServerState(ctx.architecture.state_dict())
    together = method.client_step(method.broadcast(state, ctx), open_clients((0, 1)), [{}, {}], ctx)
    alone = [upload(method, ctx, open_clients((k,))) for k in (0, 1)]
    for (one, _), other in zip(together, alone, strict=True):
        torch.testing.assert_close(dict(one.arrays())["images"], other.images, atol=1e-4, rtol=1e-4)


def test_the_server_stays_in_the_ball() -> None:
    ctx = context()
    state = ServerState(ctx.architecture.state_dict())
    method = replace(FAST, server_epochs=30, server_lr=1.0, radius=0.5)
    after = method.server_step(state, {0: upload(method, ctx, open_clients())}, ctx)
    distance = (
        sum((after.parameters[k] - v).square().sum() for k, v in state.parameters.items()) ** 0.5
    )
    assert 0.45 < distance <= 0.5 * (1 + 1e-4)


@pytest.mark.parametrize(
    ("classes", "per_class", "alpha", "ipc", "shape", "published"),
    [
        (10, 6000, 0.5, 10, (1, 28, 28), 635_040),
        (10, 6000, 0.1, 10, (1, 28, 28), 368_480),
        (10, 6000, 0.01, 10, (1, 28, 28), 109_760),
        (10, 5000, 0.5, 10, (3, 32, 32), 2_672_640),
        (100, 500, 0.5, 5, (3, 32, 32), 10_045_440),
        (100, 500, 0.1, 5, (3, 32, 32), 4_761_600),
        (100, 500, 0.01, 5, (3, 32, 32), 2_135_040),
    ],
)
def test_upload_volume_comes_out_near_table_3(
    classes: int,
    per_class: int,
    alpha: float,
    ipc: int,
    shape: tuple[int, int, int],
    published: int,
) -> None:
    """One partition was drawn for the paper's table; ours, over 8 seeds, must have it within 3
    standard deviations of its mean."""
    labels = np.repeat(np.arange(classes), per_class)
    floats = []
    for seed in range(8):
        settings = PartitionSettings(alpha=alpha, seed=seed)
        floats.append(
            condensation_floats(
                count_matrix(labels, partition(labels, settings, classes), classes), ipc, shape
            )
        )
    assert abs(np.mean(floats) - published) < 3 * np.std(floats, ddof=1)


def test_settings_are_validated() -> None:
    for bad in (
        {"ipc": 0},
        {"iterations": -1},
        {"image_lr": float("nan")},
        {"radius": -1.0},
        {"server_momentum": 2.0},
    ):
        with pytest.raises(SettingError):
            FedDM(**bad)  # type: ignore[arg-type]
    for choice in (
        {"augment": "siamesse"},
        {"perturbation": "spere"},
        {"small_class": "al"},
        {"batch_norm": "clients"},
    ):
        with pytest.raises(UnknownNameError, match="did you mean"):
            FedDM(**choice)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="iterations"):
        FedDM.from_mapping({"iteration": 5})
    with pytest.raises(SettingError, match=r"method\.ipc must be a whole number"):
        FedDM.from_mapping({"ipc": "many"})
    assert FedDM.from_mapping({"ipc": "5", "restart": "true"}) == FedDM(ipc=5, restart=True)


def test_the_papers_defaults() -> None:
    """FedDM, Secs. 4.1 and App. D.3; a change here is a change of the method."""
    m = FedDM()
    assert (m.ipc, m.iterations, m.image_lr, m.image_momentum, m.batch, m.radius) == (
        10,
        1000,
        1.0,
        0.0,
        256,
        5.0,
    )
    assert (m.server_epochs, m.server_batch, m.server_lr) == (500, 256, 0.01)
    assert (
        m.min_examples,
        m.restart,
        m.perturbation,
        m.augment,
        m.small_class,
        m.logit_weight,
    ) == (
        10,
        False,
        "sphere",
        "none",
        "all",
        1.0,
    )


@pytest.mark.parametrize(
    "change", [{}, {"logit_weight": 0.3}, {"image_momentum": 0.5}, {"radius": 1.0}]
)
def test_a_whole_round_equals_plain_torch(change: dict[str, float]) -> None:
    """Two clients, two rounds: perturbed networks, full batches, images kept, union training in the
    ball, all written out plainly."""
    from fedsynth.seeding import torch_generator
    from fedsynth.synthesizer.condensation.sets import real_start

    method = replace(
        FAST,
        iterations=3,
        server_epochs=2,
        server_batch=5,
        server_lr=0.05,
        min_examples=1,
        **change,
    )  # type: ignore[arg-type]
    clients, base = open_clients((0, 1)), context()
    data, spec = from_arrays(images(), LABELS, SPEC), SPEC
    x = (data.images.float() / 255 - torch.tensor(spec.mean)) / torch.tensor(spec.std)
    server = Server(method, base.architecture.state_dict())
    memories: dict[int, Memory] = {}
    model = base.load(server.state.parameters)
    segments = clients.segments(1)
    S = [s.clone() for s in real_start(clients, segments, 2, 0)]
    for number in (1, 2):
        uploads = play(server, [clients], memories, replace(base, round=number))
        generator, velocity = (
            torch_generator(0, "parameter perturbation", number),
            [torch.zeros_like(s) for s in S],
        )
        for _ in range(3):
            flat = torch.cat([p.detach().flatten() for p in model.parameters()])
            noise = torch.empty_like(flat).normal_(generator=generator)
            w = base.load(model.state_dict())
            torch.nn.utils.vector_to_parameters(
                flat + noise * min(1.0, method.radius / float(noise.norm())), w.parameters()
            )
            for i, (position, label) in enumerate(
                zip(segments.position.tolist(), segments.label.tolist(), strict=True)
            ):
                part = PARTS[position]
                real = x[part[torch.from_numpy(LABELS)[part] == label]]
                leaf = S[i].clone().requires_grad_()
                h_loss = (w.embed(leaf).mean(0) - w.embed(real).mean(0)).square().sum()  # type: ignore[operator]
                z_loss = (w(leaf).mean(0) - w(real).mean(0)).square().sum()
                loss = h_loss + method.logit_weight**2 * z_loss
                velocity[i] = (
                    method.image_momentum * velocity[i] + torch.autograd.grad(loss, leaf)[0]
                )
                S[i] = S[i] - method.image_lr * velocity[i]
        start = torch.cat([p.detach().flatten() for p in model.parameters()])
        union, labels = torch.cat(S), segments.label.repeat_interleave(2)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        shuffle = torch_generator(0, "server training", number)
        for _ in range(2):
            for part in torch.randperm(len(labels), generator=shuffle).split(5):
                optimiser.zero_grad()
                torch.nn.functional.cross_entropy(model(union[part]), labels[part]).backward()
                optimiser.step()
                offset = torch.cat([p.detach().flatten() for p in model.parameters()]) - start
                torch.nn.utils.vector_to_parameters(
                    start + offset * min(1.0, method.radius / float(offset.norm())),
                    model.parameters(),
                )
    sent = torch.cat([dict(u.arrays())["images"] for u in uploads.values()])
    torch.testing.assert_close(sent, torch.cat(S), atol=1e-4, rtol=1e-3)
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(server.state.parameters[name], expected, atol=1e-4, rtol=1e-3)


def test_siamese_augmentation_reaches_the_matching() -> None:
    still, moving = (
        upload(FAST, context(), open_clients()),
        upload(replace(FAST, augment="siamese"), context(), open_clients()),
    )
    assert not torch.allclose(still.images, moving.images)


def test_the_paper_mechanism_uses_the_clip_that_was_asked_for() -> None:
    privacy = PrivacySettings(noise_multiplier=1e-9, mechanism="paper", clip=1e-3)
    method = replace(FAST, iterations=1)
    ctx = context(privacy)
    (plan,) = method.private_plans(privacy, ctx)
    noise = UnaccountedNoise(plan.release(1, 1e-9, unaccounted="as printed"), SecretGenerator())
    data = from_arrays(images(), LABELS, SPEC)
    noisy = OpenClients([0], data, PARTS[:1], [Allowance(MAIN, [(plan, noise)])])
    moved = (
        upload(method, ctx, noisy).images
        - upload(replace(method, image_lr=0.0), context(), open_clients()).images
    )
    norms = moved.view(2, -1).norm(dim=1)
    assert norms.max() <= 1e-3 * (1 + 1e-3)
    assert norms.max() > 0.9e-3


def test_feddm_as_fedafs_paper_runs_it() -> None:
    """Averaged start images, momentum, and the gradient's norm clipped at 2: a step of plain SGD
    moves a client's images by lr·2 at most."""
    fast = {
        "ipc": 2,
        "iterations": 1,
        "image_lr": 1.0,
        "image_clip": 1e-3,
        "start_average": 5,
        "min_examples": 1,
        "server_epochs": 1,
    }
    moved = [
        simulate(resolve({"run": {"rounds": 1}, "method": {**fast, "iterations": n}})).uploads[0]
        for n in (1, 2)
    ]
    apart = [u.images for u in moved]  # type: ignore[attr-defined]
    assert 0 < float((apart[1] - apart[0]).norm()) <= 1e-3 * 1.001
