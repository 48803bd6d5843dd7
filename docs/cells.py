"""Defines the shell cells of the tutorials. Each tutorial's kernel runs this file first (see
conf.py).

The output of a shell cell is one text without colours. A command that fails ends the build.
"""

from __future__ import annotations

import os
import subprocess

from IPython.core.magic import register_cell_magic

for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "CLICOLOR"):  # set by Jupyter
    os.environ.pop(name, None)


@register_cell_magic  # type: ignore[untyped-decorator]
def bash(line: str, cell: str) -> None:
    """Runs a `%%bash -e` cell. IPython's own version prints the output in pieces of 100 bytes."""
    process = subprocess.run(
        ["bash", *line.split(), "-c", cell],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(process.stdout, end="")
    if process.returncode:
        raise RuntimeError(f"the cell ended with exit code {process.returncode}")
