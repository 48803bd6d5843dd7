"""Builds the settings of a run from the values that a user has set.

A setting without a value gets the default value for the data set, if there is one. Otherwise, it
gets the default value of the method, which is the value in the method's paper. All values are
validated.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsynth.config.settings import RUN_KINDS, SECTIONS, ReportSettings, RunSettings
from fedsynth.core.method import Method
from fedsynth.data.declaration import FolderSettings, default_name
from fedsynth.data.partition_settings import EXPLICIT, PartitionSettings
from fedsynth.data.registry import DEFAULT_DATASET, dataset_spec, is_known
from fedsynth.data.tables import HUB
from fedsynth.errors import SettingError, UnknownNameError, short_repr, unknown_name
from fedsynth.features.encoding import EncoderSettings
from fedsynth.methods import DEFAULT_METHOD, method_class, own_label
from fedsynth.models.registry import ModelSettings
from fedsynth.own_code import unloaded_file
from fedsynth.privacy.releases import USER
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.validation import Faults, convert, converted, field_types, from_mapping

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
    # the networks' sizes in the code of FedProx and q-FFL, and in their papers (models/text.py)
    "plays": {
        "partition": {"kind": "natural", "clients": 8},
        "model": {"name": "lstm", "width": 32},
    },
    "shakespeare": {"partition": {"kind": "natural"}, "model": {"name": "lstm", "width": 256}},
    "sent140": {"partition": {"kind": "natural"}, "model": {"name": "lstm", "width": 256}},
    "sent140-glove": {"partition": {"kind": "natural"}, "model": {"name": "lstm", "width": 256}},
    # FedBN uses a tenth of the training images, about 743 of each domain
    "digits-five": {"partition": {"kind": "domain", "clients": 5, "subset": 0.1}},
    "office-caltech-10": {"partition": {"kind": "domain", "clients": 4}},
    "domainnet-10": {"partition": {"kind": "domain", "clients": 6}},
    "shapes": {
        "run": {"rounds": 5},
        "partition": {"kind": "domain", "clients": 4},
        "model": {"name": "unet", "width": 8},
    },
    "prostate-mri": {
        "partition": {"kind": "domain", "clients": 6},
        "model": {"name": "unet", "width": 32},
    },
}


def preset_of(dataset: str, method: type[Method]) -> dict[str, dict[str, Any]]:
    """Returns the defaults that are specific to a data set and a method, by section."""
    family = dataset.partition("(")[0]  # synthetic(1,1) and all its variants have one preset
    sections = {name: dict(values) for name, values in PRESETS.get(family, {}).items()}
    sections["method"] = {}
    for cls in reversed(method.__mro__):  # bases first
        sections["method"].update(vars(cls).get("presets", {}).get(family, {}))
    return sections


def model_is_set(settings: RunSettings) -> bool:
    """Returns True if the model settings differ from their defaults."""
    preset = preset_of(settings.dataset, type(settings.method)).get("model", {})
    return settings.model not in (ModelSettings(), ModelSettings(**preset))


def resolve(
    sections: Mapping[str, Mapping[str, Any]],
    *,
    own_method: type[Method] | None = None,
    own_data: str | None = None,
) -> RunSettings:
    """Builds the settings of a run from sections of plain values.

    Values that are not given come from the defaults for the data set, and then from the defaults of
    the method.

    Args:
        sections: sections such as `{"run": {"method": "feddm"}, "method": {"ipc": 5}}`. Text is
            converted to the type of the setting.
        own_method: a custom method class. It replaces the method that `sections` names.
        own_data: the name of custom images, which replace the data set that `sections` names.
            Settings have no special default values for custom images.

    Raises:
        UnknownNameError: if a section, setting, method, data set or model is unknown. The message
            suggests similar names.
        SettingError, PrivacySettingError: if a value has the wrong type or is out of range.

    >>> settings = resolve({"run": {"method": "fedkf", "rounds": "5"}, "method": {"lr": 0.1}})
    >>> settings.rounds, settings.method.lr, settings.method.generator_width  # of digits' preset
    (5, 0.1, 8)
    >>> resolve({"method": {"ipcs": 5}})
    Traceback (most recent call last):
    fedsynth.errors.UnknownNameError: ...
    """
    check_sections(sections)
    run = dict(sections.get("run", {}))
    data = dict(sections.get("data", {}))
    name = str(run.pop("method", DEFAULT_METHOD))
    _check_source(name, run.pop("method_source", None), own_method)
    root = data.pop("data_root", None)
    method = own_method or method_class(name)
    encoder = take_encoder(data)
    dataset, folder = _own_folder(data)
    preset: dict[str, dict[str, Any]] = {}
    if own_data is not None:
        dataset = own_data
    elif folder is None:
        dataset = dataset_spec(dataset).name
        preset = preset_of(dataset, method)
    chosen = {key: {**preset.get(key, {}), **sections.get(key, {})} for key in SECTIONS}
    _move_features(chosen, method)
    if folder is not None:
        chosen["partition"].setdefault("kind", EXPLICIT)
    if encoder is not None:
        chosen["model"].setdefault("name", "mlp")
    faults = Faults()
    with faults.collected():
        partition = from_mapping(PartitionSettings, chosen["partition"])
        privacy, ledger = _privacy(chosen["privacy"], folder, partition)
    with faults.collected():
        run = {**preset.get("run", {}), **run}
        values = converted("run", run, RUN_KINDS, "run", also=("method",))
    with faults.collected():
        method_settings = method.from_mapping(chosen["method"])
    with faults.collected():
        model = from_mapping(ModelSettings, chosen["model"])
    with faults.collected():
        report = from_mapping(ReportSettings, chosen["report"])
    faults.raise_all()
    return RunSettings(
        method=method_settings,
        dataset=dataset,
        data_root=convert("data", "data_root", root, Path).absolute() if root else None,
        partition=partition,
        model=model,
        privacy=privacy,
        report=report,
        ledger=ledger,
        folder=folder,
        encoder=encoder,
        **values,
    )


def _move_features(sections: dict[str, dict[str, Any]], method: type[Method]) -> None:
    """Moves `model.features` to the method's settings, for methods that have this setting."""
    if sections["model"].get("features") and "features" in field_types(method):
        if "features" in sections["method"]:
            raise SettingError("model", "features", "is also set as method.features. Remove one")
        sections["method"]["features"] = sections["model"].pop("features")


