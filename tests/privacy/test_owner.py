"""Tests of a data owner's releases without federation, and of user code that mixes examples of a
batch: it is rejected before a ledger is opened, or named in the report."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth import FedDM, TrainsLocally, register_model, resolve, simulate
from fedsynth.core.messages import ModelParameters
from fedsynth.core.uploads import Number
from fedsynth.errors import LedgerError, PrivacySettingError, SettingError, UploadRejectedError
from fedsynth.features.feature_map import FeatureMap
from fedsynth.features.registry import register_features
from fedsynth.methods.shared.local import LocalObjective, plain_upload
from fedsynth.models.small import Mlp
from fedsynth.privacy import BudgetExceededError, DataOwner, PrivacyError, read_ledger
from fedsynth.privacy.batch_independence import StepInputs, dependence_on_batch
from fedsynth.privacy.dpsgd import cross_entropies as losses
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.releases import Release
from fedsynth.results.verification import verify_run
from tests.digits import CPU, SPEC
from tests.privacy.support import in_threads, plan
from tests.quick_runs import quick_settings
from tests.raising import raises


def records(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 6, generator=generator), torch.arange(count) % 3


def unlabelled(x: Tensor, **settings: Any) -> DataOwner:
    """Returns a data owner of records without labels."""
    return DataOwner("a", x, **{"nominal_size": len(x), "epsilon": 5, "delta": 1e-5, **settings})


def owner(count: int = 300, *, epsilon: float = 2.0, **settings: object) -> DataOwner:
    x, y = records(count)
    return unlabelled(x, y=y, classes=3, nominal_size=300, epsilon=epsilon, **settings)


sgd = partial(torch.optim.SGD, lr=0.1)


def test_training_without_noise_equals_torch(without_noise: None) -> None:
    """Full batches with an unreached clip equal torch's steps with momentum."""
    model, with_momentum = nn.Linear(6, 3), partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    twin, (x, y) = copy.deepcopy(model), records(300)
    owner(epsilon=50).fit(model, with_momentum, steps=3, batch_size=300, clip=1e3)
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
    # rows are clipped, sums are divided by the nominal size, and values are clamped to the bounds
    clipped = unlabelled(torch.full((30, 2), 100.0), nominal_size=60)
    norm = torch.linalg.vector_norm(clipped.noisy_mean(clip=1.0))
    assert float(norm) == pytest.approx(30 / 60, abs=1e-6)
    bounded = unlabelled(torch.tensor([[-5.0], [7.0]]), bounds=(0, 1))
    assert float(bounded.noisy_mean(clip=1.0)) == pytest.approx(0.5, abs=1e-6)


def test_values_that_are_no_vectors_cost_no_budget() -> None:
    images = unlabelled(torch.rand(20, 1, 4, 4))
    for values in (lambda x: x, lambda x: x.mean(dim=(1, 2, 3))):
        with raises(SettingError, "values"):
            images.noisy_mean(values, clip=1.0)
    assert images.noisy_mean(lambda x: x.flatten(1), clip=1.0).shape == (1, 16)


def test_additional_record_changes_no_charge_or_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    def released(count: int) -> tuple[set[torch.Size], tuple[Release, ...]]:
        data_owner, values = owner(count), Mock(side_effect=lambda x: x)
        monkeypatch.setattr(data_owner, "check_independent", lambda *args, **kwargs: (64, 64))
        data_owner.noisy_mean(values, clip=1.0, total_epsilon=1.0)
        data_owner.fit(nn.Linear(6, 3), sgd, steps=2, batch_size=300, clip=1.0)
        return {call.args[0].shape for call in values.call_args_list}, data_owner._ledger.releases

    assert released(300) == released(301)


def test_budget_covers_all_releases() -> None:
    data_owner = owner(epsilon=2.0)
    data_owner.noisy_mean(clip=1.0, total_epsilon=1.0)
    assert 0.99 < data_owner.spent() <= 1.0
    data_owner.fit(nn.Linear(6, 3), sgd, steps=3, batch_size=30, clip=1.0)
    assert 1.99 < data_owner.spent() <= 2.0
    releases = data_owner._ledger.releases
    assert [row.round for row in releases] == [1, 2]
    with raises(BudgetExceededError, "budget.spent"):
        data_owner.noisy_mean(clip=1.0)
    assert data_owner._ledger.releases == releases


