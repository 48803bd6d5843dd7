"""A data owner outside a federation: records, a ledger and a budget, for custom pipelines.

Everything that a `DataOwner` releases goes through the Gaussian mechanism of
`fedsynth.privacy.mechanisms`: the ledger is charged first, then noise is drawn. The number of
records is private. Divisors, sampling rates and pass lengths follow from `nominal_size`, a public
number that the owner states.

Functions, networks and losses of the user are tried on public random records. A trial finds code
that mixes records, draws random numbers or keeps state, but it is no proof; the report lists it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsynth.privacy.accounting import calibrate_noise_multiplier, epsilon
from fedsynth.privacy.batch_independence import ADVICE, dependence_on_batch
from fedsynth.privacy.dpsgd import (
    DpSgdSettings,
    ExampleLoss,
    check_example_gradients,
    check_model,
    cross_entropies,
    dp_sgd,
)
from fedsynth.privacy.errors import BudgetExceededError, PrivacyError, UnplannedReleaseError
from fedsynth.privacy.guard import NOTHING_LEFT, BudgetEnforcer
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.folder import DIGEST_BYTES, Digests, LedgerFolder
from fedsynth.privacy.mechanisms import GaussianSumMechanism, Released
from fedsynth.privacy.passes import padded, pass_length, values_of_each
from fedsynth.privacy.plans import MAIN, ReleasePlan, charge_round
from fedsynth.privacy.randomness import DESCRIPTION, SecretGenerator
from fedsynth.privacy.releases import RECORD, USER, require
from fedsynth.privacy.units import Units

_LOGGER = logging.getLogger(__name__)
RECORDS_AT_ONCE = 512
"""Upper bound of the records in one pass."""


class DataOwner:
    """A data owner's records, ledger and privacy budget.

    Args:
        name: the owner's name, in the ledger and the report.
        x: the records, a tensor [N, ...], used as float32; private.
        y: their labels in 0, ..., classes - 1, int64 [N]; None: all records have label 0.
        classes: the number of classes; public.
        nominal_size: the public number of records (or users) that divisors and sampling rates use.
            It is a statement, such as "about 2,000": never pass `len(x)`, which is private.
        epsilon, delta: the budget. It covers every release that the ledger holds.
        bounds: the public range of a record's values; values outside are clamped.
        ledger: a folder of ledgers, kept across programs; None: a ledger in memory, which forgets
            earlier programs.
        users: the user of each record, integers [N]; the privacy unit is then a user with all of
            their records. None: the unit is a record.

    Raises:
        PrivacySettingError: an argument has the wrong shape or is out of range.
        LedgerError: the ledger was kept for other records.

    >>> import torch
    >>> x, y = torch.rand(200, 4), torch.arange(200) % 2
    >>> owner = DataOwner("clinic-a", x, y, classes=2, nominal_size=200, epsilon=2, delta=1e-5)
    >>> owner.noisy_mean(clip=1.0).shape
    torch.Size([2, 4])
    >>> owner.spent() <= 2
    True
    """

    def __init__(
        self,
        name: str,
        x: Tensor,
        y: Tensor | None = None,
        *,
        classes: int = 1,
        nominal_size: float,
        epsilon: float,
        delta: float,
        bounds: tuple[float, float] = (-math.inf, math.inf),
        ledger: Path | str | None = None,
        users: Tensor | None = None,
    ) -> None:
        y = torch.zeros(len(x), dtype=torch.int64) if y is None else y
        require(y.shape == (len(x),), "y", "must have one label for each record", list(y.shape))
        require(not y.is_floating_point(), "y", "must hold integers", y.dtype)
        within = bool(((y >= 0) & (y < classes)).all())
        require(within, "y", f"must hold labels from 0 to {classes - 1}", "another label")
        shaped = users is None or (users.shape == y.shape and not users.is_floating_point())
        require(shaped, "users", "must hold one integer for each record", "another shape or type")
        require(bounds[0] < bounds[1], "bounds", "must be (lowest, highest)", bounds)
        sized = math.isfinite(nominal_size) and nominal_size > 0
        require(sized, "nominal_size", "must be a finite number above 0", nominal_size)
        self.name = name
        self.classes = classes
        self.nominal_size = nominal_size
        self.epsilon = epsilon
        self.delta = delta
        self.bounds = bounds
        self.record_shape = tuple(x.shape[1:])
        self.device = x.device
        self.unit = RECORD if users is None else USER
        self._x = x.detach().to(torch.float32, copy=True)
        self._y = y.to(torch.int64).cpu()
        self._units = Units(len(x), None if users is None else users.cpu())
        self._ledger = Ledger(name) if ledger is None else self._open(Path(ledger))
        self._x.clamp_(*bounds)  # after the ledger has identified the records
        self._charged: list[GaussianSumMechanism] = []
        self._guard = BudgetEnforcer(self._ledger, delta, epsilon, unit=self.unit)
        self._secret = SecretGenerator()

    def _open(self, folder: Path) -> Ledger:
        (ledger,) = LedgerFolder(folder).open([self.name], self._digests, f"records of {self.name}")
        return ledger

    def _digests(self, key: bytes) -> Sequence[Digests]:
        rows = np.ascontiguousarray(self._x.cpu().flatten(1).numpy())
        digests = np.empty((len(rows), DIGEST_BYTES), np.uint8)
        for number, row in enumerate(rows):
            hashed = hashlib.blake2b(row.tobytes(), key=key, digest_size=DIGEST_BYTES)
            digests[number] = np.frombuffer(hashed.digest(), np.uint8)
        return [digests]

    def spent(self) -> float:
        """Returns ε of all releases in the ledger, at `delta`."""
        return epsilon(self._ledger.releases, self.delta)

    def charge(self, plan: ReleasePlan, total_epsilon: float | None = None) -> GaussianSumMechanism:
        """Charges the ledger for a series of noisy sums, with as little noise as the budget allows.

        Args:
            plan: the series: clip, sampling rate, steps and dimension.
            total_epsilon: ε of the whole ledger after this charge; None: the whole budget.

        Raises:
            BudgetExceededError: almost nothing of `total_epsilon` is left.
            PrivacySettingError: the plan shares its noise with other clients.
        """
        complete = plan.shares == 1 and plan.addends is None and plan.phase == MAIN
        require(complete, "plan", "must not share its noise with other clients", plan.name)
        target = self.epsilon if total_epsilon is None else min(total_epsilon, self.epsilon)
        rows = self._ledger.releases
        spent = epsilon(rows, self.delta)
        if spent >= target * (1 - NOTHING_LEFT):
            raise BudgetExceededError(
                f"{self.name!r} has spent ε = {spent:.4g}, and this release may bring it to "
                f"{target:g} (δ = {self.delta:g}; total_epsilon, or the budget): too little is "
                "left for anything but noise",
                (self.name, spent, target),
            )
        number = len(rows) + 1
        sigma = calibrate_noise_multiplier(
            target, self.delta, lambda sigma: [*rows, plan.release(number, sigma, unit=self.unit)]
        )
        allowance = charge_round([plan], number, sigma, self._guard, self._secret)
        series = allowance.take(plan.name)
        self._charged.append(series)
        return series

    def class_sums(
        self,
        series: Sequence[GaussianSumMechanism],
        values: Callable[[Tensor, Tensor], Tensor],
        *,
        start_over_row: float = 4.0,
    ) -> Released:
        """Releases noisy sums by class of a vector of each sampled record.

        Args:
            series: one charged series.
            values: (records [M, ...], their classes [M] on the CPU) -> vectors [M, D]. Each vector
                must be a function of its own record, which is tried; M is constant, and a padded
                record has class -1.
            start_over_row: the fixed cost of a call of `values`, in records.

        Returns:
            [classes, D]
        """
        (only,) = series
        if only not in self._charged:
            raise UnplannedReleaseError(f"this series was not charged to {self.name!r}")

        def of_first_class(x: Tensor) -> Tensor:
            return values(x, torch.zeros(len(x), dtype=torch.int64))

        self.check_independent(of_first_class)
        sample = self._units.sample(only)
        expected = self.nominal_size * only.sample_rate
        length = pass_length(expected, start_over_row, RECORDS_AT_ONCE)
        for part in sample.split(length):
            records = part.records.to(self.device)
            classes = self._y[part.records]
            inputs = padded(self._x[records], length), padded(classes, length, fill=-1)
            vectors = values_of_each(values, inputs, _LOGGER.warning)[: len(part)]
            only.add(vectors, classes.to(vectors.device), part)
        return only.release()

    def noisy_mean(
        self,
        values: Callable[[Tensor], Tensor] = lambda x: x.flatten(1),
        *,
        clip: float,
        quantity: str = "class means",
        total_epsilon: float | None = None,
    ) -> Tensor:
        """Returns the noisy class means of a vector of each record: the noisy sums divided by
        `nominal_size / classes`.

        Args:
            values: records [M, ...] -> vectors [M, D], each a function of its own record.
            clip: L2 bound of a vector; longer vectors are scaled to it.
            quantity: the name of the release in ledger and report.
            total_epsilon: see `charge`.

        Returns:
            [classes, D]
        """
        self.check_independent(values)
        plan = ReleasePlan(
            name="mean",
            quantity=quantity,
            mechanism="gaussian",
            clipped="vector of each record",
            clip=clip,
            sample_rate=1.0,
            steps=1,
            dimension=self.classes * values(self.public_records(2)).shape[1],
            groups=self.classes,
        )
        series = self.charge(plan, total_epsilon)
        sums = self.class_sums([series], lambda x, _: values(x))
        return sums * (self.classes / self.nominal_size)

    def check_independent(self, values: Callable[[Tensor], Tensor]) -> None:
        """Tries a function on public random records.

        Raises:
            PrivacyError: a record's value depends on other records, random numbers or state, so one
                record's influence has no bound.
        """
        low, high = self.bounds

        def in_bounds(x: Tensor) -> Tensor:  # from [0, 1]
            if math.isfinite(high - low):
                x = low + (high - low) * x
            return values(x)

        finding = dependence_on_batch(in_bounds, self.record_shape, self.device)
        if finding:
            raise PrivacyError(f"the function {finding}: {ADVICE}")

    def public_records(self, count: int, seed: int = 0) -> Tensor:
        """Returns random records [count, ...] within the bounds (standard normal ones without
        bounds): public, for trials and start images."""
        generator = torch.Generator().manual_seed(seed)
        low, high = self.bounds
        shape = (count, *self.record_shape)
        if math.isfinite(high - low):
            records = low + (high - low) * torch.rand(shape, generator=generator)
        else:
            records = torch.randn(shape, generator=generator)
        return records.to(self.device)

    def fit(
        self,
        model: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        steps: int,
        batch_size: float,
        clip: float,
        loss: ExampleLoss | None = None,
        total_epsilon: float | None = None,
    ) -> None:
        """Trains a model in place by DP-SGD.

        Args:
            model: a network without batch norm, dropout and buffers.
            optimizer: parameters -> a torch optimizer, such as `torch.optim.Adam`, which gets the
                noisy mean gradients. Called twice: one step is tried before the charge.
            steps: number of steps; each draws a Poisson sample.
            batch_size: the expected size of a sample.
            clip: L2 bound of one example's gradient.
            loss: (model, x, y) -> the loss of each example; None: cross-entropy.
            total_epsilon: see `charge`.

        Raises:
            ForbiddenLayerError: DP-SGD cannot train the model; nothing was charged.
        """
        rate = batch_size / self.nominal_size
        require(0 < rate <= 1, "batch_size", "must be at most nominal_size", batch_size)
        check_model(model)
        check_example_gradients(model, self.public_records(4), loss)

        def losses(x: Tensor) -> Tensor:
            labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
            return (loss or cross_entropies)(model, x, labels)

        self.check_independent(losses)
        plan = ReleasePlan(
            name="model",
            quantity="model",
            mechanism="dp-sgd",
            clipped="gradient of each example",
            clip=clip,
            sample_rate=rate,
            steps=steps,
            dimension=sum(p.numel() for p in model.parameters()),
        )
        optimiser = _TorchOptimiser(optimizer)
        weights = torch.zeros(plan.dimension, device=self.device)
        optimiser.update(weights, weights.clone(), optimiser.init(weights))  # may raise
        series = self.charge(plan, total_epsilon)
        dp_sgd(
            model,
            lambda indices: self._x[indices],
            self._y.to(self.device),
            series,
            steps,
            DpSgdSettings(optimiser, batch_size),
            loss=loss,
            units=self._units,
            note=_LOGGER.warning,
        )

    def report(self, path: Path | str) -> None:
        """Writes the privacy report of all releases in the ledger.

        Args:
            path: a file that ends in .html, .md or .json.

        Raises:
            PrivacySettingError: another ending.
        """
        # imported here, since a pipeline without a report needs none of it
        from fedsynth.privacy.report.build import build_report
        from fedsynth.privacy.report.figures import ReportFacts, Unit
        from fedsynth.privacy.report.pages import render_html, render_markdown

        renderers: dict[str, Callable[[Mapping[str, Any]], str]] = {
            ".html": render_html,
            ".md": render_markdown,
            ".json": lambda report: json.dumps(report, indent=2, ensure_ascii=False),
        }
        path = Path(path)
        require(path.suffix in renderers, "path", f"must end in {', '.join(renderers)}", path.name)
        rows = self._ledger.releases
        facts = ReportFacts(
            method="custom pipeline",
            mechanism=", ".join(dict.fromkeys(row.mechanism for row in rows)),
            delta=self.delta,
            epsilon_cap=self.epsilon,
            planned_rounds=len(rows),
            rounds_done=len(rows),
            public_items={
                "nominal size": f"{self.nominal_size:g}, stated by the owner",
                "classes": f"{self.classes}, stated by the owner",
            },
            ledger_kept=self._ledger.path is not None,
            randomness=DESCRIPTION,
            unit=Unit(kind=self.unit),
            own_code=["functions, networks and losses of the pipeline"],
        )
        report = build_report(facts, [self._ledger.history()])
        path.write_text(renderers[path.suffix](report), encoding="utf-8")


class _TorchOptimiser:
    """A torch optimizer as `Optimiser`, on one vector of all parameters."""

    def __init__(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self._make = make

    def init(self, w: Tensor) -> tuple[Tensor, ...]:
        self._vector = nn.Parameter(w)  # shares memory with w
        self._optimizer = self._make([self._vector])
        return ()

    def update(self, w: Tensor, gradient: Tensor, state: tuple[Tensor, ...]) -> None:
        self._vector.grad = gradient
        self._optimizer.step()
