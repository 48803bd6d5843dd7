"""Computes a run's public context, privacy plan and privacy costs.

The context is built only from public settings and from the specification of the data set. No data
are read.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from fedsynth.config.checks import check_kind
from fedsynth.config.resolve import check_sections, resolve
from fedsynth.config.settings import RunSettings
from fedsynth.core.capabilities import PublicImages, network_of
from fedsynth.core.context import RoundContext
from fedsynth.data.images import NOISE, noise_images, proxy_images
from fedsynth.data.load import load_dataset
from fedsynth.data.partition_settings import EXPLICIT, clients_or_groups
from fedsynth.data.records import site_names
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DeviceError, PrivacySettingError, SettingError, unknown_value
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.run_data import declared, planned_ledgers, specification, with_declared
from fedsynth.models.registry import build_client_models
from fedsynth.privacy.disclosure import mechanism_facts
from fedsynth.privacy.settings import needs_a_budget

DEVICES = ("auto", "cpu", "cuda")


def resolve_device(name: str) -> torch.device:
    """Returns the torch device for a name such as "cpu", "cuda" or "cuda:1".

    The name "auto" selects CUDA if a GPU is available, otherwise the CPU.

    Raises:
        DeviceError: the name requests a CUDA device that is not available.
        UnknownNameError: the name is not the name of a device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] not in DEVICES:
        raise unknown_value("run", "device", name, DEVICES)
    if name != "cpu" and not torch.cuda.is_available():
        raise DeviceError(f"torch {torch.__version__} finds no CUDA device. Use run.device=cpu")
    try:
        return torch.empty(0, device=name).device
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise DeviceError(f"run.device={name} cannot be used: {why}") from None


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Sets the number of CPU threads that torch uses in a `with` block.

    If `count` is None, the number is not changed.
    """
    if count is None:
        yield
        return
    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def memory_bytes(gigabytes: float | None, device: torch.device) -> int:
    """Returns the number of bytes that a run may use for intermediate results.

    By default, it is 4 GiB on a CPU and half of a GPU's total memory. Free memory has no influence,
    because runs must be reproducible.

    Args:
        gigabytes: the bound in GiB from the settings. None uses the default.
        device: the device of the run.
    """
    if gigabytes is not None:
        return int(gigabytes * 2**30)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // 2
    return 4 * 2**30


# The smallest width of a ConvNet for which bfloat16 and compiled code are clearly faster.
WIDE = 64

# The smallest number of condensation steps of a run for which compiling is worth its time.
LONG = 1000


def choose_speed(settings: RunSettings, device: torch.device) -> RunSettings:
    """Replaces the value "auto" of `precision` and `compile` by the faster choice on the machine.

    The choices other than "fp32" and "off" are those that were measured (docs/speed.md): for
    condensation without differential privacy, with a ConvNet of at least `WIDE` channels.
    """
    method, model = settings.method, settings.model
    steps = settings.rounds * getattr(method, "iterations", 0)  # of condensation
    is_convnet = model.name in ("", "convnet") and not model.features
    suited = settings.privacy is None and steps > 0 and is_convnet and model.width >= WIDE
    precision, compiled = settings.precision, settings.compile
    if precision == "auto":
        precision = "bf16" if suited and _has_bfloat16(device) else "fp32"
    if compiled == "auto":
        compiler = shutil.which(os.environ.get("CXX", "g++"))
        worthwhile = suited and steps >= LONG and device.type == "cpu" and compiler is not None
        compiled = "on" if worthwhile else "off"
    return replace(settings, precision=precision, compile=compiled)


def _has_bfloat16(device: torch.device) -> bool:
    """Returns True if bfloat16 is faster than float32 on a device.

    A CPU needs AMX. With only the bfloat16 instructions of AVX-512, convolutions took 1.8 times as
    long as in float32.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_amx_tile_supported()


def public_context(settings: RunSettings, spec: DatasetSpec, device: torch.device) -> RoundContext:
    """Returns the context of round 1, computed from public values only.

    The value "auto" of `precision` and `compile` means "fp32" and "off" here (`choose_speed`). For
    another round, use `replace(context, round=...)`.
    """
    check_kind(settings, spec)
    privacy = settings.privacy
    partition = settings.partition
    training = spec.train_size * partition.subset * (1 - partition.local_test)
    nominal = training / clients_or_groups(partition, spec)
    if privacy is not None and privacy.nominal_size is not None:
        nominal = privacy.nominal_size
    architecture = network_of(settings.method, settings.model, spec, settings.seed)
    return RoundContext(
        round=1,
        seed=settings.seed,
        spec=spec,
        architecture=architecture,
        nominal_size=nominal,
        clients=partition.clients,
        client_architectures=build_client_models(
            settings.model,
            spec,
            spec.classes,
            settings.seed,
            partition.clients,
            private=privacy is not None,
        ),
        robust=settings.robust,
        robust_share=settings.robust_share,
        rounds=settings.rounds,
        device=device,
        precision=torch.bfloat16 if settings.precision == "bf16" else torch.float32,
        memory_bytes=memory_bytes(settings.memory_gb, device),
        compiled=settings.compile == "on",
    )


