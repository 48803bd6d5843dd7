"""DP-SGD on a client's model: Opacus' per-example gradients, our sampler, clipping, secret noise
and public divisor.

Opacus' own optimiser and loader are not used, for four reasons: its loader takes the sampling rate
and the divisor from len(dataset), both private; its noise comes from torch's generator; a
non-finite gradient of one example would poison the batch's sum; and it clips in float32. Its
`GradSampleModule` does what it does best, the per-example gradients of any architecture, and the
sum goes through `GaussianSums` like every other private statistic.

Adjacency: add/remove one example. Sampling: Poisson at the public rate q, one mask a step.
Composition: the ledger's row holds all steps of the round.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedsynth.privacy.errors import ForbiddenLayerError, PrivacyError
from fedsynth.privacy.mechanisms import GaussianSums
from fedsynth.privacy.passes import Note, padded, pass_length, values_of_each
from fedsynth.privacy.products import clipped_product
from fedsynth.privacy.units import Units

Penalty = Callable[[nn.Module], Tensor]
"""(the network in training) -> a scalar whose gradient is added to a step's; it must not see
private data."""

ExampleLoss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(network, images [N, C, H, W], labels [N]) -> the loss of each example [N], which depends on that
example alone."""

Factors = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(inputs [N, …], labels [N]) -> l [N, P] and r [N, Q]: the gradient of each example's
cross-entropy is l ⊗ r, row by row of the model's only parameter [P, Q], and depends on that example
alone."""

PHYSICAL_BATCH = 128
"""Per-example gradients held at a time, at most."""
PHYSICAL_BYTES = 2**30
"""Bytes that they take, at most."""

PASS_START = 2**18
"""What a pass costs by itself, in units of a row's parameters (Opacus' hooks and bookkeeping,
measured on a CPU for ConvNets)."""

FACTOR_BATCH = 512
"""Rows held at a time in passes whose gradients come as factors."""
FACTOR_START = 64.0
"""What such a pass costs by itself, in rows (the product of the factors is written out once a
pass)."""


class Optimiser(Protocol):
    """How a step moves weights [..., P] by a gradient of the same shape.

    Leading axes are networks trained side by side: what happens to one depends on itself alone.
    DP-SGD shows it released gradients alone, so that whatever it does is post-processing.
    """

    def init(self, w: Tensor) -> tuple[Tensor, ...]:
        """What is remembered between steps; all tensors have the leading axes of `w`."""

    def update(self, w: Tensor, gradient: Tensor, state: tuple[Tensor, ...]) -> None:
        """Moves `w` and `state` in place, and not `gradient`; waits for nothing on the device."""


@dataclass(frozen=True)
class DpSgdSettings:
    """Local training.

    Args:
        optimiser: what is done with each step's noisy mean gradient.
        expected_batch_size: q times the public nominal size, the divisor of every step.
    """

    optimiser: Optimiser
    expected_batch_size: float


def refuse_batch_norm(model: nn.Module) -> None:
    """Refuses layers that mix the examples of a batch.

    Raises:
        ForbiddenLayerError: names the layer, and what to use in its place.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise ForbiddenLayerError(
                f"layer {name!r} is {type(layer).__name__}: batch norm mixes the examples of a batch, "
                "so one example's influence cannot be bounded; use group or instance norm "
                "(model.norm=group; for a model of your own, fedsynth.privacy.dpsgd.group_norm_twin "
                "makes the same network with group norm)"
            )


def group_norm_twin(model: nn.Module) -> nn.Module:
    """A copy whose batch norms are group norms (by Opacus' ModuleValidator); all other weights are
    the model's.

    Raises:
        ForbiddenLayerError: something else in it cannot be trained by DP-SGD.
    """
    from opacus.validators import ModuleValidator
    from opacus.validators.errors import UnsupportedModuleError

    try:
        twin: nn.Module = ModuleValidator.fix_and_validate(model)
    except UnsupportedModuleError as error:
        raise ForbiddenLayerError(f"no twin for DP-SGD: {str(error).splitlines()[0]}") from None
    return twin


def check_model(model: nn.Module) -> None:
    """Refuses what DP-SGD cannot train: batch norm, dropout, and buffers, which would be sent
    without noise.

    Raises:
        ForbiddenLayerError: names the layer or buffer.
    """
    refuse_batch_norm(model)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            raise ForbiddenLayerError(
                f"layer {name!r} is {type(layer).__name__}: its masks go by an example's place in "
                "the batch, so that one example more "
                "would change others' gradients; leave it out"
            )
    buffers = [name for name, _ in model.named_buffers()]
    if buffers:
        raise ForbiddenLayerError(
            f"buffer {buffers[0]!r} would be uploaded with the model, but no mechanism protects "
            "what it gathers from data"
        )


