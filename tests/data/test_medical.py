"""Tests of DICOM and NIfTI files, and of TIFF, 16-bit, palette, CMYK and transparent images."""

from __future__ import annotations

import gzip
import itertools
import math
import re
import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from pydicom import dcmread
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.pixels import apply_modality_lut, apply_windowing
from pydicom.sequence import Sequence
from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian, JPEGBaseline8Bit

from fedsynth import FolderSettings, load_records
from fedsynth.data.describe import describe_folder
from fedsynth.data.medical import Decoding, patient_of
from fedsynth.data.own_data import read_private_records
from fedsynth.data.pixels import read_headers, read_pixels
from fedsynth.data.registry import spec_from_json
from fedsynth.data.shared_set import BYTES, set_facts, shared_set
from fedsynth.errors import DataError, DataFilesCorruptError, SettingError
from fedsynth.sharing.student import real_images
from tests.raising import raises
from tests.user_files import write_declaration

Array = npt.NDArray[Any]
HOUNSFIELD = np.linspace(-1000, 1000, 64).reshape(8, 8).round()
NAME = "Marianne Musterfrau"


def write_dicom(path: Path, values: Array, patient: str = "P1", **elements: Any) -> Path:
    """Writes a DICOM file of 8 or 16 bits whose header identifies a person."""
    data = Dataset()
    data.file_meta = FileMetaDataset()
    data.file_meta.TransferSyntaxUID = elements.pop("syntax", ExplicitVRLittleEndian)
    data.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.2"
    data.file_meta.MediaStorageSOPInstanceUID = "1.2.3"
    data.PatientName, data.PatientID = NAME, patient
    data.Rows, data.Columns = values.shape[-2:] if values.shape[-1] != 3 else values.shape[:2]
    data.SamplesPerPixel = 3 if values.shape[-1] == 3 else 1
    data.PhotometricInterpretation = "RGB" if values.shape[-1] == 3 else "MONOCHROME2"
    data.PlanarConfiguration = 0
    data.BitsAllocated = data.BitsStored = 8 * values.itemsize
    data.HighBit = data.BitsStored - 1
    data.PixelRepresentation = int(values.dtype.kind == "i")
    data.PixelData = values.tobytes()
    for name, value in elements.items():
        setattr(data, name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    data.save_as(path, enforce_file_format=True)
    return path


def write_ct(path: Path, patient: str = "P1", **elements: Any) -> Path:
    """Writes a CT image in Hounsfield units, which are stored with an offset of 1024."""
    stored = (HOUNSFIELD + 1024).astype(np.uint16)
    form = {"BitsStored": 12, "HighBit": 11, "RescaleSlope": 1, "RescaleIntercept": -1024}
    return write_dicom(path, stored, patient, **{**form, **elements})


def levels(path: Path, window: tuple[float, float] | None = None, slice: int = -1) -> Array:
    """Returns the grey levels of an image in its own size."""
    (header,), _ = read_headers([path])
    images, faults, _ = read_pixels([path], 1, header.height, header.width, Decoding(window, slice))
    assert not faults, faults
    return images[0, 0].astype(int)


def windowed(values: Array, center: float, width: float) -> Array:
    return np.rint(255 * np.clip((values.astype(float) - center) / width + 0.5, 0, 1))


def fault(path: Path, slice: int = -1, window: tuple[float, float] | None = None) -> str:
    """Returns the error of a file that cannot be read, which is one line without the header."""
    _, faults, _ = read_pixels([path], 1, 8, 8, Decoding(window, slice))
    assert faults[0].isprintable()
    assert "Muster" not in faults[0]
    return faults[0]


# -------------------------------------------------------------------------------------- DICOM


def test_dicom_values_are_rescaled_and_windowed(tmp_path: Path) -> None:
    """The chosen window replaces the file's window, which replaces the range of the values."""
    plain = write_ct(tmp_path / "plain.dcm")
    lung = write_ct(tmp_path / "lung", WindowCenter=[-600, 40], WindowWidth=[1500, 400])
    assert np.array_equal(levels(plain), windowed(HOUNSFIELD, 0, 2000))
    # DICOM PS3.3 C.11.2.1.2.1
    assert np.array_equal(levels(lung), windowed(HOUNSFIELD, -600.5, 1499))
    for path in (plain, lung):
        assert np.array_equal(levels(path, (40, 400)), windowed(HOUNSFIELD, 40, 400))
    losses = read_pixels([plain, lung], 1, 8, 8, Decoding())[2]
    assert losses["images without a window, each scaled to its own range"] == 1
    assert len(read_pixels([plain, lung], 1, 8, 8, Decoding((40, 400)))[2]) == 1
    inverted = write_ct(tmp_path / "1.2.3.4", PhotometricInterpretation="MONOCHROME1")
    assert np.array_equal(levels(inverted), 255 - levels(plain))


def test_empty_elements_count_as_absent(tmp_path: Path) -> None:
    """Anonymisers and old devices write optional elements without a value."""
    path, window = tmp_path / "a.dcm", {"WindowCenter": 40, "WindowWidth": 400}
    empty, group = Sequence([Dataset()]), Dataset()
    group.PixelValueTransformationSequence = Sequence([Dataset()])
    group.PixelValueTransformationSequence[0].RescaleIntercept = None
    elements: dict[str, Any] = {"RescaleSlope": None, "PixelPaddingValue": None, "HighBit": None}
    elements |= {"ModalityLUTSequence": empty, "VOILUTSequence": empty, "VOILUTFunction": ""}
    elements["SharedFunctionalGroupsSequence"] = Sequence([group])
    for name, value in elements.items():
        write_ct(path, **window, **{name: value})
        assert np.array_equal(levels(path), windowed(HOUNSFIELD, 39.5, 399)), name
    for slope in (1, None):
        write_ct(path, RescaleSlope=slope, RescaleIntercept=None, VOILUTSequence=Sequence([]))
        assert np.array_equal(levels(path, (40, 400)), windowed(HOUNSFIELD + 1024, 40, 400))
    for name in window:
        write_ct(path, **{**window, name: None})
        assert np.array_equal(levels(path), windowed(HOUNSFIELD, 0, 2000))


def test_functions_of_windows_are_those_of_pydicom(tmp_path: Path) -> None:
    functions, windows = ("LINEAR", "LINEAR_EXACT", "SIGMOID"), ((40, 400), (7.5, 1), (-300, 1e5))
    for function, (center, width), slope in itertools.product(functions, windows, (1, -1)):
        elements = {"WindowCenter": center, "WindowWidth": width, "RescaleSlope": slope}
        path = write_ct(tmp_path / "a.dcm", VOILUTFunction=function, **elements)
        data = dcmread(path)
        values = apply_windowing(apply_modality_lut(data.pixel_array, data), data)
        assert np.array_equal(levels(path), np.rint((values + 1024) / (slope * 4095) * 255))


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e308"])
def test_numbers_that_are_not_finite_are_refused_with_and_without_window(
    number: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.dcm"
    for name in ("RescaleSlope", "RescaleIntercept"):
        write_ct(path, WindowCenter=40, WindowWidth=400, **{name: number})
        for window in (None, (40.0, 400.0)):
            assert fault(path, window=window).startswith(f"the DICOM file's {name} must be a fin")
    for name in ("WindowCenter", "WindowWidth"):
        write_ct(path, **{"WindowCenter": 40, "WindowWidth": 400, name: number})
        assert re.match(f"the DICOM file's {name} must be .*finite.*--window", fault(path))
        assert np.array_equal(levels(path, (40, 400)), windowed(HOUNSFIELD, 40, 400))
    volume = nibabel.Nifti1Image(np.full((4, 4, 4), np.nan, np.float32), np.eye(4))
    nibabel.save(volume, tmp_path / "a.nii")
    scaled = bytearray((tmp_path / "a.nii").read_bytes())
    scaled[112:116] = struct.pack("<f", math.inf)  # nibabel would use the values as they are
    (tmp_path / "b.nii").write_bytes(scaled)
    reasons = {"a": "all pixel values are NaN or infinite", "b": "the NIfTI file's scl_slope"}
    for window, (name, reason) in itertools.product((None, (40.0, 400.0)), reasons.items()):
        assert fault(tmp_path / f"{name}.nii", window=window).startswith(reason)


def test_unusable_windows_are_refused_and_can_be_replaced(tmp_path: Path) -> None:
    """The hint works: the folder without a declaration can be read with --window."""
    for name, value in (("WindowWidth", 0), ("VOILUTFunction", "CUBIC")):
        for place in ("ill/1", "well/2"):
            elements = {"WindowCenter": 0, "WindowWidth": 9, name: value}
            path = write_ct(tmp_path / f"{place}.dcm", **elements)
        assert fault(path).startswith(f"the DICOM file's {name} must be ")
        assert fault(path).endswith(". Set a window with --window CENTER,WIDTH (data.window)")
        with pytest.warns(UserWarning, match="converted"):
            loaded = load_records(tmp_path, window="40,400")
        assert np.array_equal(loaded.train.images[0, 0].numpy(), windowed(HOUNSFIELD, 40, 400))
    assert "is 0. Correct" in fault(write_ct(tmp_path / "a.dcm", RescaleSlope=0))


def test_padding_is_black_and_no_part_of_the_range(tmp_path: Path) -> None:
    image = np.linspace(-100, 123, 56).round().reshape(7, 8)
    shown = np.vstack([np.zeros((1, 8)), windowed(image, 11.5, 223)])
    padded = np.vstack([np.full((1, 8), -2000), image])
    for values, elements in (
        (padded, {"PixelPaddingValue": -2000}),
        (padded + 3000, {"PixelPaddingValue": 1000}),
        (padded + 3000, {"PixelPaddingValue": 1500, "PixelPaddingRangeLimit": 0}),
    ):
        kind = np.int16 if values.min() < 0 else np.uint16
        path = write_dicom(tmp_path / "a.dcm", values.astype(kind), **elements)
        assert np.array_equal(levels(path), shown)
        write_dicom(path, values.astype(kind), PhotometricInterpretation="MONOCHROME1", **elements)
        assert np.array_equal(levels(path), np.vstack([shown[:1], 255 - shown[1:]]))
    path = write_dicom(path, np.full((8, 8), 7, np.uint16), PixelPaddingValue=7)
    assert not levels(path).any()


def test_values_in_the_upper_bits_of_a_word_are_shifted(tmp_path: Path) -> None:
    """The other 4 bits must be unused, because some files have a wrong HighBit."""
    stored, form = (HOUNSFIELD + 1024).astype(np.uint16), {"BitsStored": 12, "HighBit": 15}
    rescale = {"RescaleSlope": 1, "RescaleIntercept": -1024}
    for values, other in ((stored << 4, rescale), (HOUNSFIELD.astype(np.int16) << 4, {})):
        path = write_dicom(tmp_path / "a.dcm", values, **form, **other)
        assert np.array_equal(levels(path, (40, 400)), windowed(HOUNSFIELD, 40, 400))
    reason = "the DICOM file's HighBit must be 11 (BitsStored minus 1), got "
    for high_bit in (15, 7):
        path = write_dicom(path, stored, BitsStored=12, HighBit=high_bit)
        assert fault(path) == f"{reason}{high_bit}"


def test_tables_are_scaled_by_the_bits_that_they_use(tmp_path: Path) -> None:
    """Tables of 8 or 12 bits may be declared as 16, and 8 bits may be in bytes or words."""
    path, indices = tmp_path / "a.dcm", np.arange(64, dtype=np.uint8).reshape(8, 8)
    assert np.array_equal(levels(write_dicom(path, indices, RescaleSlope=1)), indices)
    grey = 189 - indices.astype(int) * 3
    for declared, kind, factor in (
        (16, "<u2", 1), (8, "<u2", 1), (8, "u1", 1), (16, "<u2", 16), (12, "<u2", 16),
        (16, "<u2", 257)
    ):  # fmt: skip
        content = (np.arange(189, -1, -3).astype(kind) * factor).tobytes()
        palette: dict[str, Any] = {"PhotometricInterpretation": "PALETTE COLOR"}
        for colour in ("Red", "Green", "Blue"):
            palette[f"{colour}PaletteColorLookupTableDescriptor"] = [64, 0, declared]
            palette[f"{colour}PaletteColorLookupTableData"] = content
        assert np.array_equal(levels(write_dicom(path, indices, **palette)), grey)
        table = Dataset()
        table.LUTDescriptor = [64, 0, declared]
        table.add_new("LUTData", "OW", content)
        write_dicom(path, indices, VOILUTSequence=Sequence([table]), WindowCenter=9, WindowWidth=9)
        assert np.abs(levels(path) - grey).max() <= 1
        assert not read_pixels([path], 1, 8, 8, Decoding())[2]  # nothing is lost
    words = np.arange(192, dtype=np.uint16).reshape(8, 8, 3)  # colours of 8 bits declared as 16
    path = write_dicom(path, words, PlanarConfiguration=0, BitsStored=16)
    images, _, _ = read_pixels([path], 3, 8, 8, Decoding())
    assert np.array_equal(images[0].transpose(1, 2, 0), words)
    table.ModalityLUTType = "US"  # its values 48573 to 0 are no longer of 8 bits
    write_dicom(path, indices, ModalityLUTSequence=Sequence([table]))
    assert np.array_equal(levels(path), np.rint((63 - indices) * (255 / 63)))
    table.LUTDescriptor = [100, 0, 16]
    write_dicom(path, indices, ModalityLUTSequence=Sequence([table]))
    assert fault(path).startswith("a lookup table declares 100 entries, but contains ")


def test_dicom_colours_become_rgb(tmp_path: Path) -> None:
    rgb = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    ybr = np.asarray(Image.fromarray(rgb).convert("YCbCr"))
    files = [
        write_dicom(tmp_path / "rgb.dcm", rgb),
        write_dicom(tmp_path / "ybr.dcm", ybr, PhotometricInterpretation="YBR_FULL"),
    ]
    images, faults, _ = read_pixels(files, 3, 8, 8, Decoding())
    assert not faults
    assert np.abs(images.transpose(0, 2, 3, 1).astype(int) - rgb).max() <= 3
    segments = np.array([0, 1, 0, 1, 63, 65535], "<u2").tobytes()  # may expand to gigabytes
    form = {"PhotometricInterpretation": "PALETTE COLOR"}
    form["SegmentedRedPaletteColorLookupTableData"] = segments  # type: ignore[assignment]
    path = write_dicom(tmp_path / "segmented.dcm", np.zeros((8, 8), np.uint8), **form)
    assert fault(path) == "the colour palette is segmented. Convert it to a plain palette"


def test_middle_or_chosen_frame_is_used(tmp_path: Path) -> None:
    frames = np.repeat(np.arange(5, dtype=np.uint8), 64).reshape(5, 8, 8)
    cine = write_dicom(tmp_path / "cine.dcm", frames, NumberOfFrames=5)
    assert set(levels(cine).flat) == {2}
    assert set(levels(cine, slice=4).flat) == {4}
    assert fault(cine, 5) == "the file contains only the slices 0 to 4, not slice 5"
    groups = []
    for number in range(5):  # an enhanced file: each frame has its own rescale
        group, rescale = Dataset(), Dataset()
        rescale.RescaleSlope, rescale.RescaleIntercept = 10, number
        group.PixelValueTransformationSequence = Sequence([rescale])
        groups.append(group)
    enhanced = {"NumberOfFrames": 5, "PerFrameFunctionalGroupsSequence": Sequence(groups)}
    path = write_dicom(tmp_path / "enhanced.dcm", frames, **enhanced)
    assert set(levels(path, (127.5, 255), slice=3).flat) == {33}


def test_hostile_dicom_files_raise_one_line_errors(tmp_path: Path) -> None:
    good = write_ct(tmp_path / "good.dcm").read_bytes()
    broken = tmp_path / "broken.dcm"
    for length in (-40, 300, 140):
        broken.write_bytes(good[:length])
        assert fault(broken).startswith("the DICOM file ")
    broken.write_bytes(b"not at all")
    assert fault(broken) == "the DICOM file is damaged, or its format is not supported"
    huge = write_dicom(tmp_path / "huge.dcm", np.zeros((8, 8), np.uint8), Rows=60000, Columns=60000)
    assert "1 to 33,554,432 pixels" in fault(huge)
    bomb = write_ct(tmp_path / "bomb.dcm", syntax=DeflatedExplicitVRLittleEndian)
    assert fault(bomb).startswith("the whole DICOM file is compressed")
    jpeg = tmp_path / "big.jpg"
    Image.new("L", (900, 900)).save(jpeg)
    inner = {"syntax": JPEGBaseline8Bit, "PixelData": encapsulate([jpeg.read_bytes()])}
    other = write_dicom(tmp_path / "other.dcm", np.zeros((8, 8), np.uint8), **inner)
    assert fault(other) == "the compressed image's size does not match the header"


# ----------------------------------------------------------------------------------- patients


def test_patient_ids_group_images_and_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a hash of the ID is kept, and two spellings of an ID are one patient."""
    for name, patient in {"ill/1": "A7", "ill/2": " a7 ", "well/3": "B2"}.items():
        write_ct(tmp_path / f"{name}.dcm", patient)
    loaded = load_records(tmp_path)
    assert loaded.train.groups.tolist() in ([0, 0, 1], [1, 1, 0])
    assert "A7" not in patient_of(tmp_path / "ill/1.dcm")
    write_ct(tmp_path / "well/4.dcm", "")
    with pytest.warns(UserWarning, match="1 of 4 images in .* contain no patient ID"):
        assert load_records(tmp_path).train.groups is None
    (tmp_path / "well/4.dcm").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match=r"skipped in .*\n.*well/4.dcm"):
        assert len(load_records(tmp_path, skip_corrupt=True).train.groups.unique()) == 2
    (tmp_path / "well/4.dcm").unlink()
    for path in tmp_path.rglob("*.dcm"):
        write_ct(tmp_path / "north" / path.relative_to(tmp_path), "anonymous")
        path.unlink()
    write_ct(tmp_path / "south/ill/5.dcm", "C3")
    with pytest.warns(UserWarning, match="all 3 images in site north of .* have one patient ID"):
        assert len(load_records(tmp_path).train.groups.unique()) == 2
    monkeypatch.setitem(sys.modules, "pydicom.pixels", None)
    with raises(DataError, "data.unreadable_images"):
        load_records(tmp_path, image_size=8)


def test_private_runs_skip_dicom_files_without_patient(tmp_path: Path) -> None:
    """The selection of a file depends only on this file, and no file causes an error."""
    write_ct(tmp_path / "ill/1.dcm", "A")
    write_ct(tmp_path / "ill/2.dcm", "")
    (tmp_path / "ill/3.dcm").write_bytes(b"damaged")
    write_ct(tmp_path / "well/4.dcm", "A")
    declaration = declared_spec(tmp_path)
    notes: list[str] = []
    records = read_private_records(tmp_path, declaration, notes.append, by_user=True)
    assert (len(records), records.groups.tolist()) == (2, [0, 0])
    assert "images of no known user: 2" in notes[0]
    assert len(read_private_records(tmp_path, declaration, notes.append, by_user=False)) == 3


def test_listed_users_replace_patient_ids(tmp_path: Path) -> None:
    """Mixing both would split a person into several users. A list may name some files only."""
    for number in range(4):
        write_ct(tmp_path / ("ill", "well")[number % 2] / f"{number}.dcm", f"study {number}")
    paths = ["ill/0.dcm", "well/1.dcm", "ill/2.dcm", "well/3.dcm"]
    declaration = declared_spec(tmp_path)
    (tmp_path / "fedsynth.toml").unlink()
    users = tmp_path / "users.csv"
    users.write_text("path,user\n" + "".join(f"{path},P1\n" for path in paths))
    assert load_records(tmp_path).train.groups.tolist() == [0] * 4
    lines = [f"{path},{path.split('/')[0]}\n" for path in paths]
    (tmp_path / "manifest.csv").write_text("path,label\n" + "".join(lines))
    assert load_records(tmp_path).train.groups.tolist() == [0] * 4
    users.write_text("path,user\nill/0.dcm,P1\nwell/1.dcm,P1\n")
    records = read_private_records(tmp_path, declaration, lambda text: None, by_user=True)
    assert records.groups.tolist() == [0, 0]


def declared_spec(folder: Path) -> Any:
    write_declaration(folder, ())
    return FolderSettings(str(folder)).declared().spec


# -------------------------------------------------------------------------------------- NIfTI


def test_nifti_slice_is_upright_in_any_orientation(tmp_path: Path) -> None:
    """The rows run from front to back, and the columns from the patient's right to the left."""
    rng = np.random.default_rng(0)
    volume = rng.integers(0, 256, (6, 7, 5)).astype(np.uint8)
    ras = nibabel.Nifti1Image(volume, np.eye(4))
    middle = volume[::-1, ::-1, 2].T  # x grows towards the patient's right in RAS
    expected = np.rint((middle - middle.min()) * (255 / np.ptp(middle)))
    for name, codes in (("a.nii", "RAS"), ("b.nii.gz", "LPI"), ("c.nii", "PSR")):
        target = nibabel.orientations.axcodes2ornt(codes)
        change = nibabel.orientations.ornt_transform(nibabel.io_orientation(ras.affine), target)
        nibabel.save(ras.as_reoriented(change), tmp_path / name)
        assert np.array_equal(levels(tmp_path / name), expected)
    last = volume[::-1, ::-1, 4].T
    assert np.array_equal(levels(tmp_path / "b.nii.gz", (127.5, 255), slice=4), last)


def test_hostile_nifti_files_raise_one_line_errors(tmp_path: Path) -> None:
    """A file may declare, or decompress to, much more than it contains."""
    path = tmp_path / "a.nii.gz"
    nibabel.save(nibabel.Nifti1Image(np.zeros((6, 7, 5), np.int16), np.eye(4)), path)
    good = gzip.decompress(path.read_bytes())
    huge = bytearray(good)
    huge[42:48] = struct.pack("<3h", 30_000, 30_000, 30_000)
    cases = {
        "the volume is empty, or exceeds 1,073,741,824 bytes": gzip.compress(huge),
        "the NIfTI file ends before its declared size": gzip.compress(good[:-10]),
        "the NIfTI file is damaged, or its format is not supported": path.read_bytes()[:-20],
    }
    for message, content in cases.items():
        path.write_bytes(content)
        assert fault(path) == message
    path.write_bytes(gzip.compress(good + bytes(2**26)))  # what follows the volume is not read
    large = nibabel.Nifti1Image(np.zeros((64, 64, 8192), np.int16), np.eye(4))
    nibabel.save(large, tmp_path / "large.nii.gz")  # of the volume, one slice is kept in memory
    for file, shape in ((path, (7, 6)), (tmp_path / "large.nii.gz", (64, 64))):
        tracemalloc.start()
        assert levels(file).shape == shape
        assert tracemalloc.get_traced_memory()[1] < 2**22
        tracemalloc.stop()
    for name in ("unknown.nii", "colour.nii"):
        (tmp_path / name).write_bytes(b"x" * 600)
        assert fault(tmp_path / name) == "the NIfTI file is damaged, or its format is not supported"


# -------------------------------------------------------------------------------- other images


def test_window_scales_wide_levels_and_16_bits_are_counted(tmp_path: Path) -> None:
    """Without a window, all 65,536 levels of 16 bits count: a 12-bit image becomes dark."""
    stored = np.arange(0, 4096, 64, dtype=np.uint16).reshape(8, 8)
    files = {"a.png": np.uint16, "b.tif": np.uint16, "c.tiff": np.int32, "d.tif": np.float32}
    for name, kind in files.items():
        Image.fromarray(stored.astype(kind)).save(tmp_path / name)
        factor = 1 / 257 if kind is np.uint16 else 255 / 4032
        assert np.array_equal(levels(tmp_path / name), np.rint(stored * factor))
    paths = sorted(tmp_path.iterdir())
    images, _, losses = read_pixels(paths, 1, 8, 8, Decoding((2048, 4096)))
    assert np.array_equal(images[:, 0], [windowed(stored, 2048, 4096)] * 4)
    assert losses == {"images with more than 8 bits, reduced to 8": 4}


def test_signed_and_inverted_tiffs(tmp_path: Path) -> None:
    """Regression: negative values were black, and white was not inverted."""
    stored = np.arange(-2000, 2000, 62.5).reshape(8, 8).astype(np.int32)
    Image.fromarray(stored).save(tmp_path / "a.tif")
    expected = np.rint((stored + 2000) * (255 / (stored.max() + 2000)))
    assert np.abs(levels(tmp_path / "a.tif") - expected).max() <= 1
    positive = (stored + 2000).astype(np.uint16)
    Image.fromarray(positive).save(tmp_path / "b.tif", tiffinfo={262: 0})
    assert np.array_equal(levels(tmp_path / "b.tif"), np.rint(255 - positive / 257))


def test_tiff_pages_and_orientation_are_handled(tmp_path: Path) -> None:
    pages = [Image.new("L", (8, 6), level) for level in (70, 90)]
    pages[0].save(tmp_path / "a.tif", save_all=True, append_images=pages[1:])
    stored = np.zeros((6, 8), np.uint8)
    stored[:, :2] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # the orientation in which the left of the stored image is its top
    for name in ("b.tif", "c.png"):
        Image.fromarray(stored).save(tmp_path / name, exif=exif)
        assert np.array_equal(levels(tmp_path / name), np.rot90(stored, -1))
    assert set(levels(tmp_path / "a.tif").flat) == {70}
    _, _, losses = read_pixels([tmp_path / "a.tif"], 1, 8, 8, Decoding())
    assert losses == {"images that are the first page of several": 1}


def test_modes_of_images_become_grey_or_rgb(tmp_path: Path) -> None:
    """Transparent images are shown on white, and a grey palette is grey."""
    ink = np.array([200, 30, 60])
    half = np.rint(ink * 0.5 + 255 * 0.5)
    colour = Image.new("RGBA", (8, 8), (*ink, 128))
    colour.save(tmp_path / "alpha.png")
    Image.new("RGBA", (8, 8), (*ink, 255)).save(tmp_path / "opaque.png")
    Image.new("CMYK", (8, 8), (55, 225, 195, 0)).save(tmp_path / "cmyk.tif")
    colour.convert("RGB").quantize(4).save(tmp_path / "palette.png")
    paths = [tmp_path / name for name in ("alpha.png", "opaque.png", "cmyk.tif", "palette.png")]
    images, faults, losses = read_pixels(paths, 3, 8, 8, Decoding())
    assert not faults
    for image, expected in zip(images, (half, ink, ink, ink), strict=True):
        assert np.abs(image[:, 0, 0] - expected).max() <= 1
    assert losses == {"images with transparency, shown on white": 1}
    assert read_pixels(paths, 1, 8, 8, Decoding())[2]["colour images, converted to grey"] == 4
    Image.new("L", (8, 8), 77).quantize(4).save(tmp_path / "grey.png")
    headers, _ = read_headers([*paths, tmp_path / "grey.png"])
    assert [header.grey for header in headers] == [False] * 4 + [True]


# -------------------------------------------------------------------------------- declarations


def test_declared_window_and_slice_are_used(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The draft has the chosen window, which is also that of the receivers of a synthetic set. Other
    settings than the declared ones are refused."""
    for place in ("ill/1", "well/2"):
        write_ct(tmp_path / f"{place}.dcm", place)
    settings = FolderSettings(str(tmp_path), window="40,400", slice=0)
    notes: list[str] = []
    described = describe_folder(settings, notes.append)
    assert notes[-1].endswith(": 2 images with more than 8 bits, reduced to 8")
    assert not {"ill/1", "well/2", NAME} & set(described.toml.split('"'))
    described.path.write_text(described.toml)
    with pytest.warns(UserWarning, match="converted"):
        loaded = load_records(tmp_path)
    assert (loaded.train.spec.window, loaded.train.spec.slice) == ((40, 400), 0)
    assert np.array_equal(loaded.train.images[0, 0].numpy(), windowed(HOUNSFIELD, 40, 400))
    facts = set_facts(loaded.train.spec, BYTES)
    tensors = {"images": loaded.train.images, "labels": loaded.train.labels}
    spec = shared_set(tensors, facts).spec
    later = tmp_path_factory.mktemp("later")
    for place in ("ill/1", "well/2"):
        write_ct(later / f"{place}.dcm", WindowCenter=0, WindowWidth=9000)
    for receiver in (spec, spec_from_json(spec.to_json())):
        received = real_images(receiver, {"test_folder": str(later)})
        assert torch.equal(received.images, loaded.train.images)
    for name, value in {"window": "40,80", "slice": 3}.items():
        with pytest.raises(SettingError, match=f"^data.{name} must be unset, or .* as in"):
            load_records(tmp_path, **{name: value})
    described.path.write_text(described.toml.replace("40,400", "40,0"))
    with raises(DataFilesCorruptError, "data.damaged"):
        load_records(tmp_path)
    with pytest.raises(SettingError, match=r"data.window must be CENTER,WIDTH"):
        FolderSettings("x", window="40")
