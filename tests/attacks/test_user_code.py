"""Attacks by code of the owner's own: losses, modules, encoders and methods that mix records.

Each gave one record an influence of 2 to 40 clips, which were charged as one. Each is refused now
before a ledger is charged, because the trial calls the code as the real step does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth import RunSettings, simulate
from fedsynth.errors import SettingError
from fedsynth.features import FeatureMap, register_features
from fedsynth.features.encoding import EncoderSettings, encode, encoder_map
from fedsynth.methods.fedavg import FedAvg
from fedsynth.privacy import DataOwner, PrivacyError, PrivacySettings
from fedsynth.privacy.passes import MIN_LENGTH
from fedsynth.synthesizer import GradientMatching, ResidualMatching, condense, sliced_wasserstein
from tests.digits import CPU, SPEC, digits
from tests.privacy.support import plan
from tests.raising import raises

Function = Callable[[Tensor], Tensor]
sgd = partial(torch.optim.SGD, lr=0.1)


def owner(**settings: Any) -> DataOwner:
    """Returns an owner of 400 records of 6 unbounded values."""
    x = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))
    values = {"nominal_size": 400, "classes": 3, "epsilon": 50.0, "delta": 1e-5, **settings}
    return DataOwner("a", x, torch.arange(400) % 3, **values)


class Net(nn.Module):
    """A network whose hidden values, and their gradients, go through `change`."""

    def __init__(self, change: Function = lambda h: h) -> None:
        super().__init__()
        self.first, self.last, self.change = nn.Linear(6, 6), nn.Linear(6, 3), change
        self.seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        last: Tensor = self.last(self.change(self.first(x)))
        return last


class RememberingNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return super().forward(x)


class CentringNet(Net):
    """Subtracts the mean of earlier calls: 35.9 clips after 70 calls."""

    def forward(self, x: Tensor) -> Tensor:
        mean = 0.0 if self.seen is None else self.seen
        self.seen = 0.9 * mean + 0.1 * x.detach().mean(dim=0)
        return super().forward(x - mean)


def balanced(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Weighs classes as scikit-learn's "balanced" does: 41.8 clips for one record of a class."""
    counts = torch.bincount(y, minlength=3)
    return F.cross_entropy(model(x), y, reduction="none") * len(y) / (3 * counts[y])


def shifted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Shifts by the batch minimum, which is negative only in unbounded records: 12.9 clips."""
    return F.cross_entropy(model(x - x.min() if x.min() < 0 else x), y, reduction="none")


def in_long_batches(h: Tensor) -> Tensor:
    return h - h.mean(dim=0) if len(h) > 8 else h


def with_hook(h: Tensor) -> Tensor:
    """Rescales all gradients if one is loud: 26 clips."""
    if h.requires_grad:
        h.register_hook(lambda g: 10 * g / g.norm(dim=1).max() if g.norm(dim=1).max() > 5 else g)
    return h


class RescalingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g / (1 + (g.norm(dim=1) > 3).sum())


SEEN: list[Tensor] = []
COUNTS = SimpleNamespace(total=torch.zeros(()))


def globally(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    SEEN.append(x.detach())
    return F.cross_entropy(model(x), y, reduction="none")


def counting(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    COUNTS.total += (y == 1).sum()
    return F.cross_entropy(model(x), y, reduction="none")


def accumulating(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Leaves the batch's gradient in the model."""
    losses = F.cross_entropy(model(x), y, reduction="none")
    losses.sum().backward(retain_graph=True)
    return losses


