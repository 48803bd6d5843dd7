"""Decodes DICOM and NIfTI files. The files are untrusted input.

DICOM readers access only the header elements about pixels, and the patient ID if no list names
patients. The ID is hashed at once. Error messages never repeat the texts of pydicom and nibabel,
which may quote a header.

Each file is one record. One frame or slice is used. All choices depend only on the settings and the
file itself, so that no record influences another.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from fedsynth.data.files import folded_name, same_name
from fedsynth.data.registry import MAX_BOUND
from fedsynth.files import open_regular, read_regular

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
DICOM_EXTENSIONS = (".dcm", ".dicom")
NIFTI_EXTENSIONS = (".nii", ".nii.gz")
# The maximum size of a DICOM or NIfTI file.
MAX_FILE_BYTES = 2**29
# The maximum size of a decompressed NIfTI file. Volumes of 512×512×1000 16-bit values fit.
MAX_VOLUME_BYTES = 2**30

MAX_FRAME_PIXELS = 2**25
# The maximum size of an RLE-compressed frame. Damaged RLE data may expand 64 times.
MAX_RLE_BITS = 2**27

SLICES_LOST = "images that are one slice or frame of several"
BITS_LOST = "images with more than 8 bits, reduced to 8"
NO_WINDOW = "images without a window, each scaled to its own range"
SET_WINDOW = ". Set a window with --window CENTER,WIDTH (data.window)"
_DEFLATED = "1.2.840.10008.1.2.1.99"
_RLE = "1.2.840.10008.1.2.5"
_PREAMBLE_BYTES = 128
_SHARED, _PER_FRAME = "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"
_WINDOW = re.compile(r"\s*(-?[0-9]{1,9}(?:\.[0-9]+)?)\s*,\s*([0-9]{1,9}(?:\.[0-9]+)?)\s*")
# The suffix of a file without an extension. A DICOM UID as the name ends with a number.
_UID_EXTENSION = re.compile(r"(?:\.[0-9]*)?")


class UnsupportedImageError(ValueError):
    """Raised for a damaged or unsupported image file. Its message quotes no text from the
    header.
    """


@dataclass(frozen=True)
class Decoding:
    """The public settings that determine how file values become pixels.

    Attributes:
        window: the centre and width of the value range shown from black to white. None takes the
            file's window or, without one, the file's value range.
        slice: the index of the slice in a volume or the frame in a file, from 0. −1 takes the
            middle one.
    """

    window: tuple[float, float] | None = None
    slice: int = -1

    def position(self, count: int) -> int:
        """Returns the index of the chosen slice or frame, from 0 to `count` − 1.

        Raises:
            UnsupportedImageError: the chosen slice does not exist.
        """
        if self.slice < 0:
            return count // 2
        if self.slice >= count:
            raise UnsupportedImageError(
                f"the file contains only the slices 0 to {count - 1}, not slice {self.slice}"
            )
        return self.slice


def parsed_window(text: str) -> tuple[float, float] | None:
    """Parses a grey-level window CENTER,WIDTH. An empty text means no window.

    Raises:
        ValueError: the text is not a window.
    """
    if not text:
        return None
    match = _WINDOW.fullmatch(text)
    if match is None or float(match[2]) == 0:
        raise ValueError(f"must be CENTER,WIDTH, got {text!r}. Write it like 40,400")
    return float(match[1]), float(match[2])


def window_text(window: tuple[float, float] | None) -> str:
    """Formats a grey-level window as CENTER,WIDTH. `parsed_window` is the inverse."""
    return ",".join(f"{number:.15g}" for number in window or ())


class Picture(NamedTuple):
    """A decoded image.

    Attributes:
        values: a floating-point grey image [H, W] in [0, 1], or a uint8 colour image [H, W, 3].
        losses: descriptions of what the decoding lost.
    """

    values: Array
    losses: tuple[str, ...]


def is_dicom(path: Path) -> bool:
    """Detects DICOM files by name or first bytes.

    Archives store DICOM files without an extension, or name them by their UID.
    """
    suffix = path.suffix.lower()
    if suffix in DICOM_EXTENSIONS:
        return True
    if not _UID_EXTENSION.fullmatch(suffix):
        return False
    try:
        with open_regular(path) as file:
            return file.read(_PREAMBLE_BYTES + 4).endswith(b"DICM")
    except OSError:
        return False


def medical_reader(path: Path) -> Callable[[Path, Decoding], Picture] | None:
    """Returns the decoder for a DICOM or NIfTI file, or None for other files."""
    if path.name.lower().endswith(NIFTI_EXTENSIONS):
        return read_nifti
    if is_dicom(path):
        return read_dicom
    return None


def scaled(values: Array, window: tuple[float, float] | None) -> Floats:
    """Scales a window of grey levels to [0, 1], and clips other values.

    Without a window, the finite values' range is used. NaN becomes 0 (black). A range of width 0 is
    a threshold.

    Args:
        values: numbers of any type and shape.
        window: the centre and width, or None.

    Raises:
        UnsupportedImageError: no value is finite, or the values are too large.

    >>> scaled(np.array([-60.0, 40.0, 140.0, 900.0]), (40.0, 400.0)).tolist()
    [0.25, 0.5, 0.75, 1.0]
    """
    wide = values.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    low, high = finite.min(initial=np.inf), finite.max(initial=-np.inf)
    if not math.isfinite(high - low):
        if not finite.size:
            raise UnsupportedImageError("all pixel values are NaN or infinite")
        raise UnsupportedImageError("some pixel values are too large")
    if window is not None:
        low, high = window[0] - window[1] / 2, window[0] + window[1] / 2
    if low == high:
        return (wide > high).astype(np.float64)
    with np.errstate(invalid="ignore"):
        unit = (wide - low) / (high - low)
    return np.nan_to_num(unit, nan=0.0).clip(0, 1)


def _losses(*, bits: bool, slices: bool, window: bool) -> tuple[str, ...]:
    """Returns descriptions of the information that decoding loses, for warnings."""
    return tuple(compress((BITS_LOST, SLICES_LOST, NO_WINDOW), (bits, slices, window)))


@contextmanager
def _plain_errors(kind: str) -> Iterator[None]:
    """Replaces library errors, which may quote the file, by a plain error message.

    Raises:
        UnsupportedImageError: the block raised an error about the file, or the library is missing.
    """
    for library in ("pydicom", "nibabel.global"):  # their logs quote headers
        logging.getLogger(library).setLevel(logging.CRITICAL)
    try:
        yield
    except UnsupportedImageError:
        raise
    except ImportError:
        reason = f"the library for {kind} files is missing. Run pip install 'fedsynth[medical]'"
        raise UnsupportedImageError(reason) from None
    except Exception:  # its text may quote a header
        raise UnsupportedImageError(
            f"the {kind} file is damaged, or its format is not supported"
        ) from None


# -------------------------------------------------------------------------------------- DICOM


def read_dicom(path: Path, decoding: Decoding) -> Picture:
    """Decodes a DICOM file.

    The steps follow the standard: modality rescale, window, and inversion for MONOCHROME1. A window
    in `decoding` replaces the file's window. Padding becomes black. YBR and palette colours become
    RGB. Empty optional elements count as absent.

    Raises:
        UnsupportedImageError: the file is damaged, too large or unsupported.
        OSError: the file cannot be read.
    """
    content = read_regular(path, MAX_FILE_BYTES)
    with _plain_errors("DICOM"):
        from pydicom.datadict import DicomDictionary

        # group 0028 describes the pixels and identifies no person
        tags = [tag for tag in DicomDictionary if tag >> 16 == 0x0028]
        data = _dataset(io.BytesIO(content), [*tags, "PixelData", _SHARED, _PER_FRAME])
        if "PixelData" not in data:
            raise UnsupportedImageError("the DICOM file contains no integer pixels (PixelData)")
        frames = int(data.get("NumberOfFrames") or 1)
        position = decoding.position(frames)
        _check_frame(data, position, frames)
        values = _stored_values(data, position)
        _use_frame_values(data, position)
        displayed, has_window = _displayed(values, data, decoding)
        losses = _losses(bits=data.BitsStored > 8, slices=frames > 1, window=not has_window)
        return Picture(displayed, losses)


def patient_of(path: Path) -> str:
    """Hashes a DICOM file's patient ID. Returns an empty string without an ID.

    Nothing but the hash is kept. All spellings of an ID (`folded_name`) have the same hash. Two
    people with the same ID, for example at two hospitals, become one privacy unit, which protects
    both.

    Raises:
        UnsupportedImageError: the file is damaged.
        OSError: the file cannot be read.
    """
    with open_regular(path, max_bytes=MAX_FILE_BYTES) as file, _plain_errors("DICOM"):
        data = _dataset(io.BufferedReader(file), ["PatientID"], header_only=True)
        patient = folded_name(same_name(str(data.get("PatientID") or "")))
    return patient and hashlib.blake2b(patient.encode(), digest_size=16).hexdigest()


def _dataset(file: BinaryIO, tags: list[Any], *, header_only: bool = False) -> Any:
    """Reads a DICOM file's elements with the given tags."""
    from pydicom import dcmread
    from pydicom.filereader import read_dataset, read_preamble

    read_preamble(file, False)
    meta = read_dataset(file, False, True, stop_when=lambda tag, *_: tag >> 16 != 2)
    if meta.get("TransferSyntaxUID") == _DEFLATED:  # pydicom inflates without a limit
        raise UnsupportedImageError("the whole DICOM file is compressed (deflated). Decompress it")
    file.seek(0)
    return dcmread(file, specific_tags=tags, stop_before_pixels=header_only)


