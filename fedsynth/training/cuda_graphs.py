"""CUDA graphs: a training step is recorded once and replayed, so that Python does not delay small
kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

WARM_UP = 3


def recorded(
    step: Callable[[Tensor], None], batch: int, state: Sequence[Tensor]
) -> Callable[[Tensor], None]:
    """Returns a function of indices [batch] that replays `step` as a CUDA graph; if it cannot be
    recorded, warns, and calls `step`.

    Args:
        step: (indices into the resident data) -> None; uses tensors at fixed addresses, and does
            not wait for the device.
        batch: number of indices.
        state: every tensor that `step` changes; the effect of warm-up runs on them is undone.
    """
    device = state[0].device
    index = torch.zeros(batch, dtype=torch.int64, device=device)
    initial = [tensor.clone() for tensor in state]
    try:
        replay = _record(partial(step, index), device)
    except RuntimeError as error:
        warnings.warn(
            f"the training step runs without a CUDA graph: {str(error).splitlines()[0]}",
            RuntimeWarning,
            stacklevel=2,
        )
        replay = partial(step, index)
    for tensor, old in zip(state, initial, strict=True):
        tensor.copy_(old)

    def replay_on(indices: Tensor) -> None:
        index.copy_(indices)
        replay()

    return replay_on


def _record(step: Callable[[], None], device: torch.device) -> Callable[[], object]:
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        stream = torch.cuda.Stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                step()
        finally:  # a failed capture may leave its own stream in place
            torch.cuda.set_stream(current)

    def replay() -> None:
        with torch.cuda.device(device):
            graph.replay()

    return replay
