"""Synthetic(α, β): devices whose models and inputs differ by known amounts (Li et al., FedProx,
arXiv 1812.06127, Sec. 5.1).

For each of 30 devices k: u_k ~ N(0, α²), W_k ∈ R^{60×10} and b_k ∈ R^{10} with entries ~ N(u_k, 1);
B_k ~ N(0, β²), v_k ∈ R^{60} with entries ~ N(B_k, 1); inputs x ~ N(v_k, Σ) with Σ diagonal, Σ_jj =
j^−1.2; labels argmax(xW_k + b_k). The paper writes N(0, α) and N(0, β); its public generator
(litian96/FedProx, data/synthetic_1_1) passes α and β to NumPy as standard deviations, and so does
this one. A device has ⌊lognormal(4, 2)⌋ + 50 examples, 90 % of them for training, as in the
generator and its files; the paper states 80 %. `synthetic(iid)` has one W and b for all devices,
from N(0, 1), and inputs ~ N(0, Σ). The idea is from Shamir, Srebro and Zhang, 2014.

u_k has the same effect on all ten logits, so α changes no label. The devices' models differ through
the unit variance of W_k and b_k.

The data sets are public and fixed: their seed is 0, whatever a run's seed is. All α and β use the
same random numbers, only scaled, and sizes do not depend on them. The numbers differ from those of
the public files, which come from NumPy's old generator.

Examples are images of one row of 60 pixels. Inputs are rounded to 256 levels in [−R, R], R = four
standard deviations of x_1 over all devices, and clipped there; labels are computed from the rounded
inputs, so that they are exact for the models' inputs. The specification's mean 1/2 and deviation
1/(2R) give models x itself: (pixel/255 − 1/2)·2R. A level is 2R/255 (0.054 for β = 1); the smallest
deviation within a device is 60^−0.6 = 0.086.
"""

from __future__ import annotations

import numpy as np

from fedsynth.data.images import Bytes, Floats, IntArray
from fedsynth.data.registry import DatasetSpec, synthetic_parameters
from fedsynth.data.splits import Split
from fedsynth.seeding import numpy_generator

DEVICES = 30
FEATURES = 60
CLASSES = 10
SEED = 0
DEVIATIONS: Floats = np.arange(1, FEATURES + 1, dtype=np.float64) ** np.float64(-0.6)
"""√Σ_jj."""


def make_synthetic(spec: DatasetSpec) -> tuple[Split, Split]:
    """Generates the training and test splits of a synthetic data set. Its groups are the devices.

    Raises:
        ValueError: `spec` is not the specification of a synthetic data set.
    """
    parameters = synthetic_parameters(spec.name)
    if parameters is None:
        raise ValueError(f"{spec.name} is not of the form synthetic(α,β)")
    alpha, beta = parameters
    images = []
    labels = []
    groups = []
    is_train = []
    for device, n in enumerate(device_sizes().tolist()):
        x, W, b = draw_device(alpha, beta, device, n)
        levels = to_levels(x, spec)
        images.append(levels)
        labels.append((from_levels(levels, spec) @ W + b).argmax(axis=1))
        groups.append(np.full(n, device))
        # a device's examples are independent, so a split by order is a random split
        is_train.append(np.arange(n) < n * 9 // 10)
    pixels = np.concatenate(images).reshape(-1, *spec.image_shape)
    y = np.concatenate(labels).astype(np.int64)
    devices = np.concatenate(groups)
    train = np.concatenate(is_train)
    return (
        Split(pixels[train], y[train], groups=devices[train]),
        Split(pixels[~train], y[~train], groups=devices[~train]),
    )


def device_sizes() -> IntArray:
    """Returns the number of examples of each device, [30]. A few devices have most examples."""
    return numpy_generator(SEED, "synthetic sizes").lognormal(4, 2, DEVICES).astype(np.int64) + 50


def draw_device(
    alpha: float | None, beta: float | None, device: int, n: int
) -> tuple[Floats, Floats, Floats]:
    """Draws the inputs [n, 60], weights W [60, 10] and bias b [10] of one device.

    If α or β is None, all devices have the same W and b, as in `synthetic(iid)`.
    """
    rng = numpy_generator(SEED, "synthetic device", device)
    if alpha is None or beta is None:
        shared = numpy_generator(SEED, "synthetic iid model")
        W = shared.standard_normal((FEATURES, CLASSES))
        b = shared.standard_normal(CLASSES)
        return DEVIATIONS * rng.standard_normal((n, FEATURES)), W, b
    u = alpha * rng.standard_normal()
    B = beta * rng.standard_normal()
    v = B + rng.standard_normal(FEATURES)
    W = u + rng.standard_normal((FEATURES, CLASSES))
    b = u + rng.standard_normal(CLASSES)
    return v + DEVIATIONS * rng.standard_normal((n, FEATURES)), W, b


def to_levels(x: Floats, spec: DatasetSpec) -> Bytes:
    """Rounds inputs to the nearest of 256 pixel values, uint8."""
    return np.rint(255 * (x * spec.std[0] + spec.mean[0])).clip(0, 255).astype(np.uint8)


def from_levels(levels: Bytes, spec: DatasetSpec) -> Floats:
    """Converts pixel values to inputs as `normalise` does, but in double precision."""
    return (levels / 255 - spec.mean[0]) / spec.std[0]
