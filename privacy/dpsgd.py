"""DP-SGD on a client's model, with per-example gradients from Opacus.

Only Opacus' `GradSampleModule` is used, which computes per-example gradients for any architecture.
Sampling, clipping, summing and noise are those of `GaussianSumMechanism`, as for all private
statistics. Opacus' own optimiser and loader are not used, for four reasons:

- The loader computes the sampling rate and the divisor from len(dataset), which is private.
- The noise comes from torch's generator.
- If the gradient of one example is not finite, the sum of the whole batch is lost.
- Gradients are clipped in float32.

Neighbouring data sets differ in one example that is added or removed. Each step draws one Poisson
sample at the public rate q. One row of the ledger counts all steps of a round.
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
from fedsynth.privacy.passes import Note, Units, padded, pass_length, values_of_each
from fedsynth.privacy.products import clipped_product

Penalty = Callable[[nn.Module], Tensor]
"""A function of the network in training that returns a scalar. The scalar's gradient is added to
the gradient of each step. The function must not use private data."""

BeforeStep = Callable[[nn.Module], None]
"""A function that is called with the network in training before each step. It must neither use
private data nor change the network."""

ExampleLoss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""A function of (network, images [N, C, H, W], labels [N]) that returns the loss of each example
[N]. The loss of an example must depend only on that example."""

Factors = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function of (inputs [N, …], labels [N]) that returns l [N, P] and r [N, Q]. The gradient of
each example's cross-entropy must be l ⊗ r, in row-major order of the model's only parameter [P, Q].
It must depend only on that example."""

PHYSICAL_BATCH = 128
"""The maximum number of per-example gradients held at a time."""
PHYSICAL_BYTES = 2**30
"""The maximum memory of these gradients, in bytes."""

PASS_START = 2**18
"""The fixed cost of a forward and backward pass, in units of the cost of one parameter of one
example. It is due to Opacus' hooks and bookkeeping, and was measured on a CPU for ConvNets."""

FACTOR_BATCH = 512
"""The maximum number of examples in a pass if the gradients are given as factors."""
FACTOR_START = 64.0
"""The fixed cost of a pass with factors, divided by its cost per example. Each pass computes the
summed product of the factors once."""


class Optimiser(Protocol):
    """An optimiser, which updates weights with a gradient.

    The weights and the gradient have the shape [..., P]. The leading axes are networks that are
    trained in parallel. The update of a network depends only on its own weights, gradient and
    state. In DP-SGD the optimiser receives only gradients that were already released with noise, so
    everything it computes is post-processing.
    """

    def init(self, w: Tensor) -> tuple[Tensor, ...]:
        """Returns the initial state. Its tensors have the same leading axes as the weights `w`."""

    def update(self, w: Tensor, gradient: Tensor, state: tuple[Tensor, ...]) -> None:
        """Updates the weights `w` and the state of the optimiser in place.

        An implementation must not change `gradient` and must not wait for the device.
        """


@dataclass(frozen=True)
class DpSgdSettings:
    """The settings of local training with DP-SGD.

    Args:
        optimiser: the optimiser, which receives each step's noisy mean gradient.
        expected_batch_size: the sampling rate q times the public nominal size. Every step divides
            its noisy sum of gradients by this number.
        penalty: a function whose gradient at the current weights is added to the noisy mean
            gradient. The weights are computed from earlier releases. Therefore this is
            post-processing and costs no budget if the penalty depends only on released and public
            values.
        loss: a function that returns the loss of each example, in place of cross-entropy. Its
            gradients are clipped in the same way. The loss of an example may depend on released
            models, but not on other examples.
        before_step: a function that is called before each step, for example to train a generator
            of images for the penalty. Like the penalty, it may use only released and public values.
    """

    optimiser: Optimiser
    expected_batch_size: float
    penalty: Penalty | None = None
    loss: ExampleLoss | None = None
    before_step: BeforeStep | None = None


