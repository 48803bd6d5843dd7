"""Reads images with masks, for segmentation. The files are untrusted input.

Each site has the folders SITE/images and SITE/masks, whose file names match apart from the
extension. Files are images with grey or palette masks, or NIfTI volumes. Mask values are classes,
or 0 and 255. As in the public code of HarmoFL and FedFA, each volume slice with a mask and two
neighbours is an example. The slice and its neighbours are the three channels. Without a window,
values above the volume's 99th percentile are clipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fedsynth.data.declaration import FolderSettings
from fedsynth.data.files import IMAGES, MASKS, Split, is_hidden, sites_with_masks
from fedsynth.data.images import Bytes, ImageData, from_arrays
from fedsynth.data.medical import NIFTI_EXTENSIONS, Array, Decoding, read_volume, scaled
from fedsynth.data.pixels import NO_IMAGE, decoded, is_image, opened_image, read_picture
from fedsynth.data.records import Note, note_losses
from fedsynth.data.registry import MAX_MASK_CLASSES, SEGMENTATION, DatasetSpec, custom_spec
from fedsynth.errors import DataError, DataFilesCorruptError, SettingError, one_line
from fedsynth.seeding import numpy_generator

_PLAIN = Decoding()
_SPACE_MM = 1e-2  # between the entries of a volume's affine map and those of its mask's


class Pair(NamedTuple):
    """An image or volume file together with the file of its mask."""

    image: Path
    mask: Path


class Example(NamedTuple):
    """An image [H, W] or [H, W, 3], uint8, with its mask [H, W] from the file `path`.

    `losses` describes what the decoding of the image lost.
    """

    image: Bytes
    mask: Array
    path: Path
    losses: tuple[str, ...] = ()


def pairs_of(site: Path) -> list[Pair]:
    """Lists a site's (image, mask) file pairs by name.

    Raises:
        DataFilesCorruptError: a file has no partner of the same name, or two files share a name.
    """
    images, masks = ({_stem(f): f for f in _files(site / name)} for name in (IMAGES, MASKS))
    unpaired = sorted(images.keys() ^ masks.keys())
    if unpaired or not images:
        fault = f"no image-mask pair named {one_line(unpaired[0])}" if unpaired else "no images"
        raise DataFilesCorruptError(
            f"{one_line(site)} contains {fault}. Save each image in the folder {IMAGES}, and its "
            f"mask under the same name in {MASKS}"
        ).with_code("data.mask_pairs")
    return [Pair(images[name], masks[name]) for name in sorted(images)]


def _files(folder: Path) -> list[Path]:
    files = [f for f in sorted(folder.iterdir()) if not is_hidden(f.name)]
    not_images = [f for f in files if not is_image(f)]
    if not_images:
        raise DataFilesCorruptError(
            f"{one_line(not_images[0])} is not an image. Remove it, or convert it to PNG"
        ).with_code("data.other_files")
    by_stem = {_stem(f): f for f in files}
    if len(by_stem) < len(files):
        first = next(f for f in files if by_stem[_stem(f)] != f)
        raise DataFilesCorruptError(
            f"{one_line(folder)} contains two files for one name, {one_line(first.name)} and "
            f"{one_line(by_stem[_stem(first)].name)}. Remove one of them"
        ).with_code("data.mask_pairs")
    return files


def _stem(file: Path) -> str:
    return file.name.removesuffix(".gz").rpartition(".")[0]


def examples_in(
    pair: Pair, decoding: Decoding = _PLAIN, *, check_space: bool = True
) -> Iterator[Example]:
    """Yields a file pair's examples.

    Args:
        pair: the files.
        decoding: the window of images with more than 8 bits. Its slice is not used.
        check_space: whether a volume and its mask must have the same coordinates.

    Raises:
        DataFilesCorruptError: a file cannot be read, or the sizes or the coordinates of image and
            mask differ.
    """
    if pair.image.name.lower().endswith(NIFTI_EXTENSIONS):
        yield from _slices_in(pair, decoding, check_space)
        return
    with _reading(pair.image):
        values, losses = read_picture(pair.image, decoding)
    image = values if values.dtype == np.uint8 else np.rint(255 * values).astype(np.uint8)
    with _reading(pair.mask), opened_image(pair.mask) as file:
        shape = (file.height, file.width)
        if shape in (image.shape[:2], image.shape[1::-1]):  # checked before decoding
            file = ImageOps.exif_transpose(file)
            shape = (file.height, file.width)
        _check_shape(pair.mask, (*shape, len(file.getbands())), (*image.shape[:2], 1))
        mask = np.asarray(file)
    yield Example(image, mask, pair.mask, losses)


def _slices_in(pair: Pair, decoding: Decoding, check_space: bool) -> Iterator[Example]:
    with _reading(pair.image):
        volume = read_volume(pair.image)
        values = volume.values
        highest = np.quantile(values, 0.99)
        if decoding.window is None and highest > values.min():
            values = values.clip(max=highest)
        image = (255 * scaled(values, decoding.window)).astype(np.uint8)
        affine = volume.affine
        del volume, values  # 8 bytes a voxel
    with _reading(pair.mask):
        mask = read_volume(pair.mask)
    _check_shape(pair.mask, mask.values.shape, image.shape)
    if check_space and not np.allclose(affine, mask.affine, atol=_SPACE_MM):
        raise DataFilesCorruptError(
            f"the mask {one_line(pair.mask)} does not have the coordinates (affine) of its image. "
            "Correct its header, or resample it to the image"
        ).with_code("data.mask_space")
    for i in range(1, len(image) - 1):
        if mask.values[i].any():
            yield Example(np.stack(list(image[i - 1 : i + 2]), axis=2), mask.values[i], pair.mask)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Converts errors about a file's content to a single error that names the file."""
    try:
        yield
    except (FileNotFoundError, DataFilesCorruptError):
        raise
    except Exception as error:  # a damaged file may raise anything
        reason = NO_IMAGE if isinstance(error, UnidentifiedImageError) else one_line(error)
        raise DataFilesCorruptError(
            f"{one_line(path)} cannot be read: {reason}. Repair or remove it"
        ).with_code("data.unreadable_images") from None


