"""Communication volume, computed before a run."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def condensation_floats(
    counts_KC: npt.NDArray[np.int64],
    ipc: int,
    image_shape: tuple[int, int, int],
    min_examples: int = 10,
) -> int:
    """Returns how many floats all clients upload in a round of FedDM: (classes with at least
    `min_examples` local examples) × ipc × image size.

    This is the rule of FedDM's Table 3 (arXiv 2207.09653, App. C), which does not count labels.
    """
    sent = int((counts_KC >= max(min_examples, 1)).sum())
    return sent * ipc * image_shape[0] * image_shape[1] * image_shape[2]
