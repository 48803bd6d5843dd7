"""Tests whether a user's function computes each example's value from that example only.

Every bound on the influence of one example assumes this. The function must not mix the examples of
a batch, draw random numbers, compute values that depend on an example's batch position,
or keep state between calls. The test calls the function with public random images. It can find a
fault, but it cannot prove that there is none.
"""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedsynth.privacy.passes import values_of_each
from fedsynth.privacy.reachable_state import ReachableState

SHORTEST = 1e-30  # a norm by which changes can be divided
ROWS = 8  # of which every operation is watched
TRIAL_LENGTH = 32  # of a pass, where the real length is not known
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
OTHER_OPERATIONS = "runs different operations depending on the values of examples"
KEEPS_STATE = "returns other values for the same examples when it is called again"
STATE = "keeps state between calls"
FIRST_BATCH = "keeps values of its first batch"
POSITION = "returns another value for an example at another position of the batch"
LENGTH = "returns other values for an example in a batch of another size"
AMONG_OTHERS = "returns another value for an example at another position or among other examples"
ADVICE = "Compute each value only from its example, without random numbers and without state"


class GlobalGenerators:
    """Restores torch's, NumPy's and Python's global generators after a `with` block.

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
        """Returns the generators' state, which changes when one of them is used."""
        legacy, python, *torch_states = self._states()
        torch_bytes = torch.cat(list(map(Tensor.cpu, torch_states))).numpy().tobytes()
        return legacy[1].tobytes(), legacy[2:], python, torch_bytes

    def rewind(self) -> None:
        """Restores the generators' initial states."""
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