def test_noise_may_be_set_within_the_budget() -> None:
    data_owner = owner(epsilon=2.0)
    data_owner.noisy_mean(clip=1.0, noise_multiplier=8.0)
    data_owner.fit(nn.Linear(6, 3), sgd, steps=3, batch_size=30, clip=1.0, noise_multiplier=3.0)
    releases = data_owner._ledger.releases
    assert [row.noise_multiplier for row in releases] == [8.0, 3.0]
    assert 0 < data_owner.spent() < 2
    for sigma, limit in ((0.5, 2.0), (0.0, 2.0), (8.0, 1.01 * data_owner.spent())):
        with raises(BudgetExceededError, "budget.exceeded"):
            data_owner.noisy_mean(clip=1.0, noise_multiplier=sigma, total_epsilon=limit)
    wrongs: tuple[Any, ...] = (-1.0, float("nan"), True, "3", 10**400)
    for wrong in wrongs:
        with raises(PrivacySettingError, "noise_multiplier"):
            data_owner.noisy_mean(clip=1.0, noise_multiplier=wrong)
    assert data_owner._ledger.releases == releases


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_threads_share_a_budget(tmp_path: Path, kept: bool, training: bool) -> None:
    """Regression: two threads that calibrated before either was charged exceeded `total_epsilon`.

    The owners of a folder are different objects.
    """
    owners = [owner(ledger=tmp_path) for _ in range(4)] if kept else [owner()] * 4
    remaining = iter(owners)

    def work() -> Any:
        mine, options = next(remaining), {"clip": 1.0, "total_epsilon": 0.5}
        if training:
            return mine.fit(nn.Linear(6, 3), sgd, steps=2, batch_size=30, **options)
        return mine.noisy_mean(**options)

    assert len(in_threads(work)) == len(owners[0]._ledger.releases) == 1
    assert 0.49 < owners[0].spent() <= 0.5


def test_users_are_clipped_as_a_whole(without_noise: None) -> None:
    """With clipping per record, the user with 99 records would outweigh the other."""
    users = torch.tensor([0] * 99 + [1])
    data_owner = unlabelled(1.0 - users[:, None], nominal_size=2, users=users)
    assert float(data_owner.noisy_mean(clip=1.0)) == pytest.approx(0.5, abs=1e-6)
    assert {row.unit for row in data_owner._ledger.releases} == {"user"}


def test_permanent_ledger_continues_for_same_records(tmp_path: Path) -> None:
    owner(ledger=tmp_path).noisy_mean(clip=1.0, total_epsilon=1.0)
    reopened = owner(ledger=tmp_path)
    assert 0.99 < reopened.spent() <= 1.0
    assert read_ledger(tmp_path / "a.jsonl").releases == reopened._ledger.releases
    with raises(LedgerError, "ledger.new_records"):
        owner(200, ledger=tmp_path)
    x, _ = records(300)
    with pytest.raises(LedgerError):  # the same records in another type and under another name
        DataOwner("b", x.double(), nominal_size=300, epsilon=1, delta=1e-5, ledger=tmp_path)


def test_permanent_ledger_is_bound_to_users(tmp_path: Path) -> None:
    """Regression: the records of one user could be divided among several users later."""
    users = torch.arange(300) // 3
    owner(users=users, ledger=tmp_path).noisy_mean(clip=1.0, total_epsilon=1.0)
    assert owner(users=1000 - users, ledger=tmp_path).spent() > 0.9  # the same users, renumbered
    moved = users.clone()
    moved[3] = 0
    for others in (moved, torch.arange(300), torch.zeros(300, dtype=torch.int64)):
        with raises(LedgerError, "ledger.new_records") as caught:
            owner(users=others, ledger=tmp_path)
        assert "they belong to other users" in str(caught.value)
    with raises(LedgerError, "ledger.unit") as caught:
        owner(ledger=tmp_path)
    assert str(caught.value).endswith("Set privacy.unit=user")
    with raises(LedgerError, "ledger.moved_records") as caught:
        x, _ = records(300)
        DataOwner("b", x, nominal_size=300, epsilon=1, delta=1e-5, ledger=tmp_path, users=users)
    assert str(caught.value).startswith("300 records")
    with raises(LedgerError, "ledger.new_records") as caught:
        owner(399, users=torch.cat([users, torch.arange(99)]), ledger=tmp_path)
    assert "99 are new and 0 are missing" in str(caught.value)


@pytest.mark.parametrize("name", ["../a", "clinic A/B", ""])
def test_names_are_names_of_files(tmp_path: Path, name: str) -> None:
    """Regression: "../a" wrote a ledger outside the folder."""
    with raises(PrivacySettingError, "names"):
        DataOwner(name, records(9)[0], nominal_size=9, epsilon=1, delta=1e-5, ledger=tmp_path)
    assert not list(tmp_path.iterdir())


