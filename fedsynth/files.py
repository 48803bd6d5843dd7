"""Safe access to untrusted files.

Only regular files within a size limit are opened, deeply nested JSON and TOML is refused, and
waiting for a lock has a timeout. The module also writes files atomically.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import stat
import sys
import tempfile
import time
import tomllib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, NoReturn

from fedsynth.errors import OutputError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

# The maximum time to wait for a lock. A charge holds the lock for milliseconds. Opening a ledger
# folder holds the lock for longer, until all records are hashed.
LOCK_SECONDS = 60.0

PAUSE_SECONDS = 0.01
# The maximum size of a report, ledger or key. A report on 10,000 clients and 200 rounds takes about
# 100 MB.
MAX_TEXT_BYTES = 2**28
# The maximum size of a TOML file, such as a config or a policy. TOML files are usually a few kB,
# and `tomllib` is slow.
MAX_TOML_BYTES = 2**20
# The maximum size of a tensor file.
MAX_TENSORS_BYTES = 2**36
# The maximum nesting depth of JSON and TOML values. Files that fedsynth writes have fewer than ten
# levels.
MAX_DEPTH = 64

HASH_DIGITS = 64
PARTIAL = ".partial"  # the suffix of a file that is being written
_OPENING = re.compile(r"[\[{]")
_BETWEEN_KEYS = re.compile(r"[=,\[\]{}\n]")

# Windows locks a byte, which other processes then cannot read. This byte is beyond the end of each
# file that is locked, and the largest position that Windows' function accepts.
LOCKED_BYTE = 2**31 - 2

_forks = [0]  # forks since the program started: process numbers are reused, so they do not suffice


def _after_fork() -> None:
    _forks[0] += 1


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_after_fork)


def this_process() -> tuple[int, int]:
    """Returns an identifier of the current process: its PID and a fork counter.

    The identifier differs between any two processes, including a process and its forks.
    """
    return os.getpid(), _forks[0]


def expand_home(path: str | Path) -> Path:
    """Replaces a path's leading `~` or `~name` with the user's home folder.

    Raises:
        FileNotFoundError: the user or their home folder does not exist.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "~ has no home folder", str(path)) from None


def open_regular(
    path: Path, *, writing: bool = False, create: bool = False, max_bytes: int | None = None
) -> FileIO:
    """Opens a regular file. Refuses pipes and devices, which may block reads forever.

    The file is checked after opening, so that no other process can swap it between check and
    opening.

    Args:
        path: the path of the file.
        writing: True opens the file for reading and appending, False only for reading.
        create: True creates the file if it is missing.
        max_bytes: the maximum size of the file. None allows any size.

    Raises:
        OSError: the file cannot be opened.
        OSError: the file is too large, or it is a folder, a pipe, a device or a file of
            `/proc`.
    """
    flags = os.O_RDWR | os.O_APPEND if writing else os.O_RDONLY
    if create:
        flags |= os.O_CREAT
    # Without O_NONBLOCK, opening a pipe waits until another process opens its other end. Without
    # O_BINARY, Windows changes the ends of lines.
    flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except ValueError as error:  # a zero byte in the name, or a lone surrogate
        raise OSError(errno.EINVAL, str(error)) from None
    try:
        status = os.fstat(descriptor)
        regular = stat.S_ISREG(status.st_mode)
        if regular and status.st_size == 0 and os.read(descriptor, 1):
            # A file of `/proc` stays at size 0; another process may have appended to this one.
            regular = os.fstat(descriptor).st_size > 0
        if not regular:
            raise OSError(
                errno.EINVAL, "the path is a folder, pipe or device. Name a regular file", str(path)
            )
        os.lseek(descriptor, 0, os.SEEK_SET)
        if max_bytes is not None and status.st_size > max_bytes:
            reason = f"the file has {status.st_size:,} bytes, but at most {max_bytes:,} are allowed"
            raise OSError(errno.EFBIG, reason, str(path))
        return FileIO(descriptor, "r+" if writing else "r")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Reads all bytes of a regular file within a size limit.

    Bytes appended after opening are not read.

    Raises:
        OSError: the file cannot be opened, is too large or is not a regular file.
    """
    with BufferedReader(open_regular(path, max_bytes=max_bytes)) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def file_hash(path: Path) -> str:
    """Computes a regular file's SHA-256 in hexadecimal.

    Raises:
        OSError: the file cannot be opened or is not a regular file.
    """
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def plain_files(root: Path, leave_out: Collection[str] = ()) -> list[str]:
    """Lists all files in a folder and its subfolders.

    Args:
        root: the folder.
        leave_out: the names of files and folders directly in `root` that are skipped.

    Returns:
        The sorted file paths relative to `root`, with `/` as the separator.

    Raises:
        OSError: a folder cannot be read.
        OSError: an entry is neither a file nor a folder, but for example a symbolic link.
    """
    paths = []
    for parent, folders, names in os.walk(root, onerror=_raise):
        if Path(parent) == root:
            folders[:] = set(folders).difference(leave_out)
            names[:] = set(names).difference(leave_out)
        for name in (*folders, *names):
            path = Path(parent) / name
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                paths.append(path.relative_to(root).as_posix())
            elif not stat.S_ISDIR(mode):
                reason = (
                    f"{path.relative_to(root)} is a link, pipe or device. Replace it with a plain "
                    "file"
                )
                raise OSError(errno.EINVAL, reason, str(path))
    return sorted(paths)


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Reads a text file in UTF-8.

    Raises:
        OSError: the file cannot be opened, is too large or is not a regular file.
        UnicodeDecodeError: the file is not UTF-8.
    """
    return read_regular(path, max_bytes).decode("utf-8")


