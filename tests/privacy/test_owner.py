"""Tests of a data owner's releases without federation: charges, public values and rejections."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsynth.privacy import (
    BudgetExceededError,
    DataOwner,
    PrivacyError,
    read_ledger,
)
from fedsynth.privacy.errors import LedgerError, PrivacySettingError
from fedsynth.privacy.releases import Release
from tests.privacy.support import plan


def records(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 6, generator=generator), torch.arange(count) % 3


def owner(count: int = 300, *, epsilon: float = 2.0, **settings: object) -> DataOwner:
    x, y = records(count)
    return DataOwner(
        "a", x, y, classes=3, nominal_size=300, epsilon=epsilon, delta=1e-5, **settings
    )


def unlabelled(x: Tensor, **settings: Any) -> DataOwner:
    """Returns a data owner of records without labels."""
    defaults = {"nominal_size": len(x), "epsilon": 5, "delta": 1e-5, **settings}
    return DataOwner("a", x, **defaults)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_training_without_noise_equals_torch(without_noise: None) -> None:
    """Full batches with an unreached clip equal torch's steps with momentum."""

    def with_momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)

    model = nn.Linear(6, 3)
    twin = copy.deepcopy(model)
    owner(epsilon=50).fit(model, with_momentum, steps=3, batch_size=300, clip=1e3)
    x, y = records(300)
    optimizer = with_momentum(twin.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(twin(x), y).backward()
        optimizer.step()
    assert torch.allclose(model.weight, twin.weight, atol=1e-5)


def test_mean_without_noise_equals_numpy(without_noise: None) -> None:
    x, y = records(300)
    mean = owner(epsilon=5).noisy_mean(clip=10.0)
    expected = np.stack([x[y == label].numpy().mean(axis=0) for label in range(3)])
    np.testing.assert_allclose(mean.numpy(), expected, atol=1e-5)


def test_mean_is_clipped_and_divided_by_nominal_size(without_noise: None) -> None:
    """Values outside the bounds are clamped."""
    clipped = unlabelled(torch.full((30, 2), 100.0), nominal_size=60)
    norm = torch.linalg.vector_norm(clipped.noisy_mean(clip=1.0))
    assert float(norm) == pytest.approx(30 / 60, abs=1e-6)
    bounded = unlabelled(torch.tensor([[-5.0], [7.0]]), bounds=(0, 1))
    assert float(bounded.noisy_mean(clip=1.0)) == pytest.approx(0.5, abs=1e-6)


def test_additional_record_changes_no_charge_or_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def released(count: int) -> tuple[set[torch.Size], tuple[Release, ...]]:
        shapes = set()

        def values(x: Tensor) -> Tensor:
            shapes.add(x.shape)
            return x

        data_owner = owner(count)
        monkeypatch.setattr(data_owner, "check_independent", lambda values: None)
        data_owner.noisy_mean(values, clip=1.0, total_epsilon=1.0)
        data_owner.fit(nn.Linear(6, 3), sgd, steps=2, batch_size=300, clip=1.0)
        return shapes, data_owner._ledger.releases

    assert released(300) == released(301)


def test_budget_covers_all_releases() -> None:
    data_owner = owner(epsilon=2.0)
    data_owner.noisy_mean(clip=1.0, total_epsilon=1.0)
    assert 0.99 < data_owner.spent() <= 1.0
    data_owner.fit(nn.Linear(6, 3), sgd, steps=3, batch_size=30, clip=1.0)
    assert 1.99 < data_owner.spent() <= 2.0
    releases = data_owner._ledger.releases
    assert [row.round for row in releases] == [1, 2]
    with pytest.raises(BudgetExceededError, match="of 2 "):
        data_owner.noisy_mean(clip=1.0)
    assert data_owner._ledger.releases == releases


def test_users_are_clipped_as_a_whole(without_noise: None) -> None:
    """With clipping per record, the user with 99 records would outweigh the other."""
    x = torch.cat([torch.ones(99, 1), torch.zeros(1, 1)])
    users = torch.cat([torch.zeros(99), torch.ones(1)]).long()
    data_owner = unlabelled(x, nominal_size=2, users=users)
    assert float(data_owner.noisy_mean(clip=1.0)) == pytest.approx(0.5, abs=1e-6)
    assert {row.unit for row in data_owner._ledger.releases} == {"user"}


def test_permanent_ledger_continues_for_same_records(tmp_path: Path) -> None:
    owner(ledger=tmp_path).noisy_mean(clip=1.0, total_epsilon=1.0)
    reopened = owner(ledger=tmp_path)
    assert 0.99 < reopened.spent() <= 1.0
    assert read_ledger(tmp_path / "a.jsonl").releases == reopened._ledger.releases
    with pytest.raises(LedgerError, match="records of the ledger are missing"):
        owner(200, ledger=tmp_path)
    x, _ = records(300)
    with pytest.raises(LedgerError):  # the same records in another type and under another name
        DataOwner("b", x.double(), nominal_size=300, epsilon=1, delta=1e-5, ledger=tmp_path)


def test_report_matches_ledger(tmp_path: Path) -> None:
    data_owner = owner()
    data_owner.noisy_mean(clip=1.0)
    for suffix in (".html", ".md", ".json"):
        data_owner.report(tmp_path / f"report{suffix}")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["guarantee"]["epsilon"] == pytest.approx(data_owner.spent())
    with pytest.raises(PrivacySettingError, match="must end in"):
        data_owner.report(tmp_path / "report.pdf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.zeros(5).long()}, "one label for each record"),
        ({"y": torch.full((10,), 3)}, "labels from 0 to 2"),
        ({"nominal_size": 0}, "nominal_size"),
        ({"bounds": (1, 0)}, "bounds"),
        ({"users": torch.arange(4)}, "users"),
    ],
)
def test_invalid_arguments_are_rejected(change: dict[str, object], message: str) -> None:
    valid = {"y": torch.arange(10) % 3, "nominal_size": 10, "epsilon": 1.0, "delta": 1e-5}
    with pytest.raises(PrivacySettingError, match=message):
        DataOwner("a", torch.rand(10, 2), classes=3, **{**valid, **change})