def _check_frame(data: Any, position: int, frames: int) -> None:
    """Checks the declared size of a frame before the frame is decoded.

    Raises:
        UnsupportedImageError: the frame is too large, has a compression that cannot be decoded, or
            contains a compressed image of another size.
    """
    from pydicom.encaps import get_frame
    from pydicom.pixels import get_decoder

    pixels = data.Rows * data.Columns
    if not 0 < pixels <= MAX_FRAME_PIXELS:
        raise UnsupportedImageError(
            f"the frame must have 1 to {MAX_FRAME_PIXELS:,} pixels, got {pixels:,}"
        )
    if data.SamplesPerPixel not in (1, 3):
        raise UnsupportedImageError("the frame must have 1 or 3 samples per pixel")
    syntax = data.file_meta.TransferSyntaxUID
    if not syntax.is_compressed:
        return
    too_large = syntax == _RLE and pixels * data.SamplesPerPixel * data.BitsAllocated > MAX_RLE_BITS
    if too_large or not get_decoder(syntax).is_available:
        raise UnsupportedImageError(
            f"the compression {syntax.name} is not supported. Decompress the file, or install "
            "pylibjpeg with its plugins"
        )
    frame = get_frame(data.PixelData, position, number_of_frames=frames)
    with suppress(UnidentifiedImageError):
        image = Image.open(io.BytesIO(frame), formats=("JPEG", "JPEG2000"))
        if image.size != (data.Columns, data.Rows):
            raise UnsupportedImageError("the compressed image's size does not match the header")


