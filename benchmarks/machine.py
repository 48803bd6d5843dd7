"""Where, when and with what a result was made: the fields that every row of `benchmarks/results/` ends with."""

from __future__ import annotations

import subprocess
import sys
from datetime import date
from typing import Any

import torch


def machine() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return {
        "date": str(date.today()),
        "machine": device,
        "torch": torch.__version__,
        "commit": commit,
        "command": " ".join(sys.argv),
    }
