"""Thumbnails: how their moments are released, and how images are rendered from the moments.

A thumbnail v is a downsampled image. u = (√(1−c²)·v/‖v‖, c) has norm ≤ 1 and D coordinates
(`fedsynth.features.scattering`), and e_y is the image's one-hot label. Clients release noisy sums
of √½·[svec(u uᵀ); e_y ⊗ u], which are `Moments` with targets of norm 1. The sums give the class
counts, the class means and a common covariance around the means, of which only directions above a
noise threshold are kept (`PixelMoments`).

Images are rendered from the released moments in three steps, all of which are post-processing:

1. Pictures are drawn from a Gaussian of each class and enlarged. If the feature map deskews images,
   u is that of the deskewed image and its shear, and pictures are sheared by drawn shears.
2. They are finished in a style. If the released mean picture has a bright border, such as that of
   X-rays, `plain` keeps them. A dark border is the background of strokes or objects. `sharpened`
   applies a steeper curve from black to white, as averages are blurred and images are not. `shaded`
   fills a soft silhouette with a random grey level, the picture's shading and a texture of a random
   process, and draws classes with a symmetric mean symmetrically. Of these two, the style is the
   one whose class means of z are more similar to the released ones. `plain` and `shaded` blur the
   moments over neighbouring cells first, because noise is independent between cells and pictures
   are not.
3. More images are rendered than needed. Those that are kept are drawn with the probability that the
   released classifier, without its bias, gives their class. This approximates p(x | y) ∝
   p(x)·p(y | x).

The steps and constants were chosen on held-out training images of Fashion-MNIST and MNIST, and
`plain` on PneumoniaMNIST's validation images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.core.sums import Pool
from fedsynth.features.deskewing import LARGEST_SHEAR, sheared
from fedsynth.features.feature_map import Shape
from fedsynth.features.random_images import random_images
from fedsynth.features.scattering import CONSTANT, SHEAR, cells_of
from fedsynth.methods.statistics.moments import second_and_crossed
from fedsynth.privacy.products import Moments
from fedsynth.synthesizer.condensation.from_statistics import (
    Parts,
    ReleasedStatistics,
    embedded,
    shrunk,
)

# The first and the last image of a class differ from the class mean by these fractions of the
# released standard deviation.
VARIETY = (0.4, 1.0)
# Rendered images for each image that is kept, and for each class when the style is chosen.
CANDIDATES = 1.8
COMPARED = 40
# Images, and directions of z, with which the largest variations of z are found.
SPANNING = 3000
DIRECTIONS = 200

# Ranges from which each image's curve or silhouette is drawn. The steepness is log-uniform.
SHARPENED_STEEPNESS = (12.0, 50.0)
SHARPENED_MIDDLE = (0.35, 0.55)
SHADED_STEEPNESS = (15.0, 60.0)
SHADED_MIDDLE = (0.25, 0.5)
SHADED_LEVEL = (0.3, 1.0)
# A border is bright if half of it has at least this share of the mean picture's white.
BRIGHT = 0.3
# The largest amplitude of an object's texture, and its darkest pixel.
TEXTURE = 0.35
DARKEST = 0.02
# Standard deviations, in cells, of the blur of means and of roots.
MEAN_BLUR = 0.3
ROOT_BLUR = 0.7
# The largest factor by which a root regains the norm that the blur took from it.
REGAINED = 1.5
# A class whose mean has at least this correlation with its mirror image is drawn symmetrically, in
# shares from SYMMETRY to 1.
SYMMETRIC = 0.9
SYMMETRY = 0.4

# A function (moments, images per class, image shape, generator) that renders images.
Style = Callable[["PixelMoments", int, Shape, torch.Generator], Tensor]

# The quantile of an image's pixels that is scaled to white, because thumbnails have lost their
# brightness.
WHITE = 0.98
# The smallest share of all examples that a class is assumed to have, relative to 1/C. A smaller
# released share is noise.
FEWEST = 0.01


def pixel_rows(u_ND: Tensor, labels_N: Tensor, classes: int) -> Moments:
    """Returns each example's vector for the release of thumbnails.

    The vector is √½·[svec(u uᵀ); e_y ⊗ u], of norm at most 1.
    """
    return Moments(u_ND, F.one_hot(labels_N, classes).to(u_ND.dtype), 1.0)


def pixel_width(dimension: int, classes: int) -> int:
    """Returns the number of coordinates of the thumbnails' release."""
    return dimension * (dimension + 1) // 2 + dimension * classes


