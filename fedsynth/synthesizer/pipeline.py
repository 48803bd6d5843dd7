"""Condenses plain tensors without a federation.

An objective draws a network for each step and returns the loss's gradient with respect to the
synthetic records. `condense` loops over the steps and moves the records along the gradient. If the
objective has a `fedsynth.privacy.DataOwner`, all steps are charged to the owner's ledger when the
loop starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from fedsynth.errors import DataError, DivergedError
from fedsynth.models.convnet import VectorJacobian
from fedsynth.models.layers import EmbeddingNetwork
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.privacy.owner import DataOwner
from fedsynth.privacy.passes import power_of_two
from fedsynth.privacy.plans import ReleasePlan
from fedsynth.seeding import forked_rng, torch_generator
from fedsynth.synthesizer.condensation import matching, private_matchers
from fedsynth.synthesizer.condensation.losses import Loss, loss_gradient
from fedsynth.training.sgd import MomentumSgd
from fedsynth.validation import check_number

# A function that returns a network for one step, such as a newly initialised one. An
# `EmbeddingNetwork`'s features are its embedding and its logits. Any other module's features are
# its output [N, D].
Networks = Callable[[], nn.Module]

# The largest number of values in the records of one pass.
CPU_NUMBERS = 2**21


class SyntheticRecords(NamedTuple):
    """Synthetic records x [N, ...] and their labels y [N], sorted by class."""

    x: Tensor
    y: Tensor


def mean_distance(real: Tensor, synthetic: Tensor) -> Tensor:
    """Returns the squared distance between the mean features of real and synthetic records.

    This is the loss of distribution matching (Zhao & Bilen 2023, Eq. 3; FedDM, Eq. 9).

    >>> mean_distance(torch.zeros(3, 2), torch.ones(5, 2))
    tensor(2.)
    """
    return (real.mean(dim=0) - synthetic.mean(dim=0)).square().sum()


def sliced_wasserstein(
    u_ND: Tensor, v_MD: Tensor, *, projections: int = 64, seed: int = 0
) -> Tensor:
    """Returns the sliced Wasserstein distance between two point sets (Bonneel et al. 2015): the
    mean 1-Wasserstein distance between their projections onto random directions.

    Args:
        u_ND, v_MD: the two point sets. N and M may differ.
        projections: the number of random directions.
        seed: the seed of the directions.

    >>> sliced_wasserstein(torch.zeros(4, 1), torch.full((2, 1), 3.0))
    tensor(3.)
    """
    directions = torch.randn(
        u_ND.shape[1], projections, generator=torch_generator(seed, "slicing directions")
    ).to(u_ND)
    directions = directions / torch.linalg.vector_norm(directions, dim=0)
    along_u = (u_ND @ directions).sort(dim=0).values
    along_v = (v_MD @ directions).sort(dim=0).values
    N, M = len(u_ND), len(v_MD)
    # Both quantile functions are constant between the levels k/N and k/M, in units of 1/(N·M).
    levels = torch.cat([M * torch.arange(N + 1), N * torch.arange(M + 1)]).unique()
    rows, widths = levels[:-1], levels.diff().to(u_ND) / (N * M)
    differences = along_u[rows // M] - along_v[rows // N]
    return (widths[:, None] * differences.abs()).sum(dim=0).mean()


class ModuleFeatures(matching.NetworkFeatures):
    """The features that a module computes from records of any shape."""

    def __call__(self, x_NCHW: Tensor, pair_N: Tensor) -> Tensor:
        features: Tensor = self._network(x_NCHW)
        return features.flatten(1)

    def real(self, x_NCHW: Tensor, pair_N: Tensor) -> Tensor:
        with torch.no_grad():
            parts = x_NCHW.split(self.images_at_once(x_NCHW))
            return torch.cat([self(part, pair_N) for part in parts])

    def vjp(
        self, x_NCHW: Tensor, pair_N: Tensor, *, exact: bool = True
    ) -> tuple[Tensor, VectorJacobian]:
        leaf = x_NCHW.detach().requires_grad_()
        with torch.enable_grad():
            features = self(leaf, pair_N)

        def pull(vectors_VND: Tensor) -> Tensor:
            pulled: list[Tensor] = []
            for vector in vectors_VND:
                pulled += torch.autograd.grad(features, leaf, vector, retain_graph=True)
            return torch.stack(pulled)

        return features.detach(), pull

    def images_at_once(self, x_NCHW: Tensor, precision: torch.dtype = torch.float32) -> int:
        return power_of_two(CPU_NUMBERS / max(1, x_NCHW[0].numel()))


def _step_features(
    networks: Networks, seed: int, step: int, device: torch.device
) -> matching.NetworkFeatures:
    """Draws a step's network from the seed, and returns its feature function."""
    if isinstance(networks, nn.Module):
        raise TypeError(
            "networks must be a function that returns a network, got a network. Pass a function "
            "such as `lambda: network`"
        )
    with forked_rng(seed, "networks", step):
        network = networks().to(device).eval().requires_grad_(False)
    if isinstance(network, EmbeddingNetwork):
        return matching.NetworkFeatures(network)
    return ModuleFeatures(network)


