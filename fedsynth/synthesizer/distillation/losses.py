"""Losses for data-free distillation.

The losses are from FedKF (arXiv 2207.10447, Eqs. 2 to 6), DENSE and FedHydra (Eqs. 14 to 19), and
FedGen (diversity).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.models.layers import batch_statistics


def information_entropy_loss(logits_NC: Tensor) -> Tensor:
    """Returns the information-entropy loss, which is small for balanced predictions.

    It is the mean prediction's negative entropy, divided by log C, in [−1, 0]. The value is −1 if
    all classes are predicted equally often. FedKF's Eq. 3 has −IE. The official code divides it by
    log C, so that its weight relative to the other two terms does not depend on the number of
    classes.
    """
    mean = torch.softmax(logits_NC, dim=1).mean(dim=0)
    negative = (mean * mean.clamp_min(torch.finfo(mean.dtype).tiny).log()).sum()
    return negative / math.log(max(2, mean.shape[0]))


def one_hot_loss(logits_NC: Tensor) -> Tensor:
    """Returns the one-hot loss CE(p̂, argmax p̂), averaged over the batch (FedKF, Eq. 2).

    The loss is minimal if each prediction is certain.
    """
    return F.cross_entropy(logits_NC, logits_NC.argmax(dim=1))


def activation_loss(features_ND: Tensor) -> Tensor:
    """Returns the activation loss −mean|f| over the batch and the D features (FedKF, Eq. 4).

    The loss is minimal if features are strong. Eq. 4 prints −‖f‖₁, but the official code takes the
    mean over the features. A sum is D times as strong (84 times for LeNet-5). It outweighs L_IE,
    and the generator then collapses to the few classes with the strongest features.
    """
    return -features_ND.abs().mean()


def generator_loss(
    features_ND: Tensor, logits_NC: Tensor, one_hot_weight: float, activation_weight: float
) -> Tensor:
    """Returns the generator's loss L_G = L_IE + λ1·L_OH + λ2·L_A (FedKF, Eq. 5).

    The inputs are a teacher's features and logits on generated images.
    """
    return (
        information_entropy_loss(logits_NC)
        + one_hot_weight * one_hot_loss(logits_NC)
        + activation_weight * activation_loss(features_ND)
    )


def distillation_loss(teacher_NC: Tensor, student_NC: Tensor) -> Tensor:
    """Returns KL(teacher ‖ student) between softmax predictions, averaged over the batch.

    The inputs are logits (FedKF, Eq. 6).
    """
    return F.kl_div(
        student_NC.log_softmax(1), teacher_NC.log_softmax(1), log_target=True, reduction="batchmean"
    )


def adversarial_loss(ensemble_NC: Tensor, student_NC: Tensor, *, only_disagreement: bool) -> Tensor:
    """Returns the adversarial loss −KL(P ‖ F_g), averaged over the batch (FedHydra, Eq. 15).

    With `only_disagreement`, only images on which the ensemble and the student predict different
    classes contribute (DENSE, Eq. 4).
    """
    log_p = ensemble_NC.log_softmax(dim=1)
    log_q = student_NC.log_softmax(dim=1)
    divergence_N = (log_p.exp() * (log_p - log_q)).sum(dim=1)
    if only_disagreement:
        disagrees = ensemble_NC.argmax(dim=1) != student_NC.argmax(dim=1)
        divergence_N = torch.where(disagrees, divergence_N, 0.0)
    return -divergence_N.mean()


def student_loss(ensemble_NC: Tensor, student_NC: Tensor, hard_weight: float) -> Tensor:
    """Returns the student's loss KL(P ‖ F_g) + β·CE(F_g, argmax P) (FedHydra, Eqs. 17 to 19)."""
    return distillation_loss(ensemble_NC, student_NC) + hard_weight * F.cross_entropy(
        student_NC, ensemble_NC.argmax(dim=1)
    )


def has_statistics(model: nn.Module) -> bool:
    """Returns True if a model has batch-norm layers with running statistics."""
    return any(map(_with_statistics, model.modules()))


def _with_statistics(layer: nn.Module) -> bool:
    return isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is not None


@contextmanager
def batch_norm_matching(models: Sequence[nn.Module]) -> Iterator[Callable[[], Tensor | float]]:
    """Yields a function that computes the models' batch-norm loss.

    Inside the block, the inputs of all batch-norm layers are recorded. The function must be called
    after one pass of each model. It returns

    L_BN = 1/m Σ_k Σ_l ‖μ_l(x) − μ_{k,l}‖ + ‖σ²_l(x) − σ²_{k,l}‖ (DENSE, Eq. 3; FedHydra, Eq. 14)

    where μ_l(x) and σ²_l(x) are the batch's statistics at the layer's input, and μ_{k,l} and
    σ²_{k,l} are the layer's running statistics. Without such layers the loss is zero. FedHydra's
    text states that the layers are the generator's, but they are the client models', as in DENSE.
    """
    terms: list[Tensor] = []

    def add_term(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        mean, variance = batch_statistics(inputs[0])
        mean_error = torch.linalg.vector_norm(mean - layer.running_mean)  # type: ignore[operator]
        variance_error = torch.linalg.vector_norm(variance - layer.running_var)  # type: ignore[operator]
        terms.append(mean_error + variance_error)

    def loss() -> Tensor | float:
        return torch.stack(terms).sum() / len(models) if terms else 0.0

    with ExitStack() as hooks:
        for layer in itertools.chain.from_iterable(model.modules() for model in models):
            if _with_statistics(layer):
                hooks.enter_context(layer.register_forward_pre_hook(add_term))
        yield loss


def diversity_loss(noise_NE: Tensor, embeddings_ND: Tensor) -> Tensor:
    """Returns the diversity loss, which is small if different noise yields different embeddings.

    The loss is exp(−mean over all pairs of ‖ε_i − ε_j‖²/E · ‖G_i − G_j‖₁/D), as in FedGen's public
    code.
    """
    noise_distances = (noise_NE[:, None] - noise_NE[None]).square().mean(dim=2)
    distances = (embeddings_ND[:, None] - embeddings_ND[None]).abs().mean(dim=2)
    return (-(noise_distances * distances).mean()).exp()
