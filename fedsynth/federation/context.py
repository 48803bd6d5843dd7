"""The context that all rounds of a run share. It is built only from public settings and the
specification of a data set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.data.images import NOISE, ProxyImages, noise_images
from fedsynth.data.load import load_dataset
from fedsynth.data.partition_settings import clients_or_groups
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import DeviceError, unknown_value
from fedsynth.models.registry import build_client_models

DEVICES = ("auto", "cpu", "cuda")


def resolve_device(name: str) -> torch.device:
    """Returns the torch device for a name such as "cpu", "cuda" or "cuda:1". The name "auto"
    selects CUDA if a GPU is available, otherwise the CPU.

    Raises:
        DeviceError: CUDA is requested but there is none.
        UnknownNameError: the name is none of these.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] not in DEVICES:
        raise unknown_value("run", "device", name, DEVICES)
    if name != "cpu" and not torch.cuda.is_available():
        raise DeviceError(
            f"run.device={name}: torch {torch.__version__} finds no CUDA device on this "
            "machine; use run.device=cpu"
        )
    try:
        return torch.empty(0, device=name).device
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise DeviceError(f"run.device={name} cannot be used: {why}") from None


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Sets the number of CPU threads of torch to `count` inside the context. None leaves it
    unchanged."""
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
    """Returns the memory bound in bytes. By default it is 4 GiB on a CPU, and half of the total
    memory of a GPU. Free memory is not used, because runs must be reproducible."""
    if gigabytes is not None:
        return int(gigabytes * 2**30)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // 2
    return 4 * 2**30


def public_context(settings: RunSettings, spec: DatasetSpec, device: torch.device) -> RoundContext:
    """Returns the context of round 1. For other rounds, use `replace(context, round=...)`."""
    privacy = settings.privacy
    partition = settings.partition
    training = spec.train_size * partition.subset * (1 - partition.local_test)
    nominal = training / clients_or_groups(partition, spec)
    if privacy is not None and privacy.nominal_size is not None:
        nominal = privacy.nominal_size
    architecture = settings.method.network(settings.model, spec, settings.seed)
    return RoundContext(
        round=1,
        seed=settings.seed,
        spec=spec,
        architecture=architecture,
        nominal_size=nominal,
        clients=partition.clients,
        client_architectures=build_client_models(
            settings.model,
            spec.image_shape,
            spec.classes,
            settings.seed,
            partition.clients,
            private=privacy is not None,
        ),
        robust=settings.robust,
        robust_share=settings.robust_share,
        rounds=settings.rounds,
        device=device,
        precision={"fp32": torch.float32, "bf16": torch.bfloat16}[settings.precision],
        memory_bytes=memory_bytes(settings.memory_gb, device),
        compiled=settings.compile,
    )


def with_proxy(
    context: RoundContext, settings: RunSettings, *, download: bool = False
) -> RoundContext:
    """Returns the context, extended by the public images that the method uses, if any.

    Args:
        download: let torchvision fetch the data set if it is not there.
    """
    name = settings.method.public_images()
    if not name:
        return context
    if name == NOISE:
        proxy = noise_images(context.spec, settings.seed)
    else:
        proxy, _ = load_dataset(name, settings.data_root, download=download)
    images = ProxyImages(proxy.to(context.device), context.spec)
    return replace(context, proxy=images)