def last_line(path: Path) -> str:
    """Returns the last non-empty line of a log file, cut off after 300 characters."""
    try:
        text = read_regular(path).decode(errors="replace").rstrip()
    except OSError:
        return "the log is missing"
    return text.rpartition("\n")[2].strip()[:300] or "the log is empty"


def load_json(path: Path) -> Any:
    """Reads a JSON file.

    Raises:
        OSError: the file cannot be opened, is too large or is not a regular file.
        ValueError: the content is not valid JSON, as in `decode_json`.
    """
    return decode_json(read_text(path))


def load_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file.

    Raises:
        OSError: the file cannot be opened, is too large or is not a regular file.
        ValueError: the file is not UTF-8, is not TOML, is nested too deeply, or contains an integer
            of more than 64 bits.
    """
    text = read_text(path, MAX_TOML_BYTES)
    for part in _BETWEEN_KEYS.split(text):
        # tomllib's time is quadratic in the number of parts in a dotted key.
        if re.sub(r"\.{2,}", "", part).count(".") > MAX_DEPTH:
            raise ValueError(_too_deep())
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_too_deep()) from None
    _check_depth(table, largest=2**63 - 1)
    return table


def decode_json(text: str | bytes) -> Any:
    """Parses a JSON text, or its bytes in UTF-8.

    Raises:
        ValueError: the bytes are not UTF-8, the text is not JSON or is nested too deeply, an object
            has a duplicate key, or a string contains half of a surrogate pair. NaN and infinities
            are not JSON.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        value = json.loads(
            text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_distinct
        )
    except RecursionError:
        raise ValueError(_too_deep()) from None
    if len(_OPENING.findall(text)) > MAX_DEPTH:
        _check_depth(value)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be written
    return value


