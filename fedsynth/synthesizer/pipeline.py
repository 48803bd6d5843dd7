"""Condensation of plain tensors, without a federation: objectives, and the loop over their steps.

An objective draws a network for each step and returns the gradient of the synthetic records.
`condense` moves the records by it. With a `fedsynth.privacy.DataOwner` the ledger is charged when
the loop starts; everything after that is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fedsynth.errors import DataError, DivergedError
from fedsynth.models.embedding_network import EmbeddingNetwork
from fedsynth.models.frozen import VectorJacobian
from fedsynth.privacy.mechanisms import GaussianSums
from fedsynth.privacy.owner import DataOwner
from fedsynth.privacy.passes import padded, power_of_two
from fedsynth.privacy.plans import PrivatePlan
from fedsynth.seeding import forked_rng, torch_generator
from fedsynth.synthesizer.condensation.matching import FeatureMap, NetworkFeatures
from fedsynth.synthesizer.condensation.private_matchers import GradientMatcher, ResidualMatcher
from fedsynth.training.optimisers import MomentumSgd

Networks = Callable[[], nn.Module]
"""Returns a network for one step, such as a freshly initialised one. An `EmbeddingNetwork`'s
features are its embedding and its logits; another module's features are its output [N, D]."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""(features of real records [B, D], features of synthetic records [M, D]) -> scalar."""

CPU_NUMBERS = 2**21
"""Numbers in the records of one pass of a `ModuleFeatures`."""
GRADIENTS_AT_ONCE = 16
"""Single records whose gradients are computed in one backward pass."""


class SyntheticRecords(NamedTuple):
    """Synthetic records x [N, ...] and their labels y [N], class by class."""

    x: Tensor
    y: Tensor


class Objective(Protocol):
    """The interface of the objectives that `condense` minimises.

    Attributes:
        classes: number of classes.
        steps: number of steps.
        bounds: the range of a record's values.
    """

    classes: int
    steps: int
    bounds: tuple[float, float]

    def start(self, per_class: int, seed: int) -> Tensor:
        """Returns the synthetic records before the first step, [classes, per_class, ...]."""

    def begin(self) -> None:
        """Is called before the first step; a private objective charges its owner here."""

    def gradient(self, step: int, synthetic: Tensor) -> Tensor:
        """Returns the gradient of the loss, or a private estimate of it, in `synthetic`'s shape."""


def mean_distance(real: Tensor, synthetic: Tensor) -> Tensor:
    """Returns the squared distance of the mean features (distribution matching, Zhao & Bilen 2023,
    Eq. 3; FedDM, Eq. 9).

    >>> mean_distance(torch.zeros(3, 2), torch.ones(5, 2))
    tensor(2.)
    """
    return (real.mean(dim=0) - synthetic.mean(dim=0)).square().sum()


