"""Run by each tutorial's kernel before its cells (conf.py puts it there): what a shell cell prints
is one text, as in a terminal without colours, and a command that fails ends the build."""

from __future__ import annotations

import os
import subprocess

from IPython.core.magic import register_cell_magic

for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "CLICOLOR"):  # Jupyter asks for colours and bars
    os.environ.pop(name, None)


@register_cell_magic  # type: ignore[untyped-decorator]
def bash(line: str, cell: str) -> None:
    """`%%bash -e`: IPython's own shows output in pieces of a hundred bytes."""
    done = subprocess.run(
        ["bash", *line.split(), "-c", cell],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout, end="")
    if done.returncode:
        raise RuntimeError(f"the cell ended with {done.returncode}")