def check_sections(sections: Mapping[str, Any]) -> None:
    """Checks that sections of settings are mappings with known names.

    Raises:
        UnknownNameError: a section is unknown.
        SettingError: a section is not a mapping.
    """
    for name, values in sections.items():
        if name not in SECTIONS:
            raise unknown_name("section", name, SECTIONS)
        if not isinstance(values, Mapping):
            reason = 'must be a mapping, as in {"run": {"method": "feddm"}}, got '
            raise SettingError(None, name, reason + short_repr(values))


def section_of(key: str) -> str | None:
    """Returns the name of the section that contains a setting, or None if there is none.

    If several sections have a setting with this name, the first section is returned. The section of
    the method's settings is not searched.

    >>> section_of("alpha"), section_of("clients"), section_of("ipc")
    ('partition', 'partition', None)
    """
    if key in RUN_KINDS:
        return "run"
    if key in ("dataset", "data_root"):
        return "data"
    kinds = (PartitionSettings, ModelSettings, PrivacySettings, ReportSettings, FolderSettings)
    for kind in (*kinds, EncoderSettings):
        if key in field_types(kind):
            return kind.section
    return None


def _check_source(name: str, stated: Any, own_method: type[Method] | None) -> None:
    """Checks that a custom method was loaded from the file that the settings name."""
    if stated is None or own_method is not None:
        return
    try:
        method_class(name)
    except UnknownNameError:
        raise unloaded_file("run", "method", str(stated)) from None
    label = own_label(name)
    if label and label != stated:
        reason = (
            f"must be {short_repr(stated)}, as in the run, but the loaded code is {label}. Name "
            "the file that the run used"
        )
        raise SettingError("run", "method", reason)


def take_encoder(data: dict[str, Any]) -> EncoderSettings | None:
    """Removes the encoder settings from the section "data", and returns them."""
    values = {name: data.pop(name) for name in field_types(EncoderSettings) if name in data}
    if not any(values.values()):
        return None
    return from_mapping(EncoderSettings, {"encoder": "", **values})


def _own_folder(data: Mapping[str, Any]) -> tuple[str, FolderSettings | None]:
    """Returns the name of the data set, and the settings of a custom data set.

    The second value is None for a published data set.
    """
    values = dict(data)
    name = values.pop("dataset", None)
    for prefix, scheme in ((HUB, HUB), (MEDMNIST, "")):
        if str(name).startswith(prefix) and not values.get("folder"):
            values["folder"] = scheme + str(name).removeprefix(prefix)
            name = None
    if not values:
        return str(name or DEFAULT_DATASET), None
    types = field_types(FolderSettings)
    values = converted("data", values, types, "data", also=("dataset", "data_root"))
    if not values.get("folder"):
        reason = "has no effect without data.folder. Set data.folder"
        raise SettingError("data", next(iter(values)), reason)
    folder = FolderSettings(**values)
    if name is not None and is_known(str(name)):
        reason = f"is {name}, the name of a published data set. Choose another name"
        raise SettingError("data", "dataset", reason)
    return str(name or default_name(folder.folder)), folder


def _privacy(
    values: dict[str, Any], folder: FolderSettings | None, partition: PartitionSettings
) -> tuple[PrivacySettings | None, Any]:
    """Returns the privacy settings, or None for a run without differential privacy.

    The second value is the ledger folder of a run without differential privacy. A section with only
    a ledger does not make a run private. If custom images declare their number of users, the
    nominal size is users per client.
    """
    if not values or values.keys() == {"ledger"}:
        return None, values.get("ledger") and convert("privacy", "ledger", values["ledger"], str)
    declaration = None
    if folder is not None and values.get("unit") == USER:
        declaration = folder.declared()
    if declaration is not None and declaration.spec.groups:
        clients = partition.clients
        if partition.kind == EXPLICIT:
            clients = max(1, len(declaration.sites))
        values = {"nominal_size": declaration.spec.groups / clients, **values}
    return from_mapping(PrivacySettings, values), None


# The beginning of a data set's name that is followed by the path of a file of MedMNIST.
MEDMNIST = "medmnist:"
