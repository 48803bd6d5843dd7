"""The guarantee of each mechanism, or the reasons why it has none; defined only here.

Every private step releases through `GaussianSumMechanism`, whose theorem gives the guarantee for any
per-example vector. A mechanism that is not listed here (such as a custom method's) therefore has a
guarantee; one without a guarantee must be listed, with the reasons.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsynth.privacy.disclosure import ACCOUNTED, UNACCOUNTED


@dataclass(frozen=True)
class MechanismFacts:
    """The facts about a mechanism that reports, ledgers and refusals state.

    Attributes:
        name: as in `PrivacySettings.mechanism`.
        reasons: why it has no guarantee; empty: its guarantee follows from its ledger rows.
        unaccounted: the short reason in those rows; None if it has a guarantee.
        accesses: other private data that its clients use, and how; no mechanism protects them.
        randomness: the source of its noise and samples, if it is not `fedsynth.privacy.randomness`.
    """

    name: str
    reasons: tuple[str, ...] = ()
    unaccounted: str | None = None
    accesses: tuple[tuple[str, str], ...] = ()
    randomness: str | None = None

    @property
    def guaranteed(self) -> bool:
        """True if its releases have an ε."""
        return not self.reasons

    @property
    def status(self) -> str:
        """The status of its releases in the report: accounted or unaccounted."""
        return ACCOUNTED if self.guaranteed else UNACCOUNTED


PAPER = MechanismFacts(
    name="paper",
    reasons=(
        "FedDM's Algorithm 1 clips the gradient of a batch, not of an example: the sensitivity is "
        "up to 2·clip instead of clip/|B|, and the effective noise multiplier is σ/(2|B|)",
        "the synthetic images start from real images, which is an unaccounted release",
        "only the classes that a client has are sent, which reveals these classes",
        "batches have a fixed size, a fraction of the private n_c, and are not Poisson "
        "samples; noise is divided by their sizes",
    ),
    unaccounted="FedDM's Algorithm 1 as printed",
    accesses=(
        ("real images as the start of the synthetic ones", "released as they are"),
        ("which classes a client has", "only those are sent"),
    ),
    randomness="noise from the operating system's entropy; batches from the run's seed",
)
_LISTED = {facts.name: facts for facts in (PAPER,)}


def mechanism_facts(name: str) -> MechanismFacts:
    """Returns the facts of the mechanism with this name.

    >>> mechanism_facts("residual").guaranteed, mechanism_facts("paper").guaranteed
    (True, False)
    """
    return _LISTED.get(name, MechanismFacts(name))
