"""FedHydra: one-shot distillation in which each client's model is weighted by the classes that it
knows (stratified aggregation; Bai et al., A Unified Solution to Diverse Heterogeneities in One-shot
Federated Learning).

Client (Algorithm 1, lines 4 to 7): trains the server's initial model, or its own architecture's, by
SGD on the cross-entropy of its data, as in FedAvg, and uploads it once. It computes nothing else.

Server (Algorithm 1): model stratification measures how well each client's model can teach each
class, U [C, m] (Eqs. 1 to 3); its rows and columns, normalised, weigh clients for a class and
classes within a client (Eqs. 4 to 7, see `columns`). Then, for each epoch, a generator is trained
against that weighted ensemble P (Eqs. 8 to 16), and the student by KL(P, F_g) + β·CE(F_g, argmax P)
(Eqs. 17 to 19), on the images of all the generator's steps (Sec. 2; Algorithm 1 prints one update
an epoch). U goes into the run folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.context import RoundContext
from fedsynth.core.method import Presets
from fedsynth.methods.shared.ensemble import DataFreeEnsembleDistillation, EnsembleState
from fedsynth.synthesizer.distillation.ensemble import (
    Aggregate,
    OneShotDistillation,
    average_of_logits,
)
from fedsynth.synthesizer.distillation.stratification import (
    guidance,
    pair_losses,
    stratified_aggregation,
    stratified_probabilities,
    stratified_weights,
)
from fedsynth.validation import in_range, one_of


@dataclass(frozen=True)
class FedHydra(DataFreeEnsembleDistillation):
    """Settings: `DataFreeEnsembleDistillation` with the paper's values, and

    Args:
        aggregation: "stratified" (SA), or "average" (AE), which is DENSE's ensemble in FedHydra's
            training. "clients" weighs clients for the asked class (Ū_r) and leaves a client's
            logits as they are: not in the paper, to see what weighing classes within a client (Ū_c)
            does.
        columns: what Ū_c normalises: "in-place", the rows' shares, or "raw", U itself, as Eq. 6 is
            printed; see `stratified_weights`. The values of the paper's Fig. 6 can only be row
            shares, and P of the raw reading gives most real images another class
            (docs/results.md).
        outputs: what SA weighs of a client: its "logits", the paper's word, or its "probabilities".
        lessons: what the student learns: "ensemble", P, which depends on the class that was asked
            for, or "average", the plain mean of the clients' logits, on the images of P's
            generator. Not in the paper: it separates P's effect on the generator from
            its effect on the student.
        stratification_steps: steps of each (class, client) pair's generator; for this and the next
            two see `pair_losses`.
        stratification_batch: images of such a step.
        stratification_lr: of such a generator.
        stratification_floor: the least denominator of Eq. 2; not in the paper.

    >>> from fedsynth import resolve, simulate
    >>> run, split = {"method": "fedhydra", "rounds": 1}, {"kind": "iid", "clients": 3}
    >>> quick = {"local_epochs": 2, "server_epochs": 1, "stratification_steps": 2}
    >>> result = simulate(resolve({"run": run, "partition": split, "method": quick}))
    >>> list(result.artefacts["stratification"].shape)  # U: ten classes, three clients
    [10, 3]
    """

    name: ClassVar[str] = "fedhydra"
    summary: ClassVar[str] = (
        "one-shot: distils the clients' logits, weighted by class-wise model quality, on "
        "generated images"
    )
    reference: ClassVar[str] = (
        "Bai et al., FedHydra: A Unified Solution to Diverse Heterogeneities in One-shot "
        "Federated Learning, Eqs. 2 to 19"
    )
    presets: ClassVar[Presets] = {
        "digits": {"stratification_steps": 15, "stratification_batch": 16}
    }

    aggregation: str = one_of("stratified", "clients", "average")
    columns: str = one_of("in-place", "raw")
    outputs: str = one_of("logits", "probabilities")
    lessons: str = one_of("ensemble", "average")
    stratification_steps: int = in_range(30, 2)
    stratification_batch: int = in_range(32, 2)
    stratification_lr: float = in_range(1e-2, 0)
    stratification_floor: float = in_range(1e-3, 1e-12)

    def distil(
        self, models: Sequence[nn.Module], student: nn.Module, context: RoundContext
    ) -> EnsembleState:
        """The server's part of Algorithm 1: lines 9 to 25."""
        U = guidance(self.pair_losses(models, context), self.stratification_floor)  # Eqs. 1 to 3
        U_r, U_c = stratified_weights(U, in_place=self.columns == "in-place")  # Eqs. 4 to 7
        targets = None  # P
        if self.lessons == "average":
            targets = average_of_logits
        training = OneShotDistillation(
            self,
            models,
            self.aggregate(U_r, U_c),  # Eqs. 8 to 12
            student,
            context.spec,
            context.seed,
            context.round,
            targets=targets,
            precision=context.precision,
        )
        for epoch in context.server_loop("distillation", self.server_epochs, training.state):
            batches = training.train_generator(epoch)  # Eqs. 13 to 16
            training.train_student(epoch, batches)  # Eqs. 17 to 19
        self.note_models(models, context)
        matrices = {"stratification": U, "clients_for_class": U_r, "classes_of_client": U_c}
        return EnsembleState({}, tallies=training.tallies, matrices=matrices)

    def pair_losses(self, models: Sequence[nn.Module], context: RoundContext) -> Tensor:
        """Returns the losses of Algorithm 2, [T_G, C, m], of models in evaluation mode."""
        return pair_losses(
            models,
            context.spec,
            context.seed,
            context.device,
            steps=self.stratification_steps,
            batch=self.stratification_batch,
            learning_rate=self.stratification_lr,
            latent=self.latent,
            width=self.generator_width,
            loop=context.server_loop,
        )

    def aggregate(self, U_r: Tensor, U_c: Tensor) -> Aggregate:
        """Returns the function that computes P from the models' logits (Algorithm 3)."""
        if self.aggregation == "average":
            return average_of_logits
        if self.aggregation == "clients":
            U_c = torch.ones_like(U_c)
        weigh = stratified_aggregation
        if self.outputs == "probabilities":
            weigh = stratified_probabilities
        return partial(weigh, by_class_CM=U_r, by_client_CM=U_c)

    def artefacts(self, state: EnsembleState) -> Mapping[str, Tensor]:
        return state.matrices
