"""DP-SGD on a client's model: Opacus' per-example gradients, our sampler, clipping, secret noise
and public divisor.

Opacus' own optimiser and loader are not used, for four reasons: its loader takes the sampling rate
and the divisor from len(dataset), both private; its noise comes from torch's generator; a
non-finite gradient of one example would poison the batch's sum; and it clips in float32. Only its
`GradSampleModule` is used, for the per-example gradients of any architecture; the sum goes through
`GaussianSumMechanism` like every other private statistic.

Adjacency: add/remove one example. Sampling: Poisson at the public rate q, one mask per step.
Composition: the ledger row holds all steps of the round.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedsynth.privacy.errors import ForbiddenLayerError, PrivacyError
from fedsynth.privacy.mechanisms import GaussianSumMechanism
from fedsynth.privacy.passes import Note, padded, pass_length, values_of_each
from fedsynth.privacy.products import clipped_product
from fedsynth.privacy.units import Units

Penalty = Callable[[nn.Module], Tensor]
"""(the network in training) -> a scalar whose gradient is added to a step's; it must not see
private data."""

BeforeStep = Callable[[nn.Module], None]
"""Called with the network in training before each step; it must not see private data, nor change the
network."""

ExampleLoss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(network, images [N, C, H, W], labels [N]) -> the loss of each example [N], which depends only on
that example."""

Factors = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(inputs [N, …], labels [N]) -> l [N, P] and r [N, Q]: the gradient of each example's
cross-entropy is l ⊗ r, in row-major order of the model's only parameter [P, Q], and depends only on
that example."""

PHYSICAL_BATCH = 128
"""The maximum number of per-example gradients held at a time."""
PHYSICAL_BYTES = 2**30
"""The maximum memory of these gradients, in bytes."""

PASS_START = 2**18
"""The fixed cost of a pass, in parameters of a row (Opacus' hooks and bookkeeping, measured on a
CPU for ConvNets)."""

FACTOR_BATCH = 512
"""The number of rows held at a time in passes whose gradients are given as factors."""
FACTOR_START = 64.0
"""The fixed cost of such a pass, in rows (each pass writes out the product of the factors once)."""


class Optimiser(Protocol):
    """An optimiser, which updates weights [..., P] with a gradient of the same shape.

    Leading axes are networks that are trained in parallel; each depends only on itself. In DP-SGD
    the optimiser receives only released gradients, so everything it does is post-processing.
    """

    def init(self, w: Tensor) -> tuple[Tensor, ...]:
        """Returns the initial state; all its tensors have the leading axes of `w`."""

    def update(self, w: Tensor, gradient: Tensor, state: tuple[Tensor, ...]) -> None:
        """Updates `w` and `state` in place, but not `gradient`; never waits for the device."""


@dataclass(frozen=True)
class DpSgdSettings:
    """The settings of local training with DP-SGD.

    Args:
        optimiser: the optimiser, which receives each step's noisy mean gradient.
        expected_batch_size: q times the public nominal size; every step divides by it.
    """

    optimiser: Optimiser
    expected_batch_size: float


def refuse_batch_norm(model: nn.Module) -> None:
    """Refuses layers that mix the examples of a batch.

    Raises:
        ForbiddenLayerError: names the layer, and a replacement.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise ForbiddenLayerError(
                f"layer {name!r} is {type(layer).__name__}: batch norm mixes the examples of "
                "a batch, so the influence of one example cannot be bounded: use group norm "
                "(model.norm=group, or fedsynth.privacy.dpsgd.group_norm_twin for a custom model)"
            )


def group_norm_twin(model: nn.Module) -> nn.Module:
    """Returns a copy with group norms in place of batch norms (by Opacus' ModuleValidator) and
    otherwise the model's weights.

    Raises:
        ForbiddenLayerError: DP-SGD cannot train another part of the model.
    """
    from opacus.validators import ModuleValidator
    from opacus.validators.errors import UnsupportedModuleError

    try:
        twin: nn.Module = ModuleValidator.fix_and_validate(model)
    except UnsupportedModuleError as error:
        raise ForbiddenLayerError(
            f"the model cannot be converted for DP-SGD: {str(error).splitlines()[0]}"
        ) from None
    return twin


def check_model(model: nn.Module) -> None:
    """Refuses models that DP-SGD cannot train: with batch norm, dropout, or buffers, which would be
    uploaded without noise.

    Raises:
        ForbiddenLayerError: names the layer or buffer.
    """
    refuse_batch_norm(model)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            raise ForbiddenLayerError(
                f"layer {name!r} is {type(layer).__name__}: its masks depend on an example's "
                "position in the batch, so an additional example would change other "
                "gradients; remove it"
            )
    for name, _ in model.named_buffers():
        raise ForbiddenLayerError(
            f"buffer {name!r} would be uploaded with the model, but no mechanism protects the data "
            "statistics in it"
        )


