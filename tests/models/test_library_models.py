"""Tests of networks of timm and torchvision as models of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from fedsynth import (
    FedAvg,
    ModelSettings,
    PartitionSettings,
    PrivacySettings,
    RunSettings,
    load_dataset,
    simulate,
)
from fedsynth.errors import SettingError
from fedsynth.models.layers import has_batch_norm
from fedsynth.models.registry import build_model, has_given_weights
from fedsynth.privacy.errors import ForbiddenLayerError


def run(model: ModelSettings) -> None:
    """Trains a model privately for a round."""
    train, test = load_dataset("digits")
    method = FedAvg(local_steps=1)
    privacy = PrivacySettings(epsilon=8.0, sample_rate=0.1)
    partition = PartitionSettings(clients=2)
    settings = RunSettings(method, rounds=1, model=model, partition=partition, privacy=privacy)
    simulate(settings, data=(train.subset(range(60)), test.subset(range(20))), quiet=True)


def test_logits_equal_timm_network(tmp_path: Path) -> None:
    network = timm.create_model("test_resnet", num_classes=0).eval()
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    settings = ModelSettings("timm:test_resnet", weights=str(tmp_path / "weights.safetensors"))
    assert has_given_weights(settings)
    built = build_model(settings, (1, 20, 20), classes=3, seed=0).eval()
    x = torch.rand(2, 1, 20, 20, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        embedded = network(x.expand(-1, 3, -1, -1))
        torch.testing.assert_close(built.embed(x), embedded)
        torch.testing.assert_close(built(x), built.classifier(embedded))


def test_weights_depend_on_seed() -> None:
    first, same, other = (
        build_model(ModelSettings("timm:test_resnet"), (3, 20, 20), 3, seed).classifier.weight
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_private_runs_refuse_batch_norm() -> None:
    with pytest.raises(ForbiddenLayerError, match=r"Set model\.norm=group"):
        run(ModelSettings("timm:test_resnet"))


def test_group_norm_replaces_all_batch_norms_or_is_refused() -> None:
    settings = ModelSettings("timm:test_resnet", norm="group")
    assert not has_batch_norm(build_model(settings, (1, 20, 20), classes=3, seed=0))
    with pytest.raises(SettingError, match="Use a network with layer norm"):
        build_model(ModelSettings("timm:test_efficientnet", norm="group"), (1, 64, 64), 3, 0)


def test_other_channels_and_unknown_networks_are_refused() -> None:
    for name, channels, message in (
        ("timm:test_resnet", 2, "1 or 3 channels"),
        ("timm:../net", 3, "must be timm: and the name"),
        ("torchvision:nothing", 3, "is not a classifier of torchvision"),
    ):
        with pytest.raises(SettingError, match=message):
            build_model(ModelSettings(name), (channels, 20, 20), classes=3, seed=0)
