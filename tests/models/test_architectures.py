"""The package's networks: parameter counts, torchvision's layers, embeddings, private steps,
refusals."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from fedsynth.errors import SettingError, UnknownNameError
from fedsynth.models.convnet import WIDE, ConvNet, InstanceNorm
from fedsynth.models.flat import flatten
from fedsynth.models.registry import (
    ModelSettings,
    build_client_models,
    build_model,
    model_names,
    parameter_count,
)
from fedsynth.privacy.dpsgd import DpSgdSettings, check_model, dp_sgd
from fedsynth.privacy.errors import ForbiddenLayerError
from fedsynth.training.sgd import MomentumSgd
from tests.families import by_family
from tests.privacy.support import series

Shape = tuple[int, int, int]
TORCHVISION = ("resnet18", "resnet50", "googlenet")
MNIST, CIFAR, LARGE = (1, 28, 28), (3, 32, 32), (3, 64, 64)


def network(name: str, shape: Shape, classes: int = 10, **settings: Any) -> Any:
    return build_model(ModelSettings(name, **settings), shape, classes, 0).eval()


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("name", "shape", "classes", "settings", "count"),
    [
        ("convnet", MNIST, 10, {}, 317_706),  # FedDM's Table 3
        ("convnet", CIFAR, 10, {}, 320_010),
        ("convnet", CIFAR, 100, {}, 504_420),
        ("convnet", LARGE, 10, {"norm": "batch"}, 381_450),  # FedAF's
        ("resnet18", CIFAR, 10, {}, 11_181_642),  # FedAF's
        ("resnet50", CIFAR, 10, {"norm": "group"}, 23_528_522),
        ("linear", (1, 1, 60), 10, {}, 610),
        ("lenet5", MNIST, 10, {}, 156 + 2_416 + 48_120 + 10_164 + 850),
        ("lenet5", MNIST, 26, {}, 63_066),
        # convolutions, shortcuts, norms, classifier
        ("resnet8", CIFAR, 10, {}, 9 * 8_240 + 16 * 32 + 32 * 64 + 2 * 336 + 650),
    ],
)
def test_parameter_counts(
    name: str, shape: Shape, classes: int, settings: dict[str, Any], count: int
) -> None:
    assert parameter_count(network(name, shape, classes, **settings)) == count


@pytest.mark.parametrize("name", by_family(TORCHVISION, ("resnet18", "googlenet")))
def test_networks_equal_torchvision(name: str) -> None:
    net, x = network(name, LARGE, 7), random_tensor(2, *LARGE)
    options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    reference = torchvision.models.get_model(name, num_classes=7, weights=None, **options).eval()
    reference.load_state_dict(net.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(net(x), reference(x))


def test_alexnet_has_convolutions_of_torchvision() -> None:
    net, reference = network("alexnet", LARGE), torchvision.models.alexnet(num_classes=10)
    convolutions = [
        [layer for layer in part.modules() if isinstance(layer, nn.Conv2d)]
        for part in (net, reference.features)
    ]
    for a, b in zip(*convolutions, strict=True):
        assert (a.weight.shape, a.stride, a.padding) == (b.weight.shape, b.stride, b.padding)
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


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, MNIST) for name in ("convnet", "lenet5", "linear", "cnn1", "resnet18")),
        *((name, CIFAR) for name in ("resnet8", "cnn2")),
        ("googlenet", (1, 15, 15)),
    ],
)
def test_classifier_of_embedding_gives_logits(name: str, shape: Shape) -> None:
    net, x = network(name, shape, 7), random_tensor(3, *shape)
    with torch.no_grad():
        h, z = net.embed(x), net(x)
        torch.testing.assert_close(net.classifier(h), z)
        torch.testing.assert_close(net(x[:1]), z[:1], atol=1e-5, rtol=1e-4)
    assert h.shape == (3, net.embedding_size)


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
    clients: Any = build_client_models(settings, MNIST, 10, 0, 1)
    assert clients[0].classifier.in_features == 12


@pytest.mark.parametrize(
    "name",
    by_family(model_names(), set(model_names()) - {"resnet18", "resnet50", "alexnet"}),
)
def test_architectures_support_private_steps(name: str) -> None:
    """DP-SGD excludes in-place activations, which break its hooks, and dropout, whose masks depend
    on the position in the batch."""
    norm = "group" if ModelSettings(name).norm == "batch" else ""
    side = {"alexnet": 63, "resnet8": 8, "resnet18": 8, "resnet50": 8, "googlenet": 15}.get(
        name, 28
    )
    model = network(name, (1, side, side), width=4, norm=norm).train()
    check_model(model)
    groups = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert name != "resnet8" or all(m.num_groups == m.num_channels for m in groups)
    start = flatten(model)
    noiseless = series(noise_multiplier=1e-9, sensitivity=1.0, dimension=len(start))
    x = random_tensor(3, 1, side, side)
    dp_sgd(model, lambda i: x[i], torch.arange(3), noiseless, DpSgdSettings(MomentumSgd(0.1), 3.0))
    # three clipped gradients of norm 1, over 3, times the rate
    assert 0 < float((flatten(model) - start).norm()) <= 0.1 * 1.01


def test_dropout_is_refused_with_differential_privacy() -> None:
    with pytest.raises(ForbiddenLayerError, match="masks depend on"):
        check_model(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    check_model(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))


@pytest.mark.parametrize(
    ("name", "shape", "settings", "message"),
    [
        ("alexnet", (3, 62, 64), {}, "63×63"),
        # torch would raise "Output size is too small"
        ("googlenet", (1, 14, 14), {}, "15×15"),
        ("convnet", (1, 8, 8), {"depth": 4}, "depth"),
        ("convnet", (1, 8, 8), {"width": 0}, "width"),
        ("convnet", (1, 8, 8), {"norm": "bach"}, "did you mean batch"),
        ("convnet", (1, 8, 8), {"projection": -1}, "projection"),
        ("resnet18", CIFAR, {"norm": "instance"}, "instance"),
        ("resnet-18", CIFAR, {}, "did you mean resnet18"),
    ],
)
def test_invalid_settings_are_rejected(
    name: str, shape: Shape, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((SettingError, UnknownNameError), match=message):
        network(name, shape, **settings)


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
        "import sys, fedsynth; from fedsynth import ModelSettings, RunSettings, FedDM; "
        "from fedsynth.models.registry import build_model; "
        "build_model(RunSettings(FedDM()).model, (1, 8, 8), 10, 0); "
        "assert 'torchvision' not in sys.modules; "
        "build_model(ModelSettings('resnet18'), (3, 32, 32), 10, 0); "
        "assert 'torchvision' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def random_network(shape: Shape, width: int, depth: int, norm: str = "instance") -> ConvNet:
    """Returns a network with affine weights of both signs, so that every term of the VJP matters."""
    settings = ModelSettings(width=width, depth=depth, norm=norm)
    net = build_model(settings, shape, 10, 0).requires_grad_(False)
    assert isinstance(net, ConvNet)
    generator = torch.Generator().manual_seed(0)
    for p in net.parameters():
        p.add_(0.5 * torch.randn(p.shape, generator=generator))
    return net


def autograd_vjp(net: ConvNet, x: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    h = net.embed(leaf)
    rows = [torch.autograd.grad(h, leaf, v, retain_graph=True)[0] for v in vectors]
    return h.detach(), torch.stack(rows)


@pytest.mark.parametrize(
    ("shape", "width", "depth"),
    [((1, 28, 28), 6, 3), ((6, 8, 16), 3, 3), ((1, 8, 8), 1, 1)],
)
def test_embedding_and_vjp_equal_autograd(
    shape: Shape, width: int, depth: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # both sides in float32
    net = random_network(shape, width, depth).to(device)
    x = random_tensor(5, *shape).to(device)
    vectors = random_tensor(3, 5, net.embedding_size).to(device)
    vjp = net.embed_vjp(x)
    assert vjp is not None
    h, expected = autograd_vjp(net, x, vectors)
    torch.testing.assert_close(vjp[0], h, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(vjp[1](vectors), expected, atol=1e-4, rtol=1e-3)
    assert vjp[1](vectors[:1]).shape == (1, 5, *shape)


def test_reduced_precision_rounds_only_the_vectors() -> None:
    net, x = random_network((1, 28, 28), 16, 3), random_tensor(4, 1, 28, 28)
    vectors = random_tensor(2, 4, net.embedding_size)
    vjp = net.embed_vjp(x, torch.bfloat16)
    assert vjp is not None
    h, expected = autograd_vjp(net, x, vectors)
    torch.testing.assert_close(vjp[0], h, atol=2e-5, rtol=1e-4)
    pulled = vjp[1](vectors)
    assert pulled.dtype == torch.float32
    assert 0 < (pulled - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(
    ("shape", "norm"),
    [((1, 8, 8), "group"), ((1, 8, 8), "batch"), ((1, 8, 8), "none"), ((1, 12, 12), "instance")],
)
def test_unsupported_networks_have_no_vjp(shape: Shape, norm: str) -> None:
    """Other norms have none, nor a 12×12 image, whose third block would pool a row of three."""
    assert random_network(shape, 4, 3, norm).embed_vjp(random_tensor(2, *shape)) is None