def refuse_batch_norm(model: nn.Module) -> None:
    """Refuses a model with batch norm, which mixes the examples of a batch.

    Raises:
        ForbiddenLayerError: the model has batch norm. The message names the layer and a
            replacement.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise ForbiddenLayerError(
                f"layer {name!r} is {type(layer).__name__}, which mixes the examples of a batch. Set "
                "model.norm=group, or convert a custom model with "
                "fedsynth.privacy.dpsgd.group_norm_twin"
            )


def group_norm_twin(model: nn.Module) -> nn.Module:
    """Returns a copy of the model in which every batch norm is replaced with a group norm.

    All other layers keep their weights. Opacus' ModuleValidator makes the replacements.

    Raises:
        opacus.validators.errors.UnsupportedModuleError: the model has another layer that DP-SGD
            cannot train.
    """
    from opacus.validators import ModuleValidator

    twin: nn.Module = ModuleValidator.fix_and_validate(model)
    return twin


def check_model(model: nn.Module) -> None:
    """Refuses a model with batch norm, dropout or buffers, which DP-SGD cannot train.

    Buffers are refused because they would be uploaded without noise.

    Raises:
        ForbiddenLayerError: the model has such a layer or buffer. The message names it.
    """
    refuse_batch_norm(model)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            raise ForbiddenLayerError(
                f"layer {name!r} is {type(layer).__name__}, whose masks depend on the position of "
                "an example in the batch. Remove this layer"
            )
    for name, _ in model.named_buffers():
        raise ForbiddenLayerError(
            f"buffer {name!r} would be uploaded without noise, although it may contain statistics "
            "of the data. Remove this buffer"
        )


def dp_sgd(
    model: nn.Module,
    images: Callable[[Tensor], Tensor],
    labels_N: Tensor,
    series: GaussianSumMechanism,
    settings: DpSgdSettings,
    units: Units | None = None,
    factors: Factors | None = None,
    note: Note = lambda text: None,
) -> None:
    """Trains a model in place with DP-SGD.

    All passes through the network are padded to one public length (see `fedsynth.privacy.passes`).

    Args:
        model: the network.
        images: a function that returns the normalised images [M, C, H, W] of the records with the
            given indices [M].
        labels_N: the labels of all records of the client.
        series: a series of one group, with one coordinate per model parameter. The training takes
            all steps for which the series was charged.
        settings: the optimiser, the expected batch size and the objective.
        units: the privacy units of the client's records. None makes each record a unit. If users
            are the units, each user's mean gradient is clipped, and `expected_batch_size` counts
            users.
        factors: a function that returns the factors of a linear model's cross-entropy gradients at
            its current weights. The gradients are then clipped and summed from their factors. The
            result is the same except for rounding. It is ignored if `loss` is given or if users are
            the units.
        note: a function that receives an explanation if the model or the loss raises on some
            records. These records then contribute nothing.
    """
    from opacus.grad_sample import GradSampleModule

    check_model(model)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    parameters = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([p.detach().flatten() for p in parameters])
    state = settings.optimiser.init(flat)
    if units is None:
        units = Units(len(labels_N))
    loss, before_step, penalty = settings.loss, settings.before_step, settings.penalty
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
        for _ in range(series.steps_left):
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
    """Copies a vector of all weights into the parameters."""
    start = 0
    with torch.no_grad():
        for p in parameters:
            p.copy_(flat_P[start : start + p.numel()].view_as(p))
            start += p.numel()


def _public_gradient(
    wrapped: Any, model: nn.Module, parameters: list[nn.Parameter], penalty: Penalty
) -> Tensor:
    """Computes the gradient [P] of the penalty with respect to the parameters."""
    with _unhooked(wrapped):
        gradients = torch.autograd.grad(
            penalty(model), parameters, allow_unused=True, materialize_grads=True
        )
    return torch.cat(list(map(torch.flatten, gradients)))


@contextmanager
def _unhooked(wrapped: Any) -> Iterator[None]:
    """Disables Opacus' hooks in a `with` block.

    The hooks would otherwise treat the passes in the block as passes over private examples.
    """
    wrapped.disable_hooks()
    try:
        with _quiet_hooks():
            yield
    finally:
        wrapped.enable_hooks()


@contextmanager
def _in_plain_order(model: nn.Module) -> Iterator[None]:
    """Makes the inputs of all convolutions contiguous in a `with` block.

    Opacus unfolds inputs as if they were contiguous. For channels-last inputs, which some networks
    and `models/layout.py` produce, it would return wrong results without an error.
    """

    def plain(layer: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        return inputs[0].reshape(-1).view(inputs[0].shape)

    with ExitStack() as hooks:
        for layer in model.modules():
            if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                hooks.callback(layer.register_forward_pre_hook(plain).remove)
        yield


@contextmanager
def _quiet_hooks() -> Iterator[None]:
    """Silences a warning of Opacus' hooks in a `with` block.

    The warning states that the images need no gradient. This is intended.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        yield


