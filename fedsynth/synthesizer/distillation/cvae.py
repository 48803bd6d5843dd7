"""The conditional variational autoencoder of FedCVAE (Heinbaugh, Luz-Ricca and Shao 2023).

The encoder maps the pixels x of an image in [0, 1] to the mean μ and the log-variance of a Gaussian
over z. The decoder maps z and the one-hot label to the logits of the pixels. The layers are the
public code's, where the encoder takes no label. The code resizes images to 32 × 32. Here the
encoder pads them to a multiple of 16 instead, which gives layers of the same size for 28 × 28, and
the decoder crops its output.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.data.images import pixel_constants
from fedsynth.data.registry import DatasetSpec
from fedsynth.privacy.row_products import PaddedLinear
from fedsynth.seeding import forked_rng

HALVINGS = 4  # convolutions with stride 2
PATCH = 2**HALVINGS
HIDDEN = 500  # width of the encoder's hidden layer
PER_GROUP = 16  # channels of a group in group norm (Wu and He 2018)
AT_ONCE = 512  # images that a decoder generates in a pass


def _layers(
    kind: Callable[..., nn.Module], widths: list[int], norm: str, last: int | None = None
) -> list[nn.Module]:
    """Returns blocks of a stride-2 convolution, a norm and ReLU.

    If `last` is set, a convolution to `last` channels follows.
    """
    eps = 1e-5 if last is None else 1e-3  # the public code has 1e-3 in the decoder only
    layers: list[nn.Module] = []
    for width, out in pairwise(widths):
        group_norm = nn.GroupNorm(max(1, out // PER_GROUP), out)
        normalised = nn.BatchNorm2d(out, eps) if norm == "batch" else group_norm
        layers += [kind(width, out, 4, 2, 1), normalised, nn.ReLU()]
    return layers if last is None else [*layers, kind(widths[-1], last, 4, 2, 1)]


class Decoder(nn.Module):
    """The decoder, which maps [z; one-hot label] [N, latent + classes] to logits [N, C, H, W]."""

    def __init__(self, spec: DatasetSpec, latent: int, width: int, norm: str) -> None:
        super().__init__()
        self.latent = latent
        self._spec = spec
        rows, columns = -(-spec.height // PATCH), -(-spec.width // PATCH)
        self.body = nn.Sequential(
            PaddedLinear(latent + spec.classes, 2 * width * rows * columns),
            nn.Unflatten(1, (2 * width, rows, columns)),
            nn.ReLU(),
            *_layers(nn.ConvTranspose2d, [2 * width, 2 * width, width, width], norm, spec.channels),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.body(inputs)[..., : self._spec.height, : self._spec.width]
        return logits

    def inputs(self, z_NL: Tensor, labels_N: Tensor) -> Tensor:
        """Returns the decoder's inputs, [N, latent + classes]."""
        return torch.cat([z_NL, F.one_hot(labels_N, self._spec.classes).to(z_NL.dtype)], dim=1)

    @torch.no_grad()
    def pixels(self, inputs: Tensor) -> Tensor:
        """Generates pixels in [0, 1], [N, C, H, W]."""
        self.eval()
        return torch.cat([torch.sigmoid(self(part)) for part in inputs.split(AT_ONCE)])


class Cvae(nn.Module):
    """The encoder and the decoder.

    Args:
        spec: the specification of the images.
        latent: the length of z.
        width: the number of channels in the narrow layers. The other layers have twice as many.
        norm: "batch" or "group".
    """

    def __init__(self, spec: DatasetSpec, latent: int, width: int, norm: str) -> None:
        super().__init__()
        self._spec = spec
        self.image_size = spec.channels * spec.height * spec.width
        self._padding = 0, -spec.width % PATCH, 0, -spec.height % PATCH
        cells = -(-spec.height // PATCH) * -(-spec.width // PATCH)
        widths = [spec.channels, width, width, 2 * width, 2 * width]
        self.encoder = nn.Sequential(
            *_layers(nn.Conv2d, widths, norm),
            nn.Flatten(),
            PaddedLinear(2 * width * cells, HIDDEN),
            PaddedLinear(HIDDEN, 2 * latent),
        )
        self.decoder = Decoder(spec, latent, width, norm)

    def elbo_losses(
        self, x_NCHW: Tensor, labels_N: Tensor, noise_NL: Tensor, beta: float
    ) -> Tensor:
        """Computes each image's negative evidence lower bound [N] with a weighted KL term.

        Args:
            x_NCHW: normalised images.
            labels_N: their labels.
            noise_NL: ε of the reparametrisation z = μ + σ·ε.
            beta: the KL term's weight β.
        """
        mean, std = pixel_constants(self._spec, x_NCHW.device)
        pixels = x_NCHW * std + mean
        mu, log_variance = self.encoder(F.pad(pixels, self._padding)).chunk(2, dim=1)
        z = mu + (log_variance / 2).exp() * noise_NL
        kl = (mu.square() + log_variance.exp() - 1 - log_variance).sum(dim=1) / 2
        logits = self.decoder(self.decoder.inputs(z, labels_N))
        return reconstruction_losses(logits, pixels) + beta * kl


def reconstruction_losses(logits_NCHW: Tensor, pixels_NCHW: Tensor) -> Tensor:
    """Computes each image's reconstruction loss [N], summed over pixels: cross-entropy for one
    channel, otherwise squared distance.
    """
    if logits_NCHW.shape[1] == 1:
        losses = F.binary_cross_entropy_with_logits(logits_NCHW, pixels_NCHW, reduction="none")
    else:
        losses = (torch.sigmoid(logits_NCHW) - pixels_NCHW).square()
    return losses.flatten(1).sum(dim=1)


def make_cvae(
    spec: DatasetSpec, seed: int, *numbers: int, latent: int, width: int, norm: str
) -> Cvae:
    """Creates a `Cvae` with reproducible initial weights.

    The weights depend only on `seed` and `numbers`, such as a client's number.

    >>> from fedsynth.data.registry import dataset_spec
    >>> cvae = make_cvae(dataset_spec("mnist"), 0, latent=10, width=32, norm="batch")
    >>> cvae.decoder.pixels(torch.zeros(2, 20)).shape
    torch.Size([2, 1, 28, 28])
    """
    with forked_rng(seed, "autoencoder initialisation", *numbers):
        return Cvae(spec, latent, width, norm)


def truncated_normal(rows: int, columns: int, bound: float, draws: torch.Generator) -> Tensor:
    """Draws z [N, L] from the standard normal distribution, truncated to [−bound, bound]."""
    z = torch.empty(rows, columns, device=draws.device)
    return nn.init.trunc_normal_(z, a=-bound, b=bound, generator=draws)
