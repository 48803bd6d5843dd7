"""The public names of `fedsynth.synthesizer`."""

from __future__ import annotations

import subprocess
import sys

import fedsynth.synthesizer as face


def test_every_public_name_is_imported_on_first_use() -> None:
    assert {getattr(face, name).__name__ for name in face.__all__} == set(dir(face))
    code = "import sys, fedsynth.synthesizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
