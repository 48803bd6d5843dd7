"""Images of clients and of synthetic sets: real minibatches, start images, uploads, and the
server's training on the union of all sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

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
from fedsynth.training.sgd import Objective, SgdSettings, train_on
from fedsynth.validation import check_choice

MOST_IPC = 100_000
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
        return normalise(self.images, spec) if self.images.dtype == torch.uint8 else self.images

    def soft_labels(self) -> Tensor | None:
        """Returns the images' soft labels [N, C], each row of which sums to 1, or None if clients
        send none."""
        return None


def synthetic_sets(uploads: Mapping[int, Message]) -> dict[int, SyntheticSet]:
    """Returns the uploads that are synthetic sets, by client."""
    return {k: upload for k, upload in uploads.items() if isinstance(upload, SyntheticSet)}


FARTHEST = 1e4
"""Largest magnitude of a normalised pixel, in standard deviations: real pixels are within about 10,
images that differential privacy's noise moves within some hundreds."""


def set_rules(spec: DatasetSpec, ipc: int, dtype: torch.dtype = torch.float32) -> dict[str, Rule]:
    """Returns the upload rules of a `SyntheticSet`: at most `ipc` images of each class, normalised
    or as uint8 pixels."""
    rows = ipc * spec.classes
    shape = (None, *spec.image_shape)
    least, most = (0, 255) if dtype == torch.uint8 else (-FARTHEST, FARTHEST)
    return {
        "images": Array(shape, dtype, least, most, rows=rows),
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
    most = int(torch.bincount(upload.labels).max()) if images else 0
    if most > ipc:
        raise UploadRejectedError(
            "labels",
            f"contain a class {most} times, but at most {ipc} images per class were requested",
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

    def fresh() -> Tensor:
        if isinstance(clients, PrivateClientView):
            noise = noise_start(clients.ids, segments, ipc, context.spec.image_shape, context.seed)
            return noise.to(context.device)
        if average > 1:
            return averaged_start(clients, segments, ipc, average, context.seed)
        return real_start(clients, segments, ipc, context.seed)

    remembered = [{}] * len(memories) if restart else memories
    return with_kept_images(fresh, segments, remembered).detach().clone()


def real_start(
    clients: ExactClientView, segments: ClientClassPairs, ipc: int, seed: int, draw: int = 0
) -> Tensor:
    """Returns `ipc` random real images of each segment, [S, ipc, C, H, W]; smaller classes repeat
    some images.

    The draw depends only on (seed, client, draw), so REAL and FedDM with one seed start from the
    same images.
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


def averaged_start(
    clients: ExactClientView, segments: ClientClassPairs, ipc: int, average: int, seed: int
) -> Tensor:
    """Returns `ipc` images of each segment, each the mean of `average` random real images of its
    class (drawn with replacement), [S, ipc, C, H, W]."""
    images: list[Tensor] = []
    for position, client in enumerate(clients.ids):
        generator = torch_generator(seed, "averaged start images", client)
        for label in segments.label[segments.of(position)].tolist():
            pool = clients.examples(position, label)
            chosen = torch.randint(len(pool), (ipc * average,), generator=generator).to(pool.device)
            images.append(
                clients.images(pool[chosen])
                .view(ipc, average, *clients.spec.image_shape)
                .mean(dim=1)
            )
    return torch.stack(images) if images else torch.empty(0, ipc, *clients.spec.image_shape)


def noise_start(
    ids: Sequence[int],
    segments: ClientClassPairs,
    ipc: int,
    image_shape: tuple[int, int, int],
    seed: int,
) -> Tensor:
    """Returns standard normal images [S, ipc, C, H, W] on the CPU. They are public and depend only
    on (seed, client), so that the start contains nothing private."""
    rows = [
        torch.randn(
            len(segments.of(position)),
            ipc,
            *image_shape,
            generator=torch_generator(seed, "start noise", client),
        )
        for position, client in enumerate(ids)
    ]
    return torch.cat(rows)


def with_kept_images(
    fresh: Callable[[], Tensor], segments: ClientClassPairs, memories: Sequence[Memory]
) -> Tensor:
    """Returns the start images of a round's condensation, [S, ipc, C, H, W]: a client's images of
    its last round if it remembers them, otherwise `fresh` ones."""
    new = [position for position, memory in enumerate(memories) if "images" not in memory]
    if not new and len(memories):
        kept = torch.cat([memory["images"] for memory in memories])
        return kept.view(len(segments), -1, *kept.shape[1:]) if len(segments) else fresh()
    start = fresh()
    for position, memory in enumerate(memories):
        if "images" in memory:
            mine = segments.of(position).to(start.device)
            start[mine] = memory["images"].view(len(mine), *start.shape[1:])
    return start


def split_uploads(
    images_SICHW: Tensor, segments: ClientClassPairs, clients: int, kept_S: Tensor | None = None
) -> list[SyntheticSet]:
    """Returns one upload for each client of the group, without the segments that `kept_S`
    excludes."""
    uploads = []
    ipc = images_SICHW.shape[1]
    for position in range(clients):
        mine = segments.of(position)
        if kept_S is not None:
            mine = mine[kept_S.cpu()[mine]]
        labels = segments.label[mine].repeat_interleave(ipc).to(images_SICHW.device)
        uploads.append(
            SyntheticSet(images_SICHW[mine.to(images_SICHW.device)].flatten(0, 1), labels)
        )
    return uploads


def train_on_union(
    model: nn.Module,
    uploads: Mapping[int, SyntheticSet],
    settings: SgdSettings,
    context: RoundContext,
    objective: Objective | None = None,
    on_all: Objective | None = None,
    once_an_epoch: bool = False,
) -> None:
    """Trains `model` in place on all uploaded images together (FedDM's server, Eq. 10).

    Args:
        objective: (the network in training, a minibatch's images, labels) -> its loss, instead of
            the cross-entropy.
        on_all: the same for the whole union, added to the loss of each step or, with
            `once_an_epoch`, of every epoch's first step.
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
    period = -(-len(labels) // settings.batch) if once_an_epoch else 1
    steps = count()

    def penalty(network: nn.Module) -> Tensor:
        if on_all is None or next(steps) % period:
            return images.new_zeros(())
        return on_all(network, images, labels)

    train_on(
        model,
        lambda where: images[where],
        labels,
        settings,
        torch_generator(context.seed, "server training", context.round),
        lambda done, total: context.report("server", done, total),
        penalty=None if on_all is None else penalty,
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
        check_choice("method", "small_class", small_class, SMALL_CLASS)
        blocks: list[Tensor] = []
        for position, client in enumerate(clients.ids):
            generator = torch_generator(seed, "condensation batches", round, client)
            for label in segments.label[segments.of(position)].tolist():
                pool = clients.examples(position, label)
                chosen = _draw(len(pool), batch, steps, small_class, generator)
                blocks.append(pool[chosen.to(pool.device)])
        self.sizes = torch.tensor([block.shape[1] for block in blocks], dtype=torch.int64)
        empty = torch.empty(steps, 0, dtype=torch.int32)
        self._block = (
            torch.cat([block.to(torch.int32) for block in blocks], dim=1) if blocks else empty
        )
        self._where = torch.arange(len(blocks)).repeat_interleave(self.sizes)
        self.segment = self._where.to(self._block.device)
        self.divisors = self.sizes.to(self._block.device, torch.float32)[:, None]

    def at(self, step: int) -> Tensor:
        """Returns one step's indices into the resident data [N]; their segments are `segment` [N]
        at every step, ascending."""
        return self._block[step].to(torch.int64)

    def pieces(self, size: int) -> list[Piece]:
        """Returns a step's batch cut into pieces of at most `size` images."""
        starts = range(0, len(self._where), size)
        stops = [min(start + size, len(self._where)) for start in starts]
        return [
            Piece(
                slice(start, stop), slice(int(self._where[start]), int(self._where[stop - 1]) + 1)
            )
            for start, stop in zip(starts, stops, strict=True)
        ]


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a step's batch, and their segments."""

    rows: slice
    segments: slice


def _draw(
    pool: int, batch: int, steps: int, small_class: str, generator: torch.Generator
) -> Tensor:
    """Returns positions in a class's pool, [steps, min(batch, pool)] ("resample": [steps, batch] if
    the pool is small)."""
    if pool <= batch:
        if small_class == "resample" and pool < batch:
            return torch.randint(pool, (steps, batch), generator=generator)
        return torch.arange(pool).expand(steps, pool)
    rows: Sequence[Tensor] = [
        torch.rand(min(64, steps - first), pool, generator=generator).topk(batch, dim=1).indices
        for first in range(0, steps, 64)
    ]
    return torch.cat(list(rows))
