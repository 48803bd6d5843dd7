"""Optional measures of a run, selected by `RunSettings.measures`. They take additional time.

- `client_model_accuracy`: the accuracy of each uploaded model on the common test set, as in
  FedHydra's tables of clients with different architectures.
- `nmi` and `silhouette`: how well the embeddings of the test set form a cluster for each class
  (FedFM). The overview of FedFM names both measures without their settings. Here, k-means has as
  many clusters as classes and keeps the best of ten starts, and the silhouette is that of the
  classes, with Euclidean distances. These are scikit-learn's choices.
- `dissimilarity`: the variance of the clients' gradients (FedProx, Corollary 10).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from fedsynth.data.images import ImageData
from fedsynth.evaluation.accuracy import predict
from fedsynth.seeding import numpy_generator

# The number of starts of k-means, and the number of steps after each start.
STARTS, STEPS = 10, 50
ROWS = 512  # of the matrix of distances that is in memory at a time


def embeddings(model: nn.Module, data: ImageData) -> Tensor:
    """Computes the inputs [N, d] that `model.classifier` receives for all examples."""
    parts: list[Tensor] = []
    layer: nn.Module = model.classifier  # type: ignore[assignment]
    hook = layer.register_forward_pre_hook(lambda layer, inputs: parts.append(inputs[0]))
    try:
        predict(model, data)
    finally:
        hook.remove()
    return torch.cat(parts)


def nmi(embeddings_Nd: Tensor, labels_N: Tensor, seed: int) -> float | None:
    """Computes the normalised mutual information between the classes and the clusters of k-means.

    It is 2·I(Y; K)/(H(Y) + H(K)) for the class Y and the cluster K of an example, in [0, 1].
    Returns None if all examples have the same class.

    Args:
        embeddings_Nd: the embeddings [N, d] of N examples.
        labels_N: the classes [N] of the examples.
        seed: the seed of the starts.
    """
    from scipy.cluster.vq import kmeans2  # these imports take long
    from scipy.stats import entropy

    x, labels = embeddings_Nd.double().cpu().numpy(), labels_N.cpu().numpy()
    classes, rng = len(np.unique(labels)), numpy_generator(seed, "k-means")
    if classes == 1:
        return None
    best, lowest = labels, np.inf
    for _ in range(STARTS):
        with warnings.catch_warnings(action="ignore"):  # about equal vectors and empty clusters
            means, clusters = kmeans2(x, classes, STEPS, minit="++", seed=rng)
        squares = np.square(x - means[clusters]).sum()
        if squares < lowest:
            best, lowest = clusters, squares
    pairs = classes * labels.astype(np.int64) + best
    of_class, of_cluster, of_pair = (
        entropy(np.unique(values, return_counts=True)[1]) for values in (labels, best, pairs)
    )
    return float(2 * (of_class + of_cluster - of_pair) / (of_class + of_cluster))


def silhouette(embeddings_Nd: Tensor, labels_N: Tensor) -> float | None:
    """Computes the mean silhouette of the examples (Rousseeuw 1987), in [−1, 1].

    The silhouette of an example is (b − a)/max(a, b). a is its mean distance from the other
    examples of its class, and b that from the examples of the nearest other class. It is 0 for the
    only example of a class. Returns None if all examples have the same class.
    """
    vectors = embeddings_Nd.double()
    _, class_N, counts = labels_N.unique(return_inverse=True, return_counts=True)
    if len(counts) == 1:
        return None
    members = nn.functional.one_hot(class_N).double()
    total = 0.0
    for rows in torch.arange(len(vectors), device=vectors.device).split(ROWS):
        sums = torch.cdist(vectors[rows], vectors) @ members
        label = class_N[rows, None]
        a = sums.gather(1, label) / (counts[label] - 1).clamp_min(1)
        b = (sums / counts).scatter(1, label, torch.inf).min(dim=1, keepdim=True)[0]
        largest = torch.maximum(a, b)
        defined = (counts[label] > 1) & (largest > 0)
        total += float(torch.where(defined, (b - a) / largest, 0.0).sum())
    return total / len(vectors)


def dissimilarity(gradients: Iterable[tuple[int, Tensor]]) -> float:
    """Computes the variance of the clients' gradients, E_k ‖∇F_k(w) − ∇f(w)‖² (FedProx, Cor. 10).

    The expectation has the weights n_k/n, with which ∇f is the mean of the ∇F_k. FedProx's code has
    these weights only in ∇f, and then averages the squares with equal weights. The code also uses
    at most 200 examples of a client in its LSTM.

    Args:
        gradients: n_k and ∇F_k(w), [d], of at least one client with examples.

    >>> dissimilarity([(1, torch.tensor([0.0, 0.0])), (3, torch.tensor([4.0, 0.0]))])
    3.0
    """
    n, squares = 0, 0.0
    total = torch.zeros((), dtype=torch.float64)
    for size, gradient in gradients:
        g = gradient.double().cpu()
        total = total + size * g
        squares += size * float(g.square().sum())
        n += size
    return max(0.0, squares / n - float((total / n).square().sum()))
