"""FedSAM: local training by sharpness-aware minimisation (Qu et al. 2022, arXiv 2206.02618;
Caldarola et al. 2022, arXiv 2203.11834).

Each step computes the gradient g of the batch at w, moves to ŵ = w + ρ·g/‖g‖, and updates w with
the gradient at ŵ. The server averages the models as in FedAvg. As in FedFA's code, only the pass at
w updates buffers such as batch-norm statistics.

FedFA's code, from which the comparisons with FedFA+ come, trains FedSAM by Adam, but other methods
by SGD with the same learning rate of 0.01 on Office and DomainNet. The use of Adam may explain
FedSAM's low accuracies there. Here the clients use SGD.

The method cannot run with differential privacy. ŵ depends on all of the batch's examples. Removing
one example therefore changes the second gradients of all others, by more than the clip in total.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters
from fedsynth.core.method import ClientState
from fedsynth.methods.shared.local import LocalObjective, TrainsLocally
from fedsynth.training.segmentation import example_losses
from fedsynth.validation import in_range

TINY = 1e-12  # the public code's guard of ‖g‖


@dataclass(frozen=True)
class FedSAM(TrainsLocally):
    """FedSAM: local training that minimises the largest loss near the weights.

    The following settings come in addition to those of `TrainsLocally`.

    Args:
        rho: ρ, the distance of ŵ from w. It is 0.05 in FedFA's code, and 0.5 in Caldarola et al.'s
            code for CIFAR-10. With 0, the method is FedAvg, weighted by n_k.

    >>> from fedsynth import FedSAM, ModelSettings, RunSettings, simulate
    >>> method = FedSAM(local_epochs=2, batch=32, lr=0.1)
    >>> simulate(RunSettings(method, rounds=3, model=ModelSettings("linear"))).accuracy > 0.7
    True
    """

    name = "fedsam"
    summary = "local training by sharpness-aware minimisation"
    reference = "Qu et al. 2022, FedSAM, arXiv 2206.02618"
    dp_mechanisms = ()
    refusal = (
        "each step takes the gradients at a point that depends on all examples of the batch, so no "
        "clip bounds the influence of one example"
    )

    rho: float = in_range(0.05, 0)

    def task(
        self, client: int, message: ModelParameters, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        def loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            """Returns the losses at ŵ = w + shift. No gradient flows through the shift."""
            w = dict(network.named_parameters())
            value = example_losses(network(x), y).mean()
            g = torch.autograd.grad(value, list(w.values()), materialize_grads=True)
            norm = torch.cat([part.flatten() for part in g]).norm()
            tensors = {name: buffer.clone() for name, buffer in network.named_buffers()}
            for (name, start), part in zip(w.items(), g, strict=True):
                tensors[name] = start + self.rho / (norm + TINY) * part
            return example_losses(functional_call(network, tensors, (x,)), y)

        return LocalObjective(loss=loss)
