"""CUDA graphs of training steps.

A step is recorded once and then replayed, so that launching many small kernels from Python does not
slow down training.
"""

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
    """Records a training step as a CUDA graph, and returns a function that replays the step.

    The returned function takes indices [batch]. If the step cannot be recorded, a warning is
    issued, and the returned function calls `step` directly.

    Args:
        step: a function that takes indices into the dataset in memory and returns nothing. It must
            use tensors at fixed addresses, and must not wait for the device.
        batch: number of indices in a batch.
        state: all tensors that `step` changes. Their values are restored after the warm-up runs.
    """
    device = state[0].device
    index = torch.zeros(batch, dtype=torch.int64, device=device)
    initial = [tensor.clone() for tensor in state]
    try:
        replay = _record(partial(step, index), device)
    except RuntimeError as error:
        warnings.warn(
            "the training step runs without a CUDA graph, which is slower, because recording it "
            f"failed: {str(error).splitlines()[0]}",
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
