"""FedAF: aggregation-free learning by condensation and knowledge matching (arXiv 2404.18962).

Client, every round: make class-mean logits V_k and soft labels R_k of its data under w_r (Eqs. 5,
12), and condense: distribution matching in feature space alone (Eq. 4) plus λ_loc times the sliced
Wasserstein distance of the synthetic images' mean logits to the global V (Eq. 10), each step with a
re-sampled network (Eq. 17). It sends pixels as uint8, V_k and R_k. Server: average V and R over the
clients that have a class (Eqs. 8, 12), and train on the union of all sets with cross-entropy plus
λ_glob times the knowledge-matching loss (Eqs. 13-15).

V is averaged from a round's uploads and used by the clients in the next (App. C counts one upload
of S, V and R a round): round 1 has no collaborative term. `knowledge_from="first-phase"` exchanges
V at the start of each round instead.

With differential privacy the images go through mechanism `residual`, and V comes from one noisy sum
of clipped logits and noisy counts; R is computed from the released V. Batch norm is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import ClassVar

from torch import Tensor, nn

from fedsynth.core.client import OpenClients, Segments
from fedsynth.core.context import RoundContext
from fedsynth.core.method import Presets
from fedsynth.methods.shared.knowledge import (
    CondensedSet,
    GlobalKnowledge,
    KnowledgeState,
    SharesKnowledge,
)
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation.knowledge import (
    DISTANCES,
    REDUCTIONS,
    KnowledgeMatcher,
    KnowledgeTerm,
    unit_directions,
)
from fedsynth.synthesizer.condensation.matchers import Matcher
from fedsynth.synthesizer.condensation.networks import FeatureMaps, ResampledNetworks
from fedsynth.synthesizer.condensation.sets import averaged_start, train_on_union
from fedsynth.validation import check_choices, check_ranges


@dataclass(frozen=True)
class FedAF(SharesKnowledge):
    """Settings, with the paper's values; where it is silent, the reason. What is not named here is
    `Condenses`'s, `SharesKnowledge`'s or `TrainsOnUnion`'s: 500 server epochs, batch 256 and
    momentum 0.9 are the paper's (Sec. 5).

    Args:
        server_lr: 1e-3 (Sec. 5).
        server_weight_decay: none (not mentioned).
        ipc: images per class.
        image_momentum: of the images' gradient steps.
        image_lr: 1.0 on CIFAR-10, 0.1 on CIFAR-100, 0.2 on Fashion-MNIST.
        matching: "mean" is Eq. 4.
        min_examples: the paper names no such rule, so every class that is there.
        start_average: the paper says "average", and no number.
        restart: False, as no initialisation is said to recur.
        gamma: γ of model re-sampling (Eq. 17).
        local_weight: λ_loc; 0 leaves the collaborative term out (an ablation). 1e-4 on CIFAR, 1e-3
            on Fashion-MNIST, 0.01 on DomainNet.
        global_weight: λ_glob; 0 leaves knowledge matching out (an ablation). 1e-2 on CIFAR, 2.0 on
            Fashion-MNIST, 0.1 on DomainNet.
        distance: of Eq. 10, see `sliced_wasserstein`; "point" because u and v are one vector per
            class.
        directions: of distance "rows".
        server_matching: the t_c of Eq. 13 over the "minibatch"'s images of the class, or over the
            "union" of all sets, which is literal and costs a pass over S in every step, or that in
            the first step of each "epoch" alone.
        matching_reduction: "mean" or "sum" of Eq. 15 over classes, see `knowledge_matching`.
        matching_norm: batch norm in the pass that t_c comes from: by the "batch", as in training,
            or by the "running" statistics, as in the pass that R came from; it matters for networks
            with batch norm.

    >>> from fedsynth import FedAF, resolve, simulate
    >>> run, model = {"method": "fedaf", "rounds": 2}, {"width": 16}
    >>> quick = {"ipc": 5, "iterations": 5, "server_lr": 0.05}
    >>> result = simulate(resolve({"run": run, "model": model, "method": quick}))
    >>> sent = result.uploads[0]
    >>> list(sent.logits.shape), list(sent.soft.shape)  # a row of class means for each class
    ([10, 10], [10, 10])
    >>> result.accuracy > 0.6
    True
    """

    name: ClassVar[str] = "fedaf"
    summary: ClassVar[str] = (
        "clients condense towards shared class-mean logits, the server matches their soft labels"
    )
    reference: ClassVar[str] = "Wang et al. 2024, FedAF, arXiv 2404.18962"
    matches_logits: ClassVar[bool] = False
    presets: ClassVar[Presets] = {
        "digits": {
            "ipc": 10,
            "iterations": 10,
            "image_lr": 5.0,
            "image_momentum": 0.0,
            "server_lr": 0.01,
        }
    }

    server_lr: float = 1e-3
    server_weight_decay: float = 0.0
    ipc: int = 50
    image_momentum: float = 0.9
    min_examples: int = 1
    start_average: int = 10
    gamma: float = 0.9
    local_weight: float = 1e-4
    global_weight: float = 1e-2
    distance: str = "point"
    directions: int = 50
    server_matching: str = "minibatch"
    matching_reduction: str = "mean"
    matching_norm: str = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, gamma=(0, 1), local_weight=(0, inf), global_weight=(0, inf))
        check_ranges(self, directions=(1, inf))
        check_choices(
            self,
            distance=DISTANCES,
            server_matching=("minibatch", "union", "epoch"),
            matching_reduction=REDUCTIONS,
            matching_norm=("batch", "running"),
        )

    def open_start(self, clients: OpenClients, segments: Segments, context: RoundContext) -> Tensor:
        return averaged_start(clients, segments, self.ipc, self.start_average, context.seed)

    def feature_maps(
        self, model: nn.Module, segments: Segments, context: RoundContext, period: int | None
    ) -> FeatureMaps:
        networks = ResampledNetworks(
            model,
            context.architecture,
            self.gamma,
            seed=context.seed,
            round=context.round,
            device=context.device,
            period=period,
        )
        return FeatureMaps(networks.draw)

    def objective(
        self, matcher: Matcher, message: GlobalKnowledge, segments: Segments, context: RoundContext
    ) -> Matcher:
        """Distribution matching of embeddings (Eq. 4), and the collaborative term (Eq. 10)."""
        if self.local_weight == 0 or not bool(message.known.any()):
            return matcher
        label = segments.label.to(context.device)
        generator = torch_generator(
            context.seed, "slicing directions", context.round, device=context.device
        )
        return KnowledgeMatcher(
            matcher,
            message.logits[label],
            segments.position.to(context.device),
            message.known[label],
            weight=self.local_weight,
            logit_weight=1.0,
            distance=self.distance,
            directions=partial(unit_directions, self.directions, context.spec.classes, generator),
        )

    def server_step(
        self, state: KnowledgeState, uploads: Mapping[int, CondensedSet], context: RoundContext
    ) -> KnowledgeState:
        state, soft, known = self.averaged(state, uploads)
        model = context.load(state.parameters)
        self._train_server(model, uploads, soft, known, context)
        return replace(state, parameters=model.state_dict())

    def _train_server(
        self,
        model: nn.Module,
        uploads: Mapping[int, CondensedSet],
        soft: Tensor,
        known: Tensor,
        context: RoundContext,
    ) -> None:
        """Eqs. 13 to 15: trains the model in place, with R as `soft` for the classes `known`."""
        sgd = self.union_sgd()
        term = KnowledgeTerm(
            soft,
            known,
            self.global_weight,
            self.temperature,
            self.matching_reduction,
            running=self.matching_norm == "running",
            precision=context.precision,
        )
        if self.global_weight == 0:
            train_on_union(model, uploads, sgd, context)
        elif self.server_matching == "minibatch":
            train_on_union(model, uploads, sgd, context, term.with_cross_entropy)
        else:
            once = self.server_matching == "epoch"
            train_on_union(model, uploads, sgd, context, on_all=term, once_an_epoch=once)