def _stored_values(data: Any, position: int) -> Array:
    """Decodes a frame's pixel values.

    Old files may store the values in the upper bits. The values are then shifted down.
    """
    from pydicom.pixels import pixel_array

    bits, high_bit = data.BitsStored, _number(data, "HighBit")
    shift = 0 if high_bit is None else int(high_bit) + 1 - bits
    data.BitsStored = max(bits, bits + shift)
    stored: Array = pixel_array(data, index=position)
    data.BitsStored = bits
    if shift < 0 or (stored % 2**shift).any():
        rule = f"must be {bits - 1} (BitsStored minus 1), got {high_bit:g}"
        raise UnsupportedImageError(f"the DICOM file's HighBit {rule}")
    return stored >> shift


def _use_frame_values(data: Any, position: int) -> None:
    """Copies a frame's rescale and window elements to the header's top level.

    Enhanced multi-frame files store both in a group, shared or per frame.
    """
    shared, per_frame = data.get(_SHARED) or [], data.get(_PER_FRAME) or []
    for group in (*shared, *per_frame[position : position + 1]):
        for name in ("PixelValueTransformationSequence", "FrameVOILUTSequence"):
            for item in group.get(name) or []:
                data.update({element.tag: element for element in item if not element.is_empty})


def _number(data: Any, name: str) -> float | None:
    """Returns an element's first number, or None if the element is absent or empty."""
    first = next(iter(np.atleast_1d(data.get(name))), None)
    if first is None or not str(first).strip():
        return None
    number = float(first)
    if not abs(number) <= MAX_BOUND:
        hint = SET_WINDOW if name.startswith("Window") else ""
        rule = f"must be a finite number within ±{MAX_BOUND:g}, got {number:g}"
        raise UnsupportedImageError(f"the DICOM file's {name} {rule}{hint}")
    return number


