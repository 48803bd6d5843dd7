"""Methods by name. Listing them imports neither torch nor any method; `registry.py` has the
list."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fedsynth.errors import unknown_name
from fedsynth.lazily import homes

if TYPE_CHECKING:
    from fedsynth.core.method import Method

CLASSES: Mapping[str, str] = MappingProxyType(homes(Path(__file__).with_name("registry.py")))
"""A registered class: its module."""


def name_of(class_name: str) -> str:
    """The name of a method with this class.

    >>> name_of("FedDM"), name_of("FedFMLite")
    ('feddm', 'fedfm-lite')
    """
    return re.sub(r"(?<=[A-Z])(?=[A-Z][a-z])", "-", class_name).lower()


METHODS: Mapping[str, str] = MappingProxyType(
    {name_of(name): f"{module}:{name}" for name, module in CLASSES.items()}
)
"""A method's name: its module and class."""


def method_class(name: str) -> type[Method]:
    """The class of a registered method, whose name may be in any case.

    Raises:
        UnknownNameError: no such method; names the near matches.
    """
    name = name.lower()
    if name not in METHODS:
        raise unknown_name("method", name, METHODS, "run", "method")
    module, _, attribute = METHODS[name].partition(":")
    found: Any = getattr(import_module(module), attribute)
    return found  # type: ignore[no-any-return]