def _pair(x: Tensor) -> Tensor:
    """Returns index 0 for each record: without augmentation, all records form one group."""
    return torch.zeros(len(x), dtype=torch.int64, device=x.device)


@dataclass(eq=False, repr=False)
class FeatureMatching:
    """Matches the features of synthetic records to those of real minibatches.

    It is not differentially private. Each class is matched separately.

    Args:
        x, y: the records [N, ...] and their labels [N].
        networks: draws a step's network.
        classes: the number of classes.
        steps: the number of steps.
        batch_size: the number of real records per class in a step.
        loss: the loss between a class's real and synthetic features.
        bounds: the smallest and the largest value in a record.
        seed: the seed of the networks and the minibatches.

    >>> x, y = torch.rand(60, 4), torch.arange(60) % 2
    >>> objective = FeatureMatching(x, y, lambda: nn.Linear(4, 8), classes=2, steps=5)
    >>> condense(objective, per_class=3, lr=0.1).x.shape
    torch.Size([6, 4])
    """

    x: Tensor
    y: Tensor
    networks: Networks
    _: KW_ONLY
    classes: int
    steps: int
    batch_size: int = 256
    loss: Loss = mean_distance
    bounds: tuple[float, float] = (-math.inf, math.inf)
    seed: int = 0

    def __post_init__(self) -> None:
        self._members = [torch.nonzero(self.y == label).flatten() for label in range(self.classes)]
        for label, members in enumerate(self._members):
            if not len(members):
                raise DataError(
                    f"class {label} has no records, but each class needs at least one. Add "
                    "records, or lower classes"
                )

    def start(self, per_class: int, seed: int) -> Tensor:
        """Returns real records, drawn at random from each class."""
        draws = torch_generator(seed, "start images")
        rows = []
        for members in self._members:
            chosen = torch.randint(len(members), (per_class,), generator=draws)
            rows.append(members[chosen.to(members.device)])
        return self.x[torch.stack(rows)]

    def begin(self, synthetic: Tensor) -> None:
        """Charges nothing, because this objective is not private."""

    def gradient(self, step: int, synthetic: Tensor) -> Tensor:
        features = _step_features(self.networks, self.seed, step, self.x.device)
        draws = torch_generator(self.seed, "condensation batches", step)
        out = torch.empty_like(synthetic)
        for label, members in enumerate(self._members):
            order = torch.randperm(len(members), generator=draws)[: self.batch_size]
            batch = self.x[members[order.to(members.device)]]
            real = features.real(batch, _pair(batch))
            u, pull = features.vjp(synthetic[label], _pair(synthetic[label]))
            out[label] = pull(loss_gradient(self.loss, real, u)[None])[0]
        return out


