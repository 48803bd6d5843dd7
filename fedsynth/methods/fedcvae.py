"""FedCVAE-Ens and FedCVAE-KD: clients send the decoders of autoencoders in a single round.

The paper is Heinbaugh, Luz-Ricca and Shao 2023, Data-Free One-Shot Federated Learning Under Very
High Statistical Heterogeneity.

Each client trains a conditional variational autoencoder (CVAE) on its data, with the negative
evidence lower bound (ELBO) as the loss, and sends the decoder and its class counts. The server
draws z from a truncated normal distribution and labels from each client's label distribution, and
the client's decoder generates images. Each client's share of the images is its share of the data.

- FedCVAE-Ens trains the classifier on these images.
- FedCVAE-KD distils the decoders into one, which learns to generate the same images from the same z
  and labels. The classifier then learns from the distilled decoder's images, with uniform labels.

The details follow the public code (ceh-2000/fed_cvae). The reconstruction loss is summed over
pixels. The autoencoders start from different weights, and in every round the classifier starts from
the run's initial network. A run usually takes one round. In further rounds, clients continue to
train their autoencoders, as in the code. Nothing is averaged, so no setting equals FedAvg.

With differential privacy, the autoencoder is trained by DP-SGD, and the counts are a further
release. Batch norm is replaced, and classes with small released counts are left out.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsynth.core.capabilities import SyntheticImages
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, Tensors, released
from fedsynth.core.method import ClientState, Plans, Presets
from fedsynth.core.uploads import Named, Rule
from fedsynth.data.images import pixel_constants
from fedsynth.errors import SettingError
from fedsynth.methods.shared.aggregation import AveragingState
from fedsynth.methods.shared.class_sums import COUNTS, class_counts, counts_plan, sums_rules
from fedsynth.methods.shared.local import LocalObjective, Trained, TrainsLocally
from fedsynth.privacy.row_products import row_product
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.distillation import cvae
from fedsynth.training import sgd
from fedsynth.validation import in_range, one_of


@dataclass(frozen=True)
class Start(Message):
    """FedCVAE's empty request to the clients, which need no model from the server."""


@dataclass(frozen=True)
class DecoderAndCounts(ModelParameters):
    """A client's upload in FedCVAE: the decoder and the class counts [C].

    The field `parameters` holds the decoder.
    """

    counts: Tensor = released()


@dataclass(frozen=True)
class GeneratedState(AveragingState):
    """The server's state in FedCVAE, with the images that trained the classifier.

    Args:
        decoder: the distilled decoder of FedCVAE-KD. The mapping is empty in FedCVAE-Ens.
        images: the normalised images [N, C, H, W], or None before the first round.
        labels: their labels [N].
    """

    decoder: Tensors = field(default_factory=dict)
    images: Tensor | None = None
    labels: Tensor | None = None


class LatentNoise:
    """The noise ε ~ N(0, 1) of the reparametrisation z = μ + σ·ε, for each example.

    It is drawn for each example independently. With differential privacy, noise by position would
    depend on the batch's other examples. An example x then gets the noise W·x/‖x‖, where the
    standard normal matrix W is drawn publicly before each step. This noise has the same
    distribution, and depends only on W and x.
    """

    def __init__(self, latent: int, draws: torch.Generator, context: RoundContext) -> None:
        self._latent = latent
        self._draws = draws
        self._private = context.privacy is not None
        self._directions = torch.empty(0)

    def before_step(self, model: nn.Module) -> None:
        if self._private:
            size: Any = model.image_size
            self._directions = torch.randn(
                self._latent, size, generator=self._draws, device=self._draws.device
            )

    def __call__(self, x_NCHW: Tensor) -> Tensor:
        if self._private:
            return row_product(F.normalize(x_NCHW.flatten(1)), self._directions)
        return torch.randn(
            len(x_NCHW), self._latent, generator=self._draws, device=self._draws.device
        )


