"""Replaces a run's images by encoder vectors before the run.

An encoder is a feature map: a pretrained network from timm or torchvision, a function in a user's
file, or a built-in map. The encoder must be fixed before private data are read. Each image becomes
one vector, which depends only on the image itself. Data sets that differ in one image (or one
user's images) become data sets that differ in one vector (or one user's vectors). Every guarantee
for the vectors therefore holds for the images.

Vectors are clipped to norm 1. Their bounds, −1 and 1, are public and need no data. Non-finite
vectors become 0, because an error would reveal the image.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from io import BufferedReader
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fedsynth import rank
from fedsynth.data.files import expanded
from fedsynth.data.images import ImageData
from fedsynth.data.medical import Decoding
from fedsynth.data.pixels import EXTENSIONS, read_pixels
from fedsynth.data.registry import MEAN, STD, DatasetSpec, as_spec
from fedsynth.errors import DataError, OutputError, SettingError, one_line, writing
from fedsynth.features import pretrained, registry
from fedsynth.features.feature_map import FeatureMap, Shape
from fedsynth.features.public_statistics import normalised_map, public_vectors
from fedsynth.files import open_regular, write_whole
from fedsynth.large_arrays import new_tensor, some_rows
from fedsynth.privacy.batch_independence import ADVICE, ROWS, StepInputs, dependence_on_batch
from fedsynth.privacy.passes import MIN_LENGTH, Note, padded, values_of_each
from fedsynth.seeding import torch_generator

# The fixed encoding batch size, so that kernels do not depend on the number of records.
PASS = 64

MAX_PUBLIC_IMAGES = 2000
# The height and width of random images for testing pretrained networks.
TEST_SIDE = 64
# The largest vector norm in a cache. Vectors are clipped to norm 1, up to rounding errors.
MAX_NORM = 1 + 1e-5

CACHED = "vectors-{}.bin"
Progress = Callable[[int, int], None]


class Adder(Protocol):
    """The connections between ranks that compute vectors together."""

    rank: int
    size: int

    def add(self, integers: Tensor) -> None:
        """Replaces a tensor by its sum over all ranks."""


@dataclass(frozen=True)
class EncoderSettings:
    """The settings for the encoder that replaces a run's images by vectors.

    Args:
        encoder: the encoder whose vectors replace the images before the run: timm:NAME or
            torchvision:NAME for a pretrained network, FILE.py:NAME for your own feature map, or the
            name of a feature map.
        encoder_weights: a safetensors file, or a file saved by torch, with the encoder's weights
            (default: the library downloads them).
        public_images: a folder of public images whose mean vector is subtracted from all vectors of
            a pretrained network.
        encoder_cache: a folder for the vectors of the encoder or, without one, the run's feature
            map. Later runs on the same images reuse the vectors. Only you can read the folder.
            `fedsynth data clear-cache` empties it.

    Raises:
        SettingError, UnknownNameError: the encoder is unknown, or a setting applies only to
            pretrained networks.

    >>> EncoderSettings("timm:resnet18").is_pretrained
    True
    """

    section: ClassVar[str] = "data"

    encoder: str
    encoder_weights: str = ""
    public_images: str = ""
    encoder_cache: str = ""

    def __post_init__(self) -> None:
        for name in ("encoder_weights", "public_images", "encoder_cache"):
            path = str(getattr(self, name))
            if path:
                object.__setattr__(self, name, str(expanded(path).absolute()))
        if self.is_pretrained:
            return
        for name in ("encoder_weights", "public_images"):
            if getattr(self, name):
                reason = (
                    "requires data.encoder=timm:NAME or torchvision:NAME, got "
                    f"{self.encoder!r}. Remove data.{name}"
                )
                raise SettingError("data", name, reason)
        if self.encoder and self.encoder not in registry.feature_names():
            registry.refuse_unknown_map(self.encoder, "data", key="encoder")

    @property
    def is_pretrained(self) -> bool:
        """True if the encoder is a timm or torchvision network."""
        return pretrained.names_a_library(self.encoder)


def encoder_map(settings: EncoderSettings, images: DatasetSpec | Shape) -> FeatureMap:
    """Creates an encoder's feature map for a data set's images or for an image shape.

    A pretrained network's name is extended by the first digits of its weights' hash. Public images
    are decoded with the specification's window and slice.

    Raises:
        SettingError: the encoder cannot be used for the images, its weights are missing, or the
            weights do not match the settings.
    """
    spec = as_spec(images)
    if spec.vocabulary:
        raise _refused(
            f"needs images, but data set {spec.name} contains token sequences. Remove it"
        )
    if settings.is_pretrained:
        return _pretrained_map(settings, spec.image_shape, Decoding(spec.window, spec.slice))
    try:
        return registry.feature_map(settings.encoder, spec.image_shape)
    except SettingError as error:
        raise _refused(f"cannot be used: {error}") from None


@lru_cache(maxsize=8)
def _pretrained_map(settings: EncoderSettings, shape: Shape, decoding: Decoding) -> FeatureMap:
    """Returns a pretrained network's feature map for images of a given shape."""
    name, _, stated_hash = settings.encoder.partition("@")
    if shape[0] not in (1, 3):
        reason = f"needs images with 1 or 3 channels, got the shape {list(shape)}"
        raise _refused(reason)
    weights = settings.encoder_weights or pretrained.PRETRAINED
    with torch.inference_mode(False):  # the cached network may be used outside inference mode
        loaded = pretrained.pretrained_network(name, weights, ("data", "encoder"))
    if fault := _dependence(loaded):
        raise _refused(f"cannot be used, because the network {fault}. Choose another network")
    label = pretrained.label_of(name, loaded.sha256)
    preparation = f"{loaded.preparation}, weights with SHA-256 {loaded.sha256}"
    images = None
    if settings.public_images:
        images = public_images(Path(settings.public_images), shape, decoding)
        pixels_hash = hashlib.sha256(images.numpy().tobytes()).hexdigest()
        preparation += f", {len(images)} public images with SHA-256 {pixels_hash}"
        label += f"-{pixels_hash[:6]}"
    if stated_hash and label != settings.encoder:
        raise _refused(
            f"must be {settings.encoder}, but the weights and public images give {label}. Name the "
            "same files as before"
        )
    features = normalised_map(label, shape, loaded.embed_pixels, images)
    return replace(features, source=f"{features.source}. Preparation: {preparation}")


