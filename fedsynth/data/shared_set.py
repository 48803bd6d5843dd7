"""A synthetic set that somebody hands over, as `fedsynth synthesize` and `fedsynth export` write
it.

README.md                   what it is, and how to train on it
images/NN-CLASS/NNNN.png    each image, to be looked at: pixels cut off at black and white
synthetic.safetensors       the same, to be trained on: `images`, `labels`, and where there are
                            any `soft_labels`, and the `client` that made each
model.safetensors           the run's model, where it was asked for (`fedsynth.load_model`)
privacy_report.json, .md, .html    what is guaranteed; none without differential privacy
SHA256SUMS                  the hashes of all of them, for `sha256sum -c`
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedsynth.data.files import MAX_LIST_BYTES, one_line
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DataFilesCorruptError, DataFilesMissingError, FedsynthError
from fedsynth.privacy.files import read_regular

TENSORS, SUMS, README = "synthetic.safetensors", "SHA256SUMS", "README.md"
FORMAT = "fedsynth synthetic set 1"
MOST_BYTES = 2**36
_SUM = re.compile(r"([0-9a-f]{64})  ([^\\\0]+)")


@dataclass(frozen=True, eq=False)
class SharedSet:
    """A synthetic set.

    Attributes:
        images: float32 [N, C, H, W] in pixel units: 0 is black and 1 is white. Images that were
            learned may lie outside; they are not cut off, as models train better on them so.
        labels: int64 [N].
        soft_labels: float32 [N, classes], or None.
        clients: int64 [N], who made each; None: one owner made all.
        spec: what they are; `train_size` is the number of synthetic images.
        epsilon, delta: what is guaranteed to each example (or user) of the private data; None:
            nothing is.

    >>> import tempfile
    >>> from fedsynth import load_synthetic, owner_settings, synthesize
    >>> settings = owner_settings({"model": {"width": 8}, "privacy": {"epsilon": 8}})  # digits
    >>> place = tempfile.mkdtemp()
    >>> result = synthesize(settings, f"{place}/share", runs=f"{place}/runs")
    >>> found = load_synthetic(f"{place}/share")
    >>> list(found.images.shape), found.epsilon <= 8
    ([100, 1, 8, 8], True)
    """

    images: Tensor
    labels: Tensor
    soft_labels: Tensor | None
    clients: Tensor | None
    spec: DatasetSpec
    epsilon: float | None
    delta: float | None

    def normalised(self) -> Tensor:
        """The images as models take them: (x − mean)/std by channel, float32 [N, C, H, W]."""
        shape = (1, -1, 1, 1)
        mean = torch.tensor(self.spec.mean).view(shape)
        return (self.images - mean) / torch.tensor(self.spec.std).view(shape)

    def __repr__(self) -> str:
        held = "no guarantee" if self.epsilon is None else f"ε = {self.epsilon:.4g}"
        return f"SharedSet({len(self.labels)} images of {self.spec.name!r}, {held})"


def load_synthetic(folder: str | Path) -> SharedSet:
    """The synthetic set in a folder that was handed over; its files' hashes are compared.

    Raises:
        DataFilesMissingError: no such folder, or a file that is listed is not there.
        DataFilesCorruptError: a file is another than when it was written, one is there that is not
            listed, or the tensors are damaged.

    >>> load_synthetic("/no/such/folder")
    Traceback (most recent call last):
    fedsynth.errors.DataFilesMissingError: ...
    """
    root = Path(folder).expanduser()
    if not (root / SUMS).is_file():
        raise DataFilesMissingError(
            f"{one_line(root)} is no synthetic set: it has no {SUMS} (fedsynth export RUN makes "
            "one)"
        )
    check_hashes(root)
    try:
        with safe_open(root / TENSORS, framework="pt") as file:
            facts = file.metadata() or {}
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _shared_set(found, facts)
    except (
        SafetensorError,
        OSError,
        LookupError,
        ValueError,
        RuntimeError,  # of torch, for sizes beyond its own
        TypeError,
        FedsynthError,
    ) as error:
        raise DataFilesCorruptError(f"{root / TENSORS} is damaged: {one_line(error)}") from None


def _shared_set(found: dict[str, Tensor], facts: dict[str, str]) -> SharedSet:
    if facts.get("format") != FORMAT:
        raise ValueError(f"its format is {facts.get('format')!r}, and should be {FORMAT!r}")
    images = found["images"]
    labels = found["labels"]
    classes = len(json.loads(facts["class_names"]))
    if labels.shape != (len(images),) or labels.dtype != torch.int64:
        raise ValueError("its labels are not one for each image")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError("its labels are of classes that there are not")
    epsilon = _promised(facts["epsilon"])
    delta = _promised(facts["delta"])
    if (epsilon is None) != (delta is None):
        raise ValueError("it has one of ε and δ")
    soft = found.get("soft_labels")
    if soft is not None and (soft.shape != (len(images), classes) or not soft.is_floating_point()):
        raise ValueError("its soft labels are not a share of each class for each image")
    return SharedSet(
        images.float(),
        labels,
        soft,
        found.get("client"),
        spec_of(images, facts),
        epsilon,
        delta,
    )


def _promised(text: str) -> float | None:
    """ε or δ as a file's metadata says it."""
    value = json.loads(text)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"its guarantee is no number: {value!r:.40}")
    return float(value)


