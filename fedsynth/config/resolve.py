"""Resolves a run's settings: the user's values over the data set's preset over the method's
defaults (the papers' values), all validated; and hashes those that determine a result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fedsynth.config.report_settings import ReportSettings
from fedsynth.config.settings import RUN_KINDS, SECTIONS, RunSettings, kept_ledger
from fedsynth.core.method import Method
from fedsynth.data.files import expanded
from fedsynth.data.folder_settings import FolderSettings, default_name
from fedsynth.data.partition_settings import GIVEN, PartitionSettings
from fedsynth.data.registry import DEFAULT_DATASET, dataset_spec, is_known
from fedsynth.errors import SettingError, UnknownNameError, unknown_name
from fedsynth.methods import DEFAULT_METHOD, method_class, own_source
from fedsynth.models.registry import ModelSettings
from fedsynth.privacy.errors import shown
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.validation import converted, field_types, from_mapping

# Defaults that a data set changes, except those of methods' settings, which are in the method
# (`Method.presets`). For the embedded 8×8 digits: a model that accepts such small images, and few
# enough releases that σ = 3 means ε < 10. Tuned on the digits, which are public.
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "digits": {
        "run": {"rounds": 3},
        "partition": {"clients": 5},
        "model": {"width": 32, "depth": 2},
    },
    "synthetic": {"partition": {"kind": "natural", "clients": 30}, "model": {"name": "linear"}},
    "femnist": {"partition": {"kind": "natural"}},
    "office-caltech-10": {"partition": {"kind": "domain", "clients": 4}},
    "domainnet-10": {"partition": {"kind": "domain", "clients": 6}},
}


def preset_of(dataset: str, method: type[Method]) -> dict[str, dict[str, Any]]:
    """Returns the defaults that a data set changes, as sections of settings."""
    family = dataset.partition("(")[0]  # synthetic(1,1) and all its variants have one preset
    sections = {name: dict(values) for name, values in PRESETS.get(family, {}).items()}
    method_preset: dict[str, Any] = {}
    for cls in reversed(method.__mro__):  # bases first
        method_preset.update(vars(cls).get("presets", {}).get(family, {}))
    return {**sections, "method": method_preset} if method_preset else sections


def model_is_set(settings: RunSettings) -> bool:
    """Returns whether the model settings differ from the run's defaults."""
    preset = preset_of(settings.dataset, type(settings.method)).get("model", {})
    return settings.model not in (ModelSettings(), ModelSettings(**preset))


def resolve(
    sections: Mapping[str, Mapping[str, Any]],
    *,
    own_method: type[Method] | None = None,
    own_data: str | None = None,
) -> RunSettings:
    """Returns settings from sections of plain values, over the data set's preset and the method's
    defaults.

    Args:
        sections: sections such as `{"run": {"method": "feddm"}, "method": {"ipc": 5}}`; text is
            converted to a setting's type.
        own_method: a custom method class, in place of the method that `sections` names.
        own_data: the name of custom images, in place of the data set that `sections` names; it has
            no preset.

    Raises:
        UnknownNameError: an unknown section, setting, method, data set or model (with the near
            matches).
        SettingError, PrivacySettingError: a value of the wrong type or outside its range.

    >>> settings = resolve({"run": {"method": "fedkf", "rounds": "5"}, "method": {"lr": 0.1}})
    >>> settings.rounds, settings.method.lr, settings.method.generator_width  # of digits' preset
    (5, 0.1, 8)
    >>> resolve({"method": {"ipcs": 5}})
    Traceback (most recent call last):
    fedsynth.errors.UnknownNameError: ...
    """
    for name in sections:
        if name not in SECTIONS:
            raise unknown_name("section", name, SECTIONS)
    run = dict(sections.get("run", {}))
    data = dict(sections.get("data", {}))
    name = str(run.pop("method", DEFAULT_METHOD))
    _check_source(name, run.pop("method_source", None), own_method)
    root = data.pop("data_root", None)
    method = own_method or method_class(name)
    dataset, folder = _own_folder(data)
    if folder is not None:
        own_data = own_data or dataset
    else:
        dataset = own_data or dataset_spec(dataset).name
    preset = preset_of(dataset, method) if own_data is None else {}
    run = {**preset.get("run", {}), **run}
    partition = {**preset.get("partition", {}), **sections.get("partition", {})}
    if folder is not None:
        partition.setdefault("kind", GIVEN)
    privacy = dict(sections.get("privacy", {}))
    # With only a ledger in the section, the ledger is that of a run without privacy.
    ledger = privacy.pop("ledger") if privacy.keys() == {"ledger"} else None
    values = converted("run", run, RUN_KINDS, "run", also=("method",))
    return RunSettings(
        method=method.from_mapping(
            {**preset.get("method", {}), **_of_the_method(method, sections.get("method", {}))}
        ),
        dataset=dataset,
        data_root=expanded(str(root)).absolute() if root else None,
        partition=from_mapping(PartitionSettings, partition),
        model=from_mapping(ModelSettings, {**preset.get("model", {}), **sections.get("model", {})}),
        privacy=from_mapping(PrivacySettings, privacy) if privacy else None,
        report=from_mapping(ReportSettings, sections.get("report", {})),
        ledger=None if ledger is None else kept_ledger(str(ledger)),
        folder=folder,
        **values,
    )


