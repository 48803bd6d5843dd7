"""Finds and registers methods by name.

The list of methods is in `registry.py`. Listing the methods imports neither torch nor any method.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, MemberDescriptorType
from typing import TYPE_CHECKING

from fedsynth._lazy_import import exported_names
from fedsynth.errors import SettingError, unknown_name
from fedsynth.own_code import names_code, unloaded_file

if TYPE_CHECKING:
    from fedsynth.core.method import Method

DEFAULT_METHOD = "feddm"
# The module that defines each registered class, by class name.
CLASSES: Mapping[str, str] = MappingProxyType(
    exported_names(Path(__file__).with_name("registry.py"))
)


def name_of(class_name: str) -> str:
    """Converts a class name to the method's name.

    >>> name_of("FedDM"), name_of("FedFMLite")
    ('feddm', 'fedfm-lite')
    """
    return re.sub(r"(?<=[A-Z])(?=[A-Z][a-z])", "-", class_name).lower()


# Each built-in method's class as "module:class", by method name.
METHODS: Mapping[str, str] = MappingProxyType(
    {name_of(name): f"{module}:{name}" for name, module in CLASSES.items()}
)


# Methods registered from outside the package, by name: the class, and the label of its file, which
# may be empty.
_CUSTOM: dict[str, tuple[type[Method], str]] = {}


def register_method(method: type[Method], label: str = "") -> str:
    """Registers a custom method under its name.

    Settings, config files and `verify` can then refer to the method by name.

    Args:
        method: the method's class. It replaces a custom method registered earlier under the same
            name.
        label: the label of the class's file, if any.

    Returns:
        The method's name in lower case.

    Raises:
        SettingError: the object is not a method class, has a built-in method's name, or changes a
            default that its constructor does not use.

    >>> from dataclasses import dataclass
    >>> from fedsynth import FedAvg, RunSettings, register_method, resolve
    >>> @dataclass(frozen=True)
    ... class Slow(FedAvg):
    ...     name = "slow"
    ...     lr: float = 1e-6
    >>> register_method(Slow)
    'slow'
    >>> resolve({"run": {"method": "slow"}}).method.lr
    1e-06
    """
    from fedsynth.core.method import Method

    name = str(getattr(method, "name", "")).lower()
    is_method = isinstance(method, type) and issubclass(method, Method)
    if not is_method or not name or name in METHODS:
        reason = (
            "must be a subclass of fedsynth.Method, and its `name` must not be a built-in "
            f"method's, got {method!r:.80} with the name {name!r}. Inherit from Method, or change "
            "`name`"
        )
        raise SettingError("run", "method", reason)
    if missing := ", ".join(sorted(method.__abstractmethods__)):
        raise SettingError(
            "run", "method", f"{name} is missing the abstract methods {missing}. Define them"
        )
    _check_defaults(name, method)
    _CUSTOM[name] = (method, label)
    return name


def _check_defaults(name: str, method: type[Method]) -> None:
    """Refuses a class attribute that changes a setting's default, but not for the constructor."""
    if "__init__" in vars(method) and "__dataclass_params__" not in vars(method):
        return  # its own constructor may use the attribute
    for field in fields(method):
        value = inspect.getattr_static(method, field.name, MISSING)
        unchanged = value is MISSING or value is field.default or value == field.default
        if unchanged or isinstance(value, MemberDescriptorType):
            continue
        kind = getattr(field.type, "__name__", field.type)
        reason = (
            f"{name} sets {field.name} = {value!r:.40}, which its constructor does not use. Write "
            f"`{field.name}: {kind} = …`, and decorate the class with @dataclass(frozen=True)"
        )
        raise SettingError("run", "method", reason)


def own_label(name: str) -> str:
    """Returns the label of the file that defines a custom method.

    The label is empty for built-in methods and for methods that were registered without a file.
    """
    return _CUSTOM[name][1] if name in _CUSTOM else ""


def is_own_method(method: Method) -> bool:
    """Returns True if a method's class is defined outside the package."""
    return not type(method).__module__.startswith(f"{__name__}.")


def method_class(name: str) -> type[Method]:
    """Returns the class of the named method. Case is ignored.

    Raises:
        UnknownNameError: no method has the name. The message suggests similar names.
        SettingError: the name is a file with custom code, which `register_method` has to load.
    """
    if names_code(name):
        raise unloaded_file("run", "method", name)
    name = name.lower()
    if name in _CUSTOM:
        return _CUSTOM[name][0]
    if name not in METHODS:
        raise unknown_name("method", name, {**METHODS, **_CUSTOM}, "run", "method")
    module, _, attribute = METHODS[name].partition(":")
    return getattr(import_module(module), attribute)


def described(name: str) -> tuple[str, str]:
    """Returns a built-in method's summary and reference, without importing its module.

    Both are string literals in the class, and are read from the text of the file.

    >>> described("moon")[1]
    'Li, He and Song 2021, MOON, arXiv 2103.16257'
    """
    module, _, attribute = METHODS[name].partition(":")
    file = Path(__file__).with_name(f"{module.rpartition('.')[2]}.py")
    texts = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == attribute:
            for line in node.body:
                if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant):
                    texts[ast.unparse(line.targets[0])] = str(line.value.value)
    return texts["summary"], texts["reference"]
