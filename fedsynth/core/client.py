"""Groups of clients that give a method's client step access to the data.

Without differential privacy (DP) a step may read the data and exact statistics. With DP it gets
only releases that were charged.

The images of all clients are in one uint8 tensor on the device, and a client is a vector of indices
into this tensor. One call of `client_step` processes a group of clients together.
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
from fedsynth.errors import UnplannedReleaseError
from fedsynth.features.feature_map import FeatureMap
from fedsynth.models.on_features import Embedding, OnFeatures
from fedsynth.privacy.dpsgd import DpSgdSettings, dp_sgd
from fedsynth.privacy.mechanisms import GaussianSumMechanism, Released
from fedsynth.privacy.passes import (
    Note,
    Parts,
    Sample,
    Units,
    class_values,
    noisy_sums,
    padded,
    pass_size,
)
from fedsynth.privacy.plans import ReleaseBudget, ReleasePlan, UnaccountedNoise
from fedsynth.privacy.products import Products

CPU_CHUNK, GPU_CHUNK = 512, 4096
# The number of examples whose features are multiplied in one matrix product.
FEATURE_PASS = 512
# The fixed cost of one matrix product over features, in units of the cost of one example. The cost
# comes from writing the resulting sum to memory.
FEATURE_START = 64.0

# The type of functions that compute one vector for each example, from features [N, d] and labels
# [N].
#
# Embeddings z [N, d] may take the place of the features. Each vector may depend only on the example
# with the same position.
FeatureRows = Callable[[Tensor, Tensor], Products]


def chunk(device: torch.device) -> int:
    """Returns how many stored images a step converts to floats at once.

    The number bounds memory. Features are computed for each example separately, so the number
    changes results only by rounding.
    """
    return GPU_CHUNK if device.type == "cuda" else CPU_CHUNK


def _inputs(
    network: nn.Module | None,
    data: ImageData,
    parts: Sequence[Tensor],
    note: Note | None = None,
    *,
    isolated: bool = False,
) -> Callable[[Tensor, int], Tensor] | None:
    """Returns a function that computes the input vectors of a feature-based network.

    The function maps records [N] to the network's input vectors z [length, d]. None is returned if
    the network takes images instead of features. The features of all `parts` are computed once,
    during the call. The function pads the features with zeros to `length` and then computes z.
    """
    if not isinstance(network, OnFeatures):
        return None
    records = torch.cat(list(parts))
    look_up = feature_table(data, network.feature_map, records, note=note, isolated=isolated)
    vectors = network.vectors
    return lambda records, length: vectors(padded(look_up(records), length))


@dataclass(frozen=True)
class ClientClassPairs:
    """The client and the class of each row of a tensor.

    The tensor has one row for each (client, class) pair.

    Args:
        position: the client's position in the group, int64 [S] on the CPU.
        label: the class, int64 [S] on the CPU.
    """

    position: Tensor
    label: Tensor

    def __len__(self) -> int:
        return len(self.label)

    def of(self, position: int) -> Tensor:
        """Returns the indices of one client's (client, class) pairs.

        `position` is the client's index among the clients of this step.
        """
        return torch.nonzero(self.position == position).flatten()


class _ClientView:
    """Base class for groups of clients. Attributes in `_per_client` have one entry per client."""

    _per_client: ClassVar[tuple[str, ...]]
    ids: tuple[int, ...]
    _budgets: Sequence[ReleaseBudget[Any]]

    def select(self, position: int) -> Self:
        """Returns a group with only the client at `position`.

        Both groups share the client's charged releases, and each release can be taken only once.
        """
        single = copy.copy(self)
        for name in self._per_client:
            setattr(single, name, getattr(self, name)[position : position + 1])
        return single

    def split(self) -> list[Any]:
        """Returns a list with one single-client group for each client (see `select`)."""
        if len(self.ids) == 1:
            return [self]
        return [self.select(position) for position in range(len(self.ids))]

    def _take(self, name: str) -> list[Any]:
        """Returns each client's mechanism for a planned release.

        A mechanism can be taken only once.

        Raises:
            UnplannedReleaseError: a client has no such plan, or its mechanism was taken before. No
                mechanism of any client is taken in this case.
        """
        if not self._budgets:
            raise UnplannedReleaseError(
                f"release {name!r} has no plan, so the clients {list(self.ids)} were not charged "
                "for it. Return a plan with this name from Method.release_plans"
            ).with_code("release.uncharged")
        for budget in self._budgets:
            budget.check(name)
        return [budget.take(name) for budget in self._budgets]


class ExactClientView(_ClientView):
    """A group of clients without differential privacy. A method may read the clients' data
    directly.

    Args:
        ids: the clients' indices.
        data: all clients' images, on the device.
        parts: for each client, the positions of its records in `data`.
        budgets: for each client, the noise of a mechanism that adds noise but guarantees
            no privacy. Empty for all other runs.
        network: the network that is trained. If it uses a feature map, `images` returns the
            network's input vectors.
    """

    _per_client = ("ids", "_budgets", "_parts", "_labels")

    def __init__(
        self,
        ids: Sequence[int],
        data: ImageData,
        parts: Sequence[Tensor],
        budgets: Sequence[ReleaseBudget[UnaccountedNoise]] = (),
        *,
        network: nn.Module | None = None,
    ) -> None:
        self.ids = tuple(ids)
        self.data = data
        self.spec = data.spec
        self._parts = [part.to(data.labels.device) for part in parts]
        self._labels = [data.labels[part].cpu() for part in self._parts]
        self._budgets = budgets
        self._inputs = _inputs(network, data, self._parts)

    def noise(self, name: str) -> list[UnaccountedNoise]:
        """Returns each client's noise for the release plan `name`.

        Such noise exists only in runs whose mechanism adds noise without a privacy guarantee.

        Raises:
            UnplannedReleaseError: the exchange has no plan with this name, its noise was already
                taken, or the run has no such mechanism.
        """
        return self._take(name)

    def sizes(self) -> list[int]:
        """Returns each client's example count n_k."""
        return list(map(len, self._parts))

    def pairs(self, min_examples: int) -> ClientClassPairs:
        """Returns the (client, class) pairs that have at least `min_examples` examples.

        Pairs without any example are never returned.
        """
        counts_KC = torch.zeros(len(self.ids), self.spec.classes, dtype=torch.int64)
        for counts, labels in zip(counts_KC, self._labels, strict=True):
            counts += torch.bincount(labels, minlength=self.spec.classes)
        position, label = torch.nonzero(counts_KC >= max(min_examples, 1), as_tuple=True)
        return ClientClassPairs(position, label)

    def examples(self, position: int, label: int | None = None) -> Tensor:
        """Returns the indices of a client's examples in `data`.

        If `label` is given, only the examples of this class are returned.
        """
        part = self._parts[position]
        if label is None:
            return part
        # on the CPU: with a mask on a GPU, the host would wait for the number of matches
        indices = torch.nonzero(self._labels[position] == label).flatten()
        return part[indices.to(part.device, non_blocking=True)]

    def images(self, indices: Tensor) -> Tensor:
        """Returns the normalised images at the given indices in `data`, float32 [N, C, H, W].

        If the network uses a feature map, returns the network's input vectors z [N, d] instead.
        """
        if self._inputs is not None:
            return self._inputs(indices, len(indices))
        return normalise(self.data.images.index_select(0, indices), self.spec)

    def labels(self, indices: Tensor) -> Tensor:
        return self.data.labels.index_select(0, indices)

    def feature_sums(
        self, features: FeatureMap, rows: FeatureRows, embedding: Embedding | None = None
    ) -> Tensor:
        """Computes a vector for each example, and returns the exact sum of each client's vectors.

        The sums are float64 [clients, D].

        `rows` computes a vector for every example of the client. The vectors are clipped as in
        `PrivateClientView.feature_sums`, which releases a noisy sum instead.
        """
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
    """A group of clients with differential privacy. A method reads only noisy releases of the
    clients' data.

    A method gets only noisy sums and privately trained models from this class, and no data or
    counts. Every release was charged to each client's ledger in advance. `mechanisms` returns the
    charged releases of a plan by the plan's name, and nothing else here gives access to noise or to
    a client's ledger.

    A method passes in functions that are called with private data: `rows` of `class_sums` and
    `feature_sums`, and `loss` of `fit`. Their results are used only in charged sums. The method's
    author must ensure that these functions store nothing, because Python cannot enforce this.

    Args:
        ids: the clients' indices.
        data: all clients' images, on the device.
        parts: for each client, the positions of its records in `data`.
        budgets: for each client, the charged releases of this exchange (`ClientBudget.charge`).
        nominal_size: the public number of records that each client is supposed to have. It decides
            only the number of records that are processed together (`fedsynth.privacy.passes`). If
            None, as many are processed together as memory allows.
        users: the user of each record of `data`, [len(data)], if differential privacy protects
            users instead of records (`fedsynth.privacy.passes`). `nominal_size` and all public
            sizes then count users.
        network: the network that is trained. If it uses a feature map, the network's input vectors
            replace the images. Each vector depends on one record only.
        note: receives the reason if the code of a feature map, a model or a method raises an error
            on some records. Those records then contribute nothing, because a failed step would
            reveal them to the server.
        isolated: whether each pass has only one record (`fedsynth.privacy.passes`).
    """

    _per_client = ("ids", "_budgets", "_parts", "_records", "_units")
    # makes the releases. A trial replaces it to compare the values of records.
    _sums = staticmethod(noisy_sums)

    def __init__(
        self,
        ids: Sequence[int],
        data: ImageData,
        parts: Sequence[Tensor],
        budgets: Sequence[ReleaseBudget[GaussianSumMechanism]],
        *,
        nominal_size: float | None = None,
        users: Tensor | None = None,
        network: nn.Module | None = None,
        note: Note = lambda text: None,
        isolated: bool = False,
    ) -> None:
        self.ids = tuple(ids)
        self.spec = data.spec
        self._isolated = isolated
        self._note = functools.cache(note)  # each line once: a step has many passes
        self._data = data
        self._budgets = budgets
        self._nominal_size = nominal_size
        self._parts = [part.to(data.labels.device) for part in parts]
        self._records = list(map(Tensor.cpu, parts))
        self._labels = data.labels.cpu()
        self._inputs = _inputs(network, data, self._parts, self._note, isolated=isolated)
        self._units = [Units(len(records)) for records in self._records]
        if users is not None:
            users = users.cpu()
            self._units = [Units(len(records), users[records]) for records in self._records]

    def pairs(self) -> ClientClassPairs:
        """Returns all (client, class) pairs.

        The classes that a client has are private, so no pair is left out.
        """
        shape = len(self.ids), self.spec.classes
        return ClientClassPairs(*torch.ones(shape).nonzero(as_tuple=True))

    def plan(self, name: str) -> ReleasePlan:
        """Returns the release plan `name`, for example to read its clip or sampling rate.

        Raises:
            UnplannedReleaseError: this exchange has no plan with this name, or the clients' plans
                differ.
        """
        plan: ReleasePlan = self._budgets[0].plan(name)
        for budget in self._budgets:
            if budget.plan(name) != plan:
                raise UnplannedReleaseError(
                    f"the group's clients have different plans for release {name!r}. Get each "
                    "client's plan with select(position)"
                ).with_code("release.different_plans")
        return plan

    def mechanisms(self, name: str) -> list[GaussianSumMechanism]:
        """Returns the mechanisms of a planned release, one for each client.

        Each mechanism makes the releases of its client.

        Raises:
            UnplannedReleaseError: this exchange has no plan with this name, or its mechanism was
                already taken.
        """
        mechanisms: list[GaussianSumMechanism] = self._take(name)
        for client, mechanism in zip(self.ids, mechanisms, strict=True):
            mechanism.owner = client
        return mechanisms

    def _check_owners(self, mechanisms: Sequence[GaussianSumMechanism]) -> None:
        """Checks that no client's records are used with another client's privacy budget.

        Raises:
            UnplannedReleaseError: a mechanism was charged to a different client.
        """
        for mechanism, client in zip(mechanisms, self.ids, strict=True):
            if mechanism.owner not in (None, client):
                raise UnplannedReleaseError(
                    f"client {client}'s records were passed to client {mechanism.owner}'s "
                    "privacy mechanism. Pass each client's records to its own mechanism"
                ).with_code("release.foreign_mechanism")

    def class_sums(
        self,
        mechanisms: Sequence[GaussianSumMechanism],
        rows: Callable[[Tensor, Tensor], Tensor],
        *,
        start_over_row: float = 4.0,
    ) -> Released:
        """Samples records of every client, and returns a noisy sum of vectors for each client and
        class.

        `rows` computes one vector for each sampled record, and the vectors of each class are added.
        One call is one release of each client's mechanism.

        Args:
            mechanisms: one charged mechanism for each client of the group.
            rows: a function (images [N, C, H, W], index of the (client, class) pair [N] on the CPU)
                -> vectors [N, D]. Each vector may depend only on the image with the same position,
                and on released values. N is the same at every call. The last call is padded with
                black images whose pair index is −1, and their vectors are discarded. One call may
                contain examples of several clients, but each vector is added only to the sum of the
                client that has the example.
            start_over_row: the fixed cost of a call of `rows`, divided by the cost of one more row.
                Together with the public expected number of sampled records, it decides N
                (`fedsynth.privacy.passes`).

        Returns:
            [clients · classes, D]
        """
        self._check_owners(mechanisms)
        length, count = self._pass_size(mechanisms, start_over_row, chunk(self._device))

        def inputs(parts: Parts) -> tuple[Tensor, Tensor]:
            records = torch.cat([self._records[position][part.records] for position, part in parts])
            return self._images(records, length), self._labels[records]

        values = class_values(inputs, rows, self.spec.classes, length, self._note)
        return self._released(self._sums(mechanisms, self._units, count, values))

    def feature_sums(
        self,
        mechanisms: Sequence[GaussianSumMechanism],
        features: FeatureMap,
        rows: FeatureRows,
        embedding: Embedding | None = None,
    ) -> Released:
        """Samples records of every client, and returns a noisy sum of each client's vectors.

        `rows` computes one vector from the features of each sampled record. One call is one release
        of each client's mechanism.

        Args:
            mechanisms: one charged mechanism for each client of the group.
            features: the feature map, which is public. Each record's features are computed once and
                cached with the data.
            rows: a function (features [N, d], labels [N]) -> one vector per record, with the same
                conditions as in `class_sums`. The last call is padded with features of zeros and
                label 0.
            embedding: a public embedding of the features. If it is given, `rows` receives z instead
                of the features.

        Returns:
            [clients, D]
        """
        self._check_owners(mechanisms)
        length, count = self._pass_size(mechanisms, FEATURE_START, FEATURE_PASS)

        def prepare(client: int, samples: list[Sample]) -> Callable[[Parts], Any]:
            (sample,) = samples
            client_records = self._records[
                client
            ]  # a trial replaces the records after each release
            records = client_records[sample.records]
            isolated = self._isolated
            look_up = feature_table(
                self._data, features, records, embedding, self._note, isolated=isolated
            )

            def compute(parts: Parts) -> list[Products]:
                ((_, part),) = parts
                indices = client_records[part.records].to(self._device, non_blocking=True)
                labels = padded(self._data.labels[indices], length)
                products = rows(padded(look_up(indices), length), labels)
                return [products.part(slice(len(indices)))]

            return compute

        released = []
        for client, (units, mechanism) in enumerate(zip(self._units, mechanisms, strict=True)):
            of_client = functools.partial(prepare, client)
            released += self._sums([mechanism], [units], count, of_client)
        return self._released(released)

    @property
    def _device(self) -> torch.device:
        return self._data.labels.device

    def _released(self, sums: Sequence[Released]) -> Released:
        return Released(torch.cat([released.to(self._device) for released in sums]))

    def _pass_size(
        self, mechanisms: Sequence[GaussianSumMechanism], start_over_row: float, limit: int
    ) -> tuple[int, int]:
        """Returns how many records a forward pass has, with and without padding (see `pass_size`).

        The number of records that a release is expected to sample from all clients is public. It is
        None if the clients have no public nominal size.
        """
        expected = None
        if self._nominal_size is not None:
            expected = self._nominal_size * sum(s.sample_rate for s in mechanisms)
        return pass_size(expected, start_over_row, limit, isolated=self._isolated)

    def _images(self, records: Tensor, length: int) -> Tensor:
        """Returns the records' normalised images, padded with black images to [length, C, H, W].

        If the network uses a feature map, returns its input vectors z [length, d] instead, padded
        with zeros.
        """
        indices = records.to(self._device, non_blocking=True)
        if self._inputs is not None:
            return self._inputs(indices, length)
        images = self._data.images.index_select(0, indices)
        return normalise(padded(images, length), self.spec)

    def fit(
        self, mechanisms: Sequence[GaussianSumMechanism], model: nn.Module, settings: DpSgdSettings
    ) -> None:
        """Trains the model by DP-SGD on the data of the group's only client (see `dp_sgd`).

        The model is changed in place. The client takes the number of steps for which `mechanisms`
        was charged.
        """
        self._check_owners(mechanisms)
        (mechanism,), (part,), (units,) = mechanisms, self._parts, self._units

        def records(indices: Tensor) -> tuple[Tensor, Tensor]:
            chosen = part[indices.to(part.device, non_blocking=True)]
            return self._images(chosen, len(chosen)), self._data.labels[chosen].long()

        isolated = self._isolated
        dp_sgd(
            model, records, mechanism, settings, units, self._note, self._sums, isolated=isolated
        )


Group = ExactClientView | PrivateClientView
