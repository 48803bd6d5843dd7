"""Computes scores of canaries from the releases of an audited client.

A canary is a test record. A fair coin decides whether it is included in one client's data. The
scores show how well the client's releases reveal the results of the coins.

The releases are made by a real `GaussianSumMechanism`, with ledger, sampling, clipping and noise.
`AuditedSums` adds the auditor, who is the adversary in the definition of differential privacy. The
auditor knows all settings and networks, which other records were sampled, and what each canary
would contribute. The auditor does not know the coins, which canaries were sampled, or the noise.

A canary's score is the sum over all releases of the log-likelihood ratio between "in" and "out".
Let y be the release for the canary's class minus the contributions of the other records. Let ū_i be
the clipped contribution of canary i, and s = σ𝒞. The other canaries are treated as Gaussian noise,
where v = q/2·(1 − q/2) is the variance of "in, and sampled". Then

    A_i = s²I + v·Σ_{j≠i} ū_j ū_jᵀ,
    k_i = ū_iᵀ A_i⁻¹ ū_i,    z_i = ū_iᵀ A_i⁻¹ (y − q/2·Σ_{j≠i} ū_j),
    score_i = log(1 − q + q·exp(z_i − k_i/2)),

which is exact for orthogonal canaries. The lower bound is valid for any score, and a better score
makes it higher.

The bounds in `fedsynth.privacy.score_bounds` need independent scores. For these bounds, the
releases with orthogonal canaries have separate scores. With ẑ_i = ū_iᵀ y/(s𝒞), a canary's score is
Σ ẑ_i/σ over these releases. Further orthogonal directions, which no record uses, are scored like
canaries that are not in the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedsynth.errors import PrivacyError
from fedsynth.privacy.mechanisms import GaussianSumMechanism, Released
from fedsynth.privacy.passes import Sample
from fedsynth.privacy.products import Products
from fedsynth.privacy.releases import Release

# The norm of a canary's vector, in multiples of the clip. It is far above 1, so that only clipping
# bounds the contribution of the canary.
LENGTH = 10.0
# The number of coordinates in which the vectors of canaries are nonzero, if a release has more
# coordinates. The coordinates are drawn at random, so that they include some of every layer.
COLUMNS = 4096


def log_likelihood_ratios(
    y_D: Tensor, contributions_ND: Tensor, noise_std: float, rate: float, *, orthogonal: bool
) -> Tensor:
    """Computes the scores of the canaries in one group from its release.

    The formula for score_i is in the text of this module. The result is float64 [N]. Applied to the
    canaries, A_i⁻¹ follows from (s²I + v·ū ūᵀ)⁻¹ by the push-through and Sherman–Morrison
    identities. Therefore one inverse is enough for all canaries.

    Args:
        y_D: the release minus the contributions of the other records.
        contributions_ND: ū of all canaries in the group.
        noise_std: s.
        rate: q.
        orthogonal: True if the contributions are orthogonal, so that they need no decorrelation.
    """
    u = contributions_ND
    variance = noise_std**2
    if orthogonal:
        k = u.square().sum(dim=1).double() / variance
        z = (u @ y_D).double() / variance
    else:
        half = rate / 2
        gram = (u @ u.T).double()
        spread = half * (1 - half)
        variance = max(variance, 1e-6 * float(gram.trace()))  # float32's rounding of `gram`
        noise = variance * torch.eye(len(u), dtype=gram.dtype, device=u.device)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(noise + spread * gram))
        unexplained = variance * inverse.diagonal()
        k = (1 - unexplained) / (spread * unexplained)
        z = inverse @ ((u @ y_D).double() - half * gram.sum(dim=1)) / unexplained + half * k
    ratio = z - k / 2
    if rate == 1:
        return ratio
    return torch.logaddexp(torch.full_like(ratio, math.log1p(-rate)), math.log(rate) + ratio)


def finite(rows_ND: Tensor) -> Tensor:
    """Converts rows to float64, and replaces each row that has a NaN or infinity with zeros."""
    rows = rows_ND.detach().to(torch.float64)
    return torch.where(rows.norm(dim=1, keepdim=True).isfinite(), rows, 0.0)


def shrinking(rows_ND: Tensor, clip: float) -> Tensor:
    """Computes each row's clipping factor.

    The factors [N, 1] are computed without the mechanism's code, so that the audit detects a fault
    in that code.
    """
    norms: Tensor = rows_ND.norm(dim=1, keepdim=True)
    return (clip / norms).clamp_max(1.0)


@dataclass(frozen=True)
class Directions:
    """The unit vectors of the canaries, and after them unused ones.

    Attributes:
        units: the unit vectors [N, K], without the coordinates that are zero for all of them.
        columns: the K coordinates of a release to which `units` refers.
        orthogonal: True if the unit vectors are orthogonal.
    """

    units: Tensor
    columns: Tensor
    orthogonal: bool


def draw_directions(count: int, width: int, generator: torch.Generator) -> Directions:
    """Draws `count` random unit vectors for releases with `width` coordinates.

    The vectors are orthogonal if there are enough coordinates. Up to `count` unused ones follow, as
    far as there are coordinates.
    """
    num_columns = min(width, max(COLUMNS, count))
    columns = torch.randperm(width, generator=generator)[:num_columns]
    if width == 1:  # a count: every canary counts 1
        return Directions(torch.ones(count, 1, dtype=torch.float64), columns, count == 1)
    drawn = max(count, min(2 * count, num_columns))
    gaussian = torch.randn(num_columns, drawn, generator=generator, dtype=torch.float64)
    if count <= num_columns:
        return Directions(torch.linalg.qr(gaussian)[0].T.contiguous(), columns, True)
    return Directions(torch.nn.functional.normalize(gaussian.T, dim=1), columns, False)


@dataclass(eq=False)
class Canaries:
    """One audit's canaries, with their scores so far.

    Args:
        labels: the classes of the canaries, int64 [m] on the CPU.
        included: the results of the fair coins, bool [m].
        rest: the number of the client's records that are not canaries. They come before the
            canaries.
        generator: the generator from which the canaries' vectors are drawn. The vectors are public.

    Attributes:
        scores: the scores, float64 [m]. A higher score means that the canary is more likely in the
            data.
        independent: the same, over releases with orthogonal canaries only.
        unused: the same as `independent` for unused directions, at most m. If a release has fewer
            of them, the others are dropped, because their scores lack its noise.
        steps: (σ, q) of the releases with orthogonal canaries.
        sampled: ẑ_i of canaries that a step with q < 1 sampled.
        absent: ẑ_i of canaries that are not in the data, at the same steps.
    """

    labels: Tensor
    included: Tensor
    rest: int
    generator: torch.Generator
    scores: Tensor = field(init=False)
    independent: Tensor = field(init=False)
    unused: Tensor = field(init=False)
    steps: list[tuple[float, float]] = field(init=False, default_factory=list)
    sampled: list[Tensor] = field(init=False, default_factory=list)
    absent: list[Tensor] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        zeros = torch.zeros(3, len(self.labels), dtype=torch.float64)
        self.scores, self.independent, self.unused = zeros
        self._directions: dict[tuple[int, int], Directions] = {}

    def __len__(self) -> int:
        return len(self.labels)

    def among_records(self) -> Tensor:
        """Returns the indices (int64) of the canaries that are included in the data.

        These canaries come after the other records of the client.
        """
        return self.included.nonzero().flatten()

    def observe(self, signals: Tensor, unused: Tensor, sampled: Tensor, release: Release) -> None:
        """Adds the scores of a step with orthogonal canaries to `independent` and `unused`.

        Args:
            signals: ẑ_i of all canaries.
            unused: the same for unused directions.
            sampled: the canaries that the step sampled.
            release: the row of the ledger.
        """
        σ, q = release.noise_multiplier, release.sample_rate
        self.steps.append((σ, q))
        self.independent += signals / σ
        self.unused = self.unused[: len(unused)] + unused[: len(self.unused)] / σ
        if q < 1:
            self.sampled.append(signals[sampled])
            self.absent.append(signals[~self.included])

    def members(self, groups: int) -> list[Tensor]:
        """Returns the indices of the canaries in each group of a release.

        The groups are the classes. If there is only one group, it contains all canaries.
        """
        if groups == 1:
            return [torch.arange(len(self))]
        return [torch.nonzero(self.labels == group).flatten() for group in range(groups)]

    def directions(self, count: int, width: int) -> Directions:
        """Returns the unit vectors of a group's canaries.

        If the unit vectors are orthogonal, they are the same at every release. Otherwise new ones
        are drawn, so that different pairs of canaries overlap at each release.

        Args:
            count: the number of canaries in the group.
            width: the number of coordinates of a release.
        """
        if (count, width) not in self._directions:
            drawn = draw_directions(count, width, self.generator)
            if not drawn.orthogonal:
                return drawn
            self._directions[count, width] = drawn
        return self._directions[count, width]


def _select(sample: Sample | None, mask: Tensor) -> Sample | None:
    return None if sample is None else sample.select(mask.cpu())


class AuditedSums(GaussianSumMechanism):
    """A Gaussian mechanism that scores canaries by its own releases.

    Just before the clip, the vector of each canary is replaced by a random vector that is `LENGTH`
    clips long. The sign of the vectors alternates between releases and between rounds, so that
    noise that is used twice cancels.

    The class relies on `add` receiving the vectors in the order in which `sample` returned the
    records. It checks that all of them arrive.

    Args:
        canaries: the canaries among the client's records.
        sums: the arguments of `GaussianSumMechanism`.
    """

    def __init__(self, canaries: Canaries, *sums: Any) -> None:
        super().__init__(*sums)
        self._canaries = canaries
        self._members = canaries.members(self._groups)
        self._largest = max(map(len, self._members))
        # the canary at each of the client's records, −1 for the rest
        self._records = torch.cat([torch.full((canaries.rest,), -1), canaries.among_records()])
        # the position of each canary within its group
        self._rank = torch.empty(len(canaries), dtype=torch.int64)
        for members in self._members:
            self._rank[members] = torch.arange(len(members))

    def sample(self, records: int) -> Tensor:
        """Starts a step by sampling from the client's records and the included canaries.

        See `GaussianSumMechanism.sample`.
        """
        if records != len(self._records):
            raise PrivacyError(
                f"the method sampled from {records} records, but the audited client has "
                f"{len(self._records)}. Sample from all records"
            ).with_code("audit.sample")
        positions = super().sample(records)
        self._canary_of_sampled = self._records[positions]
        self._position = 0
        self._rest = torch.zeros(self._groups, self._width, dtype=torch.float64)
        self._signed_clip = self._release.sensitivity
        if self._width > 1:  # counts have no direction to turn
            self._signed_clip *= (-1.0) ** (self._release.round + self.steps_left)
        self._directions = self._canaries.directions(self._largest, self._width)
        return positions

    def add(self, rows_ND: Tensor, groups_N: Tensor, sample: Sample | None = None) -> None:
        """Adds sampled vectors to the sums, with random vectors in place of canaries.

        See `GaussianSumMechanism.add`. If the run protects users, each user has one record in an
        audit, so that clipping users is the same as clipping records.
        """
        rows, _ = self._look(rows_ND.detach(), groups_N)
        super().add(rows, groups_N, sample)

    def add_products(self, products: Products, sample: Sample | None = None) -> None:
        """Adds sampled products to the sum, with random vectors in place of canaries.

        See `GaussianSumMechanism.add_products`. Records that are not canaries are added as
        products. They are expanded to full vectors only for the auditor. The vectors of canaries
        have no factors, so they are added as full vectors.
        """
        written = products.rows()
        groups = torch.zeros(len(written), dtype=torch.int64, device=written.device)
        rows, is_canary = self._look(written, groups)
        super().add_products(products.part(~is_canary), _select(sample, ~is_canary))
        if is_canary.any():
            super().add(rows[is_canary], groups[is_canary], _select(sample, is_canary))

    def _look(self, rows_ND: Tensor, groups_N: Tensor) -> tuple[Tensor, Tensor]:
        """Replaces the vectors of canaries in the next chunk of sampled records.

        The clipped vectors of all other records are added to the sum that the auditor knows.

        Returns:
            The vectors, and a mask that is True for canaries.
        """
        chunk = slice(self._position, self._position + len(rows_ND))
        self._position = chunk.stop
        canary = self._canary_of_sampled[chunk].to(rows_ND.device)
        is_canary = canary >= 0
        units = self._directions.units[self._rank[canary[is_canary].cpu()]]
        full = units.new_zeros(len(units), self._width)
        full[:, self._directions.columns] = LENGTH * self._signed_clip * units
        rows = rows_ND.clone()
        rows[is_canary] = full.to(rows)
        ordinary = finite(rows[~is_canary])
        clipped = ordinary * shrinking(ordinary, self._release.sensitivity)
        self._rest = self._rest.to(rows.device).index_add(0, groups_N[~is_canary], clipped)
        return rows, is_canary

    def release(self) -> Released:
        """Ends the step, returns its noisy sums, and updates the canaries' scores.

        See `GaussianSumMechanism.release`.

        Raises:
            PrivacyError: not all sampled records were added to the sums.
        """
        if self._position != len(self._canary_of_sampled):
            raise PrivacyError(
                f"the method added only {self._position} of {len(self._canary_of_sampled)} "
                "sampled records to its sum. Add all sampled records"
            ).with_code("audit.added")
        released = super().release()
        directions = self._directions
        row = self._release
        residual = released.to(self._rest) - self._rest
        signals, unused = torch.zeros_like(self._canaries.scores), []
        for y, members in zip(residual, self._members, strict=True):
            if not len(members):
                continue
            u = self._signed_clip * directions.units
            seen = y[directions.columns].to(u)
            of_group = (u @ seen / (row.noise_multiplier * row.sensitivity**2)).cpu()
            signals[members] = of_group[: len(members)]
            unused.append(of_group[self._largest :])
            ratios = log_likelihood_ratios(
                seen,
                u[: len(members)],
                row.noise_multiplier * row.sensitivity,
                row.sample_rate,
                orthogonal=directions.orthogonal,
            )
            self._canaries.scores[members] += ratios.cpu()
        if directions.orthogonal:
            sampled = self._canary_of_sampled
            self._canaries.observe(signals, torch.cat(unused), sampled[sampled >= 0], row)
        return released
