"""The settings that name a folder of the user's images (section `data` of a config file)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedsynth.data.declaration import Declaration, read_declaration
from fedsynth.data.files import expanded, one_line
from fedsynth.data.folder_files import DECLARATION, manifest_of
from fedsynth.data.registry import is_known
from fedsynth.errors import SettingError
from fedsynth.validation import check_choice, check_number

TEST_KINDS = ("public", "private", "none")
MAX_SIDE = 4096
_SIZE = re.compile(r"([0-9]{1,4})(?:[x×]([0-9]{1,4}))?")


@dataclass(frozen=True)
class FolderSettings:
    """The settings of a run that trains on images in a folder.

    Args:
        folder: your own images: SITE/CLASS/files (each site is a client), CLASS/files (with a
            partition), or a folder with a manifest.csv of path, label, site, user. Also the
            manifest itself. JPEG, PNG, BMP and WebP.
        test_folder: your own images to test on, in the same layouts; sites are ignored.
        test: the test images are "public", "private" (default) or "none" (not used). With
            differential privacy, metrics on private ones are only in `simulation_only`.
        image_size: size of all images after resizing: 64, or 64x48 (height x width). Default: the
            declared size, or that of the images if all have the same.
        channels: 1 (grey) or 3 (colour). Default (0): the declared number, or 1 if all images
            are grey.
        skip_corrupt: skip files that cannot be read, and list them.
        declaration: the file that states what is public about the images, as `fedsynth data
            describe` proposes it (default: fedsynth.toml in their folder). A run with differential
            privacy requires a signed one.
        skip_other: skip everything that is not an image (other files, broken links, empty folders)
            and report the count.

    Raises:
        SettingError: a value is invalid.

    >>> from fedsynth import FedAvg, PartitionSettings, RunSettings
    >>> scans = FolderSettings("/data/scans", image_size="64x48")
    >>> settings = RunSettings(FedAvg(), folder=scans, partition=PartitionSettings("given"))
    >>> scans.size(), settings.folder.folder
    ((64, 48), '/data/scans')
    """

    section: ClassVar[str] = "data"  # of a config file

    folder: str
    test_folder: str = ""
    test: str = ""
    image_size: str = ""
    channels: int = 0
    skip_corrupt: bool = False
    declaration: str = ""
    skip_other: bool = False

    def __post_init__(self) -> None:
        for name in ("folder", "test_folder", "declaration"):
            path = str(getattr(self, name))
            if path:
                object.__setattr__(self, name, str(expanded(path).absolute()))
        object.__setattr__(self, "image_size", str(self.image_size))
        if not self.folder:
            raise SettingError("data", "folder", "must name a folder of images")
        if self.test:
            check_choice("data", "test", self.test, TEST_KINDS)
        if self.test in ("public", "private") and not self.test_folder:
            raise SettingError(
                "data", "test", "needs test images: set data.test_folder", value=self.test
            )
        if self.channels not in (0, 1, 3):
            raise SettingError("data", "channels", f"must be 1 or 3, got {self.channels}")
        self.size()

    def size(self) -> tuple[int, int] | None:
        """Returns height and width, or None if `image_size` is not set.

        Raises:
            SettingError: `image_size` is invalid.
        """
        if not self.image_size:
            return None
        match = _SIZE.fullmatch(self.image_size.strip())
        if match is None:
            raise SettingError(
                "data",
                "image_size",
                "must be a number of pixels such as 64, or 64x48 (height x width), got "
                f"{self.image_size!r}",
            )
        height = int(match[1])
        width = int(match[2] or height)
        for side in (height, width):
            check_number("data", "image_size", side, 1, MAX_SIDE)
        return height, width

    def declared(self) -> Declaration | None:
        """Returns the declaration of these images, or None if there is none.

        Raises:
            DataFilesCorruptError: it is damaged, or the settings name one that does not exist.
        """
        if self.declaration:
            return read_declaration(Path(self.declaration))
        path = default_declaration(Path(self.folder))
        if not path.exists():
            return None
        return read_declaration(path)


def default_declaration(folder: Path) -> Path:
    """Returns the default path of the declaration for a folder or manifest."""
    return manifest_of(folder).with_name(DECLARATION)


def default_name(folder: str) -> str:
    """Returns the name of a data set for which no declaration gives one: that of its folder or
    manifest."""
    name = one_line(Path(folder).name.removesuffix(".csv") or "images")
    if is_known(name):
        return f"own {name}"
    return name
