"""Canaries: records that are in one client's data by a fair coin, and what releases say of each.

The client's series of releases are real (`GaussianSumMechanism`: ledger, masks, clip, sum, noise);
`AuditedSums` adds an auditor who watches them. It is the adversary of the definition of
differential privacy: it knows all settings and networks, all other records and their masks, and
what a canary would contribute; it does not know the canaries' coins and masks, and the noise.

A canary's score is the sum over all releases of the log-likelihood ratio between "in" and "out".
With y the release of the canary's class less what the other records contribute, ū_i the canaries'
clipped contributions, s = σ𝒞, and the other canaries counted as Gaussian noise, of variance
v = q/2·(1 − q/2) for "in, and sampled",

    A_i = s²I + v·Σ_{j≠i} ū_j ū_jᵀ,
    k_i = ū_iᵀ A_i⁻¹ ū_i,    z_i = ū_iᵀ A_i⁻¹ (y − q/2·Σ_{j≠i} ū_j),
    score_i = log(1 − q + q·exp(z_i − k_i/2)),

which is exact for orthogonal canaries. Where a release of images looks as if nothing was clipped,
ū_i is the vector as it came. The lower bound holds for any score; a better score makes it
higher.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fedsynth.privacy.errors import PrivacyError, PrivacySettingError
from fedsynth.privacy.guard import BudgetEnforcer
from fedsynth.privacy.mechanisms import GaussianSumMechanism, Released
from fedsynth.privacy.products import Products
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release
from fedsynth.privacy.units import Sample

VECTORS, IMAGES = "vectors", "images"
KINDS = (VECTORS, IMAGES)
LENGTH = 10.0
"""A vector canary's norm in clips: far above 1, so that nothing but the clip bounds it."""
COLUMNS = 4096
"""Coordinates of a wide release that vector canaries lie in: some of every layer."""