def class_shares(pool: Pool, dimension: int, classes: int) -> Tensor:
    """Estimates the share of all examples that each class has, [C].

    The released shares are shrunk towards 1/C by their noise. A class whose share does not exceed
    the noise may be absent. It has the largest share, so that a balanced classifier does not favour
    it. If no share exceeds the noise, all classes have the share 1/C.

    Args:
        pool, dimension, classes: as in `PixelMoments.unpacked`.
    """
    _, crossed, noise = second_and_crossed(pool, dimension, classes)
    noise /= CONSTANT
    shares = 1 / classes + shrunk(crossed[:, -1:].T / CONSTANT - 1 / classes, noise).flatten()
    is_present = shares > max(FEWEST / classes, noise)
    if not is_present.any():
        return torch.full_like(shares, 1 / classes)
    shares[~is_present] = shares.max()
    return shares


@dataclass(frozen=True, eq=False)
class PixelMoments:
    """The class means and the common covariance of thumbnails, scaled to unit norm.

    Attributes:
        means: the mean of each class, [C, D − 1], without u's constant. The last coordinate is the
            shear, if the images are deskewed.
        roots: columns that span the variation within classes, [D − 1, k]. roots·rootsᵀ is the
            covariance that all classes share, restricted to eigenvalues above a noise threshold.
        overall: the mean of all examples, [D − 1].
    """

    means: Tensor
    roots: Tensor
    overall: Tensor

    @classmethod
    def unpacked(cls, pool: Pool, dimension: int, classes: int) -> PixelMoments:
        """Extracts the moments from a release that was summed over the clients.

        Args:
            pool: Σ √½·[svec(u uᵀ); e_y ⊗ u] over all clients, with its noise.
            dimension, classes: D, and C.
        """
        second, crossed, noise = second_and_crossed(pool, dimension, classes)
        gram = second[:-1, :-1] / (1 - CONSTANT**2)
        noise /= 1 - CONSTANT**2
        shares = (crossed[:, -1:] / CONSTANT).clamp_min(max(FEWEST / classes, noise))
        weighted = crossed[:, :-1] / math.sqrt(1 - CONSTANT**2)
        means = weighted / shares
        within = gram - (shares * means).T @ means
        values, vectors = torch.linalg.eigh(within)
        # pure noise reaches noise·√(2D), so about a tenth of its directions pass this threshold
        significant = values > max(noise * math.sqrt(dimension), 1e-9)
        roots = vectors[:, significant] * values[significant].sqrt()
        return cls(means, roots, weighted.sum(dim=0))

    def drawn(
        self,
        count: int,
        shape: Shape,
        variety: tuple[float, float],
        generator: torch.Generator,
        *,
        symmetric: bool = False,
    ) -> Tensor:
        """Draws random images of each class from a Gaussian with the moments of the class.

        The images have the shape [C, count, channels, H, W], with pixels in [0, 1].

        Args:
            count: number of images per class.
            shape: (channels, H, W).
            variety: fractions of the standard deviation for a class's first and last image. The
                images between them have evenly spaced fractions. The shear varies fully.
            generator: a CPU generator.
            symmetric: whether images of symmetric classes are made more symmetric.
        """
        classes = len(self.means)
        width = self.roots.shape[1]
        draws = torch.randn(classes, count, width, generator=generator, dtype=torch.float64)
        spread = torch.linspace(*variety, count, dtype=torch.float64).view(1, -1, 1)
        means, roots = self.means.cpu(), self.roots.cpu()
        pictures = means[:, None] + (spread * draws) @ roots.T
        cells = math.prod(cells_of(shape))
        images = enlarged(pictures[..., :cells].flatten(0, 1), shape)
        if symmetric:
            images = self._symmetric(images.view(classes, count, *shape), generator).flatten(0, 1)
        if cells < means.shape[1]:
            shear = (means[:, cells, None] + draws @ roots[cells]).flatten() * LARGEST_SHEAR / SHEAR
            images = sheared(images, -shear.float().clamp(-LARGEST_SHEAR, LARGEST_SHEAR))
        return images.view(classes, count, *shape)

    def smoothed(self, shape: Shape) -> PixelMoments:
        """Returns a copy whose means and roots are blurred over neighbouring cells.

        A root regains the norm that the blur took from it, up to a factor `REGAINED`.
        """
        shears = torch.eye(self.means.shape[1] - math.prod(cells_of(shape)), dtype=torch.float64)
        means = self.means.cpu().double() @ torch.block_diag(_blur(shape, MEAN_BLUR), shears).T
        roots = self.roots.cpu().double()
        blurred = torch.block_diag(_blur(shape, ROOT_BLUR), shears) @ roots
        lost = roots.norm(dim=0) / blurred.norm(dim=0).clamp_min(1e-12)
        return PixelMoments(means, blurred * lost.clamp_max(REGAINED), self.overall)

    def _symmetric(self, images_CICHW: Tensor, generator: torch.Generator) -> Tensor:
        """Makes images of symmetric classes more symmetric.

        Each image is mixed with its mirror image, in a random proportion.
        """
        channels, height, width = images_CICHW.shape[2:]
        cells = cells_of((channels, height, width))
        mean = self.means[:, : math.prod(cells)].unflatten(1, cells)
        flat = mean.flatten(1)
        correlation = (flat * mean.flip(-1).flatten(1)).sum(dim=1) / flat.square().sum(dim=1)
        is_symmetric = (correlation > SYMMETRIC).view(-1, 1, 1, 1, 1)
        share = torch.rand(*images_CICHW.shape[:2], 1, 1, 1, generator=generator)
        share = is_symmetric * (SYMMETRY + (1 - SYMMETRY) * share) / 2
        return (1 - share) * images_CICHW + share * images_CICHW.flip(-1)


