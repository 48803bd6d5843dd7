"""Files and folders that options name: no pipe is waited for, no device read, and a name that none
can have is one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.mutations import CommandFailedError, at_most, command
from tests.special import special_file

NOBODY = "~nobody-of-that-name/x"
PATHS = [
    ("train", "--config={}"),
    ("train", "--output={}"),
    ("train", "--model={}:Net"),
    ("sweep", "{}"),
    ("student", "{}"),
    ("deploy", "init", "A", "--spec={}"),
    ("train", "--data-root={}", "--dataset=mnist"),
    ("train", "--dp-sigma=3", "--dp-ledger={}"),
    ("train", "--dp-ledger={}"),
    ("train", "--dp-sigma=3", "--sign-key={}"),
    ("partition", "--picture={}"),
    ("partition", "--data-root={}", "--dataset=mnist"),
    ("runs", "{}"),
    ("distill", "--models={}"),
    ("distill", "--models=x", "--output={}"),
    ("privacy", "report", "{}"),
    ("privacy", "report", "x", "--output={}"),
    ("privacy", "verify", "{}"),
    ("privacy", "verify", "x", "--ledger={}"),
    ("privacy", "verify", "x", "--public-key={}"),
    ("privacy", "sign", "{}", "--key=x"),
    ("privacy", "sign", "x", "--key={}"),
    ("privacy", "repair", "{}"),
    ("privacy", "carry-over", "{}", "north"),
    ("privacy", "plan", "--sigma=3", "--plot={}"),
    ("privacy", "audit", "--run={}"),
]
READ = [
    args
    for args in PATHS
    if not any(out in " ".join(args) for out in ("output", "picture", "plot", "data-root"))
]


def refused(tmp_path: Path, args: tuple[str, ...], name: str) -> str:
    with at_most(20), pytest.raises(CommandFailedError) as caught:
        command(*(arg.format(name) for arg in args))
    return str(caught.value)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("args", PATHS, ids=" ".join)
def test_the_home_of_nobody(tmp_path: Path, args: tuple[str, ...]) -> None:
    text = refused(tmp_path, args, NOBODY)
    assert "home" in text
    assert list(tmp_path.iterdir()) == []  # no folder of that name


@pytest.mark.parametrize("args", PATHS, ids=" ".join)
def test_a_name_too_long_for_any_file(tmp_path: Path, args: tuple[str, ...]) -> None:
    refused(tmp_path, args, "x" * 5000)


@pytest.mark.parametrize("args", READ, ids=" ".join)
@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_special_files_are_refused(tmp_path: Path, args: tuple[str, ...], kind: str) -> None:
    refused(tmp_path, args, str(special_file(tmp_path / "x.py", kind)))


def test_a_name_that_is_no_utf8(train: Callable[..., Any], tmp_path: Path) -> None:
    """config.toml is UTF-8, and would have to say it."""
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    done = train("fedavg", "--dp-sigma", "3", "--dp-ledger", name)
    assert done.code == 2
    assert "UTF-8" in done.stderr
    assert not done.output.exists()


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--output=~/runs` reaches the command as it stands: shells leave it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    command("partition", "--clients=2", "--picture=~/who.png")
    assert (tmp_path / "home" / "who.png").exists()
