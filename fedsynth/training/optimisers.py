"""Update rules for the weights of one or many networks, for images, and for DP-SGD's gradients.

A rule is a pair of functions, as in optax, but in place, so that steps can be CUDA graphs: `init`
makes the rule's state, `update` moves the weights by a gradient. A custom rule (Adam, gradient
clipping, a decaying learning rate) is a frozen dataclass with these two functions, and can replace
`MomentumSgd` anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsynth.privacy.dpsgd import (
    Optimiser as Optimiser,  # defined there, as privacy imports no higher package
)


@dataclass(frozen=True)
class MomentumSgd:
    """v ← μ·v + g + λ·w, then w ← w − η·v (heavy ball, as in `torch.optim.SGD`).

    Args:
        learning_rate: η.
        momentum: μ; 0 is plain gradient descent.
        weight_decay: λ.

    >>> import torch
    >>> w, sgd = torch.zeros(2), MomentumSgd(learning_rate=0.5, momentum=0.5)
    >>> state = sgd.init(w)
    >>> for _ in range(2):
    ...     sgd.update(w, torch.ones(2), state)
    >>> w
    tensor([-1.2500, -1.2500])
    """

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def init(self, w: Tensor) -> tuple[Tensor, ...]:
        """Returns (v,), initially zero."""
        return (torch.zeros_like(w),)

    def update(self, w: Tensor, gradient: Tensor, state: tuple[Tensor, ...]) -> None:
        """Updates `w` and v in place."""
        (velocity,) = state
        velocity.mul_(self.momentum).add_(gradient)
        if self.weight_decay:
            velocity.add_(w, alpha=self.weight_decay)
        w.add_(velocity, alpha=-self.learning_rate)