def _blur(shape: Shape, deviation: float) -> Tensor:
    """Returns the matrix of a Gaussian blur over the cells of each channel, [D − 1, D − 1]."""
    channels, *sides = cells_of(shape)
    matrix = torch.eye(channels, dtype=torch.float64)
    for side in sides:
        place = torch.arange(side, dtype=torch.float64)
        weight = torch.exp(-(place.view(-1, 1) - place).square() / (2 * deviation**2))
        matrix = torch.kron(matrix, weight / weight.sum(dim=1, keepdim=True))
    return matrix


def enlarged(pictures: Tensor, shape: Shape) -> Tensor:
    """Enlarges thumbnails to images [N, C, H, W], and normalises their brightness.

    The pixels are in [0, 1].
    """
    small = pictures.float().reshape(-1, *cells_of(shape))
    large = F.interpolate(small, size=shape[1:], mode="bicubic", align_corners=False)
    white = large.flatten(1).quantile(WHITE, dim=1).clamp_min(1e-6).view(-1, 1, 1, 1)
    return (large / white).clamp(0, 1)


def rendered(
    moments: PixelMoments,
    statistics: ReleasedStatistics,
    count: int,
    shape: Shape,
    generator: torch.Generator,
) -> Tensor:
    """Renders images of each class from the moments.

    The images have the shape [C, count, channels, H, W], with pixels in [0, 1], on the CPU.

    Args:
        moments: the released moments of thumbnails.
        statistics: the released class means of z, and the classifier.
        count: the number of images of each class.
        shape: the shape (channels, H, W) of an image.
        generator: a CPU generator.
    """
    style = _chosen_style(moments, statistics, shape, generator)
    candidates_CICHW = style(moments, math.ceil(CANDIDATES * count), shape, generator)
    z_CId = _embedded(statistics.compute, candidates_CICHW, statistics.weight.device)
    logits = z_CId @ statistics.weight.T
    chosen = []
    for label, images in enumerate(candidates_CICHW):
        own_class = logits[label].softmax(dim=1)[:, label].cpu().clamp_min(1e-6)
        chosen.append(images[torch.multinomial(own_class, count, generator=generator)])
    return torch.stack(chosen)


def _fitting_styles(moments: PixelMoments, shape: Shape) -> Sequence[Style]:
    """Returns the rendering styles that fit the border of the mean picture of all examples."""
    cells = cells_of(shape)
    # not of the class means: a rare class's is mostly noise
    mean = moments.overall[: math.prod(cells)].view(cells)
    border = torch.cat([mean[:, [0, -1]].flatten(), mean[:, :, [0, -1]].flatten()])
    white = mean.quantile(WHITE)
    if min(cells[1:]) > 2 and white > 0 and border.median() >= BRIGHT * white:
        return [plain_images]
    return [sharpened_images, shaded_images]


def _chosen_style(
    moments: PixelMoments,
    statistics: ReleasedStatistics,
    shape: Shape,
    generator: torch.Generator,
) -> Style:
    """Returns the fitting style that is most similar to the released class means.

    The similarity is the mean cosine similarity between class means of z.
    """

    def similarity(style: Style) -> float:
        images_CICHW = style(moments, COMPARED, shape, generator)
        means_Cd = _embedded(statistics.compute, images_CICHW, statistics.weight.device).mean(dim=1)
        centred_Cd = means_Cd - means_Cd.mean(dim=0)
        return float(F.cosine_similarity(centred_Cd, statistics.class_means, dim=1).mean())

    styles = _fitting_styles(moments, shape)
    return styles[0] if len(styles) == 1 else max(styles, key=similarity)


