"""A group of clients as a method may see it: exact statistics with DP off, only charged releases
with DP on.

Images of all clients stay on the device as uint8, in one tensor; a client is a vector of indices
into it. The clients of a group go through one `client_step` together.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from fedsynth.core.feature_cache import feature_table
from fedsynth.data.images import ImageData, normalise
from fedsynth.features.feature_map import FeatureMap
from fedsynth.models.feature_linear import Embedding
from fedsynth.models.on_features import OnFeatures
from fedsynth.privacy.dpsgd import BeforeStep, DpSgdSettings, ExampleLoss, Penalty, dp_sgd
from fedsynth.privacy.errors import UnplannedReleaseError
from fedsynth.privacy.mechanisms import GaussianSumMechanism, Released
from fedsynth.privacy.passes import Note, padded, pass_length, values_of_each
from fedsynth.privacy.plans import GroupReleaseBudget, ReleaseBudget, ReleasePlan, UnaccountedNoise
from fedsynth.privacy.products import Products
from fedsynth.privacy.units import Units

CPU_CHUNK, GPU_CHUNK = 512, 4096
FEATURE_PASS = 512
"""Examples whose features are multiplied at a time."""
FEATURE_START = 64.0
"""Fixed cost of such a pass, in examples: the sum of a matrix product is written out."""

FeatureRows = Callable[[Tensor, Tensor], Products]
"""(features or z [N, d], labels [N]) -> each example's vector, a function of that example only."""


def chunk(device: torch.device) -> int:
    """Returns how many real images are held as floats at a time: a memory bound. Features are per
    example, so it changes results by rounding only."""
    return GPU_CHUNK if device.type == "cuda" else CPU_CHUNK


def _inputs(
    network: nn.Module | None, data: ImageData, parts: Sequence[Tensor], note: Note | None = None
) -> Callable[[Tensor, int], Tensor] | None:
    """Returns a function that gives the inputs z [length, d] of a network on a feature map for
    records [N] of these parts; None: the network takes images.

    The features of all parts are computed now, once, and padded with zeros before z is computed
    from them.
    """
    if not isinstance(network, OnFeatures):
        return None
    look_up = feature_table(data, network.feature_map, torch.cat(list(parts)), note=note)
    vectors = network.vectors
    return lambda records, length: vectors(padded(look_up(records), length))


@dataclass(frozen=True)
class ClientClassPairs:
    """The (client, class) pairs that a group's tensors describe.

    Args:
        position: the client's position in the group, int64 [S] on the CPU.
        label: the class, int64 [S] on the CPU.
    """

    position: Tensor
    label: Tensor

    def __len__(self) -> int:
        return len(self.label)

    def of(self, position: int) -> Tensor:
        """Returns the indices of one client's segments."""
        return torch.nonzero(self.position == position).flatten()


class _ClientView:
    """A group of clients, with one entry per client in each attribute of `_per_client`."""

    _per_client: ClassVar[tuple[str, ...]]
    ids: tuple[int, ...]
    _allowance: GroupReleaseBudget[Any]

    def select(self, position: int) -> Self:
        """Returns a group of this client only; it shares the client's series, each of which can be
        taken only once."""
        single = copy.copy(self)
        single._allowance = self._allowance.of_client(position)
        for name in self._per_client:
            setattr(single, name, getattr(self, name)[position : position + 1])
        return single

    def split(self) -> list[Any]:
        """Returns a group of each client only (`select`)."""
        return [self.select(position) for position in range(len(self.ids))]