def dp_sgd(
    model: nn.Module,
    images: Callable[[Tensor], Tensor],
    labels_N: Tensor,
    series: GaussianSumMechanism,
    steps: int,
    settings: DpSgdSettings,
    penalty: Penalty | None = None,
    loss: ExampleLoss | None = None,
    before_step: BeforeStep | None = None,
    units: Units | None = None,
    factors: Factors | None = None,
    note: Note = lambda text: None,
) -> None:
    """Trains `model` in place for `steps` private steps.

    Args:
        images: returns normalised images [M, C, H, W] of the records with the given indices [M].
            (This function pads all passes through the network to one public length, see
            `fedsynth.privacy.passes`.)
        labels_N: labels of all the client's records.
        series: a series charged for `steps` releases of one group, with one coordinate per model
            parameter.
        penalty: its gradient at the current weights is added to the noisy mean gradient. The
            weights are computed from earlier releases, so this is post-processing and costs no
            budget if the penalty depends only on released and public values.
        loss: the loss of each example, instead of cross-entropy; its gradient is clipped in the
            same way. It may use released models, but no other example.
        before_step: called before each step, for example to train a generator of the penalty's
            images: post-processing under the penalty's condition.
        units: the units of the client's records; None: each record is a unit. If users are the
            units, a user's mean gradient is clipped, and `expected_batch_size` counts users.
        factors: the factors of a linear model's cross-entropy gradients at its current weights. The
            gradients are then clipped and summed without being written out, to the same sums except
            for rounding. Ignored if `loss` is given or users are the units.
        note: receives the reason if records contribute nothing because the model or the loss raises
            on them.
    """
    from opacus.grad_sample import GradSampleModule

    check_model(model)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    parameters = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([p.detach().flatten() for p in parameters])
    state = settings.optimiser.init(flat)
    if units is None:
        units = Units(len(labels_N))
    if loss is not None or units.grouped:
        factors = None
    if factors is None:
        start_over_row, limit = PASS_START / len(flat), rows_at_once(model)
    else:
        start_over_row, limit = FACTOR_START, FACTOR_BATCH
    length = pass_length(settings.expected_batch_size, start_over_row, limit)

    def gradients(x: Tensor, y: Tensor) -> Tensor:
        return _per_example_gradients(model, x, y, loss or cross_entropies)

    try:
        for _ in range(steps):
            if before_step is not None:
                with _unhooked(wrapped):
                    before_step(model)
            for sample in units.sample(series).split(length):
                part = sample.records.to(labels_N.device, non_blocking=True)
                x = padded(images(part), length)
                y = padded(labels_N[part], length)
                if factors is not None:
                    with torch.no_grad():
                        products = clipped_product(*factors(x, y), series.sensitivity)
                    series.add_products(products.part(slice(len(part))), sample)
                    continue
                rows = values_of_each(gradients, (x, y), note)[: len(part)]
                series.add(rows, torch.zeros_like(part), sample)
            gradient = (series.release()[0] / settings.expected_batch_size).to(flat)
            if penalty is not None:
                gradient += _public_gradient(wrapped, model, parameters, penalty)
            settings.optimiser.update(flat, gradient, state)
            _write(flat, parameters)
    finally:
        wrapped.to_standard_module()


def _write(flat_P: Tensor, parameters: list[nn.Parameter]) -> None:
    """Copies the vector into the parameters."""
    start = 0
    with torch.no_grad():
        for p in parameters:
            p.copy_(flat_P[start : start + p.numel()].view_as(p))
            start += p.numel()


def _public_gradient(
    wrapped: Any, model: nn.Module, parameters: list[nn.Parameter], penalty: Penalty
) -> Tensor:
    """Returns the penalty's gradient [P]."""
    with _unhooked(wrapped):
        gradients = torch.autograd.grad(
            penalty(model), parameters, allow_unused=True, materialize_grads=True
        )
    return torch.cat([gradient.flatten() for gradient in gradients])


@contextmanager
def _unhooked(wrapped: Any) -> Iterator[None]:
    """Disables Opacus' hooks, which would record passes in the block as an example's."""
    wrapped.disable_hooks()
    try:
        with _quiet_hooks():
            yield
    finally:
        wrapped.enable_hooks()


