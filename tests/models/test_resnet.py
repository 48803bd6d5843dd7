"""ResNet-18: torchvision's network, with an embedding."""

from __future__ import annotations

import pytest
import torch
import torchvision

from fedsynth.errors import UnknownNameError
from fedsynth.models.registry import ModelSettings, build_model, parameter_count
from fedsynth.models.resnet import ResNet18
from fedsynth.privacy.dpsgd import check_model


def test_parameters_are_those_that_fedaf_prints() -> None:
    assert (
        parameter_count(build_model(ModelSettings("resnet18"), (3, 32, 32), 10, seed=0))
        == 11_181_642
    )


def test_it_is_torchvisions_network() -> None:
    model = build_model(ModelSettings("resnet18"), (3, 64, 64), 7, seed=0).eval()
    theirs = torchvision.models.resnet18(num_classes=7).eval()
    theirs.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(x), theirs(x))
        torch.testing.assert_close(model.classifier(model.embed(x)), model(x))  # type: ignore[operator]


def test_group_norm_for_differential_privacy_and_one_channel() -> None:
    model = ResNet18((1, 28, 28), 10, norm="group")
    check_model(model)
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_norms_are_the_architectures() -> None:
    assert ModelSettings().norm == "instance"
    assert ModelSettings("resnet18").norm == "batch"
    with pytest.raises(UnknownNameError, match="cannot be 'instance' for resnet18"):
        ModelSettings("resnet18", norm="instance")
    with pytest.raises(UnknownNameError, match="did you mean resnet18"):
        ModelSettings("resnet-18")
