"""One data owner's private synthetic set: FedDM with a single client, and what may leave the house
of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsynth.errors import Setting, SettingError
from fedsynth.federation.observer import Observer
from fedsynth.federation.outputs.export import UNPROTECTED, export_run, require_new
from fedsynth.federation.outputs.result import RunResult
from fedsynth.federation.simulation import simulate
from fedsynth.federation.terms.own_data import specification
from fedsynth.federation.terms.resolve import resolve
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.synthesizer.condensation.sets import SyntheticSet

PRESET: Mapping[str, Mapping[str, Any]] = {
    "run": {"rounds": 2},
    "method": {"ipc": 10, "iterations": 20, "image_lr": 5.0, "server_epochs": 100},
    "model": {"width": 32},
}
"""What differs from FedDM's defaults, whose 20 × 1000 releases leave nothing at any ε that one
would state."""
ONE_OWNER: Mapping[str, Any] = {"kind": "iid", "clients": 1}
SMALL = 16
"""Images with a side below it get a ConvNet of two blocks."""


def owner_settings(given: Mapping[str, Mapping[str, Any]]) -> RunSettings:
    """The settings of one owner's synthetic set, from sections as `resolve` takes them.

    Where nothing else is given they are `PRESET`'s; all images are those of one client, whatever
    sites the folder has.

    Raises:
        DataError: the set is to be private, and nobody has declared what is public of the images.

    >>> settings = owner_settings({"method": {"ipc": 20}, "privacy": {"epsilon": 8}})
    >>> settings.method.ipc, settings.method.iterations, settings.partition.clients
    (20, 20, 1)
    """
    sections = {name: dict(values) for name, values in given.items()}
    own = str(sections.get("run", {}).get("method", "feddm")).lower() == "feddm"
    for section, values in PRESET.items():
        if section != "method" or own:
            sections[section] = {**values, **sections.get(section, {})}
    sections["partition"] = {**ONE_OWNER, **sections.get("partition", {})}
    settings = resolve(sections)
    if settings.privacy is None or "depth" in sections["model"]:
        return settings
    spec = specification(settings)
    if min(spec.height, spec.width) >= SMALL:
        return settings
    return replace(settings, model=replace(settings.model, depth=2))


def synthesize(
    settings: RunSettings,
    out: str | Path,
    *,
    runs: str | Path = "runs",
    unprotected: bool = False,
    observer: Observer | None = None,
    download: bool = False,
) -> RunResult:
    """Makes one owner's synthetic set, and a folder of what may leave the house of it.

    Args:
        settings: `owner_settings`'.
        out: the folder to be made (`export_run`).
        runs: where the run folder goes, which stays in the house: what is private of the run is in
            it.
        unprotected: also without differential privacy.
        observer: told of progress.
        download: let torchvision fetch a named data set.

    Raises:
        FedsynthError, PrivacyError: as `simulate` and `export_run`; what can be known beforehand is
            said before anything is released.

    >>> synthesize(owner_settings({}), "share")
    Traceback (most recent call last):
    fedsynth.privacy.errors.PrivacySettingError: ...
    """
    target = Path(out)
    require_new(target)
    if settings.privacy is None and not unprotected:
        raise PrivacySettingError(
            "privacy",
            "epsilon",
            "must be given: without it the images may show real ones, and nothing is guaranteed to "
            "anybody (",
            Setting(None, UNPROTECTED, "True"),
            " makes them all the same)",
        )
    if not issubclass(settings.method.upload, SyntheticSet):
        raise SettingError(
            "run",
            "method",
            "must be one whose clients send synthetic images: feddm or fedaf",
            value=settings.method.name,
        )
    result = simulate(settings, output=runs, observer=observer, download=download)
    if result.folder is not None and result.metrics:
        export_run(result.folder, target, unprotected=unprotected, method=type(settings.method))
    return result
