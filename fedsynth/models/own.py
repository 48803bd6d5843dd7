"""Builds users' models, and checks them before a run."""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from fedsynth.errors import FedsynthError, SettingError, one_line
from fedsynth.features.feature_map import Shape

# The settings in the section `model` that are passed to builders with parameters of the same names.
OPTIONAL_ARGUMENTS = ("norm", "width", "depth")


def own_name(model: nn.Module | Callable[..., nn.Module]) -> str:
    """Returns a name for a custom model.

    For a class or function, the result is the Python name. For a module, it is the class name,
    followed by a hash of the module's structure and weights.
    """
    if not isinstance(model, nn.Module):
        return str(getattr(model, "__name__", type(model).__name__))
    check_state(type(model).__name__, model.state_dict())
    digest = hashlib.sha256(repr(model).encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return f"{type(model).__name__}@{digest.hexdigest()[:12]}"


def builder(name: str, model: nn.Module | Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Returns a function that builds a custom network and checks it.

    The function has the parameters (image shape, classes, norm, width, depth). A module is copied
    with its weights. A class or function is called with the image shape, the number of classes, and
    its `OPTIONAL_ARGUMENTS` parameters.
    """

    def build(shape: Shape, classes: int, norm: str, width: int, depth: int) -> nn.Module:
        with _refusing(name, f"cannot be built for images of {_size(shape)}"):
            if isinstance(model, nn.Module):
                network = copy.deepcopy(model)
            else:
                settings = {"norm": norm, "width": width, "depth": depth}
                network = model(shape, classes, **optional_arguments(model, settings))
        check_network(name, network, shape, classes)
        rehearse(name, network, shape, classes)
        return network

    return build


def optional_arguments(
    build: Callable[..., nn.Module], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns those settings among `OPTIONAL_ARGUMENTS` that a function or class accepts."""
    parameters = inspect.signature(build).parameters
    return {key: settings[key] for key in OPTIONAL_ARGUMENTS if key in parameters}


def check_network(name: str, network: Any, shape: Shape, classes: int) -> None:
    """Checks that a network maps images of a given shape to logits [N, classes].

    For a network with `embed` and `classifier`, a missing `embedding_size` is set, and whether
    `classifier(embed(x))` is the network's output (`classifies_embeddings`).

    Raises:
        SettingError: the network does not return logits [N, classes], or `embed` does not fit
            `classifier`.
    """
    if not isinstance(network, nn.Module):
        raise _refused(
            name, f"must return a torch.nn.Module, got {type(network).__name__}. Return one"
        )
    if next(network.parameters(), None) is None:
        raise _refused(name, "has no parameters to train. Use a network with parameters")
    training = network.training
    features = None
    with _refusing(name, f"cannot take images of {_size(shape)}"), torch.no_grad():
        images = torch.linspace(0, 1, 2 * math.prod(shape)).view(2, *shape)
        images = images.to(next(network.parameters()).device)
        logits = network.eval()(images)
        if hasattr(network, "embed"):
            features = network.embed(images)  # type: ignore[operator]
        last = getattr(network, "classifier", None)
        if isinstance(features, Tensor) and isinstance(last, nn.Linear):
            is_close = _is_close(last, features, logits)
            # random outputs, which private runs refuse for that reason, are not compared
            is_close = is_close or not torch.equal(network(images), logits)
            network.classifies_embeddings = is_close  # type: ignore[assignment]
    network.train(training)
    returned = list(getattr(logits, "shape", []))
    if returned != [2, classes]:
        raise _refused(
            name, f"must return logits [N, {classes}], got {returned}. Correct `forward`"
        )
    if isinstance(features, Tensor) and isinstance(last, nn.Linear):
        if features.shape != (2, last.in_features):
            reason = f"must return [N, {last.in_features}] from `embed`, the input of `classifier`"
            raise _refused(name, f"{reason}, got {list(features.shape)}. Correct `embed`")
        if not hasattr(network, "embedding_size"):
            network.embedding_size = last.in_features  # type: ignore[assignment]


def _is_close(last: nn.Linear, features: Tensor, logits: Any) -> bool:
    """Returns True if a layer computes the logits from the features, up to rounding."""
    if features.dim() != 2 or features.shape[1] != last.in_features:
        return True  # another check names the shapes
    expected = last(features.to(last.weight.dtype)).float()
    if not isinstance(logits, Tensor) or logits.shape != expected.shape:
        return True
    tolerance = 1e-3 if features.dtype == logits.dtype == torch.float32 else 5e-2
    return torch.allclose(expected, logits.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


def rehearse(name: str, network: nn.Module, shape: Shape, classes: int) -> None:
    """Tests before a run that a network can be copied, saved, loaded and trained.

    Otherwise, an error could end the run in a later round, after privacy budget was spent.

    Raises:
        SettingError: a test fails.
    """
    with _refusing(name, "cannot be copied"):
        twin = copy.deepcopy(network)
    state = twin.state_dict()
    check_state(name, state)
    for parameter, value in network.named_parameters():
        if not value.requires_grad:
            reason = (
                f"freezes {parameter}, but all parameters are trained. Make it a buffer, or encode "
                "the data with the frozen layers first"
            )
            raise _refused(name, reason)
    shapes = {key: value.shape for key, value in state.items()}
    with _refusing(name, "cannot be saved and loaded"):
        contiguous = {key: tensor.contiguous() for key, tensor in state.items()}
        content = safetensors.torch.save(contiguous)
        network.load_state_dict(safetensors.torch.load(content))  # its current values
    with _refusing(name, "cannot be trained"), torch.enable_grad():
        # requires_grad_ is what local training needs, and ScriptModules lack it
        logits = twin.requires_grad_().train()(
            torch.rand(2, *shape, device=next(twin.parameters()).device)
        )
        logits.sum().backward()
    if logits.shape != (2, classes):
        reason = (
            f"must return logits [N, {classes}] in training, got {list(logits.shape)}. Correct "
            "`forward`"
        )
        raise _refused(name, reason)
    if shapes != {key: value.shape for key, value in twin.state_dict().items()}:
        raise _refused(
            name,
            "changes tensor names or shapes in its state_dict during training. Create all "
            "tensors in __init__",
        )


def check_state(name: str, state: Mapping[str, Any]) -> None:
    """Checks that a network's state can be averaged, saved and sent.

    Raises:
        SettingError: an entry is not a plain tensor, or two entries share memory.
    """
    owners: dict[int, str] = {}
    for key, value in state.items():
        if fault := _fault(value):
            raise _refused(name, f"cannot be saved: {key} in its state_dict {fault}")
        if value.numel():
            owner = owners.setdefault(value.untyped_storage().data_ptr(), key)
            if owner != key:
                reason = f"has tied weights: {key} is {owner}. Make them separate tensors"
                raise _refused(name, reason)


def _fault(value: Any) -> str:
    """Explains why a state entry cannot be saved, or returns an empty string."""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__} instead of a tensor"
    if nn.parameter.is_lazy(value) or value.device.type == "meta":
        return "has no values yet"
    if value.layout != torch.strided or value.is_quantized:
        return "is sparse or quantised"
    if value.is_complex() or (value.is_floating_point() and value.dtype != torch.float32):
        return f"has type {value.dtype} instead of torch.float32"
    if not torch.isfinite(value).all():
        return "is not finite"
    return ""


@contextmanager
def _refusing(name: str, reason: str) -> Iterator[None]:
    """Converts errors from a user's model to a SettingError."""
    try:
        yield
    except FedsynthError:
        raise
    except (Exception, SystemExit) as error:
        raise _refused(name, f"{reason}: {one_line(error)}") from error


def _refused(name: str, reason: str) -> SettingError:
    return SettingError("model", "name", reason, value=name)


def _size(shape: Shape) -> str:
    return "×".join(map(str, shape))
