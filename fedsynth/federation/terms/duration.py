"""How long a run must take at the least, from its settings alone: said where it is long, refused
where nobody lives to see its end."""

from __future__ import annotations

from dataclasses import fields

from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import SettingError
from fedsynth.federation.terms.settings import RunSettings

STEP_SECONDS = 2e-5
"""Of one optimiser step of the smallest model, replayed on the fastest machine: less than a kernel
launch and its bookkeeping take anywhere."""
LONG, LONGEST = 3600.0, 365 * 24 * 3600.0
"""Seconds that are announced, and that are refused."""
_LENGTHS = ("epochs", "steps", "iterations")


def least_steps(settings: RunSettings, spec: DatasetSpec) -> dict[str, int]:
    """Optimiser steps of one client, or of the server, over all rounds, by the method's setting
    that asks for them.

    An epoch of a client is its published share of the data in the method's batches; of anything
    else it counts as one step.
    """
    found: dict[str, int] = {}
    method = settings.method
    for name in (f.name for f in fields(method)):
        value = getattr(method, name)
        if type(value) is int and name.rpartition("_")[2] in _LENGTHS:
            found[name] = settings.rounds * value
    if "local_epochs" in found:
        if found.get("local_steps"):  # which replace the epochs
            del found["local_epochs"]
        else:
            share = spec.train_size * settings.partition.subset / settings.partition.clients
            found["local_epochs"] *= max(1, int(share / max(1, getattr(method, "batch", 1))))
    return found


def long_run(settings: RunSettings, spec: DatasetSpec) -> str | None:
    """Words on how long the run takes at the least, if that is long.

    Raises:
        SettingError: it would take more than a year.
    """
    steps = least_steps(settings, spec)
    total = max(settings.rounds, sum(steps.values()))
    seconds = total * STEP_SECONDS
    if seconds <= LONG:
        return None
    key = max(steps, key=lambda name: steps[name], default="")
    section = "method" if steps.get(key, 0) > settings.rounds else "run"
    key = key if section == "method" else "rounds"
    if seconds > LONGEST:
        raise SettingError(
            section,
            key,
            f"asks, with the other settings, for {total:.3g} steps, which take "
            f"{seconds / LONGEST:,.1f} years if each takes no more than {1e6 * STEP_SECONDS:.0f} "
            "µs: no run ends like that",
        )
    return (
        f"note: {total:.3g} steps ({section}.{key}): {seconds / 3600:,.1f} hours, if each "
        f"takes no more than {1e6 * STEP_SECONDS:.0f} µs"
    )