def _displayed(values: Array, data: Any, decoding: Decoding) -> tuple[Array, bool]:
    """Converts stored values to floating-point grey in [0, 1] or 8-bit colour.

    Also returns whether a window was applied, which is False for grey images without a known
    window.
    """
    if data.PhotometricInterpretation == "PALETTE COLOR":
        if "SegmentedRedPaletteColorLookupTableData" in data:  # expands without a limit
            raise UnsupportedImageError(
                "the colour palette is segmented. Convert it to a plain palette"
            )
        names = [f"{colour}PaletteColorLookupTable" for colour in ("Red", "Green", "Blue")]
        tables = [_table(data[f"{n}Descriptor"].value, data[f"{n}Data"].value, data) for n in names]
        surplus = max(table.bits for table in tables) - 8
        colours = np.stack([_looked_up(values, table) for table in tables], axis=2)
        return (colours >> surplus).astype(np.uint8), True
    if values.ndim == 3:
        surplus = data.BitsStored - 8 if values.max() > 255 else 0  # some files declare too many
        return (values >> max(0, surplus)).astype(np.uint8), True
    padding = _padding(values, data)
    unpadded = values[~padding]
    values = np.where(padding, unpadded.min(initial=values.max()), values)
    unit, has_window = _in_file_window(values, data, decoding)
    if data.PhotometricInterpretation == "MONOCHROME1":
        unit = 1 - unit
    return np.where(padding, 0.0, unit), has_window


def _padding(values: Array, data: Any) -> npt.NDArray[np.bool_]:
    """Returns a Boolean array that is True for padding pixels."""
    limits = [_number(data, f"PixelPadding{name}") for name in ("Value", "RangeLimit")]
    first, last = limits[0], limits[0] if limits[1] is None else limits[1]
    if first is None or last is None:
        return np.zeros(values.shape, np.bool_)
    # Some files store a negative value as an unsigned one.
    offset = 2 ** (data.BitsAllocated - 1) if data.PixelRepresentation else 0
    low, high = sorted((int(limit) + offset) % 2**data.BitsAllocated for limit in (first, last))
    shifted = values.astype(np.int64) + offset
    return (low <= shifted) & (shifted <= high)


class _Table(NamedTuple):
    """A lookup table: the smallest value that it maps, its entries, and their number of bits."""

    first: int
    entries: Array
    bits: int


def _table(descriptor: Any, content: Any, data: Any) -> _Table:
    count, first, bits = descriptor
    count = count % 2**16 or 2**16
    order = "<" if data.file_meta.TransferSyntaxUID.is_little_endian else ">"
    if not isinstance(content, bytes):
        content = np.asarray(content, f"{order}u2").tobytes()
    if len(content) >= 2 * count:
        entries = np.frombuffer(content, f"{order}u2", count)
        used = max(8, int(entries.max()).bit_length())
        # some files declare too few bits, or 16 for entries of 8 or 12
        return _Table(first, entries, bits if 8 < used <= bits < 16 else used)
    if len(content) - count not in (0, 1):  # bytes may be padded to an even number
        reason = f"a lookup table declares {count} entries, but contains {len(content)} bytes"
        raise UnsupportedImageError(reason)
    return _Table(first, np.frombuffer(content, np.uint8, count), 8)


