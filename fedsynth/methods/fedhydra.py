"""FedHydra: one-shot distillation in which each client's model is asked about what it knows (stratified aggregation).

Server: model stratification measures how well each client's model can teach each class, U [C, m] (Eqs. 2 and 3); its rows and columns,
normalised, weigh clients for a class and classes within a client (Eqs. 4 to 7). A generator is trained against that weighted ensemble P
(Eqs. 8 to 16), and the student by KL(P, F_g) + β·CE(F_g, argmax P) (Eqs. 17 to 19). U is kept, and goes into the run folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.method import RoundContext, ServerState, check_choice, check_ranges
from fedsynth.methods.dense import DistilsWithoutData
from fedsynth.synthesizer.ensembles import (
    Stratification,
    average_of_logits,
    share_of_classes,
    share_of_clients,
    stratified_aggregation,
    stratified_probabilities,
)


@dataclass(frozen=True)
class FedHydra(DistilsWithoutData):
    """Settings: `DistilsWithoutData` with the paper's values, and

    Args:
        aggregation: "stratified" (SA), or "average" (AE), which is DENSE's ensemble in FedHydra's training. "clients" weighs clients for the
            asked class (Ū_r) and leaves a client's logits as they are: not in the paper, to see what weighing classes within a client (Ū_c)
            does.
        outputs: what SA weighs of a client: its "logits", the paper's word, or its "probabilities": not in the paper's words, but ahead
            of the logits in 23 of 24 runs, and of DENSE and FedAvg in the mean at Dir(0.1) (docs/results.md).
        stratification_steps, stratification_batch, stratification_lr, stratification_floor: see `Stratification`.
    """

    name: ClassVar[str] = "fedhydra"
    summary: ClassVar[str] = (
        "one-shot: clients' logits weighted by what each can teach, distilled on generated images"
    )
    reference: ClassVar[str] = (
        "FedHydra (one-shot, stratified aggregation), Eqs. 2 to 19 of its paper"
    )

    aggregation: str = "stratified"
    outputs: str = "logits"
    stratification_steps: int = 30
    stratification_batch: int = 32
    stratification_lr: float = 1e-3
    stratification_floor: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("aggregation", self.aggregation, ("stratified", "clients", "average"))
        check_choice("outputs", self.outputs, ("logits", "probabilities"))
        check_ranges(
            self,
            stratification_steps=(2, inf),
            stratification_batch=(2, inf),
            stratification_lr=(0, inf),
        )
        check_ranges(self, stratification_floor=(1e-12, inf))

    def distil(
        self,
        models: Sequence[nn.Module],
        student: nn.Module,
        state: ServerState,
        context: RoundContext,
    ) -> ServerState:
        for model in models:
            model.requires_grad_(False).eval()
        stratification = Stratification(
            self.stratification_steps,
            self.stratification_batch,
            self.stratification_lr,
            self.latent,
            self.generator_width,
            self.stratification_floor,
        )
        u = stratification.measure(models, context.spec, context.seed, context.device)
        by_class, by_client = share_of_clients(u), share_of_classes(u)
        inside = by_client if self.aggregation == "stratified" else torch.ones_like(by_client)
        if self.aggregation == "average":
            self.fit_student(models, student, average_of_logits, context)
        else:
            weigh = stratified_aggregation if self.outputs == "logits" else stratified_probabilities
            self.fit_student(
                models,
                student,
                lambda logits, labels: weigh(logits, labels, by_class, inside),
                context,
            )
        return ServerState(
            {}, {"stratification": u, "clients_for_class": by_class, "classes_of_client": by_client}
        )

    def artefacts(self, state: ServerState) -> Mapping[str, Tensor]:
        return state.kept