class ExactClientView(_ClientView):
    """Clients without a privacy guarantee: a method may read everything.

    Args:
        ids: the clients' indices.
        data: all clients' images, resident on the device.
        parts: for each client, the positions of its records.
        allowances: each client's noise, for a mechanism that guarantees nothing; otherwise empty.
        network: the network that is trained. If it uses a feature map, `images` gives its inputs.
    """

    _per_client = ("ids", "_parts", "_labels")

    def __init__(
        self,
        ids: Sequence[int],
        data: ImageData,
        parts: Sequence[Tensor],
        allowances: Sequence[ReleaseBudget[UnaccountedNoise]] = (),
        *,
        network: nn.Module | None = None,
    ) -> None:
        self.ids = tuple(ids)
        self.data = data
        self.spec = data.spec
        self._parts = [part.to(data.labels.device) for part in parts]
        self._labels = [data.labels[part].cpu() for part in self._parts]
        self._allowance = GroupReleaseBudget(allowances)
        self._inputs = _inputs(network, data, self._parts)

    def noise(self, name: str) -> list[UnaccountedNoise]:
        """Returns each client's noise for the plan with this name, for mechanisms that add noise
        but guarantee nothing.

        Raises:
            UnplannedReleaseError: as `PrivateClientView.series`, or the run has no such mechanism.
        """
        return self._allowance.take(name)

    def sizes(self) -> list[int]:
        """Returns n_k of each client."""
        return [len(part) for part in self._parts]

    def segments(self, min_examples: int) -> ClientClassPairs:
        """Returns the (client, class) pairs with at least `min_examples` examples (and at least
        one)."""
        counts_KC = torch.zeros(len(self.ids), self.spec.classes, dtype=torch.int64)
        for counts, labels in zip(counts_KC, self._labels, strict=True):
            counts += torch.bincount(labels, minlength=self.spec.classes)
        position, label = torch.nonzero(counts_KC >= max(min_examples, 1), as_tuple=True)
        return ClientClassPairs(position, label)

    def examples(self, position: int, label: int | None = None) -> Tensor:
        """Returns indices into the resident data of one client's examples, of one class or all."""
        part = self._parts[position]
        if label is None:
            return part
        # on the CPU: with a mask on a GPU, the host would wait for the number of matches
        indices = torch.nonzero(self._labels[position] == label).flatten()
        return part[indices.to(part.device, non_blocking=True)]

    def images(self, indices: Tensor) -> Tensor:
        """Returns normalised images [N, C, H, W], float32; for a network on a feature map, vectors
        z [N, d]."""
        if self._inputs is not None:
            return self._inputs(indices, len(indices))
        return normalise(self.data.images[indices], self.spec)

    def labels(self, indices: Tensor) -> Tensor:
        return self.data.labels[indices]

    def feature_sums(
        self, features: FeatureMap, rows: FeatureRows, embedding: Embedding | None = None
    ) -> Tensor:
        """Returns the sums that `PrivateClientView.feature_sums` releases, over all examples of
        each client and without noise, [clients, D], float64: clipped in the same way."""
        sums = []
        for part in self._parts:
            look_up = feature_table(self.data, features, part, embedding)
            first, *remaining = part.split(FEATURE_PASS)  # of a client without examples, one empty
            total = rows(look_up(first), self.data.labels[first]).sums()
            for records in remaining:
                total = total + rows(look_up(records), self.data.labels[records]).sums()
            sums.append(total)
        return torch.stack(sums)


