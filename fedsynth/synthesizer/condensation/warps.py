"""Images that are turned, scaled, moved, bent or mixed: what a teacher is asked to label.

Copies need not keep their image's class, since their label is the teacher's. Bending is by a smooth
random field (after Simard, Steinkraus & Platt 2003).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

TURN = 0.15  # radians; this and the next four are the most
SCALE = 0.15  # of the size
SHEAR = 0.1  # of a side
SHIFT = 0.16  # of half a side
BEND = 0.12  # of half a side, at the knots of a grid
KNOTS = 5  # of this grid, a side


def warped(x_NCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Each image turned, scaled, sheared, moved and bent by draws of its own; what comes in from
    outside is the border's.

    Args:
        x_NCHW: of any scale.
        generator: on the images' device.
    """
    count = len(x_NCHW)

    def drawn(most: float, *shape: int) -> Tensor:
        made = torch.rand(count, *shape, generator=generator, device=x_NCHW.device)
        return most * (2 * made - 1)

    angle = drawn(TURN)
    theta = torch.zeros(count, 2, 3, device=x_NCHW.device)
    theta[:, 0, 0] = (1 + drawn(SCALE)) * angle.cos()
    theta[:, 0, 1] = drawn(SHEAR) - angle.sin()
    theta[:, 1, 0] = angle.sin()
    theta[:, 1, 1] = (1 + drawn(SCALE)) * angle.cos()
    theta[:, :, 2] = drawn(SHIFT, 2)
    where = F.affine_grid(theta, list(x_NCHW.shape), align_corners=False)
    field = drawn(BEND, 2, KNOTS, KNOTS)
    bent = F.interpolate(field, size=x_NCHW.shape[2:], mode="bicubic", align_corners=False)
    moved = where + bent.permute(0, 2, 3, 1)
    return F.grid_sample(x_NCHW, moved, padding_mode="border", align_corners=False)


def blended(x_NCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Each image mixed with another one of them, in a share uniform on [0, 1]."""
    count = len(x_NCHW)
    share = torch.rand(count, 1, 1, 1, generator=generator, device=x_NCHW.device)
    other = torch.randperm(count, generator=generator, device=x_NCHW.device)
    mixed: Tensor = share * x_NCHW + (1 - share) * x_NCHW[other]
    return mixed
