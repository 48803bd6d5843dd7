"""DP-SGD on a client's model, with per-example gradients from Opacus.

Only Opacus' samplers are used, which compute the per-example gradients of a layer from its inputs
and the gradients with respect to its outputs. Sampling, clipping, summing and noise are those of
`GaussianSumMechanism`, as for all private statistics. Opacus' own hooks, optimiser and loader are
not used, for five reasons:

- The loader computes the sampling rate and the divisor from len(dataset), which is private.
- The noise comes from torch's generator.
- If the gradient of one example is not finite, the sum of the whole batch is lost.
- Gradients are clipped in float32. With ghost clipping, the sum is not even computed from the
  gradients whose norms were clipped.
- Its hooks compute the gradients of the whole batch, too, which nothing needs.

Neighbouring data sets differ in one example that is added or removed. Each step draws one Poisson
sample at the public rate q. One row of the ledger counts all steps of a round.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fedsynth.errors import ForbiddenLayerError, PrivacyError, short_repr
from fedsynth.privacy.batch_independence import (
    FIRST_BATCH,
    Dependence,
    GlobalGenerators,
    StepInputs,
    dependence_on_batch,
    rounding,
)
from fedsynth.privacy.mechanisms import GaussianSumMechanism, Released
from fedsynth.privacy.passes import (
    Note,
    Parts,
    Units,
    Values,
    noisy_sums,
    padded,
    pass_size,
    public_like,
    values_of_each,
)
from fedsynth.privacy.products import LayerGradients, outer_products
from fedsynth.privacy.reachable_state import ReachableState
from fedsynth.privacy.row_products import PaddedLinear

# A function of the network in training that returns a scalar. The scalar's gradient is added to
# the gradient of each step. The function must not use private data.
Penalty = Callable[[nn.Module], Tensor]

# A function that is called with the network in training before each step. It must neither use
# private data nor change the network.
BeforeStep = Callable[[nn.Module], None]

# A function of (network, images [N, C, H, W], labels [N] or masks [N, H, W]) that returns the loss
# of each example [N]. The loss of an example must depend only on that example.
ExampleLoss = Callable[[nn.Module, Tensor, Tensor], Tensor]

# Layers whose weights have the gradient of a linear layer. A subclass may compute anything.
LINEAR = (nn.Linear, PaddedLinear)

# The largest number of output positions for which a convolution's gradients are stored as factors.
MAX_POSITIONS = 4

# The maximum number of per-example gradients held at a time.
PHYSICAL_BATCH = 128
# The maximum memory of these gradients, in bytes.
PHYSICAL_BYTES = 2**30

# The largest rounding error that `check_example_gradients` allows for bf16 layers, relative to
# the largest gradient of the same parameter.
MIXED_PRECISION = 0.02

# The fixed cost of a forward and backward pass, in units of the cost of one parameter of one
# example, measured on a CPU.
PASS_START = 2**22
# The cost of adding a pass to the float64 sums, in units of the cost of one example's gradient.
PASS_UPDATE = 4


class Optimiser(Protocol):
    """The interface of optimisers, which update weights with a gradient.

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
    """Settings for local training with DP-SGD.

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
                f"layer {name!r} is {type(layer).__name__}, which mixes the examples of a batch. "
                "Set model.norm=group, or convert a custom model with "
                "fedsynth.privacy.dpsgd.group_norm_twin"
            ).with_code("model.mixes_examples")


def group_norm_twin(model: nn.Module) -> nn.Module:
    """Copies a model, with a group norm in place of each batch norm.

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
                f"layer {name!r} is {type(layer).__name__}, whose random masks depend on "
                "examples' positions in the batch. Remove the layer"
            ).with_code("model.dropout")
    for name, _ in model.named_buffers():
        raise ForbiddenLayerError(
            f"buffer {name!r} would be uploaded without noise, but may contain statistics of the "
            "data. Remove the buffer"
        ).with_code("model.buffer")