class PrivateClientView(_ClientView):
    """Clients with DP on: a method gets noisy sums and privately trained models, no data or counts.

    Every release was charged to each client's ledger in advance. `series` returns it by the name of
    its plan; this class gives no other access to noise or to a client's ledger.

    The one function of data that a method passes in, `rows` of `class_sums`, is called with images,
    and its result is used only in a charged sum. The method's author promises that it keeps nothing
    for itself, which Python cannot enforce.

    Args:
        ids: the clients' indices.
        data: all clients' images, resident on the device.
        parts: for each client, the positions of its records.
        allowances: each client's charged releases of this exchange (`ClientBudget.charge`).
        nominal_size: the public number of records that each client is supposed to have; it decides
            only the length of passes (`fedsynth.privacy.passes`). None: as long as memory allows.
        users: the user of each of `data`'s records [len(data)], if users are protected instead of
            records (`fedsynth.privacy.units`); `nominal_size`, and all public sizes, then count
            users.
        network: the network that is trained. If it uses a feature map, its inputs, each a function
            of one record, replace the images.
        note: receives the reason why some records contribute nothing, if the code of a feature map,
            model or method raises on them: a failed step would reveal these records to the server.
    """

    _per_client = ("ids", "_parts", "_records", "_units")

    def __init__(
        self,
        ids: Sequence[int],
        data: ImageData,
        parts: Sequence[Tensor],
        allowances: Sequence[ReleaseBudget[GaussianSumMechanism]],
        *,
        nominal_size: float | None = None,
        users: Tensor | None = None,
        network: nn.Module | None = None,
        note: Note = lambda text: None,
    ) -> None:
        self.ids = tuple(ids)
        self.spec = data.spec
        self._note = functools.cache(note)  # each line once: a step has many passes
        self._data = data
        self._allowance = GroupReleaseBudget(allowances)
        self._nominal_size = nominal_size
        self._parts = [part.to(data.labels.device) for part in parts]
        self._records = [part.cpu() for part in parts]
        self._labels = data.labels.cpu()
        self._inputs = _inputs(network, data, self._parts, self._note)
        self._units = [Units(len(records)) for records in self._records]
        if users is not None:
            users = users.cpu()
            self._units = [Units(len(records), users[records]) for records in self._records]

    def segments(self) -> ClientClassPairs:
        """Returns all classes of all clients: a client's set of classes is private."""
        shape = len(self.ids), self.spec.classes
        return ClientClassPairs(*torch.ones(shape).nonzero(as_tuple=True))

    def plan(self, name: str) -> ReleasePlan:
        """Returns the plan that the clients were charged for under this name: clip, rate, steps, ….

        Raises:
            UnplannedReleaseError: this exchange has no such plan, or the clients' plans differ.
        """
        return self._allowance.plan(name)

    def series(self, name: str) -> list[GaussianSumMechanism]:
        """Returns each client's charged series for the plan with this name.

        Raises:
            UnplannedReleaseError: no such plan in this exchange, or its series was already taken.
        """
        mechanisms: list[GaussianSumMechanism] = self._allowance.take(name)
        for client, mechanism in zip(self.ids, mechanisms, strict=True):
            mechanism.owner = client
        return mechanisms

    def _check_owners(self, series: Sequence[GaussianSumMechanism]) -> None:
        """Checks that each client's records go only into that client's series.

        Raises:
            UnplannedReleaseError: a series belongs to another client.
        """
        for mechanism, client in zip(series, self.ids, strict=True):
            if mechanism.owner not in (None, client):
                raise UnplannedReleaseError(
                    f"a mechanism of client {mechanism.owner} does not match the records of client "
                    f"{client}"
                )

    def class_sums(
        self,
        series: Sequence[GaussianSumMechanism],
        rows: Callable[[Tensor, Tensor], Tensor],
        *,
        start_over_row: float = 4.0,
    ) -> Released:
        """Takes one step of every client: releases noisy sums by class of a vector of each sampled
        record.

        Args:
            series: charged series, one for each client of the group.
            rows: (images [N, C, H, W], segment [N] on the CPU) -> [N, D]. Each output row must be a
                function of its example only (and of released values). N is the same at every call;
                the last call is padded with black images in segment −1, whose outputs are
                discarded. Clients' examples share calls, but each is added only to its own client's
                sum.
            start_over_row: fixed cost of a call of `rows`, in rows; with the public expected size
                of the sample it decides N (`fedsynth.privacy.passes`).

        Returns:
            [clients · classes, D]
        """
        self._check_owners(series)
        samples = [units.sample(s) for units, s in zip(self._units, series, strict=True)]
        sampled = zip(self._records, samples, strict=True)
        records = torch.cat([records[sample.records] for records, sample in sampled])
        counts = torch.tensor([len(sample) for sample in samples])
        offsets = (counts.cumsum(0) - counts).tolist()
        owner = torch.arange(len(samples)).repeat_interleave(counts)
        device = self._data.labels.device
        size = pass_length(self._expected(series), start_over_row, chunk(device))
        for start in range(0, len(records), size):
            chunk_records = records[start : start + size]
            stop = start + len(chunk_records)
            labels = self._labels[chunk_records]
            segments = self.spec.classes * owner[start:stop] + labels
            inputs = self._images(chunk_records, size), padded(segments, size, fill=-1)
            vectors = values_of_each(rows, inputs, self._note)
            for position in owner[start:stop].unique().tolist():
                offset = offsets[position]
                first = max(start, offset)
                last = min(stop, offset + len(samples[position]))
                client_slice = slice(first - start, last - start)
                part = samples[position].part(first - offset, last - offset)
                series[position].add(
                    vectors[client_slice], labels[client_slice].to(device, non_blocking=True), part
                )
        return Released(torch.cat([s.release().to(device) for s in series]))

    def feature_sums(
        self,
        series: Sequence[GaussianSumMechanism],
        features: FeatureMap,
        rows: FeatureRows,
        embedding: Embedding | None = None,
    ) -> Released:
        """Takes one step of every client: releases the noisy sum of a vector of each sampled
        record's features.

        Args:
            series: charged series of one group, one for each client.
            features: public; each record's vector is computed once and cached with the data.
            rows: (features [N, d], labels [N]) -> the records' vectors, with the conditions of
                `class_sums`; the last pass is padded with rows of zeros and label 0.
            embedding: public; if given, `rows` gets z in place of features.

        Returns:
            [clients, D]
        """
        self._check_owners(series)
        size = pass_length(self._expected(series), FEATURE_START, FEATURE_PASS)
        device = self._data.labels.device
        released = []
        for client_records, units, mechanism in zip(
            self._records, self._units, series, strict=True
        ):
            sample = units.sample(mechanism)
            records = client_records[sample.records]
            look_up = feature_table(self._data, features, records, embedding, self._note)
            for start in range(0, len(records), size):
                chunk_records = records[start : start + size].to(device, non_blocking=True)
                products = rows(
                    padded(look_up(chunk_records), size),
                    padded(self._data.labels[chunk_records], size),
                )
                chunk_sample = sample.part(start, start + len(chunk_records))
                mechanism.add_products(products.part(slice(len(chunk_records))), chunk_sample)
            released.append(mechanism.release().to(device))
        return Released(torch.cat(released))

    def _expected(self, series: Sequence[GaussianSumMechanism]) -> float | None:
        """Returns the public expected number of records in a step, over all clients of the
        group."""
        if self._nominal_size is None:
            return None
        return self._nominal_size * sum(s.sample_rate for s in series)

    def _images(self, records: Tensor, length: int) -> Tensor:
        """Returns normalised images [length, C, H, W] of these records, padded with black ones;
        for a network on a feature map, z [length, d], padded with zeros."""
        indices = records.to(self._data.labels.device, non_blocking=True)
        if self._inputs is not None:
            return self._inputs(indices, length)
        images = self._data.images[indices]
        return normalise(padded(images, length), self.spec)

    def fit(
        self,
        series: Sequence[GaussianSumMechanism],
        model: nn.Module,
        steps: int,
        settings: DpSgdSettings,
        penalty: Penalty | None = None,
        loss: ExampleLoss | None = None,
        before_step: BeforeStep | None = None,
    ) -> None:
        """Trains the model of the group's only client in place, by DP-SGD with a series charged for
        `steps` releases; `penalty` and `before_step` see no data, `loss` is per example (`dp_sgd`).
        """
        self._check_owners(series)
        (mechanism,), (part,), (units,) = series, self._parts, self._units
        labels = self._data.labels[part]
        factors = None
        if isinstance(model, OnFeatures) and model.linear:
            factors = model.gradient_factors

        def images(indices: Tensor) -> Tensor:
            return self._images(part[indices], len(indices))

        dp_sgd(
            model,
            images,
            labels,
            mechanism,
            steps,
            settings,
            penalty,
            loss,
            before_step,
            units,
            factors,
            self._note,
        )


ClientGroup = ExactClientView | PrivateClientView
