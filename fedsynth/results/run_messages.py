"""The lines of text printed by a run: its privacy, warnings and progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from fedsynth.config.resolve import model_is_set
from fedsynth.config.settings import RunSettings
from fedsynth.core.capabilities import OwnNetwork, PersonalModels
from fedsynth.data.registry import DatasetSpec
from fedsynth.evaluation import GENERATOR, TEST_KEYS
from fedsynth.evaluation.generated import format_facts
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.protocol import Observer
from fedsynth.formatting import format_epsilon
from fedsynth.results.disclosed import lost_in_words
from fedsynth.results.finished import percent, words_of
from fedsynth.results.report_facts import headline as headline_of_plan
from fedsynth.synthesizer.condensation.sets import SyntheticSet

UNPROTECTED = (
    "no differential privacy: the clients' uploads are not protected. Set privacy.epsilon to "
    "protect the uploads"
)
NO_LATER_EPSILON = "no later run on these data can state an ε"


def headline(settings: RunSettings, plan: PrivacyPlan | None) -> Iterator[str]:
    """Yields lines about a run's privacy guarantee, or a line that there is none."""
    if plan is not None:
        yield from headline_of_plan(plan)
        return
    yield UNPROTECTED
    if settings.ledger is not None:
        yield (
            f"  the ledgers in {settings.ledger} record this run, so {NO_LATER_EPSILON}. This "
            "cannot be undone"
        )


def warnings(settings: RunSettings) -> Iterator[str]:
    """Yields warnings about settings with possibly unexpected effects.

    The first line states the precision and compilation of a run, unless it is fp32 and eager.
    """
    method = settings.method
    if (settings.precision, settings.compile) != ("fp32", "off"):
        yield f"speed: run.precision={settings.precision}, run.compile={settings.compile}"
    if isinstance(method, PersonalModels) and not settings.partition.local_test:
        yield (
            f"warning: {method.name} trains personal models, but this run does not test them. Set "
            "partition.local_test=0.2 to test the personal models"
        )
    if isinstance(method, OwnNetwork) and model_is_set(settings):
        yield f"warning: {method.name} uses a fixed model, so the section model is unused"


def missing_classes(
    sets: Sequence[SyntheticSet], spec: DatasetSpec, *, guaranteed: bool
) -> Iterator[str]:
    """Yields a warning about classes for which no client sends images.

    Args:
        sets: the synthetic sets of all clients. Empty if the method sends no images.
        spec: the specification of the data set.
        guaranteed: True if the clients release the counts of their classes with noise.
    """
    sent = {label for synthetic in sets for label in synthetic.labels.unique().tolist()}
    missing = sorted(set(range(spec.classes)) - sent)
    if sets and missing:
        names = ", ".join(spec.class_names[c] for c in missing)
        why = (
            "No client has method.min_examples examples of these classes. Try method.min_examples=1"
        )
        if guaranteed:
            why = "The noise hides the counts of these classes. Try a larger ε"
        yield f"warning: no client sends images of these classes: {names}. {why}"


LONG_STAGE = 1000  # steps
DAY = 86400.0
# The number of seconds without output after which the next step is printed.
PRINT_SECONDS = 30.0


def duration(seconds: float) -> str:
    """Formats a duration as hours, minutes and seconds.

    >>> duration(125), duration(200000)
    ('0:02:05', '2 days, 7:33:20')
    """
    return str(timedelta(seconds=round(seconds)))


def accuracies(row: Mapping[str, Any], personal: bool) -> list[tuple[str, str]]:
    """Formats the accuracies in a round or run as (name, value) pairs.

    Args:
        row: the metrics of a round, or the summary of a run.
        personal: True if clients have personal models. The accuracies on the clients' test splits
            then come first.
    """
    pairs = []
    for key in TEST_KEYS:
        if row.get(key) is not None:
            pairs.append((words_of(key), percent(row[key])))
        for name, model in row.get("models", {}).items():
            if key in model:
                pairs.append((name.upper(), percent(model[key])))
    if "local" in row:  # not with differential privacy: exact functions of private data
        local = row["local"]
        splits = [
            ("AMP", percent(local["amp"])),
            ("FM", f"{local['fm']:.4f}"),
            ("WLP", percent(local["wlp"])),
        ]
        position = 0 if personal else len(pairs)
        pairs[position:position] = splits
    return pairs


def round_line(row: Mapping[str, Any], settings: RunSettings) -> str:
    """Formats a round's metrics as one line for the user.

    The metrics must not contain values that only a simulation may show.
    """
    parts = [f"round {row['round']}/{settings.rounds}"]
    for name, value in accuracies(row, isinstance(settings.method, PersonalModels)):
        parts.append(f"{name} {value}")
    if "epsilon" in row:
        parts.append(f"ε {format_epsilon(row['epsilon'])}")
    if GENERATOR in row:
        parts.append(f"generated: {format_facts(row[GENERATOR])}")
    parts.append(f"uploads {row['upload_bytes'] / 1e6:.2f} MB")
    parts += lost_in_words(row)
    if "seconds" in row:
        parts.append(f"{row['seconds']:.1f} s")
    return " · ".join(parts)


class StderrObserver(Observer):
    """Prints notes, rounds and some steps of long rounds on stderr, one line each.

    A step is printed if nothing else was printed for 30 seconds. With differential privacy,
    computing times may depend on private data. Steps are then printed at each tenth of a long stage
    instead, and no times are printed.

    Args:
        settings: the settings of the run.
        first: a text that is printed together with the first line. If an error occurs before, only
            the error is printed.
    """

    def __init__(self, settings: RunSettings, first: str = "") -> None:
        self._settings = settings
        self._first = first
        self._started = self._printed = time.monotonic()
        self._finished_rounds = 0
        self._remaining = ""
        self._tenth = 0

    def note(self, text: str) -> None:
        self._printed = time.monotonic()
        lines = list(filter(None, (self._first, text)))
        self._first = ""
        with suppress(OSError):  # a closed pipe does not end a run
            self._print("\n".join(lines))

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def step(self, round: int, stage: str, completed: int, total: int) -> None:
        if round:  # 0 before the first round
            stage = f"round {round}/{self._settings.rounds} {stage}"
        self._show_step(stage, completed, total, self._remaining)

    def _show_step(self, stage: str, completed: int, total: int, remaining: str) -> None:
        previous = self._tenth
        self._tenth = 10 * completed // max(1, total)
        due = time.monotonic() - self._printed > PRINT_SECONDS
        if self._settings.privacy is not None:
            due = total >= LONG_STAGE and 0 < self._tenth != previous
        if due:
            self.note(", ".join(filter(None, (f"{stage} {completed}/{total}", remaining))))

    def round_ended(self, row: Mapping[str, Any]) -> None:
        self.note(round_line(row, self._settings))
        if self._settings.privacy is not None:
            return
        self._finished_rounds += 1
        mean = (time.monotonic() - self._started) / self._finished_rounds
        seconds = mean * (self._settings.rounds - row["round"])
        self._remaining = f"about {duration(seconds)} left"
        if self._finished_rounds == 1 and seconds >= DAY:
            self.note(
                f"note: at this speed, the run takes another {duration(seconds)}. You can stop the "
                "run and resume it later"
            )