def with_proxy(
    context: RoundContext, settings: RunSettings, *, download: bool = False
) -> RoundContext:
    """Adds the method's public images to the context.

    If the method uses no public images, the context is returned unchanged.

    Args:
        context: the public context.
        settings: the settings of the run.
        download: True lets torchvision download the images if they are missing.
    """
    if not isinstance(settings.method, PublicImages):
        return context
    name = settings.method.public_images()
    if name == NOISE:
        proxy = noise_images(context.spec, settings.seed)
    else:
        proxy, _ = load_dataset(name, settings.data_root, download=download)
    return replace(context, proxy=proxy_images(proxy.to(context.device), context.spec))


def release_costs(plan: PrivacyPlan) -> list[dict[str, Any]]:
    """Describes each kind of release in a planned run's round, as a list of dicts.

    A mapping has the `quantity`, σ, clip, q, number of releases in a round and signal-to-noise
    ratio, at most (`PrivacyPlan.signal_to_noise`).
    """
    rows = []
    for release in plan.plans:
        row: dict[str, Any] = {
            "quantity": release.quantity,
            "noise_multiplier": plan.sigma * release.relative_noise_multiplier,
            "clip": release.clip,
            "sample_rate": release.sample_rate,
            "releases": release.steps,
            "signal_to_noise": plan.signal_to_noise(release),
        }
        rows.append(row)
    return rows


def costs_of(plan: PrivacyPlan) -> dict[str, Any]:
    """Returns a planned run's privacy costs as a JSON-serialisable dict.

    It has the mechanism, the run's σ, clip and q of the most important kind of release, the number
    of a client's releases per round, ε after each of the `shown_rounds`, δ, the requested budget
    (`target`), and the `rows` of `release_costs`.
    """
    chief = plan.chief
    rounds = plan.shown_rounds
    return {
        "mechanism": chief.mechanism,
        "noise_multiplier": plan.sigma,
        "clip": chief.clip,
        "sample_rate": chief.sample_rate,
        "releases": plan.releases,
        "epsilon": dict(zip(rounds, map(plan.planned_epsilon, rounds), strict=True)),
        "delta": plan.privacy.delta,
        "target": plan.privacy.epsilon,
        "rows": release_costs(plan),
    }


def plan_of(settings: RunSettings) -> PrivacyPlan:
    """Returns the privacy plan for a run with the given settings.

    Only the clients' ledgers are read, and no data.

    Raises:
        DataError: the custom images have no declaration of public facts.
        LedgerError: a ledger cannot be read, or holds releases that protect another unit.
    """
    names = None
    if settings.folder is not None:
        declaration = declared(settings)
        settings = with_declared(settings, declaration)
        if settings.partition.kind == EXPLICIT:
            names = site_names(declaration.sites)
    context = public_context(settings, specification(settings), torch.device("cpu"))
    settings.method.check_model(context.architecture)
    privacy = PrivacyPlan.checked(settings, context).privacy
    ledgers = planned_ledgers(settings, privacy.ledger_folder, names)
    return PrivacyPlan.make(settings, context, [ledger.history() for ledger in ledgers])


def plans_by_mechanism(sections: Mapping[str, Mapping[str, Any]]) -> list[PrivacyPlan]:
    """Returns a run's privacy plan for each mechanism that the method supports.

    If the settings name a mechanism, only the plan with this mechanism is returned.

    Args:
        sections: the sections of settings, as for `resolve`.

    Raises:
        SettingError: the method has no mechanism with a guarantee, or a setting is invalid as in
            `resolve`.
        PrivacySettingError: neither a budget nor a noise multiplier is set, or the named mechanism
            has no guarantee.
    """
    check_sections(sections)
    privacy = dict(sections.get("privacy", {}))
    method = resolve({**sections, "privacy": {}}).method
    named = privacy.get("mechanism")
    if named is not None and not mechanism_facts(str(named)).guaranteed:
        reason = "has no privacy guarantee, so its ε is unlimited. Use another mechanism"
        raise PrivacySettingError("privacy", "mechanism", reason, value=named)
    plans: list[PrivacyPlan] = []
    for name in method.dp_mechanisms if named is None else (str(named),):
        if not mechanism_facts(name).guaranteed:
            continue
        settings = resolve({**sections, "privacy": {**privacy, "mechanism": name}})
        if settings.privacy is None:
            raise needs_a_budget()
        plans.append(plan_of(settings))
    if not plans:
        reason = f"cannot run with differential privacy: {method.refusal}. Use fedavg"
        raise SettingError("run", "method", reason, value=method.name)
    return plans