def _check_depth(value: Any, largest: float = math.inf) -> None:
    """Checks that parsed values are not nested too deeply, and that integers are not too large.

    The value is checked level by level, without recursion.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, int) and abs(item) > largest:
                raise ValueError("an integer has more than 64 bits")
        if not below:
            return
        level = below
    raise ValueError(_too_deep())


def _too_deep() -> str:
    return f"values are nested more than {MAX_DEPTH} levels deep"


def _refuse(literal: str) -> NoReturn:
    raise ValueError(f"{literal} is not valid JSON. Numbers must be finite")


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError("a number is above the largest float (1.8e308)")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("an object contains the same key twice")
    return table


def _raise(error: OSError) -> NoReturn:
    raise error


def write_whole(
    path: Path, content: bytes | Iterable[bytes], *, lasting: bool = True, secret: bool = False
) -> None:
    """Creates or replaces a file atomically.

    A reader sees either the old file or the complete new one. The content is on disk when the
    function returns. The new file grants no permission that the old one did not grant.

    Args:
        path: the path of the file.
        content: the new content, in one piece or in several.
        lasting: True also writes the file's name to disk. With False, call `sync_folder`
            afterwards.
        secret: True lets only the current user read the file.

    Raises:
        OSError: the file cannot be written. The old file still exists.
    """
    # other processes may write the same file; the name is at most 255 bytes long
    partial = path.with_name(f"{path.name[:50]}.{secrets.token_hex(8)}{PARTIAL}")
    rights = 0o600 if secret else 0o666
    try:
        with suppress(FileNotFoundError):
            rights &= path.lstat().st_mode
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, rights)) as file:
            for part in [content] if isinstance(content, bytes) else content:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:  # a full disk names no file
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(OSError):
            partial.unlink()
    if lasting:
        sync_folder(path.parent)


def write_output(path: Path, content: bytes) -> None:
    """Writes a file to a path from the user. The path may be a link, a pipe or a device.

    A regular file is replaced atomically, as by `write_whole`. Links are followed. Pipes and
    devices are written directly, because they cannot be replaced.

    Raises:
        OSError: the file cannot be written or is write-protected. The old file still exists.
    """
    if path.exists():
        with path.open("ab") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                file.write(content)
                return
    write_whole(Path(os.path.realpath(path)), content)


def delete_partial(folder: Path) -> None:
    """Deletes temporary files that interrupted `write_whole` calls left in a folder or subfolder.

    No other process may be writing into the folder.
    """
    for leftover in folder.rglob(f"*{PARTIAL}"):
        leftover.unlink()


def with_hash(content: bytes, label: str = "") -> bytes:
    """Adds a SHA-256 hash in front of a file's content. `without_hash` checks and removes the hash.

    Args:
        content: the content of the file.
        label: further text that the hash covers, such as a run's identity.
    """
    digest = hashlib.sha256(f"{label}\n".encode() + content)
    return digest.hexdigest().encode() + content


def without_hash(stored: bytes, label: str = "") -> bytes:
    """Checks and removes the hash that `with_hash` prepended.

    Raises:
        ValueError: the content or the label has changed.
    """
    content = stored[HASH_DIGITS:]
    if with_hash(content, label) != stored:
        raise ValueError("its content does not match the SHA-256 at its start")
    return content


def require_folder(path: Path) -> None:
    """Checks that a folder exists or can be created, and is writable.

    Raises:
        OSError: a part of the path is not a folder or is not writable. The error names the part.
    """
    nearest = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(nearest))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(nearest))


def create_once(path: Path, content: bytes) -> None:
    """Creates a file that only the current user can read, unless the file exists.

    The file is created atomically, and is on disk when the function returns. An existing file is
    not changed.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        with suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flushes a folder's entries (its file names) to disk.

    Calling fsync only on a file does not guarantee that the file's name is on disk. Windows
    cannot do this for a folder; NTFS records new names in its journal.
    """
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(file: FileIO, *, shared: bool = False) -> None:
    """Locks an open file, or raises an error immediately if another lock prevents it.

    The file stays locked until it is closed. On Windows, every lock is exclusive.

    Raises:
        BlockingIOError: another open file holds a lock on the same file.
        OSError: the file cannot be locked.
    """
    if sys.platform == "win32":
        place = file.tell()
        file.seek(LOCKED_BYTE)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except PermissionError as error:  # Windows' error for a lock that another open file holds
            raise BlockingIOError(*error.args) from None
        finally:
            file.seek(place)
    else:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def claim(path: Path, busy: Exception) -> FileIO:
    """Locks a file without waiting.

    A missing file is created. The lock lasts until the returned file is closed in all processes
    that hold it.

    Raises:
        Exception: `busy`, if another process holds the lock.
        OSError: the file cannot be opened.
    """
    file = open_regular(path, writing=True, create=True)
    try:
        _try_lock(file)
    except OSError as error:
        file.close()
        raise (busy if isinstance(error, BlockingIOError) else error) from None
    return file


def lock(
    file: FileIO, path: Path, *, shared: bool = False, max_seconds: float | None = None
) -> None:
    """Waits for a lock on an open file, and holds it until the file is closed.

    Args:
        file: the open file.
        path: the path of the file, for error messages.
        shared: True allows other shared locks at the same time, which suffices for reading.
        max_seconds: the maximum time to wait for the lock. None means `LOCK_SECONDS`.

    Raises:
        OutputError: the file cannot be locked, or another process holds the lock for longer than
            `max_seconds`.
    """
    seconds = LOCK_SECONDS if max_seconds is None else max_seconds
    until = time.monotonic() + seconds
    while True:
        try:
            _try_lock(file, shared=shared)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                raise OutputError(
                    f"another process has held the lock on {path} for {seconds:g} s. Wait for "
                    f"that process, or find it with `fuser {path}` and end it"
                ).with_code("files.lock") from None
        except OSError as error:
            raise OutputError(f"cannot lock {path}: {error}. Use a local disk") from error
        time.sleep(PAUSE_SECONDS)


@contextmanager
def locked_file(path: Path, max_seconds: float | None = None) -> Iterator[FileIO]:
    """Creates a file if it is missing, locks it as `lock` does, and yields it."""
    with open_regular(path, writing=True, create=True) as file:  # closing releases the lock
        lock(file, path, max_seconds=max_seconds)
        yield file