def test_report_matches_ledger(tmp_path: Path) -> None:
    data_owner = owner()
    data_owner.noisy_mean(clip=1.0)
    for suffix in (".html", ".md", ".json"):
        data_owner.report(tmp_path / f"report{suffix}")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["guarantee"]["epsilon"] == pytest.approx(data_owner.spent())
    assert "the data set is public" not in (tmp_path / "report.md").read_text()  # nobody said so
    for name, reason in (("report.json", "a DataOwner stores"), ("report.html", "without data")):
        with pytest.raises(PrivacyError, match=reason):
            verify_run(tmp_path / name)
    with raises(PrivacySettingError, "path"):
        data_owner.report(tmp_path / "report.pdf")


def test_report_while_charging_states_one_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread charges between two looks at the ledger."""
    data_owner, history = owner(), Ledger.history
    data_owner.noisy_mean(clip=1.0, total_epsilon=1.0)

    def charged_first(ledger: Ledger) -> History:
        data_owner.noisy_mean(clip=1.0)
        return history(ledger)

    monkeypatch.setattr(Ledger, "history", charged_first)
    data_owner.report(tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["rounds_done"] == sum(row["steps"] for row in report["ledger"]) == 2


def test_records_are_copied(without_noise: None) -> None:
    """Regression: labels were those of the caller's tensor, out of range after a change."""
    x, y, users = torch.ones(4, 1), torch.tensor([0, 0, 1, 1]), torch.arange(4)
    data_owner = unlabelled(x, y=y, users=users, classes=2)
    expected = data_owner.noisy_mean(clip=9.0, total_epsilon=1.0)
    for tensor in (x, y, users):
        tensor.fill_(7)
    assert torch.equal(data_owner.noisy_mean(clip=9.0), expected)
    assert expected.flatten().tolist() == pytest.approx([1.0, 1.0], abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.zeros(5).long()}, "y"),
        ({"y": torch.full((10,), 3)}, "y"),
        ({"nominal_size": 0}, "nominal_size"),
        ({"delta": 0.2}, "delta"),
        ({"bounds": (1, 0)}, "bounds"),
        ({"x": torch.zeros(10, 2, dtype=torch.uint8), "bounds": (0.0, 1.0)}, "x"),
        ({"users": torch.arange(4)}, "users"),
        ({"users": np.arange(10)}, "users"),
        ({"epsilon": "5"}, "epsilon"),
        ({"nominal_size": True}, "nominal_size"),
    ],
)
def test_invalid_arguments_are_rejected(change: dict[str, object], message: str) -> None:
    with raises(PrivacySettingError, message):
        arguments = {"x": torch.rand(10, 2), "classes": 3, "y": torch.arange(10) % 3, **change}
        unlabelled(**arguments)


def test_mechanisms_of_other_owners_are_rejected() -> None:
    with raises(PrivacySettingError, "plan"):
        owner().charge(plan(shares=100))
    with raises(PrivacySettingError, "clip"):
        owner().noisy_mean(clip=0)
    mechanism = owner().charge(plan())
    with raises(PrivacyError, "release.uncharged"):
        owner().class_sums([mechanism], lambda x, _: x)


@pytest.mark.parametrize("optimizer", [lambda p: torch.optim.Adam(p, lr=-1.0), torch.optim.LBFGS])
def test_failing_optimizers_raise_before_charge(optimizer: Any) -> None:
    """Covers a factory that raises, and an optimizer whose step raises."""
    data_owner = owner()
    with pytest.raises((ValueError, TypeError)):
        data_owner.fit(nn.Linear(6, 3), optimizer, steps=1, batch_size=30, clip=1.0)
    assert data_owner._ledger.releases == ()