def section_of(key: str) -> str | None:
    """Returns the first section, except the method's, that has this setting, or None.

    >>> section_of("alpha"), section_of("clients"), section_of("ipc")
    ('partition', 'partition', None)
    """
    if key in RUN_KINDS:
        return "run"
    if key in ("dataset", "data_root"):
        return "data"
    kinds = (PartitionSettings, ModelSettings, PrivacySettings, ReportSettings, FolderSettings)
    return next((kind.section for kind in kinds if key in {f.name for f in fields(kind)}), None)


def _of_the_method(method: type[Method], values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the values. Raises SettingError if one of them is not a setting of the method but of
    another section, and names that section.
    """
    names = {field.name for field in fields(method)}
    for key in values:
        home = section_of(key)
        if key not in names and home is not None:
            raise SettingError(
                "method", key, f"is not a setting of {method.name}: use {home}.{key}"
            )
    return values


def _check_source(name: str, stated: Any, own_method: type[Method] | None) -> None:
    """Refuses a custom method that is missing, or comes from another file than stated."""
    if stated is None or own_method is not None:
        return
    try:
        method_class(name)
    except UnknownNameError:
        reason = (
            f"is {name} of {shown(stated)}, from a custom file: name that file again "
            f"(run.method=PATH/{str(stated).partition('@')[0]:.200}, or "
            "fedsynth.register_method)"
        )
        raise SettingError("run", "method", reason) from None
    source = own_source(name)
    if source is not None and source.label != stated:
        raise SettingError(
            "run",
            "method",
            f"is from {shown(stated)}, but the code that you named is another: {source.label}",
        )


def _own_folder(data: Mapping[str, Any]) -> tuple[str, FolderSettings | None]:
    """Returns the data set's name, and the folder settings if the data are custom images.

    Args:
        data: the section, without `data_root`.
    """
    values = dict(data)
    name = values.pop("dataset", None)
    types = {"dataset": str, "data_root": str, **field_types(FolderSettings)}
    for key in values:
        if key not in types:
            raise unknown_name("setting of data", key, types, "data", key)
    if not values:
        return str(name or DEFAULT_DATASET), None
    if not values.get("folder"):
        key = next(iter(values))
        raise SettingError("data", key, "is for user data: set data.folder too")
    folder = from_mapping(FolderSettings, values)
    if name is not None and is_known(str(name)):
        reason = (
            f"is the name of a published data set, {name}: choose another name for the "
            f"images in {folder.folder}"
        )
        raise SettingError("data", "dataset", reason)
    return str(name or default_name(folder.folder)), folder


SPEED = ("compile", "memory_gb", "threads", "device", "data_root")
"""Settings that change the duration of a run or the location of its data, but not its result."""
FIRST: dict[str, dict[str, Any]] = {"fedhydra": {"server_momentum": 0.9}}
"""By method, the original defaults of settings whose defaults have changed since."""


def fingerprint(settings: RunSettings, without: tuple[str, ...] = ()) -> str:
    """Returns eight hexadecimal digits that identify the settings that determine a result.

    Args:
        settings: the run's settings.
        without: the names of further settings to leave out.
    """
    config = json.dumps(distinctive(settings, without), sort_keys=True)
    return hashlib.blake2b(config.encode(), digest_size=4).hexdigest()


def distinctive(settings: RunSettings, without: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Returns the non-default settings that affect the result. Defaults are left out, so that rows
    of older versions still match after a setting is added.

    A default here is the original one: if you change a default, add the old value to `FIRST`, so
    that existing rows keep their fingerprint.
    """
    method = type(settings.method)()
    defaults = RunSettings(
        method, privacy=None if settings.privacy is None else PrivacySettings(epsilon=1.0)
    ).to_mapping()
    defaults["method"] = {**defaults["method"], **FIRST.get(method.name, {})}
    left_out = (*SPEED, *without)
    return {
        section: {
            k: v
            for k, v in values.items()
            if k not in left_out and (k == "method" or v != defaults.get(section, {}).get(k))
        }
        for section, values in settings.to_mapping().items()
    }
