"""FedHydra: one-shot distillation that weights each client's model by class (Bai et al., A Unified
Solution to Diverse Heterogeneities in One-shot Federated Learning).

Each client trains the server's initial model, or a model of its own architecture, by SGD on the
cross-entropy, as in FedAvg. Algorithm 1 (lines 4 to 7) does not define LocalUpdate. The client
uploads the model once and computes nothing else.

The server first measures how well each client's model can teach each class, which gives the matrix
U [C, m] (model stratification, Eqs. 1 to 3). For Ū_r, each row of U is divided by its sum. It
weights the clients for a given class (Eqs. 4 and 5). For Ū_c, each column is divided by its sum. It
weights the classes for a given client (Eqs. 6 and 7). The paper computes Ū_c from U, whereas the
default here computes it from Ū_r (see the setting `columns`). Ū_r and Ū_c define the ensemble P. In
each epoch, a generator is trained with P as its teacher (Eqs. 8 to 16). The student then minimises
KL(P, F_g) + β·CE(F_g, argmax P) (Eqs. 17 to 19) on the best batches of all epochs so far, as in a
public repository of the first author. Algorithm 1 prints one update per epoch, and Sec. 2 names the
images of all generator steps (`student_images`). U is saved in the run folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsynth.core.capabilities import ServerParts
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Tensors, flattened, unflattened
from fedsynth.core.method import Presets
from fedsynth.methods.shared.ensemble import DataFreeEnsembleDistillation, EnsembleState
from fedsynth.synthesizer.distillation import ensemble, stratification
from fedsynth.validation import in_range, one_of


@dataclass(frozen=True)
class FedHydra(DataFreeEnsembleDistillation, ServerParts):
    """FedHydra: the server trains a student to match the clients' class-weighted logits.

    A weight measures how well the client's model can teach the class.

    The defaults are the paper's, unless stated otherwise below. The settings come in addition to
    those of `DataFreeEnsembleDistillation`, which documents training and distillation.

    Args:
        aggregation: how the server combines the clients' logits. "stratified" is the paper's
            stratified aggregation (SA). "average" is its averaging ensemble (AE), which uses
            DENSE's ensemble in FedHydra's training. "clients" weights the clients for the requested
            class (Ū_r), but not a client's classes (Ū_c). The paper has no such variant. It shows
            the effect of Ū_c.
        columns: what Ū_c normalises. "raw" normalises U itself, as Eq. 6, the text and Algorithm 2
            print. The default "in-place" normalises Ū_r, which is another reading of the text's
            "first … each row, then … each column" (`stratified_weights` gives the reason).
            docs/results.md compares both.
        outputs: the client outputs to which SA applies its weights. "logits" is the word in the
            paper, and "probabilities" is the alternative. A column of Ū_c adds up to 1, so P is
            about 1/C of a client's logits.
        lessons: what the student learns. "ensemble" is P, which depends on the requested class.
            "average" is the unweighted mean of the clients' logits, on images of the generator
            trained with P. The option is not in the paper. It separates P's effect on the generator
            from its effect on the student.
        stratification_steps: T_G of Algorithm 2, the number of training steps of each (class,
            client) pair's generator. All pairs start from the same generator and use the same
            noise, whereas Algorithm 2 draws both for each pair.
        stratification_batch: number of generated images in a step of model stratification. The
            paper does not give it.
        stratification_lr: learning rate of Adam for the generators in model stratification. The
            paper has 0.001 for all generators.
        stratification_floor: smallest denominator in Eq. 2, because float32 losses can be exactly
            0. It is not in the paper. It must be below the losses of a client that is certain of a
            class: with 0.001, clients that have never seen the class outweigh its owner.

    >>> from fedsynth import resolve, simulate
    >>> run, split = {"method": "fedhydra", "rounds": 1}, {"kind": "iid", "clients": 3}
    >>> quick = {"local_epochs": 2, "server_epochs": 1, "stratification_steps": 2}
    >>> result = simulate(resolve({"run": run, "partition": split, "method": quick}))
    >>> list(result.artefacts["stratification"].shape)  # U: ten classes, three clients
    [10, 3]
    """

    name = "fedhydra"
    summary = "one-shot: the server distils logits, weighted by each model's quality for a class"
    reference = (
        "Bai et al., A Unified Solution to Diverse Heterogeneities in One-shot Federated Learning, "
        "Eqs. 1 to 19"
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
    stratification_lr: float = in_range(1e-3, 0)
    stratification_floor: float = in_range(1e-8, 1e-12)

    def distil(
        self, models: Mapping[int, Tensors], student: nn.Module, context: RoundContext
    ) -> EnsembleState:
        """Measures the clients' models, and then trains the generator and the student in each
        epoch.

        It implements the server's part of Algorithm 1, lines 9 to 25.
        """
        losses = self.stratify(models, context)  # Algorithm 2
        U = stratification.guidance(losses, self.stratification_floor)  # Eqs. 1 to 3
        U_r, U_c = stratification.stratified_weights(
            U, in_place=self.columns == "in-place"
        )  # Eqs. 4 to 7
        targets = ensemble.average_of_logits if self.lessons == "average" else None
        training = ensemble.OneShotDistillation(
            self,
            context.load_frozen(models),
            self.aggregate(U_r, U_c),  # Eqs. 8 to 12
            student,
            context.spec,
            context.seed,
            context.round,
            targets=targets,
            precision=context.precision,
            measure=context.measure,
        )
        for epoch in context.server_loop("distillation", self.server_epochs, training.state):
            batches = training.train_generator(epoch)  # Eqs. 13 to 16
            training.train_student(epoch, batches)  # Eqs. 17 to 19
            training.measure_student(epoch)
        matrices = {"stratification": U, "clients_for_class": U_r, "classes_of_client": U_c}
        return self.result(training, models, context, matrices)

    def stratify(self, models: Mapping[int, Tensors], context: RoundContext) -> Tensor:
        """Returns the losses of each client's and class's generator, [T_G, C, m] (Algorithm 2)."""
        losses_TCM = torch.zeros(
            self.stratification_steps, context.spec.classes, len(models), device=context.device
        )
        parts = [flattened({client: model}) for client, model in models.items()]
        compute, results = self.in_parts({}, context), None
        for k in context.server_loop("stratification", len(parts), {"losses": losses_TCM}):
            results = results or compute(parts[k:])
            losses_TCM[:, :, k] = next(results)["losses"]
        return losses_TCM

    def server_part(self, shared: Tensors, context: RoundContext) -> Callable[[Tensors], Tensors]:
        def losses_of(client: Tensors) -> Tensors:
            (model,) = context.load_frozen(unflattened(client))
            losses_TC = stratification.pair_losses(
                model,
                context.spec,
                context.seed,
                context.device,
                steps=self.stratification_steps,
                batch=self.stratification_batch,
                learning_rate=self.stratification_lr,
                latent=self.latent,
                width=self.generator_width,
                report=partial(context.report, "stratification of a client"),
            )
            return {"losses": losses_TC}

        return losses_of

    def aggregate(self, U_r: Tensor, U_c: Tensor) -> ensemble.Aggregate:
        """Returns the function that computes the prediction P of the ensemble (Algorithm 3)."""
        if self.aggregation == "average":
            return ensemble.average_of_logits
        if self.aggregation == "clients":
            U_c = torch.ones_like(U_c)
        weigh = stratification.stratified_aggregation
        if self.outputs == "probabilities":
            weigh = stratification.stratified_probabilities
        return partial(weigh, by_class_CM=U_r, by_client_CM=U_c)

    def artefacts(self, state: EnsembleState) -> Tensors:
        return state.matrices
