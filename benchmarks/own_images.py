"""How long it takes from a folder of images to a private synthetic set: the commands of
docs/own-data.md on Fashion-MNIST's footwear, written as a hospital's folders.

    FEDSYNTH_DATA=... python benchmarks/own_images.py [--quick] [--json]

Three sites of 900, 600 and 300 images of three classes, as JPEG and PNG, grey and colour, some of
another size; `describe`, the signature put in, `synthesize` at ε = 8 with 900 public test images.
Seconds are the processor's, of each command's process; cases that are there are not made again.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedsynth.data.load import load_dataset
from fedsynth.data.shared_set import load_synthetic
from library.machine import machine, saver, table_options
from library.rows import lines

NAME = "own_images"
SITES = {"north": 900, "south": 600, "St. Mary": 300}
CLASSES = {"sandal": 5, "sneaker": 7, "boot": 9}
SIZES = (28, 64)
EPSILON = 8


def write_folders(place: Path, share: float) -> None:
    """SITE/CLASS/NUMBER below `scans`, and CLASS/NUMBER below `public`."""
    train, test = load_dataset("fashion-mnist")
    rng = np.random.default_rng(0)
    labels = train.labels.numpy()
    for site, count in SITES.items():
        for name, label in CLASSES.items():
            each = max(20, int(share * count / len(CLASSES)))
            rows = rng.choice(np.flatnonzero(labels == label), each, replace=False)
            for row in rows:
                image = Image.fromarray(train.images[row, 0].numpy())
                if rng.random() < 0.3:
                    image = image.resize((40, 36))
                if rng.random() < 0.2:
                    image = image.convert("RGB")
                ending = "png" if rng.random() < 0.7 else "jpg"
                _save(image, place / "scans" / site / name / f"{row}.{ending}")
    for name, label in CLASSES.items():
        for row in np.flatnonzero(test.labels.numpy() == label)[:300]:
            image = Image.fromarray(test.images[row, 0].numpy())
            _save(image, place / "public" / name / f"{row}.png")


def _save(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def command(*words: str, place: Path) -> float:
    """The processor's seconds of `fedsynth WORDS`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    program = (sys.executable, "-c", "from fedsynth.cli.app import main; main()")
    subprocess.run([*program, *words], cwd=place, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def measured(size: int, *, quick: bool) -> dict[str, Any]:
    """The row of images that are resized to `size`."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_folders(place, 0.05 if quick else 1.0)
        look = ("--image-size", str(size), "--channels", "1")
        described = command("data", "describe", "scans", *look, place=place)
        toml = place / "scans" / "fedsynth.toml"
        text = toml.read_text().replace('by = ""', 'by = "x"').replace('date = ""', 'date = "x"')
        toml.write_text(text)
        short = ("--set", "iterations=1", "--rounds", "1", "--width", "4") if quick else ()
        made = command(
            *("synthesize", "--data", "scans", "--test-data", "public", "--test", "public"),
            *("--dp-epsilon", str(EPSILON), "--out", "share", "--device", "cpu", *short),
            place=place,
        )
        (summary,) = (place / "runs").glob("*/summary.json")
        found = load_synthetic(place / "share")
        return {
            "case": f"{size} pixels",
            "describe_seconds": round(described, 1),
            "synthesize_seconds": round(made, 1),
            "accuracy": json.loads(summary.read_text())["test_accuracy"],
            "epsilon": found.epsilon,
            "images": len(found.labels),
        }


def main() -> None:
    options = table_options(__doc__).parse_args()
    save = saver(NAME, options)
    there = set() if options.quick else {row["case"] for row in lines(NAME)}
    for size in SIZES[:1] if options.quick else SIZES:
        if f"{size} pixels" not in there:
            save({**measured(size, quick=options.quick), **machine()})


if __name__ == "__main__":
    main()