@dataclass(eq=False, repr=False)
class _PrivateMatching:
    """Base class for objectives with differential privacy.

    When `condense` starts, the objective charges the data owner for all steps.
    """

    mechanism: ClassVar[str]

    owner: DataOwner
    networks: Networks
    _: KW_ONLY
    clip: float
    steps: int
    sample_rate: float = 1.0
    total_epsilon: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.classes = self.owner.classes
        self.bounds = self.owner.bounds
        self._divisor = self.sample_rate * self.owner.nominal_size / self.classes
        self._per_class = 0
        self._mechanisms: list[GaussianSumMechanism] = []

    def start(self, per_class: int, seed: int) -> Tensor:
        """Draws random start records within the owner's bounds, without reading private data."""
        self._per_class = per_class
        records = self.owner.public_records(self.classes * per_class, seed)
        return records.view(self.classes, per_class, *self.owner.record_shape)

    def begin(self, synthetic: Tensor) -> None:
        """Charges the owner for all steps.

        Args:
            synthetic: the start records, [classes, per_class, ...].

        Raises:
            BudgetExceededError: the owner's budget does not allow all steps.
            PrivacyError: a record's features or gradient depend on other records.
        """
        features = self._features(0)
        self._check(features, synthetic)
        plan = ReleasePlan(
            name="images",
            quantity="synthetic records",
            mechanism=self.mechanism,
            clipped=f"{self.mechanism} of each record",
            clip=self.clip,
            sample_rate=self.sample_rate,
            steps=self.steps,
            dimension=self.classes * self._width(features),
            groups=self.classes,
        )
        self._mechanisms = [self.owner.charge(plan, self.total_epsilon)]

    def _check(self, features: matching.NetworkFeatures, synthetic: Tensor) -> None:
        """Tests that each record's features do not depend on the other records of its batch."""
        self.owner.check_independent(
            lambda x, y: features.real(x, _pair(x)), sample_rate=self.sample_rate
        )

    def _features(self, step: int) -> matching.NetworkFeatures:
        return _step_features(self.networks, self.seed, step, self.owner.device)

    def _width(self, features: matching.NetworkFeatures) -> int:
        """Returns the number of released coordinates per class in a step."""
        raise NotImplementedError  # abstract


class ResidualMatching(_PrivateMatching):
    """Matches the mean features of each class with differential privacy.

    A step releases noisy sums of clipped residuals in feature space (`ResidualMatcher`).

    Args:
        owner: the data owner, who has the records, the ledger and the budget.
        networks: draws the network of a step.
        clip: the L2 bound on a record's residual.
        steps: the number of steps. All steps are charged when `condense` starts.
        sample_rate: the Poisson sampling rate of a step.
        total_epsilon: see `DataOwner.charge`.
        seed: the seed of the networks.

    >>> from fedsynth.privacy import DataOwner
    >>> x, y = torch.rand(200, 4), torch.arange(200) % 2
    >>> owner = DataOwner("clinic-a", x, y, classes=2, nominal_size=200, epsilon=5, delta=1e-5)
    >>> objective = ResidualMatching(owner, lambda: nn.Linear(4, 8), clip=1.0, steps=5)
    >>> condense(objective, per_class=3, lr=0.1).y.tolist()
    [0, 0, 0, 1, 1, 1]
    """

    mechanism = "residual"

    def _width(self, features: matching.NetworkFeatures) -> int:
        x = self.owner.public_records(2)
        return features.real(x, _pair(x)).shape[1]

    def gradient(self, step: int, synthetic: Tensor) -> Tensor:
        matcher = private_matchers.ResidualMatcher(self.owner, self._mechanisms, self._divisor)
        return matcher.gradient(step, self._features(step), synthetic)


