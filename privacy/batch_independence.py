"""A trial whether a user's function of a batch computes each example's value from that example
only.

Every bound on one example's influence assumes this: no mixing of examples, no random numbers, no
arithmetic that depends on the position, no state between calls. The trial uses public random
images. It can find a fault, but cannot prove that there is none.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

ROWS = 8
CPU_ROUNDING = 1e-4
DEVICE_ROUNDING = 1e-2
"""The tolerances relative to the largest value, as another batch may use another kernel."""
SHARED_DRAWS = re.compile("attention|rnn|lstm|gru")
"""Operations that draw random numbers only with dropout, which then changes their values."""
UNINITIALISED = re.compile("(new_)?empty(_like|_permuted|_strided)?")
MIXES = "mixes the examples of a batch (an example's value changes with the other examples)"
DRAWS = "draws random numbers"
KEEPS_STATE = "returns other values for the same examples when it is called again"
POSITION = "returns another value for an example at another position of the batch"
LENGTH = "returns other values for an example in a batch of another size"
AMONG_OTHERS = (
    "returns another value for an example at another position or with other examples in the batch"
)
ADVICE = "compute each value only from its example, without random numbers and without state"


class GlobalGenerators:
    """The process's global random generators: those of torch, NumPy and Python. Leaving the context
    restores their state.

    Args:
        device: the device whose torch generator is watched, in addition to the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._saved = self._states()

    def _states(self) -> tuple[Any, ...]:
        on_device = None if self._device is None else torch.cuda.get_rng_state(self._device)
        legacy = np.random.get_state()  # noqa: NPY002
        return torch.get_rng_state(), on_device, legacy, random.getstate()

    def position(self) -> tuple[Any, ...]:
        """Returns a value that changes when any of the generators is used."""
        cpu, on_device, legacy, python = self._states()
        torch_states = [state.numpy().tobytes() for state in (cpu, on_device) if state is not None]
        return *torch_states, repr(legacy[1:]), legacy[1].tobytes(), python

    def rewind(self) -> None:
        """Restores the initial states of the generators."""
        cpu, on_device, legacy, python = self._saved
        torch.set_rng_state(cpu)
        if self._device is not None:
            torch.cuda.set_rng_state(on_device, self._device)
        np.random.set_state(legacy)  # noqa: NPY002
        random.setstate(python)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.rewind()


class OperationWatch(TorchDispatchMode):
    """Records torch's operations: which of them draw random numbers, and their results.

    Args:
        fill: the value written to uninitialised memory (`torch.empty`), so that its use is
            detected.
        keeps_values: whether to keep all results.

    Attributes:
        draws: the names of operations that drew random numbers.
        values: the name of each operation and a copy of its result.
    """

    def __init__(self, fill: float = 0.0, *, keeps_values: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fill = fill
        self._keeps = keeps_values
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
        several = result if isinstance(result, tuple | list) else (result,)
        for value in several if self._keeps else ():
            if isinstance(value, Tensor | bool | int | float):
                self.values.append((name, torch.as_tensor(value).detach().clone()))
        return result


def dependence_on_batch(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], device: torch.device
) -> str:
    """Returns how an example's value depends on more than the example, or "" if a trial finds
    nothing.

    Args:
        function: records [N, …] -> values [N, …].
        shape: of one record, such as (C, H, W).
        device: the records' device.

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
        self._others = both[1]
        # more extreme than the first ones, so that a maximum over the batch selects these
        extreme = self._others.clone()
        extreme[0], extreme[1], extreme[2] = 0.0, 1.0, extreme[2].round()
        try:
            self._run(extreme)
            self._others = extreme
        except Exception:  # some code refuses blank images, which is not mixing
            pass

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
        if watch.draws or self._generators.position() != position:
            return f"{DRAWS}{f' ({watch.draws[0]})' if watch.draws else ''}"
        state = _state(owner)
        base = OperationWatch(1.0, keeps_values=True)
        if _differ(first, self._run(images, base)):
            return KEEPS_STATE
        shifted = [self._run(images.roll(k, 0)).roll(-k, 0) for k in (1, 3)]
        if any(_differ(first, output) for output in shifted):
            return POSITION
        for chosen in (torch.arange(ROWS) % 2 == 0, torch.arange(ROWS) < ROWS // 2):
            finding = self._mixing(first, base, chosen.to(images.device))
            if finding:
                return finding
        if _state(owner) != state or _differ(first, self._run(images)):
            return KEEPS_STATE
        # in pairs, as normalisation layers of 1×1 maps refuse a single example
        pairs = torch.cat([self._run(pair) for pair in images.split(2)])
        shorter = self._run(images[:-1])
        return LENGTH if _differ(first, pairs) or _differ(first[:-1], shorter) else ""

    def _mixing(self, first: Tensor, base: OperationWatch, chosen: Tensor) -> str:
        """Replaces the chosen examples, then the others. A result or intermediate value that
        changes both times was computed from examples of both halves."""
        both = []
        for replaced in (chosen, ~chosen):
            one_each = replaced.view(-1, *[1] * (self._images.dim() - 1))
            images = torch.where(one_each, self._others, self._images)
            watch = OperationWatch(1.0, keeps_values=True)
            if _differ(first[~replaced], self._run(images, watch)[~replaced]):
                return MIXES
            both.append(watch.values)
        for (name, a), (other, b), (another, c) in zip(base.values, *both, strict=False):
            if not (name == other == another and a.shape == b.shape == c.shape):
                return f"branches on the values of examples (at {name})"
            if bool((_changed(a, b) & _changed(a, c)).any()):
                return f"computes a value from several examples together ({name})"
        return ""


def _state(owner: object) -> dict[str, object]:
    """Returns those of a module's parameters, buffers and attributes that can be compared."""
    state: dict[str, object] = {}
    if not isinstance(owner, nn.Module):
        return state
    for name, tensor in owner.state_dict().items():
        state[name] = tensor.cpu().view(torch.uint8).numpy().tobytes()
    for path, module in owner.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                state[f"{path}.{key}"] = value.detach().cpu().double().sum().item()
            elif isinstance(value, bool | int | float | str):
                state[f"{path}.{key}"] = value
            elif isinstance(value, dict | list | set):
                state[f"{path}.{key}"] = len(value)
    return state


def rounding(device: torch.device, precision: torch.dtype = torch.float32) -> float:
    """Returns the tolerance for kernels of another batch, relative to the largest value."""
    exact = device.type == "cpu" and precision == torch.float32
    return CPU_ROUNDING if exact else DEVICE_ROUNDING


def _changed(a: Tensor, b: Tensor) -> Tensor:
    if not a.is_floating_point():
        return a != b
    a, b = (values.double().nan_to_num(0.0, 0.0, 0.0) for values in (a, b))
    largest = a.abs().max() if a.numel() else 0.0
    changed: Tensor = (a - b).abs() > rounding(a.device) * largest
    return changed


def _differ(a: Tensor, b: Tensor) -> bool:
    return a.shape != b.shape or bool(_changed(a, b).any())
