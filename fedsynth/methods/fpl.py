"""FPL: local training with cluster prototypes and unbiased prototypes (Huang et al., CVPR 2023).

A prototype is the mean embedding of a class at a client. A round has three steps:

1. Each client trains on CE + L_CPCL + L_UPCR. The cluster-prototype contrastive loss pulls the
   embedding z of an example towards the cluster prototypes c of its class y, and away from those of
   other classes: L_CPCL = −log(Σ_{c of y} exp(sim(z, c)/τ) / Σ_c exp(sim(z, c)/τ)) with the cosine
   similarity sim. The unbiased-prototype consistency L_UPCR is the squared distance of z to the
   unbiased prototype of y.
2. Each client sends its model, and the sums of its embeddings for each class with the class counts.
   Sums divided by counts are the client's prototypes.
3. The server averages the models, weighted by n_k. FINCH clusters the prototypes of each class over
   the clients. The mean of a cluster is a cluster prototype, and the mean of the cluster prototypes
   of a class is its unbiased prototype.

Round 1 has no prototypes, so it is a round of FedAvg. Four points follow the public code or differ
from it:

- FINCH makes a hierarchy of partitions. We use the last one, as the code does.
- L_UPCR is the mean over the coordinates of z, as in the code.
- The embeddings are those of the trained model. The code collects them during the last local epoch,
  while the model changes.
- Examples whose class has no prototype contribute only the cross-entropy, as in the code.

With differential privacy, the embeddings are clipped, and the sums and counts are charged in
addition to DP-SGD. An example's loss depends only on the example and on released prototypes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters, Tensors, public
from fedsynth.core.method import ClientState
from fedsynth.core.uploads import Rule, check_tensor
from fedsynth.errors import RequestRefusedError
from fedsynth.methods.shared.aggregation import AveragingState, average
from fedsynth.methods.shared.class_sums import (
    COUNTS,
    ModelAndSums,
    feature_width,
    sums_plans,
    sums_rules,
    uploads_with_sums,
)
from fedsynth.methods.shared.local import LocalObjective, TrainsLocally
from fedsynth.models.on_features import check_learned_embedding
from fedsynth.privacy.plans import MAIN, Plans
from fedsynth.privacy.row_products import row_product
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.validation import in_range

SUMS = "prototype sums"  # the release plan's name


@dataclass(frozen=True)
class PrototypesDown(ModelParameters):
    """FPL's request to the clients: the model w_t and the cluster prototypes [P, D].

    A vector [P] contains the prototypes' classes, ascending. P is 0 in round 1.
    """

    prototypes: Tensor = public("sent to clients, never uploaded")
    classes: Tensor = public("sent to clients, never uploaded")


@dataclass(frozen=True)
class PrototypeState(AveragingState):
    """The server's state in FPL, with the cluster prototypes [P, D] and their classes [P]."""

    prototypes: Tensor = field(kw_only=True)
    classes: Tensor = field(kw_only=True)


def first_partition(rows_ND: Tensor) -> Tensor:
    """Computes each row's cluster index, by the first partition of FINCH (Sarfraz et al. 2019).

    Each row is linked to its nearest neighbour by cosine similarity. The clusters are the connected
    components, numbered from 0 in the order of their first rows.

    >>> first_partition(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.1], [0.1, 1.0]])).tolist()
    [0, 1, 0, 1]
    """
    count = len(rows_ND)
    unit = F.normalize(rows_ND.double(), dim=1)
    nearest = (unit @ unit.T).fill_diagonal_(-torch.inf).argmax(dim=1).cpu().numpy()
    links = csr_array((np.ones(count), (np.arange(count), nearest)), shape=(count, count))
    clusters = connected_components(links, directed=False)[1]
    return torch.from_numpy(clusters).to(rows_ND.device, torch.int64)


def last_partition(rows_ND: Tensor) -> Tensor:
    """Computes each row's cluster index, by FINCH's coarsest partition with several clusters.

    Each partition links the cluster means of the previous one. If the first partition has a single
    cluster, it is the last.

    >>> angles = torch.tensor([0.0, 0.01, 0.1, 0.11, 2.0, 2.01, 2.1, 2.11])
    >>> rows = torch.stack([angles.cos(), angles.sin()], dim=1)
    >>> first_partition(rows).tolist(), last_partition(rows).tolist()
    ([0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 0, 0, 1, 1, 1, 1])
    """
    clusters = first_partition(rows_ND)
    while True:
        coarser = first_partition(cluster_means(rows_ND, clusters))
        if not coarser.any():  # a single cluster
            return clusters
        clusters = coarser[clusters]


def cluster_means(rows_ND: Tensor, clusters_N: Tensor) -> Tensor:
    """Returns each cluster's mean row, [clusters, D]."""
    members = F.one_hot(clusters_N).to(rows_ND.dtype).T
    return members @ rows_ND / members.sum(dim=1, keepdim=True)


