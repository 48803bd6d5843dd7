"""Custom models: building and checking them."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from fedsynth.copies import copied
from fedsynth.data.files import one_line
from fedsynth.errors import SettingError
from fedsynth.privacy.batch_independence import ADVICE, dependence_on_batch

Shape = tuple[int, int, int]
TAKEN = ("norm", "width", "depth")
"""Settings of the section `model` that a custom function gets if it has such parameters."""


def own_name(model: nn.Module | Callable[..., nn.Module]) -> str:
    """Returns a name for a class or function, or for a module (with a hash of its structure and
    weights)."""
    if not isinstance(model, nn.Module):
        return str(getattr(model, "__name__", type(model).__name__))
    check_state(type(model).__name__, model.state_dict())
    digest = hashlib.sha256(repr(model).encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return f"{type(model).__name__}@{digest.hexdigest()[:12]}"


def builder(
    name: str, model: nn.Module | Callable[..., nn.Module]
) -> Callable[[Shape, int, Any], nn.Module]:
    """Returns a function that builds a network from the images' shape, the number of classes, and
    `ModelSettings`.

    A module is copied with its weights. Anything else is called with `image_shape`, `classes`, and
    those settings of `TAKEN` that it has as parameters.
    """
    accepted = frozenset() if isinstance(model, nn.Module) else _parameters(name, model)
    rehearsed = set()

    def made(shape: Shape, classes: int, settings: Any) -> nn.Module:
        values = {key: getattr(settings, key) for key in TAKEN if key in accepted}
        try:
            network = _new(model, shape, classes, values)
        except SettingError:
            raise
        except Exception as error:
            raise _wrong(name, f"cannot be built for images of {_shown(shape)}", error) from error
        checked(name, network, shape, classes)
        case = (shape, classes, tuple(values.items()))
        if case not in rehearsed:
            rehearse(name, network, shape, classes)
            rehearsed.add(case)
        return network

    return made


def _new(
    model: nn.Module | Callable[..., nn.Module], shape: Shape, classes: int, values: dict[str, Any]
) -> nn.Module:
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    return model(shape, classes, **values)


def _parameters(name: str, model: Callable[..., nn.Module]) -> frozenset[str]:
    try:
        parameters = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):
        raise SettingError(
            "model", "name", f"{name} must be a module, or a class or function that returns one"
        ) from None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    several = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    if not several and sum(parameter.kind in kinds for parameter in parameters) < 2:
        raise SettingError(
            "model",
            "name",
            f"{name} must accept the arguments image_shape, a tuple (channels, height, "
            "width), and classes",
        )
    return frozenset(parameter.name for parameter in parameters)


def checked(name: str, network: Any, shape: Shape, classes: int) -> nn.Module:
    """Returns the network after checking that it maps images of this shape to logits [N, classes].

    Raises:
        SettingError: it does not, or its `embed` and `classifier` do not fit each other.
    """
    if not isinstance(network, nn.Module):
        raise SettingError("model", "name", f"{name} does not return a torch.nn.Module")
    if next(network.parameters(), None) is None:
        raise SettingError("model", "name", f"{name} has no parameters")
    training = network.training
    try:
        with torch.no_grad():
            images = torch.zeros(2, *shape, device=next(network.parameters()).device)
            logits = network.eval()(images)
            features = None
            if hasattr(network, "embed"):
                features = network.embed(images)  # type: ignore[operator]
    except Exception as error:
        raise _wrong(name, f"cannot take images of {_shown(shape)}", error) from error
    network.train(training)
    if not isinstance(logits, Tensor) or logits.shape != (2, classes):
        got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise SettingError(
            "model", "name", f"{name} must return logits [N, {classes}], but returns {got}"
        )
    last = getattr(network, "classifier", None)
    if isinstance(features, Tensor) and isinstance(last, nn.Linear):
        if features.shape != (2, last.in_features):
            raise SettingError(
                "model",
                "name",
                f"{name}: `embed` returns {list(features.shape)}, but `classifier` needs [N, "
                f"{last.in_features}]",
            )
        if not hasattr(network, "embedding_size"):
            network.embedding_size = last.in_features  # type: ignore[assignment]
    return network


def rehearse(name: str, network: nn.Module, shape: Shape, classes: int) -> None:
    """Tries what a run does with a network: copies it, saves and loads it, and trains the copy.

    So a fault that would appear in a later round, after releases were charged, appears before the
    first.

    Raises:
        SettingError: one of these fails.
    """
    try:
        twin = copied(network)
    except Exception as error:
        raise _wrong(name, "cannot be copied", error) from error
    state = twin.state_dict()
    check_state(name, state)
    shapes = {key: value.shape for key, value in state.items()}
    try:
        content = safetensors.torch.save(
            {key: tensor.contiguous() for key, tensor in state.items()}
        )
        network.load_state_dict(safetensors.torch.load(content))  # its current values
    except Exception as error:
        raise _wrong(name, "cannot be saved and loaded", error) from error
    try:
        with torch.enable_grad():
            logits = twin.train()(torch.rand(2, *shape, device=next(twin.parameters()).device))
            logits.sum().backward()
    except Exception as error:
        raise _wrong(name, "cannot be trained", error) from error
    if logits.shape != (2, classes):
        raise _refused(name, f"returns {list(logits.shape)} instead of [N, {classes}] in training")
    if shapes != {key: value.shape for key, value in twin.state_dict().items()}:
        raise _refused(name, "changes the names or shapes in its state_dict in training")


def check_state(name: str, state: Mapping[str, Any]) -> None:
    """Checks that a network's state can be averaged, saved and sent.

    Raises:
        SettingError: an entry is not a plain tensor, or shares memory with another.
    """
    owners: dict[int, str] = {}
    for key, value in state.items():
        if fault := _fault(value):
            raise _refused(name, f"has a state that cannot be saved: {key} {fault}")
        if value.numel():
            owner = owners.setdefault(value.untyped_storage().data_ptr(), key)
            if owner != key:
                raise _refused(
                    name,
                    f"has tied weights: {key} shares memory with {owner}; use a separate "
                    "tensor for each",
                )


def _fault(value: Any) -> str:
    """Returns why an entry of a state cannot be kept; "": it can."""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__} instead of a tensor"
    if nn.parameter.is_lazy(value):
        return "belongs to a lazy layer that the forward pass does not use"
    if value.layout != torch.strided or value.is_quantized:
        return "is sparse or quantised"
    if value.device.type == "meta":
        return "has no values (device meta)"
    if value.is_complex() or (value.is_floating_point() and value.dtype != torch.float32):
        return f"has type {value.dtype} instead of torch.float32"
    return "" if torch.isfinite(value).all() else "is not finite"


def refuse_dependence(
    name: str, network: nn.Module, shape: Shape, device: torch.device, *, training: bool
) -> None:
    """Refuses a network whose output for an image depends on more than that image: no bound on one
    example's influence would hold. It is tested on public random images.

    Args:
        name: name of the model.
        network: not changed.
        shape: shape of the images.
        device: device of the test.
        training: whether it is also used in training mode.

    Raises:
        SettingError: the output does; names the model.
    """
    for mode in (False, True) if training else (False,):
        tried = copied(network).to(device).train(mode)
        parts: list[Callable[[Tensor], Tensor]] = [tried]
        if hasattr(tried, "embed"):
            parts.append(tried.embed)  # type: ignore[arg-type]
        for part in parts:
            try:
                finding = dependence_on_batch(part, shape, device)
            except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
                raise _wrong(name, "cannot take random images", error) from error
            if finding:
                bound = (
                    "the influence of one example is not bounded, as differential privacy requires"
                )
                raise _refused(name, f"{finding}, so {bound}: {ADVICE}")


def _wrong(name: str, what: str, error: Exception) -> SettingError:
    return _refused(name, f"{what}: {one_line(error)}")


def _refused(name: str, why: str) -> SettingError:
    return SettingError("model", "name", f"{name} {why}")


def _shown(shape: Shape) -> str:
    return "×".join(map(str, shape))