def principal_directions(
    moments: PixelMoments,
    compute: Parts,
    count: int,
    shape: Shape,
    generator: torch.Generator,
) -> Tensor:
    """Computes the principal directions of rendered images' embeddings z, [d, count].

    The directions are orthonormal, and z is not centred. All fitting styles are rendered, because
    the statistics by which one is chosen are not released yet.

    Args:
        moments: the released moments of thumbnails.
        compute: computes the embeddings z of images (`compute_part`).
        count: the number of directions.
        shape: the shape (channels, H, W) of an image.
        generator: a CPU generator.
    """
    styles = _fitting_styles(moments, shape)
    per_style = math.ceil(SPANNING / len(styles) / len(moments.means))
    images_CICHW = torch.cat(
        [style(moments, per_style, shape, generator) for style in styles], dim=1
    )
    z_Nd = _embedded(compute, images_CICHW, moments.means.device).flatten(0, 1).double()
    _, vectors = torch.linalg.eigh(z_Nd.T @ z_Nd)
    return vectors[:, -count:].float()


def _embedded(compute: Parts, images_CICHW: Tensor, device: torch.device) -> Tensor:
    """Computes the embeddings z of images, [C, I, d]."""
    z_Nd = embedded(compute, images_CICHW.flatten(0, 1).to(device))
    return z_Nd.unflatten(0, images_CICHW.shape[:2])


def plain_images(
    moments: PixelMoments, count: int, shape: Shape, generator: torch.Generator
) -> Tensor:
    """Draws thumbnails from blurred moments, [C, count, channels, H, W]."""
    return moments.smoothed(shape).drawn(count, shape, VARIETY, generator)


def sharpened_images(
    moments: PixelMoments, count: int, shape: Shape, generator: torch.Generator
) -> Tensor:
    """Draws thumbnails and sharpens each by a random curve, [C, count, channels, H, W]."""
    blurred_NCHW = moments.drawn(count, shape, VARIETY, generator).flatten(0, 1)
    steepness, middle = _curves(len(blurred_NCHW), SHARPENED_STEEPNESS, SHARPENED_MIDDLE, generator)
    return sharpened(blurred_NCHW, steepness, middle).view(-1, count, *shape)


def shaded_images(
    moments: PixelMoments, count: int, shape: Shape, generator: torch.Generator
) -> Tensor:
    """Draws images of each class as textured objects, [C, count, channels, H, W]."""
    smooth = moments.smoothed(shape)
    x_NCHW = smooth.drawn(count, shape, VARIETY, generator, symmetric=True).flatten(0, 1)
    number = len(x_NCHW)
    steepness, middle = _curves(number, SHADED_STEEPNESS, SHADED_MIDDLE, generator)
    silhouette = torch.sigmoid(steepness * (x_NCHW - middle))
    level, shading, roughness = torch.rand(3, number, 1, 1, 1, generator=generator)
    level = SHADED_LEVEL[0] + (SHADED_LEVEL[1] - SHADED_LEVEL[0]) * level
    texture = random_images(number, shape, generator)
    texture = texture[torch.randperm(number, generator=generator)]
    deviation, mean = torch.std_mean(texture, dim=(1, 2, 3), correction=0, keepdim=True)
    texture = (texture - mean) / deviation.clamp_min(1e-3)
    filled = level * (1 - shading + shading * x_NCHW) + TEXTURE * roughness**2 * texture
    return (silhouette * filled.clamp(DARKEST, 1)).view(-1, count, *shape)


def _curves(
    count: int,
    steepness: tuple[float, float],
    middle: tuple[float, float],
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Draws a steepness and a midpoint for the curve of each image, [count, 1, 1, 1] each."""
    share = torch.rand(2, count, 1, 1, 1, generator=generator)
    drawn_steepness = steepness[0] * (steepness[1] / steepness[0]) ** share[0]
    return drawn_steepness, middle[0] + (middle[1] - middle[0]) * share[1]


def sharpened(x_NCHW: Tensor, steepness: Tensor, middle: Tensor) -> Tensor:
    """Sharpens blurred images by a steeper curve from black to white.

    The curve is (s(x) − s(0))/(s(1) − s(0)), where s(x) is the logistic function of steepness·(x −
    middle).

    Args:
        x_NCHW: the images, in [0, 1].
        steepness, middle: the curve of all images, or of each image [N, 1, 1, 1].

    >>> x = torch.tensor([0.0, 0.4, 1.0]).view(1, 1, 1, 3)
    >>> sharpened(x, torch.tensor(10.0), torch.tensor(0.4)).flatten()
    tensor([0.0000, 0.4921, 1.0000])
    """
    low = torch.sigmoid(-steepness * middle)
    high = torch.sigmoid(steepness * (1 - middle))
    curved: Tensor = (torch.sigmoid(steepness * (x_NCHW - middle)) - low) / (high - low)
    return curved.clamp(0, 1)