def dp_sgd(
    model: nn.Module,
    images: Callable[[Tensor], Tensor],
    labels_N: Tensor,
    series: GaussianSums,
    steps: int,
    settings: DpSgdSettings,
    penalty: Penalty | None = None,
    loss: ExampleLoss | None = None,
    units: Units | None = None,
    factors: Factors | None = None,
    note: Note = lambda text: None,
) -> None:
    """Trains `model` in place for `steps` private steps.

    Args:
        images: normalised images [M, C, H, W] of the records with the given indices [M]. (All
            passes through the network have one public length, `fedsynth.privacy.passes`: they are
            filled up here.)
        labels_N: labels of all the client's records.
        series: charged for `steps` releases of one group with as many coordinates as the model has
            parameters.
        penalty: its gradient at the iterate is added to the noisy mean gradient. The iterate is
            computed from earlier releases, so this is post-processing and costs nothing, as long as
            the penalty depends on released and public values alone.
        loss: of each example, in place of its cross-entropy; clipped as that is. It may look at
            released models, and at no other example.
        units: of the client's records; None: each is one. Where users are the units, a user's mean
            gradient is clipped, and `expected_batch_size` counts users.
        factors: of a linear model's gradients, at the model's present weights: they are then
            clipped and summed without being written out, to the same sums but for rounding; where
            users are the units, they are. For its cross-entropy alone.
        note: receives why records contribute nothing, if the model or the loss raises on them.
    """
    from opacus.grad_sample import GradSampleModule

    check_model(model)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    parameters = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([p.detach().flatten() for p in parameters])
    state = settings.optimiser.init(flat)
    size = len(flat)
    members = Units(len(labels_N)) if units is None else units
    by_factors = factors if loss is None else None
    short = by_factors is not None and not members.grouped
    length = pass_length(settings.expected_batch_size, PASS_START / size, rows_at_once(model))
    if short:
        length = pass_length(settings.expected_batch_size, FACTOR_START, FACTOR_BATCH)

    def gradients(x: Tensor, y: Tensor) -> Tensor:
        return _per_example_gradients(model, parameters, x, y, loss or cross_entropies)

    try:
        for _ in range(steps):
            for sample in members.sample(series).split(length):
                part = sample.records.to(labels_N.device, non_blocking=True)
                x = padded(images(part), length)
                y = padded(labels_N[part], length)
                if by_factors is not None and short:
                    with torch.no_grad():
                        made = clipped_product(*by_factors(x, y), series.sensitivity)
                    series.add_products(made.part(slice(len(part))), sample)
                    continue
                if by_factors is not None:
                    rows = _written_out(by_factors, x, y)
                else:
                    rows = values_of_each(gradients, (x, y), note)
                one_group = torch.zeros(len(part), dtype=torch.int64, device=rows.device)
                series.add(rows[: len(part)], one_group, sample)
            gradient = (series.release()[0] / settings.expected_batch_size).to(flat)
            if penalty is not None:
                gradient += _public_gradient(wrapped, model, parameters, penalty)
            settings.optimiser.update(flat, gradient, state)
            _write(flat, parameters)
    finally:
        wrapped.to_standard_module()


def _write(flat_P: Tensor, parameters: list[nn.Parameter]) -> None:
    """Copies the vector into the parameters."""
    parts = flat_P.split([p.numel() for p in parameters])
    with torch.no_grad():
        for p, part in zip(parameters, parts, strict=True):
            p.copy_(part.view_as(p))


def _public_gradient(
    wrapped: Any, model: nn.Module, parameters: list[nn.Parameter], penalty: Penalty
) -> Tensor:
    """The penalty's gradient [P], without Opacus' hooks, which would record it as an example's."""
    wrapped.disable_hooks()
    try:
        with _quiet_hooks():
            gradients = torch.autograd.grad(
                penalty(model), parameters, allow_unused=True, materialize_grads=True
            )
    finally:
        wrapped.enable_hooks()
    return torch.cat([gradient.flatten() for gradient in gradients])


