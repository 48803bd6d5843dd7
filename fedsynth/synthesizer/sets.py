"""Synthetic sets: how they start, how they travel, and how the server trains on their union."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsynth.core.client import OpenClients, Segments
from fedsynth.core.messages import Message, public, released
from fedsynth.core.method import RoundContext
from fedsynth.core.random import torch_generator
from fedsynth.errors import SettingError
from fedsynth.synthesizer.training import SgdSettings, train_on


@dataclass(frozen=True)
class SyntheticSet(Message):
    """A client's upload: images [N, C, H, W] (float32, normalised) and their labels [N] (int64)."""

    images: Tensor = released()
    labels: Tensor = public(
        "with DP on every class is sent, or those whose released noisy count is large, each with as many images"
    )


def real_start(clients: OpenClients, segments: Segments, ipc: int, seed: int, draw: int = 0) -> Tensor:
    """`ipc` random real images of each segment, [S, ipc, C, H, W]; a class with fewer repeats some.

    What is drawn depends on (seed, client, draw) alone, so REAL and FedDM with one seed start from the same images.
    """
    chosen: list[Tensor] = []
    for position, client in enumerate(clients.ids):
        generator = torch_generator(seed, "start images", client, draw)
        for label in segments.label[segments.of(position)].tolist():
            pool = clients.examples(position, label)
            order = torch.randperm(len(pool), generator=generator)
            chosen.append(pool[order.repeat(-(-ipc // len(pool)))[:ipc].to(pool.device)])
    images = clients.images(torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64))
    return images.view(len(segments), ipc, *clients.spec.image_shape)


def noise_start(ids: Sequence[int], segments: Segments, ipc: int, image_shape: tuple[int, int, int], seed: int) -> Tensor:
    """Standard normal images [S, ipc, C, H, W] on the CPU: public, from (seed, client), so that nothing private is in the start."""
    rows = [
        torch.randn(len(segments.of(position)), ipc, *image_shape, generator=torch_generator(seed, "start noise", client))
        for position, client in enumerate(ids)
    ]
    return torch.cat(rows)


def split_uploads(images_SICHW: Tensor, segments: Segments, clients: int, kept_S: Tensor | None = None) -> list[SyntheticSet]:
    """One upload for each client of the group; `kept_S` leaves segments out."""
    uploads = []
    ipc = images_SICHW.shape[1]
    for position in range(clients):
        mine = segments.of(position)
        if kept_S is not None:
            mine = mine[kept_S.cpu()[mine]]
        labels = segments.label[mine].repeat_interleave(ipc).to(images_SICHW.device)
        uploads.append(SyntheticSet(images_SICHW[mine.to(images_SICHW.device)].flatten(0, 1), labels))
    return uploads


def train_on_union(model: nn.Module, uploads: Sequence[Message], settings: SgdSettings, context: RoundContext) -> None:
    """Trains `model` in place on all uploaded images together (FedDM's server, Eq. 10)."""
    sets = [u for u in uploads if isinstance(u, SyntheticSet)]
    if not any(len(u.labels) for u in sets):
        raise SettingError("no client sent any image: none has min_examples examples of a class; lower it, or use fewer clients")
    images, labels = torch.cat([u.images for u in sets]), torch.cat([u.labels for u in sets])
    generator = torch_generator(context.seed, "server training", context.round)
    train_on(
        model, lambda where: images[where], labels, settings, generator, lambda done, total: context.report("server", done, total)
    )
