"""REAL: clients send random real images, as a baseline for FedDM.

It is the control experiment of FedDM's Sec. 4.5, which shows how much better condensed images are.
The method protects no data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from fedsynth.core.client import ExactClientView
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import unprotected
from fedsynth.core.method import ClientStates, Request, Results
from fedsynth.methods.shared.condensing import TrainsInBall
from fedsynth.synthesizer.condensation import sets
from fedsynth.validation import in_range


@dataclass(frozen=True)
class RealImages(sets.SyntheticSet):
    """A client's upload in REAL: some real images, without any protection."""

    images: Tensor = unprotected()
    labels: Tensor = unprotected()


@dataclass(frozen=True)
class Real(TrainsInBall):
    """REAL: the server trains the model on clients' random real images.

    The following settings come in addition to those of `TrainsInBall`.

    Args:
        min_examples: smallest number of examples with which a client sends a class. With the same
            seed, FedDM starts from the same images. They are the same in every round.

    >>> from fedsynth import ModelSettings, PartitionSettings, Real, RunSettings, simulate
    >>> method, model = Real(ipc=5, server_epochs=50), ModelSettings(width=16, depth=2)
    >>> iid = PartitionSettings("iid", clients=2)
    >>> result = simulate(RunSettings(method, rounds=1, model=model, partition=iid))
    >>> list(result.uploads[0].images.shape)  # five of each class, as they are
    [50, 1, 8, 8]
    >>> result.accuracy > 0.7
    True
    """

    name = "real"
    summary = "clients send random real images without privacy, as FedDM's control"
    reference = "Xiong et al. 2023, FedDM, Sec. 4.5, arXiv 2207.09653"
    upload = RealImages
    refusal = "the clients send real images, which no mechanism protects"

    min_examples: int = in_range(10, 0)

    def client_step(  # type: ignore[override]
        self,
        message: Request,
        clients: ExactClientView,
        states: ClientStates,
        context: RoundContext,
    ) -> Results:
        pairs = clients.pairs(self.min_examples)
        images = sets.real_start(clients, pairs, self.ipc, context.seed)
        sampled = sets.split_uploads(images, pairs, len(clients.ids))
        return [(RealImages(S_k.images, S_k.labels), {}) for S_k in sampled]

    def server_step(
        self, state: ServerState, uploads: Mapping[int, RealImages], context: RoundContext
    ) -> ServerState:
        w = context.load(state.parameters)
        sets.train_on_union(w, uploads, self.union_sgd(), context)
        return replace(state, parameters=w.state_dict())
