"""Averages of the clients' models on the server, including robust averages.

`average` computes ACA, the average over the active clients of a round. `update_cache` also computes
OCA, the average over the last model of every client (FedKF, Algorithm 1).

Robust aggregation limits a few malicious clients' influence on the average. The rules combine each
coordinate's values x_1 … x_m, one from each upload of the round:

    median    their median (Yin et al. 2018, arXiv 1803.01498, Definition 1)
    trimmed   the mean without the ⌈β·m⌉ smallest and largest (Definition 2 there)
    clip      w + 1/m Σ_k min(1, τ/‖x_k − w‖)·(x_k − w), one step of centred clipping around the
              clients' start model w (Karimireddy, He and Jaggi 2021, arXiv 2012.10333).
              τ is the median of the ‖x_k − w‖, which is our choice.

All uploads have equal weight, because a malicious client could otherwise report an n_k that
increases its weight. A method receives m copies of the robust aggregate in place of the uploads.
Its server step, such as server momentum or control variates, therefore needs no change. With
differential privacy, robust aggregation is post-processing.

The rule `clip` treats all trainable parameters as one vector. Buffers take their median, because an
update of norm τ could make the variances of batch norm negative. Counters are integers and take the
lower median.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message, ModelParameters, Tensors

RULES = ("none", "median", "trimmed", "clip")
FEWEST = 3  # uploads of which one can be outvoted
BLOCK = 2**22  # values that are sorted at a time: a memory bound
M = TypeVar("M", bound=Message)


def counted_uploads(
    uploads: Mapping[int, M], model: Tensors, context: RoundContext
) -> dict[int, M]:
    """Returns the uploads that have a weight above zero.

    With robust aggregation, `robust_uploads` replaces them. The result may be empty.
    """
    counted = {k: upload for k, upload in uploads.items() if upload.weight > 0}  # type: ignore[attr-defined]
    if context.robust == "none" or not counted:
        return counted
    return robust_uploads(counted, model, context)


def robust_uploads(uploads: Mapping[int, M], model: Tensors, context: RoundContext) -> dict[int, M]:
    """Replaces every upload by a robust aggregate of all uploads. All weights become 1.

    The returned uploads share their tensors.

    Args:
        uploads: at least one upload, all with a weight above zero, with finite values, and with the
            same names and shapes. The engine refuses uploads with NaNs, which cannot be sorted.
        model: the model from which the clients started. The rule `clip` centres the parameters
            around it, and centres all other fields around zero.
        context: the context of the round, which names the rule.
    """
    first = next(iter(uploads.values()))
    aggregate: dict[str, Any] = {}
    for f in fields(first):
        values = [getattr(upload, f.name) for upload in uploads.values()]
        if isinstance(values[0], Mapping):
            center = model if f.name == "parameters" else {}
            aggregate[f.name] = robust_mean(values, center, context)
        elif isinstance(values[0], Tensor):
            aggregate |= robust_mean([{f.name: value} for value in values], {}, context)
        elif values[0] is not None:
            numbers = torch.tensor(values, dtype=torch.float64)
            aggregate[f.name] = float(middle_mean(list(numbers), _cut(len(values), context)))
    if isinstance(first, ModelParameters):
        aggregate["weight"] = 1.0
    return dict.fromkeys(uploads, replace(first, **aggregate))


def robust_mean(
    models: Sequence[Tensors], center: Tensors, context: RoundContext
) -> dict[str, Tensor]:
    """Averages models robustly, so that a few malicious clients have little influence.

    Args:
        models: one mapping for each upload, at least one. All have the same names and finite
            values.
        center: the center of the rule `clip`, by name. If it is empty, the center is zero, and all
            floating-point tensors are clipped.
        context: the context of the round, which names the rule.
    """
    count = len(models)
    mean: dict[str, Tensor] = {}
    if context.robust == "clip":
        floats = {name for name, value in models[0].items() if value.is_floating_point()}
        if center:
            floats.intersection_update(trainable(context))
        mean = _clipped_mean(models, floats, center)
    for name in models[0].keys() - mean.keys():
        values = [model[name] for model in models]
        if values[0].is_floating_point():
            mean[name] = middle_mean(values, _cut(count, context))
        else:
            mean[name] = torch.stack(values).sort(dim=0)[0][(count - 1) // 2]
    return {name: mean[name] for name in models[0]}


def _cut(count: int, context: RoundContext) -> int:
    """Returns how many of `count` sorted values the robust rule drops at each end.

    `trimmed` removes ⌈β·count⌉. All other rules keep only the one or two middle values.
    """
    largest = (count - 1) // 2
    if context.robust != "trimmed":
        return largest
    # rounding may lift a whole number: 0.07·100 is 7.000000000000001
    return min(largest, math.ceil(context.robust_share * count - 1e-9))


def middle_mean(rows: Sequence[Tensor], cut: int) -> Tensor:
    """Computes the mean of each coordinate without the `cut` smallest and `cut` largest values, in
    float64.

    Args:
        rows: one tensor for each upload, all of the same shape.
        cut: number of values to remove at each end, below half the number of tensors.

    >>> middle_mean([torch.tensor([x, -x]) for x in (1.0, 2.0, 3.0, 99.0)], cut=1)
    tensor([ 2.5000, -2.5000])
    """
    count = len(rows)
    flat = [row.reshape(-1) for row in rows]
    mean = torch.empty_like(flat[0])
    width = max(1, BLOCK // count)
    for start in range(0, len(mean), width):
        block = torch.stack([row[start : start + width] for row in flat], dim=1).sort(dim=1)[0]
        mean[start : start + width] = block[:, cut : count - cut].double().mean(dim=1)
    return mean.view_as(rows[0])


def _clipped_mean(
    models: Sequence[Tensors], names: Iterable[str], center: Tensors
) -> dict[str, Tensor]:
    """Computes the mean of vectors by centred clipping.

    Each vector's offset from the center is first clipped to the median norm of all offsets.
    """
    origin = {n: center.get(n, models[0][n] * 0).double() for n in sorted(names)}
    if not origin:
        return {}
    norms = []
    for model in models:
        squares = [(model[name] - w).square().sum() for name, w in origin.items()]
        norms.append(torch.stack(squares).sum().sqrt())
    norms_K = torch.stack(norms)
    bound = middle_mean(norms, (len(models) - 1) // 2)
    scales = (bound / norms_K.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1.0)
    mean: dict[str, Tensor] = {}
    for name, w in origin.items():
        total = torch.zeros_like(w)
        for model, scale in zip(models, scales, strict=True):
            total += (model[name] - w) * (scale / len(models))
        mean[name] = (w + total).to(models[0][name].dtype)
    return mean


@dataclass(frozen=True)
class AveragingState(ServerState):
    """The server's state in methods that average models.

    Args:
        cache: every client's last model, as one tensor [K, …] per parameter. A client that has sent
            no model yet has w⁰ (FedKF, Algorithm 1, line 2). The mapping is empty if the method
            keeps no cache.
        seen: a boolean mask [K] of the clients that have sent a model, or None without a cache.
        overall: the parameters of OCA. The mapping is empty if the method keeps no cache.
        buffers: further tensors that the method keeps between rounds, by parameter. The mapping is
            empty before the first round.
    """

    cache: Tensors = field(default_factory=dict)
    seen: Tensor | None = None
    overall: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)


Averaging = TypeVar("Averaging", bound=AveragingState)


def average(uploads: Mapping[int, ModelParameters], *, uniform: bool = False) -> dict[str, Tensor]:
    """Computes the weighted average of the uploaded models.

    The average is Σ_k weight_k · parameters_k / Σ_k weight_k. The sum is in float64, one upload
    after another in the mapping's order. Integer buffers, such as counters, are taken from the
    first upload.

    Args:
        uploads: the uploads by client index. Their total weight must be above zero.
        uniform: whether all uploads have equal weight instead of their own weights.
    """
    models = [upload.parameters for upload in uploads.values()]
    weights = [upload.weight for upload in uploads.values()]
    if uniform:
        weights = [1.0] * len(models)
    return _weighted_mean(models, weights)


def _weighted_mean(models: Sequence[Tensors], weights: Sequence[float]) -> dict[str, Tensor]:
    total = sum(weights)
    mean: dict[str, Tensor] = {}
    for name, value in models[0].items():
        mean[name] = value
        if value.is_floating_point():
            weighted_sum = torch.zeros_like(value, dtype=torch.float64)
            for model, weight in zip(models, weights, strict=True):
                weighted_sum.add_(model[name], alpha=weight / total)
            mean[name] = weighted_sum.to(value.dtype)
    return mean


def trainable(context: RoundContext) -> list[str]:
    """Returns the names of the model's parameters, without buffers."""
    return list(dict(context.architecture.named_parameters()))