class Replacing(torch.optim.SGD):
    """Replaces the data of its parameters instead of changing them in place."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = p.data - 0.5 * p.grad


def test_optimizers_update_the_model_or_are_refused(without_noise: None) -> None:
    """Regression: with both optimizers, the budget was spent and the model unchanged."""
    data_owner, model = owner(), nn.Linear(6, 3)
    with raises(PrivacySettingError, "optimizer"):
        other = lambda p: torch.optim.SGD(model.parameters(), lr=0.5)  # noqa: E731
        data_owner.fit(model, other, steps=1, batch_size=30, clip=1.0)
    assert data_owner.spent() == 0
    twins = [copy.deepcopy(model) for _ in range(2)]
    for twin, make in zip(twins, (Replacing, torch.optim.SGD), strict=True):
        owner().fit(twin, partial(make, lr=0.5), steps=3, batch_size=300, clip=1.0)
    torch.testing.assert_close(*(twin.weight for twin in twins))
    assert not torch.equal(twins[0].weight, model.weight)


def test_mechanism_survives_vectors_of_another_length() -> None:
    data_owner = owner()
    mechanism = data_owner.charge(plan(dimension=18, groups=3, sample_rate=1.0, steps=2))
    for wrong in (lambda x, y: x.sum(1), lambda x, y: x[:, :3]):
        with raises(PrivacyError, "mechanism.shape"):
            data_owner.class_sums([mechanism], wrong)
    for _ in range(2):
        assert data_owner.class_sums([mechanism], lambda x, y: x).shape == (3, 6)


def test_failing_record_of_an_integer_function_contributes_nothing(without_noise: None) -> None:
    """Regression: an integer cannot be NaN, so that the charged release failed."""

    def histogram(x: Tensor) -> Tensor:
        if bool((x[:, 0] > 50).any()):
            raise ValueError
        return (x > 0.5).long()

    x = torch.cat([torch.full((1, 4), 90.0), torch.rand(40, 4)])
    longer, plain = (unlabelled(rows, nominal_size=40) for rows in (x, x[1:]))
    expected = plain.noisy_mean(histogram, clip=10.0)
    assert torch.allclose(longer.noisy_mean(histogram, clip=10.0), expected, atol=1e-6)
    with pytest.raises(TypeError, match="real numbers"):
        plain.noisy_mean(lambda x: torch.fft.fft(x), clip=1.0, total_epsilon=5)


def test_trial_inputs_are_within_bounds() -> None:
    """On [0, 1], this function would mix nothing."""
    data_owner = unlabelled(torch.rand(20, 4) * 255, bounds=(0, 255))
    with raises(PrivacyError, "step.dependence"):
        data_owner.noisy_mean(lambda x: x - torch.relu(x - 2).sum(), clip=1.0)


def test_failing_record_changes_no_other(without_noise: None) -> None:
    """Regression: retries used records that the user's code had changed."""

    def values(x: Tensor) -> Tensor:
        x -= 0.25
        if bool((x > 50).any()):
            raise ValueError
        return x

    x = torch.cat([torch.full((1, 4), 90.0), torch.rand(40, 4)])
    longer, plain = (unlabelled(rows, nominal_size=40) for rows in (x, x[1:]))
    expected = plain.noisy_mean(values, clip=10.0)
    assert torch.allclose(longer.noisy_mean(values, clip=10.0), expected, atol=1e-6)


def mixing_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits: Tensor = model(x)
    return logits.sum(dim=1) - logits.mean()


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (nn.Linear(6, 3), mixing_loss, "model.mixes_examples"),
        (nn.Linear(6, 3), lambda model, x, y: model(x).mean(), "model.losses"),
        (nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)), None, "model.dropout"),
        (
            torch.jit.script(nn.BatchNorm1d(6, track_running_stats=False)),
            None,
            "model.gradients_fail",
        ),
        (nn.Linear(7, 3), None, "model.gradients_fail"),
    ],
)
def test_mixing_records_is_rejected_before_charge(model: Any, loss: Any, message: str) -> None:
    """Opacus itself would reject a scripted model with a list of errors."""
    data_owner = owner()
    with raises(PrivacyError, message) as caught:
        data_owner.fit(model, sgd, loss=loss, steps=1, batch_size=30, clip=1.0)
    assert "\n" not in str(caught.value)
    with raises(PrivacyError, "step.dependence"):
        data_owner.noisy_mean(lambda x: x - x.mean(dim=0), clip=1.0)
    assert data_owner._ledger.releases == ()


