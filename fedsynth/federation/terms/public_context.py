"""What all rounds of a run share, from public settings and a data set's specification alone."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedsynth.core.context import Compute, Federation, RoundContext
from fedsynth.data.load import load_dataset
from fedsynth.data.partition_settings import clients_or_groups
from fedsynth.data.proxy import NOISE, ProxyImages, noise_images
from fedsynth.data.registry import DatasetSpec
from fedsynth.federation.terms.devices import memory_bytes
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.models.registry import build_client_models


def public_context(settings: RunSettings, spec: DatasetSpec, device: torch.device) -> RoundContext:
    """The context of round 1; of the others, `replace(context, round=...)`."""
    privacy = settings.privacy
    declared = privacy.nominal_size if privacy is not None else None
    partition = settings.partition
    nominal = (
        spec.train_size
        * partition.subset
        * (1 - partition.local_test)
        / clients_or_groups(partition, spec)
    )
    architecture = settings.method.network(settings.model, spec, settings.seed)
    federation = Federation(
        seed=settings.seed,
        spec=spec,
        architecture=architecture,
        nominal_size=declared or nominal,
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
    )
    compute = Compute(
        device=device,
        precision={"fp32": torch.float32, "bf16": torch.bfloat16}[settings.precision],
        memory_bytes=memory_bytes(settings.memory_gb, device),
        compiled=settings.compile,
    )
    return RoundContext(1, federation, compute)


def with_proxy(
    context: RoundContext, settings: RunSettings, *, download: bool = False
) -> RoundContext:
    """The context with the public images that the method names, if it names any.

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
    return replace(context, federation=replace(context.federation, proxy=images))
