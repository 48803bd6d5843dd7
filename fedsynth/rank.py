"""The rank of this process and the number of ranks, read from torchrun's environment variables.

A rank is one of these processes. This module imports no torch, so that the command line is fast.
"""

from __future__ import annotations

import os

from fedsynth.errors import SettingError

# The variables that torchrun sets, and with which another launcher starts ranks.
REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def num_ranks() -> int:
    """Returns the number of ranks (torchrun's world size), or 1 without torchrun.

    Variables that are not integers come from another program, and count as missing.
    """
    if not all(map(os.environ.get, REQUIRED)):
        return 1
    size, place = os.environ["WORLD_SIZE"], os.environ["RANK"]
    return int(size) if size.isdecimal() and place.isdecimal() else 1


def require_one_process(task: str) -> None:
    """Checks that the program was started without torchrun, before it charges or creates anything.

    Raises:
        SettingError: the program has several ranks.
    """
    if num_ranks() > 1:
        raise SettingError(None, "WORLD_SIZE", f"must be 1 for {task}. Start without torchrun")


def this_rank() -> int:
    """Returns the rank of this process, or 0 without torchrun. Rank 0 is the server."""
    return int(os.environ["RANK"]) if num_ranks() > 1 else 0


def is_valid() -> bool:
    """Returns False if the environment has a rank that does not exist, as an old variable has."""
    return this_rank() < num_ranks()


def local_rank() -> int:
    """Returns the rank of this process on its machine, or 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0")) if num_ranks() > 1 else 0


def speaks(code: str) -> bool:
    """Returns True if this process should print an error with the given code.

    Rank 0 prints the errors of all ranks. If rank 0 is lost, rank 1 prints that. What happens
    before the ranks are connected is printed once on each machine.
    """
    if this_rank() == 0 or not is_valid():
        return True
    if code == "ranks.server":
        return this_rank() == 1
    return not connected and local_rank() == 0


connected = False  # `fedsynth.federation.ranks` sets it
