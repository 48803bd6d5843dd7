"""FedAF: aggregation-free federated learning by collaborative condensation and knowledge matching (arXiv 2404.18962).

Client, every round: make class-mean logits V_k and soft labels R_k of its data under w_r (Eqs. 5, 12), and condense: distribution matching in
feature space alone (Eq. 4) plus λ_loc times the sliced Wasserstein distance of the synthetic images' mean logits to the global V (Eq. 10),
each step with a re-sampled network (Eq. 17). It sends pixels as uint8, V_k and R_k. Server: average V and R over the clients that have a class
(Eqs. 8, 12), and train on the union of all sets with cross-entropy plus λ_glob times the knowledge-matching loss (Eqs. 13-15).

V is averaged from a round's uploads and used by the clients in the next (App. C counts one upload of S, V and R a round): round 1 has no
collaborative term. `knowledge_from="first-phase"` exchanges V at the start of each round instead.

With differential privacy the images go through mechanism `residual`, and V comes from one noisy sum of clipped logits and noisy counts; R is
computed from the released V. Batch norm is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.client import ClientGroup, OpenClients, PrivateClients, Segments
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, released
from fedsynth.core.method import Memory, Presets, PrivatePlan
from fedsynth.core.state import ServerState
from fedsynth.core.validation import check_choices, check_embedding, check_ranges
from fedsynth.data.images import denormalise
from fedsynth.methods.shared.class_sums import class_sums, sums_plans
from fedsynth.methods.shared.union import TrainsOnUnion
from fedsynth.models.batch_norm import has_batch_norm, with_grouped_statistics
from fedsynth.privacy.dpsgd import refuse_batch_norm
from fedsynth.privacy.plans import FIRST, MAIN
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation.distributions import (
    MATCHINGS,
    DistributionMatcher,
    refuse_private,
)
from fedsynth.synthesizer.condensation.knowledge import (
    DISTANCES,
    REDUCTIONS,
    KnowledgeMatcher,
    average_over_holders,
    class_means,
    knowledge_matching,
    soft_labels,
    unit_directions,
)
from fedsynth.synthesizer.condensation.loop import client_bytes, condense
from fedsynth.synthesizer.condensation.matchers import ExactMatcher, Matcher, ResidualMatcher
from fedsynth.synthesizer.condensation.real_batches import SMALL_CLASS, BatchIndices
from fedsynth.synthesizer.condensation.resampling import ResampledNetworks
from fedsynth.synthesizer.condensation.sets import (
    SyntheticSet,
    averaged_start,
    noise_start,
    split_uploads,
    train_on_union,
    with_kept_images,
)

IMAGES, LOGITS = "images", "logit sums"
"""The names of what a round releases, beside the class counts."""


@dataclass(frozen=True)
class GlobalKnowledge(ModelParameters):
    """Down: w_r, and the averaged logits V [C, C] with the classes that they exist for [C] (none in round 1)."""

    logits: Tensor = released()
    known: Tensor = released()


@dataclass(frozen=True)
class CondensedSet(SyntheticSet):
    """Up: uint8 pixels and labels, V_k and R_k [C, C] (float32), and which of their rows exist [C] (bool); those are empty where V went up in
    a first phase, as R follows from it."""

    logits: Tensor = released()
    soft: Tensor = released()
    present: Tensor = released()


@dataclass(frozen=True)
class LocalKnowledge(Message):
    """Up, in a first phase: V_k [C, C] and which of its rows exist [C] (bool)."""

    logits: Tensor = released()
    present: Tensor = released()


@dataclass(frozen=True)
class KnowledgeState(ServerState):
    """The state, with V [C, C] and the classes that it exists for, bool [C].

    Args:
        soft, present: within a round, R [C, C] and its classes [C] of a first exchange.
    """

    logits: Tensor | None = None
    known: Tensor | None = None
    soft: Tensor | None = None
    present: Tensor | None = None


@dataclass(frozen=True)
class FedAF(TrainsOnUnion):
    """Settings, with the paper's values; where it is silent, the reason.

    Args:
        server_*: 500 epochs, batch 256, lr 1e-3, momentum 0.9 (Sec. 5); weight decay none (not mentioned).
        ipc, iterations, batch, image_lr, image_momentum: condensation; image_lr is 1.0 on CIFAR-10, 0.1 on CIFAR-100, 0.2 on Fashion-MNIST.
        gamma: γ of model re-sampling (Eq. 17).
        local_weight, global_weight: λ_loc and λ_glob; 0 leaves the collaborative term or knowledge matching out (the ablations).
            (1e-4, 1e-2) on CIFAR, (1e-3, 2.0) on Fashion-MNIST, (0.01, 0.1) on DomainNet.
        temperature: τ of the soft labels; the paper gives none: 1 is plain softmax. In short runs with λ_glob = 2 larger ones do less harm
            (docs/results.md).
        distance: of Eq. 10, see `sliced_wasserstein`; "point" because u and v are one vector per class. directions: of "rows".
        knowledge_from: when V is made: averaged from the "previous-round"'s uploads (App. C counts one upload of S, V and R a round; then
            round 1 has no collaborative term), or in a "first-phase" of the same round, under w_r: one more exchange.
        server_matching: the t_c of Eq. 13 over the "minibatch"'s images of the class, or over the "union" of all
            sets, which is literal and costs a pass over S in every step, or that in the first step of each
            "epoch" alone.
        matching_reduction: "mean" or "sum" of Eq. 15 over classes, see `knowledge_matching`.
        matching_norm: batch norm in the pass that t_c comes from: by the "batch", as in training, or by the
            "running" statistics, as in the pass that R came from; it matters for networks with batch norm.
        matching, blur: "mean" is Eq. 4; see FedDM.
        min_examples: a client condenses a class with at least so many examples; the paper names no such rule, so every class that is there.
        start_average: random real images that a start image is the mean of; the paper says "average", and no number.
        restart: start anew each round (False: go on from the last round's images, as no initialisation is said to recur).
        small_class, batch_norm: as in FedDM.
        logit_clip, knowledge_noise: with differential privacy: L2 bound of an example's logits, and the noise multiplier of their sums and of
            the counts over that of the images' releases. A public choice, not tuned.
    """

    name: ClassVar[str] = "fedaf"
    summary: ClassVar[str] = (
        "clients condense towards shared class-mean logits, the server matches their soft labels"
    )
    reference: ClassVar[str] = "Wang et al. 2024, FedAF, arXiv 2404.18962"
    upload: ClassVar[type[Message]] = CondensedSet
    downlink: ClassVar[type[Message]] = GlobalKnowledge
    first_downlink: ClassVar[type[Message] | None] = ModelParameters
    first_upload: ClassVar[type[Message] | None] = LocalKnowledge
    state: ClassVar[type[ServerState]] = KnowledgeState
    protects: ClassVar[tuple[str, ...]] = ("residual",)
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
    iterations: int = 1000
    image_lr: float = 1.0
    image_momentum: float = 0.9
    batch: int = 256
    gamma: float = 0.9
    local_weight: float = 1e-4
    global_weight: float = 1e-2
    temperature: float = 1.0
    distance: str = "point"
    directions: int = 50
    min_examples: int = 1
    start_average: int = 10
    restart: bool = False
    small_class: str = "all"
    batch_norm: str = "client"
    matching: str = "mean"
    blur: float = 0.25
    knowledge_from: str = "previous-round"
    server_matching: str = "minibatch"
    matching_reduction: str = "mean"
    matching_norm: str = "batch"
    logit_clip: float = 5.0
    knowledge_noise: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(
            self,
            ipc=(1, inf),
            iterations=(1, inf),
            batch=(1, inf),
            image_lr=(0, inf),
            image_momentum=(0, 1),
        )
        check_ranges(
            self,
            gamma=(0, 1),
            local_weight=(0, inf),
            global_weight=(0, inf),
            temperature=(1e-6, inf),
            directions=(1, inf),
        )
        check_ranges(
            self,
            min_examples=(0, inf),
            start_average=(1, inf),
            logit_clip=(1e-9, inf),
            knowledge_noise=(1e-3, inf),
        )
        check_choices(
            self,
            distance=DISTANCES,
            small_class=SMALL_CLASS,
            batch_norm=("client", "class"),
            matching=MATCHINGS,
            knowledge_from=("previous-round", "first-phase"),
            server_matching=("minibatch", "union", "epoch"),
            matching_reduction=REDUCTIONS,
            matching_norm=("batch", "running"),
        )
        check_ranges(self, blur=(1e-6, inf))

    def client_bytes(self, context: RoundContext) -> int:
        return client_bytes(context, self.ipc, self.iterations, self.batch)

    def check_model(self, model: nn.Module) -> None:
        check_embedding(self.name, model)

    def first_request(self, state: KnowledgeState, context: RoundContext) -> Message | None:
        return (
            ModelParameters(state.parameters, 1.0) if self.knowledge_from == "first-phase" else None
        )

    def first_step(
        self,
        message: ModelParameters,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> list[tuple[Message, Memory]]:
        model = context.load(message.parameters).requires_grad_(False).eval()
        logits, present = self._local_knowledge(model, clients, context)
        return [
            (LocalKnowledge(v, p), {**memory, "logits": v, "present": p})
            for v, p, memory in zip(logits, present, memories, strict=True)
        ]

    def first_aggregate(
        self, state: KnowledgeState, replies: Mapping[int, LocalKnowledge], context: RoundContext
    ) -> KnowledgeState:
        mine = list(replies.values())
        present = [a.present for a in mine]
        logits, known = average_over_holders([a.logits for a in mine], present)
        soft, _ = average_over_holders(
            [soft_labels(a.logits, self.temperature) for a in mine], present
        )
        return replace(_remembered(state, logits, known), soft=soft, present=known)

    def broadcast(self, state: KnowledgeState, context: RoundContext) -> Message:
        classes, device = context.spec.classes, context.device
        logits = state.logits
        if logits is None:
            logits = torch.zeros(classes, classes, device=device)
        known = state.known
        if known is None:
            known = torch.zeros(classes, dtype=torch.bool, device=device)
        return GlobalKnowledge(state.parameters, 1.0, logits, known)

    def client_step(
        self,
        message: GlobalKnowledge,
        clients: ClientGroup,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> list[tuple[Message, Memory]]:
        model = context.load(message.parameters).requires_grad_(False).eval()
        segments = (
            clients.segments()
            if isinstance(clients, PrivateClients)
            else clients.segments(self.min_examples)
        )
        matcher = self._matcher(clients, segments, context)
        if all("logits" in memory for memory in memories):  # made, and charged, in the first phase
            logits, present = (
                torch.stack([memory[name] for memory in memories]) for name in ("logits", "present")
            )
        else:
            logits, present = self._local_knowledge(model, clients, context)
        batch_norm = has_batch_norm(model)
        networks = ResampledNetworks(
            with_grouped_statistics(model) if batch_norm else model,
            context.architecture,
            self.gamma,
            seed=context.seed,
            round=context.round,
            device=context.device,
        )
        groups = segments.position if self.batch_norm == "client" else torch.arange(len(segments))
        images = condense(
            self._start(clients, segments, memories, context),
            networks.draw,
            self._collaborative(matcher, message, segments, context),
            steps=self.iterations,
            learning_rate=self.image_lr,
            momentum=self.image_momentum,
            precision=context.precision,
            statistics_S=groups.to(context.device) if batch_norm else None,
            memory_bytes=context.memory_bytes // 2,
            compiled=context.compiled and isinstance(clients, OpenClients),
            report=lambda done: context.report("condense", done, self.iterations),
        )
        results: list[tuple[Message, Memory]] = []
        for position, upload in enumerate(split_uploads(images, segments, len(clients.ids))):
            v, there = logits[position], present[position]
            if self.knowledge_from == "first-phase":  # the server has V, and makes R of it
                v, there = v[:0], there[:0]
            sent = CondensedSet(
                denormalise(upload.images, context.spec),
                upload.labels,
                v,
                soft_labels(v, self.temperature),
                there,
            )
            results.append((sent, {"images": upload.images}))
        return results

    def server_step(
        self, state: KnowledgeState, uploads: Mapping[int, CondensedSet], context: RoundContext
    ) -> KnowledgeState:
        sets = list(uploads.values())
        made = state
        if state.soft is not None and state.present is not None:  # made in the first exchange
            soft, known = state.soft, state.present
        else:
            present = [u.present for u in sets]
            logits, known = average_over_holders([u.logits for u in sets], present)
            soft, _ = average_over_holders([u.soft for u in sets], present)
            made = _remembered(state, logits, known)
        model = context.load(state.parameters)
        self._train_server(model, uploads, soft, known, context)
        return replace(made, parameters=model.state_dict(), soft=None, present=None)

    def _train_server(
        self,
        model: nn.Module,
        uploads: Mapping[int, CondensedSet],
        soft: Tensor,
        known: Tensor,
        context: RoundContext,
    ) -> None:
        """Eqs. 13 to 15: trains the global model in place, with R as `soft` for the classes `known`."""
        classes = context.spec.classes

        def matched(logits_NC: Tensor, labels_N: Tensor) -> Tensor:
            means, there = class_means(logits_NC, labels_N, classes)
            return self.global_weight * knowledge_matching(
                means, soft, there & known, self.temperature, self.matching_reduction
            )

        def answers(network: nn.Module, images: Tensor) -> Tensor:
            """The logits that T is made of."""
            network.train(self.matching_norm == "batch")
            logits: Tensor = network(images)
            network.train()
            return logits

        def on_minibatch(network: nn.Module, images: Tensor, labels_N: Tensor) -> Tensor:
            logits = network(images)
            same = logits if self.matching_norm == "batch" else answers(network, images)
            return nn.functional.cross_entropy(logits, labels_N) + matched(same, labels_N)

        def on_all(network: nn.Module, images: Tensor, labels_N: Tensor) -> Tensor:
            return matched(answers(network, images), labels_N)

        sgd = self.union_sgd()
        if self.global_weight == 0:
            train_on_union(model, uploads, sgd, context)
        elif self.server_matching == "minibatch":
            train_on_union(model, uploads, sgd, context, on_minibatch)
        else:
            once = self.server_matching == "epoch"
            train_on_union(model, uploads, sgd, context, on_all=on_all, once_an_epoch=once)

    def private_plans(
        self, privacy: PrivacySettings, context: RoundContext
    ) -> tuple[PrivatePlan, ...]:
        """The images' T releases, the sums of logits, and the counts."""
        refuse_batch_norm(context.architecture)
        refuse_private(self.matching)
        classifier: Any = context.architecture.classifier
        width, classes = classifier.in_features, context.spec.classes
        images = PrivatePlan(
            name=IMAGES,
            quantity="synthetic images",
            mechanism="residual",
            clipped="residual h(S) − h(x) of each example's embedding",
            clip=privacy.clip or 0.25 * sqrt(width),
            sample_rate=privacy.sample_rate
            or min(1.0, self.batch * classes / context.nominal_size),
            steps=self.iterations,
            dimension=classes * width,
            groups=classes,
        )
        return images, *sums_plans(
            LOGITS,
            "logits (V and R)",
            "logits z(x) of each example",
            clip=self.logit_clip,
            width=classes,
            classes=classes,
            noise=self.knowledge_noise,
            phase=FIRST if self.knowledge_from == "first-phase" else MAIN,
        )

    def _matcher(self, clients: ClientGroup, segments: Segments, context: RoundContext) -> Matcher:
        """Distribution matching of embeddings alone (Eq. 4)."""
        columns: int = context.architecture.classifier.in_features  # type: ignore[assignment,union-attr]
        if isinstance(clients, OpenClients):
            batches = BatchIndices(
                clients,
                segments,
                self.batch,
                self.iterations,
                small_class=self.small_class,
                seed=context.seed,
                round=context.round,
            )
            exact = ExactMatcher(clients, batches, columns)
            return (
                exact
                if self.matching == "mean"
                else DistributionMatcher(exact, self.matching, self.blur, columns)
            )
        rate = clients.plan(IMAGES).sample_rate
        divisor = rate * context.nominal_size / context.spec.classes
        return ResidualMatcher(clients, clients.series(IMAGES), divisor, columns)

    def _collaborative(
        self, matcher: Matcher, message: GlobalKnowledge, segments: Segments, context: RoundContext
    ) -> Matcher:
        if self.local_weight == 0 or not bool(message.known.any()):
            return matcher
        label, generator = segments.label.to(context.device), torch_generator(
            context.seed, "slicing directions", context.round, device=context.device
        )  # fmt: skip
        return KnowledgeMatcher(
            matcher,
            message.logits[label],
            segments.position.to(context.device),
            message.known[label],
            weight=self.local_weight,
            logit_weight=1.0,
            distance=self.distance,
            directions=lambda: unit_directions(self.directions, context.spec.classes, generator),
        )

    def _local_knowledge(
        self, model: nn.Module, clients: ClientGroup, context: RoundContext
    ) -> tuple[Tensor, Tensor]:
        """(V_k [K, C, C], which rows exist [K, C]) of every client of the group (Eq. 5)."""
        classes = context.spec.classes
        means, there = [], []
        for position in range(len(clients.ids)):
            made = class_sums(clients, position, model, classes, LOGITS, context)
            # a noisy count may be anything: below two deviations a class counts as absent
            floor = max(1.0, self.min_examples, 2 * made.deviation) if made.deviation else 1.0
            means.append(made.sums / made.counts.clamp_min(floor)[:, None])
            there.append(made.counts >= floor)
        return torch.stack(means), torch.stack(there)

    def _start(
        self,
        clients: ClientGroup,
        segments: Segments,
        memories: Sequence[Memory],
        context: RoundContext,
    ) -> Tensor:
        kept = [{} if self.restart else memory for memory in memories]
        return with_kept_images(
            lambda: self._fresh_start(clients, segments, context), segments, kept
        )

    def _fresh_start(
        self, clients: ClientGroup, segments: Segments, context: RoundContext
    ) -> Tensor:
        if isinstance(clients, PrivateClients):
            return noise_start(
                clients.ids, segments, self.ipc, clients.spec.image_shape, context.seed
            ).to(context.device)
        return averaged_start(clients, segments, self.ipc, self.start_average, context.seed)


def _remembered(state: KnowledgeState, logits: Tensor, known: Tensor) -> KnowledgeState:
    """The state with V, with the rows of an earlier round for classes that none of this round's clients has (partial participation)."""
    if state.logits is None or state.known is None:
        return replace(state, logits=logits, known=known)
    return replace(
        state,
        logits=torch.where(known[:, None], logits, state.logits),
        known=known | state.known,
    )