def _dependence(loaded: pretrained.PretrainedNetwork) -> str:
    """Tests whether the vector of an image depends on the other images in a batch.

    Small images are used if the network accepts them, because the test is slow.

    Returns:
        A description of the fault, or an empty string.
    """

    def of_images(x: Tensor, y: Tensor) -> Tensor:
        return loaded.network(x)

    side = min(TEST_SIDE, *loaded.size)
    cpu = torch.device("cpu")
    try:
        return dependence_on_batch(of_images, StepInputs((3, side, side), cpu, ROWS)).fault
    except (RuntimeError, AssertionError, ValueError):  # the network needs larger images
        return dependence_on_batch(of_images, StepInputs((3, *loaded.size), cpu, ROWS)).fault


def _refused(reason: str) -> SettingError:
    return SettingError("data", "encoder", reason)


def public_images(folder: Path, shape: Shape, decoding: Decoding) -> Tensor:
    """Reads the images in a folder and its subfolders, as uint8 [N, C, H, W].

    If there are more than 2,000 images, only the first 2,000 by path are read.

    Raises:
        DataError: the folder contains fewer than two images, or an unreadable one.
    """
    files = [file for file in sorted(folder.rglob("*")) if file.suffix.lower() in EXTENSIONS]
    if len(files) < 2:
        raise DataError(f"{one_line(folder)} contains fewer than 2 images. Add public images")
    images, faults, _ = read_pixels(files[:MAX_PUBLIC_IMAGES], *shape, decoding)
    for position, fault in faults.items():
        file = one_line(files[position])
        raise DataError(f"{file} cannot be read as an image: {fault}. Replace or remove the file")
    return torch.from_numpy(images)


def encoded_spec(spec: DatasetSpec, features: FeatureMap) -> DatasetSpec:
    """Returns the specification of an encoder's vectors for given images.

    Vector norms are about 1. Normalisation scales the values to a magnitude of about 1.

    >>> from fedsynth.data.registry import dataset_spec
    >>> encoded_spec(dataset_spec("digits"), registry.feature_map("pixels", (1, 8, 8))).image_shape
    (1, 1, 64)
    """
    width = features.dimension
    return replace(
        spec,
        channels=1,
        height=1,
        width=width,
        mean=(0.5,),
        std=(float(f"{0.5 / math.sqrt(width):.6g}"),),
        bounds=(-1.0, 1.0),
        encoder=f"{features.name}: {features.source}",
        encoded_shape=spec.image_shape,
        features=(),
    )


