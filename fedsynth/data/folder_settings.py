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
        folder: the folder with your own images, as SITE/CLASS/files, CLASS/files or a manifest.csv.
            In the first layout each site is a client, and in the second the partition divides the
            images. A manifest has the columns path, label, site and user, and may be given itself.
            Images may be JPEG, PNG, BMP or WebP files.
        test_folder: the folder with your own test images, in one of the same layouts. Its sites are
            ignored.
        test: whether your test images are "public" or "private" (the default), or "none" to use
            none. With differential privacy, metrics on private test images are reported only as
            `simulation_only`.
        image_size: the size to which all images are resized, such as 64, or 64x48 (height x width).
            The default is the declared size or, without a declaration, the size that all images
            have.
        channels: the number of channels, 1 (grey) or 3 (colour). The default, 0, takes the declared
            number or, without a declaration, 1 if all images are grey and otherwise 3.
        skip_corrupt: skip files that cannot be read, and list them.
        declaration: the file that states what is public about the images (default: fedsynth.toml in
            their folder). `fedsynth data describe` proposes it. A run with differential privacy
            requires a signed declaration.
        skip_other: skip everything that is not an image (other files, broken links, empty folders),
            and report how many there are.

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
                "data", "test", "requires test images: set data.test_folder", value=self.test
            )
        if self.channels not in (0, 1, 3):
            raise SettingError("data", "channels", f"must be 1 or 3, got {self.channels}")
        self.size()

    def size(self) -> tuple[int, int] | None:
        """Returns the height and width of the images, or None if `image_size` is not set.

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
        """Reads the declaration of these images. Returns None if the images have no declaration.

        Raises:
            DataFilesCorruptError: the declaration is damaged, or the settings name a declaration
                that does not exist.
        """
        if self.declaration:
            return read_declaration(Path(self.declaration))
        path = default_declaration(Path(self.folder))
        if not path.exists():
            return None
        return read_declaration(path)


def default_declaration(folder: Path) -> Path:
    """Returns the default path of the declaration: next to the manifest, or in the folder."""
    return manifest_of(folder).with_name(DECLARATION)


def default_name(folder: str) -> str:
    """Returns the name of a data set that has no declaration.

    It is the name of the folder or manifest. If a published data set has this name, "own" is put
    before it.
    """
    name = one_line(Path(folder).name.removesuffix(".csv") or "images")
    if is_known(name):
        return f"own {name}"
    return name
