"""Images of clients and of synthetic sets: real minibatches, start images, uploads, and the
server's training on the union of all sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsynth.core.client import ClientClassPairs, ClientGroup, ExactClientView, PrivateClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, public, released
from fedsynth.core.method import Memory
from fedsynth.core.uploads import Array, Rule
from fedsynth.data.images import normalise
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import SettingError, UploadRejectedError
from fedsynth.seeding import torch_generator
from fedsynth.training.sgd import Objective, Penalty, SgdSettings, train_on

MAX_IPC = 100_000
"""Upper bound of the images per class that a client is asked for: more than any data set here
has."""


@dataclass(frozen=True)
class SyntheticSet(Message):
    """A client's upload: images [N, C, H, W] (float32, normalised) and their labels [N] (int64)."""

    # a subclass may send uint8 pixels: `normalised` returns a network's inputs
    images: Tensor = released()
    labels: Tensor = public(
        "with DP on, every class is sent, or only classes with a large released noisy "
        "count, each with the same number of images"
    )

    def normalised(self, spec: DatasetSpec) -> Tensor:
        """Returns the images as network inputs: normalised, float32."""
        if self.images.dtype == torch.uint8:
            return normalise(self.images, spec)
        return self.images

    def soft_labels(self) -> Tensor | None:
        """Returns the images' soft labels [N, C], each row of which sums to 1, or None if clients
        send none."""
        return None


def synthetic_sets(uploads: Mapping[int, Message]) -> dict[int, SyntheticSet]:
    """Returns the uploads that are synthetic sets, by client."""
    return {k: upload for k, upload in uploads.items() if isinstance(upload, SyntheticSet)}


MAX_PIXEL = 1e4
"""Largest magnitude of a normalised pixel, in standard deviations: real pixels are within about 10,
images that differential privacy's noise moves within some hundreds."""


def set_rules(spec: DatasetSpec, ipc: int, dtype: torch.dtype = torch.float32) -> dict[str, Rule]:
    """Returns the upload rules of a `SyntheticSet`: at most `ipc` images of each class, normalised
    or as uint8 pixels."""
    rows = ipc * spec.classes
    shape = (None, *spec.image_shape)
    low, high = (0, 255) if dtype == torch.uint8 else (-MAX_PIXEL, MAX_PIXEL)
    return {
        "images": Array(shape, dtype, low, high, rows=rows),
        "labels": Array((None,), torch.int64, 0, spec.classes - 1, rows=rows),
    }


def check_set(upload: SyntheticSet, ipc: int) -> None:
    """Rejects a set that does not have one label for each image, or that has more images of a class
    than agreed.

    The server joins sets for training, images and labels separately: one missing label would shift
    the labels of every later client's images.

    Raises:
        UploadRejectedError: names the field.
    """
    images = len(upload.images)
    if len(upload.labels) != images:
        raise UploadRejectedError(
            "labels", f"are {len(upload.labels)}, but there are {images} images"
        )
    largest = max(torch.bincount(upload.labels).tolist(), default=0)
    if largest > ipc:
        raise UploadRejectedError(
            "labels",
            f"contain a class {largest} times, but at most {ipc} images per class were requested",
        )


def start_images(
    clients: ClientGroup,
    segments: ClientClassPairs,
    memories: Sequence[Memory],
    context: RoundContext,
    ipc: int,
    average: int = 1,
    restart: bool = False,
) -> Tensor:
    """Returns the images [S, ipc, C, H, W] that a round's condensation starts from: each client's
    of its last round, else real images or averages of them, and of private clients public noise.

    Args:
        clients, segments: the group and its (client, class) pairs.
        memories: of the clients; "images" are those of the last round.
        context: the round's.
        ipc: images of a segment.
        average: random real images that a start image is the mean of; 1: real images as they are.
        restart: ignore the images of the last round.
    """

    if isinstance(clients, PrivateClientView):
        start = noise_start(clients.ids, segments, ipc, context.spec.image_shape, context.seed)
        start = start.to(context.device)
    elif average > 1:
        start = averaged_start(clients, segments, ipc, average, context.seed)
    else:
        start = real_start(clients, segments, ipc, context.seed)
    if not restart:
        restore_images(start, segments, memories)
    return start