class _WithoutChecks(TorchFunctionMode):
    """Hides from a watch that `one_hot` computes the range of a batch's labels to check them."""

    def __init__(self, watch: OperationWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        recorded = len(self._watch.values)
        result = func(*args, **(kwargs or {}))
        if func is F.one_hot and type((*args, *(kwargs or {}).values())[0]) is Tensor:
            del self._watch.values[recorded:-1]  # all but the result, whose width may be computed
        return result


class OperationWatch(TorchDispatchMode):
    """Records which torch operations in a `with` block draw random numbers.

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
        draws = torch.Tag.nondeterministic_seeded in func.tags and not SHARED_DRAWS.search(name)
        # of a generator of its own: other numbers at each call change the values, which is found
        seeded = any(isinstance(a, torch.Generator) for a in (*args, *(kwargs or {}).values()))
        if draws and not seeded:
            self.draws.append(name)
        if UNINITIALISED.fullmatch(name):
            result.fill_(self._fill)
        if self._record:
            for value in tree_leaves(result):
                if isinstance(value, Tensor | bool | int | float):
                    self.values.append((name, torch.as_tensor(value).detach().clone()))
        return result


@dataclass(frozen=True)
class StepInputs:
    """The inputs of user code in a private step.

    A step splits its records into passes of one length. The last pass is padded with zeros.

    Args:
        shape: the shape of one record, such as (C, H, W).
        device: the device of the records.
        length: the number of records in a pass.
        bounds: the smallest and the largest value in a record.
        classes: the number of classes. Labels are 0, ..., classes - 1.
        label_shape: the shape of one label, () for a class and (H, W) for a mask.
        padding: the label of padding.
        finite: False if records may contain NaN, and infinity if the bounds are infinite.
        precision: the type of the numbers in a network.
        seed: the seed of the random records.
    """

    shape: tuple[int, ...]
    device: torch.device
    length: int = TRIAL_LENGTH
    bounds: tuple[float, float] = (0.0, 1.0)
    classes: int = 1
    label_shape: tuple[int, ...] = ()
    padding: int = 0
    finite: bool = True
    precision: torch.dtype = torch.float32
    seed: int = 0

    def draw(self, seed: int, count: int) -> tuple[Tensor, Tensor]:
        """Draws public random records [count, ...] and labels [count, ...].

        Values are uniform within the bounds. If a bound is infinite, every other record is uniform
        in [0, 1], and the others are normal, because some functions need positive values.
        """
        draws = np.random.default_rng(self.seed + seed)  # not torch's: another watch may be active
        values = draws.random((count, *self.shape), dtype=np.float32)
        low, high = self.bounds
        if math.isfinite(high - low):
            values = low + (high - low) * values
        else:
            values[1::2] = 3 * draws.standard_normal(values[1::2].shape, dtype=np.float32)
        labels = torch.from_numpy(draws.integers(0, self.classes, (count, *self.label_shape)))
        x = torch.from_numpy(values).to(torch.float32).clamp(*self.bounds)
        return x.to(self.device), labels

    def binary(self, count: int) -> Tensor:
        """Draws records [count, ...] in which each value is the lower or the upper bound."""
        low, high = map(float, self.bounds)
        if not math.isfinite(high - low):
            low, high = -1e3, 1e3
        is_low = np.random.default_rng(self.seed + 2).integers(0, 2, (count, *self.shape)) == 0
        values = torch.from_numpy(np.where(is_low, low, high).astype(np.float32))
        return values.clamp(*self.bounds).to(self.device)

    def extremes(self) -> list[Tensor]:
        """Returns records with extreme values, such as the bounds and NaN."""
        low, high = map(float, self.bounds)
        bounded = math.isfinite(high - low)
        values = [low, high, 0.0] if bounded else [0.0, 1e6, -1e6, 1e-6]
        if not self.finite:
            values += [math.nan] if bounded else [math.nan, math.inf, -math.inf]
        records = [torch.full(self.shape, value) for value in values]
        clamped = [record.clamp(*self.bounds).to(self.device) for record in records]
        return [*clamped, *self.binary(1)]


@dataclass(frozen=True)
class Dependence:
    """The result of testing user code.

    Attributes:
        fault: a description of the fault, which completes the sentence "the function …". An empty
            string if the trial found no fault.
        moved: the largest L2 norm of a change of a record's value, divided by the norm of the
            value, if the record is moved or others are replaced. Rounding errors are about 1e-7. It
            is above 0 if one bit changes.
        opaque: the types of objects whose state the trial could not compare.
        values: the values of the first records of the trial, [length, D].
    """

    fault: str = ""
    moved: float = 0.0
    opaque: frozenset[str] = frozenset()
    values: Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)

    def __bool__(self) -> bool:
        return bool(self.fault)

    def __str__(self) -> str:
        return self.fault


# A function of records [N, …] and labels [N] that returns the value of each record [N, …].
RecordFunction = Callable[[Tensor, Tensor], Tensor]


def dependence_on_batch(
    function: RecordFunction,
    inputs: StepInputs,
    *,
    operations: bool = True,
    passes: bool = True,
    holders: Sequence[object] = (),
) -> Dependence:
    """Tests whether a function computes each record's value from that record only.

    Args:
        function: the user's function.
        inputs: the inputs that a step passes to it.
        operations: whether the function's operations are watched on a few records. This finds
            random draws and values that are computed from several records together. The gradient of
            a sum of losses is such a value, although each record's gradient depends only on it.
        passes: whether passes of the step's length are compared.
        holders: objects whose state is compared, in addition to what the function can reach.

    >>> inputs = StepInputs((1, 4, 4), torch.device("cpu"))
    >>> dependence_on_batch(lambda x, y: x.flatten(1), inputs).fault
    ''
    >>> dependence_on_batch(lambda x, y: x - x.mean(0), inputs).fault
    "mixes the examples of a batch (an example's value changes with the other examples)"
    """
    with GlobalGenerators(inputs.device) as generators, torch.no_grad():
        fault = _FewRecords(function, generators, inputs).fault() if operations else ""
        if fault or not passes:
            return Dependence(fault)
        return _Passes(function, generators, inputs).result(holders)


def network_dependence(network: nn.Module, inputs: StepInputs, *, trains: bool) -> Dependence:
    """Tests whether a network's outputs and features for an image depend only on that image.

    Args:
        network: the network, which is not changed.
        inputs: the images.
        trains: whether the network is also tested in training mode.
    """
    inputs = replace(inputs, classes=1)  # a network receives no labels
    for mode in sorted({False, trains}):
        twin = copy.deepcopy(network).train(mode)
        for function in filter(None, (twin, getattr(twin, "embed", None))):
            result = dependence_on_batch(partial(_of_images, function), inputs)
            if result:
                return result
    return Dependence()


def _of_images(network: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return network(x)


def dependence_in_step(
    values: RecordFunction,
    inputs: StepInputs,
    expected: Tensor | None = None,
    *,
    fault: str = KEEPS_STATE,
    thorough: bool,
) -> Dependence:
    """Tests whether a private step computes each record's value from that record only.

    State is not compared, because a step may reach what the trial itself changes.

    Args:
        values: computes the values of records as the step does.
        inputs: the records.
        expected: the values of the first records in an earlier run of the step, among other
            records, or of another computation. If they are passed, only these values are compared.
        fault: the description of the fault if values differ from the expected ones.
        thorough: True for user code. Otherwise, only two other passes are compared with the first.
    """
    with GlobalGenerators(inputs.device) as generators:
        passes = _Passes(values, generators, inputs)
        if expected is not None:
            return passes.compared_with(expected, fault)
        return passes.of_step(thorough=thorough)


class _Passes:
    """A test whether replacing some records of a batch changes the other records' values.

    The batch is as large as in a step. The state that the function can reach is compared, too.
    """

    def __init__(
        self, function: RecordFunction, generators: GlobalGenerators, inputs: StepInputs
    ) -> None:
        self._function = function
        self._generators = generators
        self._inputs = inputs
        self._x = self._y = self._first = self._sizes = torch.empty(0)
        self._positions = torch.arange(inputs.length)
        self._fault = ""
        self._moved = 0.0
        self._finite = False
        self._watches = False
        self._fill = 0.0

    def _begin(self, x: Tensor, y: Tensor, values: Tensor | None = None) -> Tensor:
        """Computes the reference values for all later comparisons."""
        self._x, self._y = x, y
        self._first = self._values(x, y) if values is None else values
        self._sizes = torch.linalg.vector_norm(self._first, math.inf, dim=1).cpu()
        return self._first

    def _values(self, x: Tensor, y: Tensor) -> Tensor:
        """Computes one value per record. As in a private step, non-finite values become 0."""
        self._generators.rewind()
        position = self._generators.position()
        watch = OperationWatch(self._fill)
        with watch if self._watches else nullcontext():
            values = values_of_each(self._function, (x, y), lambda text: None).detach()
        if self._watches and (watch.draws or self._generators.position() != position):
            self._fault = DRAWS
        self._finite = self._finite or bool(torch.isfinite(values).any())
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        return values.nan_to_num(0.0, 0.0, 0.0).reshape(len(values), -1)

    def result(self, holders: Sequence[object]) -> Dependence:
        initial = ReachableState.of(self._function, *holders)
        self._begin(*self._inputs.draw(0, self._inputs.length))
        before_trial = ReachableState.of(self._function, *holders)
        if not self._finite:
            return Dependence("returns no finite value for random records within the bounds")
        self._compare(self._positions >= 0, KEEPS_STATE)
        self._move()
        self._replace()
        self._begin(*self._with_extremes())
        self._replace_halves()
        self._pair_classes()
        change = before_trial.change_since(initial, only_tensors=True)
        change = change or ReachableState.of(self._function, *holders).change_since(before_trial)
        if change and not self._fault:
            self._fault = f"{STATE} ({change} changes)"
        return Dependence(self._fault, self._moved, frozenset(before_trial.opaque))

    def of_step(self, *, thorough: bool) -> Dependence:
        """Tests whether moving or replacing records changes other records' values."""
        self._watches = thorough
        values = self._begin(*self._inputs.draw(0, self._inputs.length))
        even = self._positions % 2 == 0
        extremes = self._inputs.extremes()
        mixed = torch.stack(extremes)[self._positions % len(extremes)]
        mixed[2::3] = self._inputs.binary(len(mixed[2::3]))
        self._compare(self._positions >= 0, POSITION, order=self._positions.roll(1))
        fewer = self._positions.roll(3)[:-1]  # padding takes the last place
        self._compare(even, MIXES, records=mixed, order=fewer)
        if thorough:
            few = self._positions % 8 == 0
            for record in extremes[:2]:  # so that every mean or extreme of a batch occurs
                self._compare(few, MIXES, records=record[None])
            replacements, labels = self._inputs.draw(3, self._inputs.length)
            for unchanged in (even, ~even):
                self._compare(unchanged, MIXES, records=replacements, labels=labels)
            copies, labels = self._x.roll(1, 0), self._y.roll(1)
            self._compare(even, MIXES, records=copies, labels=labels)
            self._fill = 1.0
            self._compare(self._positions >= 0, KEEPS_STATE)
            self._pair_classes()
        return Dependence(self._fault, self._moved, values=values)

    def compared_with(self, values: Tensor, fault: str) -> Dependence:
        """Computes the first records' values again, and compares them with the given `values`."""
        self._watches = True
        self._begin(*self._inputs.draw(0, self._inputs.length), values)
        self._compare(self._positions >= 0, fault)
        return Dependence(self._fault, self._moved)

    def _move(self) -> None:
        """Tests whether a record's value depends on its position in the batch."""
        shuffled = torch.from_numpy(np.random.default_rng(1).permutation(len(self._positions)))
        for order in (self._positions.roll(1), self._positions.roll(3), shuffled):
            self._compare(self._positions >= 0, POSITION, order=order)

    def _replace(self) -> None:
        """Tests whether a record's value depends on other records, their labels or padding."""
        even, few, first = self._positions % 2 == 0, self._positions % 8 == 0, self._positions == 0
        self._compare(even, MIXES, labels=self._y[:1])
        self._replace_halves()
        for record in self._inputs.extremes():
            for unchanged in (few, ~first):
                self._compare(unchanged, MIXES, records=record[None])
        padding = torch.tensor([self._inputs.padding])
        self._compare(first, MIXES, records=torch.zeros_like(self._x[:1]), labels=padding)

    def _replace_halves(self) -> None:
        even, half = self._positions % 2 == 0, self._positions < len(self._positions) // 2
        records, labels = self._inputs.draw(3, len(self._positions))
        for unchanged in (even, ~even, half, ~half):
            self._compare(unchanged, MIXES, records=records, labels=labels)

    def _pair_classes(self) -> None:
        """Tests whether a record's value depends on another record of its class.

        Code may treat any class specially, so each class has two records in one of 2·classes/length
        passes. With many classes and short passes, these take most of a trial's time.
        """
        classes, length = self._inputs.classes, self._inputs.length
        if classes == 1:
            return
        x, _ = self._inputs.draw(4, length)
        records, _ = self._inputs.draw(5, length)
        even = self._positions % 2 == 0
        for first in range(0, classes, max(1, length // 2)):
            if self._fault:
                return
            y = (first + self._positions // 2) % classes
            y = y.view(-1, *[1] * len(self._inputs.label_shape)).expand(
                -1, *self._inputs.label_shape
            )
            self._begin(x, y.contiguous())
            self._compare(even, MIXES, records=records)

    def _with_extremes(self) -> tuple[Tensor, Tensor]:
        """Returns records and labels in which some records are extreme.

        The others occur twice, and their values are rounded, so that columns have ties, like
        columns of site numbers.
        """
        low, high = self._inputs.bounds
        bounded = math.isfinite(high - low)
        start, step = (low, (high - low) / 4) if bounded else (0.0, 1.0)
        x = (start + ((self._x - start) / step).round() * step).clamp(low, high)
        half = len(x) // 2
        x[half:] = x[: len(x) - half].clone()
        y = torch.cat([self._y[:half], self._y[: len(x) - half]])
        records = torch.stack(self._inputs.extremes()[: len(x) // 2])
        places = torch.linspace(0, len(x) - 1, len(records)).long()
        x[places.to(x.device)] = records
        return x, y

    def _compare(
        self,
        unchanged: Tensor,
        fault: str,
        *,
        records: Tensor | None = None,
        labels: Tensor | None = None,
        order: Tensor | None = None,
    ) -> None:
        """Replaces or reorders records, and checks that `unchanged` records keep their values."""
        if self._fault or not bool(unchanged.any()):
            return
        x, y = self._x, self._y
        order = self._positions if order is None else order
        if records is not None:
            x = _select_rows(unchanged, x, records)
        if labels is not None:
            y = _select_rows(unchanged, y, labels)
        moved = self._values(x[order.to(x.device)], y[order])
        if moved.shape != (len(order), *self._first.shape[1:]):
            self._fault = LENGTH
            return
        changes = torch.zeros(len(self._positions))
        for position, number in enumerate(order.tolist()):  # as all rows at once need much memory
            expected, actual = self._first[number], moved[position]
            if unchanged[number] and not torch.equal(expected, actual):
                change = expected - actual
                changes[number] = torch.linalg.vector_norm(change, math.inf)
                shorter = torch.minimum(expected.norm(), actual.norm())
                relative_change = float(change.norm() / shorter.clamp_min(SHORTEST))
                self._moved = max(self._moved, relative_change, SHORTEST)
        sizes = self._sizes[unchanged]
        usual = sizes[sizes > 0].median() if bool(sizes.any()) else sizes.max()
        relative = changes[unchanged] / torch.maximum(sizes, usual)
        largest = float(relative.nan_to_num(0.0, math.inf).max())
        if largest > rounding(moved.device, self._inputs.precision):
            self._fault = self._fault or fault


def _select_rows(condition_N: Tensor, rows: Tensor, replacements: Tensor) -> Tensor:
    """Replaces the rows for which a condition is False (`torch.where` for whole rows)."""
    condition = condition_N.to(rows.device).view(-1, *[1] * (rows.dim() - 1))
    return torch.where(condition, rows, replacements)


class _FewRecords:
    """A test of a function's result and of each torch operation in it, on a few records."""

    def __init__(
        self, function: RecordFunction, generators: GlobalGenerators, inputs: StepInputs
    ) -> None:
        self._function = function
        self._generators = generators
        both, labels = inputs.draw(0, 2 * ROWS)
        self._labels, self._other_labels = labels.split(ROWS)
        self._images = both[:ROWS]
        low, high = inputs.bounds
        if math.isfinite(high - low):
            self._images = low + (high - low) * 0.25 + 0.5 * (self._images - low)
        self._replacements = both[ROWS:]
        # more extreme than the first ones, so that a maximum over the batch selects these
        extreme = self._replacements.clone()
        extreme[:3] = torch.stack([*inputs.extremes()[:2], inputs.extremes()[-1]])
        with suppress(Exception):  # some code refuses blank images, which is not mixing
            self._run(extreme)
            self._replacements = extreme

    def _run(
        self,
        images: Tensor,
        watch: OperationWatch | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        self._generators.rewind()
        labels = (self._labels if labels is None else labels)[: len(images)].clone()
        watch = watch or OperationWatch()
        with watch, _WithoutChecks(watch):
            return self._function(images.clone(), labels).detach().double()

    def fault(self) -> str:
        images = self._images
        watch = OperationWatch()
        self._generators.rewind()  # as each run does first
        position = self._generators.position()
        first = self._run(images, watch)
        if watch.draws:
            return f"{DRAWS} ({watch.draws[0]})"
        if self._generators.position() != position:
            return DRAWS
        base = OperationWatch(1.0, record=True)
        if _differ(first, self._run(images, base)):
            return KEEPS_STATE
        for shift in (1, 3):
            moved = self._run(images.roll(shift, 0), labels=self._labels.roll(shift))
            if _differ(first, moved.roll(-shift, 0)):
                return POSITION
        indices = torch.arange(ROWS, device=images.device)
        for half in (indices % 2 == 0, indices < ROWS // 2):
            fault = self._mixing(first, base, half)
            if fault:
                return fault
        # no single examples, which normalisation layers of 1×1 maps refuse
        for stop in (2, 4, 6, ROWS - 1):
            if _differ(first[:stop], self._run(images[:stop])):
                return LENGTH
        return ""

    def _mixing(self, first: Tensor, base: OperationWatch, half: Tensor) -> str:
        """Returns a description of the fault if the function mixes examples, otherwise "".

        First one half of the batch is replaced, and then the other half. A result or intermediate
        value that changes both times was computed from examples of both halves.
        """
        watches = []
        for replaced in (half, ~half):
            images = self._images.clone()
            images[replaced] = self._replacements[replaced]
            watch = OperationWatch(1.0, record=True)
            if _differ(first[~replaced], self._run(images, watch)[~replaced]):
                return MIXES
            # apart, since code may choose its operations by the labels
            labels = _select_rows(replaced, self._other_labels, self._labels)
            if _differ(first[~replaced], self._run(images, labels=labels)[~replaced]):
                return MIXES
            watches.append(watch.values)
        for (name, a), (name_b, b), (name_c, c) in zip(base.values, *watches, strict=False):
            if not (name == name_b == name_c and a.shape == b.shape == c.shape):
                return f"{OTHER_OPERATIONS} (at {name})"
            if bool((_changed(a, b) & _changed(a, c)).any()):
                return f"computes a value from several examples together ({name})"
        return ""


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
