"""Runs long loops that report progress and resume from checkpoints.

A run that was killed in the middle of a round continues from the loop's last saved step
(docs/decisions/resuming.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

TRAINED = "trained-"
# A function that returns a loop's tensors, by name.
MakeTensors = Callable[[], Mapping[str, Tensor]]


class LoopCheckpointer:
    """Saves checkpoints within a round, so that a killed run can continue long loops.

    The base class saves nothing, so a killed run repeats the current round. Subclasses save
    checkpoints of the server's loops and of clients' loops without differential privacy. A private
    client's loops are never saved, because its releases must not be repeated.

    Attributes:
        shares_trainings: whether runs share finished trainings, whose names begin with `TRAINED`.
    """

    shares_trainings = False

    def load(self, name: str) -> tuple[int, Mapping[str, Tensor]] | None:
        """Loads the named loop's checkpoint.

        Returns:
            The number of finished steps and the loop's tensors after them, or None if there is no
            checkpoint.
        """
        return None

    def offer(self, name: str, completed: int, tensors: MakeTensors) -> None:
        """Saves a checkpoint of a loop after a step, if a checkpoint is due.

        Args:
            name: the name of the loop.
            completed: the number of finished steps.
            tensors: returns the tensors to save. It is called only if a checkpoint is due.
        """

    def finish(self, name: str, steps: int, tensors: MakeTensors) -> None:
        """Stores the tensors of a finished loop for the next checkpoint.

        If the run is interrupted in a later loop of the same round, it need not repeat the finished
        one.
        """


# The objects that a loop changes, by name. Tensors, networks, optimisers, learning rate schedules,
# random generators, and growing lists of tuples of tensors are supported.
State = Mapping[str, Any]


def resumable(
    steps: int,
    state: State,
    *,
    keeper: LoopCheckpointer | None = None,
    name: str = "loop",
    report: Callable[[int], None] = lambda completed: None,
    draws: Sequence[Iterator[object]] = (),
) -> Iterator[int]:
    """Yields a loop's step numbers, starting after its last checkpoint.

    Without a checkpoint, the loop yields 0, 1, ..., steps - 1.

    Args:
        steps: total number of steps.
        state: the objects that the loop changes in place. They are saved in checkpoints and
            restored from them.
        keeper: saves and loads the checkpoints. With None, nothing is saved.
        name: the name of the loop, which must be unique within a round.
        report: called with the number of finished steps after each step.
        draws: iterators of random draws outside `state`, with one draw for each step. A resumed
            loop skips the finished steps' draws.

    >>> total = torch.zeros(1)
    >>> for step in resumable(3, {"total": total}):
    ...     total += step
    >>> total
    tensor([3.])
    """
    keeper = keeper or LoopCheckpointer()
    completed = _restored(keeper.load(name), state)
    for draw in draws:
        for _ in range(completed):
            next(draw)
    for step in range(completed, steps):
        yield step
        keeper.offer(name, step + 1, lambda: named_tensors(state))
        report(step + 1)
    keeper.finish(name, steps, lambda: named_tensors(state))


def _restored(saved: tuple[int, Mapping[str, Tensor]] | None, state: State) -> int:
    """Restores a loop's state from its checkpoint, and returns the number of finished steps.

    Returns 0 and changes nothing if there is no checkpoint, or if a tensor is missing or has a
    different shape.
    """
    if saved is None:
        return 0
    completed, tensors = saved
    for name, part in state.items():
        if isinstance(part, Tensor) and (name not in tensors or tensors[name].shape != part.shape):
            return 0
    load_tensors(state, tensors)
    return completed


def named_tensors(state: State) -> dict[str, Tensor]:
    """Returns all tensors of a loop's state, for saving.

    Each name begins with the name of the tensor's object.
    """
    named: dict[str, Tensor] = {}
    for name, part in state.items():
        if isinstance(part, Tensor):
            named[name] = part
        elif isinstance(part, torch.Generator):
            named[name] = part.get_state()
        elif isinstance(part, LRScheduler):
            named[f"{name}.steps"] = torch.tensor(part.last_epoch)
            named[f"{name}.rate"] = torch.tensor(part.get_last_lr(), dtype=torch.float64)
        elif isinstance(part, list):
            for number, row in enumerate(part):
                for k, value in enumerate(row):
                    named[f"{name}.{number}.{k}"] = value
        elif isinstance(part, nn.Module):
            for key, value in part.state_dict().items():
                named[f"{name}.{key}"] = value.clone()
        else:
            for number, moments in part.state_dict()["state"].items():
                for key, value in moments.items():
                    if value is not None:
                        named[f"{name}.{number}.{key}"] = value.clone()
    return named


def load_tensors(state: State, tensors: Mapping[str, Tensor]) -> None:
    """Copies tensors from `named_tensors` into a loop's state, in place.

    Tensors whose names do not belong to an object of `state` are ignored.
    """
    for name, part in state.items():
        part_tensors = {
            k.removeprefix(f"{name}."): t for k, t in tensors.items() if k.startswith(f"{name}.")
        }
        if isinstance(part, Tensor):
            part.copy_(tensors[name])
        elif isinstance(part, torch.Generator):
            part.set_state(tensors[name].cpu())
        elif isinstance(part, LRScheduler):
            part.last_epoch = int(part_tensors["steps"])
            for group, rate in zip(part.optimizer.param_groups, part_tensors["rate"], strict=True):
                group["lr"] = float(rate)
        elif isinstance(part, list):
            rows = sorted(_numbered(part_tensors).items())
            part[:] = [tuple(row[key] for key in sorted(row)) for _, row in rows]
        elif isinstance(part, nn.Module):
            part.load_state_dict(part_tensors)
        else:
            part.load_state_dict({**part.state_dict(), "state": _numbered(part_tensors)})


def _numbered(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Groups tensors with names like "number.key" by number and key."""
    rows: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, key = name.split(".")
        rows.setdefault(int(number), {})[key] = tensor.clone()
    return rows
