"""Defines `RunSettings`, an immutable object with all settings of a run.

The object can be converted to TOML and back. `fedsynth.config.resolve` creates this object from the
user's values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fedsynth.config.participation import Failures, Participation, active_clients
from fedsynth.core.capabilities import HeterogeneousClients, OwnNetwork, unused_hooks
from fedsynth.core.messages import ModelParameters
from fedsynth.core.method import Method
from fedsynth.data.declaration import FolderSettings
from fedsynth.data.partition_settings import PartitionSettings
from fedsynth.data.registry import DEFAULT_DATASET
from fedsynth.errors import SettingError
from fedsynth.evaluation import CLIENT_MODELS, DISSIMILARITY, OPTIONAL
from fedsynth.features.encoding import EncoderSettings
from fedsynth.features.registry import is_own_features
from fedsynth.methods import is_own_method, own_label
from fedsynth.methods.shared.aggregation import FEWEST, RULES
from fedsynth.models.registry import ModelSettings, is_own_model, own_model
from fedsynth.privacy.settings import NO_LEDGER, PrivacySettings, ledger_setting
from fedsynth.validation import (
    check_choice,
    check_fields,
    check_number,
    field_types,
    in_range,
    one_of,
)

# The maximum numbers of characters in the texts of a report.
MAX_LENGTHS: Mapping[str, int] = {"responsible": 300, "purpose": 300, "sites": 30_000, "person": 40}


@dataclass(frozen=True)
class ReportSettings:
    """Public texts that the user adds to a run's privacy report.

    Args:
        responsible: the party that is responsible for the run, for the report's first page.
        purpose: the purpose of the run, for the report's first page.
        sites: the names of the clients' sites for the report, comma-separated, in the order of the
            clients. A single client may name several sites.
        person: the report's word for one person in the data, such as "patient". If it is empty, the
            word is "person".

    >>> ReportSettings(sites="Mitte,Nord").site_names(2), ReportSettings(sites="A,B").site_names(1)
    (('Mitte', 'Nord'), ('A, B',))
    """

    section: ClassVar[str] = "report"

    responsible: str = ""
    purpose: str = ""
    sites: str = ""
    person: str = ""

    def __post_init__(self) -> None:
        for name, text in asdict(self).items():
            if not isinstance(text, str) or not text.isprintable():
                reason = f"must be one printable line, got {text!r:.80}. Correct it"
                raise SettingError("report", name, reason)
            if len(text) > MAX_LENGTHS[name]:
                reason = f"has {len(text)} characters. Shorten it to {MAX_LENGTHS[name]}"
                raise SettingError("report", name, reason)
        if "" in self._sites:
            raise SettingError(
                "report",
                "sites",
                f"contains an empty name: {self.sites!r:.80}. Remove the extra comma",
            )

    @property
    def _sites(self) -> tuple[str, ...]:
        return tuple(map(str.strip, self.sites.split(","))) if self.sites else ()

    def check_clients(self, clients: int) -> None:
        """Raises a SettingError if a run with several clients does not name one site per client."""
        if self.sites and clients > 1 and len(self._sites) != clients:
            reason = f"has {len(self._sites)} names for {clients} clients. Name one site per client"
            raise SettingError("report", "sites", reason)

    def site_names(self, clients: int) -> tuple[str, ...]:
        """Returns the site of each client in a run, in the order of the clients.

        A run with one client may have several sites, which are joined by commas. The result is
        empty if no site was named.
        """
        if clients == 1 and self.sites:
            return (", ".join(self._sites),)
        return self._sites


QUORUM = 0.5  # the default quorum: the smallest share of a round's clients that must send uploads
MAX_ROUNDS = 1_000_000
MAX_GB = 1_000_000
MAX_THREADS = 4096
SECTIONS = ("run", "data", "partition", "model", "method", "privacy", "report")


_KINDS: Mapping[str, tuple[type, str]] = {
    "method": (Method, "FedDM()"),
    "partition": (PartitionSettings, "PartitionSettings(alpha=0.1)"),
    "model": (ModelSettings, "ModelSettings(width=64)"),
    "privacy": (PrivacySettings, "PrivacySettings(epsilon=8.0)"),
    "report": (ReportSettings, "ReportSettings(responsible='...')"),
    "folder": (FolderSettings, "FolderSettings('scans')"),
    "encoder": (EncoderSettings, "EncoderSettings('timm:resnet18')"),
}
_OPTIONAL = ("privacy", "folder", "encoder")


@dataclass(frozen=True)
class RunSettings:
    """The settings of one run.

    Args:
        method: the method by name (`fedsynth methods`), or FILE.py:NAME for a custom class. In
            Python, it is an object with the method's settings.
        dataset: name of the data set.
        data_root: folder of the data sets (default: the environment variable FEDSYNTH_DATA).
        rounds: number of communication rounds.
        seed: seed of all random numbers except those for privacy (noise, and masks that sample
            records).
        device: "auto" (CUDA if it is available), "cpu" or "cuda".
        precision: number format of the most expensive network computations, "fp32" or "bf16". The
            default "auto" is "bf16" for condensation with a wide ConvNet and without differential
            privacy, on a GPU or a CPU with AMX, and otherwise "fp32". With "bf16", bfloat16 is used
            in condensation, where networks process real images (including the per-image gradients
            of the mechanism `gradient`). It is also used when clients train with cross-entropy
            (except dense networks, which are trained together), and when the server trains on
            synthetic images with cross-entropy. Finally, it is used in distillation by the server
            (DENSE, FedDF, and FedHydra except for its matrix U) or on generated images (FedKF).
            Weights, losses and all other computations are fp32, including the per-example gradients
            of DP-SGD.
        compile: "on" compiles the network computations of condensation with torch.compile, which
            makes long runs faster. The default "auto" is "on" for long runs with a wide ConvNet on
            a CPU, if there is a C++ compiler, and otherwise "off". This setting has no effect with
            differential privacy or batch norm. It compiles the computations on real images, and on
            synthetic images the operations between the convolutions. On a CPU, these are up to
            twice as fast after some seconds of compiling. Only batches of full size use the
            compiled code, so that shapes never depend on data. Compiling needs a C++ compiler, or
            Triton on a GPU.
        memory_gb: memory in GiB that the steps of a round may use (default: 4 on a CPU, and half of
            the memory on a GPU). If it is small, fewer clients are computed at the same
            time. The data set is not counted.
        threads: number of CPU threads for computations (default: chosen by torch). Sums are rounded
            differently with a different number of threads, so results are exactly repeatable only
            with the same number.
        evaluate_every: number of rounds between evaluations on the test set. The last round is
            always evaluated.
        measures: comma-separated names of further measures of each evaluated round:
            "client_model_accuracy", "nmi", "silhouette" and "dissimilarity"
            (`fedsynth.evaluation.optional`). With differential privacy, they are only in the folder
            `simulation_only`, and "dissimilarity" is refused.
        participation: share C of the clients that takes part in each round, drawn from the seed.
        sampling: how the clients of a round are drawn: "uniform", or in proportion to their "size"
            n_k, without replacement (not with differential privacy). Averages by n_k, which suit
            uniform draws, then favour large clients. FedProx averages such draws with equal
            weights.
        client_failures: probability with which each client of a round fails in simulation, drawn
            from the seed. A failing client crashes before its step, hangs in its step, or answers
            too late (`fedsynth.config.participation`).
        quorum: smallest share of a round's clients that must send uploads for the round to count.
            With fewer uploads, the server keeps its state, and the metrics of the round record
            this. At least one upload is always needed.
        robust: aggregation rule that limits the influence of malicious clients: none, median,
            trimmed (mean) or clip. "median" and "trimmed" apply to each coordinate, and "clip"
            limits the norm of each update. All clients then have the same weight, whatever n_k. The
            setting is for methods that average models. For other methods, the error states the
            reason.
        robust_share: β of the rule "trimmed", which leaves out this share of a coordinate's values
            at each end. It should be at least the share of malicious clients.
        partition: how the examples are distributed among the clients.
        model: the architecture, as settings, as a module, or as a class or function that makes one
            (see `register_model`).
        privacy: the settings of differential privacy. None: the run has no differential privacy.
        report: texts for the first page of the privacy report, such as the party responsible for
            the run.
        ledger: the folder of the clients' permanent ledgers in a run without privacy. The ledgers
            then state that no later run on the same data can have an ε. In a run with privacy, name
            the folder in `privacy` instead.
        folder: custom images, in place of a named data set. `dataset` is then their name. With
            `PartitionSettings("given")`, the folder of each site is a client.
        encoder: the encoder whose vectors replace the images before the run, such as
            "timm:resnet18", or its settings. The model is then "linear" or "mlp".

    >>> from fedsynth import FedProx
    >>> settings = RunSettings(FedProx(mu=0.1), rounds=5, participation=0.3)
    >>> settings.to_mapping()["run"]["method"], settings.method.lr, settings.partition.clients
    ('fedprox', 0.01, 10)
    >>> from fedsynth import resolve
    >>> resolve(settings.to_mapping()) == settings
    True
    """

    section: ClassVar[str] = "run"  # of a config file; data set, partition, … have their own

    method: Method
    dataset: str = DEFAULT_DATASET
    data_root: Path | None = None
    rounds: int = in_range(20, 1, MAX_ROUNDS)
    seed: int = in_range(0, 0)
    device: str = "auto"
    precision: str = one_of("auto", "fp32", "bf16")
    compile: str = one_of("auto", "on", "off")
    memory_gb: float | None = None
    threads: int | None = None
    evaluate_every: int = in_range(1, 1)
    measures: str = ""
    participation: float = 1.0
    sampling: str = one_of("uniform", "size")
    client_failures: float = in_range(0.0, 0, 1)
    quorum: float = in_range(QUORUM, 0, 1)
    robust: str = one_of(*RULES)
    robust_share: float = 0.2
    partition: PartitionSettings = field(default_factory=PartitionSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    privacy: PrivacySettings | None = None
    report: ReportSettings = field(default_factory=ReportSettings)
    ledger: Path | None = None
    folder: FolderSettings | None = None
    encoder: EncoderSettings | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, ModelSettings) and callable(self.model):
            object.__setattr__(self, "model", own_model(self.model))
        if isinstance(self.encoder, str):
            object.__setattr__(self, "encoder", EncoderSettings(self.encoder))
        if self.ledger is not None:
            if self.privacy is not None:
                reason = "is set in a private run. Set PrivacySettings.ledger instead"
                raise SettingError(None, "RunSettings.ledger", reason)
            folder = ledger_setting(self.ledger)
            object.__setattr__(self, "ledger", None if folder == NO_LEDGER else folder)
        for name, (kind, example) in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and not (name in _OPTIONAL and value is None):
                raise SettingError(None, name, f"must be an object like {example}, got {value!r}")
        check_fields(self)
        for name in self.measure_names:
            check_choice("run", "measures", name, OPTIONAL)
        if self.threads is not None:
            check_number("run", "threads", self.threads, 1, MAX_THREADS, integer=True)
        for section, key, reason in self._conflicts():
            raise SettingError(section, key, reason)

    def _conflicts(self) -> Iterator[tuple[str, str, str]]:
        """Yields an error for each setting that is out of range or conflicts with another.

        Each item consists of the section, the key and the reason.
        """
        if self.memory_gb is not None and not 0 < self.memory_gb <= MAX_GB:
            reason = f"must be above 0 and at most {MAX_GB:,}, got {self.memory_gb}"
            yield "run", "memory_gb", reason
        if not 0 < self.participation <= 1:
            yield "run", "participation", f"must be in (0, 1], got {self.participation}"
        if not 0 <= self.robust_share < 0.5:
            yield "run", "robust_share", f"must be in [0, 0.5), got {self.robust_share}"
        if self.sampling == "size" and self.privacy is not None:
            reason = "because sampling by size reveals how many examples each client has"
            yield "run", "sampling", f"must be 'uniform' with differential privacy, {reason}"
        if self.sampling == "size" and self.participation == 1:
            reason = "must be 'uniform', because all clients take part. Remove it"
            yield "run", "sampling", reason
        method = self.method
        if DISSIMILARITY in self.measure_names and self.privacy is not None:
            reason = "which is computed from private gradients without noise. Remove it"
            yield "run", "measures", f"contains {DISSIMILARITY}, {reason}"
        if CLIENT_MODELS in self.measure_names and not issubclass(method.upload, ModelParameters):
            reason = f"but clients of {method.name} upload no models. Remove it"
            yield "run", "measures", f"contains {CLIENT_MODELS}, {reason}"
        for hook in unused_hooks(method):
            reason = f"defines the hook {hook}, but does not inherit from this class"
            yield "run", "method", f"{method.name} {reason}"
        if method.dp_mechanisms and type(method).release_plans is Method.release_plans:
            yield (
                "run",
                "method",
                f"method {method.name} declares dp_mechanisms, but no release_plans. Define "
                "release_plans",
            )
        if self.robust != "none":
            if method.robust_refusal:
                yield "run", "robust", f"must be 'none' with {method.name}: {method.robust_refusal}"
            active = active_clients(self.partition.clients, self.participation)
            if active < FEWEST:
                reason = f"needs {FEWEST} clients in a round, got {active}. Add clients"
                yield "run", "robust", reason
        if self.model.features and method.features_refusal:
            reason = f"cannot be used with {method.name}: {method.features_refusal}. Remove it"
            yield "model", "features", reason
        if self.model.client_names and not isinstance(method, HeterogeneousClients):
            reason = f"cannot be used with {method.name}, whose clients must have one architecture"
            yield "model", "clients", reason
        if self.model.client_names and self.rounds > 1:
            reason = "because the clients cannot start from the server's model in a later round"
            yield "model", "clients", f"requires run.rounds=1, {reason}"

    @property
    def resolved_partition(self) -> PartitionSettings:
        """The partition settings, with the run's seed as the default seed."""
        seed = self.seed if self.partition.seed is None else self.partition.seed
        return dataclasses.replace(self.partition, seed=seed)

    @property
    def failures(self) -> Failures:
        """The schedule of simulated client failures."""
        return Failures(self.seed, self.client_failures)

    def schedule(self, sizes: tuple[int, ...] | None = None) -> Participation:
        """Returns the schedule of participating clients.

        Args:
            sizes: the sizes n_k of all clients, if they are known. They are used only if clients
                are drawn by size.
        """
        by_size = sizes if self.sampling == "size" else None
        return Participation(self.seed, self.partition.clients, self.participation, by_size)

    @property
    def measure_names(self) -> tuple[str, ...]:
        """The names of the optional measures to compute, as a tuple."""
        return tuple(filter(None, map(str.strip, self.measures.split(","))))

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the feature maps used by the model and the method."""
        of_method = getattr(self.method, "features", "")
        names = [self.model.features]
        if isinstance(of_method, str):
            names.append(of_method)
        return tuple(filter(None, names))

    @property
    def runs_own_model(self) -> bool:
        """True if the clients apply a custom network to private data."""
        return is_own_model(self.model) and not isinstance(self.method, OwnNetwork)

    @property
    def own_code(self) -> tuple[str, ...]:
        """Lists the user's own code that computes with the clients' examples.

        An example is "the model NAME".
        """
        names = []
        if is_own_method(self.method):
            names.append(f"the method {self.method.name}")
        if self.runs_own_model:
            names.append(f"the model {self.model.name}")
        for name in filter(is_own_features, self.feature_names):
            names.append(f"the feature map {name}")
        return tuple(names)

    @property
    def assumed_code(self) -> tuple[str, ...]:
        """Lists the code that must not contain private information.

        The privacy report states this assumption. The code is the user's own code, and an encoder
        that is not built in.
        """
        if self.encoder is None or not (
            self.encoder.is_pretrained or is_own_features(self.encoder.encoder)
        ):
            return self.own_code
        return (*self.own_code, f"the encoder {self.encoder.encoder}")

    def to_mapping(self) -> dict[str, dict[str, Any]]:
        """Converts the settings to nested dictionaries of plain values, as in a config file.

        The outer keys are the sections. Values that are None are left out. `resolve` converts the
        dictionaries back to settings.
        """
        run = {"method": self.method.name}
        for name in RUN_KINDS:
            run[name] = getattr(self, name)
        if label := own_label(self.method.name):
            run["method_source"] = label
        data: dict[str, Any] = {"dataset": self.dataset, "data_root": self.data_root}
        if self.folder is not None:
            data |= _chosen(self.folder)
        if self.encoder is not None:
            data |= _chosen(self.encoder)
        privacy: dict[str, Any] = {"ledger": self.ledger}
        if self.privacy is not None:
            privacy = dataclasses.asdict(self.privacy)
        sections: dict[str, Mapping[str, Any]] = {
            "run": run,
            "data": data,
            "partition": dataclasses.asdict(self.partition),
            "model": dataclasses.asdict(self.model),
            "method": self.method.to_dict(),
            "privacy": privacy,
            "report": _chosen(self.report),
        }
        plain = {name: _plain(values) for name, values in sections.items()}
        return {name: values for name, values in plain.items() if values}


def _chosen(settings: Any) -> dict[str, Any]:
    """Returns the settings whose values differ from the defaults."""
    fields = dataclasses.fields(settings)
    values = {field.name: getattr(settings, field.name) for field in fields}
    return {
        field.name: values[field.name] for field in fields if values[field.name] != field.default
    }


_OTHER_SECTIONS = (*_KINDS, "dataset", "data_root", "ledger")
# Maps the fields of `RunSettings` in the section "run" to their types.
RUN_KINDS: Mapping[str, type] = {
    name: kind for name, kind in field_types(RunSettings).items() if name not in _OTHER_SECTIONS
}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Removes values that are None, and converts paths to text."""
    plain = {}
    for name, value in values.items():
        if value is not None:
            plain[name] = str(value) if isinstance(value, Path) else value
    return plain