def dp_sgd(
    model: nn.Module,
    records: Callable[[Tensor], tuple[Tensor, Tensor]],
    mechanism: GaussianSumMechanism,
    settings: DpSgdSettings,
    units: Units,
    note: Note = lambda text: None,
    sums: Callable[..., list[Released]] = noisy_sums,
    *,
    isolated: bool = False,
) -> None:
    """Trains a model in place with DP-SGD.

    All passes through the network are padded to one public length (see `fedsynth.privacy.passes`).

    Args:
        model: the network.
        records: a function that returns the normalised images [M, C, H, W] and the labels [M] or
            masks [M, H, W] of the records with the given indices [M] on the CPU. Labels and masks
            are int64.
        mechanism: a mechanism of one group, with one coordinate per model parameter. The training
            takes all steps for which the mechanism was charged.
        settings: the optimiser, the expected batch size and the objective.
        units: the privacy units of the client's records. If users are the units, each user's mean
            gradient is clipped, and `expected_batch_size` counts users.
        note: a function that receives an explanation if the model or the loss raises on some
            records. These records then contribute nothing.
        sums: the function that releases the sums, which a trial replaces.
        isolated: whether each pass has only one record (`fedsynth.privacy.passes`).
    """
    check_model(model)
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    state = settings.optimiser.init(flat)
    gradients = ExampleGradients(model, settings.loss or cross_entropies)
    length, count = pass_of(model, settings.expected_batch_size, isolated=isolated)

    def compute(parts: Parts) -> Sequence[Values]:
        ((_, sample),) = parts
        x, y = records(sample.records)
        inputs = padded(x, length), padded(y, length)
        values = values_of_each(gradients, inputs, note)[: len(sample)]
        rows = LayerGradients(values, gradients.blocks, mechanism.sensitivity)
        if units.grouped:  # the mean of a user's gradients is clipped, not each gradient
            return [(rows.gradients(), y.new_zeros(len(y)))]
        return [rows]

    for _ in range(mechanism.steps_left):
        if settings.before_step is not None:
            settings.before_step(model)
        (released,) = sums([mechanism], [units], count, lambda samples: compute)
        gradient = (released[0] / settings.expected_batch_size).to(flat)
        if settings.penalty is not None:
            gradient += _public_gradient(model, settings.penalty)
        settings.optimiser.update(flat, gradient, state)
        _write(flat, parameters)


def pass_of(
    model: nn.Module, expected_batch_size: float, *, isolated: bool = False
) -> tuple[int, int]:
    """Returns the length of a DP-SGD batch, padding included, and its number of records."""
    start = PASS_UPDATE + PASS_START / max(1, sum(map(Tensor.numel, model.parameters())))
    return pass_size(expected_batch_size, start, rows_at_once(model), isolated=isolated)


def _write(flat_P: Tensor, parameters: list[nn.Parameter]) -> None:
    """Copies a vector of all weights into the parameters."""
    start = 0
    with torch.no_grad():
        for p in parameters:
            p.copy_(flat_P[start : start + p.numel()].view_as(p))
            start += p.numel()


def _public_gradient(model: nn.Module, penalty: Penalty) -> Tensor:
    """Computes the gradient [P] of the penalty with respect to the parameters."""
    gradients = torch.autograd.grad(
        penalty(model), list(model.parameters()), allow_unused=True, materialize_grads=True
    )
    return torch.cat(list(map(torch.flatten, gradients)))


def cross_entropies(network: nn.Module, x_NCHW: Tensor, labels_N: Tensor) -> Tensor:
    """Computes each example's cross-entropy [N]."""
    return nn.functional.cross_entropy(network(x_NCHW), labels_N, reduction="none")