def restore_images(
    start_SICHW: Tensor, segments: ClientClassPairs, memories: Sequence[Memory]
) -> None:
    """Replaces the start images of clients that remember those of their last round, in place."""
    for position, memory in enumerate(memories):
        if "images" in memory:
            indices = segments.of(position)
            start_SICHW[indices] = memory["images"].view(len(indices), *start_SICHW.shape[1:])


def _class_pools(
    clients: ExactClientView,
    segments: ClientClassPairs,
    generator_of: Callable[[int], torch.Generator],
) -> Iterator[tuple[Tensor, torch.Generator]]:
    """Yields each segment's examples [n], as indices into the resident data, and the generator of
    its client, which `generator_of` returns for the client's index."""
    for position, client in enumerate(clients.ids):
        generator = generator_of(client)
        for label in segments.label[segments.of(position)].tolist():
            yield clients.examples(position, label), generator


def real_start(
    clients: ExactClientView, segments: ClientClassPairs, ipc: int, seed: int, draw: int = 0
) -> Tensor:
    """Returns `ipc` random real images of each segment, [S, ipc, C, H, W]; smaller classes repeat
    some images.

    The draw depends only on (seed, client, draw), so REAL and FedDM with one seed start from the
    same images.
    """
    indices = clients.data.labels.new_empty(len(segments), ipc)
    pools = _class_pools(
        clients, segments, lambda client: torch_generator(seed, "start images", client, draw)
    )
    for number, (pool, generator) in enumerate(pools):
        order = torch.randperm(len(pool), generator=generator)
        indices[number] = pool[order.repeat(-(-ipc // len(pool)))[:ipc].to(pool.device)]
    return clients.images(indices.flatten()).view(len(segments), ipc, *clients.spec.image_shape)


def averaged_start(
    clients: ExactClientView, segments: ClientClassPairs, ipc: int, average: int, seed: int
) -> Tensor:
    """Returns `ipc` images of each segment, each the mean of `average` random real images of its
    class (drawn with replacement), [S, ipc, C, H, W]."""
    shape = clients.spec.image_shape
    images = torch.empty(len(segments), ipc, *shape, device=clients.data.labels.device)
    pools = _class_pools(
        clients, segments, lambda client: torch_generator(seed, "averaged start images", client)
    )
    for number, (pool, generator) in enumerate(pools):
        chosen = torch.randint(len(pool), (ipc * average,), generator=generator).to(pool.device)
        images[number] = clients.images(pool[chosen]).view(ipc, average, *shape).mean(dim=1)
    return images


def noise_start(
    ids: Sequence[int],
    segments: ClientClassPairs,
    ipc: int,
    image_shape: tuple[int, int, int],
    seed: int,
) -> Tensor:
    """Returns standard normal images [S, ipc, C, H, W] on the CPU. They are public and depend only
    on (seed, client), so that the start contains nothing private."""
    images = torch.empty(len(segments), ipc, *image_shape)
    for position, client in enumerate(ids):
        generator = torch_generator(seed, "start noise", client)
        indices = segments.of(position)
        images[indices] = torch.randn(len(indices), ipc, *image_shape, generator=generator)
    return images


def split_uploads(
    images_SICHW: Tensor, segments: ClientClassPairs, clients: int, uploaded_S: Tensor | None = None
) -> list[SyntheticSet]:
    """Returns one upload for each client of the group, with only the segments that `uploaded_S`
    selects; None selects all."""
    uploads = []
    ipc = images_SICHW.shape[1]
    for position in range(clients):
        indices = segments.of(position)
        if uploaded_S is not None:
            indices = indices[uploaded_S.cpu()[indices]]
        labels = segments.label[indices].repeat_interleave(ipc).to(images_SICHW.device)
        images = images_SICHW[indices.to(images_SICHW.device)].flatten(0, 1)
        uploads.append(SyntheticSet(images, labels))
    return uploads


def train_on_union(
    model: nn.Module,
    uploads: Mapping[int, SyntheticSet],
    settings: SgdSettings,
    context: RoundContext,
    objective: Objective | None = None,
    on_all: Objective | None = None,
) -> None:
    """Trains `model` in place on all uploaded images together (FedDM's server, Eq. 10).

    Args:
        objective: (the network in training, a minibatch's images, labels) -> its loss, instead of
            the cross-entropy.
        on_all: the same for the whole union, added to the loss of each step.
    """
    sets = list(uploads.values())
    if not any(len(u.labels) for u in sets):
        # No released count was large enough, or the few clients of this round have little data:
        # not an error, w_r is kept.
        if context.privacy is not None or len(uploads) < context.clients:
            return
        raise SettingError(
            "method",
            "min_examples",
            "is more than any client has of any class, so no client sends an image: lower "
            "it, or use fewer clients (partition.clients)",
        )
    images = torch.cat([u.normalised(context.spec) for u in sets])
    labels = torch.cat([u.labels for u in sets])
    penalty: Penalty | None = on_all and (lambda network: on_all(network, images, labels))
    train_on(
        model,
        images.__getitem__,
        labels,
        settings,
        torch_generator(context.seed, "server training", context.round),
        lambda completed, total: context.report("server", completed, total),
        penalty=penalty,
        objective=objective,
        precision=context.precision,
    )


SMALL_CLASS = ("all", "resample")


class BatchIndices:
    """B_c for every step and segment: `batch` examples without replacement.

    Classes smaller than the batch: "all" takes every example at every step (the exact mean, at less
    cost); "resample" draws `batch` examples with replacement. A client's draws depend only on
    (seed, round, client), not on the other clients of its group.

    Args:
        clients, segments: the group and its (client, class) pairs.
        steps: number of condensation steps.

    Attributes:
        sizes: examples of each segment in a step, on the CPU.
        segment: of each row, on the data's device.
        divisors: `sizes` on the data's device, [S, 1].
    """

    def __init__(
        self,
        clients: ExactClientView,
        segments: ClientClassPairs,
        batch: int,
        steps: int,
        seed: int,
        round: int,
        small_class: str = "all",
    ) -> None:
        device = clients.data.labels.device
        blocks = [torch.empty(steps, 0, dtype=torch.int32, device=device)]
        sizes = []
        pools = _class_pools(
            clients,
            segments,
            lambda client: torch_generator(seed, "condensation batches", round, client),
        )
        for pool, generator in pools:
            chosen = _draw(len(pool), batch, steps, small_class, generator)
            blocks.append(pool[chosen.to(device)].to(torch.int32))
            sizes.append(chosen.shape[1])
        self.sizes = torch.tensor(sizes, dtype=torch.int64)
        self._indices = torch.cat(blocks, dim=1)
        self._segment = torch.arange(len(sizes)).repeat_interleave(self.sizes)
        self.segment = self._segment.to(device)
        self.divisors = self.sizes.to(device, torch.float32)[:, None]

    def at(self, step: int) -> Tensor:
        """Returns one step's indices into the resident data [N]; their segments are `segment` [N]
        at every step, ascending."""
        return self._indices[step].to(torch.int64)

    def pieces(self, size: int) -> Iterator[tuple[slice, slice]]:
        """Yields a step's batch cut into pieces of at most `size` images: their rows and their
        segments."""
        for start in range(0, len(self._segment), size):
            segment = self._segment[start : start + size]
            yield slice(start, start + size), slice(int(segment[0]), int(segment[-1]) + 1)


def _draw(
    pool: int, batch: int, steps: int, small_class: str, generator: torch.Generator
) -> Tensor:
    """Returns positions in a class's pool, [steps, min(batch, pool)] ("resample": [steps, batch] if
    the pool is small)."""
    if pool <= batch:
        if small_class == "resample" and pool < batch:
            return torch.randint(pool, (steps, batch), generator=generator)
        return torch.arange(pool).expand(steps, pool)
    rows = []
    for first in range(0, steps, 64):
        ranks = torch.rand(min(64, steps - first), pool, generator=generator)
        rows.append(ranks.topk(batch, dim=1).indices)
    return torch.cat(rows)
