"""Measures the accuracy of a run's models on the test set and on the clients' own test splits.

In segmentation, the mean Dice coefficient of the images takes the place of the accuracy. Accuracies
on the clients' splits and on a private test set are exact functions of private data. With
differential privacy, they are written only to the folder `simulation_only`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from fedsynth.core.capabilities import Measurements, PersonalModels
from fedsynth.core.context import RoundContext, ServerState
from fedsynth.core.messages import Message, ModelParameters, Tensors
from fedsynth.core.method import Method
from fedsynth.data.images import ImageData
from fedsynth.data.registry import CLASSIFICATION, SEGMENTATION
from fedsynth.evaluation import CLIENT_MODELS, DISSIMILARITY, NAMES, NMI, Names, classification
from fedsynth.evaluation.accuracy import accuracy, domain_masks, local_metrics, predict, scores
from fedsynth.evaluation.optional import dissimilarity, embeddings, nmi, silhouette
from fedsynth.federation.protocol import Backend
from fedsynth.results import disclosed
from fedsynth.results.finished import Rows

FINAL = "model"
# The type of a function that computes metrics and, if the computation fails, notes the error.
#
# Its arguments are the name of the metrics and the function that computes the metrics. If this
# function fails, the result is empty. See `RunRecord.figures`.
Figures = Callable[[str, Callable[[], Mapping[str, Any]]], Mapping[str, Any]]


@dataclass(frozen=True)
class Measure:
    """Measures the accuracy of a run's models on the test set and on the clients' own test splits.

    Args:
        method: the run's method, which determines the models to measure.
        backend: the connection to the clients, which test models on their own splits.
        test: the test set, on the run's device, or None.
        hidden: whether differential privacy protects the test set.
        local: whether the clients have their own test splits.
        task: the task of the data set, which determines the measures.
        requested: the names of the run's optional measures.
    """

    method: Method
    backend: Backend
    test: ImageData | None
    hidden: bool
    local: bool

    task: str = CLASSIFICATION
    requested: tuple[str, ...] = ()

    @property
    def names(self) -> Names:
        """The names of the metrics for the main measure: accuracy, or Dice for masks."""
        return NAMES[self.task]

    @property
    def accuracy_name(self) -> str:
        """The name of the main measure on the test set in a round's metrics."""
        return self.names.common if self.personal else self.names.test

    @property
    def personal(self) -> bool:
        """True if each client ends with a personal model."""
        return isinstance(self.method, PersonalModels)

    def accuracy(self, model: nn.Module) -> float:
        """Computes a model's main measure on the test set.

        It is NaN if there is no test set, or if differential privacy protects it.
        """
        if self.test is None or self.hidden:
            return math.nan
        return float(scores(predict(model, self.test), self.test.labels).mean())

    def row(self, state: ServerState, context: RoundContext, figures: Figures) -> dict[str, Any]:
        """Returns the model's accuracies after a round.

        If the method makes several variants of the model, the entry `models` contains the
        accuracies of each variant.
        """
        models = {FINAL: self.method.final_parameters(state)}
        if isinstance(self.method, Measurements):
            models = {**self.method.variants(state), **models}
        rows = self._rows(models, context, figures)
        row = rows.pop(FINAL)
        if rows:
            row[disclosed.MODELS] = rows
        return row

    def optional(
        self,
        state: ServerState,
        context: RoundContext,
        uploads: Mapping[int, Message],
        figures: Figures,
    ) -> dict[str, Any]:
        """Computes a round's optional measures, for the server's model and for the uploads."""
        row: dict[str, Any] = {}
        for name in self.requested:
            row |= figures(name, partial(self._optional, name, state, context, uploads))
        return row

    def _optional(
        self,
        name: str,
        state: ServerState,
        context: RoundContext,
        uploads: Mapping[int, Message],
    ) -> dict[str, Any]:
        parameters = self.method.final_parameters(state)
        if name == DISSIMILARITY:
            return {name: dissimilarity(self.backend.gradients(parameters, context))}
        if self.test is None:
            return {}
        if name == CLIENT_MODELS:
            return {name: _model_accuracies(uploads, context, self.test)}
        vectors = embeddings(context.load(parameters), self.test)
        if not vectors.isfinite().all():
            return {name: None}
        if name == NMI:
            return {name: nmi(vectors, self.test.labels, context.seed)}
        return {name: silhouette(vectors, self.test.labels)}

    def final_measures(
        self, metrics: Rows, state: ServerState, context: RoundContext, figures: Figures
    ) -> dict[str, Any]:
        """Returns the measures on the test set after the last round, and the confusion matrix.

        The model is measured now if the last round was not evaluated. The result is empty if it
        cannot be measured.
        """
        if not metrics or self.test is None:
            return {}
        last: Mapping[str, Any] = metrics[-1]
        if not {self.accuracy_name, disclosed.PRIVATE_TEST} & last.keys():
            last = self.row(state, context, figures)
        measures = dict(last.get(disclosed.PRIVATE_TEST, last))
        is_segmentation = self.task == SEGMENTATION
        if self.personal or is_segmentation or self.accuracy_name not in measures:
            return measures
        count = partial(self._confusion, context, self.method.final_parameters(state), self.test)
        return {**measures, **figures("confusion matrix", count)}

    def _confusion(self, context: RoundContext, model: Tensors, test: ImageData) -> dict[str, Any]:
        logits = predict(context.load(model), test)
        return {disclosed.CONFUSION: classification.confusion_matrix(logits, test.labels)}

    def _rows(
        self, models: Mapping[str, Tensors], context: RoundContext, figures: Figures
    ) -> dict[str, dict[str, Any]]:
        """Computes each model's metrics on the test set and on the clients' own test splits."""
        rows: dict[str, dict[str, Any]] = {name: {} for name in models}
        if self.test is not None:
            for name, parameters in models.items():
                on_test = partial(self._on_test, context, parameters, self.test)
                measured = dict(figures("test accuracy", on_test))
                rows[name] = {disclosed.PRIVATE_TEST: measured} if self.hidden else measured
        if self.local:
            on_splits = partial(self._on_splits, models, context)
            for name, metrics in figures("accuracy on the clients' splits", on_splits).items():
                rows[name][disclosed.LOCAL] = metrics
        return rows

    def _on_splits(self, models: Mapping[str, Tensors], context: RoundContext) -> dict[str, Any]:
        """Computes each model's metrics on the clients' own test splits.

        The dictionary is empty if no client has a test record.
        """
        clients = self.backend.evaluate(models, context)
        tested = [client.tested for client in clients]
        sizes = [client.size for client in clients]
        metrics_by_name = {}
        for name in models:
            right = [client.right[name] for client in clients]
            metrics = local_metrics(right, tested, sizes, self.task)
            if metrics is not None:
                metrics_by_name[name] = metrics
        return metrics_by_name

    def _on_test(self, context: RoundContext, model: Tensors, test: ImageData) -> dict[str, Any]:
        """Computes a model's accuracy and other measures on the test set.

        If the test set has domains, the accuracy on each domain and their unweighted mean are
        included, as in papers on feature skew. If each client ends with a personal model, the
        common model is not the result of the run, and its accuracy has another key.
        """
        logits = predict(context.load(model), test)
        right = scores(logits, test.labels)
        row: dict[str, Any] = {self.accuracy_name: float(right.sum()) / len(right)}
        has_classes = self.task == CLASSIFICATION
        if has_classes and not self.personal:
            row |= classification.classification_measures(logits, test.labels)
        masks = domain_masks(test)
        if masks and not self.personal:
            accuracies, measures = {}, {}
            for name, mask in masks.items():
                accuracies[name] = float(right[mask].mean())
                if has_classes:
                    measures[name] = classification.classification_measures(
                        logits[mask], test.labels[mask]
                    )
            row[self.names.domains] = accuracies
            if has_classes:
                row[disclosed.DOMAIN_MEASURES] = measures
            row["domain_average"] = sum(accuracies.values()) / len(accuracies)
        return row


def _model_accuracies(
    uploads: Mapping[int, Message], context: RoundContext, test: ImageData
) -> list[float | None]:
    """Returns the accuracy of each client's uploaded model.

    A client that uploaded no complete model has None.
    """
    accuracies: list[float | None] = [None] * context.clients
    for client, upload in uploads.items():
        names = context.architecture_of(client).state_dict().keys()
        if isinstance(upload, ModelParameters) and upload.parameters.keys() == names:
            accuracies[client] = accuracy(context.load(upload.parameters, client), test)
    return accuracies
