"""Robust aggregation: replaces the average of uploads, so that a few malicious clients cannot move
it far.

The rules use each coordinate's values x_1 … x_m, one per upload of the round:

    median    their median (Yin et al. 2018, arXiv 1803.01498, Definition 1)
    trimmed   the mean without the ⌈β·m⌉ smallest and largest (Definition 2 there)
    clip      w + 1/m Σ_k min(1, τ/‖x_k − w‖)·(x_k − w), around the model w that the clients started
              from: one step of centred clipping (Karimireddy, He and Jaggi 2021, arXiv 2012.10333)
              with the median of the ‖x_k − w‖ as τ, which is ours

All uploads have equal weight: clients report n_k themselves, so a malicious one could choose its
weight. A method gets m copies of the result in place of the uploads, so its own step (server
momentum, control variates) stays as it is. With differential privacy this is post-processing.

Under `clip` all trainable parameters are one vector; buffers (batch norm's means and variances,
which an update of norm τ could turn negative) take their median. Counters are integers and take
the lower median.
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
    """Returns the uploads that count, with a weight above zero; with robust aggregation as of
    `robust_uploads`. Empty if no upload counts."""
    counted = {k: upload for k, upload in uploads.items() if upload.weight > 0}  # type: ignore[attr-defined]
    if context.robust == "none" or not counted:
        return counted
    return robust_uploads(counted, model, context)


def robust_uploads(uploads: Mapping[int, M], model: Tensors, context: RoundContext) -> dict[int, M]:
    """Returns, for each client, the run's robust aggregate of all uploads with weight 1; the
    tensors are shared.

    Args:
        uploads: those that count, at least one, finite (NaNs cannot be sorted; the engine refuses
            them) and of the same names and shapes.
        model: that the clients started from; other fields are clipped around zero.
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
    """Returns the run's robust aggregate of named tensors.

    Args:
        models: one mapping per upload, finite, at least one; all with the names of the first.
        center: the center of `clip`, by name; {}: zero, and all floating-point tensors are clipped.
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
    """Returns how many of `count` values are cut off at each end; of `trimmed` ⌈β·count⌉, of the
    others all but the one or two in the middle."""
    largest = (count - 1) // 2
    if context.robust != "trimmed":
        return largest
    # rounding may lift a whole number: 0.07·100 is 7.000000000000001
    return min(largest, math.ceil(context.robust_share * count - 1e-9))


def middle_mean(rows: Sequence[Tensor], cut: int) -> Tensor:
    """Returns each coordinate's mean without its `cut` smallest and largest values, in float64.

    Args:
        rows: one tensor per upload, all of the same shape.
        cut: below half of the rows.

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
    """Returns the mean of vectors, with offsets from the center clipped to the median of their
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
