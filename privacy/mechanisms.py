"""The Gaussian mechanism, which releases noisy sums of clipped per-example vectors.

Every private step of every method uses it.

Theorem. Let every example x of a client's data set contribute a vector u(x) to the sum of one group
(its class), and let ū(x) = u(x)·min(1, 𝒞/‖u(x)‖₂), with ū(x) = 0 if u(x) is not finite. Adding or
removing one example changes the sum of one group only, by at most 𝒞 in L2 norm. Therefore the sums
of all groups plus noise N(0, σ²𝒞²I) are the Gaussian mechanism with noise multiplier σ. With
Poisson sampling at a public rate q, they are the subsampled Gaussian mechanism. u may depend on x
and on earlier releases (adaptive composition), but not on other examples of the data set. The
groups compose in parallel, because an example affects only one of them. Dividing by a public
constant afterwards is post-processing.

The client's ledger is charged for all releases of a mechanism together, and the charge is on the
disk, before the first sample or noise is drawn. The mechanism then makes at most as many releases
as were charged.

`BudgetEnforcer` refuses a charge that would bring the ε of the client's ledger above a cap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Lock, get_ident
from typing import TYPE_CHECKING, NewType, NoReturn

import torch
from torch import Tensor

from fedsynth.errors import BudgetExceededError, LedgerError, PrivacyError
from fedsynth.files import this_process
from fedsynth.formatting import format_epsilon
from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.randomness import Grid, SecretGenerator
from fedsynth.privacy.releases import (
    ADD_REMOVE,
    RECORD,
    USER,
    Release,
    check_adjacency,
    check_delta,
    require,
)

if TYPE_CHECKING:
    from fedsynth.privacy.passes import Sample
    from fedsynth.privacy.products import Products

# The share of a budget that counts as nothing. If less than this share is left, a release would be
# only noise. The calibration of σ leaves about half of this share unused.
NOTHING_LEFT = 2e-3


@dataclass(frozen=True)
class EpsilonCap:
    """The largest allowed ε, and the δ at which ε is computed.

    The cap of a data owner may have a different δ than the run.

    Raises:
        PrivacySettingError: ε or δ is out of range.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check_delta(self.delta, None)
        valid = self.epsilon > 0 and math.isfinite(self.epsilon)
        require(valid, "epsilon", "must be finite and above 0", self.epsilon, "privacy")


@dataclass(frozen=True)
class BudgetEnforcer:
    """Charges a ledger for releases, and refuses a release that would exceed a cap on ε.

    It also writes the privacy unit into every row of the ledger.

    Args:
        ledger: the client's ledger.
        caps: the caps of the run and of the data owner, all of which apply.
        adjacency: one of `ADJACENCIES`.
        unit: the privacy unit, one of `UNITS`.

    Raises:
        PrivacySettingError: the adjacency is unknown.
        LedgerError: the ledger holds releases that protect another unit.
    """

    ledger: Ledger
    caps: Sequence[EpsilonCap] = ()
    adjacency: str = ADD_REMOVE
    unit: str = RECORD

    def __post_init__(self) -> None:
        check_adjacency(self.adjacency)
        self.check_unit(self.ledger.releases)

    def check(self, planned: Sequence[Release]) -> None:
        """Checks that the planned releases fit into the budget, without charging them.

        Raises:
            BudgetExceededError: the releases in the ledger and the planned ones would together
                exceed a cap.
        """
        self.check_budget(self.ledger.releases, planned)

    def charge(self, release: Release) -> None:
        """Checks that a release fits into the budget, and writes the release to the ledger.

        If the ledger is a file, both happen under one lock.
        """
        self.ledger.charge(replace(release, unit=self.unit), self.check_budget)

    def check_budget(self, rows: Sequence[Release], planned: Sequence[Release]) -> None:
        """Checks that `rows` and the planned releases together fit into the budget.

        `check` passes the releases of the ledger as `rows`.
        """
        self.check_unit(rows)
        for cap in self.caps:
            new_cost = epsilon([*rows, *planned], cap.delta, self.adjacency)
            if new_cost > cap.epsilon:
                cost = epsilon(rows, cap.delta, self.adjacency)
                raise BudgetExceededError(
                    f"the planned release would raise ε of client {self.ledger.client!r} from "
                    f"{format_epsilon(cost)} to {format_epsilon(new_cost)}, above the cap "
                    f"{cap.epsilon:g} (at δ = {cap.delta:g}). Raise the cap, or plan fewer or "
                    "noisier releases",
                    (self.ledger.client, cost, new_cost),
                )

    def check_unit(self, rows: Sequence[Release]) -> None:
        """Checks that all rows protect the same privacy unit as this run.

        A clip bounds the influence of either one record or one user. The costs of both kinds cannot
        be combined into one ε.

        Raises:
            LedgerError: a row protects another unit.
        """
        for row in rows:
            if row.unaccounted is None and row.unit != self.unit:
                raise LedgerError(
                    f"the ledger of client {self.ledger.client!r} was charged with "
                    f"privacy.unit={row.unit}, but this run uses privacy.unit={self.unit}. Set "
                    f"privacy.unit={row.unit}"
                ).with_code("ledger.unit")


