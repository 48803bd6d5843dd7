"""Tests of reading untrusted files: special, endless, large or deeply nested ones are rejected."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsynth.privacy import files
from tests.special_files import SPECIAL_KINDS, make_special_file


@pytest.mark.parametrize("kind", SPECIAL_KINDS)
@pytest.mark.parametrize("read", [files.read_regular, files.load_json, files.load_toml])
def test_special_files_are_rejected(
    tmp_path: Path, kind: str, read: Callable[[Path], object]
) -> None:
    with pytest.raises(OSError, match=r"regular file|bytes, but at most"):
        read(make_special_file(tmp_path / "special", kind))


def test_size_limit_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * 1000)
    assert files.read_regular(path, 1000) == b"x" * 1000
    with pytest.raises(OSError, match="1,000 bytes, but at most 999 are allowed"):
        files.read_regular(path, 999)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = " + "[" * 100_000, "levels deep"),
        (".".join("a" * 100_000) + " = 1", "levels deep"),
        ("x = {" + " . ".join(['"a"'] * 100_000) + " = 1}", "levels deep"),
        ("x = " + "[" * (files.MAX_DEPTH + 1) + "]" * (files.MAX_DEPTH + 1), "levels deep"),
        ("x = 9223372036854775808", "64 bits"),
        ("x = " + "9" * 5000, "digits"),
        ("\x00", "TOML|Invalid"),
    ],
)
def test_malformed_toml_is_rejected_quickly(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    start = time.monotonic()
    with pytest.raises(ValueError, match=message):
        files.load_toml(path)
    assert time.monotonic() - start < 5
    path.write_text(f'# {"." * 100}\nmean = [{"0.5, " * 500}]\nname = "{"." * 200}"\n')
    assert len(files.load_toml(path)["mean"]) == 500  # dots that nest nothing


@pytest.mark.parametrize(("opening", "close"), ["[]", ('{"a":', "}")])
def test_json_depth_is_limited(opening: str, close: str) -> None:
    files.decode_json(opening * files.MAX_DEPTH + "0" + close * files.MAX_DEPTH)
    for depth in (files.MAX_DEPTH + 1, 900, 100_000):
        with pytest.raises(ValueError, match="levels deep"):
            files.decode_json(opening * depth + "0" + close * depth)
    assert len(files.decode_json(f"[{'[0],' * 1000}0]")) == 1001


def test_links_are_not_listed_as_plain_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("x")
    (tmp_path / "left").symlink_to("/dev/zero")
    assert files.plain_files(tmp_path, leave_out=("left",)) == ["a/b"]
    for target in (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "nothing"):
        link = tmp_path / "a" / "link"
        link.symlink_to(target)
        with pytest.raises(OSError, match="a/link is neither"):
            files.plain_files(tmp_path, leave_out=("left",))
        link.unlink()


def test_failed_write_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "full").touch()
    with pytest.raises(OSError, match=r"irectory"):
        files.write_whole(tmp_path / "there", b"x")  # a folder with files cannot be replaced
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
