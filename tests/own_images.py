"""Small folders of images of a user's own, for tests."""

from __future__ import annotations

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
    """An image of random pixels; a class is as bright as its folder's name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    shape = size if mode == "L" else (*size, 3)
    bright = 120 if path.parent.name == "ill" else 0
    Image.fromarray((rng.integers(0, 120, shape) + bright).astype(np.uint8)).save(path)


def make_folder(root: Path, sites: Sequence[str] = ("north", "south"), each: int = 6) -> Path:
    """SITE/CLASS/NN.png, or CLASS/NN.png without sites; `each` of a class at a site."""
    seed = 0
    for site in sites or ("",):
        for name in CLASSES:
            for number in range(each):
                seed += 1
                write_image(root / site / name / f"{number:02d}.png", seed)
    return root


def declare(
    root: Path,
    sites: Sequence[str] = ("north", "south"),
    by: str = "A. Keller",
    ledger: str = "fedsynth-ledger",
    users: int = 0,
) -> Path:
    """A signed declaration of the images in a folder."""
    listed = "[" + ", ".join(f'"{site}"' for site in sites) + "]"
    text = DECLARATION.format(sites=listed, by=by, ledger=ledger, users=users)
    (root / "fedsynth.toml").write_text(text, encoding="utf-8")
    return root / "fedsynth.toml"
