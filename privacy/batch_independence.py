"""Tests whether a user's function computes the value of each example from that example only.

Every bound on the influence of one example assumes this. The function must not mix the examples of
a batch, draw random numbers, compute values that depend on the position of an example in the batch,
or keep state between calls. The test calls the function with public random images. It can find a
fault, but it cannot prove that there is none.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROWS = 8
# The tolerances for differences, relative to the largest value. They are needed because another
# batch may use another kernel, which rounds differently.
CPU_ROUNDING = 1e-4
DEVICE_ROUNDING = 1e-2
# Operations that torch marks as random, although they draw random numbers only with dropout. They
# are not reported, because dropout also changes their values.
SHARED_DRAWS = re.compile("attention|rnn|lstm|gru")

UNINITIALISED = re.compile("(new_)?empty(_like|_permuted|_strided)?")
MIXES = "mixes the examples of a batch (an example's value changes with the other examples)"
DRAWS = "draws random numbers"
KEEPS_STATE = "returns other values for the same examples when it is called again"
POSITION = "returns another value for an example at another position of the batch"
LENGTH = "returns other values for an example in a batch of another size"
AMONG_OTHERS = "returns another value for an example at another position or among other examples"
ADVICE = "Compute each value only from its example, without random numbers and without state"


class GlobalGenerators:
    """Restores the global random generators of torch, NumPy and Python after a `with` block.

    Args:
        device: the device whose torch generator is included, in addition to that of the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._saved = self._states()

    def _states(self) -> list[Any]:
        states = [np.random.get_state(), random.getstate(), torch.get_rng_state()]  # noqa: NPY002
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def position(self) -> tuple[Any, ...]:
        """Returns a value that changes when one of the generators is used."""
        legacy, python, *torch_states = self._states()
        torch_bytes = torch.cat(list(map(Tensor.cpu, torch_states))).numpy().tobytes()
        return legacy[1].tobytes(), legacy[2:], python, torch_bytes

    def rewind(self) -> None:
        """Restores the states that the generators had when this object was created."""
        legacy, python, cpu, *on_device = self._saved
        np.random.set_state(legacy)  # noqa: NPY002
        random.setstate(python)
        torch.set_rng_state(cpu)
        for state in on_device:
            torch.cuda.set_rng_state(state, self._device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.rewind()


class OperationWatch(TorchDispatchMode):
    """Records which torch operations draw random numbers, in a `with` block.

    Args:
        fill: the value to which uninitialised memory (`torch.empty`) is set. Two runs with
            different values show whether a function uses such memory.
        record: True records the results of all operations.

    Attributes:
        draws: the names of the operations that drew random numbers.
        values: the name of each operation and a copy of its result, if `record` is True.
    """

    def __init__(self, fill: float = 0.0, *, record: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fill = fill
        self._record = record
        self.draws: list[str] = []
        self.values: list[tuple[str, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in func.tags and not SHARED_DRAWS.search(name):
            self.draws.append(name)
        if UNINITIALISED.fullmatch(name):
            result.fill_(self._fill)
        if self._record:
            for value in tree_leaves(result):
                if isinstance(value, Tensor | bool | int | float):
                    self.values.append((name, torch.as_tensor(value).detach().clone()))
        return result


def dependence_on_batch(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], device: torch.device
) -> str:
    """Tests whether a function computes the value of an example from that example only.

    Args:
        function: a function of records [N, …] that returns values [N, …].
        shape: the shape of one record, such as (C, H, W).
        device: the device of the records.

    Returns:
        A description of the fault, which completes the sentence "the function …". An empty string
        if the test found no fault.

    >>> shape = (1, 4, 4)
    >>> dependence_on_batch(lambda x: x.flatten(1), shape, torch.device("cpu"))
    ''
    >>> dependence_on_batch(lambda x: x - x.mean(0), shape, torch.device("cpu"))
    "mixes the examples of a batch (an example's value changes with the other examples)"
    """
    with GlobalGenerators(device) as generators, torch.no_grad():
        return _Trial(function, generators, shape, device).finding()


class _Trial:
    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        generators: GlobalGenerators,
        shape: tuple[int, ...],
        device: torch.device,
    ) -> None:
        draws = np.random.default_rng(0)  # not torch's: another watch may be active
        both = torch.from_numpy(draws.random((2, ROWS, *shape), dtype=np.float32)).to(device)
        self._function = function
        self._generators = generators
        self._images = 0.25 + 0.5 * both[0]
        self._replacements = both[1]
        # more extreme than the first ones, so that a maximum over the batch selects these
        extreme = both[1].clone()
        extreme[0], extreme[1], extreme[2] = 0.0, 1.0, extreme[2].round()
        with suppress(Exception):  # some code refuses blank images, which is not mixing
            self._run(extreme)
            self._replacements = extreme

    def _run(self, images: Tensor, watch: OperationWatch | None = None) -> Tensor:
        self._generators.rewind()
        with watch or OperationWatch():
            return self._function(images.clone()).detach().double()

    def finding(self) -> str:
        images = self._images
        owner = getattr(self._function, "__self__", self._function)
        watch = OperationWatch()
        self._generators.rewind()  # as each run does first
        position = self._generators.position()
        first = self._run(images, watch)
        if watch.draws:
            return f"{DRAWS} ({watch.draws[0]})"
        if self._generators.position() != position:
            return DRAWS
        state = _state(owner)
        base = OperationWatch(1.0, record=True)
        if _differ(first, self._run(images, base)):
            return KEEPS_STATE
        for shift in (1, 3):
            if _differ(first, self._run(images.roll(shift, 0)).roll(-shift, 0)):
                return POSITION
        indices = torch.arange(ROWS, device=images.device)
        for half in (indices % 2 == 0, indices < ROWS // 2):
            finding = self._mixing(first, base, half)
            if finding:
                return finding
        if _state(owner) != state or _differ(first, self._run(images)):
            return KEEPS_STATE
        # no single examples, which normalisation layers of 1×1 maps refuse
        for part in (slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8), slice(0, ROWS - 1)):
            if _differ(first[part], self._run(images[part])):
                return LENGTH
        return ""

    def _mixing(self, first: Tensor, base: OperationWatch, half: Tensor) -> str:
        """Returns a description of the fault if the function mixes examples, otherwise "".

        The examples of one half of the batch are replaced, and then those of the other half. A
        result or intermediate value that changes both times was computed from examples of both
        halves.
        """
        watches = []
        for replaced in (half, ~half):
            images = self._images.clone()
            images[replaced] = self._replacements[replaced]
            watch = OperationWatch(1.0, record=True)
            if _differ(first[~replaced], self._run(images, watch)[~replaced]):
                return MIXES
            watches.append(watch.values)
        for (name, a), (name_b, b), (name_c, c) in zip(base.values, *watches, strict=False):
            if not (name == name_b == name_c and a.shape == b.shape == c.shape):
                return f"runs different operations depending on the values of examples (at {name})"
            if bool((_changed(a, b) & _changed(a, c)).any()):
                return f"computes a value from several examples together ({name})"
        return ""


def _state(owner: object) -> dict[str, object]:
    """Returns the parameters, buffers and simple attributes of a module in comparable form.

    Returns an empty dict if `owner` is not a module.
    """
    state: dict[str, object] = {}
    if not isinstance(owner, nn.Module):
        return state
    for path, module in owner.named_modules():
        for key, value in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(value, Tensor):
                content = value.detach().cpu().flatten().contiguous().view(torch.uint8)
                state[f"{path}.{key}"] = content.numpy().tobytes()
            elif isinstance(value, bool | int | float | str):
                state[f"{path}.{key}"] = value
            elif isinstance(value, dict | list | set):
                state[f"{path}.{key}"] = len(value)
    return state


def rounding(device: torch.device, precision: torch.dtype = torch.float32) -> float:
    """Returns the tolerance for differences due to rounding, relative to the largest value.

    Values of the same examples differ slightly if another batch uses another kernel.
    """
    if device.type == "cpu" and precision == torch.float32:
        return CPU_ROUNDING
    return DEVICE_ROUNDING


def _changed(a: Tensor, b: Tensor) -> Tensor:
    if not a.is_floating_point():
        return a != b
    if a.numel() == 0:
        return torch.zeros_like(a, dtype=torch.bool)
    a = a.double().nan_to_num(0.0, 0.0, 0.0)
    b = b.double().nan_to_num(0.0, 0.0, 0.0)
    changed: Tensor = (a - b).abs() > rounding(a.device) * a.abs().max()
    return changed


def _differ(a: Tensor, b: Tensor) -> bool:
    return a.shape != b.shape or bool(_changed(a, b).any())
