"""What both sides of an exchange check of what passes between them, before anybody computes with it.

An upload's fields are checked against the method's rules in `fedsynth.core.uploads`, which
`Server.check` calls.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters
from fedsynth.core.method import Method
from fedsynth.errors import DivergedError
from fedsynth.privacy.errors import RequestRefusedError
from fedsynth.privacy.requests import check_named


def check_declared(method: Method, message: Message, declared: type[Message] | None) -> None:
    """What was declared, and checked under differential privacy, is what is sent.

    Raises:
        TypeError: `message` is of another type.
    """
    if type(message) is not declared:
        expected = "nothing" if declared is None else declared.__name__
        raise TypeError(
            f"{method.name} declares messages of type {expected}, got {type(message).__name__}"
        )


def check_finite(tensors: Mapping[str, Tensor], whose: str, number: int) -> None:
    """One look at each result, outside the hot loops; a NaN would otherwise spread unseen.

    Raises:
        DivergedError: names the round, the tensor and whose it is.
    """
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise diverged_error(f"{name} of the {whose}", number)


def diverged_error(what: str, number: int, found: str = "is not finite") -> DivergedError:
    """What is said of an optimisation that left the finite numbers.

    Args:
        what: which tensor, and whose.
        number: of the round.
        found: what was seen of it.
    """
    return DivergedError(
        f"round {number}: {what} {found}: its optimisation diverged; lower the learning rate "
        "(the method's image_lr, lr or server_lr) or use a smaller model.depth"
    )


def check_model_request(message: Message, context: RoundContext) -> None:
    """A model that a server sends must be of the run's architecture, before anything is charged.

    Raises:
        RequestRefusedError: another name, shape or type of a parameter or buffer.
    """
    if not isinstance(message, ModelParameters):
        return
    if not message.parameters:
        raise RequestRefusedError("the server sent no model")
    check_named("model", message.parameters, context.architecture.state_dict())
