"""The one Gaussian mechanism that every private step goes through: noisy sums of clipped
per-example vectors.

Theorem. Let every example x of a client's data set contribute a vector u(x) to the sum of one group
(its class), and let ū(x) = u(x)·min(1, 𝒞/‖u(x)‖₂), with ū(x) = 0 if u(x) is not finite. Adding or
removing one example changes the vector of all groups' sums in one group only, by at most 𝒞 in L2
norm. The sums plus N(0, σ²𝒞²I) are therefore the Gaussian mechanism with noise multiplier σ, and
with Poisson sampling at a public rate q its subsampled form. u may depend on x and on earlier
releases (adaptive composition), but not on other examples of the data set. The groups compose in
parallel, as an example affects only one of them. Dividing by a public constant afterwards is
post-processing.

Order of events: the client's ledger is durably charged for the whole series before the first mask
or noise is drawn. The series then makes exactly as many releases as were charged.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NewType, NoReturn

import torch
from torch import Tensor

from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.grid import Grid
from fedsynth.privacy.guard import BudgetEnforcer
from fedsynth.privacy.randomness import SecretGenerator, this_process
from fedsynth.privacy.releases import USER, Release

if TYPE_CHECKING:
    from fedsynth.privacy.products import Products
    from fedsynth.privacy.units import Sample

Released = NewType("Released", Tensor)
"""A tensor released by a charged mechanism: safe to optimise on, cache or upload."""


USER_ROW = 2.0**16
"""The norm bound, in clips, of each of a user's rows before averaging, which keeps rounding far
below one clip."""

CPU_BLOCK, GPU_BLOCK = 2**20, 2**26
"""Coordinates held as float64 at a time; on a CPU, as many as fit in the cache."""


def clip_rows(rows_ND: Tensor, clip: float) -> Tensor:
    """Returns rows scaled to L2 norm at most `clip`, as float64; a row with a NaN or infinity
    becomes zero.

    float64 is used because the bound must hold for the values that are summed: with bf16, sums
    exceeded it by 7 %.
    """
    rows = rows_ND.to(torch.float64)
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)  # not finite if a coordinate is not
    rows = torch.where(torch.isfinite(norms), rows, 0.0)
    clipped: Tensor = rows * (clip / norms.clamp_min(clip).nan_to_num(clip))
    return clipped


def clipped_sums(rows_ND: Tensor, groups_N: Tensor, groups: int, clip: float) -> Tensor:
    """Returns the sums of clipped rows by group, [groups, D], float64: the statistic before noise,
    of sensitivity `clip` under add/remove.

    Private: only `GaussianSumMechanism` and tests may call this.
    """
    sums = rows_ND.new_zeros(groups, rows_ND.shape[1], dtype=torch.float64)
    at_once = _rows_at_once(rows_ND, rows_ND.shape[1])
    for rows, chunk_groups in zip(rows_ND.split(at_once), groups_N.split(at_once), strict=True):
        members = torch.nn.functional.one_hot(chunk_groups, groups).to(torch.float64)
        sums.addmm_(members.T, clip_rows(rows, clip))
    return sums


def _rows_at_once(rows: Tensor, width: int) -> int:
    return max(1, (GPU_BLOCK if rows.is_cuda else CPU_BLOCK) // max(1, width))


def on_grid(sums: Tensor, noise: Tensor, grid: Grid) -> Tensor:
    """Returns the sums plus noise, rounded to the nearest multiple of the grid's spacing, float64.

    The noise is added to the remainder of the sums modulo the spacing, whose size does not depend
    on the sums. In `sums + noise`, large sums would round off the noise. Ties go to even steps.
    """
    steps = sums / grid.spacing  # exact: the spacing is a power of two
    rounded = torch.round(steps)
    return (rounded + torch.round(steps - rounded + noise / grid.spacing)) * grid.spacing


class UserSums:
    """Means by user and group, clipped over all groups of a user together. Rows may arrive in
    pieces that split a user.

    The position of a split, and so the order in which a user's rows are added, depends on the
    number of other users' records. Huge rows that cancel would leave a rounding residue as large as
    the clip that depends on this order. Therefore each row is first clipped to `USER_ROW` clips: n
    rows then leave at most n · 2⁻³⁷ clips.

    Args:
        groups, width: the shape [groups, width] of a user's contribution.
        clip: the contribution's L2 bound.
    """

    def __init__(self, groups: int, width: int, clip: float) -> None:
        self._groups = groups
        self._width = width
        self._clip = clip
        self._open: tuple[int, Tensor] | None = None

    def add(
        self, rows_ND: Tensor, groups_N: Tensor, users_N: Tensor, shares_N: Tensor, sums: Tensor
    ) -> None:
        """Adds rows to `sums` [groups, width] in place. User numbers are ascending, and on the CPU;
        the last user stays open."""
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
        """Adds the last user, who stayed open because more of their records could follow."""
        if self._open is not None:
            sums += clip_rows(self._open[1].flatten()[None], self._clip).view_as(sums)
        self._open = None


class GaussianSumMechanism:
    """A charged series of noisy clipped sums on one client's data set.

    Each step calls `sample` (draws the records), `add` (any number of times, as a batch may come in
    pieces) and `release`.

    Args:
        release: the charged row: σ, the clip (`sensitivity`), q, number of steps, dimension (=
            groups · D).
        guard: the client's ledger and cap.
        secret: the client's secret generator.

    Attributes:
        steps_left: the number of charged releases that remain.
        owner: the index of the client that it was charged for; None: it was constructed directly.
        shares: H of securely aggregated noise: the charged noise is that of H clients together, and
            this client adds its share, with 1/√H of the standard deviation. 1: it adds all of it.
        grid: the grid to which releases are rounded after the noise, if they are summed before
            anyone sees them (`fedsynth.privacy.grid`); None: they are rounded to float32.

    Raises:
        BudgetExceededError: the series would exceed the client's cap; nothing was charged and
            nothing drawn.
        PrivacyError: dimensions that do not match, more steps than charged, calls out of order, or
            use in a forked process.
    """

    def __init__(
        self, release: Release, groups: int, guard: BudgetEnforcer, secret: SecretGenerator
    ) -> None:
        if release.dimension % groups:
            raise PrivacyError(
                f"a release of {release.dimension} coordinates cannot be {groups} groups of equal "
                "width"
            )
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
        self._sums: Tensor | None = None

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a charged mechanism must not be copied: it could release more than was charged"
        )

    @property
    def sample_rate(self) -> float:
        """q, as charged."""
        return self._release.sample_rate

    @property
    def sensitivity(self) -> float:
        """𝒞, as charged: the norm to which every unit's contribution is clipped."""
        return self._release.sensitivity

    @property
    def noise_std(self) -> float:
        """σ𝒞/√H, the standard deviation of the noise that this client adds to each coordinate of a
        release; public."""
        return self._release.noise_multiplier * self.sensitivity / math.sqrt(self.shares)

    def sample(self, units: int) -> Tensor:
        """Starts a step, and returns the indices (int64) of the records (or users) in its Poisson
        sample, which may be empty."""
        self._refuse_forks()
        if self._sums is not None:
            raise PrivacyError(
                "a step of this mechanism is still open: release it before you draw the next sample"
            )
        if self.steps_left == 0:
            raise PrivacyError(
                f"all {self._release.steps} charged steps of this mechanism are used"
            )
        self._sums = torch.zeros(self._groups, self._width, dtype=torch.float64)
        return self._secret.poisson_sample(units, self._release.sample_rate)

    def add(self, rows_ND: Tensor, groups_N: Tensor, sample: Sample | None = None) -> None:
        """Adds sampled records' vectors [N, D] to the sums of their groups [N] (int64).

        Args:
            sample: the part of the step's sample that these rows belong to. If users are the units,
                a user's rows are averaged in each group and clipped over all groups together;
                otherwise (and with None) each row is clipped separately.
        """
        sums = self._open_sums(sample)
        # with fewer coordinates, broadcasting would share noise
        if rows_ND.dim() != 2 or rows_ND.shape[1] != self._width:
            raise PrivacyError(
                f"charged for rows of {self._width} coordinates, got a tensor of shape "
                f"{tuple(rows_ND.shape)}"
            )
        self._sums = sums.to(rows_ND.device, non_blocking=True)
        if sample is None or sample.users is None or sample.shares is None:
            self._sums += clipped_sums(rows_ND.detach(), groups_N, self._groups, self.sensitivity)
        else:
            self._users.add(rows_ND.detach(), groups_N, sample.users, sample.shares, self._sums)

    def add_products(self, products: Products, sample: Sample | None = None) -> None:
        """Adds sampled records' vectors, given by factors, to the sum of the only group.

        Args:
            products: the vectors, whose norms are at most `products.bound`.
            sample: see `add`. A user's vectors are averaged; the mean's norm is at most the largest
                of theirs.

        Raises:
            PrivacyError: as `add`; the bound exceeds the charged sensitivity, or there is more than
                one group.
        """
        open_sums = self._open_sums(sample)
        if self._groups != 1 or products.width != self._width:
            raise PrivacyError(
                f"charged for {self._groups} groups of {self._width} coordinates, got products of "
                f"{products.width} for one"
            )
        if products.bound > self.sensitivity * (1 + 1e-12):
            raise PrivacyError(
                f"charged for a sensitivity of {self.sensitivity:g}, got vectors of norm up to "
                f"{products.bound:g}"
            )
        sums = products.sums(None if sample is None else sample.shares)
        self._sums = open_sums.to(sums.device, non_blocking=True) + sums

    def _open_sums(self, sample: Sample | None) -> Tensor:
        """Returns the sums of the open step; if users are the units, refuses records without
        users."""
        if self._sums is None:
            raise PrivacyError("no step is open: records must be sampled before they are summed")
        has_users = sample is not None and sample.users is not None and sample.shares is not None
        if self._unit == USER and not has_users:
            raise PrivacyError(
                "charged for users as the unit: rows need their user ids and are clipped by user"
            )
        return self._sums

    def release(self) -> Released:
        """Ends the step and returns its noisy sums [groups, D], float32 (float64 on a grid).

        Every group gets fresh noise, even if the sample is empty. The noise is added in float64.
        Rounding afterwards is post-processing; rounding before would not be. A part of a sum is
        rounded to its grid, whose steps are equal, and not to float32, whose steps depend on the
        sums.
        """
        self._refuse_forks()
        if self._sums is None:
            raise PrivacyError("no step is open: nothing to release")
        self._users.close(self._sums)
        sums, self._sums = self._sums, None
        self.steps_left -= 1
        noise = self._secret.normal((self._groups, self._width), self.noise_std, sums.device)
        if self.grid is None:
            return Released((sums + noise).to(torch.float32))
        return Released(on_grid(sums, noise, self.grid))

    def _refuse_forks(self) -> None:
        if self._process != this_process():
            raise PrivacyError(
                "this mechanism was charged by another process: after a fork, both "
                "processes would release on one charge"
            )
