"""LeNet-5 and ResNet-8: sizes, embeddings, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedsynth.errors import SettingError
from fedsynth.models.flat import flatten
from fedsynth.models.registry import ModelSettings, build_model, model_names, parameter_count
from fedsynth.models.small import LeNet5, ResNet8
from fedsynth.privacy.dpsgd import DpSgdSettings, check_model, dp_sgd
from fedsynth.privacy.errors import ForbiddenLayerError
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import GaussianSums
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release
from fedsynth.training.optimisers import MomentumSgd


def test_lenet5_has_its_known_size() -> None:
    """156 + 2,416 + 48,120 + 10,164 + 850, LeCun's with full connections."""
    assert parameter_count(build_model(ModelSettings("lenet5"), (1, 28, 28), 10, 0)) == 61_706
    assert parameter_count(build_model(ModelSettings("lenet5"), (1, 28, 28), 26, 0)) == 63_066


def test_resnet8_counted_layer_by_layer() -> None:
    conv = [
        9 * a * b for a, b in ((3, 16), (16, 16), (16, 16), (16, 32), (32, 32), (32, 64), (64, 64))
    ]
    shortcuts, norms = 16 * 32 + 32 * 64, 2 * (16 * 3 + 32 * 3 + 64 * 3)
    assert (
        parameter_count(build_model(ModelSettings("resnet8"), (3, 32, 32), 10, 0))
        == sum(conv) + shortcuts + norms + 650
    )


@pytest.mark.parametrize(
    ("model", "shape"),
    [(LeNet5, (1, 28, 28)), (LeNet5, (3, 32, 32)), (ResNet8, (3, 32, 32)), (ResNet8, (1, 8, 8))],
)
def test_logits_are_the_classifier_of_the_embedding(
    model: type[nn.Module], shape: tuple[int, int, int]
) -> None:
    net = model(shape, 7)
    x = torch.randn(3, *shape)
    torch.testing.assert_close(net.classifier(net.embed(x)), net(x))  # type: ignore[operator]
    assert net.embed(x).shape == (3, net.embedding_size)  # type: ignore[operator]


def test_both_train_with_differential_privacy() -> None:
    check_model(LeNet5((1, 28, 28), 10))
    check_model(ResNet8((3, 32, 32), 10))
    groups = {
        m.num_groups == m.num_channels
        for m in ResNet8((3, 32, 32), 10).modules()
        if isinstance(m, nn.GroupNorm)
    }
    assert groups == {True}  # one channel a group


def test_images_that_are_too_small() -> None:
    with pytest.raises(SettingError, match="at least 16×16"):
        LeNet5((1, 8, 8), 10)
    with pytest.raises(SettingError, match="at least 8×8"):
        ResNet8((1, 4, 4), 10)


@pytest.mark.parametrize("name", ["cnn1", "cnn2", "googlenet"])
def test_fedhydras_other_networks(name: str) -> None:
    for shape in ((1, 28, 28), (3, 32, 32)):
        net = build_model(ModelSettings(name), shape, 7, 0).eval()
        x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            torch.testing.assert_close(net.classifier(net.embed(x)), net(x))  # type: ignore[operator]
    private = build_model(ModelSettings(name, norm="group"), (1, 28, 28), 7, 0)
    check_model(private)
    assert private(torch.zeros(2, 1, 28, 28)).shape == (2, 7)


def test_googlenet_is_torchvisions() -> None:
    import torchvision

    net = build_model(ModelSettings("googlenet"), (3, 64, 64), 5, 0).eval()
    theirs = torchvision.models.googlenet(
        num_classes=5, aux_logits=False, init_weights=False
    ).eval()
    theirs.load_state_dict(net.state_dict())
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(net(x), theirs(x))


@pytest.mark.parametrize("name", model_names())
def test_every_architecture_takes_a_private_step(name: str) -> None:
    """Catches: in-place activations, which DP-SGD's hooks do not survive, and dropout, whose masks
    go by the place in the batch."""
    batch_norm = ModelSettings(name).norm == "batch"
    side = 64 if name == "alexnet" else 28
    model = build_model(
        ModelSettings(name, width=4, norm="group" if batch_norm else ""), (1, side, side), 10, 0
    )
    before = flatten(model)
    release = Release(1, "m", "dp-sgd", "g", 1e-9, 1.0, 1.0, "full", 1, len(before))
    series = GaussianSums(release, 1, Guard(Ledger("0"), 1e-5, None), SecretGenerator())
    x = torch.randn(3, 1, side, side, generator=torch.Generator().manual_seed(0))
    dp_sgd(model, lambda i: x[i], torch.arange(3), series, 1, DpSgdSettings(MomentumSgd(0.1), 3.0))
    # three clipped gradients of norm 1, over 3, times the rate
    assert 0 < float((flatten(model) - before).norm()) <= 0.1 * 1.01


def test_dropout_is_refused_with_differential_privacy() -> None:
    with pytest.raises(ForbiddenLayerError, match="masks go by"):
        check_model(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    check_model(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))
