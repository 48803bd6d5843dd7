"""A group of clients as a method may see it: exact statistics with DP off, charged releases and nothing else with DP on.

Images of all clients stay on the device as uint8, in one tensor; a client is a vector of indices into it. A group is what goes
through one `client_step` together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsynth.data.images import ImageData, normalise
from fedsynth.privacy.dpsgd import DpSgdSettings, ExampleLoss, Penalty, dp_sgd
from fedsynth.privacy.ledger import Guard
from fedsynth.privacy.mechanisms import GaussianSums, Released
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release

CPU_CHUNK, GPU_CHUNK = 512, 4096


def chunk(device: torch.device) -> int:
    """Real images that are held as floats at a time: a memory bound; features are per example, so it moves results by rounding only."""
    return GPU_CHUNK if device.type == "cuda" else CPU_CHUNK


@dataclass(frozen=True)
class Segments:
    """Which (client, class) pairs a group's tensors speak of: `position` [S] in the group and `label` [S], both int64 on the CPU."""

    position: Tensor
    label: Tensor

    def __len__(self) -> int:
        return len(self.label)

    def of(self, position: int) -> Tensor:
        """Indices of the segments of one client of the group."""
        return torch.nonzero(self.position == position).flatten()


class OpenClients:
    """DP off: a method may look at everything."""

    def __init__(self, ids: Sequence[int], data: ImageData, parts: Sequence[Tensor]) -> None:
        self.ids, self.data, self.spec = tuple(ids), data, data.spec
        self._parts = [part.to(data.labels.device) for part in parts]
        self._labels = [data.labels[part].cpu() for part in self._parts]

    def sizes(self) -> list[int]:
        """n_k of each client."""
        return [len(part) for part in self._parts]

    def segments(self, min_examples: int) -> Segments:
        """The (client, class) pairs with at least `min_examples` examples (and at least one)."""
        pairs = [
            (position, label)
            for position, labels in enumerate(self._labels)
            for label, count in enumerate(
                torch.bincount(labels, minlength=self.spec.classes).tolist()
            )
            if count >= max(min_examples, 1)
        ]
        table = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
        return Segments(table[:, 0], table[:, 1])

    def examples(self, position: int, label: int | None = None) -> Tensor:
        """Indices into the resident data of one client's examples, of one class or of all."""
        part = self._parts[position]
        return part if label is None else part[(self._labels[position] == label).to(part.device)]

    def images(self, indices: Tensor) -> Tensor:
        """Normalised images [N, C, H, W], float32."""
        return normalise(self.data.images[indices], self.spec)

    def labels(self, indices: Tensor) -> Tensor:
        return self.data.labels[indices]


MakeSeries = Callable[[Release, int, Guard, SecretGenerator], GaussianSums]
"""(release, groups, a client's guard, its secret) -> a charged series, as `GaussianSums` makes it."""


class PrivateClients:
    """DP on: a method gets noisy sums and privately trained models, each charged to the client's ledger first; no data, no counts.

    `make_series` makes a client's charged series; an audit watches them (`federation.canaries`).

    The one function of data that a method passes in, `rows` of `class_sums`, is called with images, and its result goes into a charged
    sum and nowhere else. That it keeps nothing for itself is the method author's promise, which Python cannot enforce.
    """

    def __init__(
        self,
        ids: Sequence[int],
        data: ImageData,
        parts: Sequence[Tensor],
        guards: Sequence[Guard],
        secrets: Sequence[SecretGenerator],
        make_series: MakeSeries = GaussianSums,
    ) -> None:
        self.ids, self.spec = tuple(ids), data.spec
        self._data, self._guards, self._secrets = data, guards, secrets
        self._make_series = make_series
        self._parts = [part.to(data.labels.device) for part in parts]
        self._records, self._labels = [part.cpu() for part in parts], data.labels.cpu()

    def segments(self) -> Segments:
        """All classes of all clients: which classes a client has is private."""
        count, classes = len(self.ids), self.spec.classes
        return Segments(
            torch.arange(count).repeat_interleave(classes), torch.arange(classes).repeat(count)
        )

    def alone(self, position: int) -> PrivateClients:
        """A group of this client only, with the same ledger and secret."""
        guards, secrets = [self._guards[position]], [self._secrets[position]]
        parts = [self._parts[position]]
        return PrivateClients(
            [self.ids[position]], self._data, parts, guards, secrets, self._make_series
        )

    def charge(self, release: Release, groups: int) -> list[GaussianSums]:
        """Charges every client of the group for a series of releases; only then can noise be drawn.

        Raises:
            BudgetExceededError: some client's cap would be exceeded; the clients before it stay charged.
        """
        pairs = zip(self._guards, self._secrets, strict=True)
        return [self._make_series(release, groups, guard, secret) for guard, secret in pairs]

    def class_sums(
        self, series: Sequence[GaussianSums], rows: Callable[[Tensor, Tensor], Tensor]
    ) -> Released:
        """One step of every client: the noisy sums by class of `rows(images [N, C, H, W], segment [N] on the CPU)` -> [N, D].

        `rows` must be a function of each example alone (and of released values): clients' examples share its calls, and meet again only
        in their own client's sum. Returns [clients · classes, D].
        """
        samples = [mine[s.sample(len(mine))] for mine, s in zip(self._records, series, strict=True)]
        records = torch.cat(samples)
        owner = torch.arange(len(samples)).repeat_interleave(
            torch.tensor([len(sample) for sample in samples])
        )
        device, size = self._data.labels.device, chunk(self._data.labels.device)
        for some, whose in zip(records.split(size), owner.split(size), strict=True):
            if not len(some):  # an empty sample splits into one empty piece
                continue
            indices = some.to(device)
            labels = self._labels[some]
            contributions = rows(
                normalise(self._data.images[indices], self.spec), self.spec.classes * whose + labels
            )
            for position, count in zip(
                *[t.tolist() for t in whose.unique_consecutive(return_counts=True)], strict=True
            ):
                first = int(torch.searchsorted(whose, position))
                mine = slice(first, first + count)
                series[position].add(contributions[mine], labels[mine].to(device))
        return Released(torch.cat([s.release().to(device) for s in series]))

    def fit(
        self,
        series: Sequence[GaussianSums],
        models: Sequence[nn.Module],
        steps: int,
        settings: DpSgdSettings,
        penalties: Sequence[Penalty | None] | None = None,
        losses: Sequence[ExampleLoss | None] | None = None,
        report: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Trains one model for each client, in place, by DP-SGD with series charged for `steps` releases of one group; `penalties` see no
        data, `losses` are of each example (`dp_sgd`)."""
        extra, own = penalties or [None] * len(models), losses or [None] * len(models)
        each = zip(self._parts, series, models, extra, own, strict=True)
        for done, (part, s, model, penalty, loss) in enumerate(each, start=1):

            def images(indices: Tensor, part: Tensor = part) -> Tensor:
                return normalise(self._data.images[part[indices]], self.spec)

            dp_sgd(model, images, self._data.labels[part], s, steps, settings, penalty, loss)
            report(done)


ClientGroup = OpenClients | PrivateClients