def sliced_wasserstein(
    u_ND: Tensor, v_MD: Tensor, *, projections: int = 64, seed: int = 0
) -> Tensor:
    """Returns the sliced Wasserstein distance of two sets of points: the mean over random
    directions of the 1-Wasserstein distance of their projections (Bonneel et al. 2015).

    Args:
        u_ND, v_MD: the points; N and M may differ.
        projections: number of directions.
        seed: of the directions.

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
    apart = along_u[rows // M] - along_v[rows // N]
    distances: Tensor = (widths[:, None] * apart.abs()).sum(dim=0)
    return distances.mean()


class ModuleFeatures:
    """The features of records of any shape under any module, as a `FeatureMap`."""

    def __init__(self, network: nn.Module) -> None:
        self.mixes = False
        self._network = network

    def __call__(self, x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        features: Tensor = self._network(x_NCHW)
        return features.flatten(1)

    def real(self, x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat(
                [self(part, segment_N) for part in x_NCHW.split(self.images_at_once(x_NCHW))]
            )

    def vjp(
        self, x_NCHW: Tensor, segment_N: Tensor, *, exact: bool = True
    ) -> tuple[Tensor, VectorJacobian]:
        leaf = x_NCHW.detach().requires_grad_()
        with torch.enable_grad():
            features = self(leaf, segment_N)

        def pull(vectors_VND: Tensor) -> Tensor:
            rows = [
                torch.autograd.grad(features, leaf, row, retain_graph=True)[0]
                for row in vectors_VND
            ]
            return torch.stack(rows)

        return features.detach(), pull

    def images_at_once(self, x_NCHW: Tensor, precision: torch.dtype = torch.float32) -> int:
        return power_of_two(CPU_NUMBERS / max(1, x_NCHW[0].numel()))


class _NetworkSource:
    """Draws the network of each step, from the seed."""

    def __init__(self, networks: Networks, device: torch.device, seed: int) -> None:
        if isinstance(networks, nn.Module):
            raise TypeError("networks must be a function that returns a network, not a network")
        self._networks = networks
        self._device = device
        self._seed = seed

    def features(self, step: int) -> FeatureMap:
        with forked_rng(self._seed, "networks", step):
            network = self._networks().to(self._device).eval().requires_grad_(False)
        if isinstance(network, EmbeddingNetwork):
            return NetworkFeatures(network, 1.0, None)
        return ModuleFeatures(network)


class FeatureMatching:
    """Matches features of real minibatches, class by class, without privacy.

    Args:
        x, y: the records [N, ...] and their labels [N].
        networks: draws a step's network.
        classes: number of classes.
        steps: number of steps.
        batch_size: real records of each class in a step.
        loss: of a class's real and synthetic features.
        bounds: the range of a record's values.
        seed: of networks and minibatches.

    >>> x, y = torch.rand(60, 4), torch.arange(60) % 2
    >>> objective = FeatureMatching(x, y, lambda: nn.Linear(4, 8), classes=2, steps=5)
    >>> condense(objective, per_class=3, lr=0.1).x.shape
    torch.Size([6, 4])
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        networks: Networks,
        *,
        classes: int,
        steps: int,
        batch_size: int = 256,
        loss: Loss = mean_distance,
        bounds: tuple[float, float] = (-math.inf, math.inf),
        seed: int = 0,
    ) -> None:
        self.classes = classes
        self.steps = steps
        self.bounds = bounds
        self._x = x
        self._members = [torch.nonzero(y == label).flatten() for label in range(classes)]
        empty = [label for label, members in enumerate(self._members) if not len(members)]
        if empty:
            raise DataError(f"class {empty[0]} has no record: condense the classes that exist")
        self._networks = _NetworkSource(networks, x.device, seed)
        self._batch_size = batch_size
        self._loss = loss
        self._seed = seed

    def start(self, per_class: int, seed: int) -> Tensor:
        """Returns random real records of each class."""
        draws = torch_generator(seed, "start images")
        rows = [
            members[torch.randint(len(members), (per_class,), generator=draws).to(members.device)]
            for members in self._members
        ]
        return self._x[torch.stack(rows)]

    def begin(self) -> None:
        """Does nothing: no release is charged."""

    def gradient(self, step: int, synthetic: Tensor) -> Tensor:
        features = self._networks.features(step)
        draws = torch_generator(self._seed, "condensation batches", step)
        out = torch.empty_like(synthetic)
        for label, members in enumerate(self._members):
            order = torch.randperm(len(members), generator=draws)[: self._batch_size]
            batch = self._x[members[order.to(members.device)]]
            real = features.real(batch, batch.new_full((len(batch),), label, dtype=torch.int64))
            u, pull = features.vjp(
                synthetic[label],
                synthetic.new_full((synthetic.shape[1],), label, dtype=torch.int64),
            )
            out[label] = pull(_loss_gradient(self._loss, real, u)[None])[0]
        return out


