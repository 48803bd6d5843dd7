"""A stand-in for a GPU on a machine without one: tensors that say `cuda` and hold their values.

Each operation runs on PyTorch's fake tensors, which raise where a GPU would refuse tensors of two
devices or would have to read a value, and then on the values, on the CPU. What makes the host wait
for the device (a value that is read, a copy that blocks) is kept as a `Wait`. The C++ side of a
stand-in says `meta`, since the autograd engine asks a driver about streams of `cuda`. Seen to work
with PyTorch 2.13 built without CUDA and 2.15 built with it, both without a driver.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

import fedsynth
import fedsynth.privacy
from fedsynth.data import images as pixels

CUDA = torch.device("cuda:0")
META = torch.device("meta")
READS = (DataDependentOutputException, DynamicOutputShapeException)
CARD_BYTES = 2**33
PACKAGE = (
    Path(fedsynth.__file__).resolve().parent,
    Path(fedsynth.privacy.__file__).resolve().parent,
)
aten = torch.ops.aten
MASKS = (torch.bool, torch.uint8)
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)


class DeviceMixError(Exception):
    """An operation got tensors, or a generator, of two devices."""


class CaptureError(RuntimeError):
    """Something waits for the device while a CUDA graph is captured."""


@dataclass(frozen=True)
class Wait:
    """The host waits for the device: to read a value, or for a copy to the device ("write"). The
    stack has the package's functions, the innermost first: (file, function, line)."""

    kind: str
    operation: str
    stack: tuple[tuple[str, str, int], ...]

    def __str__(self) -> str:
        where = " < ".join(f"{file}:{line} {function}" for file, function, line in self.stack[:6])
        return f"{self.kind} {self.operation} at {where}"


class StandIn(Tensor):
    """A tensor on the pretended GPU: `held` are its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> StandIn:
        made: StandIn = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=META,
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _HERE[-1].run(func, args, kwargs or {})

    # `_apply` of a module then swaps the parameter's content, and the object stays the same
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> StandIn:
        return StandIn(inner["held"])

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    @property
    def data(self) -> Any:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, other: StandIn) -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.held = other.held

    def new_tensor(self, values: Any, *, dtype: Any = None) -> Any:
        return torch.tensor(values, dtype=dtype or self.dtype).to(META)

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As of a tensor on a GPU: itself where nothing changes."""
        kwargs = dict(kwargs)
        copy = kwargs.pop("copy", False)
        other = args[0] if args else kwargs.pop("other", None)
        if isinstance(other, Tensor):
            device, dtype, blocks_not, layout = other.device, other.dtype, False, None
        else:
            device, dtype, blocks_not, layout = torch._C._nn._parse_to(*args, **kwargs)
        device = self.device if device is None else torch.device(device)
        dtype = self.dtype if dtype is None else dtype
        here = device.type == "cuda" and dtype == self.dtype
        if here and not copy and (layout is None or self.is_contiguous(memory_format=layout)):
            return self
        return aten._to_copy(
            self, dtype=dtype, device=device, non_blocking=blocks_not, memory_format=layout
        )

    def cpu(self, *args: Any, **kwargs: Any) -> Any:
        return self.to("cpu")

    def cuda(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            made = self.detach().clone().requires_grad_(self.requires_grad)
            made.__dict__.update(
                {key: value for key, value in self.__dict__.items() if key == "_is_param"}
            )
            memo[id(self)] = made
        return memo[id(self)]


class _Names(TorchFunctionMode):
    """Calls that name `cuda` name `meta` instead: C++ would ask the driver for the device's
    number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        named = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and _is_cuda(named):
            rest = {key: value for key, value in kwargs.items() if key != "device"}
            return func(*args, **rest).to(META)
        args = tuple(META if _is_cuda(one) else one for one in args)
        kwargs = {key: META if _is_cuda(one) else one for key, one in kwargs.items()}
        return func(*args, **kwargs)


def _is_cuda(one: Any) -> bool:
    return (isinstance(one, torch.device) and one.type in ("cuda", "meta")) or (
        isinstance(one, str) and one.split(":")[0] == "cuda"
    )


def _kind(one: Any) -> Any:
    """All of an argument that PyTorch's rules ask for; a number is another one as True or 1.0."""
    if isinstance(one, Tensor):
        return isinstance(one, StandIn), one.shape, one.stride(), one.dtype
    return ("generator",) if isinstance(one, torch._C.Generator) else (type(one), one)


def _as_fake(one: Any) -> Any:
    if isinstance(one, Tensor):
        device = CUDA if isinstance(one, StandIn) else one.device
        return torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device=device)
    return CUDA if isinstance(one, torch.device) and one.type == "meta" else one


