"""FedMGDA+: the server moves in a direction that increases no client's loss (Hu et al. 2022, arXiv
2006.11489).

Each client trains w_k from w_t as in FedAvg. The server computes g_k = w_t − w_k and scales it to
length 1. It finds the weights λ that minimise ‖Σ_k λ_k g_k‖² over the simplex, subject to
|λ_k − λ⁰_k| ≤ ε for each client, where λ⁰ are FedAvg's weights. The step is
w_{t+1} = w_t − η·Σ_k λ_k g_k.

With ε = 1, the step decreases every client's loss to first order, because the direction's inner
product with each g_k is at least its squared length. A client with a short update has as much
influence as one with a long update, so a malicious client gains nothing from a longer one.

The server uses only the models, so with differential privacy its step is post-processing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import minimize
from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters
from fedsynth.methods.shared.aggregation import AveragingState, average, trainable
from fedsynth.methods.shared.local import TrainsLocally
from fedsynth.validation import in_range

Array = npt.NDArray[np.float64]


def min_norm_weights(gram_KK: Array, center_K: Array, radius: float) -> Array:
    """Computes the weights λ for which the weighted sum of the vectors is shortest.

    They minimise λᵀGλ over the simplex, subject to |λ_k − center_k| ≤ radius.

    Args:
        gram_KK: G, the inner products of the vectors.
        center_K: the center of the box. It must be in the simplex.
        radius: ε, half the length of the box.

    >>> min_norm_weights(np.diag([1.0, 3.0]), np.array([0.5, 0.5]), 1.0).round(3)
    array([0.75, 0.25])
    >>> min_norm_weights(np.diag([1.0, 3.0]), np.array([0.5, 0.5]), 0.1).round(3)
    array([0.6, 0.4])
    """
    largest = gram_KK.diagonal().max()
    if radius == 0 or largest == 0:
        return center_K
    G = gram_KK / largest
    solution = minimize(
        lambda weights: weights @ G @ weights,
        center_K,
        jac=lambda weights: 2 * G @ weights,
        method="SLSQP",
        bounds=np.clip([center_K - radius, center_K + radius], 0, 1).T,
        constraints={
            "type": "eq",
            "fun": lambda weights: weights.sum() - 1,
            "jac": lambda weights: np.ones_like(weights),
        },
        options={"ftol": 1e-12, "maxiter": 1000},
    )
    weights: Array = solution.x.clip(0)
    return weights / weights.sum()


@dataclass(frozen=True)
class FedMGDAPlus(TrainsLocally):
    """FedMGDA+: the server weights clients so that its step increases no client's loss.

    The following settings come in addition to those of `TrainsLocally`.

    Args:
        epsilon: ε, the largest difference between a client's weight and FedAvg's. With 0, the
            weights are FedAvg's. With 1, all weights are allowed, as in MGDA. The default of 0.1 is
            that of FLGo.
        server_lr: η, the server's learning rate. If updates are normalised, it bounds the length of
            a step, which is therefore independent of `lr`. 1 is the default of FLGo, too.
        normalise: whether each update is scaled to length 1. Without it, and with ε = 0 and η = 1,
            the method is FedAvg. With ε = 1, it is then the paper's FedMGDA.

    >>> from fedsynth import FedMGDAPlus, ModelSettings, RunSettings, simulate
    >>> method = FedMGDAPlus(local_epochs=2, batch=32, lr=0.1)
    >>> result = simulate(RunSettings(method, rounds=3, model=ModelSettings("linear")))
    >>> result.accuracy > 0.6
    True
    """

    name = "fedmgda-plus"
    summary = "the server weights clients such that its step increases no client's loss"
    reference = "Hu et al. 2022, Federated Learning Meets Multi-Objective Optimization, 2006.11489"
    robust_refusal = "the server compares the clients' updates, which a robust rule makes equal"

    epsilon: float = in_range(0.1, 0, 1)
    server_lr: float = in_range(1.0, 0)
    normalise: bool = True

    def combine(
        self, state: AveragingState, uploads: Mapping[int, ModelParameters], context: RoundContext
    ) -> AveragingState:
        w_t = state.parameters
        gram = torch.zeros(len(uploads), len(uploads), dtype=torch.float64, device=context.device)
        for name in trainable(context):
            g = updates(name, w_t, uploads)
            gram += g @ g.T
        G = gram.cpu().numpy()
        scales = np.ones(len(G))
        if self.normalise:
            lengths = np.sqrt(G.diagonal())
            scales = np.divide(1, lengths, where=lengths > 0, out=np.zeros_like(lengths))
        sizes = np.array([upload.weight for upload in uploads.values()])
        scaled = scales[:, None] * G * scales
        weights = min_norm_weights(scaled, sizes / sizes.sum(), self.epsilon) * scales
        factors_1K = torch.from_numpy(self.server_lr * weights)[None].to(context.device)
        parameters = average(uploads)  # of buffers
        for name in trainable(context):
            step = factors_1K @ updates(name, w_t, uploads)
            parameters[name] = (w_t[name].double() - step.view_as(w_t[name])).to(w_t[name].dtype)
        return replace(state, parameters=parameters)


def updates(name: str, w_t: Mapping[str, Tensor], uploads: Mapping[int, ModelParameters]) -> Tensor:
    """Returns the clients' updates g_k = w_t − w_k of one parameter, [K, size], as float64."""
    models = [upload.parameters[name] for upload in uploads.values()]
    return (w_t[name] - torch.stack(models)).double().reshape(len(models), -1)