def image_spec(spec: DatasetSpec) -> DatasetSpec:
    """Returns the specification of an encoded data set's original images.

    The images' normalisation constants are unknown, so the constants for images in folders are
    used. For other data, the specification is returned unchanged.
    """
    shape = spec.encoded_shape
    if shape is None:
        return spec
    return replace(
        spec,
        channels=shape[0],
        height=shape[1],
        width=shape[2],
        mean=(MEAN,) * shape[0],
        std=(STD,) * shape[0],
        bounds=None,
        encoder="",
        encoded_shape=None,
    )


def encode(
    data: ImageData,
    features: FeatureMap,
    device: torch.device,
    *,
    cache: str = "",
    progress: Progress = lambda completed, total: None,
    note: Note = lambda text: None,
    links: Adder | None = None,
) -> ImageData:
    """Replaces a data set's images by feature vectors.

    Vector values are scaled from [−1, 1] to [0, 1]. Labels, domains and groups stay the same.

    Args:
        data: the images.
        features: the feature map φ. A vector is φ divided by the map's `norm_bound`, clipped to
            norm 1.
        device: the device that computes the vectors.
        cache: a folder for the vectors, or an empty string.
        progress: a function that receives the numbers of finished batches and all batches.
        note: a function that receives the reason if the map fails on an image. The vector is then
            0.
        links: the connections to the other ranks, which encode the same images, or None.

    Raises:
        OutputError: the cache folder is readable by others, or cannot be written.

    >>> from fedsynth import load_dataset
    >>> train, _ = load_dataset("digits")
    >>> map = registry.feature_map("pixels", (1, 8, 8))
    >>> vectors = encode(train.subset([0, 1]), map, torch.device("cpu"))
    >>> vectors.images.shape, vectors.spec.bounds
    (torch.Size([2, 1, 1, 64]), (-1.0, 1.0))
    """
    compute = partial(_vectors, data, features, device, progress, note, links)
    vectors = (
        compute() if not cache else cached(Path(cache), data, features, compute, MAX_NORM, links)
    )
    stored = vectors.add_(1).div_(2).clamp_(0, 1)
    return replace(
        data,
        images=stored[:, None, None].to(data.images.device),
        record_bytes=None,
        spec=encoded_spec(data.spec, features),
    )


