"""Components that several condensation methods share.

These are real minibatches, start images, checked uploads of synthetic images, and the server's
training on the uploads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fedsynth.core.client import ClientClassPairs, ExactClientView, Group, PrivateClientView
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, public, released
from fedsynth.core.method import ClientStates
from fedsynth.core.uploads import Array, Rule
from fedsynth.data.images import denormalise, normalise
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import SettingError, UploadRejectedError
from fedsynth.seeding import torch_generator
from fedsynth.training.sgd import Loss, Objective, Penalty, SgdSettings, train_on

# The largest number of images per class that the server may request. No data set here has as
# many images of a class.
MAX_IPC = 100_000


@dataclass(frozen=True)
class SyntheticSet(Message):
    """A client's upload of synthetic images.

    Args:
        images: normalised images [N, C, H, W], float32.
        labels: the labels of the images [N], int64.
    """

    # a subclass may send uint8 pixels: `normalised` returns a network's inputs
    images: Tensor = released()
    labels: Tensor = public(
        "with differential privacy, all classes are sent, or the classes with large released "
        "counts. Each class has the same number of images"
    )

    def normalised(self, spec: DatasetSpec) -> Tensor:
        """Returns the images as network inputs, normalised and float32."""
        if self.images.dtype == torch.uint8:
            return normalise(self.images, spec)
        return self.images

    def soft_labels(self) -> Tensor | None:
        """Returns the images' soft labels [N, C], with rows that sum to 1, or None if the upload
        has none.
        """
        return None


def synthetic_sets(uploads: Mapping[int, Message]) -> dict[int, SyntheticSet]:
    """Returns the synthetic sets among the uploads, by client."""
    return {k: upload for k, upload in uploads.items() if isinstance(upload, SyntheticSet)}


# The largest magnitude of a normalised pixel, in standard deviations. Real pixels are within about
# 10. Images that the noise of differential privacy moves are within some hundreds.
MAX_PIXEL = 1e4


def set_rules(spec: DatasetSpec, ipc: int, dtype: torch.dtype = torch.float32) -> dict[str, Rule]:
    """Returns the server's rules for a `SyntheticSet` with at most `ipc` images per class.

    The images are normalised, or have uint8 pixels if `dtype` is uint8.
    """
    rows = ipc * spec.classes
    shape = (None, *spec.image_shape)
    low, high = (0, 255) if dtype == torch.uint8 else (-MAX_PIXEL, MAX_PIXEL)
    return {
        "images": Array(shape, dtype, low, high, rows=rows),
        "labels": Array((None,), torch.int64, 0, spec.classes - 1, rows=rows),
    }


def as_pixels(images_NCHW: Tensor, spec: DatasetSpec) -> Tensor:
    """Converts normalised images to uint8 pixels. Images with bounds are not changed."""
    return images_NCHW if spec.bounds else denormalise(images_NCHW, spec)


def check_set(upload: SyntheticSet, ipc: int) -> None:
    """Checks that a set contains one label per image, and at most `ipc` images per class.

    The server concatenates all sets' images, and separately their labels. One missing label would
    shift the labels of every later client.

    Raises:
        UploadRejectedError: the set fails the check. The error names the field.
    """
    images = len(upload.images)
    if len(upload.labels) != images:
        reason = f"contain {len(upload.labels)} entries for {images} images"
        raise UploadRejectedError("labels", reason)
    largest = max(torch.bincount(upload.labels).tolist(), default=0)
    if largest > ipc:
        reason = f"contain a class {largest} times, but at most {ipc} times are allowed"
        raise UploadRejectedError("labels", reason)


def start_images(
    clients: Group,
    pairs: ClientClassPairs,
    states: ClientStates,
    context: RoundContext,
    ipc: int,
    average: int = 1,
    restart: bool = False,
) -> Tensor:
    """Returns the start images of a round's condensation, [S, ipc, C, H, W].

    A client starts from its last images if it has any. Otherwise it starts from real images or
    their averages, or from public noise if it is private.

    Args:
        clients, pairs: the client group and its (client, class) pairs.
        states: the clients' states. The entry "images" contains the last round's images.
        context: the round's context.
        ipc: the number of images per pair.
        average: the number of random real images averaged for each start image. With 1, start
            images are real images.
        restart: whether the images of the last round are ignored.
    """
    if isinstance(clients, PrivateClientView):
        noise = []
        for position, client in enumerate(clients.ids):  # public: only (seed, client) decide
            shape = len(pairs.of(position)), ipc, *context.spec.image_shape
            generator = torch_generator(context.seed, "start noise", client)
            noise.append(torch.randn(shape, generator=generator))
        start = torch.cat(noise).to(context.device)
    elif average > 1:
        start = averaged_start(clients, pairs, ipc, average, context.seed)
    else:
        start = real_start(clients, pairs, ipc, context.seed)
    for position, state in enumerate(states):
        if "images" in state and not restart:
            indices = pairs.of(position)
            start[indices] = state["images"].view(len(indices), *start.shape[1:])
    return start


def _class_pools(
    clients: ExactClientView, pairs: ClientClassPairs, draws: Callable[[int], torch.Generator]
) -> Iterator[tuple[Tensor, torch.Generator]]:
    """Yields each (client, class) pair's examples, as indices [n] into `clients.data`, with the
    client's random generator.

    `draws` returns the random generator for a client's index.
    """
    for position, client in enumerate(clients.ids):
        generator = draws(client)
        for label in pairs.label[pairs.of(position)].tolist():
            yield clients.examples(position, label), generator


def real_start(clients: ExactClientView, pairs: ClientClassPairs, ipc: int, seed: int) -> Tensor:
    """Returns `ipc` random real images per (client, class) pair, [S, ipc, C, H, W].

    If a class has fewer images, some are repeated. The draw depends only on (seed, client), so REAL
    and FedDM start from the same images if they have the same seed.
    """
    indices = clients.data.labels.new_empty(len(pairs), ipc)
    pools = _class_pools(
        clients, pairs, lambda client: torch_generator(seed, "start images", client, 0)
    )
    for number, (pool, generator) in enumerate(pools):
        order = torch.randperm(len(pool), generator=generator)
        indices[number] = pool[order.repeat(-(-ipc // len(pool)))[:ipc].to(pool.device)]
    return clients.images(indices.flatten()).view(len(pairs), ipc, *clients.spec.image_shape)


def averaged_start(
    clients: ExactClientView, pairs: ClientClassPairs, ipc: int, average: int, seed: int
) -> Tensor:
    """Returns `ipc` averaged real images per (client, class) pair, [S, ipc, C, H, W].

    Each is the mean of the class's `average` random real images, drawn with replacement.
    """
    shape = clients.spec.image_shape
    images = torch.empty(len(pairs), ipc, *shape, device=clients.data.labels.device)
    draws = partial(torch_generator, seed, "averaged start images")
    for number, (pool, generator) in enumerate(_class_pools(clients, pairs, draws)):
        chosen = torch.randint(len(pool), (ipc * average,), generator=generator).to(pool.device)
        images[number] = clients.images(pool[chosen]).view(ipc, average, *shape).mean(dim=1)
    return images


def split_uploads(
    images_SICHW: Tensor, pairs: ClientClassPairs, clients: int, uploaded_S: Tensor | None = None
) -> list[SyntheticSet]:
    """Splits the clients' synthetic images into one upload per client.

    If the mask `uploaded_S` is set, uploads contain only the pairs in it.
    """
    uploads = []
    ipc = images_SICHW.shape[1]
    for position in range(clients):
        indices = pairs.of(position)
        if uploaded_S is not None:
            indices = indices[uploaded_S.cpu()[indices]]
        labels = pairs.label[indices].repeat_interleave(ipc).to(images_SICHW.device)
        images = images_SICHW[indices.to(images_SICHW.device)].flatten(0, 1)
        uploads.append(SyntheticSet(images, labels))
    return uploads


def train_on_union(
    model: nn.Module,
    uploads: Mapping[int, SyntheticSet],
    settings: SgdSettings,
    context: RoundContext,
    loss: Loss | None = None,
    on_all: Loss | None = None,
) -> None:
    """Trains `model` in place on the union of all uploaded images, as FedDM's server does (Eq. 10).

    Args:
        model: the server's model.
        uploads: the clients' synthetic sets.
        settings: the settings of SGD.
        context: the round's context.
        loss: a function (the network in training, images and labels of a minibatch) -> loss,
            which replaces the cross-entropy.
        on_all: a function of the same form, which is called with all images and labels. Its loss is
            added to the loss of each step.
    """
    sets = list(uploads.values())
    if not any(len(u.labels) for u in sets):
        # No released count was large enough, or the few clients of this round have little data:
        # not an error, w_r is kept.
        if context.privacy is not None or len(uploads) < context.clients:
            return
        reason = (
            "is larger than the number of examples in every class at every client. Lower it, or "
            "lower partition.clients"
        )
        raise SettingError("method", "min_examples", reason)
    images = torch.cat([u.normalised(context.spec) for u in sets])
    labels = torch.cat([u.labels for u in sets])
    penalty: Penalty | None = on_all and (lambda network: on_all(network, images, labels))
    train_on(
        model,
        images.__getitem__,
        labels,
        settings,
        torch_generator(context.seed, "server training", context.round),
        Objective(loss, penalty),
        lambda completed, total: context.report("server", completed, total),
        precision=context.precision,
    )


SMALL_CLASS = ("all", "resample")


class BatchIndices:
    """Draws real examples for each condensation step and (client, class) pair.

    A pair's batch B_c has `batch` examples, drawn without replacement. If a class has fewer
    examples, `small_class` decides. With "all" every example is used at every step, which gives the
    exact mean at less cost. With "resample" `batch` examples are drawn with replacement. A client's
    draws depend only on (seed, round, client), and not on the other clients of the group.

    Args:
        clients, pairs: the client group and its (client, class) pairs.
        batch: the number of examples in a batch.
        steps: the number of condensation steps.
        seed, round: the seed and the round that determine the draws.
        small_class: "all" or "resample".

    Attributes:
        sizes: each pair's number of examples in a step, on the CPU.
        pair: each example's pair index in a step, on the data's device, and on the CPU as
            `pair_on_cpu`.
        divisors: `sizes` as float32 on the data's device, [S, 1].
    """

    def __init__(
        self,
        clients: ExactClientView,
        pairs: ClientClassPairs,
        batch: int,
        steps: int,
        seed: int,
        round: int,
        small_class: str = "all",
    ) -> None:
        device = clients.data.labels.device
        blocks = [torch.empty(steps, 0, dtype=torch.int32, device=device)]
        sizes = []
        draws = partial(torch_generator, seed, "condensation batches", round)
        for pool, generator in _class_pools(clients, pairs, draws):
            chosen = _draw(len(pool), batch, steps, small_class, generator)
            blocks.append(pool[chosen.to(device)].to(torch.int32))
            sizes.append(chosen.shape[1])
        self.sizes = torch.tensor(sizes, dtype=torch.int64)
        self._indices = torch.cat(blocks, dim=1)
        self.pair_on_cpu = torch.arange(len(sizes)).repeat_interleave(self.sizes)
        self.pair = self.pair_on_cpu.to(device)
        self.divisors = self.sizes.to(device, torch.float32)[:, None]

    def at(self, step: int) -> Tensor:
        """Returns one step's examples as indices [N] into `clients.data`.

        The attribute `pair` contains their (client, class) pair indices, which are ascending and
        the same at every step.
        """
        return self._indices[step].to(torch.int64)


def _draw(pool: int, batch: int, steps: int, small: str, generator: torch.Generator) -> Tensor:
    """Draws the indices of a class's examples for each step, [steps, min(batch, pool)].

    With "resample", the shape is [steps, batch] even if the class has fewer examples.
    """
    if pool <= batch:
        if small == "resample" and pool < batch:
            return torch.randint(pool, (steps, batch), generator=generator)
        return torch.arange(pool).expand(steps, pool)
    rows = []
    for first in range(0, steps, 64):
        ranks = torch.rand(min(64, steps - first), pool, generator=generator)
        rows.append(ranks.topk(batch, dim=1).indices)
    return torch.cat(rows)
