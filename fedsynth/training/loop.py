"""A loop that reports its progress and resumes after the last step that a checkpoint holds
(docs/decisions/resuming.md).

Checkpoints of long loops, so that a run that is killed inside a round need not restart them
(docs/decisions/resuming.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

Tensors = Callable[[], Mapping[str, Tensor]]
"""Returns the tensors of a loop's state, by name."""


class LoopCheckpointer(Protocol):
    """Saves checkpoints of a round's long loops: those of open clients, and the server's. Never a
    private client's: its releases are not repeated.

    Attributes:
        shared: a checkpointer that other runs also use; the names of its loops must include
            everything that the loops depend on. None: there is none.
    """

    @property
    def shared(self) -> LoopCheckpointer | None: ...

    def load(self, name: str) -> tuple[int, Mapping[str, Tensor]] | None:
        """Returns the number of finished steps of the loop with this name, and its tensors then;
        None: there is no checkpoint."""

    def offer(self, name: str, completed: int, tensors: Tensors) -> None:
        """Receives the number of finished steps; calls `tensors` if a checkpoint is due."""

    def finish(self, name: str, steps: int, tensors: Tensors) -> None:
        """Receives the final tensors of a loop, which no longer change; the next checkpoint includes
        them, because another loop of the round may be interrupted."""


class NullCheckpointer:
    """Saves nothing: a killed round starts from scratch."""

    shared: LoopCheckpointer | None = None

    def load(self, name: str) -> tuple[int, Mapping[str, Tensor]] | None:
        """Returns None."""
        return None

    def offer(self, name: str, completed: int, tensors: Tensors) -> None:
        """Does nothing."""

    def finish(self, name: str, steps: int, tensors: Tensors) -> None:
        """Does nothing."""


State = Mapping[str, Any]
"""A loop's mutable state, by name: tensors, networks, optimisers, learning rate schedules,
generators, and growing lists of tuples of tensors."""


def resumable(
    steps: int,
    state: State,
    *,
    keeper: LoopCheckpointer | None = None,
    name: str = "loop",
    report: Callable[[int], None] = lambda completed: None,
    draws: Sequence[Iterator[object]] = (),
) -> Iterator[int]:
    """Yields 0, 1, ..., steps - 1, from the step after the last checkpoint of this loop.

    Args:
        steps: total number of steps.
        state: the objects that the loop changes in place, saved and restored.
        keeper: keeps the checkpoints; None: nothing is saved.
        name: identifies this loop within a round.
        report: called with the number of finished steps.
        draws: random draws that are not in `state`, one for each step: those of the steps that a
            checkpoint holds are skipped.

    >>> total = torch.zeros(1)
    >>> for step in resumable(3, {"total": total}):
    ...     total += step
    >>> total
    tensor([3.])
    """
    keeper = keeper or NullCheckpointer()
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
    """Restores a checkpoint and returns its number of steps: 0 without one, or if a tensor is
    missing or has another shape."""
    if saved is None:
        return 0
    completed, tensors = saved
    for name, part in state.items():
        if isinstance(part, Tensor) and (name not in tensors or tensors[name].shape != part.shape):
            return 0
    load_tensors(state, tensors)
    return completed


def named_tensors(state: State) -> dict[str, Tensor]:
    """Returns the tensors of all parts of a loop's state; each name begins with its part's name."""
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
    """Restores the tensors of `named_tensors` in place; ignores tensors with other names."""
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
    """Groups tensors named "number.key" by number and key."""
    rows: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, key = name.split(".")
        rows.setdefault(int(number), {})[key] = tensor.clone()
    return rows