def cross_entropies(network: nn.Module, x_NCHW: Tensor, labels_N: Tensor) -> Tensor:
    """Computes the cross-entropy of each example [N]."""
    return nn.functional.cross_entropy(network(x_NCHW), labels_N, reduction="none")


def rows_at_once(network: nn.Module) -> int:
    """Returns the maximum number of examples whose gradients fit in memory at the same time.

    Each gradient is stored twice, once by layer and once as one vector.
    """
    size = sum(p.numel() for p in network.parameters())
    return max(1, min(PHYSICAL_BATCH, PHYSICAL_BYTES // (2 * 4 * max(1, size))))


def example_gradients(
    network: nn.Module, x_NCHW: Tensor, labels_N: Tensor, loss: ExampleLoss = cross_entropies
) -> Tensor:
    """Computes the gradient of each example's loss, without clipping and noise.

    The result has the shape [N, P]. The function is meant for audits and for checks with public
    images. The gradients are those that a step of DP-SGD computes. The network is not changed.
    """
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
    """Refuses a model if its per-example gradients cannot be computed.

    Call this before any budget is charged.

    Args:
        model: the model, for example a custom one.
        x_NCHW: public images.
        loss: a function that returns the loss of each example. None uses cross-entropy.

    Raises:
        ForbiddenLayerError: the model has frozen or unused parameters, or layers that Opacus does
            not support.
        PrivacyError: the loss does not return one value for each example.
    """
    for name, p in model.named_parameters():
        if not p.requires_grad:
            raise ForbiddenLayerError(
                f"parameter {name!r} has requires_grad=False, but DP-SGD trains all parameters. Set "
                "requires_grad=True"
            )
    labels = torch.zeros(len(x_NCHW), dtype=torch.int64, device=x_NCHW.device)
    try:
        example_gradients(model, x_NCHW, labels, loss or cross_entropies)
    except PrivacyError:
        raise
    except Exception as error:  # raised by Opacus or by the model
        raise ForbiddenLayerError(
            f"the per-example gradients of the model failed with {type(error).__name__}. Replace "
            "the layers that Opacus does not support, for example with "
            "fedsynth.privacy.dpsgd.group_norm_twin"
        ) from error


def _per_example_gradients(
    model: nn.Module, x_NCHW: Tensor, labels_N: Tensor, loss: ExampleLoss
) -> Tensor:
    """Computes the gradient of each example's loss with Opacus' hooks.

    The result has the shape [N, P]. The hooks write the gradients into the attribute `grad_sample`
    of the parameters, which is cleared afterwards.
    """
    _forget_passes(model)
    with _quiet_hooks(), _in_plain_order(model):
        losses = loss(model, x_NCHW, labels_N)
        if losses.shape != (len(x_NCHW),):  # otherwise unusual shapes could mix the examples
            raise PrivacyError(
                f"the loss function must return one value for each of the {len(x_NCHW)} examples, "
                f"got shape {list(losses.shape)}"
            )
        losses.sum().backward()
    gradients = []
    for name, p in model.named_parameters():
        if p.grad_sample is not None:  # type: ignore[attr-defined]
            gradients.append(p.grad_sample.flatten(1))  # type: ignore[attr-defined]
        elif p.requires_grad:
            raise ForbiddenLayerError(
                f"parameter {name!r} has no per-example gradients. Use the parameter only in the "
                "layer that owns it"
            )
    rows = torch.cat(gradients, dim=1)
    _forget_passes(model)
    return rows


def _forget_passes(model: nn.Module) -> None:
    """Removes all state that Opacus' hooks keep after a pass, also after a pass that failed."""
    for layer in model.modules():
        for name in ("activations", "max_batch_len"):
            layer.__dict__.pop(name, None)
    for p in model.parameters():
        p.grad_sample = p.grad = None  # type: ignore[attr-defined]
        p.__dict__.pop("_current_grad_sample", None)
        p._forward_counter = 0  # type: ignore[attr-defined]
