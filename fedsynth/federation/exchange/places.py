"""Whether a private client's rows depend on where they stand in a pass, on this machine: warned of,
since a server that may craft weights could make use of it (docs/privacy.md, "Active servers").

A try on random images at the run's first weights: what it finds is so, and what it does not find is
no proof. It decides over nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from fedsynth.copies import copied
from fedsynth.core.context import RoundContext
from fedsynth.errors import FedsynthError
from fedsynth.federation.exchange.remote_client import BROKEN
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.dpsgd import rows_at_once
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.mechanism_facts import mechanism_facts
from fedsynth.privacy.passes import power_of_two
from fedsynth.rows_alone import moves_with_place

PLACES = (8, 32)
"""Lengths of the passes that are tried; less where memory would not hold so many gradients."""
UNTRIED = (*BROKEN, FedsynthError, MemoryError, PrivacyError)
MOVED = "warning: on this machine the bits of an example's row depend on its place among others"
WIDTHS = (
    "; against a server that may craft weights take model.width in multiples of 8, and images of "
    "even sides"
)


def place_warnings(
    settings: RunSettings, context: RoundContext, networks: Sequence[nn.Module]
) -> list[str]:
    """A warning, where a client's network has such rows on this device, or cannot be tried.

    Args:
        settings: of the run; without a guarantee there is none that could be lost.
        context: its device is what is tried.
        networks: of the clients, untrained; one of each kind is tried.
    """
    privacy = settings.privacy
    if privacy is None:
        return []
    mechanism = privacy.mechanism or settings.method.protects[0]
    if not mechanism_facts(mechanism).guaranteed:
        return []
    asked = replace(privacy, mechanism=mechanism)
    try:
        moved = any(
            moves_with_place(rows, context.spec.image_shape, context.device, length)
            for network in {str(one): one for one in networks}.values()
            for length in lengths(network)
            for rows in settings.method.private_rows(_here(network, context), asked, context)
        )
    except UNTRIED as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        return [f"warning: whether rows depend on their place could not be tried: {why:.200}"]
    if not moved:
        return []
    if not settings.method.takes_model or settings.model.features:
        return [f"{MOVED} (docs/privacy.md, active servers)"]
    return [MOVED + WIDTHS]


def lengths(network: nn.Module) -> list[int]:
    """Of the passes that are tried."""
    most = power_of_two(rows_at_once(network))
    return sorted({min(length, most) for length in PLACES})


def _here(network: nn.Module, context: RoundContext) -> nn.Module:
    return copied(network).eval().to(context.device).requires_grad_(False)