def test_series_of_other_owners_are_rejected() -> None:
    with pytest.raises(PrivacySettingError, match="shares=1"):
        owner().charge(plan(shares=100))
    series = owner().charge(plan())
    with pytest.raises(PrivacyError, match="not charged to"):
        owner().class_sums([series], lambda x, _: x)


@pytest.mark.parametrize("optimizer", [lambda p: torch.optim.Adam(p, lr=-1.0), torch.optim.LBFGS])
def test_failing_optimizers_raise_before_charge(optimizer: Any) -> None:
    """Covers a factory that raises, and an optimizer whose step raises."""
    data_owner = owner()
    with pytest.raises((ValueError, TypeError)):
        data_owner.fit(nn.Linear(6, 3), optimizer, steps=1, batch_size=30, clip=1.0)
    assert data_owner._ledger.releases == ()


def test_trial_inputs_are_within_bounds() -> None:
    """On [0, 1], this function would mix nothing."""
    data_owner = unlabelled(torch.rand(20, 4) * 255, bounds=(0, 255))
    with pytest.raises(PrivacyError, match="mixes the examples"):
        data_owner.noisy_mean(lambda x: x - torch.relu(x - 2).sum(), clip=1.0)


def test_failing_record_changes_no_other(without_noise: None) -> None:
    """Regression: retries used records that the user's code had changed."""

    def values(x: Tensor) -> Tensor:
        x -= 0.25
        if bool((x > 50).any()):
            raise ValueError
        return x

    x = torch.rand(40, 4)
    longer = torch.cat([torch.full((1, 4), 90.0), x])
    means = [
        unlabelled(rows, nominal_size=40).noisy_mean(values, clip=10.0) for rows in (x, longer)
    ]
    assert torch.allclose(means[0], means[1], atol=1e-6)


def mixing_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits: Tensor = model(x)
    return logits.sum(dim=1) - logits.mean()


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (nn.Linear(6, 3), mixing_loss, "mixes the examples"),
        (nn.Linear(6, 3), lambda model, x, y: model(x).mean(), r"each of the 4 examples"),
        (nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)), None, "Dropout.*Remove this layer"),
        (
            torch.jit.script(nn.BatchNorm1d(6, track_running_stats=False)),
            None,
            r"Replace the layers that Opacus does not support.*group_norm_twin",
        ),
    ],
)
def test_mixing_records_is_rejected_before_charge(model: Any, loss: Any, message: str) -> None:
    """Opacus itself would reject a scripted model with a list of errors."""
    data_owner = owner()
    with pytest.raises(PrivacyError, match=message) as caught:
        data_owner.fit(model, sgd, loss=loss, steps=1, batch_size=30, clip=1.0)
    assert "\n" not in str(caught.value)
    with pytest.raises(PrivacyError, match="mixes the examples"):
        data_owner.noisy_mean(lambda x: x - x.mean(dim=0), clip=1.0)
    assert data_owner._ledger.releases == ()