@contextmanager
def _in_plain_order(model: nn.Module) -> Iterator[None]:
    """Convolutions see inputs in the plain order of memory: Opacus unfolds them by the strides of
    such ones, and is silently wrong with channels-last ones (a network's own, or those of
    `models/layout.py`)."""

    def plain(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x.reshape(-1).view(x.shape) for x in inputs)

    convolutions = nn.Conv1d | nn.Conv2d | nn.Conv3d
    handles = [
        layer.register_forward_pre_hook(plain)
        for layer in model.modules()
        if isinstance(layer, convolutions)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _quiet_hooks() -> Iterator[None]:
    """Opacus' hooks warn that images need no gradient, which is so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        yield


def cross_entropies(network: nn.Module, x_NCHW: Tensor, labels_N: Tensor) -> Tensor:
    """The cross-entropy of each example [N]."""
    return nn.functional.cross_entropy(network(x_NCHW), labels_N, reduction="none")


def _written_out(factors: Factors, x: Tensor, labels_N: Tensor) -> Tensor:
    """l ⊗ r of each example, [N, P·Q]."""
    with torch.no_grad():
        left, right = factors(x, labels_N)
        return (left[:, :, None] * right[:, None, :]).flatten(1)


def rows_at_once(network: nn.Module) -> int:
    """Examples whose gradients are held at a time, by layer and joined."""
    size = sum(p.numel() for p in network.parameters())
    return max(1, min(PHYSICAL_BATCH, PHYSICAL_BYTES // (2 * 4 * max(1, size))))


def example_gradients(network: nn.Module, x_NCHW: Tensor, labels_N: Tensor) -> Tensor:
    """The gradient of each example's cross-entropy [N, P], as a step computes them, un-noised: for
    audits and checks on public images. The network stays as it is."""
    from opacus.grad_sample import GradSampleModule

    own = copy.deepcopy(network).train().requires_grad_(True)
    wrapped = GradSampleModule(own, loss_reduction="sum")
    with torch.enable_grad():
        rows = _per_example_gradients(
            own, list(own.parameters()), x_NCHW, labels_N, cross_entropies
        )
    wrapped.to_standard_module()
    return rows


def check_example_gradients(model: nn.Module, x_NCHW: Tensor) -> None:
    """Refuses a model whose gradients of single examples cannot be computed, before anything is
    charged for them.

    Args:
        model: any, for example a custom one.
        x_NCHW: public images.

    Raises:
        ForbiddenLayerError: it has parameters that are frozen or unused, or layers that Opacus does
            not know.
    """
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if frozen:
        raise ForbiddenLayerError(f"parameter {frozen[0]!r} is frozen: DP-SGD trains all of them")
    labels = torch.zeros(len(x_NCHW), dtype=torch.int64, device=x_NCHW.device)
    try:
        example_gradients(model, x_NCHW, labels)
    except ForbiddenLayerError:
        raise
    except Exception as error:  # of Opacus or of the model
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ForbiddenLayerError(
            f"the model's gradients of single examples cannot be computed: {lines[0]}"
        ) from error


def _per_example_gradients(
    model: nn.Module,
    parameters: list[nn.Parameter],
    x_NCHW: Tensor,
    labels_N: Tensor,
    loss: ExampleLoss,
) -> Tensor:
    """[N, P]: the gradient of each example's loss; Opacus' hooks, which sit on the model's own
    layers, fill `grad_sample`, which is emptied."""
    _forget_passes(model)
    with _quiet_hooks(), _in_plain_order(model):
        each = loss(model, x_NCHW, labels_N)
        if each.shape != (len(x_NCHW),):  # else a request of odd shapes could mix the examples
            raise PrivacyError(
                f"a loss of each example must have shape [{len(x_NCHW)}], got {list(each.shape)}"
            )
        each.sum().backward()
    missing = {id(p) for p in parameters if p.grad_sample is None}  # type: ignore[attr-defined]
    if missing:
        name = next(name for name, p in model.named_parameters() if id(p) in missing)
        raise ForbiddenLayerError(
            f"parameter {name!r} has no gradients of single examples: no layer uses it, or another "
            "one than its own"
        )
    of_each = [p.grad_sample.flatten(1) for p in parameters]  # type: ignore[attr-defined]
    rows = torch.cat(of_each, dim=1)
    _forget_passes(model)
    return rows


def _forget_passes(model: nn.Module) -> None:
    """Removes what Opacus' hooks keep of a pass, also of one that failed half-way."""
    for layer in model.modules():
        for name in ("activations", "max_batch_len"):
            layer.__dict__.pop(name, None)
    for p in model.parameters():
        p.grad_sample = p.grad = None  # type: ignore[attr-defined]
        p.__dict__.pop("_current_grad_sample", None)
        p._forward_counter = 0  # type: ignore[attr-defined]
