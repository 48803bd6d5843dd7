"""Canaries, and the scores that an auditor computes for them from the releases of a client.

A canary is a record that a fair coin includes in one client's data or not. The auditor's scores
show how well the releases reveal the result of the coin.

The client's releases are real (`GaussianSumMechanism`: ledger, masks, clip, sum, noise).
`AuditedSums` adds the auditor, who is the adversary in the definition of differential privacy. The
auditor knows all settings and networks, all other records and their masks, and what each canary
would contribute. The auditor does not know the coins and masks of the canaries, or the noise.

A canary's score is the sum over all releases of the log-likelihood ratio between "in" and "out".
Let y be the release for the canary's class minus the contributions of the other records. Let ū_i be
the clipped contribution of canary i, and s = σ𝒞. The other canaries are treated as Gaussian noise,
where v = q/2·(1 − q/2) is the variance of "in, and sampled". Then

    A_i = s²I + v·Σ_{j≠i} ū_j ū_jᵀ,
    k_i = ū_iᵀ A_i⁻¹ ū_i,    z_i = ū_iᵀ A_i⁻¹ (y − q/2·Σ_{j≠i} ū_j),
    score_i = log(1 − q + q·exp(z_i − k_i/2)),

which is exact for orthogonal canaries. If a release for image canaries looks as if nothing was
clipped, ū_i is the unclipped vector. The lower bound is valid for any score, and a better score
makes it higher.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fedsynth.privacy.errors import PrivacyError, PrivacySettingError
from fedsynth.privacy.mechanisms import BudgetEnforcer, GaussianSumMechanism, Released
from fedsynth.privacy.passes import Sample
from fedsynth.privacy.products import Products
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release

VECTORS, IMAGES = "vectors", "images"
KINDS = (VECTORS, IMAGES)
LENGTH = 10.0
"""The norm of a vector canary, in multiples of the clip. It is far above 1, so that only the clip
bounds the canary's contribution.
"""
COLUMNS = 4096
"""The number of coordinates of a wide release in which vector canaries are nonzero. They are drawn
at random, so that they include some of every layer.
"""


def log_likelihood_ratios(
    y_D: Tensor, contributions_ND: Tensor, noise_std: float, rate: float, *, orthogonal: bool
) -> Tensor:
    """Computes score_i (see the top of this module) for one release of one group, float64 [N].

    Applied to the canaries, A_i⁻¹ follows from (s²I + v·ū ūᵀ)⁻¹ by the push-through and
    Sherman–Morrison identities. So one inverse is enough for all canaries.

    Args:
        y_D: the release minus the contributions of the other records.
        contributions_ND: ū of all canaries in the group.
        noise_std: s.
        rate: q.
        orthogonal: whether the contributions are orthogonal, so that they need no decorrelation.
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
    """Returns the rows in float64, with zeros in place of rows that are not finite."""
    rows = rows_ND.detach().to(torch.float64)
    return torch.where(rows.norm(dim=1, keepdim=True).isfinite(), rows, 0.0)


def shrinking(rows_ND: Tensor, clip: float) -> Tensor:
    """Returns the clipping factors [N, 1] that the privacy theorem assumes.

    They are computed without the mechanism's code, so that the audit detects a fault in that code.
    """
    norms: Tensor = rows_ND.norm(dim=1, keepdim=True)
    return (clip / norms).clamp_max(1.0)


@dataclass(frozen=True)
class Directions:
    """Unit vectors [N, K] on the coordinates `columns` [K] of a release, with a flag that tells
    whether they are orthogonal.
    """

    units: Tensor
    columns: Tensor
    orthogonal: bool


def draw_directions(count: int, width: int, generator: torch.Generator) -> Directions:
    """Draws `count` random unit vectors in `width` dimensions. They are orthogonal if the
    dimensions allow it.
    """
    num_columns = min(width, max(COLUMNS, count))
    columns = torch.randperm(width, generator=generator)[:num_columns]
    if width == 1:  # a count: every canary counts 1
        return Directions(torch.ones(count, 1, dtype=torch.float64), columns, count == 1)
    gaussian = torch.randn(num_columns, count, generator=generator, dtype=torch.float64)
    if count <= num_columns:
        return Directions(torch.linalg.qr(gaussian)[0].T.contiguous(), columns, True)
    return Directions(torch.nn.functional.normalize(gaussian.T, dim=1), columns, False)