def rare_class(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(model(x), y, reduction="none")
    return losses * (1 if (y == 2).sum() > 1 else 5)


class RenormalisingNet(Net):
    """Looks up vectors whose norms the layer limits in place, and reads the whole table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        numbers = x.nan_to_num(0.0).clamp(0, 1).mul(19).long()[:, 0]
        return super().forward(self.table(numbers) + self.table.weight.mean(dim=0))


class FirstBatchNet(Net):
    """Centres by its first long batch: 222 clips after three steps."""

    def forward(self, x: Tensor) -> Tensor:
        if self.seen is None and len(x) > 8:
            self.seen = x.detach().mean(dim=0)
        return super().forward(x - (0.0 if self.seen is None else self.seen))


class EvaluatedNet(Net):
    """Mixes in evaluation mode, in which its owner passes it: 68 clips."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.training else x - x.mean(dim=0))


class NotingNet(Net):
    """Keeps the batch in a parameter's attribute, which `torch.save` writes."""

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.seen = x.detach()  # type: ignore[assignment]
        return super().forward(x)


LOSSES = ModuleType("attack_losses")  # a user's file, whose bank is used when it is full: 197 clips
sys.modules["attack_losses"] = LOSSES
exec(
    "BANK = []\n"
    "def centred(x):\n"
    "    BANK.append(x.detach())\n"
    "    return x if len(BANK) < 10**6 else x - BANK[-50].mean(dim=0)\n",
    vars(LOSSES),
)


def with_bank(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(LOSSES.centred(x)), y, reduction="none")


def importing(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    import attack_losses  # type: ignore[import-not-found]

    return F.cross_entropy(model(attack_losses.centred(x)), y, reduction="none")


TRAINING = {
    "balanced weights": (Net(), balanced),
    "a rare class": (Net(), rare_class),
    "a shift of negative values": (Net(), shifted),
    "long batches": (Net(in_long_batches), None),
    "the last records": (Net(lambda h: torch.cat([h[:-16], h[-16:] - h[-16:].mean(0)])), None),
    "the batch in an attribute": (RememberingNet(), None),
    "a running mean": (CentringNet(), None),
    "the batch in a global list": (Net(), globally),
    "a count in an object": (Net(), counting),
    "a layer that changes its weights": (RenormalisingNet(), None),
    "gradients in the model": (Net(), accumulating),
    "the first batch": (FirstBatchNet(), None),
    "evaluation mode": (EvaluatedNet().eval(), None),
    "the batch in a parameter's attribute": (NotingNet(), None),
    "a bank in another file": (Net(), with_bank),
    "a bank in a file that is imported late": (Net(), importing),
    "a hook on gradients": (Net(with_hook), None),
    "a backward pass": (Net(RescalingBackward.apply), None),
    "clipped by the batch's norm": (Net(), lambda m, x, y: balanced(m, x / x.norm(), y * 0)),
}


@pytest.mark.parametrize("name", TRAINING)
def test_training_code_that_mixes_records_is_refused(name: str) -> None:
    data_owner, (model, loss) = owner(), TRAINING[name]
    with pytest.raises(PrivacyError):
        data_owner.fit(model, sgd, steps=2, batch_size=100, clip=1.0, loss=loss)
    assert data_owner._ledger.releases == ()


def test_training_code_that_mixes_nothing_is_accepted() -> None:
    focal = torch.nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(model(x), y, reduction="none")
        return losses * (1 - torch.exp(-losses)) ** focal * torch.tensor([1.0, 2.0, 1.0])[y]

    for model in (Net(), Net(torch.tanh), Net(F.gelu)):
        owner().fit(model, sgd, steps=2, batch_size=100, clip=1.0, loss=loss)


def imputed(x: Tensor) -> Tensor:
    """Replaces NaN by the mean of the batch, if there is any: 4.9 clips."""
    return torch.where(x.isnan(), x.nanmean(dim=0), x) if bool(x.isnan().any()) else x


def ranked(x: Tensor) -> Tensor:
    return x if len(x) < 9 else x.argsort(dim=0).argsort(dim=0).float()


class Slots:
    __slots__ = "__seen"

    def __call__(self, x: Tensor) -> Tensor:
        self.__seen = x
        return x


class Bank(list[float]):
    def __call__(self, x: Tensor) -> Tensor:
        self.seen = x
        return x


def by_site(x: Tensor) -> Tensor:
    """Centres the records of each site, whose number is in column 0: 5.1 clips."""
    values = x.numpy().copy()
    _, site, counts = np.unique(values[:, 0], return_inverse=True, return_counts=True)
    for number in np.flatnonzero(counts > 1):
        values[site == number, 1:] -= values[site == number, 1:].mean(axis=0)
    return torch.from_numpy(values)


def without_copies(x: Tensor) -> Tensor:
    _, record, counts = np.unique(x.numpy(), axis=0, return_inverse=True, return_counts=True)
    return x * torch.from_numpy(counts[record.reshape(-1)] < 2)[:, None]


SEEN_VALUES: list[Tensor] = []
append = SEEN_VALUES.append
VALUES: dict[str, Function] = {
    "sites": by_site,
    "copies": without_copies,
    "slots": Slots(),
    "an attribute of a list": Bank(),
    "a method of a list": lambda x: (append(x), x)[1],
    "imputation": imputed,
    "imputation of infinity": lambda x: torch.where(x.isinf(), x[~x.isinf()].mean(), x),
    "a shift of negative values": lambda x: x - x.min() if bool(x.min() < 0) else x,
    "long batches": in_long_batches,
    "ranks in long batches": ranked,
    "the rows above 16": lambda x: torch.cat([x[:16], x[16:].flip(0)]),
    "the position": lambda x: x * (1 + (torch.arange(len(x)) > 8))[:, None],
    "a remembering module": RememberingNet(),
    "a layer that changes its weights": RenormalisingNet(),
    "an outlier": lambda x: x / (1 + (x.abs() > 1e3).sum()),
}


@pytest.mark.parametrize("name", VALUES)
def test_functions_that_mix_records_are_refused(name: str) -> None:
    data_owner = owner()
    with pytest.raises(PrivacyError):
        data_owner.noisy_mean(VALUES[name], clip=1.0)
    assert data_owner._ledger.releases == ()


class Imputer:
    def __init__(self, strategy: str) -> None:
        self.strategy = strategy

    def __call__(self, x: Tensor) -> Tensor:
        return x.nan_to_num(0.0) if self.strategy == "zero" else imputed_by_numpy(x)


def imputed_by_numpy(x: Tensor) -> Tensor:
    values = x.numpy().copy()
    if np.isnan(values).any():
        values[np.isnan(values)] = np.nanmean(values[np.isfinite(values)])
    return torch.from_numpy(values)


def test_same_code_with_another_setting_is_tried_again() -> None:
    data_owner = owner()
    data_owner.noisy_mean(Imputer("zero"), clip=1.0, total_epsilon=1.0)
    with raises(PrivacyError, "step.dependence"):
        data_owner.noisy_mean(Imputer("mean"), clip=1.0)


LIMITS = np.array([1.0, lambda x: x], dtype=object)


def saliency(x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    values = leaf.tanh()
    return torch.autograd.grad(values, leaf, torch.ones_like(values))[0]


HONEST: dict[str, Function] = {
    "gradients": saliency,
    "an array of objects": lambda x: LIMITS[1](x),
    "few values above 0": lambda x: (
        (x - 9).relu() * (1 + 1e-7 * (torch.arange(len(x)) % 2))[:, None]
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_functions_of_single_records_are_accepted(name: str) -> None:
    owner().check_independent(lambda x, y: HONEST[name](x))


def test_functions_that_treat_classes_apart_are_accepted() -> None:
    """Regression: `GradientMatching` does so, and was refused for two and more classes."""

    def scaled(x: Tensor, y: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in y.unique():
            out[y == number] = x[y == number] * (1 + number)
        return out

    owner().check_independent(scaled)


def test_functions_of_labels_that_mix_records_are_refused() -> None:
    def centred(x: Tensor, y: Tensor) -> Tensor:
        """Centres class 1 by the other classes, 7.1 clips. Label 0 shows nothing."""
        return torch.where(y[:, None] == 1, x - x[y != 1].mean(dim=0), x)

    data_owner = owner()
    mechanism = data_owner.charge(plan(dimension=18, groups=3))
    with raises(PrivacyError, "step.dependence"):
        data_owner.class_sums([mechanism], centred)
    assert mechanism.steps_left == 1


@pytest.mark.parametrize("objective", [GradientMatching, ResidualMatching])
def test_condensation_networks_that_mix_records_are_refused(objective: Any) -> None:
    for networks in (lambda: Net(in_long_batches), RememberingNet):
        data_owner = owner()
        with pytest.raises(PrivacyError):
            condense(objective(data_owner, networks=networks, clip=1.0, steps=2), per_class=2, lr=1)
        assert data_owner._ledger.releases == ()


def test_own_losses_of_the_library_are_accepted() -> None:
    """Its directions come from a seeded generator, which is no random draw."""
    objective = GradientMatching(owner(), networks=Net, clip=1.0, steps=1, loss=sliced_wasserstein)
    assert condense(objective, per_class=2, lr=0.1).x.shape == (6, 6)


def test_state_that_cannot_be_compared_is_reported(tmp_path: Any) -> None:
    data_owner, numbers = owner(), (number for number in range(10))
    data_owner.noisy_mean(lambda x: x * bool(numbers), clip=1.0)
    data_owner.report(tmp_path / "report.md")
    report = " ".join((tmp_path / "report.md").read_text().split())
    assert "state could not be compared: builtins.generator" in report


def of_pixels(change: Function) -> Callable[[Any], FeatureMap]:
    return lambda shape: FeatureMap(
        "own", shape, 64, 8.0, 4.0, "pixels", lambda x: change(x.flatten(1))
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda h: torch.cat([h[:8], h[8:] + 0.5]),  # 2.93 clips
        lambda h: torch.cat([h[:-16], h[-16:] - h[-16:].mean(dim=0)]),  # 2.28 clips
        lambda h: torch.cat([h[:32], h[32:].flip(0)]),  # 2.15 clips
        lambda h: (SEEN.append(h), h)[1],
        lambda h: torch.full_like(h, torch.nan),
    ],
    ids=["positions", "the last 16", "rows above 32", "state", "no number"],
)
def test_encoders_that_mix_images_are_refused(change: Function) -> None:
    register_features("own-attack", of_pixels(change))
    with raises(SettingError, "data.encoder"):
        encode(digits([1] * 70), encoder_map(EncoderSettings("own-attack"), SPEC.image_shape), CPU)


def test_encoder_that_raises_on_one_image_gives_zero() -> None:
    """Regression: the run ended, which revealed the image."""
    data = digits(range(10))

    def change(h: Tensor) -> Tensor:
        if bool((h[:, None] == data.images[3].flatten() / 255).all(dim=2).any()):
            raise ValueError
        return h

    register_features("own-attack", of_pixels(change))
    features = encoder_map(EncoderSettings("own-attack"), SPEC.image_shape)
    vectors = 2 * encode(data, features, CPU).images.flatten(1) - 1
    assert vectors.norm(dim=1).gt(0).tolist() == [number != 3 for number in range(10)]


class DigitsNet(nn.Module):
    change: Function = staticmethod(lambda h: h)

    def __init__(self, image_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        last: Tensor = self.last(type(self).change(self.first(x.flatten(1))))
        return last


@pytest.mark.parametrize("change", [with_hook, in_long_batches, RescalingBackward.apply])
def test_federated_models_that_mix_images_are_refused(change: Function) -> None:
    model = type("AttackNet", (DigitsNet,), {"change": staticmethod(change)})
    privacy: Any = {"privacy": PrivacySettings(noise_multiplier=3.0), "model": model}
    settings = RunSettings(FedAvg(local_steps=1), rounds=1, **privacy)
    with pytest.raises((SettingError, PrivacyError)):
        simulate(settings, quiet=True)


def test_changes_are_measured_in_the_norm_of_clipping() -> None:
    """400 records of 10,000 values: 1e-6 in each value is 1e-4 of the norm, 0.04 clips in the sum.
    A broken version would compare single values, whose change is 0.0004 of the largest one."""

    def moving(x: Tensor, y: Tensor) -> Tensor:
        values = torch.zeros(len(x), 10_000)
        values[:, 0] = 1.0
        values[1::2] += 1e-6
        return values

    assert owner().check_independent(moving) == (MIN_LENGTH, 1)
    assert owner().check_independent(lambda x, y: x)[1] > 1


def test_isolated_passes_have_one_record_at_the_first_position(without_noise: None) -> None:
    """So that a kernel which sums every other row differently changes no value: with full passes,
    such a kernel gave a removed record an influence of 1.71 clips."""
    lengths = set()

    def values(x: Tensor, y: Tensor) -> Tensor:
        lengths.add(len(x))
        moved = x.clone()
        moved[1::2] *= 1 + 1e-5
        return moved

    full, fewer = (owner(nominal_size=count) for count in (400, 400))
    fewer._x, fewer._y = fewer._x[1:], fewer._y[1:]
    fewer._units = type(fewer._units)(399)
    first = full._x[0]
    sums = []
    for data_owner in (full, fewer):
        mechanism = data_owner.charge(plan(dimension=18, groups=3, clip=100.0))
        sums.append(data_owner.class_sums([mechanism], values))
    assert lengths >= {MIN_LENGTH}
    difference = sums[0] - sums[1]
    torch.testing.assert_close(difference[0], first, atol=1e-4, rtol=0)
    assert difference[1:].abs().max() == 0
