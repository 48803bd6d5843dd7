"""Makes fedsynth take Windows' way through locks, files and processes: `pytest -p tests.windows`.

Modules that Windows lacks cannot be imported. For fedsynth's modules, `sys.platform` is "win32",
`os` lacks the names that Windows lacks, and `msvcrt` locks as Windows does: a byte, for an open
file. What Windows refuses is refused: opening a folder, and fsync of a file open for reading. The
processes, paths and other libraries remain those of this machine.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import os
import subprocess  # noqa: F401  # it looks for msvcrt
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ABSENT_MODULES = {"fcntl", "resource", "pwd", "grp", "termios"}
ABSENT_NAMES = {
    *("register_at_fork", "fork", "getuid", "killpg", "pread", "mkfifo", "sched_getaffinity"),
    *("O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY"),
}


class RefusedModules:
    """Refuses the imports of Unix' modules."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name in ABSENT_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class View:
    """A module with some names replaced or, as None, removed."""

    def __init__(self, module: ModuleType, changes: dict[str, Any]) -> None:
        vars(self).update(_module=module, _changes=changes)

    def __getattr__(self, name: str) -> Any:
        value = self._changes.get(name, self)
        if value is None:
            raise AttributeError(f"module {self._module.__name__!r} has no attribute {name!r}")
        return getattr(self._module, name) if value is self else value

    def __setattr__(self, name: str, value: Any) -> None:  # monkeypatch
        setattr(self._module, name, value)


def open_file(path: Any, flags: int, *rest: Any, **options: Any) -> int:
    if Path(path).is_dir():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return os.open(path, flags, *rest, **options)


def fsync(descriptor: int) -> None:
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    os.fsync(descriptor)


def locking(descriptor: int, mode: int, count: int) -> None:
    """Locks for the open file, not for the process. Windows locks bytes from the position."""
    if os.lseek(descriptor, 0, os.SEEK_CUR) + count >= 2**31:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None


WINDOWS = {
    "sys": View(sys, {"platform": "win32"}),
    "os": View(os, {**dict.fromkeys(ABSENT_NAMES), "open": open_file, "fsync": fsync}),
    "msvcrt": View(ModuleType("msvcrt"), {"locking": locking, "LK_NBLCK": 2}),
}
_import = builtins.__import__


def import_as_on_windows(
    name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
) -> Any:
    importer = str((globals or {}).get("__name__"))
    if name in WINDOWS and importer.partition(".")[0] == "fedsynth":
        return WINDOWS[name]
    return _import(name, globals, locals, fromlist, level)


for absent in ABSENT_MODULES:
    sys.modules.pop(absent, None)
sys.meta_path.insert(0, RefusedModules())  # type: ignore[arg-type]
builtins.__import__ = import_as_on_windows