# A tensor that a charged mechanism released. It may be optimised on, cached or uploaded.
Released = NewType("Released", Tensor)


# The bound on the norm of a user's rows before the rows are averaged, as a multiple of the clip.
# It keeps the rounding error of the average far below the clip.
USER_ROW = 2.0**16

# The maximum number of coordinates of users that are stored as float64 at the same time.
CPU_BLOCK, GPU_BLOCK = 2**20, 2**26

# The maximum number of coordinates that `add_weighted` and `squared_norms` convert to float64 at
# the same time. On a CPU, they fit in the cache.
CPU_COLUMNS, GPU_COLUMNS = 2**17, 2**26


def squared_norms(rows_ND: Tensor) -> Tensor:
    """Computes the squared L2 norm [N] of each row in float64.

    It is not finite if a coordinate is not.
    """
    squares = [torch.linalg.vector_norm(c.to(torch.float64), dim=1) ** 2 for c in _columns(rows_ND)]
    return torch.stack(squares).sum(dim=0)


def clip_factors(squares_N: Tensor, clip: float) -> Tensor:
    """Computes the factor that scales each row to an L2 norm of at most `clip`.

    Args:
        squares_N: the squared norms of the rows. If one is NaN or infinite, its factor is zero.
        clip: the bound on the norms.
    """
    norms = squares_N.sqrt().clamp_min(clip)
    return torch.where(torch.isfinite(norms), clip / norms, 0.0)


def add_weighted(sums_GD: Tensor, weights_NG: Tensor, rows_ND: Tensor) -> None:
    """Adds `weights_NG.T @ rows_ND` to `sums_GD` (float64) in place.

    A row whose weights are all zero contributes nothing, even if it is not finite.
    """
    used = (weights_NG != 0).any(dim=1)
    columns = _columns(rows_ND)
    for total, rows in zip(sums_GD.split(columns[0].shape[1], dim=1), columns, strict=True):
        total.addmm_(weights_NG.T, used_rows(rows, used))


def used_rows(rows_ND: Tensor, used_N: Tensor) -> Tensor:
    """Converts rows [N, …] to float64. Unused rows (bool [N]) become zero."""
    exact = rows_ND.to(torch.float64)
    if exact.is_cuda:  # nonzero would wait for the GPU
        return exact.masked_fill(~used_N.view(-1, *[1] * (exact.dim() - 1)), 0.0)
    unused = (~used_N).nonzero().flatten()
    return exact.index_fill(0, unused, 0.0) if len(unused) else exact


