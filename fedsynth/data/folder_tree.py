"""Lists all contents of a folder of images, including other files, so that nothing is ignored
silently."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsynth.data.files import one_line
from fedsynth.data.folders import ENDINGS
from fedsynth.errors import DataFilesCorruptError

IMAGE = "image"
HIDDEN = "hidden"
DANGLING = "broken links"
EMPTY = "empty folders"
NO_ENDING = "no ending"
_LITTER = {"__macosx", "thumbs.db", "desktop.ini"}
_KINDS_SHOWN = 8

Parts = tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A file, link or empty folder.

    Attributes:
        parts: the parts of its path relative to the folder.
        kind: `IMAGE`, `HIDDEN`, `DANGLING`, `EMPTY`, or the extension of another file.
    """

    parts: Parts
    kind: str


@dataclass(frozen=True)
class Unread:
    """Entries of one kind that are not read.

    Attributes:
        kind: see `Entry`.
        count: the number of entries.
        example: the path of one of them.
    """

    kind: str
    count: int
    example: str

    def __str__(self) -> str:
        more = " …" if self.count > 1 else ""
        return f"{one_line(self.kind, 40)}: {self.count} ({one_line(self.example)}{more})"


def by_kind(entries: Sequence[Entry]) -> tuple[Unread, ...]:
    """Counts the entries by kind."""
    parts_by_kind: dict[str, list[Parts]] = {}
    for entry in entries:
        parts_by_kind.setdefault(entry.kind, []).append(entry.parts)
    return tuple(
        Unread(kind, len(parts), "/".join(min(parts)))
        for kind, parts in sorted(parts_by_kind.items())
    )


def counted(unread: Sequence[Unread]) -> str:
    """Returns the counts as text."""
    hidden = len(unread) - _KINDS_SHOWN
    more = f", and {hidden} more kinds" if hidden > 0 else ""
    return ", ".join(map(str, unread[:_KINDS_SHOWN])) + more


def walk(root: Path, files: Collection[str], folders: Collection[Path]) -> list[Entry]:
    """Lists all files below a folder, by path. Linked folders are followed.

    Args:
        root: the folder.
        files: names of files directly in it that are omitted, because they are not images.
        folders: folders that are omitted, at any depth.

    Raises:
        DataFilesCorruptError: a folder cannot be listed, or is reached twice (by a link to another
            folder in the tree, or to one that contains the link).
    """
    entries: list[Entry] = []
    seen: dict[tuple[int, int], Path] = {}
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            _refuse_twice(folder, seen)
            names = sorted(child.name for child in folder.iterdir())
            subfolders = {name for name in names if (folder / name).is_dir()}
        except OSError as error:
            raise DataFilesCorruptError(
                f"{one_line(folder)} cannot be listed: {one_line(error.strerror)}"
            ) from None
        below = folder.relative_to(root).parts
        if below and all(map(_is_hidden, names)):
            entries.append(Entry(below, EMPTY))
        for name in names:
            if folder / name in folders:
                continue
            if _is_hidden(name):
                entries.append(Entry((*below, name), HIDDEN))
            elif name in subfolders:
                waiting.append(folder / name)
            elif below or name not in files:
                entries.append(Entry((*below, name), _kind(folder / name)))
    return sorted(entries, key=lambda entry: entry.parts)


def _refuse_twice(folder: Path, seen: dict[tuple[int, int], Path]) -> None:
    status = folder.stat()
    other = seen.setdefault((status.st_dev, status.st_ino), folder)
    if other != folder:
        raise DataFilesCorruptError(
            f"a link makes {one_line(folder)} and {one_line(other)} the same folder, so its "
            "images would count twice: remove the link"
        )


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.casefold() in _LITTER


def _kind(file: Path) -> str:
    if file.is_symlink() and not file.exists():
        return DANGLING
    ending = file.suffix.lower()
    return IMAGE if ending in ENDINGS else ending or NO_ENDING
