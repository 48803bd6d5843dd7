"""The page of error messages is current, and each message states a remedy or has a shared one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"
MOST_SHARED = 316  # messages without their own remedy: may only decrease


@pytest.fixture(scope="module")
def errors() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        yield importlib.import_module("errors_page")


def test_page_is_current_and_each_message_has_a_remedy(errors: ModuleType) -> None:
    messages = errors.Sources().messages()
    plain = [message for message in messages if not errors.divided(message)[1]]
    patterns = [errors.shared_remedy(message) for message in plain]
    without = [m for m, pattern in zip(plain, patterns, strict=True) if pattern is None]
    assert not without, "add a sentence that begins with a verb of `VERBS`"
    assert set(patterns) == set(errors.SHARED), "a shared remedy is unused"
    assert len(plain) <= MOST_SHARED, "a new message has no remedy of its own"
    assert all(errors.IMPERATIVE.match(remedy) for remedy in errors.SHARED.values())
    text = errors.page(messages)
    assert errors.PAGE.read_text("utf-8") == text, "run `python docs/errors_page.py`"


def test_messages_are_followed_through_names_loops_and_helpers(
    errors: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fedsynth").mkdir()
    (tmp_path / "fedsynth" / "a.py").write_text(
        """
class SettingError(FedsynthError, code="setting"): ...
class FileError(FedsynthError, code="files.a"): ...
WORD = "small"
def f(path, n):
    reason = f"is too {WORD}, got {n}"
    if n < 0:
        reason = f"is negative: {short_repr(n)}"
    for key in ("a", "b"):
        raise SettingError("run", key, reason)
    raise helper(f"{path.name} is lost")
def helper(text):
    return FileError(text + ". Find it").with_code("files.b")
"""
    )
    monkeypatch.setattr(errors, "ROOT", tmp_path)
    found = [(m.code, m.text) for m in errors.Sources(("fedsynth",)).messages()]
    assert found == [
        ("files.b", "{name} is lost. Find it"),
        ("run.a", "run.a is negative: {n}"),
        ("run.a", "run.a is too small, got {n}"),
        ("run.b", "run.b is negative: {n}"),
        ("run.b", "run.b is too small, got {n}"),
    ]
    lost, negative, *_ = (errors.Message(*item) for item in found)
    assert errors.divided(lost) == ("{name} is lost. Find it", "")  # no known verb
    assert errors.shared_remedy(errors.Message("new.code", "it is lost")) is None
    assert errors.divided(negative) == ("run.a is negative: {n}", "")
