"""Privacy labels for the outputs of a private run, and descriptions of the mechanisms.

A label states whether the ledger accounts for a value, whether it is public, or whether it is
unprotected. The code that computes a value declares its label, the reason and the value's type. A
private run does not output a value that was not declared or that has another type.

This module also states for each mechanism whether it has a privacy guarantee. Every private step
makes its releases with `GaussianSumMechanism`, whose theorem gives a guarantee for any per-example
vector. Therefore a mechanism that is not listed here has a guarantee, for example the mechanism of
a custom method. A mechanism without a guarantee must be listed here with the reasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

# The value was released by a mechanism that the ledger was charged for.
ACCOUNTED = "accounted"
# The value was computed only from accounted releases and public values.
RELEASED = "released"
# The value does not depend on the private data.
PUBLIC = "public"
# The value depends on private data and has no guarantee, so only a simulation may show it.
SIMULATION_ONLY = "simulation-only"
# The value was released, but the ledger does not account for it.
UNACCOUNTED = "unaccounted"

NUMBER = bool | int | float
COUNT = Annotated[int, Field(ge=0, lt=2**63)]
SHARE = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Disclosure:
    """An output value's privacy label, with the reason and the value's type.

    Args:
        kind: the label, which is `RELEASED`, `PUBLIC` or `SIMULATION_ONLY`.
        reason: the reason why the value has this label.
        shape: the type of the value. pydantic checks it strictly.
    """

    kind: str
    reason: str
    shape: Any = NUMBER

    @property
    def may_be_shown(self) -> bool:
        """True if anyone may see the value."""
        return self.kind in (RELEASED, PUBLIC)

    def fits(self, value: object) -> bool:
        """Returns True if a value has the declared type.

        >>> shares = released("shares of released counts", list[SHARE])
        >>> shares.fits([0.5, 0.5]), shares.fits([312.0]), released("a count").fits({"n": 1})
        (True, False, False)
        """
        try:
            _adapter(self.shape).validate_python(value)
        except (ValidationError, RecursionError):
            return False
        return True


@lru_cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape, config=ConfigDict(strict=True, allow_inf_nan=False))


def released(reason: str, shape: Any = NUMBER) -> Disclosure:
    """Declares a value that is computed only from released and public values.

    Args:
        reason: the reason why the value depends on nothing else.
        shape: the type of the value.

    >>> released("the accuracy of a released model").may_be_shown
    True
    """
    return Disclosure(RELEASED, reason, shape)


def public(reason: str, shape: Any = NUMBER) -> Disclosure:
    """Declares a value that does not depend on the private data.

    A method returns such values in `Method.planned_facts`. The verification of a report computes
    them again.

    Args:
        reason: the reason why the value does not depend on the private data.
        shape: the type of the value.
    """
    return Disclosure(PUBLIC, reason, shape)


def simulation_only(reason: str, shape: Any = Any) -> Disclosure:
    """Declares a value that is computed from private data and is not protected.

    Only the operator of a simulation may see such a value.

    Args:
        reason: the reason why the value depends on private data.
        shape: the type of the value.

    >>> simulation_only("how long it took").may_be_shown
    False
    """
    return Disclosure(SIMULATION_ONLY, reason, shape)


@dataclass(frozen=True)
class MechanismFacts:
    """Texts about a mechanism for reports, ledgers and error messages.

    Attributes:
        name: the mechanism's name, as in `PrivacySettings.mechanism`.
        reasons: the reasons why the mechanism has no guarantee. Empty if it has a guarantee, which
            is then computed from the rows of the ledger.
        unaccounted: a short reason that is written to the rows of the ledger. None if the mechanism
            has a guarantee.
        accesses: pairs of texts. The first text names private data that clients use without
            protection. The second text states how the clients use these data.
        randomness: the source of noise and samples. None if it is `fedsynth.privacy.randomness`.
    """

    name: str
    reasons: tuple[str, ...] = ()
    unaccounted: str | None = None
    accesses: tuple[tuple[str, str], ...] = ()
    randomness: str | None = None

    @property
    def guaranteed(self) -> bool:
        """True if the mechanism has a privacy guarantee, so that its releases have an ε."""
        return not self.reasons

    @property
    def status(self) -> str:
        """The releases' status in the report, accounted or unaccounted."""
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


def mechanism_facts(name: str) -> MechanismFacts:
    """Returns the texts about the mechanism with the given name.

    >>> mechanism_facts("residual").guaranteed, mechanism_facts("paper").guaranteed
    (True, False)
    """
    return {PAPER.name: PAPER}.get(name, MechanismFacts(name))
