"""Hashes the inputs of a client's training, so that runs can reuse trained models."""

from __future__ import annotations

import hashlib
from itertools import chain

import torch

from fedsynth.training.loop import TRAINED
from fedsynth.training.many_clients import Learner
from fedsynth.training.sgd import LookUp, Objective, Pull
from fedsynth.version import __version__

# Number of images loaded at a time for a digest.
DIGEST_IMAGES = 4096


def covers(objective: Objective) -> bool:
    """Returns True if `training_name` can identify a training with this objective."""
    return objective.plain and type(objective.penalty) in (Pull, type(None))


def training_name(
    learner: Learner,
    images: LookUp,
    labels: LookUp,
    device: torch.device,
    precision: torch.dtype,
) -> str:
    """Returns a name that identifies the inputs of a client's training.

    The name contains a hash of the initial model, the data and their order, the optimiser, the
    penalty, the hardware and the software versions. Equal names mean equal results for fedsynth's
    networks, whose `repr` and values define them completely, as long as fedsynth's version is the
    same.
    """
    digest = hashlib.blake2b(digest_size=16)
    model = learner.model
    pull = learner.penalty if isinstance(learner.penalty, Pull) else None
    hardware = str(device.type)
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    description = (
        type(model).__qualname__,
        repr(model),
        repr(learner.settings),
        repr(pull and pull.weight),
        __version__,
        torch.__version__,
        hardware,
        torch.backends.cpu.get_cpu_capability(),
        str(torch.get_num_threads()),
        torch.get_float32_matmul_precision(),
        str(precision),
    )
    digest.update("\n".join(description).encode())
    tensors = [*model.parameters(), *model.buffers()]
    if pull is not None:
        tensors += [pull.center, pull.linear]
    tensors += [learner.generator.get_state(), labels(learner.examples)]
    parts = map(images, learner.examples.split(DIGEST_IMAGES))
    for tensor in chain(tensors, parts):
        digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return TRAINED + digest.hexdigest()