def _check_shape(path: Path, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise DataFilesCorruptError(
            f"the mask {one_line(path)} has the shape {list(shape)}, but must have its image's "
            f"shape and one channel, {list(expected)}. Correct the mask"
        ).with_code("data.mask_size")


def classes_in(examples: Iterable[Example]) -> int:
    """Counts the classes in masks: two if values are 0 and 255, otherwise the largest value plus
    one."""
    values: set[Any] = set()
    for example in examples:
        values.update(np.unique(example.mask).tolist())
    if values == {0, 1, 255}:
        raise DataFilesCorruptError(
            "some masks have the value 1, and some the value 255. Use 0 and 1, or 0 and 255, in "
            "all of them"
        ).with_code("data.mask_value")
    return 2 if values <= {0, 255} else max(2, int(max(values)) + 1)


def stacked(examples: Sequence[Example], spec: DatasetSpec) -> tuple[Bytes, Bytes]:
    """Resizes and stacks examples for a specification: images [N, C, H, W] and masks [N, H, W].

    Raises:
        DataFilesCorruptError: a mask value is not a class. The message names file and value.
    """
    images = [decoded(Image.fromarray(e.image), *spec.image_shape) for e in examples]
    size = spec.width, spec.height
    masks = []
    for example in examples:
        mask = Image.fromarray(_as_classes(example, spec.classes))
        masks.append(np.asarray(mask.resize(size, Image.Resampling.NEAREST)))
    return np.stack(images), np.stack(masks)


def _as_classes(example: Example, classes: int) -> Bytes:
    mask = example.mask
    if classes == 2:
        mask = np.where(mask == 255, 1, mask)
    wrong = mask[~np.isin(mask, np.arange(classes))]
    if wrong.size:
        raise DataFilesCorruptError(
            f"the mask {one_line(example.path)} contains the value {wrong.flat[0]:g}, not a class "
            f"from 0 to {classes - 1}. Correct the mask"
        ).with_code("data.mask_value")
    return mask.astype(np.uint8)


# -------------------------------------------------------------------------------------- ProstateMRI

TRAIN_SHARE, TEST_SHARE, FEWEST = 0.6, 0.2, 32


def read_prostate_mri(spec: DatasetSpec, root: Path) -> tuple[Split, Split]:
    """Reads ProstateMRI's training and test splits from the folders prostate-mri/SITE.

    A site's folder contains the folders `images` and `masks`, or the files of the release,
    CaseNN.nii.gz and CaseNN_segmentation.nii.gz. Each site's slices are permuted at random. As in
    FedFA's code, the first 60 % (at least 32) are training images, and the last 20 % test images.
    The validation images between them are not used. FedFA's code stores its permutation in a file.
    Here the permutation follows from a public seed. Slices from one patient may be in both splits.
    """
    splits: list[list[tuple[Bytes, Bytes, int]]] = [[], []]
    for number, name in enumerate(spec.domains):
        site = root / spec.name / name
        pairs = pairs_of(site) if (site / IMAGES).is_dir() else _release_pairs(site)
        # some of the release's masks have other headers than their volumes
        examples = [e for pair in pairs for e in examples_in(pair, check_space=False)]
        if not (site / IMAGES).is_dir():  # some masks distinguish two zones of the prostate
            examples = [e._replace(mask=np.minimum(e.mask, 1)) for e in examples]
        order = numpy_generator(0, "slices of ProstateMRI", number).permutation(len(examples))
        first, last = max(FEWEST, int(TRAIN_SHARE * len(order))), int(TEST_SHARE * len(order))
        for split, chosen in zip(splits, (order[:first], order[len(order) - last :]), strict=True):
            split.append((*stacked([examples[i] for i in chosen], spec), number))
    return _joined(splits[0]), _joined(splits[1])


def _release_pairs(site: Path) -> list[Pair]:
    masks = [f for f in sorted(site.iterdir()) if "_segmentation.nii" in f.name.lower()]
    return [Pair(site / f"{mask.name[: len('Case00')]}.nii.gz", mask) for mask in masks]


def _joined(sites: Sequence[tuple[Bytes, Bytes, int]]) -> Split:
    images, masks, numbers = zip(*sites, strict=True)
    domains = np.repeat(numbers, list(map(len, masks)))
    return Split(np.concatenate(images), np.concatenate(masks), domains)


# -------------------------------------------------------------------------------------- own folders


def read_masked_folder(
    settings: FolderSettings,
    folder: str,
    name: str,
    note: Note,
    spec: DatasetSpec | None = None,
) -> ImageData:
    """Reads a user's sites with images and masks. The sites become domains.

    Args:
        settings: the image size, channels and window.
        folder: the folder.
        name: the data set's name.
        note: a function that receives a line about what the decoding of images lost.
        spec: the specification, or None to derive it from the images.

    Raises:
        DataError: the images have several sizes and `image_size` is not set, or a site is missing
            from the specification, or has no examples.
        DataFilesCorruptError: a file cannot be used.
        SettingError: a setting has no effect on masks.
    """
    for key, unset in (("skip_corrupt", False), ("skip_other", False), ("slice", -1)):
        if getattr(settings, key) != unset:
            raise SettingError("data", key, "has no effect on images with masks. Remove it")
    decoding = settings.decoding()
    by_site = {}
    for site in sites_with_masks(Path(folder)):
        by_site[site.name] = [e for pair in pairs_of(site) for e in examples_in(pair, decoding)]
        if not by_site[site.name]:
            raise DataError(
                f"no slice in {one_line(site)} has a mask and two neighbours. Add a volume with "
                "one, or remove the site"
            ).with_code("data.mask_slices")
    examples = [example for site in by_site.values() for example in site]
    note_losses(Counter(loss for e in examples for loss in e.losses), folder, note)
    if spec is None:
        spec = _derived_spec(settings, examples, name, tuple(by_site))
    images, masks = stacked(examples, spec)
    sites = np.repeat(list(by_site), list(map(len, by_site.values())))
    return from_arrays(images, masks, spec, domains=sites)


def _derived_spec(
    settings: FolderSettings, examples: Sequence[Example], name: str, sites: tuple[str, ...]
) -> DatasetSpec:
    size = settings.size()
    sizes = {example.mask.shape for example in examples}
    if size is None and len(sizes) > 1:
        raise DataError(
            f"the images in {one_line(settings.folder)} have {len(sizes)} different sizes. Set a "
            "common size, such as --image-size 256x256 (data.image_size)"
        ).with_code("data.sizes")
    height, width = size or min(sizes)
    is_grey = all(example.image.ndim == 2 for example in examples)
    channels = settings.channels or (1 if is_grey else 3)
    classes = map(str, range(min(classes_in(examples), MAX_MASK_CLASSES)))
    facts = {"source": "images and masks in a folder", "train_size": len(examples)}
    shape = channels, height, width
    return custom_spec(name, shape, classes, domains=sites, task=SEGMENTATION, **facts)