class _Device(TorchDispatchMode):
    """The pretended GPU: makes what it is asked for, and sees every operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: list[Wait] = []
        self.operations = 0
        self.generators: dict[int, torch.Generator] = {}
        self.tape: list[Any] | None = None
        self._rules = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Any, Sequence[str] | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operation."""
        given, tree = tree_flatten((args, kwargs))
        mine = [one for one in given if isinstance(one, StandIn)]
        asked = kwargs.get("device")
        wanted = asked is not None and torch.device(asked).type in ("cuda", "meta")
        if not mine and not wanted:
            self._check_generator(func, kwargs, "cpu")
            return func(*args, **kwargs)
        self.operations += 1
        self._check_generator(func, kwargs, "cuda" if wanted or asked is None else "cpu")
        devices = self._devices(func, given, tree)
        self._note_copies(func, args, kwargs, wanted)
        values = [one.held if isinstance(one, StandIn) else one for one in given]
        real_args, real_kwargs = tree_unflatten(values, tree)
        if wanted:
            real_kwargs["device"] = torch.device("cpu")
        made = func(*real_args, **real_kwargs)
        if self.tape is not None:
            self.tape.append((func, real_args, real_kwargs, made))
        return self._wrapped(made, devices, mine)

    def _devices(self, func: Any, given: Sequence[Any], tree: Any) -> Sequence[str] | None:
        """Of what it makes, by PyTorch's fake tensors; None where its shape depends on values."""
        key = (func, tree, tuple(map(_kind, given)))
        if key not in self._known:
            self._known[key] = self._asked(func, given, tree)
        devices = self._known[key]
        if devices is None:
            self._wait("read", str(func))
        return devices

    def _asked(self, func: Any, given: Sequence[Any], tree: Any) -> Sequence[str] | None:
        args, kwargs = tree_unflatten(given, tree)
        if func in INDEXED and any(one is not None and one.dtype in MASKS for one in args[1]):
            return None  # fake tensors would ask a kernel, which builds without CUDA do not have
        with self._rules:
            args, kwargs = tree_unflatten([_as_fake(one) for one in given], tree)
            if "generator" in kwargs:
                kwargs["generator"] = None
            try:
                made = func(*args, **kwargs)
            except READS:
                return None
            except RuntimeError as error:
                raise DeviceMixError(f"{func}: {str(error).strip().splitlines()[0]}") from error
        leaves = tree_flatten(made)[0]
        return [one.device.type if isinstance(one, Tensor) else "" for one in leaves]

    def _wrapped(self, made: Any, devices: Sequence[str] | None, mine: Sequence[StandIn]) -> Any:
        leaves, tree = tree_flatten(made)
        where = devices or ["cuda"] * len(leaves)
        done = [self._one(value, on, mine) for value, on in zip(leaves, where, strict=True)]
        return tree_unflatten(done, tree)

    def _one(self, value: Any, device: str, mine: Sequence[StandIn]) -> Any:
        if not isinstance(value, Tensor):
            return value
        same = next((tensor for tensor in mine if tensor.held is value), None)
        if same is None:
            return StandIn(value) if device == "cuda" else value
        assert same.shape == value.shape, "an operation in place that changes the shape"
        return same

    def _check_generator(self, func: Any, kwargs: dict[str, Any], device: str) -> None:
        generator = kwargs.get("generator")
        if generator is None:
            return
        own = "cuda" if generator._cdata in self.generators else "cpu"
        if own != device:
            raise DeviceMixError(f"{func} on {device} with a generator on {own}")

    def _note_copies(self, func: Any, args: Any, kwargs: dict[str, Any], wanted: bool) -> None:
        name = str(func)
        if func is aten._to_copy.default:
            leaves = isinstance(args[0], StandIn) and kwargs.get("device") is not None
            if leaves and not wanted:
                self._wait("read", name)
            elif wanted and not isinstance(args[0], StandIn) and not kwargs.get("non_blocking"):
                self._wait("write", name)
        elif func is aten.copy_.default:
            into, source = args[0], args[1]
            blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            if isinstance(source, StandIn) and not isinstance(into, StandIn):
                self._wait("read", name)
            elif isinstance(into, StandIn) and not isinstance(source, StandIn) and blocks:
                self._wait("write", name)
        elif func in INDEXED and any(
            isinstance(one, Tensor) and not isinstance(one, StandIn) for one in args[1]
        ):
            self._wait("write", f"{name} by indices on the CPU")

    def _wait(self, kind: str, operation: str) -> None:
        if self.tape is not None:
            raise CaptureError(f"{operation} waits while a CUDA graph is captured")
        self.waits.append(Wait(kind, operation, _stack()))

    def record(self, step: Callable[[], None], device: torch.device) -> Callable[[], object]:
        """As `fedsynth.training.sgd._record`: the operations of one call, to be repeated
        on the same memory, without Python."""
        for _ in range(3):
            step()
        self.tape = []
        try:
            step()
            tape = self.tape
        finally:
            self.tape = None

        def replay() -> None:
            for func, args, kwargs, before in tape:
                again = func(*args, **kwargs)
                for old, new in zip(tree_flatten(before)[0], tree_flatten(again)[0], strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay


_HERE: list[_Device] = []


def _stack() -> tuple[tuple[str, str, int], ...]:
    """Functions of the package that are running, the innermost first."""
    found = []
    frame = inspect.currentframe()
    while frame is not None:
        path = frame.f_code.co_filename
        for root in PACKAGE:
            if path.startswith(str(root)):
                file = path[len(str(root.parent)) + 1 :]
                found.append((file, frame.f_code.co_qualname, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


@contextmanager
def pretended_gpu() -> Iterator[_Device]:
    """Inside, `cuda` is the stand-in."""
    gpu = _Device()

    class Generator(torch._C.Generator):
        """On `cuda` a CPU generator that is known as the GPU's: a real one asks for a driver."""

        def __new__(cls, device: torch.device | str = "cpu") -> Generator:
            made = super().__new__(cls)
            if torch.device(device).type == "cuda":
                gpu.generators[made._cdata] = made
            return made

        @property
        def device(self) -> torch.device:
            return CUDA if self._cdata in gpu.generators else torch.device("cpu")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Generator", Generator)
        # hooks of a backward pass name `cuda:0` where `_Names` is off
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr("fedsynth.simulation.simulate.resolve_device", lambda name: CUDA)
        patch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device=None: SimpleNamespace(total_memory=CARD_BYTES),
        )
        patch.setattr("fedsynth.training.sgd._record", gpu.record)
        _HERE.append(gpu)
        try:
            with gpu, _Names():
                yield gpu
        finally:
            _HERE.pop()
            # kept by device: those of the stand-in must not outlive it
            pixels._constants.cache_clear()