def log_likelihood_ratios(
    y_D: Tensor, contributions_ND: Tensor, noise_std: float, rate: float, *, orthogonal: bool
) -> Tensor:
    """Returns score_i of the module's docstring for one release of one group, float64 [N].

    Among canaries (s²I + v·ū ūᵀ)⁻¹ is all that A_i⁻¹ takes, by the push-through and
    Sherman–Morrison identities.

    Args:
        y_D: the release less what the other records contribute.
        contributions_ND: ū, of all canaries of the group.
        noise_std: s.
        rate: q.
        orthogonal: the contributions are, so that there is nothing to decorrelate.
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
    """Returns the factors [N, 1] of the theorem's clip. The mechanism's own code is not used, so
    that a fault in it is found.
    """
    norms: Tensor = rows_ND.norm(dim=1, keepdim=True)
    return (clip / norms).clamp_max(1.0)


@dataclass(frozen=True)
class Directions:
    """Unit vectors [N, K] on the coordinates `columns` [K] of a release; are they orthogonal?"""

    units: Tensor
    columns: Tensor
    orthogonal: bool


def draw_directions(count: int, width: int, generator: torch.Generator) -> Directions:
    """Returns `count` random unit vectors in `width` dimensions, orthogonal where there is room."""
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
    """The canaries of one audit, and their scores so far.

    Args:
        kind: "vectors" (`VectorSums`) or "images" (`ImageSums`).
        labels: their classes, int64 [m] on the CPU.
        included: the fair coins, bool [m].
        rest: how many other records the client has; they stand before the canaries.
        generator: of the vectors, which are public.
        memory_bytes: what the images' contributions to a release may take.

    Attributes:
        scores: float64 [m]; higher means "more likely in".
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
        """Returns the indices of the canaries that follow the client's records, int64 [n].

        For vectors, these are the included canaries. For images, these are all canaries, since the
        auditor needs the contributions of excluded ones, too; `ImageSums` leaves those out of every
        sum.
        """
        if self.kind == IMAGES:
            return torch.arange(len(self))
        return self.included.nonzero().flatten()

    def members(self, groups: int) -> list[Tensor]:
        """Returns the canaries of each group of a release: of each class, or all of them."""
        if groups == 1:
            return [torch.arange(len(self))]
        return [torch.nonzero(self.labels == group).flatten() for group in range(groups)]

    def directions(self, count: int, width: int) -> Directions:
        """Returns unit vectors for `count` canaries of one group: the same at every release, or fresh
        ones if they must overlap, so that the pairs that overlap change.
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
        """Returns a charged series of the client, watched by the auditor.

        Raises:
            PrivacySettingError: what images contribute to a release takes more than `memory_bytes`.
        """
        if self.kind != IMAGES:
            return VectorSums(release, groups, guard, secret, self)
        needed = 8 * len(self) * (release.dimension // groups)
        if needed > self.memory_bytes:
            raise PrivacySettingError(
                None,
                "canaries",
                f"are too many: the contributions of {len(self)} images to one release need "
                f"{needed / 2**30:.1f} GiB; use fewer canaries, canaries_as=vectors, or more "
                "run.memory_gb",
            )
        return ImageSums(release, groups, guard, secret, self)


def _select(sample: Sample | None, mask: Tensor) -> Sample | None:
    return None if sample is None else sample.select(mask.cpu())


class AuditedSums(GaussianSumMechanism):
    """A client's charged series with canaries among its records, and an auditor of its releases.

    It relies on vectors coming to `add` in the order in which `sample` gave the records out, and
    checks that all of them come.
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
        """Returns the records whose vectors the method computes, of those that were sampled, and
        a mask of those that enter the sum.
        """
        raise NotImplementedError  # abstract

    def _vectors(self, rows_ND: Tensor, canary_N: Tensor) -> Tensor:
        """Returns the rows to be clipped and summed; `canary_N` has the canaries, −1: none."""
        raise NotImplementedError  # abstract

    def _replaced(self, canary_N: Tensor) -> Tensor:
        """Returns a mask of the records whose vectors `_vectors` has replaced, bool [N]."""
        return torch.zeros_like(canary_N, dtype=torch.bool)

    def _contributions(self, members: Tensor) -> tuple[Tensor, Tensor | slice, bool]:
        """Returns ū [N, K] of some canaries, their coordinates, and whether ū are orthogonal."""
        raise NotImplementedError  # abstract

    def _clip_is_missing(self, released_GD: Tensor) -> bool:
        """Returns True if the release is closer to the expected sum of unclipped vectors than to
        that of clipped ones. It uses only the release, so the bound holds for either result."""
        return False

    def sample(self, records: int) -> Tensor:
        """Samples records like `GaussianSumMechanism`, together with the canaries."""
        if records != len(self._records):
            raise PrivacyError(
                f"an audit of {len(self._records)} records was asked to sample {records}"
            )
        positions, self._is_summed = self._give_out(super().sample(records))
        self._canary_of_sampled = self._records[positions]
        self._position = 0
        self._rest = torch.zeros(2, self._groups, self._width, dtype=torch.float64)
        return positions

    def add(self, rows_ND: Tensor, groups_N: Tensor, sample: Sample | None = None) -> None:
        """Adds vectors like `GaussianSumMechanism`. If users are the units, each has one record here, so
        that clipping users and clipping records is the same."""
        rows, _, included = self._look(rows_ND.detach(), groups_N)
        super().add(rows[included], groups_N[included], _select(sample, included))

    def add_products(self, products: Products, sample: Sample | None = None) -> None:
        """Adds products like `GaussianSumMechanism`.

        Records and image canaries are added as products, so that the audit detects a missing clip
        there; they are expanded only for the auditor. Vector canaries have no factors and are
        added by `add`.
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
        """Returns the next sampled records' vectors, with those of canaries in their place, the
        canary at each (−1: none), and a mask of those that enter the sum; adds the other records'
        vectors to what the auditor knows.
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
        """Releases the sums like `GaussianSumMechanism`, then scores every canary.

        Raises:
            PrivacyError: not all sampled records came to the sum.
        """
        if self._position != len(self._canary_of_sampled):
            raise PrivacyError(
                f"only {self._position} of {len(self._canary_of_sampled)} sampled records are in the sum"
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
    """A canary's vector is replaced, just before the clip, by one of its own, `LENGTH` clips long.

    The vectors turn their sign from release to release and from round to round, so that noise that
    is used twice cancels.
    """

    @cached_property
    def _rank(self) -> Tensor:
        """The number of each canary [m] within its group."""
        rank = torch.empty(len(self._canaries), dtype=torch.int64)
        for members in self._members:
            rank[members] = torch.arange(len(members))
        return rank

    def sample(self, records: int) -> Tensor:
        """Samples records like `AuditedSums`, and draws the canaries' directions."""
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
        """Returns a length with this release's sign."""
        return clips * self._release.sensitivity * self._sign


class ImageSums(AuditedSums):
    """A canary's vector is what the method makes of its image: network, augmentation and all.

    Each release is scored with the clipped vectors, or with the vectors as they came, whichever
    sum it is nearer to (`_clip_is_missing`): scores with clipped vectors do not fit the releases
    of code that does not clip, and cannot tell its canaries apart.

    At each release the method makes vectors of all canaries, for the auditor; only those that are
    in and in the sample enter the sum.
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