def _vectors(
    data: ImageData,
    features: FeatureMap,
    device: torch.device,
    progress: Progress,
    note: Note,
    links: Adder | None,
) -> Tensor:
    """Computes vectors, float32 [N, d], clipped to norm 1. Non-finite vectors become 0.

    The ranks take turns to compute the batches.
    """
    vectors = new_tensor((len(data), features.dimension), torch.float32)
    with torch.no_grad():
        isolated = registry.is_own_features(features.name) and _is_moved(features, device)
        length, count = (MIN_LENGTH, 1) if isolated else (PASS, PASS)
        total = -(-len(data) // count)
        for number, images in enumerate(data.images.split(count)):
            if links is not None and number % links.size != links.rank:
                continue
            batch = padded(images.to(device), length)
            rows = values_of_each(features, (batch,), note)[: len(images)]
            first = number * count
            vectors[first : first + len(images)] = rows.cpu()
            progress(number + 1, total)
    if links is not None:
        progress(total, total)
        links.add(vectors.view(torch.int32))  # others have only zeros there, so bits are kept
    vectors /= features.norm_bound
    norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    vectors /= norms.clamp_min(1)
    return vectors.masked_fill_(~torch.isfinite(norms), 0.0)


def _is_moved(features: FeatureMap, device: torch.device) -> bool:
    """Tests on random images whether a custom map mixes the images of a batch.

    Returns True if a vector's last bits change with other images in the batch.

    Raises:
        SettingError: a vector depends on other images, on random numbers or on state.
    """

    def of_pixels(x: Tensor, y: Tensor) -> Tensor:
        return features((255 * x).round().byte())

    inputs = StepInputs(features.image_shape, device, length=PASS)
    dependence = dependence_on_batch(of_pixels, inputs)
    if dependence:
        raise _refused(f"cannot be used: the map {features.name} {dependence}. {ADVICE}")
    return dependence.moved > 0


# ------------------------------------------------------------------------------------------ cache


def cached(
    folder: Path,
    data: ImageData,
    features: FeatureMap,
    compute: Callable[[], Tensor],
    max_norm: float = math.inf,
    links: Adder | None = None,
) -> Tensor:
    """Reads a data set's vectors from a folder, or computes and stores them.

    A file is replaced if it is damaged, or contains a vector longer than `max_norm`, which is
    infinite for unscaled vectors. If one of several ranks has no file, all of them compute, and one
    on each machine writes it.

    Raises:
        OutputError: the folder is readable by others, or cannot be written.
    """
    _require_private(folder)
    path = folder / CACHED.format(_key(data, features, max_norm))
    vectors = _read_vectors(path, (len(data), features.dimension), max_norm)
    missing = torch.tensor([vectors is None], dtype=torch.int32)
    if links is not None:
        links.add(missing)
    if vectors is not None and not missing:
        return vectors
    vectors = compute()
    if rank.local_rank():
        return vectors
    with writing(path):
        write_whole(path, _content(vectors), secret=True)
    return vectors


def _content(vectors: Tensor) -> Iterator[bytes]:
    """Yields the bytes of vectors, some rows at a time, and then their SHA-256 hash."""
    digest = hashlib.sha256()
    for rows in some_rows(vectors.cpu()):
        block = rows.numpy().tobytes()
        digest.update(block)
        yield block
    yield digest.digest()


def _read_vectors(path: Path, shape: tuple[int, int], max_norm: float) -> Tensor | None:
    """Reads the vectors, float32, that `_content` has written.

    Returns None if the file is missing or damaged, or a vector is longer than `max_norm`.
    """
    digest = hashlib.sha256()
    try:
        with BufferedReader(open_regular(path)) as file:
            if path.stat().st_size != 4 * math.prod(shape) + digest.digest_size:
                return None
            vectors = new_tensor(shape, torch.float32)
            for rows in some_rows(vectors):
                block = bytearray(file.read(rows.nbytes))
                digest.update(block)
                rows.copy_(torch.frombuffer(block, dtype=torch.float32).view(rows.shape))
                if not bool((torch.linalg.vector_norm(rows, dim=1) <= max_norm).all()):
                    return None
            return vectors if file.read() == digest.digest() else None
    except (OSError, ValueError, RuntimeError):
        return None


def _key(data: ImageData, features: FeatureMap, max_norm: float) -> str:
    """Hashes the encoder, its image preparation, and all images in a data set.

    The encoder's vectors for public images stand for any weights that a user's file loads.
    """
    shape = features.image_shape
    digest = hashlib.sha256(f"{features.name}\n{features.source}\n{shape}\n{max_norm}".encode())
    images = torch.rand(2, *shape, generator=torch_generator(0, "images for a cache"))
    digest.update(public_vectors(features, shape, images).numpy().tobytes())
    for image in data.images.cpu():
        digest.update(image.numpy().tobytes())
    return digest.hexdigest()


def _require_private(folder: Path) -> None:
    """Creates a folder open only to the current user, or checks an existing folder's permissions.

    Raises:
        OutputError: other users can open the folder, or it cannot be created.
    """
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    if (
        sys.platform == "win32"
    ):  # its permissions are not in the mode: a new folder has its parent's
        return
    if state.st_mode & 0o077 or state.st_uid != os.getuid():
        raise OutputError(
            f"the cache folder {one_line(folder)} must be private, but other users can open it. "
            "Run chmod 700 on it, or choose a new folder"
        ).with_code("files.permissions")


def clear_cache(folder: str | Path) -> int:
    """Deletes the cached vectors in a folder, and returns the number of deleted files.

    Other files in the folder are not changed.

    Raises:
        OutputError: the folder does not exist, or a file cannot be deleted.

    >>> import tempfile
    >>> clear_cache(tempfile.mkdtemp())
    0
    """
    path = Path(folder)
    if not path.is_dir():
        raise OutputError(f"the cache folder {one_line(path)} does not exist. Check the path")
    files = sorted(path.glob("vectors-*"))
    with writing(path):
        for file in files:
            file.unlink()
    return len(files)
