"""Models of one's own: what may be registered, and how one is built and looked at."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth.copies import copied
from fedsynth.data.files import one_line
from fedsynth.errors import SettingError
from fedsynth.rows_alone import mixes_rows

Shape = tuple[int, int, int]
TAKEN = ("norm", "width", "depth")
"""Settings of the section `model` that a function gets, if it has such parameters."""


def own_name(model: nn.Module | Callable[..., nn.Module]) -> str:
    """A name for a module (with a hash of what it is and of its weights), or for what makes one."""
    if not isinstance(model, nn.Module):
        return str(getattr(model, "__name__", type(model).__name__))
    found = hashlib.sha256(repr(model).encode())
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return f"{type(model).__name__}@{found.hexdigest()[:12]}"


def builder(
    name: str, model: nn.Module | Callable[..., nn.Module]
) -> Callable[[Shape, int, Any], nn.Module]:
    """What makes a network of images' shape, the number of classes, and `ModelSettings`.

    A module is copied, with its weights. Anything else is called with `image_shape` and `classes`,
    and with what of `TAKEN` it has as parameters.
    """
    if isinstance(model, nn.Module):
        module = model

        def duplicate(shape: Shape, classes: int, settings: Any) -> nn.Module:
            return checked(name, copy.deepcopy(module), shape, classes)

        return duplicate
    accepted = _parameters(name, model)

    def made(shape: Shape, classes: int, settings: Any) -> nn.Module:
        values = {key: getattr(settings, key) for key in TAKEN if key in accepted}
        try:
            network = model(shape, classes, **values)
        except SettingError:
            raise
        except Exception as error:
            raise _wrong(name, f"cannot be made for images of {_shown(shape)}", error) from error
        return checked(name, network, shape, classes)

    return made


def _parameters(name: str, model: Callable[..., nn.Module]) -> frozenset[str]:
    try:
        found = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):
        raise SettingError("model", "name", f"{name} must be a module, or what makes one") from None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    several = any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in found)
    if not several and sum(one.kind in kinds for one in found) < 2:
        raise SettingError(
            "model",
            "name",
            f"{name} must take image_shape, as (channels, height, width), and classes",
        )
    return frozenset(one.name for one in found)


def checked(name: str, network: Any, shape: Shape, classes: int) -> nn.Module:
    """The network, if it makes logits [N, classes] of images of this shape.

    Raises:
        SettingError: it is none, it fails, or its `embed` and `classifier` do not fit each other.
    """
    if not isinstance(network, nn.Module):
        raise SettingError("model", "name", f"{name} makes no torch.nn.Module")
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
            "model", "name", f"{name} must make logits [N, {classes}] of images, it makes {got}"
        )
    last = getattr(network, "classifier", None)
    if isinstance(features, Tensor) and isinstance(last, nn.Linear):
        if features.shape != (2, last.in_features):
            raise SettingError(
                "model",
                "name",
                f"{name}: `embed` makes {list(features.shape)}, and `classifier` takes "
                f"[N, {last.in_features}]",
            )
        if not hasattr(network, "embedding_size"):
            network.embedding_size = last.in_features  # type: ignore[assignment]
    return network


def refuse_mixing(name: str, network: nn.Module, shape: Shape) -> None:
    """Refuses a network that mixes the examples of a batch, in training or in evaluation, as far as
    public random images show it: no bound on one example's influence would hold.

    Raises:
        SettingError: names the model.
    """
    tried = copied(network)  # what it may remember of a batch is forgotten
    device = next(tried.parameters()).device
    parts: list[Callable[[Tensor], Tensor]] = [tried]
    if hasattr(tried, "embed"):
        parts.append(tried.embed)  # type: ignore[arg-type]
    for training in (False, True):
        tried.train(training)
        if any(mixes_rows(part, shape, device) for part in parts):
            raise SettingError(
                "model",
                "name",
                f"{name} mixes the examples of a batch (an image's output changes with the other "
                "images), so with differential privacy one example's influence has no bound: make "
                "each output of its own image alone",
            )


def _wrong(name: str, what: str, error: Exception) -> SettingError:
    reason = one_line(str(error).partition("\n")[0] or type(error).__name__)
    return SettingError("model", "name", f"{name} {what}: {reason}")


def _shown(shape: Shape) -> str:
    return "×".join(map(str, shape))
