"""A fake GPU for machines without one: tensors of device `cuda` that hold their values.

Each operation runs first on PyTorch's fake tensors, which raise where a GPU would refuse tensors of
two devices or would have to read a value, and then on the values on the CPU. Where the host would
wait for the device (reading a value, a blocking copy), a `Wait` is recorded. For C++ the device is
`meta`, since the autograd engine asks a driver about streams of `cuda`. Tested with PyTorch 2.13
built without CUDA and 2.15 built with it, both without a driver.
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
    """A wait of the host for the device: to read a value, or for a copy to the device ("write").
    The stack has the package's functions, the innermost first: (file, function, line)."""

    kind: str
    operation: str
    stack: tuple[tuple[str, str, int], ...]

    def __str__(self) -> str:
        frames = " < ".join(f"{file}:{line} {function}" for file, function, line in self.stack[:6])
        return f"{self.kind} {self.operation} at {frames}"


class GpuTensor(Tensor):
    """A tensor on the fake GPU with its `cpu_values`."""

    cpu_values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> GpuTensor:
        tensor: GpuTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=META,
        )
        tensor.cpu_values = values
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _ACTIVE[-1].run(func, args, kwargs or {})

    # `_apply` of a module then swaps the parameter's content, not the object
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["cpu_values"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> GpuTensor:
        return GpuTensor(inner["cpu_values"])

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
    def data(self, other: GpuTensor) -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.cpu_values = other.cpu_values

    def new_tensor(self, data: Any, *, dtype: Any = None) -> Any:
        return torch.tensor(data, dtype=dtype or self.dtype).to(META)

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.cpu_values.data_ptr()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Behaves as a tensor on a GPU: returns itself where nothing changes."""
        kwargs = dict(kwargs)
        copy = kwargs.pop("copy", False)
        other = args[0] if args else kwargs.pop("other", None)
        if isinstance(other, Tensor):
            device, dtype, non_blocking, layout = other.device, other.dtype, False, None
        else:
            device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        device = self.device if device is None else torch.device(device)
        dtype = self.dtype if dtype is None else dtype
        unchanged = device.type == "cuda" and dtype == self.dtype
        if unchanged and not copy and (layout is None or self.is_contiguous(memory_format=layout)):
            return self
        return aten._to_copy(
            self, dtype=dtype, device=device, non_blocking=non_blocking, memory_format=layout
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
            copy = self.detach().clone().requires_grad_(self.requires_grad)
            copy.__dict__.update(
                {key: value for key, value in self.__dict__.items() if key == "_is_param"}
            )
            memo[id(self)] = copy
        return memo[id(self)]


class _DeviceNames(TorchFunctionMode):
    """Replaces `cuda` by `meta` in calls, since C++ would ask the driver for the device's number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor) and _is_cuda(kwargs.get("device")):
            rest = {key: value for key, value in kwargs.items() if key != "device"}
            return func(*args, **rest).to(META)
        args = tuple(META if _is_cuda(value) else value for value in args)
        kwargs = {key: META if _is_cuda(value) else value for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type in ("cuda", "meta")) or (
        isinstance(value, str) and value.split(":")[0] == "cuda"
    )


def _signature(value: Any) -> Any:
    """Returns what PyTorch's rules use of an argument; 1, True and 1.0 differ."""
    if isinstance(value, Tensor):
        return isinstance(value, GpuTensor), value.shape, value.stride(), value.dtype
    return ("generator",) if isinstance(value, torch._C.Generator) else (type(value), value)


def _to_fake(value: Any) -> Any:
    if isinstance(value, Tensor):
        device = CUDA if isinstance(value, GpuTensor) else value.device
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    return CUDA if isinstance(value, torch.device) and value.type == "meta" else value


class _FakeGpu(TorchDispatchMode):
    """The fake GPU: creates tensors and handles all operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: list[Wait] = []
        self.operations = 0
        self.generators: dict[int, torch.Generator] = {}
        self.tape: list[Any] | None = None
        self._rules = FakeTensorMode(allow_non_fake_inputs=True)
        self._device_cache: dict[Any, Sequence[str] | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs one operation."""
        leaves, tree = tree_flatten((args, kwargs))
        gpu_tensors = [leaf for leaf in leaves if isinstance(leaf, GpuTensor)]
        device = kwargs.get("device")
        creates = device is not None and torch.device(device).type in ("cuda", "meta")
        if not gpu_tensors and not creates:
            self._check_generator(func, kwargs, "cpu")
            return func(*args, **kwargs)
        self.operations += 1
        self._check_generator(func, kwargs, "cuda" if creates or device is None else "cpu")
        devices = self._devices(func, leaves, tree)
        self._note_copies(func, args, kwargs, creates)
        values = [leaf.cpu_values if isinstance(leaf, GpuTensor) else leaf for leaf in leaves]
        real_args, real_kwargs = tree_unflatten(values, tree)
        if creates:
            real_kwargs["device"] = torch.device("cpu")
        result = func(*real_args, **real_kwargs)
        if self.tape is not None:
            self.tape.append((func, real_args, real_kwargs, result))
        return self._wrapped(result, devices, gpu_tensors)

    def _devices(self, func: Any, leaves: Sequence[Any], tree: Any) -> Sequence[str] | None:
        """Returns the results' devices by fake tensors; None where the shape depends on values."""
        key = (func, tree, tuple(map(_signature, leaves)))
        if key not in self._device_cache:
            self._device_cache[key] = self._devices_by_rules(func, leaves, tree)
        devices = self._device_cache[key]
        if devices is None:
            self._wait("read", str(func))
        return devices

    def _devices_by_rules(
        self, func: Any, leaves: Sequence[Any], tree: Any
    ) -> Sequence[str] | None:
        args, kwargs = tree_unflatten(leaves, tree)
        if func in INDEXED and any(value is not None and value.dtype in MASKS for value in args[1]):
            return None  # fake tensors would ask a kernel, which builds without CUDA do not have
        with self._rules:
            args, kwargs = tree_unflatten([_to_fake(value) for value in leaves], tree)
            if "generator" in kwargs:
                kwargs["generator"] = None
            try:
                result = func(*args, **kwargs)
            except READS:
                return None
            except RuntimeError as error:
                raise DeviceMixError(f"{func}: {str(error).strip().splitlines()[0]}") from error
        leaves = tree_flatten(result)[0]
        return [value.device.type if isinstance(value, Tensor) else "" for value in leaves]

    def _wrapped(
        self, result: Any, devices: Sequence[str] | None, gpu_tensors: Sequence[GpuTensor]
    ) -> Any:
        leaves, tree = tree_flatten(result)
        pairs = zip(leaves, devices or ["cuda"] * len(leaves), strict=True)
        return tree_unflatten([self._wrapped_leaf(*pair, gpu_tensors) for pair in pairs], tree)

    def _wrapped_leaf(self, value: Any, device: str, gpu_tensors: Sequence[GpuTensor]) -> Any:
        if not isinstance(value, Tensor):
            return value
        existing = next((tensor for tensor in gpu_tensors if tensor.cpu_values is value), None)
        if existing is None:
            return GpuTensor(value) if device == "cuda" else value
        assert existing.shape == value.shape, "an operation in place that changes the shape"
        return existing

    def _check_generator(self, func: Any, kwargs: dict[str, Any], device: str) -> None:
        generator = kwargs.get("generator")
        if generator is None:
            return
        generator_device = "cuda" if generator._cdata in self.generators else "cpu"
        if generator_device != device:
            raise DeviceMixError(f"{func} on {device} with a generator on {generator_device}")

    def _note_copies(self, func: Any, args: Any, kwargs: dict[str, Any], creates: bool) -> None:
        name = str(func)
        if func is aten._to_copy.default:
            reads = isinstance(args[0], GpuTensor) and kwargs.get("device") is not None
            if reads and not creates:
                self._wait("read", name)
            elif creates and not isinstance(args[0], GpuTensor) and not kwargs.get("non_blocking"):
                self._wait("write", name)
        elif func is aten.copy_.default:
            into, source = args[0], args[1]
            blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            if isinstance(source, GpuTensor) and not isinstance(into, GpuTensor):
                self._wait("read", name)
            elif isinstance(into, GpuTensor) and not isinstance(source, GpuTensor) and blocks:
                self._wait("write", name)
        elif func in INDEXED and any(
            isinstance(index, Tensor) and not isinstance(index, GpuTensor) for index in args[1]
        ):
            self._wait("write", f"{name} by indices on the CPU")

    def _wait(self, kind: str, operation: str) -> None:
        if self.tape is not None:
            raise CaptureError(f"{operation} waits while a CUDA graph is captured")
        self.waits.append(Wait(kind, operation, _stack()))

    def record(self, step: Callable[[], None], device: torch.device) -> Callable[[], object]:
        """Replaces `fedsynth.training.sgd._record`: records the operations of one call and returns
        a function that repeats them on the same memory."""
        for _ in range(3):
            step()
        self.tape = []
        try:
            step()
            tape = self.tape
        finally:
            self.tape = None

        def replay() -> None:
            for func, args, kwargs, recorded in tape:
                result = func(*args, **kwargs)
                pairs = zip(tree_flatten(recorded)[0], tree_flatten(result)[0], strict=True)
                for old, new in pairs:
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay


_ACTIVE: list[_FakeGpu] = []


def _stack() -> tuple[tuple[str, str, int], ...]:
    """Returns the running functions of the package, the innermost first."""
    functions = []
    frame = inspect.currentframe()
    while frame is not None:
        path = frame.f_code.co_filename
        for root in PACKAGE:
            if path.startswith(str(root)):
                file = path[len(str(root.parent)) + 1 :]
                functions.append((file, frame.f_code.co_qualname, frame.f_lineno))
        frame = frame.f_back
    return tuple(functions)


@contextmanager
def fake_gpu() -> Iterator[_FakeGpu]:
    """Replaces `cuda` by the fake GPU inside the block."""
    gpu = _FakeGpu()

    class Generator(torch._C.Generator):
        """A CPU generator marked as the GPU's on `cuda`, since a real one needs a driver."""

        def __new__(cls, device: torch.device | str = "cpu") -> Generator:
            generator = super().__new__(cls)
            if torch.device(device).type == "cuda":
                gpu.generators[generator._cdata] = generator
            return generator

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
        _ACTIVE.append(gpu)
        try:
            with gpu, _DeviceNames():
                yield gpu
        finally:
            _ACTIVE.pop()
            # cached by device: must not outlive the fake GPU
            pixels._constants.cache_clear()