def _looked_up(values: Array, table: _Table) -> Array:
    """Looks up each value. Values outside the table get its first or last entry."""
    positions = (values.astype(np.int64) - table.first).clip(0, len(table.entries) - 1)
    looked_up: Array = table.entries[positions]
    return looked_up


def _table_in(data: Any, name: str) -> _Table | None:
    """Returns the first lookup table in a sequence, or None."""
    for item in data.get(name) or []:
        if item.get("LUTDescriptor") and item.get("LUTData"):
            return _table(item.LUTDescriptor, item.LUTData, data)
    return None


def _rescaled(values: Array, data: Any) -> Array:
    """Applies the file's modality lookup table, or its slope and intercept, if there are any."""
    table = _table_in(data, "ModalityLUTSequence")
    if table is not None:
        return _looked_up(values, table)
    slope, intercept = _number(data, "RescaleSlope"), _number(data, "RescaleIntercept")
    if slope == 0:
        raise UnsupportedImageError("the DICOM file's RescaleSlope is 0. Correct the header")
    if slope in (None, 1) and not intercept:
        return values
    return values * (slope or 1.0) + (intercept or 0.0)


def _in_file_window(stored: Array, data: Any, decoding: Decoding) -> tuple[Floats, bool]:
    """Applies the user's window. If there is none, applies the first window or table in the file.

    Without any, 8-bit files keep their values, and other files' ranges are scaled. Also returns
    whether the values' scale is known, which is False for the scaled ranges.
    """
    values = _rescaled(stored, data)
    if decoding.window is not None:
        return scaled(values, decoding.window), True
    table = _table_in(data, "VOILUTSequence")
    if table is not None:
        highest = 2**table.bits - 1
        return scaled(_looked_up(np.rint(values), table), (highest / 2, highest)), True
    center, width = _number(data, "WindowCenter"), _number(data, "WindowWidth")
    if center is not None and width is not None:
        return _windowed(values, center, width, str(data.get("VOILUTFunction") or "")), True
    if data.BitsStored == 8 and values is stored and not data.PixelRepresentation:
        return scaled(values, (127.5, 255.0)), True
    return scaled(values, None), False


def _windowed(values: Array, center: float, width: float, function: str) -> Floats:
    """Applies a file's window to values (DICOM PS3.3 C.11.2.1.2 and C.11.2.1.3)."""
    function = function.strip().upper() or "LINEAR"
    if function not in ("LINEAR", "LINEAR_EXACT", "SIGMOID"):
        rule = "must be LINEAR, LINEAR_EXACT or SIGMOID"
        raise UnsupportedImageError(f"the DICOM file's VOILUTFunction {rule}{SET_WINDOW}")
    if function == "LINEAR":
        center, width = center - 0.5, width - 1
    if width < 0 or (width == 0 and function != "LINEAR"):
        rule = "must be at least 1" if function == "LINEAR" else "must be positive"
        raise UnsupportedImageError(f"the DICOM file's WindowWidth {rule}{SET_WINDOW}")
    if function == "SIGMOID":
        with np.errstate(over="ignore"):
            return scaled(1 / (1 + np.exp(-4 * (values - center) / width)), (0.5, 1.0))
    return scaled(values, (center, width))


# -------------------------------------------------------------------------------------- NIfTI


