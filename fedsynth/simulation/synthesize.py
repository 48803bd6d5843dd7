"""Creates one data owner's private synthetic set.

The owner runs FedDM or FedStats with a single client and exports the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.core.method import Method
from fedsynth.errors import SettingError
from fedsynth.federation.observer import Observer
from fedsynth.federation.run_data import specification
from fedsynth.methods import DEFAULT_METHOD
from fedsynth.models.registry import usual_depth
from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.results.export import UNPROTECTED, export_run, require_new
from fedsynth.results.run_record import RunResult
from fedsynth.simulation.simulate import simulate
from fedsynth.synthesizer.condensation.sets import SyntheticSet

Preset = Mapping[str, Mapping[str, Any]]
TWO_ROUNDS: Preset = {"run": {"rounds": 2}, "model": {"width": 32}}
PRESETS: Mapping[str, Preset] = {
    "feddm": {
        **TWO_ROUNDS,
        "method": {"ipc": 10, "iterations": 20, "image_lr": 5.0, "server_epochs": 100},
    },
    "fedstats": {"run": {"rounds": 32}, "method": {"ipc": 100, "drawn_ipc": 400}},
}
"""The values that replace a method's default values when one owner creates a synthetic set.

Methods that are not listed use `TWO_ROUNDS`. FedDM's defaults of 20 rounds and 1000 iterations
would make so many releases that a useful ε leaves too little signal. FedStats creates no images by
default.
"""
ONE_OWNER: Mapping[str, Any] = {"kind": "iid", "clients": 1}


def owner_settings(values_by_section: Mapping[str, Mapping[str, Any]]) -> RunSettings:
    """Builds the settings of one owner's synthetic set, from sections as in `resolve`.

    Values that are not given come from `PRESETS`. All images belong to one client, even if the
    folder has several sites.

    Raises:
        DataError: if the set must be private, but the images have no declaration of public facts.

    >>> settings = owner_settings({"method": {"ipc": 20}, "privacy": {"epsilon": 8}})
    >>> settings.method.ipc, settings.method.iterations, settings.partition.clients
    (20, 20, 1)
    """
    sections = {name: dict(values) for name, values in values_by_section.items()}
    name = str(sections.get("run", {}).get("method", DEFAULT_METHOD)).lower()
    for section, values in PRESETS.get(name, TWO_ROUNDS).items():
        sections[section] = {**values, **sections.get(section, {})}
    sections["partition"] = {**ONE_OWNER, **sections.get("partition", {})}
    settings = resolve(sections)
    method = settings.method
    if settings.privacy is None or not method.takes_model or "depth" in sections["model"]:
        return settings
    depth = usual_depth(specification(settings).image_shape)
    return replace(settings, model=replace(settings.model, depth=depth))


def synthesize(
    settings: RunSettings,
    out: str | Path,
    *,
    runs: str | Path = "runs",
    unprotected: bool = False,
    with_model: bool = False,
    observer: Observer | None = None,
    download: bool = False,
) -> RunResult:
    """Creates one owner's synthetic set and exports it.

    Args:
        settings: the result of `owner_settings`.
        out: the folder to create, as in `export_run`. It contains only files that may be shared.
        runs: the parent folder of run folders. Do not share a run folder, because it contains
            private data.
        unprotected: whether to export the set even without differential privacy.
        with_model: whether to export the model of the run, too.
        observer: receives the progress.
        download: whether torchvision may download a named data set.

    Raises:
        FedsynthError, PrivacyError: in the same cases as `simulate` and `export_run`. Errors that
            can be detected in advance are raised before any release.

    >>> synthesize(owner_settings({}), "share")
    Traceback (most recent call last):
    fedsynth.privacy.errors.PrivacySettingError: ...
    """
    target = Path(out)
    require_new(target)
    if settings.privacy is None and not unprotected:
        reason = (
            "must be set, because images without differential privacy may reveal real ones "
            f"(to create such images nevertheless, set --{UNPROTECTED} or {UNPROTECTED}=True)"
        )
        raise PrivacySettingError("privacy", "epsilon", reason)
    _check_images(settings.method)
    result = simulate(settings, output=runs, observer=observer, download=download)
    if result.folder is not None and result.metrics:
        kind = type(settings.method)
        export_run(
            result.folder, target, unprotected=unprotected, with_model=with_model, method=kind
        )
    return result


def _check_images(method: Method) -> None:
    """Refuses a method that would create no synthetic images, before it releases anything."""
    if issubclass(method.upload, SyntheticSet) or method.produces_synthetic_data([1]):
        return
    if method.images_from:
        raise SettingError(
            "method", "ipc", f"must be set, because the images need {method.images_from}"
        )
    reason = "must be one that makes synthetic images: feddm, fedstats or fedaf"
    raise SettingError("run", "method", reason, value=method.name)