@dataclass(frozen=True)
class TrainsAutoencoders(TrainsLocally, SyntheticImages):
    """Base class of FedCVAE-Ens and FedCVAE-KD, whose clients train autoencoders.

    The defaults are the public code's for MNIST (`experiments/best_hyperparameters`), and the
    presets are its values for other data sets. `TrainsLocally` documents the settings of local
    training.

    Args:
        latent: the length of z.
        beta: β, the weight of the KL term in the ELBO.
        width: number of channels in the autoencoder's narrow layers. The other layers have twice as
            many. It is 32 in the public code.
        norm: the autoencoder's norm layers. "batch" is the public code's, and mixes a batch's
            examples. "auto" is "group" with differential privacy, otherwise "batch".
        truncation: z is drawn from a standard normal distribution truncated to ± this value.
        samples: number of images from which the classifier learns.
        server_epochs: number of passes over these images.
        server_batch: number of images in a server step.
        server_lr: learning rate of Adam for the classifier.
        count_noise: noise multiplier of the class counts, divided by the run's σ. It is used only
            with differential privacy. The default is public and was not tuned.
    """

    request = Start
    upload = DecoderAndCounts
    state = GeneratedState
    robust_refusal = "the server samples from decoders and averages no models"
    masks_refusal = "decoders make images of a class"
    features_refusal = "the clients and the server use the images directly"
    oca_refusal = "the server trains the model and averages no models"
    presets: ClassVar[Presets] = {
        "fashion-mnist": {"local_epochs": 25, "server_epochs": 5},
        "svhn": {"local_epochs": 50, "server_epochs": 5},
        "digits": {"local_epochs": 50, "width": 16, "samples": 1000},
    }

    local_epochs: int = 15
    batch: int = 32
    lr: float = 1e-3
    optimiser: str = "adam"
    latent: int = in_range(10, 1)
    beta: float = in_range(1.0, 0)
    width: int = in_range(32, 1)
    norm: str = one_of("auto", "batch", "group")
    truncation: float = in_range(3.0, 1e-3)
    samples: int = in_range(5000, 1)
    server_epochs: int = in_range(10, 1)
    server_batch: int = in_range(32, 1)
    server_lr: float = in_range(1e-3, 0)
    count_noise: float = in_range(5.0, 1e-3)

    # ----------------------------------------------------- the client: a CVAE, trained on the ELBO

    def broadcast(self, state: GeneratedState, context: RoundContext) -> Message:
        return Start()

    def start_model(
        self, client: int, message: Start, state: ClientState, context: RoundContext
    ) -> cvae.Cvae:
        model = self.autoencoder(context, client)
        if state:
            model.load_state_dict(dict(state))
        return model.to(context.device)

    def task(
        self, client: int, message: Start, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        draws = torch_generator(
            context.seed, "reparametrisation", context.round, client, device=context.device
        )
        noise = LatentNoise(self.latent, draws, context)

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return model.elbo_losses(x, y, noise(x), self.beta)  # type: ignore[operator]

        def make_upload(model: nn.Module, trained: Trained) -> tuple[Message, ClientState]:
            decoder: nn.Module = model.decoder  # type: ignore[assignment]
            counts = class_counts(trained.client)[0]
            upload = DecoderAndCounts(decoder.state_dict(), trained.weight, counts)
            return upload, copy.deepcopy(model.state_dict())

        return LocalObjective(
            loss, before_step=noise.before_step, state={"draws": draws}, make_upload=make_upload
        )

    # ------------------------------------------------------ the server: a classifier on its images

    def server_step(
        self, state: GeneratedState, uploads: Mapping[int, DecoderAndCounts], context: RoundContext
    ) -> GeneratedState:
        floor = max(1.0, 2 * context.noise.get(COUNTS, 0.0))
        teachers: list[tuple[cvae.Decoder, Tensor]] = []
        for client, upload in uploads.items():
            counts = upload.counts * (upload.counts >= floor)
            if upload.weight and bool(counts.any()):
                decoder = self.autoencoder(context, client).decoder
                decoder.load_state_dict(dict(upload.parameters))
                teachers.append((decoder.to(context.device), counts))
        if not teachers:  # every client was dropped, or no released count is above its noise
            return state
        draws = torch_generator(context.seed, "z", context.round, device=context.device)
        decoder_state, pixels, labels = self.generate(state, teachers, draws, context)
        mean, std = pixel_constants(context.spec, context.device)
        images = (pixels - mean) / std
        model = copy.deepcopy(context.architecture).to(context.device)
        self.train(model, images, labels, self.server_epochs, self.server_lr, context)
        return replace(
            state,
            parameters=model.state_dict(),
            decoder=decoder_state,
            images=images,
            labels=labels,
        )

    @abstractmethod
    def generate(
        self,
        state: GeneratedState,
        teachers: list[tuple[cvae.Decoder, Tensor]],
        draws: torch.Generator,
        context: RoundContext,
    ) -> tuple[Tensors, Tensor, Tensor]:
        """Generates the images from which the classifier learns.

        Args:
            state: the server's state before the round.
            teachers: the decoder and the class counts [C] of each client. No count is negative.
            draws: the generator of z and of the labels.
            context: the context of the round.

        Returns:
            The server's decoder, pixels in [0, 1] [N, C, H, W], and labels [N].
        """

    def draw_from(
        self,
        teachers: list[tuple[cvae.Decoder, Tensor]],
        samples: int,
        draws: torch.Generator,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draws images from all decoders. Returns decoder inputs [N, L + C], pixels and labels.

        Each client has ⌊samples · n_k/n⌋ images, and the last client the rest.
        """
        sizes = torch.stack([counts.sum() for _, counts in teachers]).double().cpu()
        shares = (sizes / sizes.sum() * samples).long()
        shares[-1] += samples - shares.sum()
        drawn = []
        for (decoder, counts), share in zip(teachers, shares.tolist(), strict=True):
            if not share:  # a client with a small part of the records
                continue
            z = cvae.truncated_normal(share, self.latent, self.truncation, draws)
            labels = _labels(counts, share, draws)
            inputs = decoder.inputs(z, labels)
            drawn.append((inputs, decoder.pixels(inputs), labels))
        inputs, pixels, labels = map(torch.cat, zip(*drawn, strict=True))
        return inputs, pixels, labels

    def train(
        self,
        model: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        epochs: int,
        lr: float,
        context: RoundContext,
        objective: sgd.Objective = sgd.CROSS_ENTROPY,
    ) -> None:
        """Trains one of the server's networks by Adam, in place."""
        name = type(model).__name__
        sgd.train_on(
            model,
            inputs.__getitem__,
            targets,
            sgd.SgdSettings(epochs, self.server_batch, sgd.Adam(lr)),
            torch_generator(context.seed, f"server training of {name}", context.round),
            objective,
            lambda completed, total: context.report(f"server: {name}", completed, total),
            precision=context.precision,
        )

    def synthetic(
        self, state: GeneratedState, context: RoundContext
    ) -> tuple[Tensor, Tensor, None] | None:
        if state.images is None or state.labels is None:
            return None
        return state.images, state.labels, None

    # --------------------------------------------------------------------------- declarations

    def autoencoder(self, context: RoundContext, client: int = 0) -> cvae.Cvae:
        """Returns a client's untrained autoencoder, on the CPU."""
        norm = self.norm
        if norm == "auto":
            norm = "batch" if context.privacy is None else "group"
        return cvae.make_cvae(
            context.spec, context.seed, client, latent=self.latent, width=self.width, norm=norm
        )

    def upload_rules(self, exchange: str, client: int, context: RoundContext) -> dict[str, Rule]:
        rules = super().upload_rules(exchange, client, context)
        counts = sums_rules(client, (context.spec.classes,), COUNTS, context)["counts"]
        decoder = self.autoencoder(context).decoder.state_dict()
        return {**rules, "parameters": Named.like(decoder), "counts": counts}

    def client_bytes(self, context: RoundContext) -> None:
        return None

    def release_plans(self, privacy: PrivacySettings, context: RoundContext) -> Plans:
        """Plans the private releases: the autoencoder's DP-SGD and the class counts."""
        if self.norm == "batch":
            reason = (
                "must not be 'batch' with differential privacy, because batch norm mixes a batch's "
                "examples. Set method.norm=auto"
            )
            raise SettingError("method", "norm", reason)
        private = replace(context, privacy=privacy)
        (model,) = super().release_plans(privacy, self._of_autoencoder(private))
        C = context.spec.classes
        sums = replace(model, mechanism="sums", sample_rate=1.0, dimension=C, groups=C)
        return model, counts_plan(sums, self.count_noise)

    def client_plans(self, plans: Plans, client: int, context: RoundContext) -> Plans:
        return super().client_plans(plans, client, self._of_autoencoder(context))

    def _of_autoencoder(self, context: RoundContext) -> RoundContext:
        """Returns a copy of the context in which the network is the clients' autoencoder."""
        return replace(context, architecture=self.autoencoder(context))


def _labels(weights_C: Tensor, number: int, draws: torch.Generator) -> Tensor:
    """Draws `number` labels with probabilities proportional to `weights`."""
    return torch.multinomial(weights_C, number, replacement=True, generator=draws)


@dataclass(frozen=True)
class FedCVAEEns(TrainsAutoencoders):
    """FedCVAE-Ens: the server learns from images drawn from all clients' decoders.

    The settings are documented in `TrainsAutoencoders`.

    >>> from fedsynth import resolve, simulate
    >>> run, split = {"method": "fedcvae-ens", "rounds": 1}, {"kind": "iid", "clients": 2}
    >>> quick = {"local_steps": 60, "lr": 0.02, "width": 8, "samples": 300, "server_lr": 0.01}
    >>> sections = {"run": run, "partition": split, "model": {"name": "linear"}, "method": quick}
    >>> result = simulate(resolve(sections))
    >>> int(result.uploads[0].counts.sum()), result.accuracy > 0.3  # of 1438 digits
    (719, True)
    """

    name = "fedcvae-ens"
    summary = "one-shot: clients send decoders of images, from which the server learns"
    reference = "Heinbaugh, Luz-Ricca and Shao 2023, FedCVAE (ICLR)"

    def generate(
        self,
        state: GeneratedState,
        teachers: list[tuple[cvae.Decoder, Tensor]],
        draws: torch.Generator,
        context: RoundContext,
    ) -> tuple[Tensors, Tensor, Tensor]:
        _, pixels, labels = self.draw_from(teachers, self.samples, draws)
        return {}, pixels, labels


@dataclass(frozen=True)
class FedCVAEKd(TrainsAutoencoders):
    """FedCVAE-KD: the server distils all decoders into one, and trains the model on its images.

    The following settings come in addition to those of `TrainsAutoencoders`.

    Args:
        decoder_samples: number of images drawn from the clients' decoders for distillation.
        decoder_epochs: number of passes over these images.
        decoder_lr: learning rate of Adam for the server's decoder.

    >>> from fedsynth import resolve, simulate
    >>> run, split = {"method": "fedcvae-kd", "rounds": 1}, {"kind": "iid", "clients": 2}
    >>> quick = {"local_steps": 5, "width": 8, "samples": 300, "decoder_samples": 100}
    >>> result = simulate(resolve({"run": run, "partition": split, "method": quick}))
    >>> result.uploads[0].floats  # of a decoder of 8 and 16 channels, and ten counts
    7803
    """

    name = "fedcvae-kd"
    summary = "one-shot: the server distils the clients' decoders, and learns from the result"
    reference = "Heinbaugh, Luz-Ricca and Shao 2023, FedCVAE (ICLR)"
    presets: ClassVar[Presets] = {
        "fashion-mnist": {"latent": 100, "truncation": 2.0, "decoder_epochs": 10},
        "svhn": {"truncation": 3.0, "decoder_epochs": 80},
        "digits": {"decoder_samples": 1000},
    }

    truncation: float = 1.0
    decoder_samples: int = in_range(5000, 1)
    decoder_epochs: int = in_range(7, 1)
    decoder_lr: float = in_range(0.01, 0)

    def generate(
        self,
        state: GeneratedState,
        teachers: list[tuple[cvae.Decoder, Tensor]],
        draws: torch.Generator,
        context: RoundContext,
    ) -> tuple[Tensors, Tensor, Tensor]:
        inputs, targets, _ = self.draw_from(teachers, self.decoder_samples, draws)
        decoder = self.autoencoder(context, context.clients).decoder.to(context.device)
        if state.decoder:
            decoder.load_state_dict(dict(state.decoder))
        reconstruct = sgd.Objective(
            lambda network, inputs, targets: cvae.reconstruction_losses(network(inputs), targets)
        )
        epochs, lr = self.decoder_epochs, self.decoder_lr
        self.train(decoder, inputs, targets, epochs, lr, context, reconstruct)
        z = cvae.truncated_normal(self.samples, self.latent, self.truncation, draws)
        labels = _labels(torch.ones(context.spec.classes, device=z.device), self.samples, draws)
        return decoder.state_dict(), decoder.pixels(decoder.inputs(z, labels)), labels