@contextmanager
def _in_plain_order(model: nn.Module) -> Iterator[None]:
    """Makes inputs of convolutions contiguous: Opacus unfolds them with the strides of contiguous
    tensors, and gives wrong results without an error for channels-last ones (of a network itself or
    of `models/layout.py`)."""

    def plain(layer: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        return inputs[0].reshape(-1).view(inputs[0].shape)

    with ExitStack() as hooks:
        for layer in model.modules():
            if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                hooks.callback(layer.register_forward_pre_hook(plain).remove)
        yield


@contextmanager
def _quiet_hooks() -> Iterator[None]:
    """Silences the warning of Opacus' hooks that images need no gradient, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        yield


def cross_entropies(network: nn.Module, x_NCHW: Tensor, labels_N: Tensor) -> Tensor:
    """Returns the cross-entropy of each example [N]."""
    return nn.functional.cross_entropy(network(x_NCHW), labels_N, reduction="none")


def rows_at_once(network: nn.Module) -> int:
    """Returns the number of examples whose gradients are held at a time, both per layer and
    concatenated."""
    size = sum(p.numel() for p in network.parameters())
    return max(1, min(PHYSICAL_BATCH, PHYSICAL_BYTES // (2 * 4 * max(1, size))))


def example_gradients(
    network: nn.Module, x_NCHW: Tensor, labels_N: Tensor, loss: ExampleLoss = cross_entropies
) -> Tensor:
    """Returns the gradient of each example's loss [N, P], as a step computes it, without noise: for
    audits and checks on public images. The network is unchanged."""
    from opacus.grad_sample import GradSampleModule

    model = copy.deepcopy(network).train().requires_grad_(True)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    with torch.enable_grad():
        rows = _per_example_gradients(model, x_NCHW, labels_N, loss)
    wrapped.to_standard_module()
    return rows


def check_example_gradients(
    model: nn.Module, x_NCHW: Tensor, loss: ExampleLoss | None = None
) -> None:
    """Refuses a model whose per-example gradients cannot be computed, before any budget is charged.

    Args:
        model: any model, such as a custom one.
        x_NCHW: public images.
        loss: the loss of each example; None: cross-entropy.

    Raises:
        ForbiddenLayerError: it has frozen or unused parameters, or layers that Opacus does not
            support.
        PrivacyError: the loss does not return one value for each example.
    """
    for name, p in model.named_parameters():
        if not p.requires_grad:
            raise ForbiddenLayerError(f"parameter {name!r} is frozen: DP-SGD trains all of them")
    labels = torch.zeros(len(x_NCHW), dtype=torch.int64, device=x_NCHW.device)
    try:
        example_gradients(model, x_NCHW, labels, loss or cross_entropies)
    except PrivacyError:
        raise
    except Exception as error:  # raised by Opacus or by the model
        raise ForbiddenLayerError(
            f"the model's per-example gradients cannot be computed ({type(error).__name__}): "
            "replace layers that Opacus does not support (fedsynth.privacy.dpsgd.group_norm_twin "
            "replaces batch norm, LSTM and attention)"
        ) from error


def _per_example_gradients(
    model: nn.Module, x_NCHW: Tensor, labels_N: Tensor, loss: ExampleLoss
) -> Tensor:
    """Returns the gradient of each example's loss [N, P]. Opacus' hooks on the model's layers fill
    `grad_sample`, which is cleared afterwards."""
    _forget_passes(model)
    with _quiet_hooks(), _in_plain_order(model):
        losses = loss(model, x_NCHW, labels_N)
        if losses.shape != (len(x_NCHW),):  # otherwise unusual shapes could mix the examples
            raise PrivacyError(
                f"per-example losses must have shape [{len(x_NCHW)}], got {list(losses.shape)}"
            )
        losses.sum().backward()
    gradients = []
    for name, p in model.named_parameters():
        if p.grad_sample is not None:  # type: ignore[attr-defined]
            gradients.append(p.grad_sample.flatten(1))  # type: ignore[attr-defined]
        elif p.requires_grad:
            raise ForbiddenLayerError(
                f"parameter {name!r} has no per-example gradients: no layer uses it, or a layer "
                "other than its own"
            )
    rows = torch.cat(gradients, dim=1)
    _forget_passes(model)
    return rows


def _forget_passes(model: nn.Module) -> None:
    """Removes the state that Opacus' hooks keep of a pass, even of one that failed midway."""
    for layer in model.modules():
        for name in ("activations", "max_batch_len"):
            layer.__dict__.pop(name, None)
    for p in model.parameters():
        p.grad_sample = p.grad = None  # type: ignore[attr-defined]
        p.__dict__.pop("_current_grad_sample", None)
        p._forward_counter = 0  # type: ignore[attr-defined]