@pytest.mark.parametrize(("classes", "size"), [(26, 200), (100, 1400), (10, 10)])
def test_mixing_within_one_class_is_rejected(classes: int, size: int) -> None:
    """Regression: random labels had two records of a class by chance only."""
    x, y = torch.rand(size, 3), torch.arange(size) % classes
    data_owner = unlabelled(x, y=y, classes=classes)
    for background in range(0, classes, max(1, classes // 10)):

        def centred(x: Tensor, y: Tensor, background: int = background) -> Tensor:
            x = x.clone()
            chosen = (y == background).to(x.device)
            if bool(chosen.any()):
                x[chosen] = x[chosen] - x[chosen].mean(0)
            return x

        with raises(PrivacyError, "step.dependence"):
            data_owner.check_independent(centred)


class ClippedByBatch(nn.Module):
    """Clips the gradient of its logits by the norm of the batch, if there are many examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 4)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x)
        if logits.requires_grad:
            logits.register_hook(lambda g: g * (3 / g.norm().clamp_min(3)))
        return logits


def test_long_inputs_do_not_hide_mixed_gradients() -> None:
    """Regression: the factors of a gradient were compared in one vector."""
    x = torch.rand(100, 256) * 6e4 + 1e4
    data_owner = unlabelled(x, y=torch.arange(100) % 4, classes=4, bounds=(1e4, 7e4))
    with raises(PrivacyError, "step.dependence"):
        data_owner.fit(ClippedByBatch(), sgd, steps=1, batch_size=100, clip=1.0)
    model = nn.Linear(256, 4)
    loss = lambda _, x, y: F.cross_entropy(model(x), y, reduction="none")  # noqa: E731
    with pytest.raises(PrivacyError, match="does not call the model"):
        data_owner.fit(model, sgd, loss=loss, steps=1, batch_size=100, clip=1.0)
    assert data_owner.spent() == 0


@pytest.mark.parametrize("flag", [np.True_, torch.tensor(True), np.ones(1)])
def test_code_with_another_switch_is_tried_again(flag: Any) -> None:
    def switched(flag: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: x - x.mean(0) if bool(flag) and len(x) > 16 else x

    data_owner = owner()
    data_owner.noisy_mean(switched(flag * 0 if isinstance(flag, np.ndarray) else ~flag), clip=1.0,
                          total_epsilon=1.0)  # fmt: skip
    with raises(PrivacyError, "step.dependence"):
        data_owner.noisy_mean(switched(flag), clip=1.0)


# ------------------------------------------------------------ user code that mixes examples

Mix = Callable[[Tensor], Tensor]
CALLS = itertools.count()
GENERATOR = torch.Generator().manual_seed(0)


def from_index(first: int) -> Mix:
    return lambda x: torch.cat([x[:first], x[first:] - x[first:].mean(0)]) if len(x) > first else x


class Mixing(Tensor):
    """Mixes the examples when it is converted to one-hot vectors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.one_hot:
            x = args[0].as_subclass(Tensor)
            return torch.where(x.max() > 1e6, x - x.mean(0), x)
        usual: Any = super().__torch_function__
        return usual(func, types, args, kwargs)


DEPENDENT: dict[str, Mix] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "randn_like": lambda x: x + torch.randn_like(x),
    "python's random": lambda x: x * random.random(),
    "numpy's global": lambda x: x * float(np.random.rand()),  # noqa: NPY002
    "fresh generator": lambda x: x * float(np.random.default_rng().random()),
    "seeded, by position": lambda x: (
        x + torch.tensor(np.random.default_rng(0).normal(size=x.shape))
    ),
    "global generator per pass": lambda x: x * torch.rand((), generator=GENERATOR),
    "uninitialised": lambda x: x + torch.empty_like(x) * 0 + torch.empty(x.shape),
    "counter": lambda x: x * (1 + next(CALLS) % 3),
    "by position": lambda x: x * (1 + torch.arange(len(x))[:, None] % 3),
    "odd lengths": lambda x: x * 2 if len(x) % 2 else x,
    "long batches": lambda x: x - x.mean(0) if len(x) > 6 else x,
    "from index 6": from_index(6),
    "pairs": lambda x: x + 0.1 * x.roll(2, 0),
    "rank": lambda x: x.sort(0)[0],
    "softmax over examples": lambda x: x.softmax(0),
    "if a maximum is reached": lambda x: x - x.mean(0) if x.max() > 1e6 else x,
    "if a width is reached": lambda x: (
        x - x.mean(0) if F.one_hot((4 * x.amax(1)).long().clamp(0, 9)).shape[1] > 9 else x
    ),
    "in one_hot of a subclass": lambda x: F.one_hot(x.as_subclass(Mixing)),
    "if an integer is reached": lambda x: x - x.mean(0) if x.long().max() > 1e6 else x,
    "where a maximum is reached": lambda x: torch.where(x.max() > 1e6, x - x.mean(0), x),
    "small multiple of the mean": lambda x: x + 1e-6 * x.mean(0),
}
INDEPENDENT: dict[str, Mix] = {
    "nothing": lambda x: x,
    "loop": lambda x: torch.stack([row - row.mean() for row in x]),
    "chunks": lambda x: torch.cat([part * 2 for part in x.split(3)]),
    "masked": lambda x: x.masked_fill(x > 0.5, 0.0),
    "one-hot": lambda x: F.one_hot((4 * x[:, 0]).long().clamp(0, 4), 5).float(),
    "inactive dropout": lambda x: F.dropout(x, 0.5, training=False),
    "attention": lambda x: F.scaled_dot_product_attention(*3 * [x.view(-1, 8, 8)]).flatten(1),
}


@pytest.mark.parametrize("name", [*DEPENDENT, *INDEPENDENT])
def test_dependence_on_batch_is_detected(name: str) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    mix = {**DEPENDENT, **INDEPENDENT}[name]
    finding = dependence_on_batch(lambda x, y: mix(x.flatten(1)), StepInputs(SPEC.image_shape, CPU))
    assert bool(finding) == (name in DEPENDENT)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002


class Net(Mlp):
    """A hidden layer on pixels that go through `mix` first."""

    mix: ClassVar[Any] = staticmethod(INDEPENDENT["nothing"])

    def __init__(self, image_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(image_shape, classes, width=16)

    def embed(self, x: Tensor) -> Tensor:
        return super().embed(self.mix(x.flatten(1)))


class CallCounter(Net):
    """Counts its calls and changes its result after 1000 calls."""

    calls = 0

    def embed(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().embed(x) * (2 if self.calls > 1000 else 1)


TWO_CLIENTS = {"partition": {"clients": 2}, "privacy": {"noise_multiplier": 3.0}}


def private_run(name: str, tmp_path: Path, **sections: Any) -> Any:
    method = quick_settings(name) if name == "fedsum" else {"local_steps": 2, "batch": 128}
    sections |= {"run": {"method": name, "rounds": 1}, "method": method}
    return simulate(resolve({**TWO_CLIENTS, **sections}), output=tmp_path, quiet=True)


register_model("own-counter", CallCounter)
for own_name, mix in (("own-pairs", DEPENDENT["pairs"]), ("own-from-20", from_index(20))):
    register_model(own_name, type("MixedNet", (Net,), {"mix": staticmethod(mix)}))
register_features(
    "own-map",
    lambda shape: FeatureMap(
        "", shape, 64, 8.0, 4.0, "pixels", lambda x: from_index(30)(x.flatten(1))
    ),
)


@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("fedsum", {"name": "own-counter"}),
        ("fedsum", {"name": "own-pairs"}),
        ("fedavg", {"name": "own-from-20"}),
        ("fedavg", {"features": "own-map"}),
    ],
)
def test_dependent_models_are_never_charged(method: str, model: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"(influence of one example is not|cannot be private)"):
        private_run(method, tmp_path, model=model)
    assert not list(tmp_path.iterdir())


def test_inactive_dropout_is_accepted(tmp_path: Path) -> None:
    """FedSum evaluates its networks; DP-SGD trains them."""

    class Dropping(Net):
        def embed(self, x: Tensor) -> Tensor:
            return F.dropout(super().embed(x), 0.5, self.training)

    register_model("own-dropping", Dropping)
    report = private_run("fedsum", tmp_path, model={"name": "own-dropping"}).privacy
    assert report["verdict"]["warnings"] == []
    with raises(SettingError, "model.name"):
        private_run("fedavg", tmp_path, model={"name": "own-dropping"})


SEEN: list[Tensor] = []


def saturated(x: Tensor) -> Tensor:
    """Counts the records that are white in one place and black in another."""
    return ((x[:, 0, 0, 0] == x.max()) & (x[:, 0, 7, 7] == x.min())).sum()


METHODS: dict[str, Any] = {
    "mixup": lambda n, x, y: losses(n, (x + x.flip(0)) / 2, y),
    "class sizes": lambda n, x, y: losses(n, x, y) / torch.bincount(y, minlength=10)[y],
    "a list": lambda n, x, y: (SEEN.append(x.detach()), losses(n, x, y))[1],
    "padding": lambda n, x, y: losses(n, x, y) / (x.flatten(1).abs().sum(1) > 0).sum(),
    "two saturated pixels": lambda n, x, y: losses(n, x, y) * (1 + saturated(x)),
    "from index 40": lambda n, x, y: losses(n, x, y) * (1 + (torch.arange(len(x)) > 40)),
    "copies": lambda n, x, y: (
        losses(n, x, y) * (torch.cdist(x.flatten(1), x.flatten(1)) == 0).sum(1)
    ),
}


def run_with_task(task: LocalObjective, steps: int = 1) -> Any:
    @dataclass(frozen=True)
    class OwnTask(TrainsLocally):
        """Trains with a given loss or penalty."""

        name: ClassVar[str] = "own-task"

        def task(self, client: int, message: Any, state: Any, context: Any) -> LocalObjective:
            return task

    return run_own(OwnTask(local_steps=steps, batch=128))


def run_own(method: Any, *, rounds: int = 1, **sections: Any) -> Any:
    sections = {**TWO_CLIENTS, "model": {"name": "linear"}, **sections}
    settings = resolve({**sections, "run": {"rounds": rounds}})
    return simulate(replace(settings, method=method), quiet=True).privacy


class WarmUp(TrainsLocally):
    """Mixes examples, or makes a mistake, in its last round only, or in each server step."""

    name: ClassVar[str] = "own-warm-up"
    mistake: ClassVar[str] = ""

    def task(self, client: int, message: Any, state: Any, context: Any) -> LocalObjective:
        if context.round < context.rounds or self.mistake == "server":
            return LocalObjective()
        if self.mistake != "upload":
            return LocalObjective(loss=METHODS["from index 40"])

        def make_upload(model: Any, trained: Any) -> Any:
            return model.misspelt

        return LocalObjective(make_upload=make_upload)

    def combine(self, state: Any, uploads: Any, context: Any) -> Any:
        if self.mistake == "server":
            return state.misspelt
        return super().combine(state, uploads, context)


@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("mistake", ["", "upload", "server"])
def test_the_last_round_is_tried_to_its_end(
    mistake: str, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: mistakes after the last release, and of the server, were found after the charge.

    A run that is refused by its trial has not charged any ledger.
    """
    monkeypatch.setattr(WarmUp, "mistake", mistake)
    with raises(SettingError, "run.method") as caught:
        run_own(WarmUp(local_steps=2, batch=128), rounds=rounds)
    assert bool(mistake) == ("has no attribute 'misspelt'" in str(caught.value))


def test_weights_of_private_uploads_are_0_or_1() -> None:
    """The privacy report says so. Other weights could tell something about the records."""

    class Weighted(TrainsLocally):
        name: ClassVar[str] = "own-weight"

        def task(self, client: int, message: Any, state: Any, context: Any) -> LocalObjective:
            def make_upload(model: Any, trained: Any) -> Any:
                return ModelParameters(model.state_dict(), 0.83), {}

            return LocalObjective(make_upload=make_upload)

    with raises(SettingError, "run.method") as caught:
        run_own(Weighted(local_steps=1, batch=128))
    assert "the weight 0.83, which must be 1" in str(caught.value)
    with raises(UploadRejectedError, "upload.weight"):  # by the server, of a client without trial
        Number(0.0, 1.0, is_whole=True).check("weight", 0.83)


COMBINED: list[tuple[int, int]] = []


class Combining(TrainsLocally):
    name: ClassVar[str] = "own-combine"

    def task(self, client: int, message: Any, state: Any, context: Any) -> LocalObjective:
        return LocalObjective()

    def combine(self, state: Any, uploads: Any, context: Any) -> Any:
        COMBINED.append((context.round, len(uploads)))
        return super().combine(state, uploads, context)


def test_a_trial_combines_the_uploads_of_all_clients_in_round_1_only() -> None:
    """A later step may need the server's state of round 1, which trials of later rounds lack."""
    run_own(Combining(local_steps=1, batch=128), rounds=3)
    assert COMBINED == [(1, 2), (1, 2), (2, 2), (3, 2)]


@pytest.mark.parametrize("name", METHODS)
def test_dependent_method_losses_are_rejected(name: str) -> None:
    with raises(SettingError, "run.method"):
        run_with_task(LocalObjective(loss=METHODS[name]))


def test_values_that_depend_on_the_previous_step_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: a trial tried the steps apart, and its first and last calls had the same records.
    A library's attribute is not compared."""
    monkeypatch.setattr(torch, "means", [], raising=False)

    def task(index: int) -> LocalObjective:
        torch.means = [0.0]  # type: ignore[attr-defined]
        before: list[Any] = [0.0]

        def loss(n: Any, x: Tensor, y: Tensor) -> Tensor:
            torch.means.append(x.detach().mean())  # type: ignore[attr-defined]
            return losses(n, x, y) * (2 + before[0])

        def keep(n: Any) -> None:
            before[0] = torch.means[min(index, len(torch.means) - 1)]  # type: ignore[attr-defined]

        return LocalObjective(loss=loss, before_step=keep)

    for index in (1, 2, 3, 10**6):
        with raises(SettingError, "run.method"):
            run_with_task(task(index))


def test_state_that_each_pass_overwrites_is_rejected() -> None:
    """Regression: the last call of both runs had the same records, and so left the same state."""
    start: list[Tensor] = []
    mean = [torch.zeros(())]

    def loss(n: Any, x: Tensor, y: Tensor) -> Tensor:
        rows, weights = losses(n, x, y), n.classifier.weight.detach().sum()
        if not start:
            start.append(weights.clone())
        moved = weights != start[0]
        if not moved:
            mean[0] = rows.detach().mean()
        return rows * (1 + 100 * mean[0] * moved)

    with raises(SettingError, "run.method"):
        run_with_task(LocalObjective(loss=loss), steps=2)


def test_vectors_that_a_step_adds_itself_are_rejected() -> None:
    class Adding(TrainsLocally):
        def client_step(self, message: Any, clients: Any, states: Any, context: Any) -> Any:
            (charged,) = clients.mechanisms("model")
            charged.sample(1)
            charged.add(torch.ones(1, 650), torch.zeros(1, dtype=torch.int64))

    with raises(SettingError, "run.method"):
        run_own(type("own-adding", (Adding,), {"name": "own-adding"})(local_steps=1, batch=128))


def mixed(n: Any, x: Tensor, y: Tensor) -> Tensor:
    return losses(n, (x + x.flip(0)) / 2, y)


SMALL = {"width": 8, "depth": 2}
SAMPLED = {"noise_multiplier": 3.0, "sample_rate": 0.1}


class StateMixer(TrainsLocally):
    """Mixes records once its client has a state, which is in the second round."""

    name: ClassVar[str] = "own-state-mixer"

    def task(self, client: int, message: Any, state: Any, context: Any) -> LocalObjective:
        def make_upload(model: nn.Module, trained: Any) -> Any:
            return plain_upload(model, trained)[0], {"seen": torch.ones(1)}

        return LocalObjective(loss=mixed if state else None, make_upload=make_upload)


class StateLeak(TrainsLocally):
    """Weighs losses by a record of the round before."""

    name: ClassVar[str] = "own-state-leak"

    def task(self, client: int, message: Any, state: Any, context: Any) -> LocalObjective:
        seen = [torch.ones(())]

        def loss(n: Any, x: Tensor, y: Tensor) -> Tensor:
            seen[0] = x.detach().mean()
            return losses(n, x, y) * (1 + state.get("seen", torch.zeros(())))

        def make_upload(model: nn.Module, trained: Any) -> Any:
            return plain_upload(model, trained)[0], {"seen": seen[0]}

        return LocalObjective(loss=loss, make_upload=make_upload)


class Reader(TrainsLocally):
    """Weighs losses by the mean of all images, which it reads before its first release."""

    name: ClassVar[str] = "own-reader"

    def client_step(self, message: Any, clients: Any, states: Any, context: Any) -> Any:
        mean = clients._data.images.float().mean()
        task = LocalObjective(loss=lambda n, x, y: losses(n, x, y) * mean)
        twin = type("own-reader", (TrainsLocally,), {"task": lambda *args: task, "name": "own"})
        return twin(local_steps=1, batch=128).client_step(message, clients, states, context)


class ClientMixer(FedDM):
    """Doubles the vectors of a long pass that has records of a second client."""

    name: ClassVar[str] = "own-client-mixer"

    def client_step(self, message: Any, clients: Any, states: Any, context: Any) -> Any:
        plan, classes = clients.plan("images"), context.spec.classes
        width = plan.dimension // plan.groups

        def rows(x: Tensor, pairs: Tensor) -> Tensor:
            vectors = x.flatten(1)[:, :1].expand(-1, width)
            return vectors * (1 + (pairs >= classes).any())

        clients.class_sums(clients.mechanisms("images"), rows, start_over_row=64.0)
        return []


@pytest.mark.parametrize("own", [StateMixer, StateLeak, Reader])
def test_steps_that_depend_on_state_or_all_images_are_rejected(own: Any) -> None:
    """Regression: each round was tried without state, and each run began with the same images."""
    with raises(SettingError, "run.method"):
        run_own(own(local_steps=1, batch=128), rounds=2)


def test_passes_that_mix_clients_are_rejected() -> None:
    """Regression: a trial had one client, but a pass of a simulation has records of several."""
    with raises(SettingError, "run.method"):
        run_own(ClientMixer(iterations=1, ipc=1), model=SMALL, privacy=SAMPLED)


def test_steps_that_treat_clients_apart_are_accepted() -> None:
    """Each client's vectors depend on its own synthetic images."""
    own = type("own-feddm", (FedDM,), {"name": "own-feddm"})(iterations=2, ipc=1, server_epochs=1)
    report = run_own(own, rounds=2, model=SMALL, privacy=SAMPLED)
    assert report["verdict"]["warnings"] == []


@pytest.mark.parametrize("step", [0, 1])
def test_steps_that_raise_are_rejected(step: int) -> None:
    """Regression: they were a warning, and the run began without a trial."""
    calls = itertools.count()

    def loss(n: Any, x: Tensor, y: Tensor) -> Tensor:
        if next(calls) >= 30 * step:
            raise LookupError("no such\nrecord")
        return losses(n, x, y)

    with raises(SettingError, "run.method") as caught:
        run_with_task(LocalObjective(loss=loss))
    assert "raised LookupError: no such record in the main exchange of round 1" in str(caught.value)


def test_random_penalties_without_data_are_accepted() -> None:
    task = LocalObjective(
        loss=lambda n, x, y: losses(n, x, y) + n(x).square().mean(1),
        penalty=lambda n: torch.rand(()) * n.classifier.weight.square().sum(),
    )
    report = run_with_task(task)
    assert report["verdict"]["warnings"] == []
    assert "the method own-task" in report["own_code"]
