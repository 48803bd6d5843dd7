"""The package's networks against torchvision's, their private steps, and fast layers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

from fedsynth import FPL, FedAF, FedAvg, FedFM, FedGen, PartitionSettings, RunSettings, simulate
from fedsynth.core.client import ExactClientView
from fedsynth.errors import ForbiddenLayerError, SettingError, UnknownNameError
from fedsynth.features.feature_map import Shape
from fedsynth.models import registry
from fedsynth.models.convnet import WIDE, InstanceNorm, channels_last
from fedsynth.models.flat import flatten
from fedsynth.models.layers import SharedStatistics, batch_statistics, with_grouped_statistics
from fedsynth.models.registry import ModelSettings, build_model, model_names, parameter_count
from fedsynth.privacy.dpsgd import DpSgdSettings, check_model, dp_sgd
from fedsynth.privacy.passes import Units
from fedsynth.synthesizer.condensation.matching import ExactMatcher, NetworkFeatures
from fedsynth.synthesizer.condensation.sets import BatchIndices
from fedsynth.training.sgd import MomentumSgd
from tests.digits import digits
from tests.privacy.support import mechanism
from tests.quick_runs import by_family
from tests.raising import raises

TORCHVISION = ("resnet18", "resnet50", "googlenet", "swin-t")
MNIST, CIFAR, LARGE = (1, 28, 28), (3, 32, 32), (3, 64, 64)


def network(name: str, shape: Shape, classes: int = 10, **settings: Any) -> Any:
    return build_model(ModelSettings(name, **settings), shape, classes, 0).eval()


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_parameter_counts() -> None:
    for name, shape, classes, settings, count in (
        ("convnet", MNIST, 10, {}, 317_706),  # FedDM's Table 3
        ("convnet", CIFAR, 10, {}, 320_010),
        ("convnet", CIFAR, 100, {}, 504_420),
        ("convnet", LARGE, 10, {"norm": "batch"}, 381_450),  # FedAF's
        ("resnet18", CIFAR, 10, {}, 11_181_642),  # FedAF's
        ("resnet50", CIFAR, 10, {"norm": "group"}, 23_528_522),
        ("densenet100", CIFAR, 10, {}, 769_162),  # 0.8 M in DenseNet's Table 2
        ("swin-t", (3, 224, 224), 1000, {}, 28_288_354),  # 28.3 M in Swin's and torchvision's
        ("linear", (1, 1, 60), 10, {}, 610),
        ("unet", (3, 384, 384), 2, {"width": 32}, 7_763_074),  # FedFA's
        ("lenet5", MNIST, 10, {}, 156 + 2_416 + 48_120 + 10_164 + 850),
        ("lenet5", MNIST, 26, {}, 63_066),
        ("cnn3", MNIST, 10, {}, 416 + 32 + 12_832 + 64 + 15_690),
        # convolutions, shortcuts, norms, classifier
        ("resnet8", CIFAR, 10, {}, 9 * 8_240 + 16 * 32 + 32 * 64 + 2 * 336 + 650),
    ):
        assert parameter_count(network(name, shape, classes, **settings)) == count


@pytest.mark.parametrize("name", by_family(TORCHVISION, ("resnet18", "googlenet", "swin-t")))
def test_networks_equal_torchvision(name: str) -> None:
    net, x = network(name, LARGE, 7), random_tensor(2, *LARGE)
    options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    named = name.replace("-", "_")
    reference = torchvision.models.get_model(named, num_classes=7, weights=None, **options).eval()
    last = next(reversed(reference._modules))  # fc, head or classifier
    state = {n.replace("classifier.", f"{last}."): v for n, v in net.state_dict().items()}
    reference.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(net(x), reference(x))


def test_densenet_is_torchvisions_with_the_papers_first_layer() -> None:
    net, x = network("densenet100", CIFAR), random_tensor(2, *CIFAR)
    assert [name for name, _ in net.features.named_children()][:2] == ["conv0", "denseblock1"]
    assert net.features.conv0(x).shape == (2, 24, 32, 32)
    assert net.features.denseblock1(net.features.conv0(x))[0].numel() == net.largest_activation
    with torch.no_grad():
        torch.testing.assert_close(net(x), torchvision.models.DenseNet.forward(net, x))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps", "rounds"), [("densenet100", 20, 2), ("swin-t", 3, 1)])
def test_clients_train_large_networks(name: str, steps: int, rounds: int) -> None:
    method, split = FedAvg(local_steps=steps, batch=16), PartitionSettings(clients=2, subset=0.1)
    result = simulate(
        RunSettings(method, rounds=rounds, partition=split, model=ModelSettings(name))
    )
    assert result.accuracy > 0.3


def test_alexnet_has_convolutions_of_torchvision() -> None:
    net, reference = network("alexnet", LARGE), torchvision.models.alexnet(num_classes=10)
    ours, theirs = (
        [(m.weight.shape, m.stride, m.padding) for m in part.modules() if isinstance(m, nn.Conv2d)]
        for part in (net, reference.features)
    )
    assert ours == theirs
    norms = 2 * (64 + 192 + 384 + 256 + 256 + 1024 + 1024)
    dense = (9216 + 1) * 1024 + 1025 * 1024 + 1025 * 10
    assert parameter_count(net) == parameter_count(reference.features) + norms + dense
    pool, flat = nn.MaxPool2d(3, 2), (nn.AdaptiveAvgPool2d(6), nn.Flatten())
    front = (net.layer1, pool, net.layer2, pool, net.layer3, net.layer4, net.layer5, pool)
    layers = nn.Sequential(*front, *flat, net.hidden1, net.hidden2, net.classifier)
    x = random_tensor(2, *LARGE)
    with torch.no_grad():
        torch.testing.assert_close(net(x), layers(x))
    assert net.layer1(x)[0].numel() == net.largest_activation


def test_small_networks_equal_plain_layers() -> None:
    relu, flat = nn.ReLU(), nn.Flatten()
    bodies: dict[str, Callable[[Any], tuple[nn.Module, ...]]] = {
        "lenet5": lambda n: (
            *(n.conv1, relu, n.pool1, n.conv2, relu, n.pool2),
            *(flat, n.fc1, relu, n.fc2, relu),
        ),
        "cnn1": lambda n: (*n.features, flat, n.hidden, relu),
        "cnn3": lambda n: (*n.features, flat),
        "resnet8": lambda n: (n.conv, n.norm, relu, n.stages, nn.AdaptiveAvgPool2d(1), flat),
    }
    for name, layers in bodies.items():
        net, x = network(name, MNIST), random_tensor(3, *MNIST)
        with torch.no_grad():
            torch.testing.assert_close(net(x), nn.Sequential(*layers(net), net.classifier)(x))


def test_classifier_of_embedding_gives_logits() -> None:
    for name, shape in (
        *((name, MNIST) for name in ("convnet", "lenet5", "linear", "cnn1", "cnn3", "resnet18")),
        *((name, CIFAR) for name in ("resnet8", "cnn2")),
        *(("googlenet", (1, 15, 15)), ("densenet100", (1, 4, 4)), ("swin-t", (1, 4, 4))),
    ):
        net, x = network(name, shape, 7), random_tensor(3, *shape)
        with torch.no_grad():
            h, z = net.embed(x), net(x)
            torch.testing.assert_close(net.classifier(h), z)
            torch.testing.assert_close(net(x[:1]), z[:1], atol=1e-5, rtol=1e-4)
        assert h.shape == (3, net.embedding_size)
        for method in (FedAF(), FedFM(), FedGen(), FPL()):  # which need the last layer's shape
            method.check_model(net)
            assert method.initial_state(net.state_dict())


@pytest.mark.parametrize("name", ["convnet", "lenet5", "linear"])
def test_projection_head_replaces_the_last_layer(name: str) -> None:
    plain, net = (network(name, MNIST, width=4, projection=p) for p in (0, 12))
    d = plain.classifier.in_features
    head = d * d + d + (d + 1) * 12 + 13 * 10
    assert parameter_count(net) == parameter_count(plain) - (d + 1) * 10 + head
    x = random_tensor(2, *MNIST)
    with torch.no_grad():
        z = net.projection(torch.relu(net.hidden(net.body.embed(x))))
        torch.testing.assert_close(net.embed(x), z)
        torch.testing.assert_close(net(x), net.classifier(z))
    settings = ModelSettings(name, width=4, projection=12, clients="cnn1")
    clients: Any = registry.build_client_models(settings, MNIST, 10, 0, 1)
    assert clients[0].classifier.in_features == 12


LARGE_NETWORKS = {"resnet18", "resnet50", "alexnet"}
PRIVATE = set(model_names()) - {"swin-t", "unet"}  # runs on masks are not private


@pytest.mark.parametrize("name", by_family(sorted(PRIVATE), PRIVATE - LARGE_NETWORKS))
def test_architectures_support_private_steps(name: str) -> None:
    """DP-SGD excludes in-place activations and dropout."""
    norm = "group" if ModelSettings(name).norm == "batch" else ""
    sides = {"alexnet": 63, "googlenet": 15}
    sides |= dict.fromkeys(("resnet8", "resnet18", "resnet50", "densenet100"), 8)
    side = sides.get(name, 28)
    shape = (2, 1, 28) if name == "lstm" else (1, side, side)
    model = network(name, shape, width=4, norm=norm).train()
    check_model(model)
    groups = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert name != "resnet8" or all(m.num_groups == m.num_channels for m in groups)
    start = flatten(model)
    noiseless = mechanism(noise_multiplier=1e-9, sensitivity=1.0, dimension=len(start))
    x = random_tensor(3, *shape)
    settings = DpSgdSettings(MomentumSgd(0.1), 3.0)
    dp_sgd(model, lambda i: (x[i], i), noiseless, settings, Units(3))
    # three clipped gradients of norm 1, over 3, times the rate
    assert 0 < float((flatten(model) - start).norm()) <= 0.1 * 1.01


def test_invalid_settings_and_dropout_are_refused() -> None:
    for name, shape, settings, message in (
        ("alexnet", (3, 62, 64), {}, "63×63"),
        ("unet", (1, 40, 32), {}, "multiples of 16"),
        ("googlenet", (1, 14, 14), {}, "15×15"),  # torch would raise "Output size is too small"
        ("densenet100", (1, 3, 4), {}, "4×4"),
        ("swin-t", (1, 4, 3), {}, "4×4"),
        ("swin-t", CIFAR, {"norm": "batch"}, "layer"),
        ("convnet", (1, 8, 8), {"depth": 4}, "depth"),
        ("convnet", (3, 1, 60), {}, "Set it to mlp, lstm or linear"),
        ("convnet", (1, 8, 8), {"width": 0}, "width"),
        ("convnet", (1, 8, 8), {"norm": "bach"}, "did you mean batch"),
        ("convnet", (1, 8, 8), {"projection": -1}, "projection"),
        ("convnet", (1, 8, 8), {"features": "pixels"}, "'linear' or 'mlp'"),
        ("mlp", (1, 8, 8), {"features": "pixels", "projection": 8}, "projection"),
        ("linear", (1, 8, 8), {"features": "whitened-scatering"}, "whitened-scattering"),
        ("resnet18", CIFAR, {"norm": "instance"}, "instance"),
        ("resnet-18", CIFAR, {}, "did you mean resnet18"),
        ("timm:test_resnet", (2, 20, 20), {}, "1 or 3 channels"),
        ("timm:../net", CIFAR, {}, "no network's name after timm:"),
        ("timm:test_efficientnet", (1, 64, 64), {"norm": "group"}, "Use a network with layer norm"),
        ("torchvision:nothing", CIFAR, {}, "is not a classifier in torchvision"),
    ):
        with pytest.raises((SettingError, UnknownNameError), match=message):
            network(name, shape, **settings)
    with raises(ForbiddenLayerError, "model.dropout"):
        check_model(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    with raises(ForbiddenLayerError, "model.buffer"):
        check_model(network("swin-t", MNIST))
    check_model(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("channels", [8, WIDE])
def test_fast_instance_norm_equals_group_norm(
    dtype: torch.dtype, tolerance: float, channels: int
) -> None:
    """The mean is far from zero, where E[x²] − E[x]² would cancel."""
    norm = InstanceNorm(channels).requires_grad_(False)
    norm.weight.copy_(torch.linspace(-1, 2, channels))
    norm.bias.copy_(torch.linspace(0, 1, channels))
    x = (random_tensor(5, channels, 16, 16) + 30.0).to(dtype)
    expected = nn.functional.group_norm(x.float(), channels, norm.weight, norm.bias)
    with torch.no_grad():
        fast = norm.to(dtype)(x.to(memory_format=torch.channels_last))
    assert fast.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(fast.float(), expected, atol=tolerance, rtol=tolerance)
    if channels < WIDE:  # computed in float32 and rounded once
        weight, bias = norm.weight.float(), norm.bias.float()
        exact = nn.functional.group_norm(x.float(), channels, weight, bias).to(dtype)
        torch.testing.assert_close(fast.float(), exact.float(), atol=1e-4, rtol=0.008)


def test_torchvision_is_imported_only_for_its_networks() -> None:
    """Importing it takes longer than torch and would delay each command."""
    code = (
        "import sys, fedsynth; from fedsynth.models.registry import ModelSettings, build_model; "
        "build_model(fedsynth.RunSettings(fedsynth.FedDM()).model, (1, 8, 8), 10, 0); "
        "assert 'torchvision' not in sys.modules; "
        "build_model(ModelSettings('resnet18'), (3, 32, 32), 10, 0); "
        "assert 'torchvision' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def random_network(shape: Shape, width: int, depth: int, norm: str = "instance") -> Any:
    net = network("convnet", shape, width=width, depth=depth, norm=norm).requires_grad_(False)
    for p in net.parameters():
        p.add_(0.5 * random_tensor(*p.shape))
    return net


@pytest.mark.parametrize(
    ("shape", "width", "depth"), [((1, 28, 28), 6, 3), ((6, 8, 16), 3, 3), ((1, 8, 8), 1, 1)]
)
def test_embedding_and_vjp_equal_autograd(
    shape: Shape, width: int, depth: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # both sides in float32
    net = random_network(shape, width, depth).to(device)
    x = random_tensor(5, *shape).to(device)
    vectors = random_tensor(3, 5, net.embedding_size).to(device)
    leaf = x.clone().requires_grad_()
    h = net.embed(leaf)
    (expected,) = torch.autograd.grad(h, leaf, vectors, is_grads_batched=True)
    (actual, pull), (of_half, half_pull) = net.embed_vjp(x), net.embed_vjp(x, torch.bfloat16)
    for embedded in (actual, of_half):
        torch.testing.assert_close(embedded, h.detach(), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(pull(vectors), expected, atol=1e-4, rtol=1e-3)
    assert pull(vectors[:1]).shape == (1, 5, *shape)
    pulled = half_pull(vectors)  # only the vectors are rounded
    assert pulled.dtype == torch.float32
    assert 0 < (pulled - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(
    ("shape", "norm"),
    [((1, 8, 8), "group"), ((1, 8, 8), "batch"), ((1, 8, 8), "none"), ((1, 12, 12), "instance")],
)
def test_unsupported_networks_have_no_vjp(shape: Shape, norm: str) -> None:
    """Other norms have none, nor a 12×12 image, whose third block would pool a row of three."""
    assert random_network(shape, 4, 3, norm).embed_vjp(random_tensor(2, *shape)) is None


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(4), ()),
        (nn.BatchNorm1d(4), (5,)),
        (nn.BatchNorm2d(4, affine=False), (3, 2)),
    ],
)
def test_groups_are_normalised_separately(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """Compares torch's batch norm of vectors, series and images per interleaved group."""
    draws = torch.Generator().manual_seed(0)
    for p in layer.parameters():
        p.data.normal_(generator=draws)
    group = torch.tensor([0, 1, 0, 2, 1, 0, 2])
    grouped = with_grouped_statistics(nn.Sequential(layer))
    SharedStatistics.of(grouped).assign(group, 3)
    x = (torch.randn(7, 4, *shape, generator=draws) * 3 + 10).requires_grad_()
    expected = torch.empty(7, 4, *shape)
    for g in range(3):
        expected[group == g] = layer(x[group == g])
    actual = grouped(x)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    v = torch.randn(7, 4, *shape, generator=draws)
    gradients = [torch.autograd.grad(output, x, v) for output in (actual, expected)]
    torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_real_and_synthetic_images_never_share_statistics(precision: torch.dtype) -> None:
    """In plain torch, each client has two passes in training mode."""
    net, S = random_network((1, 8, 8), 6, 2, "batch"), random_tensor(4, 3, 1, 8, 8)
    running = [b.clone() for b in net.buffers()]
    parts = [torch.tensor([0, 10, 20, 1, 11]), torch.tensor([30, 31, 41, 51])]
    clients = ExactClientView([0, 1], digits(np.arange(60) % 10), parts)
    pairs = clients.pairs(1)
    exact = ExactMatcher(clients, BatchIndices(clients, pairs, 9, 1, seed=0, round=1))
    converted, positions = with_grouped_statistics(net), pairs.position
    maps = NetworkFeatures(converted, 0.7, None, precision, statistics=positions)
    actual, expected = exact.gradient(0, maps, S), []
    assert all(torch.equal(a, b) for a, b in zip(running, net.buffers(), strict=True))
    net.train()

    def u(x: Tensor) -> Tensor:
        h = net.embed(x)
        return torch.cat([h, 0.7 * net.classifier(h)], dim=1)

    for position, (zeros, ones) in enumerate((([0, 10, 20], [1, 11]), ([30], [31, 41, 51]))):
        real = u(clients.images(torch.tensor(zeros + ones)))
        leaf = S[2 * position : 2 * position + 2].clone().requires_grad_()
        fake = u(leaf.flatten(0, 1)).view(2, 3, -1).mean(dim=1)
        means = torch.stack([real[: len(zeros)].mean(0), real[len(zeros) :].mean(0)])
        expected.append(torch.autograd.grad((fake - means).square().sum(), leaf)[0])
    error = (actual - torch.cat(expected)).norm() / torch.cat(expected).norm()
    assert error < (1e-5 if precision == torch.float32 else 0.05)


