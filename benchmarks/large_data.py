"""Memory of encoding more images than fit into it: the table of docs/features.md.

    python benchmarks/large_data.py [--quick] [--only npy]

200,000 colour images of 64×64 (2.5 GB) as .npy, Parquet or PNG files are read and encoded, each in
a separate process in a control group with 2 GiB of memory, caches of files included. Anonymous
memory is what the process itself needs; the rest can be written to disk. The encoder is a random
projection to 512 values, or `scattering`. Linux only, as root, with control groups of version 1.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fedsynth.data.own_data import load_records
from fedsynth.features.encoding import encode
from fedsynth.features.feature_map import FeatureMap
from fedsynth.features.registry import feature_map
from library.machine import run_cases, timing_options

SHAPE = (3, 64, 64)
LIMIT = 2**31
GROUP = Path("/sys/fs/cgroup/memory/fedsynth")
CASES = {
    "npy": ("npy", "projection"),
    "parquet": ("parquet", "projection"),
    "png": ("png", "projection"),
    "npy, scattering": ("npy", "scattering"),
}


def pictures(count: int) -> Iterator[np.ndarray[Any, Any]]:
    """Draws images that PNG compresses to about 5 kB."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        coarse = rng.integers(0, 256, (8, 8, 3), np.uint8)
        yield np.asarray(Image.fromarray(coarse).resize(SHAPE[1:], Image.Resampling.BILINEAR))


def png(picture: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def written(kind: str, count: int, folder: Path) -> Path:
    """Writes the images without holding them all."""
    labels = np.arange(count) % 2
    if kind == "npy":
        values = np.lib.format.open_memmap(folder / "x.npy", "w+", np.uint8, (count, 64, 64, 3))
        for row, picture in enumerate(pictures(count)):
            values[row] = picture
        np.save(folder / "y.npy", labels)
        return folder / "x.npy"
    if kind == "png":
        for row, picture in enumerate(pictures(count)):
            path = folder / f"class{row % 2}" / f"{row}.png"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(png(picture))
        return folder
    import datasets

    columns = datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
    rows = (
        {"image": {"bytes": png(picture), "path": None}, "label": row % 2}
        for row, picture in enumerate(pictures(count))
    )
    with datasets.arrow_writer.ParquetWriter(path=str(folder / "x.parquet"), features=columns) as w:
        for example in rows:
            w.write(example)
        w.finalize()
    return folder / "x.parquet"


def encoder(name: str) -> FeatureMap:
    if name != "projection":
        return feature_map(name, SHAPE)
    weights = torch.randn(3 * 64 * 64, 512, generator=torch.Generator().manual_seed(0)) / 111
    source = "pixels are in [0, 1]"
    return FeatureMap(
        name, SHAPE, 512, 23.0, 1.0, source, lambda pixels: pixels.flatten(1) @ weights
    )


class PeakMemory(threading.Thread):
    """Watches the anonymous memory of this process, in MiB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0.0

    def run(self) -> None:
        while True:
            status = Path("/proc/self/status").read_text()
            [kilobytes] = re.findall(r"RssAnon:\s+(\d+) kB", status)
            self.peak = max(self.peak, int(kilobytes) / 1024)
            time.sleep(0.05)


def measure(case: tuple[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Writes the files, enters the control group, and reads and encodes the images."""
    kind, name = case
    count = 2000 if options.quick else 200_000
    place = Path(tempfile.mkdtemp())
    try:
        path = written(kind, count, place)
        GROUP.mkdir(exist_ok=True)
        (GROUP / "memory.limit_in_bytes").write_text(str(LIMIT))
        (GROUP / "cgroup.procs").write_text(str(os.getpid()))
        memory = PeakMemory()
        memory.start()
        started = time.process_time()
        images = load_records(path).train
        read = time.process_time()
        vectors = encode(images, encoder(name), torch.device("cpu"))
        return {
            "images": count,
            "mib": round(images.images.nbytes / 2**20),
            "vectors_mib": round(vectors.images.nbytes / 2**20),
            "limit_mib": LIMIT // 2**20,
            "anonymous_peak_mib": round(memory.peak),
            "read_seconds": round(read - started, 1),
            "encode_seconds": round(time.process_time() - read, 1),
        }
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    arguments = timing_options(__doc__).parse_args()
    run_cases("large_data", arguments, CASES, measure, separate_processes=True)
