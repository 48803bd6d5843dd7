"""What each mechanism guarantees, or why it guarantees nothing: the one place that says so.

Whatever a private step releases goes through `GaussianSums`, and has its guarantee by the theorem
there, whatever per-example vector a mechanism's name stands for. So a name that is not listed here
(of a method of your own) is a mechanism with a guarantee; one without has to be listed, with the
reasons.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsynth.privacy.disclosure import ACCOUNTED, UNACCOUNTED


@dataclass(frozen=True)
class MechanismFacts:
    """What reports, ledgers and refusals say of a mechanism.

    Attributes:
        name: as in `PrivacySettings.mechanism`.
        reasons: why it guarantees nothing; none: it guarantees what its ledger's rows say.
        unaccounted: the short reason in those rows; None where it guarantees.
        accesses: what else of private data its clients use, and how; no mechanism protects that.
        randomness: where its noise and samples come from, where that is not as in
            `fedsynth.privacy.randomness`.
    """

    name: str
    reasons: tuple[str, ...] = ()
    unaccounted: str | None = None
    accesses: tuple[tuple[str, str], ...] = ()
    randomness: str | None = None

    @property
    def guaranteed(self) -> bool:
        """Whether its releases have an ε."""
        return not self.reasons

    @property
    def status(self) -> str:
        """How its releases are covered, for the report."""
        return ACCOUNTED if self.guaranteed else UNACCOUNTED


PAPER = MechanismFacts(
    name="paper",
    reasons=(
        "FedDM's Algorithm 1 clips the gradient of a batch, not of an example: clipping a mean "
        "bounds its norm, not one example's influence, so the sensitivity is up to 2·clip and not "
        "clip/|B|, and the effective noise multiplier is σ/(2|B|)",
        "the synthetic images start from real images, which is a release that nothing accounts for",
        "exactly the classes that a client has are sent, so which classes it has is revealed",
        "batches have a fixed size, a share of n_c that is private, and are not Poisson samples; "
        "noise is divided by their sizes",
    ),
    unaccounted="FedDM's Algorithm 1 as printed",
    accesses=(
        (
            "real images as the start of the synthetic ones",
            "released as they are, before any step",
        ),
        ("which classes a client has", "only those are sent"),
    ),
    randomness="noise from the operating system's entropy; batches from the run's seed",
)
_LISTED = {facts.name: facts for facts in (PAPER,)}


def mechanism_facts(name: str) -> MechanismFacts:
    """The facts of the mechanism with this name.

    >>> mechanism_facts("residual").guaranteed, mechanism_facts("paper").guaranteed
    (True, False)
    """
    return _LISTED.get(name, MechanismFacts(name))
