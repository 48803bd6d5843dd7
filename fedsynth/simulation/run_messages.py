"""Messages of a simulation: before its first round, and about classes that no client sends."""

from __future__ import annotations

from collections.abc import Sequence

from fedsynth.config.resolve import model_is_set
from fedsynth.config.settings import RunSettings
from fedsynth.data.registry import DatasetSpec
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.results import privacy_summary
from fedsynth.synthesizer.condensation.sets import SyntheticSet

UNPROTECTED = (
    "no differential privacy: the clients' uploads are not protected (set privacy.epsilon "
    "to protect them)"
)
NO_LATER_EPSILON = "no later run on these data can state an ε"


def headline(settings: RunSettings, plan: PrivacyPlan | None) -> list[str]:
    """Returns the lines on the run's guarantee, or on its absence."""
    if plan is not None:
        return privacy_summary.headline(plan)
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
            f"warning: {method.name}'s clients have personal models, which this run does not "
            "test (set partition.local_test=0.2)"
        )
    if not method.takes_model and model_is_set(settings):
        texts.append(
            f"warning: {method.name} uses its own model: the settings in section model have "
            "no effect"
        )
    return texts


def missing_classes(
    sets: Sequence[SyntheticSet], spec: DatasetSpec, *, guaranteed: bool
) -> list[str]:
    """A warning, where the clients' sets lack a class.

    Args:
        sets: of all clients; none where the method has none.
        spec: the data set's.
        guaranteed: counts are released with noise.
    """
    sent = {label for synthetic in sets for label in synthetic.labels.unique().tolist()}
    missing = sorted(set(range(spec.classes)) - sent) if sets else []
    if not missing:
        return []
    names = ", ".join(spec.class_names[c] for c in missing)
    why = "no client has at least min_examples examples of it (try method.min_examples=1)"
    if guaranteed:
        why = "no client's released count of it is clearly above the noise (a larger budget helps)"
    return [f"warning: no client sends images of {names}: {why}"]
