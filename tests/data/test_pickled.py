"""Pickles read as data: what the standard unpickler makes of good ones, and nothing at all of
others."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fedsynth.data.array_files import MAX_INSTRUCTIONS, PickledArray, read_pickle

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7), dtype=np.uint8)
BATCH = {
    b"batch_label": b"training batch \xff of 5",
    "labels": [0, 255, 256, -1, 2**31, -(2**31), 2**62, 2**70, -(2**70)],
    "names": ["a.png", "", "é", "\n\\", "x" * 300, b"y" * 300],
    "more": (None, True, False, (), [], {}, (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
}
PROTOCOLS = range(2, 6)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_values_are_those_of_the_standard_unpickler(protocol: int) -> None:
    given = pickle.dumps(BATCH, protocol)
    assert repr(read_pickle(given)) == repr(pickle.loads(given))
    shared = ["twice"]
    again: Any = read_pickle(pickle.dumps([shared, shared], protocol))
    assert again[0] is again[1]
    itself: Any = read_pickle(b"\x80\x04]\x94h\x00a.")
    assert itself[0] is itself


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("array", [PIXELS, np.asfortranarray(PIXELS), PIXELS[::2, ::3], PIXELS[0]])
def test_arrays_keep_shape_and_bytes(protocol: int, array: npt.NDArray[np.uint8]) -> None:
    got = read_pickle(pickle.dumps(array, protocol))
    assert isinstance(got, PickledArray)
    assert got.value is not None
    assert got.value.shape == array.shape
    assert np.array_equal(got.value, array)


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("kind", ["O", "M8[s]", "u1,f4", "c16", "S3", "V4", "i1", ">f4", "?"])
def test_arrays_of_other_types_are_refused(protocol: int, kind: str) -> None:
    with pytest.raises(ValueError, match="it has an array of"):
        read_pickle(pickle.dumps(np.zeros(2, kind), protocol))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"N.x", "1 bytes after its end"),
        (b"NN.", "does not end with one value"),
        (b"(.", "does not end with one value"),
        (b"N", "exhausted before seeing STOP"),
        (b"K\x01(\x85.", "takes more values than the stack contains"),
        (b"t.", "a mark that does not exist"),
        (b"h\x00.", "reads an entry that it did not store"),
        (b"NNa.", "appends to a value that is not a list"),
        (b"})Ns.", "not a dict with names as keys"),
        (b"N" * (MAX_INSTRUCTIONS + 1), "more than 1,048,576 instructions"),
        (b"cos\nsystem\n.", r"imports os\.system, which"),
        (b"c\x1b[31m\nx\n.", r"imports \?\[31m\.x, which"),
        (b"N0.", "the instruction POP, which"),
        (b"N)R.", "calls a value that is not a function"),
        (b"NNb.", "fills a value that is not an empty array"),
        (
            b"c_codecs\nencode\nX\x01\0\0\0aX\x05\0\0\0utf-8\x86R.",
            "encodes text in a way that is not used",
        ),
    ],
)
def test_what_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_pickle(content)
