"""FedSR: simple representations for domain generalization (Nguyen, Torr and Lim, NeurIPS 2022).

The representation of an example is random, z ~ N(μ(x), σ(x)²). Each client minimises the
cross-entropy of the classifier on one sample of z, plus two regularisers. L2R, with weight α, is
the length of z. CMI, with weight β, is KL(N(μ(x), σ(x)²) ‖ r(z|y)), where r(z|y) is a learned
Gaussian for each class y. It bounds the conditional mutual information of x and z given y from
above. The server averages the models, weighted by n_k.

In our networks, μ(x) is the embedding, and σ(x) = softplus(V μ(x) + v) is a further layer. r(z|y)
is a table of means and deviations. Layer and table are trained with the network, and averaged and
sent as parts of the model. The public code computes both μ and σ by the last layer of its backbone.

The paper and the public code leave some points open:

- The code takes the length ‖z‖ for L2R, and not ‖z‖². We do the same, because the default α is that
  of the code.
- In the code, each client keeps its own r(z|y). We average it, because CMI aligns the clients'
  representations only if they share the reference.
- The code multiplies z by a learned constant in CMI. The KL divergence does not change if z and r
  are scaled together, and r is learned, so we omit it.
- The code predicts by the mean softmax of 20 samples of z. We predict from μ(x), so a model has one
  answer for each image.

With differential privacy, an example's loss must not depend on its position in the batch, as it
would with separate noise for each row. All examples of a step then share one standard normal
sample, which is public and drawn before the step. The loss depends only on the example and on
public and released values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from fedsynth.core.capabilities import ExtendsNetwork
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters
from fedsynth.core.method import ClientState
from fedsynth.data.registry import DatasetSpec
from fedsynth.methods.shared.local import LocalObjective, TrainsLocally
from fedsynth.models.on_features import check_learned_embedding
from fedsynth.privacy.row_products import PaddedLinear
from fedsynth.seeding import torch_generator
from fedsynth.validation import in_range


def normal(mean: Tensor, raw_deviation: Tensor) -> Normal:
    """Returns the normal distribution with the standard deviation softplus(raw_deviation)."""
    # the check of values would wait for the device
    return Normal(mean, F.softplus(raw_deviation), validate_args=False)


@dataclass(frozen=True)
class FedSR(TrainsLocally, ExtendsNetwork):
    """FedSR: local training of random representations, with two regularisers.

    One penalises the length of a representation, and the other its information about the image. The
    following settings come in addition to those of `TrainsLocally`.

    Args:
        alpha: α, the weight of L2R. The default is the public code's.
        beta: β, the weight of CMI. The default is the public code's, whose command for PACS uses
            1e-3.
        sample: whether the classifier is trained on samples of z. Otherwise it is trained on μ(x).
            Without samples, and with α = β = 0, the method is FedAvg, weighted by n_k.

    >>> from fedsynth import FedSR, ModelSettings, RunSettings, simulate
    >>> method, model = FedSR(local_epochs=3, batch=32, lr=0.05), ModelSettings(width=16, depth=2)
    >>> result = simulate(RunSettings(method, rounds=2, model=model))
    >>> result.accuracy > 0.4
    True
    >>> [tuple(result.model.get_parameter(f"{n}.weight").shape) for n in ("deviation", "reference")]
    [(64, 64), (10, 128)]
    """

    name = "fedsr"
    summary = "local training of random representations that carry little information"
    reference = "Nguyen, Torr and Lim 2022, FedSR, NeurIPS 2022"
    masks_refusal = "the representation of an image has a prior for each class"

    alpha: float = in_range(0.01, 0)
    beta: float = in_range(5e-4, 0)
    sample: bool = True

    def add_layers(self, network: nn.Module, spec: DatasetSpec) -> nn.Module:
        """Adds FedSR's trainable parameters to the network.

        They are a layer that computes σ(x), and a table [C, 2D] of the means and deviations of
        r(z|y).
        """
        check_learned_embedding(self.name, network)
        classifier: nn.Linear = network.classifier  # type: ignore[assignment]
        width = classifier.in_features
        network.deviation = PaddedLinear(width, width)
        network.reference = nn.Embedding(classifier.out_features, 2 * width)
        with torch.no_grad():  # as in the public code: means 0, deviations softplus(1)
            network.reference.weight.copy_(torch.arange(2 * width) >= width)
        return network

    def task(
        self, client: int, message: ModelParameters, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        device = context.device
        noise = torch_generator(context.seed, "fedsr", context.round, client, device=device)
        private = context.privacy is not None
        width: int = context.architecture.classifier.in_features  # type: ignore[assignment,union-attr]
        shared = torch.zeros(width, device=device)

        def before_step(network: nn.Module) -> None:
            shared.normal_(generator=noise)

        def loss(network: Any, x: Tensor, y: Tensor) -> Tensor:
            mean = network.embed(x)
            p = normal(mean, network.deviation(mean))  # p(z|x)
            r = normal(*network.reference(y).chunk(2, dim=1))  # r(z|y)
            z = mean
            if self.sample:
                drawn = shared if private else torch.empty_like(mean).normal_(generator=noise)
                z = mean + p.stddev * drawn
            cross_entropy = F.cross_entropy(network.classifier(z), y, reduction="none")
            information = kl_divergence(p, r).sum(dim=1)
            return cross_entropy + self.alpha * z.norm(dim=1) + self.beta * information

        changed = {"noise": noise, "shared": shared}
        draw = before_step if private else None
        return LocalObjective(loss=loss, before_step=draw, state=changed)
