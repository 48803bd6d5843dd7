"""MATLAB's files of arrays, beside SciPy's writer and reader."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.io import loadmat, savemat

from fedsynth.data.matlab import read_arrays

RNG = np.random.default_rng(0)


def saved(variables: dict[str, Any], packed: bool) -> bytes:
    file = BytesIO()
    savemat(file, variables, do_compression=packed)
    return file.getvalue()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"])
@pytest.mark.parametrize("shape", [(3, 4, 2, 5), (1, 1), (7, 1), (2, 0), (3, 3)])
def test_arrays_are_those_of_scipy(packed: bool, kind: str, shape: tuple[int, ...]) -> None:
    array = RNG.integers(0, 127, shape).astype(kind)
    content = saved({"before": "text", "some_array": array, "after": {"a": [1, "b"]}}, packed)
    got = read_arrays(content, ["some_array"], 10_000)["some_array"]
    expected = loadmat(BytesIO(content))["some_array"]
    assert got.dtype == expected.dtype == array.dtype
    assert np.array_equal(got, expected)


def test_a_class_that_is_stored_smaller() -> None:
    # MATLAB writes whole numbers of class double as bytes; here the class in the flags is changed.
    content = saved({"y": np.array([[1], [10], [3]], np.uint8)}, False)
    at = content.index(bytes([9, 0, 0, 0, 0, 0, 0, 0]))
    as_double = content[:at] + b"\x06" + content[at + 1 :]
    got = read_arrays(as_double, ["y"], 10_000)["y"]
    assert got.dtype == np.float64
    assert got.tolist() == loadmat(BytesIO(as_double))["y"].tolist() == [[1], [10], [3]]
    with pytest.raises(ValueError, match="y is stored as another type than its own"):
        read_arrays(content[:at] + b"\x08" + content[at + 1 :], ["y"], 10_000)


def test_the_other_byte_order() -> None:
    def words(*numbers: int) -> bytes:
        return b"".join(n.to_bytes(4, "big") for n in numbers)

    data = np.arange(6, dtype=">i2").tobytes()
    body = words(6, 8, 10, 0, 5, 8, 3, 2) + bytes([0, 1, 0, 1]) + b"y\0\0\0" + words(3, 12) + data
    content = b"text".ljust(124) + b"\x01\x00MI" + words(14, len(body) + 4) + body + bytes(4)
    assert read_arrays(content, ["y"], 1000)["y"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert loadmat(BytesIO(content))["y"].tolist() == [[0, 3], [1, 4], [2, 5]]


def array(value: Any) -> npt.NDArray[Any]:
    return np.array(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (array([[1 + 0j]]), "y is of complex numbers"),
        ("text", "y is of text, not numbers"),
        ({"a": 1}, "y is of structs, not numbers"),
        (
            array(
                [[1, "a"]],
            ).astype(object),
            "y is of cells, not numbers",
        ),
    ],
)
def test_variables_that_are_no_numbers(value: Any, message: str) -> None:
    for packed in (False, True):
        with pytest.raises(ValueError, match=message):
            read_arrays(saved({"y": value}, packed), ["y"], 10_000)


def test_what_is_refused() -> None:
    content = saved({"y": np.zeros((3, 2))}, False)
    twice = content + content[128:]
    for given, names, message in (
        (b"", ["y"], "no header of MATLAB 5"),
        (content[:-1], ["y"], "truncated"),
        (content, ["X"], "does not hold X"),
        (twice, ["y"], "holds y twice"),
        (
            content.replace(bytes([3, 0, 0, 0, 2, 0, 0, 0]), bytes([3, 0, 0, 0, 3, 0, 0, 0])),
            ["y"],
            "does not fit its 48 bytes",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            read_arrays(given, names, 10_000)
    with pytest.raises(ValueError, match="unpacks to more than 50 bytes"):
        read_arrays(saved({"y": np.zeros((3, 2))}, True), ["y"], 50)