def _columns(rows: Tensor) -> tuple[Tensor, ...]:
    block = GPU_COLUMNS if rows.is_cuda else CPU_COLUMNS
    return rows.split(max(1, block // max(1, len(rows))), dim=1)


def clip_rows(rows_ND: Tensor, clip: float) -> Tensor:
    """Scales rows with an L2 norm above `clip` down to the norm `clip`.

    The result is float64. A row with a NaN or infinity becomes zero. float64 is used because the
    bound must hold for the rounded values that are summed. With bf16, sums exceeded the bound by 7
    %.
    """
    factors = clip_factors(squared_norms(rows_ND), clip)[:, None]
    clipped: Tensor = torch.where(factors > 0, rows_ND, 0.0) * factors
    return clipped


def clipped_sums(rows_ND: Tensor, groups_N: Tensor, groups: int, clip: float) -> Tensor:
    """Clips each row and sums the clipped rows of each group.

    The result is float64 [groups, D]. The sums have no noise yet. Their sensitivity is `clip` if
    one example is added or removed. They are private, so only `GaussianSumMechanism` and tests may
    call this function.
    """
    members = torch.nn.functional.one_hot(groups_N, groups)
    factors = clip_factors(squared_norms(rows_ND), clip)
    sums = factors.new_zeros(groups, rows_ND.shape[1])
    add_weighted(sums, members * factors[:, None], rows_ND)
    return sums


def _rows_at_once(rows: Tensor, width: int) -> int:
    return max(1, (GPU_BLOCK if rows.is_cuda else CPU_BLOCK) // max(1, width))


def on_grid(sums: Tensor, noise: Tensor, grid: Grid) -> Tensor:
    """Adds noise to sums and rounds the results to the nearest grid point.

    The noise is added to the remainder of each sum modulo the spacing, because the remainder is
    small however large the sum is. If noise were added to large sums directly, its lowest bits
    would be lost. Ties go to even multiples.
    """
    steps = sums / grid.spacing  # exact: the spacing is a power of two
    rounded = torch.round(steps)
    return (rounded + torch.round(steps - rounded + noise / grid.spacing)) * grid.spacing


class UserSums:
    """A sum with one contribution per user, the clipped mean of the user's rows.

    A user's rows are averaged in each group. The averages of all groups together are then clipped.
    Rows may arrive in several calls, and the rows of one user may be split between two calls.

    Where the rows are split depends on the number of other users' records, and so does the order in
    which a user's rows are added. Huge rows that cancel each other would leave a rounding error
    that depends on this order and may be as large as the clip. Therefore each row is first clipped
    to `USER_ROW` times the clip. The rounding error of n rows is then at most n · 2⁻³⁷ times the
    clip.

    Args:
        groups, width: the shape [groups, width] of a user's contribution.
        clip: the bound on the L2 norm of a user's contribution.
    """

    def __init__(self, groups: int, width: int, clip: float) -> None:
        self._groups = groups
        self._width = width
        self._clip = clip
        self._open: tuple[int, Tensor] | None = None

    def add(
        self, rows_ND: Tensor, groups_N: Tensor, users_N: Tensor, shares_N: Tensor, sums: Tensor
    ) -> None:
        """Adds users' contributions to `sums` [groups, width] in place.

        The last user's contribution is kept back until `close` or the next call, because more of
        their rows may follow.

        Args:
            rows_ND: the rows.
            groups_N: the group of each row.
            users_N: the user of each row, ascending, on the CPU.
            shares_N: the weight of each row in its user's mean.
            sums: the sums to add to.
        """
        at_once = _rows_at_once(rows_ND, self._groups * self._width)
        pieces = [column.split(at_once) for column in (rows_ND, groups_N, users_N, shares_N)]
        for rows, group, user, share in zip(*pieces, strict=True):
            numbers, user_index = user.unique_consecutive(return_inverse=True)
            table = sums.new_zeros(len(numbers), self._groups, self._width)
            parts = clip_rows(rows, USER_ROW * self._clip) * share.to(rows.device)[:, None]
            table.index_put_((user_index.to(rows.device), group), parts, accumulate=True)
            if self._open is not None and self._open[0] == int(numbers[0]):
                table[0] += self._open[1]
            else:
                self.close(sums)
            sums += clip_rows(table[:-1].flatten(1), self._clip).sum(dim=0).view_as(sums)
            self._open = (int(numbers[-1]), table[-1].clone())

    def close(self, sums: Tensor) -> None:
        """Adds the pending contribution of the last user to `sums` in place."""
        if self._open is not None:
            sums += clip_rows(self._open[1].flatten()[None], self._clip).view_as(sums)
        self._open = None


class GaussianSumMechanism:
    """A charged mechanism that releases noisy sums of clipped vectors.

    All releases of the mechanism are computed from the data set of one client. Each step calls
    `sample`, which draws the records, then `add` any number of times, because a batch may come in
    pieces, and then `release`. Constructing the mechanism charges the ledger.

    A step belongs to the thread that called `sample`. Until this thread calls `release`, every
    other thread is refused. Therefore threads can neither make more releases than were charged nor
    add a record twice. Threads that work at the same time need a mechanism each.

    Args:
        release: the row that is charged to the ledger. It states σ, the clip (`sensitivity`), q,
            the number of steps, and the dimension, which is groups · D.
        groups: the number of groups. Each group has its own sum [D].
        guard: the client's `BudgetEnforcer`, which charges the ledger.
        secret: the client's secret generator.

    Attributes:
        steps_left: the number of charged releases that remain.
        owner: the index of the client whose ledger was charged. None if the mechanism was
            constructed directly.
        shares: the number H of clients that together add the charged noise under secure
            aggregation. This client adds noise with 1/√H of the standard deviation. With 1, this
            client adds all of the noise.
        grid: the grid to which releases are rounded after adding noise, if secure aggregation sums
            them before anyone sees them (`fedsynth.privacy.randomness`). None rounds releases to
            float32.

    Raises:
        BudgetExceededError: the mechanism would exceed the client's cap. Nothing was charged or
            drawn.
        PrivacyError: dimensions do not match, there are more steps than were charged, methods are
            called in the wrong order or by another thread, or the mechanism is used in a forked
            process.
    """

    def __init__(
        self, release: Release, groups: int, guard: BudgetEnforcer, secret: SecretGenerator
    ) -> None:
        if release.dimension % groups:
            raise PrivacyError(
                f"a release of {release.dimension} coordinates cannot be divided into {groups} "
                "groups of equal width"
            ).with_code("mechanism.groups")
        guard.charge(release)
        self._release = release
        self._groups = groups
        self._secret = secret
        self._width = release.dimension // groups
        self.steps_left = release.steps
        self.owner: int | None = None
        self.shares = 1
        self.grid: Grid | None = None
        self._unit = guard.unit
        self._process = this_process()
        self._users = UserSums(groups, self._width, release.sensitivity)
        self._step = Lock()  # held from `sample` to `release`
        self._thread: int | None = None  # the thread that holds it
        self._sums: Tensor | None = None

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a charged mechanism cannot be copied or pickled, because the copy would release more "
            "than was charged"
        )

    @property
    def sample_rate(self) -> float:
        """The sampling rate q that was charged."""
        return self._release.sample_rate

    @property
    def sensitivity(self) -> float:
        """The clipping norm 𝒞, a bound on the L2 norm of each unit's contribution."""
        return self._release.sensitivity

    @property
    def noise_std(self) -> float:
        """The standard deviation of the client's noise.

        It is σ𝒞/√H if H clients share the noise, and it is public. Each coordinate of a release
        gets independent noise of this standard deviation.
        """
        return self._release.noise_multiplier * self.sensitivity / math.sqrt(self.shares)

    def sample(self, units: int) -> Tensor:
        """Starts a step and draws its Poisson sample.

        Args:
            units: the number of the client's records (or users).

        Returns:
            The indices (int64) of the sampled records (or users). There may be none.
        """
        self._refuse_forks()
        if not self._step.acquire(blocking=False):  # the step of a dead thread would never end
            raise PrivacyError(
                "the mechanism's previous step is still open. Call release() in the same thread "
                "before the next sample()"
            ).with_code("mechanism.open_step")
        if self.steps_left < 1:
            self._step.release()
            raise PrivacyError(
                f"all {self._release.steps} steps of the mechanism have been used. Create a new "
                "mechanism"
            ).with_code("mechanism.steps")
        self._thread = get_ident()
        self._sums = torch.zeros(self._groups, self._width, dtype=torch.float64)
        return self._secret.poisson_sample(units, self._release.sample_rate)

    def check_rows(self, rows_ND: Tensor) -> None:
        """Checks the shape of vectors for `add`. With fewer coordinates, they would share noise.

        Raises:
            PrivacyError: the vectors are not [N, width].
        """
        if rows_ND.dim() != 2 or rows_ND.shape[1] != self._width:
            raise PrivacyError(
                f"rows_ND must have the shape [N, {self._width}], got {list(rows_ND.shape)}"
            ).with_code("mechanism.shape")

    def add(self, rows_ND: Tensor, groups_N: Tensor, sample: Sample | None = None) -> None:
        """Clips the sampled records' vectors and adds each to its group's sum.

        Args:
            rows_ND: the vectors.
            groups_N: the group of each vector (int64).
            sample: the part of the step's sample to which these vectors belong. If users are the
                units, a user's vectors are averaged in each group, and the averages of all groups
                together are clipped. Otherwise, and if `sample` is None, each vector is clipped
                separately.
        """
        sums = self._open_sums(sample)
        self.check_rows(rows_ND)
        self._sums = sums.to(rows_ND.device, non_blocking=True)
        if sample is None or sample.users is None or sample.shares is None:
            self._sums += clipped_sums(rows_ND.detach(), groups_N, self._groups, self.sensitivity)
        else:
            self._users.add(rows_ND.detach(), groups_N, sample.users, sample.shares, self._sums)

    def add_products(self, products: Products, sample: Sample | None = None) -> None:
        """Adds the vectors of the sampled records to the sum, from their short factors.

        The mechanism must have exactly one group.

        Args:
            products: the vectors, whose norms are at most `products.bound`.
            sample: the part of the step's sample to which these vectors belong, as in `add`. If
                users are the units, a user's vectors are averaged. The norm of the mean is at most
                the largest norm of the vectors, so it needs no further clipping.

        Raises:
            PrivacyError: the vectors have the wrong dimension, the mechanism has more than one
                group, the bound exceeds the charged sensitivity, or no step is open.
        """
        open_sums = self._open_sums(sample)
        if self._groups != 1 or products.width != self._width:
            raise PrivacyError(
                f"`products` has 1 group of {products.width} coordinates, but the mechanism was "
                f"created for {self._groups} groups of {self._width}. Create a matching mechanism"
            ).with_code("mechanism.products")
        if products.bound > self.sensitivity * (1 + 1e-12):
            raise PrivacyError(
                f"products.bound must be at most the mechanism's sensitivity {self.sensitivity:g}, "
                f"got {products.bound:g}. Clip the vectors to the sensitivity"
            ).with_code("mechanism.sensitivity")
        self._sums = open_sums.to(products.device, non_blocking=True)
        products.add_to(self._sums[0], None if sample is None else sample.shares)

    def _open_sums(self, sample: Sample | None) -> Tensor:
        """Returns the sums of the current step.

        Raises:
            PrivacyError: this thread has no open step, or users are the units and `sample` does
                not state the users of its records.
        """
        if self._thread != get_ident() or self._sums is None:
            raise PrivacyError(
                "no step is open in this thread. Call sample() before adding records"
            ).with_code("mechanism.no_step")
        has_users = sample is not None and sample.users is not None and sample.shares is not None
        if self._unit == USER and not has_users:
            raise PrivacyError(
                "the mechanism protects users, but the sample does not name the rows' users. "
                "Pass the sample returned by Units.sample"
            ).with_code("mechanism.users")
        return self._sums

    def release(self) -> Released:
        """Ends the step and returns its noisy sums [groups, D].

        Every group gets fresh noise, even if the sample is empty. The noise is added in float64 and
        the result is then rounded, which is post-processing. Rounding before adding noise would not
        be. Without a grid, the result is float32. With a grid, it is float64 and rounded to the
        grid, because the grid's steps are equal, while the steps of float32 depend on the sums.
        """
        self._refuse_forks()
        if self._thread != get_ident() or self._sums is None:
            raise PrivacyError(
                "no step is open in this thread. Call sample() before release()"
            ).with_code("mechanism.no_step")
        self._users.close(self._sums)
        sums, self._sums = self._sums, None
        self.steps_left -= 1
        self._thread = None
        self._step.release()
        noise = self._noise((self._groups, self._width), sums.device)
        if self.grid is None:
            return Released(noise.add_(sums).to(torch.float32))
        return Released(on_grid(sums, noise, self.grid))

    def _noise(self, shape: tuple[int, int], device: torch.device) -> Tensor:
        return self._secret.normal(shape, self.noise_std, device)

    def _refuse_forks(self) -> None:
        if self._process != this_process():
            raise PrivacyError(
                "the mechanism belongs to another process. Create and charge a new one after a fork"
            ).with_code("mechanism.process")