class _PrivateMatching:
    """The base class of private objectives: owner, plan, and the charge at the start."""

    mechanism: str
    quantity: str

    def __init__(
        self,
        owner: DataOwner,
        networks: Networks,
        *,
        clip: float,
        steps: int,
        sample_rate: float = 1.0,
        total_epsilon: float | None = None,
        seed: int = 0,
    ) -> None:
        self.classes = owner.classes
        self.steps = steps
        self.bounds = owner.bounds
        self._owner = owner
        self._networks = _NetworkSource(networks, owner.device, seed)
        self._clip = clip
        self._sample_rate = sample_rate
        self._total_epsilon = total_epsilon
        self._divisor = sample_rate * owner.nominal_size / owner.classes
        self._per_class = 0
        self._series: Sequence[GaussianSums] = ()

    def start(self, per_class: int, seed: int) -> Tensor:
        """Returns random records within the owner's bounds, which contain nothing private."""
        self._per_class = per_class
        records = self._owner.public_records(self.classes * per_class, seed)
        return records.view(self.classes, per_class, *self._owner.record_shape)

    def begin(self) -> None:
        """Charges the owner for all steps.

        Raises:
            BudgetExceededError: the budget does not allow it.
            PrivacyError: a record's features depend on other records.
        """
        features = self._networks.features(0)

        def of_records(x: Tensor) -> Tensor:
            return features.real(x, x.new_zeros(len(x), dtype=torch.int64))

        self._owner.check_independent(of_records)
        self._try_loss(features)
        plan = PrivatePlan(
            name="images",
            quantity="synthetic records",
            mechanism=self.mechanism,
            clipped=f"{self.quantity} of each record",
            clip=self._clip,
            sample_rate=self._sample_rate,
            steps=self.steps,
            dimension=self.classes * self._width(of_records),
            groups=self.classes,
        )
        self._series = [self._owner.charge(plan, self._total_epsilon)]

    def _width(self, features: Callable[[Tensor], Tensor]) -> int:
        raise NotImplementedError  # abstract

    def _try_loss(self, features: FeatureMap) -> None:
        """Tries code of the user besides the network; raises PrivacyError."""


class ResidualMatching(_PrivateMatching):
    """Matches class means of features with differential privacy: a step releases noisy sums of
    clipped residuals in feature space (`ResidualMatcher`).

    Args:
        owner: its records, ledger and budget.
        networks: draws a step's network.
        clip: L2 bound of a record's residual.
        steps: number of steps; all of them are charged when `condense` starts.
        sample_rate: the Poisson sampling rate of a step.
        total_epsilon: see `DataOwner.charge`.
        seed: of the networks.

    >>> from fedsynth.privacy import DataOwner
    >>> x, y = torch.rand(200, 4), torch.arange(200) % 2
    >>> owner = DataOwner("clinic-a", x, y, classes=2, nominal_size=200, epsilon=5, delta=1e-5)
    >>> objective = ResidualMatching(owner, lambda: nn.Linear(4, 8), clip=1.0, steps=5)
    >>> condense(objective, per_class=3, lr=0.1).y.tolist()
    [0, 0, 0, 1, 1, 1]
    """

    mechanism = "residual"
    quantity = "residual"

    def _width(self, features: Callable[[Tensor], Tensor]) -> int:
        return features(self._owner.public_records(2)).shape[1]

    def gradient(self, step: int, synthetic: Tensor) -> Tensor:
        matcher = ResidualMatcher(self._owner, self._series, self._divisor)
        return matcher.gradient(step, self._networks.features(step), synthetic)


