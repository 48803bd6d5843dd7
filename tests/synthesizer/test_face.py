"""The public names of `fedsynth.synthesizer`."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fedsynth.synthesizer as face


def test_every_name_is_there_and_where_its_home_is() -> None:
    assert set(face.__all__) == set(face._HOMES)
    for name in face.__all__:
        found = getattr(face, name)
        assert found.__name__ == name
        assert found.__module__ == f"fedsynth.synthesizer.{face._HOMES[name]}"
    assert dir(face) == sorted(face.__all__)


def test_another_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = face.nothing


def test_the_face_alone_imports_no_torch() -> None:
    code = "import sys, fedsynth.synthesizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
