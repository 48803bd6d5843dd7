"""Private statistics and private training on one data owner's records.

They serve custom pipelines outside a federation. A `DataOwner` holds records, a ledger and a
privacy budget. Everything that it releases goes through the Gaussian mechanism of
`fedsynth.privacy.mechanisms`. The ledger is charged first, and only then is noise drawn. The number
of records is private. Divisors, sampling rates and batch lengths are computed from `nominal_size`,
a public number that the owner states.

The user's functions, networks and losses are first called with public random records, as a step
calls them. The call finds code that mixes records, draws random numbers or keeps state, but it
cannot prove that there is no such code. The report therefore mentions that custom code was used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsynth.errors import (
    BudgetExceededError,
    PrivacyError,
    SettingError,
    UnplannedReleaseError,
)
from fedsynth.files import write_output
from fedsynth.formatting import format_rounded_up
from fedsynth.privacy import dpsgd
from fedsynth.privacy.accounting import calibrate_noise_multiplier, epsilon
from fedsynth.privacy.batch_independence import (
    ADVICE,
    Dependence,
    RecordFunction,
    StepInputs,
    dependence_on_batch,
)
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.folder import (
    DIGEST_BYTES,
    Digests,
    LedgerFolder,
    check_names,
    with_users,
)
from fedsynth.privacy.mechanisms import (
    NOTHING_LEFT,
    BudgetEnforcer,
    EpsilonCap,
    GaussianSumMechanism,
    Released,
)
from fedsynth.privacy.passes import (
    Parts,
    Units,
    class_values,
    noisy_sums,
    padded,
    pass_size,
    values_of_each,
)
from fedsynth.privacy.plans import MAIN, ReleasePlan, charge_round
from fedsynth.privacy.randomness import DESCRIPTION, SecretGenerator
from fedsynth.privacy.reachable_state import ReachableState
from fedsynth.privacy.releases import RECORD, USER, is_real, require

_LOGGER = logging.getLogger(__name__)
# The name of the method in the report of a custom pipeline.
METHOD = "custom pipeline"
# The maximum number of records in one call of a user's function.
RECORDS_AT_ONCE = 512
# The largest change of a sum, in clips, that rounding may cause because records change their
# positions. Above it, each pass has one record.
ROUNDING_OF_SUM = 1e-3


class DataOwner:
    """A data owner with private records, a ledger and a privacy budget.

    Threads and processes may share the ledger. A charge is refused if another one has spent its
    budget in the meantime.

    Args:
        name: the owner's name, as it appears in the ledger and the report (see `check_names`).
        x: the private records, a tensor [N, ...], which is converted to float32.
        y: the labels of the records in 0, ..., classes - 1, int64 [N]. None gives all records
            label 0.
        classes: the public number of classes.
        nominal_size: the public number of records (or users), from which divisors and sampling
            rates are computed. State an approximate number, such as 2000 for "about 2,000". Never
            pass `len(x)`, because the exact number is private.
        epsilon, delta: the budget, with δ of at most 1/nominal_size. It covers all releases in the
            ledger.
        bounds: the public range of a record's values. Values outside the range are clamped.
        ledger: the folder that keeps the ledger for later programs. None keeps the ledger in
            memory only, so that releases of earlier programs are not counted.
        users: the user of each record, integers [N]. The privacy unit is then a user with all of
            their records. If None, the privacy unit is a record.

    Raises:
        PrivacySettingError: an argument has the wrong type or shape, or is out of range.
        LedgerError: the ledger in the folder was charged for other records, or for other users.

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
        for key, tensor in (("x", x), ("y", y), ("users", users)):
            valid = isinstance(tensor, Tensor) or (tensor is None and key != "x")
            require(valid, key, "must be a torch.Tensor", type(tensor).__name__)
        for key, number in (("nominal_size", nominal_size), ("epsilon", epsilon), ("delta", delta)):
            valid = isinstance(number, Real) and not isinstance(number, bool)
            require(valid, key, "must be a number", number)
        y = torch.zeros(len(x), dtype=torch.int64) if y is None else y
        require(y.shape == (len(x),), "y", "must have one label for each record", list(y.shape))
        require(not y.is_floating_point(), "y", "must hold integers", y.dtype)
        y = y.to("cpu", torch.int64, copy=True)  # the caller may change its own tensor
        within = bool(((y >= 0) & (y < classes)).all())
        require(within, "y", f"must hold labels from 0 to {classes - 1}", "another label")
        shaped = users is None or (users.shape == y.shape and not users.is_floating_point())
        require(shaped, "users", "must hold one integer for each record", "another shape or type")
        require(bounds[0] < bounds[1], "bounds", "must be (lowest, highest) in this order", bounds)
        scaled = x.dtype != torch.uint8 or tuple(bounds) != (0, 1)
        reason = "must be floating-point for bounds (0, 1): pixels divided by 255, or bits as float"
        require(scaled, "x", reason, x.dtype)
        sized = math.isfinite(nominal_size) and nominal_size > 0
        require(sized, "nominal_size", "must be a finite number above 0", nominal_size)
        rule = f"must be in (0, 1), and at most 1 / nominal_size = {1 / nominal_size:.3g}"
        require(0 < delta < 1 and delta * nominal_size <= 1, "delta", rule, delta)
        (self.name,) = check_names([name], 1)
        self.classes = classes
        self.nominal_size = nominal_size
        self.epsilon = epsilon
        self.delta = delta
        self.bounds = bounds
        self.record_shape = tuple(x.shape[1:])
        self.device = x.device
        self.unit = RECORD if users is None else USER
        self._x = x.detach().to(torch.float32, copy=True)
        self._y = y
        self._users = None if users is None else users.to("cpu", torch.int64, copy=True)
        self._units = Units(len(x), self._users)
        self._ledger = Ledger(name) if ledger is None else self._open(Path(ledger))
        self._x.clamp_(*bounds)  # after the ledger has identified the records
        self._charged: list[GaussianSumMechanism] = []
        self._checked: list[GaussianSumMechanism] = []  # the length of their vectors
        self._moved: dict[tuple[frozenset[object], int], float] = {}  # by code and pass length
        self._opaque: set[str] = set()
        self._guard = BudgetEnforcer(self._ledger, [EpsilonCap(epsilon, delta)], unit=self.unit)
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
        if self._users is not None:
            digests = with_users(digests, self._users.numpy(), key)
        return [digests]

    def spent(self) -> float:
        """Returns the total ε of all releases in the ledger, at δ = `delta`."""
        return epsilon(self._ledger.releases, self.delta)

    def charge(
        self,
        plan: ReleasePlan,
        total_epsilon: float | None = None,
        noise_multiplier: float | None = None,
    ) -> GaussianSumMechanism:
        """Creates a mechanism with the least noise that the budget allows, and records its cost.

        Args:
            plan: the clip, sampling rate, number of steps and dimension of the mechanism.
            total_epsilon: the ε that all releases in the ledger may have together after this
                charge. None allows the whole budget.
            noise_multiplier: σ. None uses the least σ that `total_epsilon` allows.

        Returns:
            The charged mechanism, for `class_sums` or `dp_sgd`.

        Raises:
            BudgetExceededError: almost nothing of `total_epsilon` is left, or too little for
                `noise_multiplier`.
            PrivacySettingError: the plan shares its noise with other clients, or its exchange is
                not "main".
        """
        complete = plan.shares == 1 and plan.addends is None and plan.exchange == MAIN
        rule = f"must have shares=1, addends=None and exchange={MAIN!r}"
        require(complete, "plan", rule, plan.name)
        for key, number in (
            ("total_epsilon", total_epsilon),
            ("noise_multiplier", noise_multiplier),
        ):
            require(number is None or is_real(number), key, "must be a finite number", number)
        target = self.epsilon if total_epsilon is None else min(total_epsilon, self.epsilon)
        rows = self._ledger.releases
        spent = epsilon(rows, self.delta)
        if spent >= target * (1 - NOTHING_LEFT):
            raise BudgetExceededError(
                f"data owner {self.name!r} has no budget left: its ledger in "
                f"{self._ledger.path or 'memory'} has spent ε = "
                f"{format_rounded_up(spent, 4)} of {target:g} (at δ = {self.delta:g}). Raise the "
                "total ε",
                (self.name, spent, target),
            ).with_code("budget.spent")
        number = len(rows) + 1
        sigma = noise_multiplier
        if sigma is None:
            sigma = calibrate_noise_multiplier(
                target, self.delta, lambda σ: [*rows, plan.release(number, σ, unit=self.unit)]
            )
        # with the target as the cap, as other threads or processes may have charged meanwhile
        guard = replace(self._guard, caps=[EpsilonCap(target, self.delta)])
        mechanism = charge_round([plan], number, sigma, guard, self._secret).take(plan.name)
        self._charged.append(mechanism)
        return mechanism

    @torch.enable_grad()
    def class_sums(
        self,
        mechanisms: Sequence[GaussianSumMechanism],
        values: Callable[[Tensor, Tensor], Tensor],
        *,
        start_over_row: float = 4.0,
    ) -> Released:
        """Releases one noisy sum of vectors for each class.

        A step draws a sample of the records, and `values` computes a vector from each sampled
        record.

        Args:
            mechanisms: a sequence with exactly one charged mechanism (see `charge`).
            values: a function of records [M, ...] and their classes [M] on the CPU that returns
                vectors [M, D]. Each vector must depend only on its own record. A trial on random
                records checks this. M is the same in every call. Missing records are padded, and
                padding has class -1.
            start_over_row: the fixed cost of one call of `values`, divided by its cost per record.

        Returns:
            The noisy sums [classes, D].

        Raises:
            UnplannedReleaseError: the mechanism was not created by this owner's `charge`.
            PrivacyError: the trial found that a vector depends on more than its own record, or has
                another length than the mechanism's.
        """
        (only,) = mechanisms
        if only not in self._charged:
            raise UnplannedReleaseError(
                f"the mechanism was not created by data owner {self.name!r}. Create it with "
                "DataOwner.charge()"
            ).with_code("release.uncharged")
        length, count = self.check_independent(
            values, sample_rate=only.sample_rate, start_over_row=start_over_row
        )
        if only not in self._checked:
            public = self.public_records(length), torch.arange(length) % self.classes
            only.check_rows(values_of_each(values, public, lambda text: None))
            self._checked.append(only)

        def inputs(parts: Parts) -> tuple[Tensor, Tensor]:
            ((_, part),) = parts
            return padded(self._x[part.records.to(self.device)], length), self._y[part.records]

        of_class = class_values(inputs, values, self.classes, length, _LOGGER.warning)
        (released,) = noisy_sums([only], [self._units], count, of_class)
        return released

    def noisy_mean(
        self,
        values: Callable[[Tensor], Tensor] = lambda x: x.flatten(1),
        *,
        clip: float,
        quantity: str = "class means",
        total_epsilon: float | None = None,
        noise_multiplier: float | None = None,
    ) -> Tensor:
        """Releases a noisy mean vector for each class.

        `values` computes a vector from each record. The noisy sum of each class is divided by
        `nominal_size / classes`, a public number, and not by the class's number of records.

        Args:
            values: a function of records [M, ...] that returns vectors [M, D]. Each vector must
                depend only on its own record.
            clip: the bound on the L2 norm of a vector. Longer vectors are scaled down to it.
            quantity: the name of the release in the ledger and the report.
            total_epsilon, noise_multiplier: see `charge`.

        Returns:
            The noisy means [classes, D].
        """

        def of_records(x: Tensor, y: Tensor) -> Tensor:
            return values(x)

        self.check_independent(of_records)
        vectors = values(self.public_records(2))
        if vectors.dim() != 2:
            reason = f"must return vectors [M, D], got {list(vectors.shape)}. Return one per record"
            raise SettingError(None, "values", reason)
        plan = ReleasePlan(
            name="mean",
            quantity=quantity,
            mechanism="gaussian",
            clipped="vector of each record",
            clip=clip,
            sample_rate=1.0,
            steps=1,
            dimension=self.classes * vectors.shape[1],
            groups=self.classes,
        )
        mechanism = self.charge(plan, total_epsilon, noise_multiplier)
        sums = self.class_sums([mechanism], of_records)
        return sums * (self.classes / self.nominal_size)

    def check_independent(
        self,
        values: RecordFunction,
        *,
        sample_rate: float = 1.0,
        start_over_row: float = 4.0,
    ) -> tuple[int, int]:
        """Checks that each record's value depends only on that record.

        The function is called as in `class_sums`, with public random records: as many as a pass
        has, with all labels, extreme values and NaN. A function is tried in full only once.

        Args:
            values: see `class_sums`.
            sample_rate: the sampling rate of a step.
            start_over_row: see `class_sums`.

        Returns:
            The length of a pass and its number of records (see `pass_size`).

        Raises:
            PrivacyError: the value computed for a record depends on other records, on random
                numbers or on state. The influence of one record would then have no bound.
        """
        expected = self.nominal_size * sample_rate
        length, _ = pass_size(expected, start_over_row, RECORDS_AT_ONCE)
        key = frozenset(ReachableState.of(values).code), length
        dependence = dependence_on_batch(
            torch.enable_grad()(values),  # as a step calls it
            self._inputs(length, -1),
            passes=key not in self._moved,
        )
        self._refuse("function", dependence)
        isolated = self._isolates(self._moved.setdefault(key, dependence.moved))
        return pass_size(expected, start_over_row, RECORDS_AT_ONCE, isolated=isolated)

    def _inputs(self, length: int, padding: int) -> StepInputs:
        return StepInputs(
            self.record_shape,
            self.device,
            length=length,
            bounds=self.bounds,
            classes=self.classes,
            padding=padding,
            finite=False,
        )

    def _refuse(self, code: str, dependence: Dependence) -> None:
        if dependence.fault:
            text = f"the {code} {dependence.fault}. {ADVICE}"
            raise PrivacyError(text).with_code("step.dependence")
        self._opaque |= dependence.opaque

    def _isolates(self, moved: float) -> bool:
        """Returns True if each pass must contain only one record.

        An additional record moves the records after it. If each of their values u then becomes v by
        rounding, the clipped values differ by at most ‖u − v‖ / min(‖u‖, ‖v‖) clips, as clipping is
        a projection. The sum changes by at most the number of records times the right-hand side.
        """
        return self.nominal_size * moved > ROUNDING_OF_SUM

    def public_records(self, count: int, seed: int = 0) -> Tensor:
        """Draws random records [count, ...] that do not depend on private data.

        They are uniform within the bounds, or standard normal if a bound is infinite.
        """
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
        loss: dpsgd.ExampleLoss | None = None,
        total_epsilon: float | None = None,
        noise_multiplier: float | None = None,
    ) -> None:
        """Trains a model in place with DP-SGD.

        Args:
            model: a network without batch norm, dropout and buffers.
            optimizer: a function of a list of parameters that returns a torch optimizer, such as
                `torch.optim.Adam`. The optimizer receives the noisy mean gradients. The function
                is called twice, because one step is tried before the ledger is charged.
            steps: the number of steps. Each step draws a Poisson sample.
            batch_size: the expected size of a sample.
            clip: the bound on the L2 norm of one example's gradient.
            loss: a function of (model, x, y) that returns the loss of each example. None uses
                cross-entropy.
            total_epsilon, noise_multiplier: see `charge`.

        Raises:
            ForbiddenLayerError: DP-SGD cannot train the model. Nothing was charged.
            PrivacyError: an example's loss depends on other examples, random numbers or state.
                Nothing was charged.
        """
        rate = batch_size / self.nominal_size
        rule = "must be above 0 and at most nominal_size"
        require(0 < rate <= 1, "batch_size", rule, batch_size)
        length, _ = dpsgd.pass_of(model, batch_size)
        dependence = dpsgd.gradient_dependence(model, self._inputs(length, 0), loss)
        self._refuse("loss or its gradient", dependence)
        plan = ReleasePlan(
            name="model",
            quantity="model",
            mechanism="dp-sgd",
            clipped="gradient of each example",
            clip=clip,
            sample_rate=rate,
            steps=steps,
            dimension=sum(map(Tensor.numel, model.parameters())),
        )
        optimiser = _TorchOptimiser(optimizer)
        weights = torch.zeros(plan.dimension, device=self.device)
        optimiser.update(weights, torch.ones_like(weights), optimiser.init(weights))  # may raise
        mechanism = self.charge(plan, total_epsilon, noise_multiplier)
        dpsgd.dp_sgd(
            model,
            lambda indices: (self._x[indices.to(self.device)], self._y[indices].to(self.device)),
            mechanism,
            dpsgd.DpSgdSettings(optimiser, batch_size, loss=loss),
            self._units,
            note=_LOGGER.warning,
            isolated=self._isolates(dependence.moved),
        )

    def report(self, path: Path | str) -> None:
        """Writes the privacy report of all releases in the ledger.

        Args:
            path: the file to write. Its name must end in .html, .md or .json.

        Raises:
            PrivacySettingError: the file name has another ending.
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
        history = self._ledger.history()  # once: a thread may charge in between
        rows = history.releases
        facts = ReportFacts(
            method=METHOD,
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
            own_code=["functions, networks and losses of the pipeline", *self._not_compared()],
        )
        report = build_report(facts, [history])
        write_output(path, renderers[path.suffix](report).encode())

    def _not_compared(self) -> list[str]:
        """Returns notes for the report about objects whose state could not be compared."""
        if not self._opaque:
            return []
        return [f"objects whose state could not be compared: {', '.join(sorted(self._opaque))}"]


class _TorchOptimiser:
    """Adapts a torch optimizer to the interface `Optimiser`, for `dp_sgd`.

    The torch optimizer updates one vector that holds all parameters.
    """

    def __init__(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self._make = make

    def init(self, w: Tensor) -> tuple[Tensor, ...]:
        self._vector = nn.Parameter(w)  # shares memory with w
        self._optimizer = self._make([self._vector])
        groups = getattr(self._optimizer, "param_groups", [])
        updated = [p for group in groups for p in group["params"]]
        rule = "must return a torch optimizer of the parameters that it receives"
        require([*map(id, updated)] == [id(self._vector)], "optimizer", rule, "another optimizer")
        return ()

    def update(self, w: Tensor, gradient: Tensor, state: tuple[Tensor, ...]) -> None:
        self._vector.grad = gradient
        self._optimizer.step()
        if self._vector.data_ptr() != w.data_ptr():  # the optimizer has replaced the data
            w.copy_(self._vector.detach())
