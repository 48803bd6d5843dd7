"""Loads custom models, methods, feature maps and losses from the user's Python files, such as
`net.py:Net`.

A file is executed only if the user names it on the command line, or in a config or sweep file that
the user wrote. A file named in a run's config.toml is never opened. Only its SHA-256 hash is
compared, so run folders may come from untrusted sources.
"""

from __future__ import annotations

import hashlib
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fedsynth.errors import SettingError, one_line, short_repr
from fedsynth.files import expand_home, read_regular

MAX_FILE_BYTES = 2**24
HASH_DIGITS = 12  # digits of a file's hash in its label


@dataclass(frozen=True)
class OwnCode:
    """A class or function from a user's Python file, with the file's text.

    Attributes:
        file: the file's name, without its folder.
        name: name of the class or function.
        sha256: hash of the file.
        text: content of the file.
        path: the file's absolute path, which is not stored in run folders.
    """

    file: str
    name: str
    sha256: str
    text: str
    path: Path

    @property
    def label(self) -> str:
        """The name `FILE:NAME@HASH`, which identifies the code in config.toml."""
        return f"{self.file}:{self.name}@{self.sha256[:HASH_DIGITS]}"


# The files that the current process has loaded, by label.
SOURCES: dict[str, OwnCode] = {}
# The modules that these files imported from their own folder, by folder and name.
_NEIGHBOURS: dict[Path, dict[str, Any]] = {}


def names_a_file(setting: str) -> bool:
    """Returns True if a setting's value names custom code in the form `FILE.py:NAME`.

    >>> names_a_file("net.py:Net"), names_a_file("convnet")
    (True, False)
    """
    file, colon, name = setting.rpartition(":")
    return bool(colon) and file.endswith(".py") and name.isidentifier()


def is_label(name: str) -> bool:
    """Returns True if a name has the form `FILE.py:NAME@HASH`.

    >>> is_label("net.py:Net@0123456789ab"), is_label("net.py:Net"), is_label("convnet")
    (True, False, False)
    """
    return names_code(name) and code_of(name) != name


def names_code(name: str) -> bool:
    """Returns True if a name has the form `FILE.py:NAME` or `FILE.py:NAME@HASH`."""
    return names_a_file(code_of(name))


def code_of(label: str) -> str:
    """Removes the hash from a label, and returns `FILE.py:NAME`."""
    return re.sub("@[0-9a-f]+$", "", label)


METHOD_FEATURES = ("method", "features")
# The settings that may name custom code, with their option and registering Python function.
LOADERS = {
    ("run", "method"): ("--method", "fedsynth.register_method"),
    ("model", "name"): ("--model", "fedsynth.models.registry.register_model_file"),
    ("model", "clients"): ("--client-models", "fedsynth.models.registry.register_model_file"),
    ("model", "features"): ("--features", "fedsynth.features.register_file"),
    METHOD_FEATURES: ("--features", "fedsynth.features.register_file"),
    ("method", "matching"): (
        "--matching",
        "fedsynth.synthesizer.condensation.losses.register_loss_file",
    ),
    ("data", "encoder"): ("--encoder", "fedsynth.features.register_file"),
}


def unloaded_file(section: str, key: str, setting: str) -> SettingError:
    """Creates the error for custom code that has not been loaded.

    Args:
        section, key: the setting that names the file.
        setting: the label in config.toml, or `FILE.py:NAME`.
    """
    option, function = LOADERS[section, key]
    code = code_of(setting)
    place = "PATH/" if code != setting else ""
    reason = (
        f"names the custom code {short_repr(setting)}, which is not loaded or has changed. Load it "
        f"with {option} {place}{code:.200}, or with {function} in Python"
    )
    return SettingError(section, key, reason)


def load_own(section: str | None, key: str, setting: str) -> tuple[Any, str]:
    """Executes a user's Python file, and returns the named object and its label.

    Args:
        section, key: the setting that names the file.
        setting: the value of the setting, `FILE.py:NAME`.

    Raises:
        SettingError: the file cannot be read or executed, or does not define the name.
    """
    file, _, name = setting.rpartition(":")
    path = Path(file)
    try:
        path = expand_home(file).absolute()
        content = read_regular(path, MAX_FILE_BYTES)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            section, key, f"names {path}, which cannot be read: {one_line(error)}"
        ) from None
    code = OwnCode(path.name, name, hashlib.sha256(content).hexdigest(), text, path)
    module = _executed(section, key, path, code)
    definition = getattr(module, name, None)
    if definition is None:
        raise SettingError(
            section, key, f"names {name!r}, which {path} does not define. Correct the name"
        )
    SOURCES[code.label] = code
    return definition, code.label


def _executed(section: str | None, key: str, path: Path, code: OwnCode) -> Any:
    """Executes a Python file and returns it as a module.

    If the process has already executed the same text of this file, the earlier module is returned.
    The text is compiled here, because Python's own loader could run a cached `.pyc` file that is
    not hashed. It may import modules from its folder, at its top level: modules of the same name
    from another file's folder are hidden meanwhile.
    """
    title = f"fedsynth_own_{path.stem}_{code.sha256[:HASH_DIGITS]}"
    loaded = sys.modules.get(title)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    neighbours = _NEIGHBOURS.setdefault(path.parent, {})
    of_others = _without_neighbours(path.parent)
    sys.modules.update(neighbours)
    imported = set(sys.modules)
    module = ModuleType(title)
    module.__file__ = str(path)
    sys.modules[title] = module  # dataclasses look up their module
    sys.path.insert(0, str(path.parent))  # as for a script: lets the file import its neighbours
    try:
        text = code.text.removeprefix("\ufeff")
        exec(compile(text, str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        sys.modules.pop(title, None)
        reason = f"names {path}, which failed with {type(error).__name__}: {one_line(error)}"
        raise SettingError(section, key, reason) from error
    finally:
        with suppress(ValueError):  # the file may have changed the path
            sys.path.remove(str(path.parent))
        neighbours |= {
            name: sys.modules[name]
            for name in set(sys.modules) - imported - {title}
            if _is_neighbour(name, sys.modules[name], path.parent)
        }
        for name, other in of_others.items():
            sys.modules.setdefault(name, other)
    return module


def _without_neighbours(folder: Path) -> dict[str, Any]:
    """Removes the modules of other folders' files from `sys.modules`, and returns them."""
    modules: dict[str, Any] = {}
    for other, neighbours in _NEIGHBOURS.items():
        for name in neighbours if other != folder else ():
            if sys.modules.get(name) is neighbours[name]:
                modules[name] = sys.modules.pop(name)
    return modules


def _is_neighbour(name: str, module: Any, folder: Path) -> bool:
    """Returns True if a module is from a folder, or from a package in it."""
    file = getattr(module, "__dict__", {}).get("__file__")
    top = folder / name.partition(".")[0]
    path = Path(file if isinstance(file, str) else "")
    return path == top.with_suffix(".py") or top in path.parents
