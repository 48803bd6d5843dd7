"""A fake GPU for machines without one: tensors of device `cuda` that hold their values.

Operations run on the values on the CPU. They raise where a GPU would refuse tensors of two devices.
Where the host would wait for the device (reading a value, a blocking copy), a `Wait` is recorded.
For C++ the device is `meta`, since the autograd engine asks a driver about streams of `cuda`.
Tested with PyTorch 2.13 built without CUDA and 2.15 built with it, both without a driver.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import fedsynth
import fedsynth.privacy
from fedsynth.data import images as pixels

CUDA = torch.device("cuda:0")
META = torch.device("meta")
READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
PACKAGE = tuple(Path(module.__file__).resolve().parent for module in (fedsynth, fedsynth.privacy))
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
MASKS = (torch.bool, torch.uint8)
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)


class DeviceMixError(Exception):
    """An operation got tensors, or a generator, of two devices."""


class CaptureError(RuntimeError):
    """Something waits for the device while a CUDA graph is captured."""


class Wait(NamedTuple):
    """A wait of the host for the device: to read a value, or for a copy to the device ("write").
    The stack has the package's functions, the innermost first: (file, function, line)."""

    operation: str
    stack: tuple[tuple[str, str, int], ...]


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

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    @property
    def data(self) -> Any:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, other: GpuTensor) -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.cpu_values = other.cpu_values

    def data_ptr(self) -> int:
        return self.cpu_values.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copy = self.detach().clone().requires_grad_(self.requires_grad)
            copy.__dict__.update({k: v for k, v in self.__dict__.items() if k == "_is_param"})
            memo[id(self)] = copy
        return memo[id(self)]


class _DeviceNames(TorchFunctionMode):
    """Replaces `cuda` by `meta` in calls, since C++ would ask the driver for the device's
    number."""

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


class _FakeGpu(TorchDispatchMode):
    """The fake GPU: creates tensors and handles all operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: list[Wait] = []
        self.operations = 0
        self.generators: dict[int, torch.Generator] = {}
        self.tape: list[Any] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        gpu_tensors = [leaf for leaf in leaves if isinstance(leaf, GpuTensor)]
        device = kwargs.get("device")
        creates = device is not None and torch.device(device).type in ("cuda", "meta")
        if not gpu_tensors and not creates:
            self._check_generator(func, kwargs, "cpu")
            return func(*args, **kwargs)
        self.operations += 1
        on_gpu = creates or device is None
        self._check_generator(func, kwargs, "cuda" if on_gpu else "cpu")
        self._note_waits(func, args, kwargs, creates)
        indices = [id(value) for value in args[1]] if func in INDEXED else []
        on_cpu = [v for v in leaves if isinstance(v, Tensor) and not isinstance(v, GpuTensor)]
        if func not in COPIES and any(v.dim() and id(v) not in indices for v in on_cpu):
            raise DeviceMixError(f"{func} gets tensors on the GPU and on the CPU")
        values = [leaf.cpu_values if isinstance(leaf, GpuTensor) else leaf for leaf in leaves]
        real_args, real_kwargs = tree_unflatten(values, tree)
        if creates:
            real_kwargs["device"] = torch.device("cpu")
        result = func(*real_args, **real_kwargs)
        if self.tape is not None:
            self.tape.append((func, real_args, real_kwargs, result))

        def wrapped(value: Any) -> Any:
            if not isinstance(value, Tensor) or not on_gpu or any(value is v for v in on_cpu):
                return value
            existing = next((tensor for tensor in gpu_tensors if tensor.cpu_values is value), None)
            if existing is None:
                return GpuTensor(value)
            assert existing.shape == value.shape, "an operation in place that changes the shape"
            return existing

        return tree_map(wrapped, result)

    def _check_generator(self, func: Any, kwargs: dict[str, Any], device: str) -> None:
        generator = kwargs.get("generator")
        if generator is None:
            return
        generator_device = "cuda" if generator._cdata in self.generators else "cpu"
        if generator_device != device:
            raise DeviceMixError(f"{func} on {device} with a generator on {generator_device}")

    def _note_waits(self, func: Any, args: Any, kwargs: dict[str, Any], creates: bool) -> None:
        name = str(func)
        if func in COPIES:
            if func is aten._to_copy.default:
                into_gpu = creates or kwargs.get("device") is None
                source, blocks = args[0], not kwargs.get("non_blocking")
            else:
                into_gpu, source = isinstance(args[0], GpuTensor), args[1]
                blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            if isinstance(source, GpuTensor) and not into_gpu:
                self._wait("read", name)
            elif into_gpu and not isinstance(source, GpuTensor) and blocks:
                self._wait("write", name)
        elif func in INDEXED:
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in MASKS for index in indices):
                self._wait("read", name)
            if not all(isinstance(index, GpuTensor) for index in indices):
                self._wait("write", f"{name} by indices on the CPU")
        elif READS & {*func.tags}:
            self._wait("read", name)

    def _wait(self, kind: str, operation: str) -> None:
        if self.tape is not None:
            raise CaptureError(f"{operation} waits while a CUDA graph is captured")
        self.waits.append(Wait(f"{kind} {operation}", _stack()))

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
def marked_generators(marked: dict[int, torch.Generator]) -> Iterator[None]:
    """Replaces generators of `cuda` by CPU generators inside the block, and collects them."""

    class Generator(torch._C.Generator):
        def __new__(cls, device: torch.device | str = "cpu") -> Generator:
            generator = super().__new__(cls)
            if torch.device(device).type == "cuda":
                marked[generator._cdata] = generator
            return generator

        @property
        def device(self) -> torch.device:
            return CUDA if self._cdata in marked else torch.device("cpu")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Generator", Generator)
        yield


class _DrawnOnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is None:
            return func(*args, **kwargs)
        tensor = args[0] if isinstance(args[0], Tensor) else None
        device = kwargs.get("device", "cpu") if tensor is None else tensor.device
        options = {**kwargs, "device": "cpu"} if "device" in kwargs else kwargs
        drawn = func(*[x.cpu() if isinstance(x, Tensor) else x for x in args], **options)
        return tensor.copy_(drawn) if func.__name__.endswith("_") else drawn.to(device)


@contextmanager
def drawn_on_cpu() -> Iterator[None]:
    """Draws random numbers of a real GPU on the CPU inside the block: a GPU's are others."""
    with marked_generators({}), _DrawnOnCpu():
        yield


@contextmanager
def fake_gpu() -> Iterator[_FakeGpu]:
    """Replaces `cuda` by the fake GPU inside the block."""
    gpu = _FakeGpu()
    with pytest.MonkeyPatch.context() as patch, marked_generators(gpu.generators):
        # hooks of a backward pass name `cuda:0` where `_Names` is off
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr("fedsynth.simulation.simulate.resolve_device", lambda name: CUDA)
        card = SimpleNamespace(total_memory=2**33)
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: card)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        generator = torch.Generator(CUDA)
        patch.setattr(torch.cuda, "default_generators", (generator,))
        patch.setattr(torch.cuda, "get_rng_state", lambda index: generator.get_state())
        patch.setattr(torch.cuda, "set_rng_state", lambda state, index: generator.set_state(state))
        patch.setattr("fedsynth.training.sgd._record", gpu.record)
        _ACTIVE.append(gpu)
        try:
            with gpu, _DeviceNames():
                yield gpu
        finally:
            _ACTIVE.pop()
            # cached by device: must not outlive the fake GPU
            pixels._constants.cache_clear()