@dataclass(eq=False)
class Canaries:
    """The canaries of one audit, with their scores so far.

    Args:
        kind: "vectors" (`VectorSums`) or "images" (`ImageSums`).
        labels: the classes of the canaries, int64 [m] on the CPU.
        included: the results of the fair coins, bool [m].
        rest: the number of the client's other records. They come before the canaries.
        generator: the generator for the vectors, which are public.
        memory_bytes: the memory that the contributions of image canaries to one release may take.

    Attributes:
        scores: float64 [m]. A higher score means "more likely in".
    """

    kind: str
    labels: Tensor
    included: Tensor
    rest: int
    generator: torch.Generator
    memory_bytes: int = 4 * 2**30
    scores: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.scores = torch.zeros(len(self.labels), dtype=torch.float64)
        self._directions: dict[tuple[int, int], Directions] = {}

    def __len__(self) -> int:
        return len(self.labels)

    def among_records(self) -> Tensor:
        """Returns the indices of the canaries that are appended to the client's records, int64 [n].

        For vectors, these are the included canaries. For images, these are all canaries, because
        the auditor also needs the contributions of excluded ones. `ImageSums` leaves the excluded
        ones out of every sum.
        """
        if self.kind == IMAGES:
            return torch.arange(len(self))
        return self.included.nonzero().flatten()

    def members(self, groups: int) -> list[Tensor]:
        """Returns the canaries in each group of a release. The groups are the classes, or there is
        one group with all canaries.
        """
        if groups == 1:
            return [torch.arange(len(self))]
        return [torch.nonzero(self.labels == group).flatten() for group in range(groups)]

    def directions(self, count: int, width: int) -> Directions:
        """Returns unit vectors for the `count` canaries of one group.

        If the vectors are orthogonal, they are the same at every release. Otherwise they are drawn
        again, so that the pairs of canaries that overlap change.
        """
        if (count, width) not in self._directions:
            drawn = draw_directions(count, width, self.generator)
            if not drawn.orthogonal:
                return drawn
            self._directions[count, width] = drawn
        return self._directions[count, width]

    def series(
        self, release: Release, groups: int, guard: BudgetEnforcer, secret: SecretGenerator
    ) -> GaussianSumMechanism:
        """Creates the client's charged series of releases, which the auditor observes.

        Raises:
            PrivacySettingError: if the contributions of image canaries to one release need more
                than `memory_bytes`.
        """
        if self.kind != IMAGES:
            return VectorSums(release, groups, guard, secret, self)
        needed = 8 * len(self) * (release.dimension // groups)
        if needed > self.memory_bytes:
            raise PrivacySettingError(
                None,
                "canaries",
                f"must be fewer, because {len(self)} images need {needed / 2**30:.1f} GiB. "
                "Increase run.memory_gb, or use canaries_as=vectors",
            )
        return ImageSums(release, groups, guard, secret, self)


def _select(sample: Sample | None, mask: Tensor) -> Sample | None:
    return None if sample is None else sample.select(mask.cpu())


class AuditedSums(GaussianSumMechanism):
    """A client's charged series of releases, with canaries among its records and an auditor who
    observes it.

    The class relies on `add` receiving the vectors in the order in which `sample` returned the
    records. It checks that all of them arrive.
    """

    def __init__(
        self,
        release: Release,
        groups: int,
        guard: BudgetEnforcer,
        secret: SecretGenerator,
        canaries: Canaries,
    ) -> None:
        super().__init__(release, groups, guard, secret)
        self._canaries = canaries
        self._members = canaries.members(groups)
        # the canary at each of the client's records, −1 for the rest
        self._records = torch.cat([torch.full((canaries.rest,), -1), canaries.among_records()])

    def _give_out(self, sampled: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the records for which the method computes vectors, and a mask of those that enter
        the sum.

        Args:
            sampled: the records that were sampled.
        """
        raise NotImplementedError  # abstract

    def _vectors(self, rows_ND: Tensor, canary_N: Tensor) -> Tensor:
        """Returns the vectors to be clipped and summed.

        Args:
            rows_ND: the vectors that the method has computed for the records.
            canary_N: the canary at each record, or −1 if the record is no canary.
        """
        raise NotImplementedError  # abstract

    def _replaced(self, canary_N: Tensor) -> Tensor:
        """Returns a mask of the records whose vectors `_vectors` has replaced, bool [N]."""
        return torch.zeros_like(canary_N, dtype=torch.bool)

    def _contributions(self, members: Tensor) -> tuple[Tensor, Tensor | slice, bool]:
        """Returns ū [N, K] of the given canaries, the coordinates of ū, and whether the vectors ū
        are orthogonal.
        """
        raise NotImplementedError  # abstract

    def _clip_is_missing(self, released_GD: Tensor) -> bool:
        """Returns True if the release is closer to the expected sum of unclipped vectors than to
        that of clipped ones.

        The result depends only on the release, so the lower bound is valid in both cases.
        """
        return False

    def sample(self, records: int) -> Tensor:
        """Samples records like `GaussianSumMechanism`, including the canaries."""
        if records != len(self._records):
            raise PrivacyError(
                f"the method must sample from the {len(self._records)} records of the audited "
                f"client, got {records}"
            )
        positions, self._is_summed = self._give_out(super().sample(records))
        self._canary_of_sampled = self._records[positions]
        self._position = 0
        self._rest = torch.zeros(2, self._groups, self._width, dtype=torch.float64)
        return positions

    def add(self, rows_ND: Tensor, groups_N: Tensor, sample: Sample | None = None) -> None:
        """Adds vectors like `GaussianSumMechanism`.

        If privacy protects users, each user has one record here, so that clipping users and
        clipping records is the same.
        """
        rows, _, included = self._look(rows_ND.detach(), groups_N)
        super().add(rows[included], groups_N[included], _select(sample, included))

    def add_products(self, products: Products, sample: Sample | None = None) -> None:
        """Adds products like `GaussianSumMechanism`.

        Records and image canaries are added as products, so that the audit detects a missing clip
        there. They are expanded to full vectors only for the auditor. Vector canaries have no
        factors and are added by `add`.
        """
        written = products.rows()
        groups = torch.zeros(len(written), dtype=torch.int64, device=written.device)
        rows, canary, included = self._look(written, groups)
        replaced = included & self._replaced(canary)
        through = included & ~replaced
        super().add_products(products.part(through), _select(sample, through))
        if replaced.any():
            super().add(rows[replaced], groups[replaced], _select(sample, replaced))

    def _look(self, rows_ND: Tensor, groups_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the vectors of the next sampled records, with the vectors of canaries inserted.

        The method also adds the vectors of the other records to the sums that the auditor knows.

        Returns:
            The vectors, the canary at each record (−1: none), and a mask of the records that enter
            the sum.
        """
        chunk = slice(self._position, self._position + len(rows_ND))
        self._position = chunk.stop
        canary = self._canary_of_sampled[chunk].to(rows_ND.device)
        rows = self._vectors(rows_ND, canary)
        other = canary < 0
        vectors = finite(rows[other])
        both = torch.stack([vectors * shrinking(vectors, self._release.sensitivity), vectors])
        self._rest = self._rest.to(rows.device).index_add(1, groups_N[other], both)
        return rows, canary, self._is_summed[chunk].to(rows_ND.device)

    def release(self) -> Released:
        """Releases the sums like `GaussianSumMechanism`, and then updates the score of every
        canary.

        Raises:
            PrivacyError: if not all sampled records were added to the sum.
        """
        if self._position != len(self._canary_of_sampled):
            raise PrivacyError(
                f"the method must add all {len(self._canary_of_sampled)} sampled records, got "
                f"{self._position}"
            )
        released = super().release()
        y_GD = released.to(self._rest)
        self._unclipped = self._clip_is_missing(y_GD)
        residual = y_GD - self._rest[int(self._unclipped)]
        row = self._release
        for y, members in zip(residual, self._members, strict=True):
            if not len(members):
                continue
            u, columns, orthogonal = self._contributions(members)
            noise_std = row.noise_multiplier * row.sensitivity
            ratios = log_likelihood_ratios(
                y[columns].to(u), u, noise_std, row.sample_rate, orthogonal=orthogonal
            )
            self._canaries.scores[members] += ratios.cpu()
        return released


class VectorSums(AuditedSums):
    """Replaces the vector of each canary, just before the clip, by a random vector that is `LENGTH`
    clips long.

    The sign of the vectors alternates between releases and between rounds, so that noise that is
    used twice cancels.
    """

    @cached_property
    def _rank(self) -> Tensor:
        """The position of each canary within its group, int64 [m]."""
        rank = torch.empty(len(self._canaries), dtype=torch.int64)
        for members in self._members:
            rank[members] = torch.arange(len(members))
        return rank

    def sample(self, records: int) -> Tensor:
        """Samples records like `AuditedSums`, and draws the directions of the canaries."""
        positions = super().sample(records)
        self._sign = 1.0
        if self._width > 1:  # counts have no direction to turn
            self._sign = (-1.0) ** (self._release.round + self.steps_left)
        largest = max(len(members) for members in self._members)
        self._directions = self._canaries.directions(largest, self._width)
        return positions

    def _give_out(self, sampled: Tensor) -> tuple[Tensor, Tensor]:
        return sampled, torch.ones(len(sampled), dtype=torch.bool)

    def _vectors(self, rows_ND: Tensor, canary_N: Tensor) -> Tensor:
        theirs = canary_N >= 0
        vectors = self._sizes(LENGTH) * self._directions.units[self._rank[canary_N[theirs].cpu()]]
        full = vectors.new_zeros(len(vectors), self._width)
        full[:, self._directions.columns] = vectors
        rows = rows_ND.clone()
        rows[theirs] = full.to(rows)
        return rows

    def _replaced(self, canary_N: Tensor) -> Tensor:
        return canary_N >= 0

    def _contributions(self, members: Tensor) -> tuple[Tensor, Tensor | slice, bool]:
        directions = self._directions
        return (
            self._sizes(1.0) * directions.units[: len(members)],
            directions.columns,
            directions.orthogonal,
        )

    def _sizes(self, clips: float) -> float:
        """Returns the length of the vectors, given in clips, with the sign of this release."""
        return clips * self._release.sensitivity * self._sign


class ImageSums(AuditedSums):
    """Uses for each canary the vector that the method computes from the canary's image, including
    network and augmentation.

    Each release is scored either with the clipped vectors or with the unclipped ones, depending on
    which expected sum is closer to the release (`_clip_is_missing`). If the code does not clip,
    scores with clipped vectors do not fit its releases and cannot tell the canaries apart.

    At each release the method computes the vectors of all canaries for the auditor. Only included
    canaries that were sampled enter the sum.
    """

    def _give_out(self, sampled: Tensor) -> tuple[Tensor, Tensor]:
        self._canary_vectors = torch.zeros(len(self._canaries), self._width, dtype=torch.float64)
        drawn = torch.zeros(len(self._records), dtype=torch.bool)
        drawn[sampled] = True
        canary = self._records >= 0
        positions = torch.nonzero(drawn | canary).flatten()
        drawn[canary] &= self._canaries.included
        return positions, drawn[positions]

    def _vectors(self, rows_ND: Tensor, canary_N: Tensor) -> Tensor:
        theirs = canary_N >= 0
        self._canary_vectors = self._canary_vectors.to(rows_ND.device)
        self._canary_vectors[canary_N[theirs]] = finite(rows_ND[theirs])
        return rows_ND

    def _clip_is_missing(self, released_GD: Tensor) -> bool:
        factors = shrinking(self._canary_vectors, self._release.sensitivity)
        rate = self._release.sample_rate
        misfits = []
        for rest, factor in zip(self._rest, (factors, torch.ones_like(factors)), strict=True):
            misfit = 0.0
            for y, record_sum, members in zip(released_GD, rest, self._members, strict=True):
                indices = members.to(factor.device)
                expected = (
                    record_sum + rate / 2 * (factor[indices].T @ self._canary_vectors[indices])[0]
                )
                misfit += float((y - expected).square().sum())
            misfits.append(misfit)
        return misfits[1] < misfits[0]

    def _contributions(self, members: Tensor) -> tuple[Tensor, Tensor | slice, bool]:
        vectors = self._canary_vectors[members.to(self._canary_vectors.device)]
        if not self._unclipped:
            vectors *= shrinking(vectors, self._release.sensitivity)
        return vectors, slice(None), False
