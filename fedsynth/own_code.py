"""Loads custom models, methods, feature maps and losses from Python files that the user names, such
as `net.py:Net`.

Only a file that the user names is executed: on the command line, or in a config file or sweep file
that the user wrote. A file that is named in the config.toml of a run is never opened. Only its
SHA-256 hash is compared, so run folders may come from untrusted sources.
"""

from __future__ import annotations

import hashlib
import re
import sys
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
    """A class or function that a user's Python file defines, with the text of this file.

    Attributes:
        file: the file's name, without its folder.
        name: name of the class or function.
        sha256: hash of the file.
        text: content of the file.
        path: the file's absolute path, which no run folder states.
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


# The files that this process has loaded, by label.
SOURCES: dict[str, OwnCode] = {}


def names_a_file(setting: str) -> bool:
    """Returns True if the value of a setting has the form `FILE.py:NAME`, and so names a Python
    file.

    >>> names_a_file("net.py:Net"), names_a_file("convnet")
    (True, False)
    """
    file, colon, name = setting.rpartition(":")
    return bool(colon) and file.endswith(".py") and name.isidentifier()


def is_label(name: str) -> bool:
    """Returns True if a name has the form `FILE.py:NAME@HASH`, which config.toml has for custom
    files.

    >>> is_label("net.py:Net@0123456789ab"), is_label("net.py:Net"), is_label("convnet")
    (True, False, False)
    """
    return names_code(name) and code_of(name) != name


def names_code(name: str) -> bool:
    """Returns True if a name has the form `FILE.py:NAME` or `FILE.py:NAME@HASH`."""
    return names_a_file(code_of(name))


def code_of(label: str) -> str:
    """Returns the part `FILE.py:NAME` of a label."""
    return re.sub("@[0-9a-f]+$", "", label)


METHOD_FEATURES = ("method", "features")
# The settings that may name custom code: its option, and the Python function that registers it.
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
    """Returns the error for a custom file that this process has not loaded.

    Args:
        section, key: the setting that names the file.
        setting: the label in config.toml, or `FILE.py:NAME`.
    """
    option, function = LOADERS[section, key]
    code = code_of(setting)
    place = "PATH/" if code != setting else ""
    reason = (
        f"is the custom code {short_repr(setting)}, which is not loaded, or has changed. Use "
        f"{option} {place}{code:.200}, or call {function} in Python"
    )
    return SettingError(section, key, reason)


def load_own(section: str | None, key: str, setting: str) -> tuple[Any, str]:
    """Executes a custom file, and returns the object with the given name and its label.

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
            section, key, f"names the file {path}, which cannot be read: {one_line(error)}"
        ) from None
    code = OwnCode(path.name, name, hashlib.sha256(content).hexdigest(), text, path)
    module = _executed(section, key, path, code)
    definition = getattr(module, name, None)
    if definition is None:
        raise SettingError(section, key, f"names {name!r}, but {path} does not define this name")
    SOURCES[code.label] = code
    return definition, code.label


def _executed(section: str | None, key: str, path: Path, code: OwnCode) -> Any:
    """Executes a Python file and returns it as a module.

    If this process has executed the same text from a file of this name before, the function returns
    the module of that execution. The text is compiled here, because Python's own loader could run a
    cached `.pyc` file instead, which is not hashed.
    """
    title = f"fedsynth_own_{path.stem}_{code.sha256[:HASH_DIGITS]}"
    if title in sys.modules:
        return sys.modules[title]
    module = ModuleType(title)
    module.__file__ = str(path)
    sys.modules[title] = module  # dataclasses look up their module
    sys.path.insert(0, str(path.parent))  # as for a script: it may import files next to it
    try:
        text = code.text.removeprefix("\ufeff")
        exec(compile(text, str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[title]
        reason = f"names {path}, which fails with {type(error).__name__}: {one_line(error)}"
        raise SettingError(section, key, reason) from error
    finally:
        sys.path.remove(str(path.parent))
    return module