class GradientMatching(_PrivateMatching):
    """Minimises any loss of features with differential privacy: a step releases the noisy sum of
    clipped gradients of single records (FedDM, Eq. 15).

    The gradient of a record is that of the loss with this record as the only real one. For
    `mean_distance` the average of these gradients is the gradient of a batch; for other losses the
    objective is the average of the loss over single records.

    Args:
        loss: of a real record's features [1, D] and a class's synthetic features [M, D].
        owner, networks, clip, steps, sample_rate, total_epsilon, seed: as in `ResidualMatching`;
            `clip` bounds a record's gradient.
    """

    mechanism = "gradient"
    quantity = "gradient"

    def __init__(
        self,
        owner: DataOwner,
        networks: Networks,
        *,
        loss: Loss = mean_distance,
        clip: float,
        steps: int,
        sample_rate: float = 1.0,
        total_epsilon: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            owner,
            networks,
            clip=clip,
            steps=steps,
            sample_rate=sample_rate,
            total_epsilon=total_epsilon,
            seed=seed,
        )
        self._loss = loss

    def _width(self, features: Callable[[Tensor], Tensor]) -> int:
        return self._per_class * math.prod(self._owner.record_shape)

    def _try_loss(self, features: FeatureMap) -> None:
        synthetic = self.start(self._per_class, seed=0)

        def gradients(x: Tensor) -> Tensor:
            return self._of_each(features, synthetic, x, torch.zeros(len(x), dtype=torch.int64))

        self._owner.check_independent(gradients)

    def gradient(self, step: int, synthetic: Tensor) -> Tensor:
        features = self._networks.features(step)
        if self._loss is mean_distance:  # many records in one backward pass
            matcher = GradientMatcher(self._owner, self._series, self._divisor)
            return matcher.gradient(step, features, synthetic)

        def gradients(x: Tensor, classes: Tensor) -> Tensor:
            return self._of_each(features, synthetic, x, classes)

        sums = self._owner.class_sums(self._series, gradients, start_over_row=64.0)
        return (sums / self._divisor).view_as(synthetic)

    def _of_each(
        self, features: FeatureMap, synthetic: Tensor, x: Tensor, classes: Tensor
    ) -> Tensor:
        """Returns the gradient of each record [N, ...]; records of class -1 are padding."""
        real = features.real(x, classes.to(x.device))
        out = real.new_zeros(len(x), synthetic[0].numel())
        for label in classes[classes >= 0].unique().tolist():
            segment = torch.full((synthetic.shape[1],), label, device=x.device)
            u, pull = features.vjp(synthetic[label], segment)
            for rows in torch.nonzero(classes == label).flatten().split(GRADIENTS_AT_ONCE):
                each = [_loss_gradient(self._loss, real[row][None], u) for row in rows.tolist()]
                cotangents = padded(torch.stack(each), GRADIENTS_AT_ONCE)
                out[rows.to(x.device)] = pull(cotangents)[: len(rows)].flatten(1)
        return out


def _loss_gradient(loss: Loss, real: Tensor, synthetic: Tensor) -> Tensor:
    """Returns the gradient of the loss by the synthetic features [M, D]."""
    leaf = synthetic.detach().requires_grad_()
    with torch.enable_grad():
        value = loss(real, leaf)
        if value.dim():
            raise ValueError(f"the loss must return a scalar, got shape {list(value.shape)}")
        (gradient,) = torch.autograd.grad(value, leaf)
    return gradient


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
        objective: such as `FeatureMatching` or `ResidualMatching`; private ones charge their owner
            now, for all steps.
        per_class: synthetic records of each class.
        lr, momentum: of gradient descent on the records.
        start: records to start from, [classes, per_class, ...]; with privacy only public or
            released ones. None: the objective's.
        seed: of the start.
        progress: whether to show a progress bar on stderr.

    Raises:
        DivergedError: a record is not finite.
        BudgetExceededError: the owner's budget does not allow the objective's steps.
    """
    initial = objective.start(per_class, seed)
    if start is not None and start.shape != initial.shape:
        raise ValueError(f"start must have shape {list(initial.shape)}, got {list(start.shape)}")
    synthetic = (initial if start is None else start.to(initial)).clone()
    objective.begin()
    optimiser = MomentumSgd(lr, momentum)
    state = optimiser.init(synthetic)
    steps: Iterable[int] = range(objective.steps)
    if progress:
        from rich.console import Console
        from rich.progress import track

        steps = track(steps, "condensing", console=Console(stderr=True))
    for step in steps:
        optimiser.update(synthetic, objective.gradient(step, synthetic), state)
        synthetic.clamp_(*objective.bounds)
    if not bool(synthetic.isfinite().all()):
        raise DivergedError(f"the synthetic records are not finite: use an lr below {lr:g}")
    labels = torch.arange(objective.classes, device=synthetic.device)
    return SyntheticRecords(synthetic.flatten(0, 1), labels.repeat_interleave(per_class))