@dataclass(eq=False, repr=False, kw_only=True)
class GradientMatching(_PrivateMatching):
    """Minimises a custom loss on features with differential privacy.

    A step releases the noisy sum of clipped per-record gradients (FedDM, Eq. 15). A record's
    gradient is computed as if it were the only real record. For `mean_distance`, the per-record
    gradients average to the batch's gradient. For other losses, the objective is the mean loss over
    single records.

    Args:
        loss: a loss between a real record's features [1, D] and a class's synthetic features [M,
            D].
        owner, networks, clip, steps, sample_rate, total_epsilon, seed: as in `ResidualMatching`,
            except that `clip` bounds a record's gradient.
    """

    mechanism = "gradient"
    loss: Loss = mean_distance

    def _check(self, features: matching.NetworkFeatures, synthetic: Tensor) -> None:
        super()._check(features, synthetic)

        def gradients(x: Tensor, y: Tensor) -> Tensor:
            return private_matchers.per_example_gradients(
                features, synthetic, x, y, self._cotangents
            )

        self.owner.check_independent(
            gradients, sample_rate=self.sample_rate, start_over_row=private_matchers.GRADIENT_START
        )

    def _width(self, features: matching.NetworkFeatures) -> int:
        return self._per_class * math.prod(self.owner.record_shape)

    def gradient(self, step: int, synthetic: Tensor) -> Tensor:
        matcher = private_matchers.GradientMatcher(
            self.owner, self._mechanisms, self._divisor, self._cotangents
        )
        return matcher.gradient(step, self._features(step), synthetic)

    def _cotangents(self, made_MD: Tensor, real_RD: Tensor) -> Tensor:
        if self.loss is mean_distance:  # in closed form
            return private_matchers.mean_cotangents(made_MD, real_RD)
        return torch.stack([loss_gradient(self.loss, real[None], made_MD) for real in real_RD])


# The objectives that `condense` minimises.
Objective = FeatureMatching | ResidualMatching | GradientMatching


def condense(
    objective: Objective,
    *,
    per_class: int,
    lr: float,
    momentum: float = 0.0,
    start: Tensor | None = None,
    seed: int = 0,
    progress: bool = False,
) -> SyntheticRecords:
    """Returns synthetic records that minimise an objective, by projected gradient descent.

    Args:
        objective: an objective such as `FeatureMatching` or `ResidualMatching`. A private objective
            charges its owner for all steps before the first step.
        per_class: the number of synthetic records per class.
        lr, momentum: the learning rate and the momentum of gradient descent on the records.
        start: the start records, [classes, per_class, ...]. With privacy, they must be public or
            released. With None, the objective provides them.
        seed: the seed of the objective's start records.
        progress: whether to show a progress bar on stderr.

    Raises:
        SettingError: a number is out of range. Nothing is charged then.
        DivergedError: a synthetic record is not finite.
        BudgetExceededError: the owner's budget does not allow the objective's steps.
    """
    check_number(None, "per_class", per_class, 1, math.inf, integer=True)
    check_number(None, "lr", lr, 0, math.inf)
    check_number(None, "momentum", momentum, 0, 1)
    synthetic = objective.start(per_class, seed).clone()
    if start is not None:
        if start.shape != synthetic.shape:
            raise ValueError(
                f"start must have shape {list(synthetic.shape)}, got {list(start.shape)}"
            )
        if not bool(start.isfinite().all()):
            raise ValueError("start must be finite, got NaN or infinity. Correct the start records")
        synthetic.copy_(start).clamp_(*objective.bounds)
    optimiser = MomentumSgd(lr, momentum)
    state = optimiser.init(synthetic)
    optimiser.update(synthetic.clone(), torch.zeros_like(synthetic), state)  # may raise
    objective.begin(synthetic)
    stderr = Console(stderr=True)
    for step in track(range(objective.steps), "condensing", console=stderr, disable=not progress):
        optimiser.update(synthetic, objective.gradient(step, synthetic), state)
        synthetic.clamp_(*objective.bounds)
    if not bool(synthetic.isfinite().all()):
        raise DivergedError(
            "the synthetic records contain NaN or infinite values, because condensation diverged. "
            f"Use an lr below {lr:g}"
        )
    labels = torch.arange(objective.classes, device=synthetic.device)
    return SyntheticRecords(synthetic.flatten(0, 1), labels.repeat_interleave(per_class))