def nonlinear_sum(mean: Tensor, variance: Tensor) -> Tensor:
    weights = torch.arange(1.0, len(mean) + 1, device=mean.device, dtype=mean.dtype)
    return (weights * mean**3).sum() + (variance / weights).square().sum()


@pytest.mark.parametrize(
    ("shape", "last", "dtype", "tolerance"),
    [
        ((5, 3), False, torch.float64, {}),
        ((4, 3, 2, 5), True, torch.float64, {}),
        ((64, 3, 8, 8), False, torch.bfloat16, {"atol": 1e-4, "rtol": 1e-4}),
    ],
)
def test_statistics_equal_torch(
    shape: Any, last: bool, dtype: torch.dtype, tolerance: Any, device: torch.device
) -> None:
    """The statistics of bfloat16 values are sums in float32."""
    draws = torch.Generator().manual_seed(1)
    x = (torch.randn(shape, generator=draws, dtype=torch.float64) * 2 + 1).to(device, dtype)
    leaf = (channels_last(x) if last else x).clone().requires_grad_()
    mean, variance = batch_statistics(leaf)
    reference = x.to(mean.dtype).requires_grad_()
    axes = [0, *range(2, x.dim())]
    true_variance, true_mean = torch.var_mean(reference, dim=axes, unbiased=False)
    assert mean.dtype == (torch.float32 if tolerance else dtype)
    torch.testing.assert_close((mean, variance), (true_mean, true_variance), **tolerance)
    nonlinear_sum(mean, variance).backward()
    nonlinear_sum(true_mean, true_variance).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, reference.grad.to(dtype))


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last_keeps_values(channels: int) -> None:
    """Also checks vmap over examples, which per-example gradients need."""
    x = torch.arange(2.0 * channels * 6).view(2, channels, 2, 3).requires_grad_()
    converted = channels_last(x)
    assert torch.equal(converted, x)
    assert converted.stride() == (channels * 6, 1, 3 * channels, channels)
    assert channels_last(converted).data_ptr() == converted.data_ptr()  # no second copy
    assert channels_last(x[:0]).shape == (0, channels, 2, 3)
    assert torch.equal(torch.vmap(channels_last)(x[None]), x[None])
    (gradient,) = torch.autograd.grad((converted * x.detach()).sum(), x)
    assert torch.equal(gradient, x)