def momentum_step(
    state: Averaging,
    mean: Mapping[str, Tensor],
    context: RoundContext,
    *,
    lr: float,
    momentum: float = 0.0,
) -> Averaging:
    """Moves the server's model towards the mean of the clients' models.

    The step is v ← momentum·v + (w − mean), followed by w ← w − lr·v. Buffers are the mean's. With
    momentum, the state's `buffers` keep v.
    """
    parameters = dict(mean)
    velocity: dict[str, Tensor] = {}
    for name in trainable(context):
        w = state.parameters[name]
        v = w - mean[name]
        if momentum and state.buffers:
            v = momentum * state.buffers[name] + v
        velocity[name] = v
        parameters[name] = w - lr * v
    return replace(state, parameters=parameters, buffers=velocity if momentum else {})


def update_cache(
    state: Averaging,
    previous: AveragingState,
    uploads: Mapping[int, ModelParameters],
    context: RoundContext,
    *,
    all_slots: bool = False,
) -> Averaging:
    """Returns a state with each client's latest model and the average of these models.

    The average is called OCA. OCA weights each client by n_k, or equally with differential privacy,
    where n_k is private. Which clients have taken part is public.

    Args:
        state: the state to which the cache is added.
        previous: the state before the round.
        uploads: the round's uploads. Those with weight 0, from dropped clients or clients without
            examples, are ignored.
        context: the context of the round.
        all_slots: whether OCA averages all K cache entries, including those that still hold w⁰
            (FedKF, Algorithm 1, line 10). Otherwise it averages only clients that have sent a
            model, as in the official code.
    """
    K = context.clients
    if previous.seen is None:
        cache = {n: w[None].repeat(K, *[1] * w.dim()) for n, w in previous.parameters.items()}
        seen = torch.zeros(K, dtype=torch.bool, device=context.device)
    else:
        cache = {name: slots.clone() for name, slots in previous.cache.items()}
        seen = previous.seen.clone()
    for client, upload in uploads.items():
        if upload.weight:
            seen[client] = True
            for name, value in upload.parameters.items():
                cache[name][client] = value
    averaged = range(K) if all_slots else seen.nonzero()[:, 0].tolist()
    models = [{name: slots[k] for name, slots in cache.items()} for k in averaged]
    if context.robust == "none":
        sizes = context.sizes or [1] * K
        overall = _weighted_mean(models, [sizes[k] for k in averaged])
    else:
        overall = robust_mean(models, previous.parameters, context)
    return replace(state, cache=cache, seen=seen, overall=overall)