def rows_at_once(network: nn.Module) -> int:
    """Returns the maximum number of examples whose gradients fit in memory at once.

    Each gradient is stored twice, once by layer and once as one vector.
    """
    size = sum(map(Tensor.numel, network.parameters()))
    return max(1, min(PHYSICAL_BATCH, PHYSICAL_BYTES // (2 * 4 * max(1, size))))


def example_gradients(
    network: nn.Module, x_NCHW: Tensor, labels_N: Tensor, loss: ExampleLoss = cross_entropies
) -> Tensor:
    """Computes the gradient of each example's loss, without clipping or noise.

    The result has the shape [N, P]. The function is meant for audits and for checks with public
    images. The gradients are those that a step of DP-SGD computes. The network is not changed.
    """
    model = copy.deepcopy(network).requires_grad_(True)
    gradients = ExampleGradients(model, loss)
    values = gradients(x_NCHW, labels_N)
    return LayerGradients(values, gradients.blocks, math.inf).gradients()


def check_example_gradients(
    model: nn.Module,
    x_NCHW: Tensor,
    labels_N: Tensor,
    loss: ExampleLoss | None = None,
) -> None:
    """Refuses a model whose per-example gradients cannot be computed, or do not match autograd's.

    Args:
        model: the model, for example a custom one.
        x_NCHW: public images.
        labels_N: public labels.
        loss: a function that returns the loss of each example. None uses cross-entropy.

    Raises:
        ForbiddenLayerError: the model has frozen or unused parameters, layers that are not
            supported, or gradients that are wrong.
        PrivacyError: the loss does not return one value for each example.
    """
    for name, p in model.named_parameters():
        if not p.requires_grad:
            raise ForbiddenLayerError(
                f"parameter {name!r} has requires_grad=False, but DP-SGD trains all parameters. "
                "Set requires_grad=True"
            ).with_code("model.frozen")
    try:
        labels = labels_N.to(x_NCHW.device)
        rows, expected = _gradients_and_expected(model, x_NCHW, labels, loss or cross_entropies)
    except PrivacyError:
        raise
    except Exception as error:  # raised by Opacus or by the model
        raise ForbiddenLayerError(
            f"per-example gradients for inputs of shape {list(x_NCHW.shape)} failed with "
            f"{short_repr(error)}. Check that the model accepts this shape, and that Opacus "
            "supports all of its layers"
        ).with_code("model.gradients_fail") from error
    _check_equal(model, rows, expected)


def _check_equal(model: nn.Module, rows_NP: Tensor, expected_NP: Tensor) -> None:
    """Refuses a model if per-example gradients do not match the expected ones up to rounding.

    Raises:
        ForbiddenLayerError: the gradients differ. The message names the first such parameter.
    """
    tolerance = rounding(rows_NP.device) * _largest(expected_NP)
    sizes = list(map(Tensor.numel, model.parameters()))
    pairs = zip(rows_NP.split(sizes, dim=1), expected_NP.split(sizes, dim=1), strict=True)
    for (name, _), (actual, exact) in zip(model.named_parameters(), pairs, strict=True):
        atol = tolerance + MIXED_PRECISION * _largest(exact)
        if not torch.allclose(actual, exact, rtol=0.0, atol=atol, equal_nan=True):
            raise ForbiddenLayerError(
                f"the per-example gradients of parameter {name!r} do not match autograd's. Remove "
                "operations that mix examples, in-place operations, uses of the parameter outside "
                "its layer, layers with several inputs, and options like padding_idx"
            ).with_code("model.mixes_examples")


def _largest(values: Tensor) -> float:
    return float(values.nan_to_num(0.0, 0.0, 0.0).abs().max())


@torch.enable_grad()
def _gradients_and_expected(
    model: nn.Module, x_NCHW: Tensor, labels_N: Tensor, loss: ExampleLoss
) -> tuple[Tensor, Tensor]:
    """Computes per-example gradients as in DP-SGD, and again with one backward pass per example.

    Both results are float64 [N, P].
    """
    moved = _with_moved_weights(model)
    rows = example_gradients(moved, x_NCHW.clone(), labels_N, loss)
    expected = []
    for single in loss(moved, x_NCHW.clone(), labels_N):
        row = torch.autograd.grad(
            single, list(moved.parameters()), retain_graph=True, materialize_grads=True
        )
        expected.append(torch.cat(list(map(torch.flatten, row))))
    return rows.double(), torch.stack(expected).double()


def _with_moved_weights(model: nn.Module) -> nn.Module:
    """Copies a model with shifted weights, because zero weights hide earlier layers' gradients."""
    moved = copy.deepcopy(model)
    parameters = list(moved.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    _write(flat + 0.01 * torch.arange(len(flat)).to(flat).cos(), parameters)
    return moved


def gradient_dependence(
    model: nn.Module, inputs: StepInputs, loss: ExampleLoss | None = None
) -> Dependence:
    """Tests whether each example's loss and gradient depend only on that example.

    Call the function before any budget is charged. Gradients are those of DP-SGD. Code in the
    backward pass may act only on loud gradients, so the test is repeated with losses whose scales
    differ by eight orders of magnitude.

    Args:
        model: the network, which is not changed.
        inputs: the inputs of a step.
        loss: a function that returns the loss of each example. None uses cross-entropy.

    Raises:
        ForbiddenLayerError: DP-SGD cannot train the model.
        PrivacyError: the loss does not return one value for each example.
    """
    check_model(model)
    check_example_gradients(model, *inputs.draw(0, 4), loss)
    used = loss or cross_entropies  # the names of variables appear in messages about state
    model = _with_moved_weights(model)

    @torch.enable_grad()
    def losses(x: Tensor, y: Tensor) -> Tensor:
        return used(model, x, y.to(x.device))

    def loud(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        sums = 1e3 * x.detach().double().flatten(1).nan_to_num(0.0, 0.0, 0.0).sum(dim=1)
        return used(network, x, y) * (10 ** (8 * sums.frac() - 4)).to(torch.float32)

    if change := _first_change(model, used, inputs):
        return Dependence(f"{FIRST_BATCH} ({change} differs)")
    result = dependence_on_batch(losses, inputs)
    for backward in (used, loud):
        if result.fault:
            return result
        gradients = ExampleGradients(model, backward)

        def rows(x: Tensor, y: Tensor, compute: ExampleGradients = gradients) -> Tensor:
            factors = compute(x, y.to(x.device))
            return LayerGradients(factors, compute.blocks, bound=1.0).compared()

        dependence = dependence_on_batch(rows, inputs, operations=False, holders=(model, used))
        moved = max(result.moved, dependence.moved)
        result = replace(dependence, moved=moved, opaque=result.opaque | dependence.opaque)
    return result


@torch.enable_grad()
def _first_change(model: nn.Module, loss: ExampleLoss, inputs: StepInputs) -> str:
    """Returns the name of model state that depends on the first batch, or an empty string.

    A trial of one copy cannot find what the model would keep of its first batch only.
    """
    states = []
    for seed in (0, 1):
        network = copy.deepcopy(model)
        x, y = inputs.draw(seed, inputs.length)
        with GlobalGenerators(inputs.device), suppress(Exception):  # which the trials report
            loss(network, x, y.to(x.device))
        states.append(ReachableState.of(network))
    return states[1].change_since(states[0])


class ExampleGradients:
    """Computes the gradient of each example's loss, layer by layer.

    The weight of a linear layer has the gradient l ⊗ r, where r is the input of the layer, and l is
    the gradient with respect to its output. Only l and r are stored. The gradients of all other
    parameters are stored in full.

    All calls must use the same layers in the same order as two public random images. Otherwise one
    record could decide whether the gradients of others can be computed.

    Args:
        model: the network.
        loss: a function that returns the loss of each example.

    Attributes:
        blocks: the lengths of the vectors in the result (see `LayerGradients`), once it was called.
    """

    def __init__(self, model: nn.Module, loss: ExampleLoss = cross_entropies) -> None:
        self._model = model
        self._loss = loss
        self._calls: list[str] = []
        self.blocks: tuple[tuple[int, ...], ...] = ()

    def __call__(self, x_NCHW: Tensor, labels_N: Tensor) -> Tensor:
        """Returns the gradients as vectors [N, S], in the layout of `LayerGradients.values`.

        Raises:
            ForbiddenLayerError: a parameter is not used by the layer that owns it, or the inputs or
                outputs of a layer are not one tensor [N, …].
            PrivacyError: the loss does not return one value for each example, or the model calls
                other layers than for public images.
        """
        vectors: dict[Tensor, tuple[Tensor, ...]] = {}
        for layer, inputs, backprops in _stacked(self._backward(x_NCHW, labels_N)):
            for p, gradient in _layer_gradients(layer, inputs, backprops).items():
                if p in vectors:  # a layer that is used more than once
                    gradient = (outer_products(*vectors[p]) + outer_products(*gradient),)
                vectors[p] = gradient
        for name, p in self._model.named_parameters():
            if p not in vectors:
                raise ForbiddenLayerError(
                    f"parameter {name!r} has no per-example gradients. Use the parameter only in "
                    "its own layer, and return one tensor from this layer"
                ).with_code("model.parameter")
        blocks = [vectors[p] for p in self._model.parameters()]
        self.blocks = tuple((*(v.shape[-1] for v in b), *b[0].shape[1:-1]) for b in blocks)
        return torch.cat([vector.flatten(1) for vector in chain.from_iterable(blocks)], dim=1)

    @torch.enable_grad()
    def _backward(self, x_NCHW: Tensor, labels_N: Tensor) -> list[tuple[nn.Module, Tensor, Tensor]]:
        """Returns each layer with its inputs and the gradients with respect to its outputs."""
        if not self._calls:
            _, self._calls, _ = self._forward(public_like(x_NCHW[:2]), public_like(labels_N[:2]))
        losses, calls, uses = self._forward(x_NCHW, labels_N)
        if calls != self._calls:
            raise PrivacyError(
                "the model calls different layers for private and for random images. Remove "
                "branches that depend on the data"
            )
        if losses.shape != (len(x_NCHW),):  # otherwise unusual shapes could mix the examples
            raise PrivacyError(
                f"the loss function must return one value for each of {len(x_NCHW)} examples, "
                f"got shape {list(losses.shape)}"
            ).with_code("model.losses")
        if not uses:
            raise PrivacyError("the loss does not call the model. Call the model that it receives")
        layers, inputs, edges = zip(*uses, strict=True)
        backprops = torch.autograd.grad(losses.sum(), edges, allow_unused=True)
        return [use for use in zip(layers, inputs, backprops, strict=True) if use[2] is not None]

    def _forward(
        self, x_NCHW: Tensor, labels_N: Tensor
    ) -> tuple[Tensor, list[str], list[tuple[nn.Module, Tensor, GradientEdge]]]:
        """Returns the losses, the names of the called layers, and their inputs and outputs."""
        calls: list[str] = []
        uses: list[tuple[nn.Module, Tensor, GradientEdge]] = []

        def record(name: str, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if not torch.is_grad_enabled():
                return
            if not isinstance(output, Tensor):  # such as DPLSTM, whose own layers are recorded
                return
            if [len(t) for t in (*inputs, output)] != 2 * [len(x_NCHW)]:
                raise ForbiddenLayerError(
                    f"an input or output of layer {name!r} does not have one row per example, or "
                    "the layer has several inputs. Pass one tensor with a row per example"
                ).with_code("model.calls")
            calls.append(name)
            uses.append((layer, inputs[0].detach(), get_gradient_edge(output)))

        with ExitStack() as hooks:
            for name, layer in self._model.named_modules():
                if list(layer.parameters(recurse=False)):
                    # before other hooks, which may change the output
                    hook = layer.register_forward_hook(partial(record, name), prepend=True)
                    hooks.callback(hook.remove)
            return self._loss(self._model, x_NCHW, labels_N), calls, uses


def _stacked(
    uses: Sequence[tuple[nn.Module, Tensor, Tensor]],
) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
    """Stacks a linear layer's calls along a new dimension, [N, calls, ...].

    The layers of an LSTM cell, for example, are called once per time step. The sum of the calls'
    outer products is then one matrix product for each example.
    """
    calls: dict[nn.Module, list[tuple[nn.Module, Tensor, Tensor]]] = {}
    for use in uses:
        calls.setdefault(use[0], []).append(use)
    for layer, of_layer in calls.items():
        if len(of_layer) == 1 or type(layer) not in LINEAR or of_layer[0][1].dim() != 2:
            yield from of_layer
            continue
        _, inputs, backprops = zip(*of_layer, strict=True)
        yield layer, torch.stack(inputs, dim=1), torch.stack(backprops, dim=1)


@torch.no_grad()
def _layer_gradients(
    layer: nn.Module, inputs: Tensor, backprops: Tensor
) -> dict[Tensor, tuple[Tensor, ...]]:
    """Computes each example's gradients with respect to one layer's parameters.

    A gradient is either a vector [N, P], or two vectors whose outer product it is.
    """
    from opacus.grad_sample import GradSampleModule

    kind = nn.Linear if type(layer) in LINEAR else type(layer)
    if isinstance(layer, nn.Linear) and kind is nn.Linear and inputs.dim() == 2:
        factors: dict[Tensor, tuple[Tensor, ...]] = {layer.weight: (backprops, inputs)}
        if layer.bias is not None:
            factors[layer.bias] = (backprops,)
        return factors
    if type(layer) is nn.Conv2d and _has_few_positions(layer, backprops):
        return _convolution_factors(layer, inputs, backprops)
    # Opacus unfolds the inputs of convolutions as if they had the strides of a contiguous tensor
    plain = inputs.reshape(-1).view(inputs.shape)
    sampler = GradSampleModule.GRAD_SAMPLERS.get(kind, _functional_gradients)
    if getattr(layer, "padding_mode", "zeros") != "zeros":  # Opacus always pads with zeros
        sampler = _functional_gradients
    gradients = sampler(layer, [plain], backprops)
    return {p: (gradient.flatten(1),) for p, gradient in gradients.items()}


def _has_few_positions(layer: nn.Conv2d, backprops: Tensor) -> bool:
    plain = layer.groups == 1 and layer.padding_mode == "zeros" and layer.padding != "same"
    return plain and backprops[0, 0].numel() <= MAX_POSITIONS


def _convolution_factors(
    layer: nn.Conv2d, inputs: Tensor, backprops: Tensor
) -> dict[Tensor, tuple[Tensor, ...]]:
    """Factorises a convolution's per-example gradients.

    The gradient of the weights is a sum over the T positions of the output. Each term is the outer
    product of the output's gradient [P] and the input's patch [Q].
    """
    padding = 0 if isinstance(layer.padding, str) else layer.padding
    kernel, stride = layer.kernel_size, layer.stride
    patches = nn.functional.unfold(inputs, kernel, layer.dilation, padding, stride).mT
    columns = backprops.flatten(2).mT
    factors: dict[Tensor, tuple[Tensor, ...]] = {layer.weight: (columns, patches)}
    if layer.bias is not None:
        factors[layer.bias] = (columns.sum(dim=1),)
    return factors


def _functional_gradients(
    layer: nn.Module, inputs: list[Tensor], backprops: Tensor
) -> dict[Tensor, Tensor]:
    """Computes each example's gradients for a layer that Opacus does not support."""
    parameters: dict[str, Tensor] = dict(layer.named_parameters(recurse=False))

    def product(values: dict[str, Tensor], x: Tensor, backprop: Tensor) -> Tensor:
        output = torch.func.functional_call(layer, values, (x[None],))
        return (output * backprop[None]).sum()

    per_example = torch.func.vmap(torch.func.grad(product), (None, 0, 0))
    gradients = per_example(parameters, inputs[0], backprops)
    return {layer.get_parameter(name): gradient for name, gradient in gradients.items()}
