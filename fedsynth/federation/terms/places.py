"""Whether a private client's rows depend on where they stand in a pass, on this machine: warned of,
since a server that may craft weights could make use of it (docs/privacy.md, "Active servers")."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedsynth.copies import copied
from fedsynth.core.context import RoundContext
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.dpsgd import example_gradients, rows_at_once
from fedsynth.privacy.wording import Setting, Text
from fedsynth.rows_alone import moves_with_place

DP_SGD = "dp-sgd"
PLACES = 32
"""Examples of a batch that is tried; fewer where memory would not hold their gradients."""


def place_warnings(settings: RunSettings, context: RoundContext) -> list[str]:
    """A warning, where the run's network has such rows on this device.

    The forward pass is tried, and with DP-SGD the gradient of each example, at the run's first
    weights and on random images.

    Args:
        settings: of the run; without privacy there is no guarantee that could be lost.
        context: its architecture and device are what is tried.
    """
    privacy = settings.privacy
    if privacy is None:
        return []
    network = copied(context.architecture).eval().to(context.device).requires_grad_(False)

    def gradients(images: Tensor) -> Tensor:
        labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        return example_gradients(network, images, labels)

    tried: list[tuple[Callable[[Tensor], Tensor], int]] = [(network, PLACES)]
    if (privacy.mechanism or settings.method.protects[0]) == DP_SGD:
        tried.append((gradients, min(PLACES, rows_at_once(network))))
    shape = context.spec.image_shape
    if not any(moves_with_place(what, shape, context.device, many) for what, many in tried):
        return []
    return [
        Text(
            "warning: on this machine the bits of an example's row depend on its place among others; "
            "against a server that may craft weights take ",
            Setting("model", "width"),
            " in multiples of 8, and images of even sides",
        )
    ]
