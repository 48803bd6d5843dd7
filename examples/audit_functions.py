"""Functions that add noise to a sum of clipped vectors: two correct ones, and two that are not.

    fedsynth privacy audit --function examples/audit_functions.py:gaussian_filter --dp-sigma 1
    fedsynth privacy audit --function examples/audit_functions.py:opacus_step --dp-sigma 1

Each claims a noise multiplier of 1 at a clip of 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float64]
CLIP, SIGMA = 1.0, 1.0
RNG = np.random.default_rng()


def clipped(vectors: Array) -> Array:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors * np.minimum(1, CLIP / np.maximum(norms, 1e-12))


def gaussian_filter(vectors: Array) -> Array:
    """Adds noise for the clip to the sum. This is correct."""
    return clipped(vectors).sum(axis=0) + SIGMA * CLIP * RNG.normal(size=vectors.shape[1])


def noisy_mean(vectors: Array) -> Array:
    """Divides by the private number of records, as if this number were the same without one."""
    noise = SIGMA * CLIP / len(vectors) * RNG.normal(size=vectors.shape[1])
    return clipped(vectors).mean(axis=0) + noise


def small_sensitivity(vectors: Array) -> Array:
    """Computes its noise from a sensitivity that is not the clip."""
    sensitivity = 1e-4
    return clipped(vectors).sum(axis=0) + SIGMA * sensitivity * RNG.normal(size=vectors.shape[1])


def opacus_step(vectors: Array) -> Array:
    """Clips and sums the gradients of one step with Opacus. This is correct."""
    from opacus.optimizers import DPOptimizer

    weights: Any = torch.nn.Parameter(torch.zeros(vectors.shape[1], dtype=torch.float64))
    optimizer = DPOptimizer(
        torch.optim.SGD([weights], lr=1.0),
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        expected_batch_size=1,
        loss_reduction="sum",
    )
    weights.grad_sample = torch.from_numpy(vectors)
    optimizer.step()
    return -weights.detach().numpy()
