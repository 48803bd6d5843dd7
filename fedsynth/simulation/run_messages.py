"""Messages of a simulation about privacy, unexpected settings and missing classes."""

from __future__ import annotations

from collections.abc import Sequence

from fedsynth.config.resolve import model_is_set
from fedsynth.config.settings import RunSettings
from fedsynth.data.registry import DatasetSpec
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.results.report_facts import headline as headline_of_plan
from fedsynth.synthesizer.condensation.sets import SyntheticSet

UNPROTECTED = (
    "no differential privacy: the clients' uploads are not protected (set privacy.epsilon "
    "to protect them)"
)
NO_LATER_EPSILON = "no later run on these data can state an ε"


def headline(settings: RunSettings, plan: PrivacyPlan | None) -> list[str]:
    """Returns the lines that state the run's privacy guarantee, or that it has none."""
    if plan is not None:
        return headline_of_plan(plan)
    lines: list[str] = [UNPROTECTED]
    if settings.ledger is not None:
        lines.append(f"  the ledgers in {settings.ledger} record this: {NO_LATER_EPSILON}")
    return lines


def warnings(settings: RunSettings) -> list[str]:
    """Returns warnings about settings that may not have the effect that a user expects."""
    method = settings.method
    texts: list[str] = []
    if method.personal and not settings.partition.local_test:
        texts.append(
            f"warning: {method.name} trains personal models for the clients, but this run does not "
            "test them (set partition.local_test=0.2)"
        )
    if not method.takes_model and model_is_set(settings):
        texts.append(
            f"warning: {method.name} uses a fixed model, so the settings in section model have "
            "no effect"
        )
    return texts


def missing_classes(
    sets: Sequence[SyntheticSet], spec: DatasetSpec, *, guaranteed: bool
) -> list[str]:
    """Returns a warning if no client sends images of some class, and an empty list otherwise.

    Args:
        sets: the synthetic sets of all clients. Empty if the method sends no images.
        spec: the specification of the data set.
        guaranteed: whether the clients release the counts of their classes with noise.
    """
    sent = {label for synthetic in sets for label in synthetic.labels.unique().tolist()}
    missing = sorted(set(range(spec.classes)) - sent) if sets else []
    if not missing:
        return []
    names = ", ".join(spec.class_names[c] for c in missing)
    why = "no client has method.min_examples examples of such a class: try method.min_examples=1"
    if guaranteed:
        why = "the released counts of such a class are not clearly above the noise: try a larger ε"
    return [f"warning: no client sends images of these classes: {names} ({why})"]
