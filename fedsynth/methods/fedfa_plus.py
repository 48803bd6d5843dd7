"""FedFA+: federated feature augmentation and alignment (Zhou, Yuan, Wang and Konukoglu, TPAMI
2024).

It is unrelated to the FedFA with feature anchors (TMC 2023). The method has two parts. In FedFA-l,
an augmentation layer after each stage of the network resamples the channel statistics. The variance
of the new statistics depends on the batch and on how much the clients differ
(`training/feature_statistics.py`). In FedFA-h, a symmetric KL divergence with weight λ pulls the
histogram of each feature in a batch towards the average histogram of the clients. FedFA+ combines
both parts.

Together with the model, each client sends its accumulated channel statistics and its histograms.
The server computes γ and π from them and sends both back, so the first round has γ = 1 and no
alignment. All models have equal weight in the average.

The implementation follows the overview slides, in which some formulas are illegible. The momentum
of 0.99 and the augmentation of every second batch on average come from FedFA-l's public code. At
64×64, AlexNet's last stage is one pixel, from which the augmentation leaves only the drawn mean. In
segmentation, the stages are the U-Net's halvings and its bottleneck, as in the code, and the
histograms are taken over the last feature maps' means. Neither source defines how features are
transformed before binning, the number of bins, or λ. We chose all three.

The settings `augmentation`, `fusion` and `stages` are the ablations of FedFA-l. The overview prints
their results, but no formulas, and the public code does not contain them. FedFA-C uses only the
client's variance Σ². FedFA-R draws its variance from U(0, 1), which is our choice. Direct fusion
replaces γ by the client-sharing variance, as we understand FedFA's paper (ICLR 2023). The other
papers' augmentations are in `training/feature_mixing.py`.

The method cannot run with differential privacy. Σ² and the histogram mix a batch's examples, and
the statistics are sent without noise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth.core.client import ExactClientView, chunk
from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message, ModelParameters, Tensors, public, unprotected
from fedsynth.core.method import ClientState
from fedsynth.core.uploads import Array, Named, Rule
from fedsynth.errors import SettingError, short_repr
from fedsynth.methods.shared.aggregation import AveragingState, average
from fedsynth.methods.shared.local import LocalObjective, Trained, TrainsLocally
from fedsynth.models.layers import check_embedding
from fedsynth.seeding import torch_generator
from fedsynth.training import feature_mixing, feature_statistics
from fedsynth.training.feature_statistics import augmented
from fedsynth.validation import in_range, one_of

HISTOGRAM = "histogram"
RESAMPLING = ("fedfa", "fedfa-c", "fedfa-r")
FUSIONS = {"adaptive": feature_statistics.modulation, "direct": feature_statistics.spread}


@dataclass(frozen=True)
class StatisticsDown(ModelParameters):
    """FedFA+'s request to the clients: the model w_t and all clients' statistics.

    The statistics are γ for each stage's channel means and deviations, and the histogram π. γ and π
    are missing in round 1. With direct fusion, γ is the variance across clients.
    """

    statistics: Tensors = public("sent to clients, never uploaded")


@dataclass(frozen=True)
class StatisticsUp(ModelParameters):
    """A client's upload in FedFA+: the model and the client's statistics.

    The statistics are each stage's channel means and deviations [C], accumulated over the client's
    training, and the histogram π_k [D, bins].
    """

    statistics: Tensors = unprotected()


@dataclass(frozen=True)
class StatisticsState(AveragingState):
    """The server's state in FedFA+, with statistics over all clients.

    The statistics are γ for each stage, and the histogram π. They are empty before the first round.
    """

    statistics: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class FedFAPlus(TrainsLocally):
    """FedFA+: local training with feature augmentation and feature alignment.

    The following settings come in addition to those of `TrainsLocally`.

    Args:
        parts: "both" for FedFA+, "augmentation" for FedFA-l, or "alignment" for FedFA-h.
        augmentation: "fedfa" for FedFA-l, "fedfa-c" or "fedfa-r" for its variants without
            statistics of other clients, or an augmentation in its place: "mixup" (Zhang et al.
            2018), "m-mixup" (Manifold MixUp, Verma et al. 2019), "mixstyle" (Zhou et al. 2021),
            "moex" (Li et al. 2021) or "dac-sc" (SCNorm, Lee, Bae and Kim 2023).
        with_fedfa: whether FedFA-l is added to another paper's augmentation.
        fusion: "adaptive" for Σ̂² = (γ + 1) ⊙ Σ² in a client, or "direct", in which the variance
            across clients replaces γ.
        stages: numbers of the stages that are augmented, separated by commas, such as "1,2"
            (default: all stages of the network). Manifold MixUp also mixes images, as in its paper,
            and MoEx changes only the lowest stage. The papers of Manifold MixUp and MixStyle
            use early stages.
        probability: probability that a stage augments a batch. It is 0.5 in the code of FedFA-l and
            MixStyle. DAC-SC's paper normalises every batch. With 0 and without alignment, the
            method is FedAvg with equal weights, for augmentations that preserve labels.
        mix_probability: probability that "mixup", "m-mixup" or "moex" augments a batch. It is 1 in
            their papers (MoEx: on ImageNet). With 0, they have no effect.
        align_weight: λ, the weight of the alignment. The defaults of λ, `bins` and
            `bin_temperature` are our choices, because the slides give none.
        bins: number of bins in a histogram.
        bin_temperature: temperature of the soft bins. Lower values give sharper edges.

    >>> from fedsynth import FedFAPlus, ModelSettings, RunSettings, simulate
    >>> method, model = FedFAPlus(local_epochs=1, bins=8), ModelSettings(width=16, depth=2)
    >>> sent = simulate(RunSettings(method, rounds=1, model=model)).uploads[0].statistics
    >>> list(sent["histogram"].shape)  # of 64 features, eight bins each
    [64, 8]
    >>> [name for name in sent if name.startswith("mean")]  # of two stages' channels
    ['mean.features.3', 'mean.features.7']
    """

    name = "fedfa-plus"
    summary = "local training with feature augmentation and alignment (TPAMI 2024), without anchors"
    reference = (
        "Zhou, Yuan, Wang and Konukoglu 2024, Federated Feature Augmentation and Alignment, TPAMI"
    )
    request = StatisticsDown
    upload = StatisticsUp
    state = StatisticsState
    refusal = (
        "the losses mix the examples of a batch, so no clip bounds the influence of one example. "
        "No mechanism protects the uploaded channel statistics and histograms"
    )
    dp_mechanisms = ()
    features_refusal = "a model on features has no convolutional stages to augment. Use fedfm"
    robust_refusal = "the server needs the clients' differences, which a robust rule removes"

    parts: str = one_of("both", "augmentation", "alignment")
    augmentation: str = one_of(*RESAMPLING, *feature_mixing.ALTERNATIVES)
    with_fedfa: bool = False
    fusion: str = one_of(*FUSIONS)
    stages: str = ""
    probability: float = in_range(0.5, 0, 1)
    mix_probability: float = in_range(1.0, 0, 1)
    align_weight: float = in_range(0.1, 0)
    bins: int = in_range(8, 2)
    bin_temperature: float = in_range(0.01, 1e-6)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages and not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", self.stages):
            rule = "must be stage numbers, separated by commas, such as '1,2'"
            raise SettingError("method", "stages", f"{rule}, got {short_repr(self.stages)}")
        if self.with_fedfa and self.augmentation in RESAMPLING:
            reason = (
                f"has no effect with method.augmentation={self.augmentation}. Set "
                "method.with_fedfa=false"
            )
            raise SettingError("method", "with_fedfa", reason)

    def check_model(self, model: nn.Module) -> None:
        check_embedding(self.name, model, nn.Linear | nn.Conv2d)
        if self.parts == "alignment":
            return
        stages = len(getattr(model, "stage_names", ()))
        if not stages:
            reason = (
                f"must be a network with the attribute `stage_names`, but {type(model).__name__} "
                "has none. Add the names of the stages to augment, or set method.parts=alignment"
            )
            raise SettingError("model", "name", reason)
        if max(self._stage_numbers, default=0) > stages:
            reason = (
                f"contains a number above {stages}, the number of the network's stages. Use "
                f"numbers from 1 to {stages}"
            )
            raise SettingError("method", "stages", reason, value=self.stages)

    @property
    def _stage_numbers(self) -> tuple[int, ...]:
        return tuple(sorted({int(number) for number in self.stages.split(",") if number}))

    @property
    def _variance(self) -> str:
        """The variance of the resampled statistics, or the name of another augmentation."""
        return "fedfa" if self.with_fedfa else self.augmentation

    def task(
        self, client: int, message: StatisticsDown, state: ClientState, context: RoundContext
    ) -> LocalObjective:
        seed, number, device = context.seed, context.round, context.device
        coin = torch_generator(seed, "augmentation coin", number, client)
        noise = torch_generator(seed, "augmentation", number, client, device=device)
        mixes = torch_generator(seed, "augmentation mixing", number, client)
        shared: dict[str, Any] = {"coin": coin, "noise": noise, "mixes": mixes}
        layers: dict[str, feature_statistics.Augmentation] = {}
        stages = self._stages(context)
        chances = self.probability, self.mix_probability
        mixing = feature_mixing.Mixing(self.augmentation if stages else "", stages, *chances, mixes)
        for stage in stages if self._variance in RESAMPLING else ():
            names = f"mean.{stage}", f"std.{stage}"
            gamma_mean, gamma_std = map(message.statistics.get, names)
            mean, std = map(state.get, names)
            layer = feature_statistics.Augmentation(
                *(self.probability, coin, noise, gamma_mean, gamma_std, self._variance, mean, std)
            )
            layers[stage] = layer
            shared[f"statistics.{stage}"] = layer.statistics
        histogram = message.statistics.get(HISTOGRAM)  # π; never sent by clients of FedFA-l

        def loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            mixed = mixing.draw(x)
            with augmented(network, layers), augmented(network, mixed.layers):
                f = network.embed(mixed.x)  # type: ignore[operator]
            task_loss = mixed.losses(network.classifier(f), y)  # type: ignore[operator]
            if histogram is None:
                return task_loss
            batch_histogram = feature_statistics.soft_histogram(f, self.bins, self.bin_temperature)
            divergence = feature_statistics.symmetric_divergence(batch_histogram, histogram)
            return task_loss + self.align_weight * divergence

        def make_upload(model: nn.Module, trained: Trained) -> tuple[Message, ClientState]:
            means: dict[str, Tensor] = {}
            stds: dict[str, Tensor] = {}
            for stage in self._sent_stages(context):
                for mean, std in layers[stage].statistics:  # none without examples
                    means[f"mean.{stage}"] = mean
                    stds[f"std.{stage}"] = std
            statistics = means | stds
            sent = dict(statistics)
            if self.parts != "augmentation" and trained.steps:
                trained_model = context.load(model.state_dict()).eval()
                sent[HISTOGRAM] = self._histogram(trained_model, trained.client)
            return StatisticsUp(model.state_dict(), trained.weight, sent), statistics

        return LocalObjective(loss=loss, state=shared, make_upload=make_upload)

    def upload_rules(self, exchange: str, client: int, context: RoundContext) -> dict[str, Rule]:
        """Adds the validation rules for the statistics. A client without examples sends none."""
        statistics = Named(self._statistics_rules(context), partial=True)
        return {**super().upload_rules(exchange, client, context), "statistics": statistics}

    def check_upload(
        self, exchange: str, upload: StatisticsUp, client: int, context: RoundContext
    ) -> None:
        if upload.weight > 0:
            Named(self._statistics_rules(context)).check("statistics", upload.statistics)

    def _statistics_rules(self, context: RoundContext) -> dict[str, Array]:
        """Returns the validation rules for statistics from a client with examples."""
        model = context.architecture
        rules: dict[str, Array] = {}
        widths = feature_statistics.channels(
            model, self._sent_stages(context), context.spec.image_shape
        )
        for stage, width in widths.items():
            rules[f"mean.{stage}"] = Array((width,))
            rules[f"std.{stage}"] = Array((width,), low=0.0)
        if self.parts != "augmentation":
            features: int = model.classifier.weight.shape[1]  # type: ignore[union-attr,index,assignment]
            shape = (features, self.bins)
            rules[HISTOGRAM] = Array(shape, low=0.0, high=1.0 + 1e-5, sums_to_one=True)
        return rules

    def combine(
        self, state: StatisticsState, uploads: Mapping[int, StatisticsUp], context: RoundContext
    ) -> StatisticsState:
        sent = [upload.statistics for upload in uploads.values()]
        statistics: dict[str, Tensor] = {}
        for name in sent[0]:
            values = torch.stack([client_statistics[name] for client_statistics in sent])
            if name == HISTOGRAM:
                statistics[name] = values.mean(dim=0)  # π
            else:
                statistics[name] = FUSIONS[self.fusion](values)  # γ
        return replace(state, parameters=average(uploads, uniform=True), statistics=statistics)

    def _stages(self, context: RoundContext) -> tuple[str, ...]:
        """Returns the names of the augmented stages of the network."""
        if self.parts == "alignment":
            return ()
        names: Sequence[str] = context.architecture.stage_names  # type: ignore[assignment]
        numbers = self._stage_numbers or range(1, len(names) + 1)
        return tuple(names[number - 1] for number in numbers)

    def _sent_stages(self, context: RoundContext) -> tuple[str, ...]:
        """Returns the stages whose statistics are uploaded: all augmented stages, or none."""
        return self._stages(context) if self._variance == "fedfa" else ()

    def _histogram(self, model: nn.Module, client: ExactClientView) -> Tensor:
        """Computes the histogram π_k of a client's embeddings under the trained model.

        The histogram is over all examples of the client, without augmentation.
        """
        examples = client.examples(0)
        histogram = torch.zeros((), device=examples.device)
        embed: Callable[[Tensor], Tensor] = model.embed  # type: ignore[assignment]
        with torch.no_grad():
            for indices in examples.split(chunk(examples.device)):
                f = embed(client.images(indices))
                share = len(indices) / len(examples)
                histogram = histogram + share * feature_statistics.soft_histogram(
                    f, self.bins, self.bin_temperature
                )
        return histogram
