"""The functions `simulate` and `synthesize`, which run a federation or a single client.

`simulate` checks the user's arguments, divides a data set among the clients, and runs a
`Simulation`.

`synthesize` creates a private synthetic set from the images of one data owner. For this, it runs a
method such as FedDM or FedStats with a single client, and exports the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedsynth import rank
from fedsynth.config.checks import check_method
from fedsynth.config.resolve import check_sections, resolve
from fedsynth.config.settings import RunSettings
from fedsynth.core.capabilities import OwnNetwork, SyntheticImages
from fedsynth.core.periods import has_periods
from fedsynth.data.images import IntArray, require_all_classes
from fedsynth.data.partition import check_one_client_each, check_parts, partition
from fedsynth.data.partition_settings import EXPLICIT
from fedsynth.errors import PrivacySettingError, SettingError, short_repr
from fedsynth.federation import run_data
from fedsynth.federation.context import cpu_threads, resolve_device
from fedsynth.federation.links import connect
from fedsynth.federation.protocol import Observer
from fedsynth.methods import DEFAULT_METHOD
from fedsynth.models.registry import usual_model
from fedsynth.privacy.ledger.folder import check_names
from fedsynth.results.loggers import Logger, Several
from fedsynth.results.run_folder import RunFolder
from fedsynth.results.run_messages import StderrObserver
from fedsynth.results.run_record import RunResult
from fedsynth.results.saved_model import load_model
from fedsynth.sharing.export import UNPROTECTED, export_run, require_new
from fedsynth.sharing.fidelity import RealImages
from fedsynth.simulation.following import Following, SignsOfLife
from fedsynth.simulation.periods import continued_sections
from fedsynth.simulation.run import Simulation
from fedsynth.simulation.trial import Trial
from fedsynth.synthesizer.condensation.sets import SyntheticSet


def simulate(
    settings: RunSettings,
    *,
    data: run_data.CustomData | None = None,
    parts: Sequence[IntArray] | None = None,
    names: Sequence[str] | None = None,
    test: str | None = None,
    output: Path | str | None = None,
    observer: Observer | None = None,
    download: bool = False,
    resume: Path | str | None = None,
    quiet: bool = False,
    trained: Path | str | None = None,
    continued: Path | str | None = None,
    trial: Trial | None = None,
) -> RunResult:
    """Simulates a federation on one machine.

    Args:
        settings: the settings of the run.
        data: custom data: (train, test) from `from_arrays`, where test may be None, arrays (x, y),
            one or two `torch.utils.data.Dataset` of pairs, or the result of
            `load_records`, whose sites become the clients. None loads `settings.folder` or
            `settings.dataset`. With differential privacy, everything in `train.spec` is public, so
            do not declare the exact `train_size`: declare a rounded one, or set `nominal_size` and
            `max_records`. Custom data then also need `PrivacySettings(ledger=...)`, unless their
            specification is that of a published data set.
        parts: custom clients, as the indices of each client's examples in the training data. Of
            `settings.partition`, only `local_test` is then used.
        names: the names of the clients in ledgers and in the privacy report. The names are public.
            None uses client-000, client-001, ….
        test: the kind of the test images, which is "public", "private", or "none" to ignore them.
            None means "public" for a published data set, and "private" for custom data. With
            differential privacy, metrics on private test images are written only to
            `simulation_only`.
        output: the parent folder of run folders. None writes nothing.
        observer: an observer that receives the progress. None prints a line for each round.
        download: True lets torchvision download a missing data set.
        resume: the folder of an unfinished run with the same settings, data and parts. The run
            continues after its last finished round and gives the same results as an uninterrupted
            run. An interrupted round is repeated, and with differential privacy it is charged
            again. `output` is then ignored.
        quiet: True prints nothing if there is no observer.
        trained: a folder in which runs share their trained clients. It is used only for runs of one
            round without differential privacy and with `output`. A run loads a client that another
            run has trained from the same weights on the same data in the same order. The recorded
            seconds of the round include the original training time.
        continued: the shared set of the period before, if the run is a later one of several
            periods (`owner_settings`).
        trial: the trial of a private selection (`fedsynth.experiments.selection`) that this run is.
            Its releases are not charged, as they were with the selection.

    In a program that torchrun has started, the ranks compute the clients' steps together. Call
    `simulate` with the same arguments at all ranks. Only rank 0 writes files and calls the
    observer. At the other ranks, the result has no uploads and no artefacts.

    Returns:
        The result. If earlier runs on the same ledgers have exhausted the cap, the result has no
        rounds: `metrics` is empty, and `deviations` states the reason.

    Raises:
        FedsynthError: an argument is invalid (before the run folder is created), training has
            diverged (DivergedError), or a run cannot be resumed (CheckpointError).
        KeyboardInterrupt: the user interrupted the run. The observer first receives the progress
            and the cost.

    >>> from fedsynth import FedAvg, ModelSettings, RunSettings, load_dataset
    >>> method = FedAvg(local_epochs=2, batch=32, lr=0.1)
    >>> settings = RunSettings(method, rounds=2, model=ModelSettings("linear"))
    >>> train, test = load_dataset("digits")
    >>> two_clients = [np.arange(700), np.arange(700, 1438)]  # indices of training examples
    >>> result = simulate(settings, data=(train, test), parts=two_clients)
    >>> len(result.metrics), result.accuracy > 0.8
    (2, True)
    """
    _require_settings(settings)
    check_periods(settings, continued, resume)
    if settings.privacy is not None:
        check_method(settings.method)
    if observer is None:
        observer = Observer() if quiet else StderrObserver(settings)
    if isinstance(observer, Logger):
        observer = Several([observer])  # its failure does not end the run

    links = connect()

    def load(observer: Observer) -> tuple[run_data.RunData, run_data.Clients, torch.device]:
        device = resolve_device(settings.device)
        encoder = settings.encoder
        waits = download or (encoder is not None and encoder.is_pretrained)
        if links is not None and links.rank and waits:
            links.next(links.peers)  # until rank 0 has downloaded what is missing
        may_download = download and not (links and links.rank)
        loaded = run_data.data_of_run(settings, data, test, observer.note, download=may_download)
        if links is not None and links.rank == 0 and waits:
            run_data.load_encoder(loaded)  # which may download its weights
            links.send_all("downloaded")
        run_data.require_a_ledger(loaded.settings, loaded.train.spec)
        loaded, clients = among_clients(loaded, parts, names)
        loaded = run_data.encoded(loaded, clients.parts, device, observer.step, links)
        return loaded, clients, device

    with nullcontext() if links is None else links.run():
        if trial is not None or has_periods(settings.method):
            rank.require_one_process("a selection or several periods")
        if links is not None and links.rank:
            with cpu_threads(settings.threads):
                return Following(*load(SignsOfLife(links)), links).run()
        loaded, clients, device = load(observer)
        test_images = None if loaded.test is None else loaded.test.to(device)
        released = None
        if continued is not None:  # with the centre and whitening of period 1
            released = load_model(continued, method=type(settings.method)).state_dict()
        with cpu_threads(settings.threads):
            result = Simulation(
                loaded.settings,
                clients,
                loaded.train.to(device),
                (test_images, loaded.test_kind),
                observer,
                None if output is None else Path(output),
                download,
                None if resume is None else RunFolder.reopen(Path(resume)),
                None if trained is None else Path(trained),
                released,
                trial,
                links,
            ).run()
    if loaded.left_out:
        observer.note(f"excluded from the data: {loaded.left_out}")
    return result


def _require_settings(settings: object) -> None:
    """Raises SettingError unless `settings` are `RunSettings`."""
    if not isinstance(settings, RunSettings):
        reason = "must be RunSettings, made by RunSettings(FedDM()) or resolve({...}), got "
        raise SettingError(None, "settings", reason + short_repr(settings))


def check_periods(
    settings: RunSettings, continued: Path | str | None, resume: Path | str | None = None
) -> None:
    """Checks that a run can continue the earlier periods of its sequence.

    Raises:
        SettingError: the run is not private, is resumed, or lacks the period before.
    """
    method = settings.method
    period = method.period if has_periods(method) else 1
    if has_periods(method) and settings.privacy is None:
        reason = "must be 1 without differential privacy. Set privacy.epsilon"
        raise SettingError("method", "periods", reason)
    if has_periods(method) and resume is not None:
        reason = "has no effect with several periods. Set it to None, and start the period again"
        raise SettingError(None, "resume", reason)
    if (period > 1) != (continued is not None):
        expected = f"the shared set of period {period - 1}" if period > 1 else "None in period 1"
        reason = f"must be {expected}. Use the result of owner_settings"
        raise SettingError(None, "continued", reason)


def among_clients(
    loaded: run_data.RunData,
    parts: Sequence[IntArray] | None = None,
    names: Sequence[str] | None = None,
) -> tuple[run_data.RunData, run_data.Clients]:
    """Divides a run's training records among its clients.

    Args:
        loaded: the data of the run.
        parts: the indices of each client's records. None divides them by the settings.
        names: the names of the clients, or None.

    Returns:
        The data with the settings of the actual division, and the clients.

    Raises:
        FedsynthError: the division does not fit the data or the settings (see `simulate`).
    """
    settings, train = loaded.settings, loaded.train
    if parts is None:
        parts = loaded.parts
        if names is None:
            names = loaded.names
    if parts is None:
        labels = train.labels.cpu().numpy()
        parts = partition(labels, settings.resolved_partition, train.spec.classes, *train.origins())
    else:
        check_parts(parts, len(train))
        settings = replace(
            settings,
            partition=replace(settings.partition, kind=EXPLICIT, clients=len(parts), subset=1.0),
        )
    settings.report.check_clients(len(parts))
    if settings.privacy is None:
        require_all_classes(train)
    positions = [np.asarray(part, np.int64) for part in parts]
    by_user = run_data.protects_users(settings)
    if by_user:
        check_one_client_each(positions, train)
    if names is not None:
        names = check_names(names, len(positions))
    return replace(loaded, settings=settings), run_data.Clients(train, positions, names, by_user)


Preset = Mapping[str, Mapping[str, Any]]
TWO_ROUNDS: Preset = {"run": {"rounds": 2}, "model": {"width": 32}}
# The default values of a method's settings if a single owner creates a synthetic set.
#
# Methods that are not listed use `TWO_ROUNDS`. FedDM's defaults of 20 rounds and 1000 iterations
# would make 20,000 releases, which leave too little signal at a useful ε. FedStats creates no
# images by default.
PRESETS: Mapping[str, Preset] = {
    "feddm": {
        **TWO_ROUNDS,
        "method": {"ipc": 10, "iterations": 20, "image_lr": 5.0, "server_epochs": 100},
    },
    "fedstats": {"run": {"rounds": 32}, "method": {"ipc": 100, "drawn_ipc": 400}},
}

ONE_OWNER: Mapping[str, Any] = {"kind": "iid", "clients": 1}


def owner_settings(
    values_by_section: Mapping[str, Mapping[str, Any]], continued: Path | str | None = None
) -> RunSettings:
    """Builds the settings for one data owner's synthetic set.

    Values that are not given come from `PRESETS`. All images belong to one client, even if the
    folder of the images has several sites.

    Args:
        values_by_section: the sections of settings, as for `resolve`.
        continued: the shared set of the last period, whose settings the next period has
            (`continued_sections`). Only the data, the ledger folder and the section "report" are
            then set.

    Raises:
        DataError: the set must be private, but the images have no declaration of public facts.

    >>> settings = owner_settings({"method": {"ipc": 20}, "privacy": {"epsilon": 8}})
    >>> settings.method.ipc, settings.method.iterations, settings.partition.clients
    (20, 20, 1)
    """
    check_sections(values_by_section)
    if continued is not None:
        return resolve(continued_sections(Path(continued), values_by_section))
    sections = {name: dict(values) for name, values in values_by_section.items()}
    name = str(sections.get("run", {}).get("method", DEFAULT_METHOD)).lower()
    chosen_settings = sections.get("method", {})
    for section, values in PRESETS.get(name, TWO_ROUNDS).items():
        sections[section] = {**values, **sections.get(section, {})}
    if str(chosen_settings.get("periods", 1)) != "1":
        sections["run"] = {**sections["run"], "rounds": 1, **values_by_section.get("run", {})}
    if (
        "ipc" in chosen_settings and "drawn_ipc" not in chosen_settings
    ):  # ipc is the number of all images of a class
        sections.get("method", {}).pop("drawn_ipc", None)
    sections["partition"] = {**ONE_OWNER, **sections.get("partition", {})}
    settings = resolve(sections)
    method = settings.method
    model = sections.get("model", {})
    chosen = {"name", "depth", "features"} & model.keys()
    if settings.privacy is None or isinstance(method, OwnNetwork) or chosen:
        return settings
    usual = usual_model(run_data.specification(settings).image_shape)
    return resolve({**sections, "model": {**usual, **model}})


def synthesize(
    settings: RunSettings,
    out: str | Path,
    *,
    runs: str | Path = "runs",
    unprotected: bool = False,
    with_model: bool = False,
    observer: Observer | None = None,
    download: bool = False,
    continued: Path | str | None = None,
    evidence: str | None = None,
    simulation: bool = False,
) -> RunResult:
    """Creates a synthetic set from one data owner's images, and exports the set.

    Args:
        settings: the result of `owner_settings`.
        out: the folder to create, as in `export_run`. It contains only files that may be shared.
        runs: the parent folder of run folders. Do not share a run folder, because it contains
            private data.
        unprotected: True exports the set even if it has no differential privacy.
        with_model: True exports the model of the run, too. With several periods, it is always
            exported, as later periods need its centre and whitening.
        observer: an observer that receives the progress.
        download: True lets torchvision download a named data set.
        continued: the shared set of the last period, as in `owner_settings`.
        evidence: the network, such as "pixels", by whose features an evidence pack compares the set
            with the real images (`images_of_run`). None makes no pack.
        simulation: True states that the real images are public or simulated, which a pack requires.

    Raises:
        FedsynthError: as for `simulate` and `export_run`. Errors that can be detected in advance
            are raised before any release.

    >>> synthesize(owner_settings({}), "share")
    Traceback (most recent call last):
    fedsynth.errors.PrivacySettingError: ...
    """
    target = Path(out)
    check_synthesis(settings, target, unprotected=unprotected)
    real = None
    if evidence is not None:
        real = images_of_run(settings, evidence, simulation=simulation, download=download)
    result = simulate(
        settings, output=runs, observer=observer, download=download, continued=continued
    )
    if rank.this_rank() == 0 and result.folder is not None and result.metrics:
        with_model = with_model or has_periods(settings.method)
        flags = {"unprotected": unprotected, "with_model": with_model}
        export_run(result.folder, target, **flags, method=type(settings.method), real=real)
    return result


def images_of_run(
    settings: RunSettings, network: str, *, simulation: bool, download: bool = False
) -> RealImages:
    """Loads the real images with which a run's released images are compared.

    The held-out images are those of `partition.local_test`, or else the test images.

    Args:
        settings: the settings of the run.
        network: the network whose features are compared, as in `fidelity_of_set`.
        simulation: True states that all these images are public or simulated.
        download: True lets torchvision download a named data set.

    Raises:
        FedsynthError: as for `RealImages` and `simulate`, or there are no held-out images, or the
            run continues the records of earlier periods.
    """
    method = settings.method
    if has_periods(method) and method.period > 1:
        reason = "must be 1, because --evidence needs the records of all periods. Remove --evidence"
        raise SettingError("method", "period", reason, value=method.period)
    observer = Observer()
    loaded = run_data.data_of_run(settings, None, None, observer.note, download=download)
    loaded, clients = among_clients(loaded)
    device = resolve_device(settings.device)
    loaded = run_data.encoded(loaded, clients.parts, device, observer.step)
    parts = [torch.as_tensor(part) for part in clients.parts]
    training, testing = map(torch.cat, run_data.divided(loaded.settings, parts, loaded.train))
    held_out = loaded.train.subset(testing) if len(testing) else loaded.test
    if held_out is None:
        reason = (
            "must be set, because evidence compares with images that were not used. Name a folder"
        )
        raise SettingError("data", "test_folder", reason)
    return RealImages(loaded.train.subset(training), held_out, network, simulation=simulation)


def check_synthesis(settings: RunSettings, out: Path, *, unprotected: bool = False) -> None:
    """Checks the arguments of `synthesize`, without reading data or releasing anything.

    Raises:
        OutputError: `out` is a file, or a folder that is not empty.
        PrivacySettingError: the run is not private, and `unprotected` is False.
        SettingError: the method creates no synthetic images, or only with another setting.
    """
    _require_settings(settings)
    require_new(out)
    if settings.privacy is None and not unprotected:
        reason = (
            "must be set, because otherwise synthetic images may reveal real images. Set "
            f"privacy.epsilon, or pass --{UNPROTECTED} (in Python: {UNPROTECTED}=True)"
        )
        raise PrivacySettingError("privacy", "epsilon", reason)
    method = settings.method
    if issubclass(method.upload, SyntheticSet):
        return
    if isinstance(method, SyntheticImages):
        return method.check_images()
    reason = "makes no synthetic images. Use feddm, fedstats or fedaf"
    raise SettingError("run", "method", reason, value=method.name)
