"""Small image folders of a user, and files that must never be read, such as pipes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("ill", "well")
DECLARATION = """\
[images]
name = "clinic"
class_names = ["ill", "well"]
sites = {sites}
channels = 1
height = 16
width = 16
mean = [0.5]
std = [0.25]
source = "a test"

[sizes]
images = 50
most_images = 100
users = {users}

[privacy]
ledger = "{ledger}"

[signed_off]
by = "{by}"
date = "2026-11-22"
"""


def write_image(path: Path, seed: int, size: tuple[int, int] = (16, 16), mode: str = "L") -> None:
    """Writes an image of random pixels; those of the class `ill` are brighter."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    shape = size if mode == "L" else (*size, 3)
    brightness = 120 if path.parent.name == "ill" else 0
    Image.fromarray((rng.integers(0, 120, shape) + brightness).astype(np.uint8)).save(path)


def make_image_folder(
    root: Path, sites: Sequence[str] = ("north", "south"), per_class: int = 6
) -> Path:
    """Writes SITE/CLASS/NN.png, or CLASS/NN.png without sites: `per_class` images per class and site."""
    seed = 0
    for site in sites or ("",):
        for name in CLASSES:
            for number in range(per_class):
                seed += 1
                write_image(root / site / name / f"{number:02d}.png", seed)
    return root


def write_declaration(
    root: Path,
    sites: Sequence[str] = ("north", "south"),
    by: str = "A. Keller",
    ledger: str = "fedsynth-ledger",
    users: int = 0,
) -> Path:
    """Writes a signed declaration of the images in a folder."""
    text = DECLARATION.format(sites=list(sites), by=by, ledger=ledger, users=users)
    (root / "fedsynth.toml").write_text(text, encoding="utf-8")
    return root / "fedsynth.toml"


def make_special_file(path: Path, kind: str) -> Path:
    """Creates a file of a kind that must never be read."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.touch()
        os.truncate(path, 2**40)  # a hole: it takes no space
    else:  # /proc/cpuinfo is a regular file without a size; some are endless
        path.symlink_to({"device": "/dev/zero", "proc": "/proc/cpuinfo"}[kind])
    return path


SPECIAL_KINDS = ("pipe", "folder", "device", "proc", "large")
