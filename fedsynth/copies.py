"""A faster `copy.deepcopy` for networks.

A network of a dozen layers has some three hundred Python objects, nearly all of them empty
dictionaries of hooks. With little data, copies took a quarter of a client's time in a round.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import cache
from typing import Any

from torch import nn

PLAIN = (str, int, float, bool, type(None))
"""Immutable types, which copies share."""
CONTAINERS = (OrderedDict, list, set)


def copied(network: nn.Module) -> nn.Module:
    """Returns a copy that shares nothing with `network`, equal to that of `copy.deepcopy`.

    A module that defines how it is copied or pickled is copied by `copy.deepcopy`.

    >>> network = nn.Sequential(nn.Linear(64, 10))
    >>> other = copied(network)
    >>> other[0].weight is network[0].weight, bool((other[0].weight == network[0].weight).all())
    (False, True)
    """
    clone: nn.Module = _copied(network, {})
    return clone


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Acts as `copy.deepcopy(value, memo)`, with fast paths for the parts of networks."""
    kind: Any = type(value)
    if kind in PLAIN or (kind is tuple and all(type(item) in PLAIN for item in value)):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind is nn.Parameter:
        twin = nn.Parameter(value.detach().clone(), value.requires_grad)
        memo[id(value)] = twin
        return twin
    if kind is dict:
        named: dict[Any, Any] = {}
        memo[id(value)] = named
        named.update((_copied(key, memo), _copied(item, memo)) for key, item in value.items())
        return named
    if kind in CONTAINERS and not value:
        return memo.setdefault(id(value), kind())
    if isinstance(value, nn.Module) and _is_ordinary(kind):
        clone = object.__new__(kind)
        memo[id(value)] = clone  # before its parts, which may refer to it
        clone.__setstate__({name: _copied(item, memo) for name, item in vars(value).items()})
        return clone
    return copy.deepcopy(value, memo)


@cache
def _is_ordinary(kind: type[nn.Module]) -> bool:
    """Returns whether a module class has all its state in `__dict__` and default copying."""
    hooks = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__")
    if any(getattr(kind, name, None) is not getattr(nn.Module, name, None) for name in hooks):
        return False
    return not any("__slots__" in vars(base) for base in kind.__mro__)