def read_nifti(path: Path, decoding: Decoding) -> Picture:
    """Decodes an axial slice of a NIfTI file.

    Rows run from front to back, and columns from the patient's right to left, as in DICOM files.
    The first of several volumes is used. Without a window, the slice's value range is shown.

    Raises:
        UnsupportedImageError: the file is damaged, too large or unsupported.
        OSError: the file cannot be read.
    """
    file = _opened_nifti(path)
    with _plain_errors("NIfTI"):
        import nibabel

        image = nibabel.Nifti1Image.from_stream(file)
        volumes = image.dataobj.reshape((*image.shape, 1, 1)[: max(3, image.ndim)])
        orientation = nibabel.io_orientation(image.affine)
        axis = orientation[:, 0].tolist().index(2)
        position = decoding.position(volumes.shape[axis])
        if orientation[axis, 1] < 0:
            position = volumes.shape[axis] - 1 - position
        index: list[Any] = [slice(None)] * 3 + [0] * (volumes.ndim - 3)
        index[axis] = position
        pixels = math.prod(volumes.shape[:3]) // volumes.shape[axis]
        if image.get_data_dtype().kind not in "iuf":
            raise UnsupportedImageError("the NIfTI file is not grey. Convert it to one channel")
        if pixels > MAX_FRAME_PIXELS:
            raise UnsupportedImageError(
                f"the NIfTI slice has {pixels:,} pixels, above the limit of {MAX_FRAME_PIXELS:,}"
            )
        plane = np.asarray(volumes[tuple(index)])  # reads only this slice of the file
        upright = nibabel.apply_orientation(plane, np.delete(orientation, axis, 0))[::-1, ::-1].T
        losses = _losses(
            bits=image.get_data_dtype() != np.uint8,
            slices=math.prod(volumes.shape) > pixels,
            window=decoding.window is None,
        )
        return Picture(scaled(upright, decoding.window), losses)


class Volume(NamedTuple):
    """The axial slices of a NIfTI file.

    Attributes:
        values: the grey levels [D, H, W].
        affine: the map [4, 4] from voxels to the scanner's coordinates, in mm.
    """

    values: Floats
    affine: Floats


def read_volume(path: Path) -> Volume:
    """Decodes all axial slices of a NIfTI file, in the orientation of `read_nifti`.

    Raises:
        UnsupportedImageError: the file is damaged, too large, or not a grey volume.
        OSError: the file cannot be read.
    """
    file = _opened_nifti(path)
    with _plain_errors("NIfTI"):
        import nibabel

        image = nibabel.as_closest_canonical(nibabel.Nifti1Image.from_stream(file))
        if image.ndim != 3 or image.get_data_dtype().kind not in "iuf":
            raise UnsupportedImageError("the NIfTI file is not a single grey volume. Split it")
        volume = np.asarray(image.dataobj, np.float64)
        if not np.isfinite(volume).all():
            raise UnsupportedImageError("the volume contains NaN or infinite values")
        return Volume(np.ascontiguousarray(volume[::-1, ::-1].transpose(2, 1, 0)), image.affine)


def _opened_nifti(path: Path) -> BinaryIO:
    """Opens a NIfTI file and decompresses it lazily.

    Raises:
        UnsupportedImageError: the file is damaged, or its declared volume is too large.
        OSError: the file cannot be read.
    """
    file: Any = io.BytesIO(read_regular(path, MAX_FILE_BYTES))
    if path.name.lower().endswith(".gz"):
        file = gzip.GzipFile(fileobj=file)
    with _plain_errors("NIfTI"):
        from nibabel import Nifti1Header

        header = Nifti1Header(file.read(Nifti1Header.sizeof_hdr))
        if math.isinf(header["scl_slope"]):  # which nibabel ignores
            raise UnsupportedImageError("the NIfTI file's scl_slope is infinite")
        size = math.prod(map(int, header.get_data_shape())) * header.get_data_dtype().itemsize
        size += int(header["vox_offset"])
        if not 0 < size <= MAX_VOLUME_BYTES:
            raise UnsupportedImageError(
                f"the volume is empty, or exceeds {MAX_VOLUME_BYTES:,} bytes"
            )
        file.seek(size - 1)
        if not file.read(1):
            raise UnsupportedImageError("the NIfTI file ends before its declared size")
        file.seek(0)
        return cast(BinaryIO, file)
