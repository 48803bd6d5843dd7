"""Loads published and synthetic data sets by name, and checks their files.

This module reads files in torchvision's layout and generates the synthetic data sets.
`published_folders` and `text` read the other data sets. The files are untrusted input. Most are
checked by their structure, because mirrors may compress or encode files differently. The files of
CIFAR, SVHN, USPS and Synthetic Digits must match published hashes: Python's unpickler executes what
a file names, SciPy's reader crashes on damaged files, and torchvision's USPS reader decompresses
without a limit.

Synthetic(α, β) contains devices with different models and inputs (Li et al., FedProx, arXiv
1812.06127, Sec. 5.1).

For each of 30 devices k: u_k ~ N(0, α²), W_k ∈ R^{60×10} and b_k ∈ R^{10} with entries ~ N(u_k, 1);
B_k ~ N(0, β²), v_k ∈ R^{60} with entries ~ N(B_k, 1); inputs x ~ N(v_k, Σ) with Σ diagonal, Σ_jj =
j^−1.2; labels argmax(xW_k + b_k). The paper writes N(0, α) and N(0, β); its public generator
(litian96/FedProx, data/synthetic_1_1) passes α and β to NumPy as standard deviations, and so does
this one. A device has ⌊lognormal(4, 2)⌋ + 50 examples, 90 % of them for training, as in the
generator and its files; the paper states 80 %. `synthetic(iid)` has one W and b for all devices,
from N(0, 1), and inputs ~ N(0, Σ). The idea is from Shamir, Srebro and Zhang, 2014.

u_k has the same effect on all ten logits, so α changes no label. The devices' models differ through
the unit variance of W_k and b_k.

The synthetic data sets are public and fixed: their seed is 0, whatever a run's seed is. All α and β
use the same random numbers, only scaled, and sizes do not depend on them. The numbers differ from
those of the public files, which come from NumPy's old generator.

Examples are images with one row of 60 pixels. Inputs are clipped to [−R, R] and rounded to 256
levels. R is four standard deviations of x_1 over all devices. Labels are computed from rounded
inputs, so they are exact for the models' inputs. The specification's mean 1/2 and deviation 1/(2R)
give models x itself: (pixel/255 − 1/2)·2R. A level is 2R/255 (0.054 for β = 1); the smallest
deviation within a device is 60^−0.6 = 0.086.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from fedsynth.data import published_folders, text
from fedsynth.data.files import Split, expanded
from fedsynth.data.images import Bytes, Floats, ImageData, IntArray
from fedsynth.data.masks import read_prostate_mri
from fedsynth.data.registry import DOWNLOADS, DatasetSpec, dataset_spec, synthetic_parameters
from fedsynth.data.shapes import make_shapes
from fedsynth.errors import DataError, DataFilesCorruptError, DataFilesMissingError, one_line
from fedsynth.files import read_regular
from fedsynth.seeding import numpy_generator

ROOT_VARIABLE = "FEDSYNTH_DATA"
# Images in the package, like the passages of `text`. digits.LICENSE.txt names authors and licence.
DIGITS = Path(__file__).with_name("digits.npz")
# The size limit for files that are recognised by their hash. The largest takes 896 MB.
MAX_PUBLISHED_BYTES = 2**30
# The training and test files of Synthetic Digits, with their SHA-256 from the Git LFS pointers in
# github.com/domainadaptation/datasets.
SYNTHETIC_DIGITS = {
    "synth_train_32x32.mat": "e0e0924ecd0c0b5a55ed6485aaa7d39937af982397717b89a3d91777aca9433c",
    "synth_test_32x32.mat": "6285fe9a1c6f27b379a47263907a37899b59ce86948fd343a5b904435cde5bcc",
}


def load_dataset(
    name: str, root: Path | None = None, *, download: bool = False
) -> tuple[ImageData, ImageData]:
    """Loads a named data set's training and test splits, on the CPU.

    Args:
        name: a name that `fedsynth.data.registry.dataset_spec` accepts. `digits` and `plays` are
            part of the package, and `shapes` and synthetic data sets are computed. None of them
            needs files.
        root: the data folder. None uses the environment variable FEDSYNTH_DATA.
        download: whether to download missing files through torchvision. Existing files are kept.

    Returns:
        The training examples and the test examples.

    Raises:
        UnknownNameError: no data set has this name.
        DataFilesMissingError: no folder is set, a file is missing, or the download failed.
        DataFilesCorruptError: a file is damaged or has unexpected content.

    >>> train, test = load_dataset("digits")
    >>> len(train), len(test), list(train.images.shape), train.spec.classes
    (1438, 359, [1438, 1, 8, 8], 10)
    """
    spec = dataset_spec(name)
    parameters = synthetic_parameters(name)
    if name == "digits":
        train, test = _read_digits()
    elif name == "shapes":
        train, test = make_shapes(spec)
    elif name == "plays":
        train, test = text.read_plays()
    elif parameters is not None:
        train, test = make_synthetic(spec, parameters)
    else:
        train, test = _read_files(spec, root or os.environ.get(ROOT_VARIABLE), download)
    return _as_data(train, spec), _as_data(test, spec)


def _read_files(spec: DatasetSpec, root: Path | str | None, download: bool) -> tuple[Split, Split]:
    """Reads a published data set's files, and downloads missing ones."""
    instructions = DOWNLOADS[spec.name].instructions
    if not root:
        raise DataFilesMissingError(
            f"no data folder is set for {spec.name}. Set data.data_root or {ROOT_VARIABLE}. "
            f"{instructions}"
        ).with_code("data.no_folder")
    folder = expanded(root)
    try:
        return READERS[spec.name](spec, folder)
    except (FileNotFoundError, NotADirectoryError) as error:
        if download:
            _download(spec.name, folder)
            return _read_files(spec, root, download=False)
        raise DataFilesMissingError(
            f"the file {one_line(error.filename)} of {spec.name} is missing. Check data.data_root. "
            f"{instructions}"
        ) from None
    except OSError as error:
        place = one_line(error.filename or folder)
        raise DataFilesCorruptError(f"{place} cannot be read: {one_line(error.strerror)}") from None


