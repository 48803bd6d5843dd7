"""Robust aggregation, which limits the influence of a few malicious clients on the average of the
uploads.

The rules use the values x_1 … x_m of each coordinate, one from each upload of the round:

    median    their median (Yin et al. 2018, arXiv 1803.01498, Definition 1)
    trimmed   the mean without the ⌈β·m⌉ smallest and largest (Definition 2 there)
    clip      w + 1/m Σ_k min(1, τ/‖x_k − w‖)·(x_k − w), around the model w that the clients started
              from: one step of centred clipping (Karimireddy, He and Jaggi 2021, arXiv 2012.10333)
              with the median of the ‖x_k − w‖ as τ, which is our choice

All uploads have equal weight, because a malicious client could otherwise report an n_k that
increases its weight. A method receives m copies of the result instead of the uploads, so its server
step, such as server momentum or control variates, needs no change. With differential privacy,
robust aggregation is post-processing.

The rule `clip` treats all trainable parameters as one vector. Buffers take their median, because an
update of norm τ could make the variances of batch norm negative. Counters are integers and take the
lower median.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters

RULES = ("none", "median", "trimmed", "clip")
FEWEST = 3  # uploads of which one can be outvoted
BLOCK = 2**22  # values that are sorted at a time: a memory bound
M = TypeVar("M", bound=Message)
Tensors = Mapping[str, Tensor]


def counted_uploads(
    uploads: Mapping[int, M], model: Tensors, context: RoundContext
) -> dict[int, M]:
    """Returns the uploads with a weight above zero.

    With robust aggregation, they are replaced as in `robust_uploads`. The result is empty if no
    upload has a weight above zero.
    """
    counted = {k: upload for k, upload in uploads.items() if upload.weight > 0}  # type: ignore[attr-defined]
    if context.robust == "none" or not counted:
        return counted
    return robust_uploads(counted, model, context)


def robust_uploads(uploads: Mapping[int, M], model: Tensors, context: RoundContext) -> dict[int, M]:
    """Replaces every upload by the robust aggregate of all uploads, with weight 1.

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
            named = [{f.name: value} for value in values]
            aggregate |= robust_mean(named, {}, context)
        elif values[0] is not None:
            numbers = torch.tensor(values, dtype=torch.float64)
            aggregate[f.name] = float(middle_mean(list(numbers), _cut(len(values), context)))
    if isinstance(first, ModelParameters):
        aggregate["weight"] = 1.0
    return dict.fromkeys(uploads, replace(first, **aggregate))


def robust_mean(
    models: Sequence[Tensors], center: Tensors, context: RoundContext
) -> dict[str, Tensor]:
    """Computes the robust aggregate of named tensors.

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
        trained = {name for name, _ in context.architecture.named_parameters()}
        mean = _clipped_mean(models, floats & trained if center else floats, center)
    for name in models[0].keys() - mean.keys():
        values = [model[name] for model in models]
        if values[0].is_floating_point():
            mean[name] = middle_mean(values, _cut(count, context))
        else:
            mean[name] = torch.stack(values).sort(dim=0)[0][(count - 1) // 2]
    return {name: mean[name] for name in models[0]}


def _cut(count: int, context: RoundContext) -> int:
    """Returns how many of `count` values are removed at each end.

    For `trimmed` this is ⌈β·count⌉. For all other rules, only the one or two values in the middle
    remain.
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
    """Computes the mean of vectors whose offsets from the center are clipped to the median of their
    norms."""
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
