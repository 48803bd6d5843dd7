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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters
from fedsynth.errors import DivergedError

RULES = ("none", "median", "trimmed", "clip")
FEWEST = 3  # uploads of which one can be outvoted
BLOCK = 2**22  # values that are sorted at a time: a memory bound
Rows = Sequence[Tensor]
"""One tensor per upload, all of the same shape."""
Sent = TypeVar("Sent", bound=Message)


def counted_uploads(
    uploads: Mapping[int, Sent], before: Mapping[str, Tensor], context: RoundContext
) -> Mapping[int, Sent]:
    """Returns the uploads that count, with a weight above zero; with robust aggregation as of
    `robust_uploads`. Empty if no upload counts."""
    counted = {client: u for client, u in uploads.items() if u.weight > 0}  # type: ignore[attr-defined]
    if context.robust == "none" or not counted:
        return counted
    return robust_uploads(counted, before, context)


def robust_uploads(
    uploads: Mapping[int, Sent], before: Mapping[str, Tensor], context: RoundContext
) -> dict[int, Sent]:
    """Returns, for each client, the run's robust aggregate of all uploads with weight 1; the
    tensors are shared.

    Args:
        uploads: those that count, at least one, finite and of the same names and shapes.
        before: the model that the clients started from; other fields are clipped around zero.

    Raises:
        DivergedError: an upload is not finite; NaNs cannot be sorted.
    """
    sent = list(uploads.values())
    for client, upload in uploads.items():
        _check_finite(client, upload, context)
    made: dict[str, Any] = {}
    for f in fields(sent[0]):
        values = [getattr(upload, f.name) for upload in sent]
        if isinstance(values[0], Mapping):
            center = before if f.name == "parameters" else {}
            made[f.name] = robust_mean(values, center, context)
        elif isinstance(values[0], Tensor):
            made[f.name] = robust_mean([{"": value} for value in values], {}, context)[""]
        elif values[0] is not None:
            made[f.name] = _robust_number(values, context)
    if isinstance(sent[0], ModelParameters):
        made["weight"] = 1.0
    one = replace(sent[0], **made)
    return dict.fromkeys(uploads, one)


def robust_mean(
    each: Sequence[Mapping[str, Tensor]], center: Mapping[str, Tensor], context: RoundContext
) -> dict[str, Tensor]:
    """Returns the run's robust aggregate of named tensors.

    Args:
        each: one mapping per upload, finite, at least one; all with the names of the first.
        center: the center of `clip`, by name; zero for names that it lacks.
    """
    rule = _sorted_rule(len(each), context)
    moved: set[str] = set()
    if context.robust == "clip":
        floats = {name for name, value in each[0].items() if value.is_floating_point()}
        trained = {name for name, _ in context.architecture.named_parameters()}
        moved = floats & trained if center else floats
    clipped = _clipped_mean([{n: one[n] for n in sorted(moved)} for one in each], center)
    made: dict[str, Tensor] = {}
    for name, value in each[0].items():
        if name in moved:
            made[name] = clipped[name]
        elif value.is_floating_point():
            made[name] = rule([one[name] for one in each])
        else:
            lower = (len(each) - 1) // 2
            made[name] = torch.stack([one[name] for one in each]).sort(dim=0)[0][lower]
    return made


def _sorted_rule(count: int, context: RoundContext) -> Callable[[Rows], Tensor]:
    """Returns the rule that averages each coordinate's middle values: one or two, or for `trimmed`
    all that are left."""
    most = (count - 1) // 2
    cut = most
    if context.robust == "trimmed":
        # rounding may lift a whole number: 0.07·100 is 7.000000000000001
        cut = min(most, math.ceil(context.robust_share * count - 1e-9))
    return lambda rows: middle_mean(rows, cut)


def middle_mean(rows: Rows, cut: int) -> Tensor:
    """Returns each coordinate's mean without its `cut` smallest and largest values, in float64.

    >>> middle_mean([torch.tensor([x, -x]) for x in (1.0, 2.0, 3.0, 99.0)], cut=1)
    tensor([ 2.5000, -2.5000])
    """
    count = len(rows)
    flat = [row.reshape(-1) for row in rows]
    made = torch.empty_like(flat[0])
    width = max(1, BLOCK // count)
    for start in range(0, len(made), width):
        block = torch.stack([row[start : start + width] for row in flat], dim=1).sort(dim=1)[0]
        made[start : start + width] = block[:, cut : count - cut].double().mean(dim=1)
    return made.view_as(rows[0])


def _clipped_mean(
    each: Sequence[Mapping[str, Tensor]], center: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the mean of vectors, with offsets from the center clipped to the median of their
    norms."""
    if not each[0]:
        return {}
    around = {name: center.get(name, value * 0).double() for name, value in each[0].items()}
    norms = []
    for one in each:
        squares = [(one[name] - w).square().sum() for name, w in around.items()]
        norms.append(torch.stack(squares).sum().sqrt())
    norms_K = torch.stack(norms)
    bound = middle_mean(list(norms_K), (len(each) - 1) // 2)
    scales = (bound / norms_K.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1.0)
    made: dict[str, Tensor] = {}
    for name, w in around.items():
        mean = torch.zeros_like(w)
        for one, scale in zip(each, scales, strict=True):
            mean += (one[name] - w) * (scale / len(each))
        made[name] = (w + mean).to(each[0][name].dtype)
    return made


def _robust_number(values: Sequence[float], context: RoundContext) -> float:
    """Aggregates one number per upload; `clip` uses the median here too."""
    rows = [torch.tensor(float(value), dtype=torch.float64) for value in values]
    return float(_sorted_rule(len(rows), context)(rows))


def _check_finite(client: int, upload: Message, context: RoundContext) -> None:
    for name, value in upload.numbers():
        if not bool(torch.isfinite(value).all()):
            raise DivergedError(
                f"round {context.round}: {name} of client {client} is not finite, but robust "
                f"aggregation by {context.robust} requires finite numbers"
            )