def _download(name: str, root: Path) -> None:
    """Downloads a data set through torchvision, and verifies the checksums.

    Raises:
        DataFilesMissingError: the download failed. The message gives the reason.
    """
    from torchvision import datasets

    instructions, dataset, variants = DOWNLOADS[name]
    if not dataset:
        raise DataFilesMissingError(f"torchvision cannot download {name}. {instructions}")
    try:
        for arguments in variants:
            getattr(datasets, dataset)(str(root), *arguments, download=True)
    except Exception as error:  # from the network, the disk, or an archive
        reason = one_line(error)
        raise DataFilesMissingError(f"cannot download {name} into {root}: {reason}") from None


def _as_data(split: Split, spec: DatasetSpec) -> ImageData:
    """Wraps a split's arrays as `ImageData`, without copying."""
    try:
        tensors: dict[str, Any] = {}
        for name, array in vars(split).items():
            if array is not None:
                tensors[name] = torch.from_numpy(array)
        return ImageData(spec=spec, **tensors)
    except DataError as error:
        raise DataFilesCorruptError(f"the files of {spec.name} cannot be used: {error}") from None


def _read_digits() -> tuple[Split, Split]:
    """Reads the package's handwritten digits.

    Pixel values 0 to 16 are scaled to 0 to 255. Every fifth example (index % 5 == 4) is a test
    example.
    """
    with np.load(DIGITS) as file:
        images = np.rint(file["images"] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
        labels = file["labels"].astype(np.int64)
    is_test = np.arange(len(images)) % 5 == 4
    return Split(images[~is_test], labels[~is_test]), Split(images[is_test], labels[is_test])


def _read_mnist(
    spec: DatasetSpec, root: Path, folder: str, prefixes: tuple[str, str] = ("train", "t10k")
) -> tuple[Split, Split]:
    """Reads MNIST or a data set in MNIST's file format.

    EMNIST's letters are transposed, and their labels reduced by 1, because the files store
    transposed images and labels from 1.
    """
    limit = spec.train_size + spec.test_size
    splits = []
    for prefix in prefixes:
        stem = root / folder / "raw" / prefix
        size = limit * spec.height * spec.width
        images = read_idx(Path(f"{stem}-images-idx3-ubyte"), 3, size)
        labels = read_idx(Path(f"{stem}-labels-idx1-ubyte"), 1, limit).astype(np.int64)
        if spec.name == "emnist-letters":
            images = images.transpose(0, 2, 1)
            labels = labels - 1
        splits.append(Split(images[:, None].copy(), labels))
    return splits[0], splits[1]


def read_idx(path: Path, ndim: int, max_bytes: int) -> Bytes:
    """Reads a uint8 array from an idx file.

    Args:
        path: the file.
        ndim: the required number of axes.
        max_bytes: the size limit of the array.

    Raises:
        OSError: the file cannot be read, or is too large.
        DataFilesCorruptError: the file is damaged, or the array is not uint8, does not have `ndim`
            axes, or is too large.
    """
    header = 4 + 4 * ndim
    content = read_regular(path, header + max_bytes)
    magic = bytes([0, 0, 8, ndim])  # 8: unsigned bytes
    if content[:4] != magic or len(content) < header:
        raise DataFilesCorruptError(
            f"{path} is not an idx file of bytes: the file starts with '{content[:4].hex()}', not "
            f"{magic.hex()}. Download the file again"
        ).with_code("data.header")
    shape = np.frombuffer(content[4:header], ">u4").tolist()
    size = math.prod(shape)
    if size > max_bytes or len(content) != header + size:
        raise DataFilesCorruptError(
            f"{path} contains {len(content) - header:,} bytes of data, but its header declares "
            f"{size:,}. Files must contain at most {max_bytes:,} bytes. Download the file again"
        ).with_code("data.size")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _read_cifar(spec: DatasetSpec, root: Path, label_key: str) -> tuple[Split, Split]:
    """Reads CIFAR-10 or CIFAR-100. `label_key` is the labels' key in each pickle."""
    from torchvision import datasets

    published = getattr(datasets, DOWNLOADS[spec.name].torchvision)
    splits = []
    for files in (published.train_list, published.test_list):
        rows: list[Bytes] = []
        labels: list[int] = []
        for name, md5 in files:
            content = _published_bytes(root / published.base_folder / name, md5)
            batch = pickle.loads(content, encoding="latin1")
            rows.append(batch["data"])
            labels += batch[label_key]
        images = np.concatenate(rows).reshape(-1, *spec.image_shape)
        splits.append(Split(images, np.array(labels, np.int64)))
    return splits[0], splits[1]


def _read_svhn(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads SVHN."""
    from torchvision.datasets import SVHN

    return _read_mat(root, [SVHN.split_list[split][1:] for split in ("train", "test")])


def _read_mat(root: Path, files: Iterable[Sequence[str]]) -> tuple[Split, Split]:
    """Reads the training and test files (name, hash) of SVHN or Synthetic Digits.

    Files store images X [32, 32, 3, N] and labels y [N, 1]. The label 10 is the digit 0.
    """
    from scipy.io import loadmat

    splits = []
    for name, digest in files:
        content = BytesIO(_published_bytes(root / name, digest))
        variables = loadmat(content, variable_names=("X", "y"))
        images = np.ascontiguousarray(variables["X"].transpose(3, 2, 0, 1))
        splits.append(Split(images, variables["y"].reshape(-1).astype(np.int64) % 10))
    return splits[0], splits[1]


def _read_usps(root: Path) -> tuple[Split, Split]:
    """Reads USPS: 16×16 grey images in LIBSVM's format."""
    from torchvision.datasets import USPS

    splits = []
    for split in ("train", "test"):
        _, name, md5 = USPS.split_list[split]
        _published_bytes(root / name, md5)
        data = USPS(str(root), train=split == "train")
        splits.append(Split(data.data[:, None], np.array(data.targets, np.int64)))
    return splits[0], splits[1]


def _read_digits_five(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads FedBN's Digits-Five: five data sets of digits, each of which is a domain.

    As in the public code of Li et al. (2021, Sec. 5.1; med-air/FedBN, utils/data_preprocess.py),
    published splits are merged, and a fifth of each class is drawn for testing. Training sets are
    limited to the size of USPS, 7438 images. The code draws them with scikit-learn, so its images
    differ. Images are resized to 28×28 (bilinear), and grey channels are repeated.
    """
    mnist = _read_mnist(dataset_spec("mnist"), root, "MNIST")
    for split in mnist:
        _as_data(split, dataset_spec("mnist"))  # checks the shapes; the other arrays are trusted
    readers: tuple[Callable[[], tuple[Split, Split]], ...] = (
        lambda: mnist,
        partial(_read_svhn, dataset_spec("svhn"), root),
        partial(_read_usps, root),
        partial(_read_mat, root, SYNTHETIC_DIGITS.items()),
        partial(published_folders.read_mnist_m, spec, root),
    )
    limit = spec.train_size // len(spec.domains)
    parts: tuple[list[Split], list[Split]] = ([], [])
    for domain, read in enumerate(readers):
        both = _joined(read())
        labels = both.labels
        rng = numpy_generator(SEED, "digits-five", domain)
        order = rng.permutation(len(labels))
        order = order[labels[order].argsort(kind="stable")]  # by class, at random within it
        is_test = np.arange(len(labels)) % 5 == 0
        chosen = (rng.permutation(order[~is_test])[:limit], order[is_test])
        for part, rows in zip(parts, chosen, strict=True):
            x = torch.from_numpy(np.ascontiguousarray(both.images[rows]))
            x = F.interpolate(x, (spec.height, spec.width), mode="bilinear", antialias=True)
            x = x.repeat(1, spec.channels // x.shape[1], 1, 1)
            part.append(Split(x.numpy(), labels[rows], np.full(len(rows), domain)))
    return _joined(parts[0]), _joined(parts[1])


def _joined(splits: Sequence[Split]) -> Split:
    """Concatenates the examples of all splits."""
    arrays: dict[str, Any] = {}
    for name in ("images", "labels", "domains"):
        parts = [getattr(split, name) for split in splits]
        arrays[name] = None if parts[0] is None else np.concatenate(parts)
    return Split(**arrays)


def _published_bytes(path: Path, digest: str) -> bytes:
    """Reads a file, and checks that it has the published hash.

    `digest` is the MD5 or SHA-256 in hexadecimal.

    Raises:
        OSError: the file cannot be read.
        DataFilesCorruptError: the file is not the published file of this name.
    """
    content = read_regular(path, MAX_PUBLISHED_BYTES)
    kind = "md5" if len(digest) == 32 else "sha256"
    actual = hashlib.new(kind, content, usedforsecurity=False).hexdigest()
    if actual != digest:
        raise DataFilesCorruptError(
            f"{path} is not the published file: its {kind.upper()} is {actual}, not {digest}. "
            "Download the data set again"
        ).with_code("data.hash")
    return content


# The readers of training and test splits, by data set. They raise OSError for unreadable files.
READERS: dict[str, Callable[[DatasetSpec, Path], tuple[Split, Split]]] = {
    "mnist": partial(_read_mnist, folder="MNIST"),
    "fashion-mnist": partial(_read_mnist, folder="FashionMNIST"),
    "emnist-letters": partial(
        _read_mnist, folder="EMNIST", prefixes=("emnist-letters-train", "emnist-letters-test")
    ),
    "cifar10": partial(_read_cifar, label_key="labels"),
    "cifar100": partial(_read_cifar, label_key="fine_labels"),
    "svhn": _read_svhn,
    "digits-five": _read_digits_five,
    "tiny-imagenet": published_folders.read_tiny_imagenet,
    "cinic10": published_folders.read_cinic10,
    "office-caltech-10": published_folders.read_office_caltech,
    "domainnet-10": published_folders.read_domainnet,
    "femnist": published_folders.read_femnist,
    "prostate-mri": read_prostate_mri,
    "shakespeare": text.read_shakespeare,
    "sent140": text.read_sent140,
    "sent140-glove": text.read_sent140_glove,
}


DEVICES = 30
FEATURES = 60
CLASSES = 10
SEED = 0
# √Σ_jj.
DEVIATIONS: Floats = np.arange(1, FEATURES + 1, dtype=np.float64) ** np.float64(-0.6)


def make_synthetic(
    spec: DatasetSpec, parameters: tuple[float, float] | tuple[None, None]
) -> tuple[Split, Split]:
    """Generates a synthetic data set's training and test splits, with the devices as groups.

    `parameters` are α and β, or None and None for `synthetic(iid)`.
    """
    alpha, beta = parameters
    images = []
    labels = []
    groups = []
    is_train = []
    for device, n in enumerate(device_sizes().tolist()):
        x, W, b = draw_device(alpha, beta, device, n)
        levels = np.rint(255 * (x * spec.std[0] + spec.mean[0])).clip(0, 255).astype(np.uint8)
        images.append(levels)
        rounded = (levels / 255 - spec.mean[0]) / spec.std[0]  # the inputs, in double precision
        labels.append((rounded @ W + b).argmax(axis=1))
        groups.append(np.full(n, device))
        # a device's examples are independent, so a split by order is a random split
        is_train.append(np.arange(n) < n * 9 // 10)
    pixels = np.concatenate(images).reshape(-1, *spec.image_shape)
    y = np.concatenate(labels).astype(np.int64)
    devices = np.concatenate(groups)
    train = np.concatenate(is_train)
    return (
        Split(pixels[train], y[train], groups=devices[train]),
        Split(pixels[~train], y[~train], groups=devices[~train]),
    )


def device_sizes() -> IntArray:
    """Draws the number of examples on each of 30 devices. A few devices have most examples."""
    return numpy_generator(SEED, "synthetic sizes").lognormal(4, 2, DEVICES).astype(np.int64) + 50


def draw_device(
    alpha: float | None, beta: float | None, device: int, n: int
) -> tuple[Floats, Floats, Floats]:
    """Draws one device's inputs [n, 60], weights W [60, 10] and bias b [10].

    If α or β is None, all devices have the same W and b, as in `synthetic(iid)`.
    """
    rng = numpy_generator(SEED, "synthetic device", device)
    if alpha is None or beta is None:
        shared = numpy_generator(SEED, "synthetic iid model")
        W = shared.standard_normal((FEATURES, CLASSES))
        b = shared.standard_normal(CLASSES)
        return DEVIATIONS * rng.standard_normal((n, FEATURES)), W, b
    u = alpha * rng.standard_normal()
    B = beta * rng.standard_normal()
    v = B + rng.standard_normal(FEATURES)
    W = u + rng.standard_normal((FEATURES, CLASSES))
    b = u + rng.standard_normal(CLASSES)
    return v + DEVIATIONS * rng.standard_normal((n, FEATURES)), W, b
