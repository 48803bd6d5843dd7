"""AlexNet with batch norm, ResNet-50, softmax regression, and the projection head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision

from fedsynth.errors import SettingError
from fedsynth.models.alexnet import AlexNet
from fedsynth.models.registry import (
    ModelSettings,
    build_client_models,
    build_model,
    parameter_count,
)
from fedsynth.privacy.dpsgd import check_model


def test_alexnet_has_torchvisions_convolutions_and_small_hidden_layers() -> None:
    net: Any = build_model(ModelSettings("alexnet"), (3, 64, 64), 10, seed=0)
    theirs: Any = torchvision.models.alexnet(num_classes=10)
    mine = [m for m in net.modules() if isinstance(m, torch.nn.Conv2d)]
    for a, b in zip(
        mine, [m for m in theirs.features if isinstance(m, torch.nn.Conv2d)], strict=True
    ):
        assert (a.weight.shape, a.stride, a.padding) == (b.weight.shape, b.stride, b.padding)
    convolutions = sum(p.numel() for p in theirs.features.parameters())
    norms = 2 * (64 + 192 + 384 + 256 + 256 + 1024 + 1024)
    assert (
        parameter_count(net) == convolutions + norms + (9216 + 1) * 1024 + 1025 * 1024 + 1025 * 10
    )
    x = torch.randn(2, 3, 64, 64)
    relu, flat = torch.nn.ReLU(), torch.nn.Flatten()
    parts = [
        net.layer1[0],
        net.layer1[1],
        relu,
        torch.nn.MaxPool2d(3, 2),
        net.layer2[0],
        net.layer2[1],
        relu,
        torch.nn.MaxPool2d(3, 2),
    ]
    parts += [
        part
        for layer in (net.layer3, net.layer4, net.layer5)
        for part in (layer[0], layer[1], relu)
    ]
    parts += [
        torch.nn.MaxPool2d(3, 2),
        torch.nn.AdaptiveAvgPool2d(6),
        flat,
        net.hidden1[0],
        net.hidden1[1],
        relu,
    ]
    parts += [net.hidden2[0], net.hidden2[1], relu, net.classifier]
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(x), torch.nn.Sequential(*parts)(x))
    assert net.layer1(x)[0].numel() == net.largest_activation
    grouped = AlexNet((1, 63, 65), 5, norm="group")
    check_model(grouped)
    assert grouped(torch.zeros(2, 1, 63, 65)).shape == (2, 5)
    with pytest.raises(SettingError, match="63×63"):
        build_model(ModelSettings("alexnet"), (3, 62, 64), 10, seed=0)


def test_resnet50_is_torchvisions() -> None:
    net: Any = build_model(ModelSettings("resnet50"), (3, 64, 64), 7, seed=0).eval()
    theirs = torchvision.models.resnet50(num_classes=7).eval()
    theirs.load_state_dict(net.state_dict())
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(net(x), theirs(x))
    assert net.embedding_size == 2048
    ten = build_model(ModelSettings("resnet50", norm="group"), (3, 32, 32), 10, seed=0)
    check_model(ten)
    assert parameter_count(ten) == 23_528_522


def test_softmax_regression() -> None:
    net: Any = build_model(ModelSettings("linear"), (1, 1, 60), 10, seed=0)
    assert parameter_count(net) == 610
    x = torch.randn(3, 1, 1, 60)
    torch.testing.assert_close(net(x), x.flatten(1) @ net.classifier.weight.T + net.classifier.bias)


@pytest.mark.parametrize("name", ["convnet", "lenet5", "resnet18", "linear"])
def test_a_projection_head_takes_the_last_layers_place(name: str) -> None:
    plain: Any = build_model(ModelSettings(name, width=4), (1, 28, 28), 10, seed=0)
    net: Any = build_model(ModelSettings(name, width=4, projection=12), (1, 28, 28), 10, seed=0)
    d = plain.classifier.in_features
    head = d * d + d + (d + 1) * 12 + 13 * 10
    assert parameter_count(net) == parameter_count(plain) - (d + 1) * 10 + head
    x = torch.randn(2, 1, 28, 28)
    with torch.no_grad():
        h = net.eval().body.embed(x)
        z = (
            torch.relu(h @ net.hidden.weight.T + net.hidden.bias) @ net.projection.weight.T
            + net.projection.bias
        )
        torch.testing.assert_close(net.embed(x), z)
        torch.testing.assert_close(net(x), net.classifier(z))
    clients = build_client_models(
        ModelSettings(name, width=4, projection=12, clients="cnn1"), (1, 28, 28), 10, 0, 1
    )
    assert clients is not None
    assert clients[0].classifier.in_features == 12  # type: ignore[union-attr]
    with pytest.raises(SettingError, match="projection"):
        ModelSettings(projection=-1)