def prototype_losses(
    z_ND: Tensor,
    labels_N: Tensor,
    prototypes_PD: Tensor,
    classes_P: Tensor,
    unbiased_CD: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Computes the two losses L_CPCL [N] and L_UPCR [N] for each example. They are 0 if the class
    of the example has no prototype."""
    same_class = labels_N[:, None] == classes_P
    has_prototype = same_class.any(dim=1)
    s = row_product(F.normalize(z_ND, dim=1), F.normalize(prototypes_PD, dim=1)) / temperature
    # without a prototype, all count as positive: the difference and its gradient are zero
    positive = s.masked_fill(~same_class & has_prototype[:, None], -torch.inf)
    contrastive = s.logsumexp(dim=1) - positive.logsumexp(dim=1)
    distance = (z_ND - unbiased_CD[labels_N]).square().mean(dim=1)
    return contrastive, torch.where(has_prototype, distance, 0.0)


@dataclass(frozen=True)
class FPL(TrainsLocally):
    """FPL: local training that pulls embeddings towards the prototypes of client clusters.

    The following settings come in addition to those of `TrainsLocally`.

    Args:
        contrastive_weight: the weight of L_CPCL, which is 1 in the public code.
        consistency_weight: the weight of L_UPCR, which is 1 in the public code. If both weights are
            0, the method is FedAvg, weighted by n_k.
        temperature: τ, the temperature of L_CPCL. The default is the public code's.
        prototype_clip: L2 bound on an example's embedding in the sums. It is used only with
            differential privacy.
        prototype_noise: noise multiplier of the sums and the class counts, divided by σ. It is used
            only with differential privacy. The default is public and was not tuned.

    >>> from fedsynth import FPL, ModelSettings, RunSettings, simulate
    >>> method, model = FPL(local_epochs=2, batch=32, lr=0.05), ModelSettings(width=16, depth=2)
    >>> result = simulate(RunSettings(method, rounds=2, model=model))
    >>> result.accuracy > 0.4
    True
    """

    name = "fpl"
    summary = "local training pulls embeddings towards clustered and averaged class prototypes"
    reference = "Huang et al. 2023, Rethinking Federated Learning with Domain Shift, CVPR 2023"
    request = PrototypesDown
    upload = ModelAndSums
    state = PrototypeState
    masks_refusal = "prototypes are the mean features of the images of each class"
    robust_refusal = (
        "the server clusters the clients' prototypes, which a robust rule would replace by one"
    )

    contrastive_weight: float = in_range(1.0, 0)
    consistency_weight: float = in_range(1.0, 0)
    temperature: float = in_range(0.02, 1e-6)
    prototype_clip: float = in_range(5.0, 1e-9)
    prototype_noise: float = in_range(5.0, 1e-3)

    def initial_state(self, parameters: Tensors) -> PrototypeState:
        none = parameters["classifier.weight"][:0]
        classes = torch.zeros(0, dtype=torch.int64, device=none.device)
        return PrototypeState(parameters, prototypes=none, classes=classes)

    def check_model(self, model: nn.Module) -> None:
        check_learned_embedding(self.name, model)

    def check_request(self, message: PrototypesDown, context: RoundContext) -> None:
        count = len(message.prototypes)
        width = feature_width(context, logits=False)
        check_tensor("prototypes", message.prototypes, (count, width), torch.float32)
        check_tensor("classes", message.classes, (count,), torch.int64)
        if not ((message.classes >= 0) & (message.classes < context.spec.classes)).all():
            raise RequestRefusedError(
                "field classes of the server's message must contain values from 0 to "
                f"{context.spec.classes - 1}, got {message.classes.tolist()}"
            ).with_code("request.classes")

    def later_request(self, message: PrototypesDown, context: RoundContext) -> PrototypesDown:
        rows = message.parameters["classifier.weight"]  # one public row for each class
        return replace(message, prototypes=rows, classes=torch.arange(len(rows)).to(rows.device))

    def task(
        self, client: int, message: PrototypesDown, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        make_upload = uploads_with_sums(SUMS, context)
        if len(message.prototypes) == 0 or not (self.contrastive_weight or self.consistency_weight):
            return LocalObjective(make_upload=make_upload)

        prototypes, classes = message.prototypes, message.classes
        labels = torch.arange(context.spec.classes, device=classes.device)
        members = (labels[:, None] == classes).float()
        unbiased = members @ prototypes / members.sum(dim=1, keepdim=True).clamp_min(1)

        def loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z = network.embed(x)  # type: ignore[operator]
            logits = network.classifier(z)  # type: ignore[operator]
            cross_entropy = F.cross_entropy(logits, y, reduction="none")
            contrastive, distance = prototype_losses(
                z, y, prototypes, classes, unbiased, self.temperature
            )
            regulariser = self.contrastive_weight * contrastive + self.consistency_weight * distance
            return cross_entropy + regulariser

        return LocalObjective(loss=loss, make_upload=make_upload)

    def release_plans(self, privacy: PrivacySettings, context: RoundContext) -> Plans:
        """Plans a round's private releases: DP-SGD, embedding sums and class counts."""
        return *super().release_plans(privacy, context), *sums_plans(
            SUMS,
            "embeddings (prototypes)",
            "embedding z of each example",
            clip=self.prototype_clip,
            width=feature_width(context, logits=False),
            classes=context.spec.classes,
            noise=self.prototype_noise,
            exchange=MAIN,
        )

    def upload_rules(self, exchange: str, client: int, context: RoundContext) -> dict[str, Rule]:
        shape = context.spec.classes, feature_width(context, logits=False)
        rules = super().upload_rules(exchange, client, context)
        return rules | sums_rules(client, shape, SUMS, context)

    def combine(
        self, state: PrototypeState, uploads: Mapping[int, ModelAndSums], context: RoundContext
    ) -> PrototypeState:
        sums, counts = (
            torch.stack([getattr(upload, name) for upload in uploads.values()])
            for name in ("sums", "counts")
        )
        floor = max(1.0, 2 * context.noise.get(COUNTS, 0.0))
        means = sums / counts.clamp_min(floor)[..., None]
        prototypes: list[Tensor] = []
        classes: list[int] = []
        for label, has_class in enumerate((counts >= floor).T):
            if has_class.any():
                rows = means[has_class, label]
                of_class = cluster_means(rows, last_partition(rows))
                prototypes.append(of_class)
                classes += [label] * len(of_class)
        return replace(
            state,
            parameters=average(uploads),
            prototypes=torch.cat(prototypes) if prototypes else state.prototypes[:0],
            classes=torch.tensor(classes, dtype=torch.int64, device=sums.device),
        )
