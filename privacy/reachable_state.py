"""Snapshots of all state reachable from a function, to find what a call has changed.

Code that keeps state between calls can carry one record's values to others, or into a model that is
returned. The records that a function has seen may be in a buffer, an attribute, a closure, a global
list or a class. All such places are read, in the user's code and in the objects that it holds.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from threading import Lock, RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_SKIPPED = (types.ModuleType, logging.Logger)
_BOUND = (types.BuiltinFunctionType, types.MethodWrapperType)  # such as the `append` of a list
_ORDERED = (list, tuple, deque)
_COLLECTIONS = (*_ORDERED, set, frozenset)
_STATELESS: tuple[type, ...] = (type(Lock()), type(RLock()), type(dataclasses.MISSING))
_STATELESS += (types.CodeType, type(vars(Mapping)["_abc_impl"]))
# Packages whose global variables and classes hold no state that a user's function would change.
_LIBRARIES = {*sys.stdlib_module_names, "fedsynth", "numpy", "opacus", "scipy", "timm", "torch"}
_LIBRARIES |= {"torchvision", "sklearn", "geomloss", "PIL", "pandas", "skimage", "monai", "tqdm"}


@dataclass
class ReachableState:
    """All state reachable from a function.

    Attributes:
        values: a digest of each value, by its path from the function.
        tensors: the shape of each tensor, by its path.
        code: the code, the classes and the constants that can be reached.
        opaque: the types whose state cannot be read completely, such as open files.

    >>> layer = torch.nn.Linear(2, 2)
    >>> snapshot = ReachableState.of(layer)
    >>> layer.last = torch.ones(2)
    >>> ReachableState.of(layer).change_since(snapshot)
    'last'
    """

    values: dict[str, object] = field(default_factory=dict)
    tensors: dict[str, torch.Size] = field(default_factory=dict)
    code: set[object] = field(default_factory=set)
    opaque: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, *roots: object) -> ReachableState:
        state = cls()
        seen: dict[int, object] = {}  # which also keeps the objects, so that no id is used again
        waiting: list[tuple[str, object]] = [("", root) for root in roots]
        while waiting:
            path, value = waiting.pop()
            if id(value) not in seen:
                seen[id(value)] = value
                waiting += state._read(path, value)
        return state

    def change_since(self, snapshot: ReachableState, *, only_tensors: bool = False) -> str:
        """Returns the name of a value that has changed since a snapshot, or an empty string.

        Args:
            snapshot: the earlier state.
            only_tensors: whether only tensors of the earlier state are compared, whose shape is the
                same. A first call may create or fill caches, but changes no weights.
        """
        paths = {*self.values, *snapshot.values}
        if only_tensors:
            paths = {p for p in self.tensors if snapshot.tensors.get(p) == self.tensors[p]}
        for path in sorted(paths):
            if self.values.get(path) != snapshot.values.get(path):
                return ".".join(path.strip(".").split(".")[-2:]) or "its state"
        return ""

    def _read(self, path: str, value: Any) -> Iterator[tuple[str, object]]:
        """Records a value, and yields the values contained in it."""
        kind = value if isinstance(value, type) else type(value)
        if isinstance(value, _SKIPPED) or kind.__module__.startswith("fedsynth.privacy"):
            return
        digest = _digest(value)
        if isinstance(value, Tensor):
            self.tensors[path] = value.shape
            yield f"{path}.attributes", dict(vars(value))
        if isinstance(value, _ATOMS) or _is_number(value):
            self.code.add((path, repr(value) if digest is None else digest))
        if digest is not None:
            self.values[path] = type(value).__name__, digest
        elif isinstance(value, type):
            yield from self._of_class(path, value)
        elif isinstance(value, types.FunctionType):
            yield from self._of_function(path, value)
        elif isinstance(value, types.MethodType):
            yield from ((path, value.__self__), (path, value.__func__))
        elif isinstance(value, _BOUND):
            yield path, value.__self__
        elif isinstance(value, property):
            yield path, (value.fget, value.fset, value.fdel)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.values[path] = value.cache_info().currsize
            yield path, value.__wrapped__
        elif isinstance(value, Mapping):
            self.values[path] = len(value)
            yield from _items(path, value)
            yield from self._of_object(path, value)
        elif isinstance(value, functools.partial):
            yield from ((path, value.func), (path, value.args), (path, value.keywords))
        elif isinstance(value, torch.jit.ScriptModule):
            self.opaque.add("torch.jit.ScriptModule")
            yield path, value.state_dict()
        elif isinstance(value, _COLLECTIONS):
            self.values[path] = len(value)
            items = enumerate(value) if isinstance(value, _ORDERED) else _unordered(value)
            yield from ((f"{path}.{key}", item) for key, item in items)
            yield from self._of_object(path, value)
        elif isinstance(value, np.ndarray):
            yield path, value.tolist()
        else:
            yield from self._of_object(path, value)

    def _of_function(self, path: str, function: types.FunctionType) -> Iterator[tuple[str, object]]:
        code = function.__code__
        self.code.add(code)
        names = _names(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield from _used(f"{path}.{name}", cell.cell_contents, names)
            except ValueError:  # not assigned yet
                self.values[f"{path}.{name}"] = "empty"
        yield f"{path}.defaults", (function.__defaults__, function.__kwdefaults__)
        yield f"{path}", dict(vars(function))
        if not _is_library(function.__module__):
            for name in names:
                if name in function.__globals__:
                    yield from _used(f"{path}.{name}", function.__globals__[name], names)
                elif name in sys.modules:  # imported within the function
                    yield from _used(f"{path}.{name}", sys.modules[name], names)

    def _of_class(self, path: str, kind: type) -> Iterator[tuple[str, object]]:
        for base in kind.__mro__:
            if not _is_library(base.__module__):
                yield from _items(f"{path}.{base.__name__}", vars(base))

    def _of_object(self, path: str, value: object) -> Iterator[tuple[str, object]]:
        kind = type(value)
        self.code.add(kind)
        try:
            instance = dict(vars(value))
        except TypeError:  # without attributes
            instance = None
        except Exception:  # user code, whose content stays unknown
            self.opaque.add(f"{kind.__module__}.{kind.__qualname__}")
            instance = None
        attributes = _slots(value) | (instance or {})
        collection = isinstance(value, (*_COLLECTIONS, Mapping))
        if not attributes and not collection and instance is None:
            if " at 0x" not in repr(value):
                self.values[path] = repr(value)
            elif kind is not object and not isinstance(
                value, _STATELESS
            ):  # an address shows nothing of the content
                self.opaque.add(f"{kind.__module__}.{kind.__qualname__}")
        yield from ((f"{path}.{name}", item) for name, item in attributes.items())
        yield from self._of_class(path, kind)


def _digest(value: Any) -> object:
    """Returns a comparable digest of a value, or None if the value can contain other values."""
    if isinstance(value, _ATOMS):
        return repr(value)
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.device.type == "meta":
            return str(value.shape)
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        gradient = None if not value.is_leaf or value.grad is None else _digest(value.grad)
        return tuple(value.shape), hashlib.blake2b(content.tobytes()).digest(), gradient
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return None  # its objects may hold others
    if isinstance(value, np.ndarray | np.generic | np.random.Generator | np.random.RandomState):
        return hashlib.blake2b(pickle.dumps(value)).digest()
    if isinstance(value, bytearray):
        return bytes(value)
    return None


def _unordered(values: Any) -> Iterator[tuple[str, object]]:
    for value in values:
        digest = _digest(value)
        yield (repr(digest) if digest is not None else type(value).__name__), value


def _is_number(value: object) -> bool:
    """Returns True for a NumPy number, and for an array or tensor of one, which may be a switch."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.requires_grad
    return isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size == 1)


def _names(code: types.CodeType) -> set[str]:
    """Returns the names that a code object and its nested functions may look up."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _used(path: str, value: object, names: set[str]) -> Iterator[tuple[str, object]]:
    """Yields a value that code uses. For a user's module, yields the attributes that code names."""
    if not isinstance(value, types.ModuleType):
        yield path, value
    elif not _is_library(value.__name__):
        for name in names & vars(value).keys():
            yield from _used(f"{path}.{name}", vars(value)[name], names - {name})


def _slots(value: object) -> dict[str, object]:
    """Returns an object's slot attributes, including those with class-private names."""
    names: dict[str, object] = {}
    for base in type(value).__mro__:
        if "__slots__" in vars(base):
            names |= vars(base)
    slots = [name for name, item in names.items() if isinstance(item, types.MemberDescriptorType)]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)}


def _items(path: str, values: Mapping[Any, object]) -> Iterator[tuple[str, object]]:
    for number, (key, item) in enumerate(values.items()):
        yield f"{path}.{key if isinstance(key, str | int) else number}", item


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES
