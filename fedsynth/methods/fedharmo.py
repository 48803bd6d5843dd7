"""FedHarmo: local training with amplitude normalisation and weight perturbation.

The paper calls the method HarmoFL (Jiang, Wang and Dou, AAAI 2022, arXiv 2112.10775).

1. Amplitude normalisation. An image is F⁻¹(A·e^{iP}) with the amplitudes A and the phases P of its
   Fourier transform. In round 1, client k averages the amplitudes of its batches, Ā ← (1 − ν)·Ā +
   ν·mean_b(A), and replaces A by Ā in all of its images. The server averages the Ā_k once. In later
   rounds, and in tests, all clients use the server's Ā.
2. Weight perturbation. A local step is w ← w − η·∇L(w + δ) with δ = α·∇L(w)/‖∇L(w)‖₂, so that the
   loss is low in a neighbourhood of w.
3. The server averages the models with equal weights, as the public code (med-air/HarmoFL) does.

Paper and code differ in step 1. The paper replaces all amplitudes. The code replaces only the
lowest frequencies' amplitudes, within a share L of the image's shorter side. It sets L = 0, so that
only an image's mean changes. `window` is L. It is 0 by default, because the published numbers come
from the code. The code passes ν = 0.1 as an integer, so its Ā_k is that of the first batch. Here ν
is 0.1, and Ā_k starts with the first batch. As in the code, the passes at w and at w + δ both
update buffers, so a step with α > 0 moves Ā_k by 1 − (1 − ν)² = 0.19. The code trains with Adam for
segmentation (`optimiser="adam"`).

The amplitudes are computed from pixels in [0, 1], before normalisation. They are a buffer of the
model, so they are uploaded, averaged and saved with it. The method cannot run with differential
privacy. Each client releases its average amplitudes without noise, and no clip bounds an example's
influence on a step with two gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedsynth.core.capabilities import ExtendsNetwork
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import ModelParameters
from fedsynth.core.method import ClientState
from fedsynth.data.images import pixel_constants
from fedsynth.data.registry import DatasetSpec
from fedsynth.methods.shared.aggregation import AveragingState, average
from fedsynth.methods.shared.local import LocalObjective, TrainsLocally
from fedsynth.training.segmentation import example_losses
from fedsynth.validation import in_range


class AmplitudeNorm(nn.Module):
    """Replaces the Fourier amplitudes of normalised images [N, C, H, W] by an average.

    Attributes:
        amplitude: Ā [C, H, W], with the lowest frequency in the centre. Before it is known, it is
            zero, and images do not change.
        learns: whether passes in training mode update Ā.
    """

    amplitude: Tensor
    low: Tensor

    def __init__(self, spec: DatasetSpec, decay: float, window: float) -> None:
        super().__init__()
        self.spec, self.decay, self.learns = spec, decay, False
        C, H, W = spec.image_shape
        reach = int(window * min(H, W))  # ⌊L·min(H, W)⌋
        rows, columns = (abs(torch.arange(n) - n // 2) <= reach for n in (H, W))
        self.register_buffer("low", rows[:, None] & columns, persistent=False)
        self.register_buffer("amplitude", torch.zeros(C, H, W))

    def extra_repr(self) -> str:
        return f"decay={self.decay}, learns={self.learns}"  # distinguishes trainings

    def forward(self, x_NCHW: Tensor) -> Tensor:
        mean, std = pixel_constants(self.spec, x_NCHW.device)
        spectrum = torch.fft.fftshift(torch.fft.fft2(x_NCHW * std + mean), dim=(2, 3))
        amplitude = spectrum.abs()
        if self.training and self.learns:
            batch = amplitude.detach().mean(dim=0)
            moved = (1 - self.decay) * self.amplitude + self.decay * batch
            self.amplitude.copy_(torch.where(self.amplitude.any(), moved, batch))
        target = torch.where(self.low & self.amplitude.any(), self.amplitude, amplitude)
        changed = torch.polar(target, spectrum.angle())
        pixels = torch.fft.ifft2(torch.fft.ifftshift(changed, dim=(2, 3))).real
        return (pixels - mean) / std


class Harmonised(nn.Module):
    """A layer for amplitude normalisation, followed by a network."""

    def __init__(self, network: nn.Module, norm: AmplitudeNorm) -> None:
        super().__init__()
        self.norm, self.network = norm, network

    def forward(self, x_NCHW: Tensor) -> Tensor:
        logits: Tensor = self.network(self.norm(x_NCHW))
        return logits


@dataclass(frozen=True)
class FedHarmo(TrainsLocally, ExtendsNetwork):
    """FedHarmo: local training with amplitude normalisation and weight perturbation.

    The following settings come in addition to those of `TrainsLocally`.

    Args:
        alpha: α, the length of the perturbation of the weights. It is 0.05 in the paper. With 0,
            steps are those of SGD.
        normalise: whether amplitudes are normalised. Without it and with α = 0, the method is
            FedAvg with equal weights.
        decay: ν, a batch's weight in a client's average amplitudes.
        window: the share of the image's shorter side within which frequencies around the lowest get
            the average amplitude. 0 changes only an image's mean, as in the public code, and 0.5
            all amplitudes, as in the paper.

    >>> from fedsynth import FedHarmo, ModelSettings, RunSettings, simulate
    >>> method = FedHarmo(local_epochs=2, batch=32, lr=0.1)
    >>> result = simulate(RunSettings(method, rounds=3, model=ModelSettings("linear")))
    >>> result.accuracy > 0.8, list(result.model.norm.amplitude.shape)
    (True, [1, 8, 8])
    """

    name = "fedharmo"
    summary = "images with common amplitude spectra, and local training towards flat minima"
    reference = "Jiang, Wang and Dou 2022, HarmoFL, arXiv 2112.10775"
    refusal = "the clients release average amplitudes of their images, which no mechanism protects"
    dp_mechanisms = ()
    features_refusal = "a model on features reads no images, which have amplitudes. Use fedavg"

    alpha: float = in_range(0.05, 0)
    normalise: bool = True
    decay: float = in_range(0.1, 0, 1)
    window: float = in_range(0.0, 0, 0.5)

    def add_layers(self, network: nn.Module, spec: DatasetSpec) -> nn.Module:
        if not self.normalise:
            return network
        return Harmonised(network, AmplitudeNorm(spec, self.decay, self.window))

    def start_model(
        self, client: int, message: ModelParameters, state: ClientState, context: RoundContext
    ) -> nn.Module:
        model = super().start_model(client, message, state, context)
        if isinstance(model, Harmonised):
            model.norm.learns = not bool(model.norm.amplitude.any())  # the server has none yet
        return model

    def task(
        self, client: int, message: ModelParameters, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        def loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            """Returns each example's loss at the perturbed weights w + δ, with δ constant."""
            parameters = dict(network.named_parameters())
            at_w = example_losses(network(x), y).mean()
            gradients = torch.autograd.grad(at_w, list(parameters.values()), materialize_grads=True)
            norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
            scale = self.alpha / (norm + 1e-12)
            moved = {
                name: w + scale * g
                for (name, w), g in zip(parameters.items(), gradients, strict=True)
            }
            return example_losses(functional_call(network, moved, (x,)), y)

        return LocalObjective(loss=loss if self.alpha else None)

    def combine(
        self, state: AveragingState, uploads: Mapping[int, ModelParameters], context: RoundContext
    ) -> AveragingState:
        return replace(state, parameters=average(uploads, uniform=True))