def spec_of(images_NCHW: Tensor, facts: Mapping[str, str]) -> DatasetSpec:
    """What a set's images are, by its file's metadata."""
    count, channels, height, width = images_NCHW.shape
    names = tuple(json.loads(facts["class_names"]))
    return DatasetSpec(
        name=facts["data_set"],
        channels=channels,
        height=height,
        width=width,
        classes=len(names),
        train_size=max(1, count),
        test_size=1,
        mean=tuple(json.loads(facts["mean"])),
        std=tuple(json.loads(facts["std"])),
        class_names=names,
        source=f"synthetic, made by {facts['made_by']}",
    )


# ---------------------------------------------------------------------------------------- hashes


def files_below(root: Path) -> list[str]:
    """The files below a folder, as `SHA256SUMS` names them, in order."""
    found = (path for path in root.rglob("*") if not path.is_dir())
    return sorted(path.relative_to(root).as_posix() for path in found)


def hash_of(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(read_regular(path, MOST_BYTES)).hexdigest()


def write_hashes(root: Path) -> None:
    """Writes SHA256SUMS over all other files of a folder."""
    lines = [f"{hash_of(root / name)}  {name}\n" for name in files_below(root) if name != SUMS]
    (root / SUMS).write_text("".join(lines), encoding="utf-8")


def check_hashes(root: Path) -> None:
    """Refuses a folder whose files are others than when it was written.

    Raises:
        DataFilesMissingError, DataFilesCorruptError: as `load_synthetic`.
    """
    try:
        text = read_regular(root / SUMS, MAX_LIST_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataFilesCorruptError(f"cannot read {root / SUMS}: {one_line(error)}") from None
    listed = {}
    for line in text.splitlines():
        match = _SUM.fullmatch(line)
        if match is None or ".." in match[2].split("/") or match[2].startswith("/"):
            raise DataFilesCorruptError(f"{root / SUMS} is damaged: {one_line(line)!r}")
        listed[match[2]] = match[1]
    there = set(files_below(root)) - {SUMS}
    for name in sorted(listed.keys() | there):
        if name not in there:
            raise DataFilesMissingError(f"{root} lacks {one_line(name)}, which {SUMS} lists")
        if name not in listed:
            raise DataFilesCorruptError(f"{root} has {one_line(name)}, which {SUMS} does not list")
        try:
            same = hash_of(root / name) == listed[name]
        except OSError as error:
            raise DataFilesCorruptError(
                f"cannot read {one_line(root / name)}: {one_line(error)}"
            ) from None
        if not same:
            raise DataFilesCorruptError(f"{one_line(root / name)} was changed since it was written")
