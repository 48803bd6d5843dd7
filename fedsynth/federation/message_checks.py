"""Checks of the messages of an exchange, made on both sides before anything is computed from them.

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


def check_declared(method: Method, message: Message, declared: type[Message]) -> None:
    """Checks that a message has the declared type, which was checked for differential privacy.

    Raises:
        TypeError: `message` is of another type.
    """
    if type(message) is not declared:
        raise TypeError(
            f"{method.name} declares messages of type {declared.__name__}, "
            f"got {type(message).__name__}"
        )


def check_finite(tensors: Mapping[str, Tensor], source: str, number: int) -> None:
    """Checks each result once, outside the hot loops; a NaN would otherwise spread unnoticed.

    Raises:
        DivergedError: names the round, the tensor and its owner.
    """
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise diverged_error(f"{name} of the {source}", number)


def diverged_error(what: str, number: int, problem: str = "is not finite") -> DivergedError:
    """Returns the error of a diverged optimisation.

    Args:
        what: the tensor and its owner.
        number: of the round.
        problem: the symptom.
    """
    return DivergedError(
        f"round {number}: {what} {problem}: its optimisation diverged; lower the learning rate "
        "(the method's image_lr, lr or server_lr) or use a smaller model.depth"
    )


def check_model_request(message: Message, context: RoundContext) -> None:
    """Checks, before anything is charged, that a server's model has the run's architecture.

    Raises:
        RequestRefusedError: another name, shape or type of a parameter or buffer.
    """
    if not isinstance(message, ModelParameters):
        return
    if not message.parameters:
        raise RequestRefusedError("the server did not send a model")
    check_named("model", message.parameters, context.architecture.state_dict())
