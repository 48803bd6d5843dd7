"""Pickles read as data: what the standard unpickler makes of good ones, and nothing at all of
others."""

from __future__ import annotations

import pickle
import struct
import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fedsynth.data.pickled import MOST_INSTRUCTIONS, PickledArray, PickleRefusedError, read_pickle

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (5, 7), dtype=np.uint8)
BATCH = {
    b"batch_label": b"training batch \xff of 5",
    "labels": [0, 255, 256, -1, 2**31, -(2**31), 2**62, 2**70, -(2**70)],
    "names": ["a.png", "", "é", "\n\\", "x" * 300, b"", b"y" * 300],
    "more": (None, True, False, 0.5, (), [], {}, (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
}


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_are_those_of_the_standard_unpickler(protocol: int) -> None:
    given = pickle.dumps(BATCH if protocol else {**BATCH, "more": [None, True, [], {}]}, protocol)
    assert repr(read_pickle(given)) == repr(pickle.loads(given))
    shared = ["twice"]
    again: Any = read_pickle(pickle.dumps([shared, shared], protocol))
    assert again[0] is again[1]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "array",
    [
        PIXELS,
        np.asfortranarray(PIXELS),
        PIXELS[::2, ::3],
        PIXELS[:0],
        PIXELS[0],
        PIXELS > 128,
        PIXELS.astype(">f4"),
        PIXELS.astype(np.int64),
        np.zeros((2, 3, 4), np.float16),
    ],
)
def test_arrays_keep_type_shape_and_bytes(protocol: int, array: npt.NDArray[Any]) -> None:
    got = read_pickle(pickle.dumps(array, protocol))
    assert isinstance(got, PickledArray)
    assert str(got) == f"{array.dtype.name} {list(array.shape)}"
    order: Any = "F" if got.by_columns else "C"
    made = np.frombuffer(got.content, array.dtype).reshape(got.shape, order=order)
    assert np.array_equal(made, array)


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", None], object),
        np.zeros(2, "M8[s]"),
        np.zeros(2, "m8[s]"),
        np.zeros(2, "u1,f4"),
        np.zeros(2, complex),
        np.zeros(2, "S3"),
        np.zeros(2, "V4"),
        np.float64(1),
        np.ma.masked_array(PIXELS),
    ],
)
def test_other_arrays_are_refused(protocol: int, array: Any) -> None:
    with pytest.raises(PickleRefusedError):
        read_pickle(pickle.dumps(array, protocol))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"N.x", "1 bytes left over"),
        (b"NN.", "does not end with one value"),
        (b"(.", "does not end with one value"),
        (b"N", "exhausted before seeing STOP"),
        (b"(K\x01\x85.", "does not end"),
        (b"K\x01(\x85.", "takes more values than there are"),
        (b"t.", "a mark that is not there"),
        (b"h\x00.", "recalls what it has not stored"),
        (b"Np-1\n.", "stores a value at a place that is none"),
        (b"NNa.", "appends to what is no list"),
        (b"}(Nu.", "is no dict"),
        (b"})Ns.", "whose keys are no strings"),
        (b"\x80\x04\x95" + struct.pack("<Q", 2) + b"N.", None),
        (b"\x80\x04\x95" + struct.pack("<Q", 3) + b"N.", "a frame beyond the file's end"),
        (b"N" * (MOST_INSTRUCTIONS + 1), "more than 1,048,576 instructions"),
        (b"]" * 1001 + b".", "more than 1,000 lists, tuples and dicts"),
        (b"(" * 1001 + b".", "more than 1,000 marks"),
        (b"N" + b"\x94" * (2**17 + 1) + b".", "stores more than 131,072 values"),
        (b"cos\nsystem\n.", r"asks for os\.system, which"),
        (b"c\x1b[31m\nx\n.", r"asks for \?\[31m\.x, which"),
        (b"N0.", "the instruction POP, which"),
        (b"cnumpy\nndarray\n)R.", "calls ndarray in a way"),
        (b"c_codecs\nencode\n(Va\nVutf-8\ntR.", "calls encode in a way"),
    ],
)
def test_what_is_refused(content: bytes, message: str | None) -> None:
    if message is None:
        assert read_pickle(content) is None
        return
    with pytest.raises(ValueError, match=message):
        read_pickle(content)


def test_a_length_beyond_the_file_is_not_allocated() -> None:
    tracemalloc.start()
    for opcode in (b"\x8d", b"\x8e", b"\x96"):
        with pytest.raises(ValueError, match="expected"):
            read_pickle(b"\x80\x05" + opcode + struct.pack("<Q", 2**40) + b"abc.")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_a_list_of_itself_ends() -> None:
    itself: Any = read_pickle(b"\x80\x04]\x94h\x00a.")
    assert itself[0] is itself
