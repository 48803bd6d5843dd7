"""Generators of images for distillation without data, and FedGen's generator of embeddings.

The image generator is similar to DCGAN (Radford et al. 2016), in the form used by DAFL (Chen et al.
2019). A linear layer makes a small feature map. Upsampling with convolution, batch norm and leaky
ReLU doubles it twice. One more convolution and a sigmoid follow. The output is pixels in [0, 1],
and `normalised` returns network inputs.

A generator never reads data. It learns only from released models.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.data.images import pixel_constants
from fedsynth.data.registry import DatasetSpec, as_spec
from fedsynth.mixed_precision import widened
from fedsynth.models.convnet import channels_last
from fedsynth.seeding import forked_rng

ImageFormat = DatasetSpec | tuple[int, int, int]  # a data set or (channels, height, width)


class DoublingConv2d(nn.Conv2d):
    """`Upsample(2)` (nearest neighbour) and a 3×3 convolution with padding 1 in one operation.

    Equal pixels share a product, so each pair of channels needs 4 products at an output pixel
    instead of 9, and the enlarged image is never computed. The weights and their initialisation
    equal those of the two layers, and so do the results up to rounding.

    >>> x, layer = torch.rand(2, 4, 7, 7), DoublingConv2d(4, 3)
    >>> two = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(4, 3, 3, padding=1))
    >>> two[1].load_state_dict(layer.state_dict())
    <All keys matched successfully>
    >>> torch.allclose(layer(x), two(x), atol=1e-5)
    True
    """

    def __init__(self, channels: int, out: int) -> None:
        super().__init__(channels, out, 3, padding=1)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        # Doubling is a transposed convolution with 2×2 ones and stride 2. Together with the 3×3 one
        # it is a single 4×4 transposed convolution: the weight, summed over neighbouring rows and
        # columns, and mirrored, as a transposed convolution mirrors.
        wide = F.pad(self.weight, (1, 1, 1, 1))
        rows = wide[..., :-1, :] + wide[..., 1:, :]
        kernel = (rows[..., :-1] + rows[..., 1:]).flip(2, 3).transpose(0, 1)
        doubled = F.conv_transpose2d(x_NCHW, kernel, stride=2, padding=1)
        # bias added separately: a CPU's transposed convolution sums its gradient in a slow loop
        bias: Tensor = self.bias  # type: ignore[assignment]  # `Conv2d` has bias=True
        return doubled + bias.to(doubled.dtype)[:, None, None]


class Generator(nn.Module):
    """A generator that maps noise [N, latent] to pixels [N, C, H, W] in [0, 1].

    Args:
        images: the specification of the images, or their shape (C, H, W).
        latent: the length of the noise vector z.
        width: the number of channels in the last hidden layer (64 in DAFL). The layers before it
            have twice as many.
        running: whether batch norm keeps running statistics, which evaluation mode needs.
    """

    def __init__(
        self, images: ImageFormat, latent: int = 100, width: int = 64, running: bool = True
    ) -> None:
        super().__init__()
        spec = as_spec(images)
        self.latent = latent
        self._spec = spec
        self._rows = -(-spec.height // 4)
        self._columns = -(-spec.width // 4)
        self._wide = 2 * width
        self.start = nn.Linear(latent, self._wide * self._rows * self._columns)
        self.body = nn.Sequential(
            nn.BatchNorm2d(self._wide, track_running_stats=running),
            DoublingConv2d(self._wide, self._wide),
            nn.BatchNorm2d(self._wide, 0.8, track_running_stats=running),
            nn.LeakyReLU(0.2),
            DoublingConv2d(self._wide, width),
            nn.BatchNorm2d(width, 0.8, track_running_stats=running),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, spec.channels, 3, padding=1),
        )

    def forward(self, z_NL: Tensor) -> Tensor:
        h = self.start(z_NL).view(len(z_NL), self._wide, self._rows, self._columns)
        h = self.body(channels_last(h))
        # in float32: in bfloat16 the sigmoid is 1 from 6.5 on, so bright pixels have no gradient
        return torch.sigmoid(widened(h[..., : self._spec.height, : self._spec.width]))

    def normalised(self, z_NL: Tensor) -> Tensor:
        """Returns generated images as network inputs, (pixels − mean)/std."""
        pixels = self(z_NL)
        mean, std = pixel_constants(self._spec, pixels.device)
        return (pixels - mean) / std


class LatentGenerator(nn.Module):
    """FedGen's generator G(y, ε) of embeddings (arXiv 2105.10056, and its public code).

    It has one hidden layer and maps labels [N] and noise [N, noise] to embeddings [N, size].
    """

    def __init__(self, classes: int, size: int, noise: int = 32, hidden: int = 256) -> None:
        super().__init__()
        self.classes = classes
        self.noise = noise
        self.hidden = nn.Sequential(
            nn.Linear(noise + classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU()
        )
        self.out = nn.Linear(hidden, size)

    def forward(self, labels_N: Tensor, noise_NE: Tensor) -> Tensor:
        inputs = torch.cat([noise_NE, F.one_hot(labels_N, self.classes).to(noise_NE.dtype)], dim=1)
        return self.out(self.hidden(inputs))


def make_generator(
    images: ImageFormat,
    seed: int,
    *numbers: int,
    latent: int = 100,
    width: int = 64,
    running: bool = True,
) -> Generator:
    """Creates a `Generator` with reproducible initial weights.

    The weights depend only on `seed` and `numbers`, such as a round and an epoch. The global random
    generator's state does not change.

    >>> make_generator((1, 28, 28), seed=0)(torch.randn(2, 100)).shape
    torch.Size([2, 1, 28, 28])
    """
    with forked_rng(seed, "generator initialisation", *numbers):
        return Generator(images, latent, width, running)


def descend(loss: Tensor, *optimisers: torch.optim.Optimizer) -> None:
    """Takes one step of each optimiser to reduce `loss`. Other networks' gradients do not
    change.
    """
    parameters = []
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            parameters += group["params"]
    for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = gradient
    for optimiser in optimisers:
        optimiser.step()
