"""Writes the run folder, which contains all files of a run.

While the run lasts, the name of the folder ends in `.incomplete`. When all files are on the disk,
the folder is renamed as the last step. A folder without the suffix is therefore complete, even
after a power cut.

    config.toml          all settings of the run; --config reads them
    metrics.jsonl        the metrics of each round, one round per line
    summary.json         the summary that `--json` prints
    model.safetensors    the global model
    synthetic.safetensors, synthetic.png    the synthetic images that clients sent in the last
                         round, or that the server made (client −1)
    synthetic_by_round/  a picture of each round's synthetic images
    artefacts.safetensors    matrices that the server measured (FedHydra's stratification)
    privacy_report.json, .md, .html, ledger/    only with differential privacy
    privacy_start.json   only with differential privacy: the public facts fixed at the start, from
                         which the report of a killed run is built
    sources/             the files with user code for the method and the model
    run.json             only in a run over a network: the proposal, whose name stays the same when
                         the run is resumed
    resumed.json         only in a resumed run: the rounds after which it was resumed
    simulation_only/     values that only a simulation may show, because they are exact functions
                         of private data without a privacy guarantee; also the checkpoint, until
                         the run ends
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsynth.core.messages import Tensors
from fedsynth.data import picture
from fedsynth.data.files import save_tensors
from fedsynth.data.images import denormalise
from fedsynth.data.registry import DatasetSpec
from fedsynth.data.shared_set import BYTES, NORMALISED, TENSORS, write_set
from fedsynth.errors import OutputError, PrivacyError, writing
from fedsynth.files import (
    claim,
    delete_partial,
    open_regular,
    plain_files,
    sync_folder,
    write_whole,
)
from fedsynth.own_code import OwnCode
from fedsynth.privacy.report.figures import Resumptions, Start
from fedsynth.privacy.report.file import read_part
from fedsynth.results.disclosed import Disclosed
from fedsynth.results.file_names import CONFIG, HIDDEN, INCOMPLETE, LOCK, METRICS, SUMMARY

SIMULATION_ONLY_NOTE = """\
Everything in this folder is an exact function of the clients' data. A simulation may show it, but
no privacy guarantee covers it. In a deployment it would not exist.
"""
PRIVATE_START = "privacy_start.json"
RESUMED = "resumed.json"
ARTEFACTS = "artefacts.safetensors"
# The folder with the checkpoint of a server whose clients are on other machines.
CHECKPOINT = "checkpoint"

NAME_LIMIT = 60  # with two bytes a letter, far below the 255 that file systems take
SERVER = -1  # the client index that is stored with images that the server made
GRID_LIMIT = 400  # images in the picture; all are in synthetic.safetensors
GRID_COLUMNS = 20
PARTITION = "simulation_only/partition.png"
ROUNDS = "synthetic_by_round"


# Synthetic sets: the client, its images [N, C, H, W], their labels [N], and their soft labels
# [N, classes] or None.
Sets = list[tuple[int, Tensor, Tensor, Tensor | None]]


class RunFolder:
    """The folder for a run's files. `finish` renames it after the run has ended.

    Args:
        base: the parent folder.
        name: a name made of the method and the data set. Characters that are not allowed in file
            names are replaced by `_`.
        began: the time in the name of the folder. None means now.
        home: the later parent folder, which the files state. None means that the folder stays.

    Attributes:
        path: the current path of the folder.
        final: the path of the folder after the run has ended.

    `fedsynth.results.disclosed` decides which metrics may be written outside `simulation_only`.

    Raises:
        OutputError: the folder cannot be created or written.
    """

    def __init__(
        self, base: Path, name: str, began: datetime | None = None, home: Path | None = None
    ) -> None:
        with writing(base):
            base.mkdir(parents=True, exist_ok=True)
            plain = re.sub(r"[^\w(),.+=-]", "_", name)[:NAME_LIMIT].removesuffix(INCOMPLETE)
            time = began or datetime.now()
            self.final, self.path = _fresh(base, f"{time:%Y%m%d-%H%M%S}-{plain}")
        self._home = home or base
        self._claim()

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """Opens an unfinished run's folder, to resume the run.

        Raises:
            OutputError: the folder does not exist, the run has finished, or a process is still
                writing into the folder.
        """
        path = require_unfinished(path)
        try:
            plain_files(path)  # a pipe, or a link to another file, is neither read nor written
        except OSError as error:
            raise OutputError(f"cannot resume the run in {path}: {error.strerror}") from None
        folder = cls.__new__(cls)
        folder.path = path
        folder.final = path.with_suffix("")
        folder._home = path.parent
        folder._claim()
        with writing(path):
            delete_partial(path)
        return folder

    def _claim(self) -> None:
        """Locks the folder until the process ends or calls `finish` or `release`.

        The lock prevents two processes from writing the same run.
        """
        with writing(self.path):
            busy = OutputError(
                f"another process is still writing into {self.path}. Wait until it ends"
            )
            self._lock = claim(self.path / LOCK, busy)

    def release(self) -> None:
        """Unlocks the folder, so that another process can resume the run. No file may be written
        afterwards.
        """
        self._lock.close()

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints. It exists until the run ends."""
        return self.path / "simulation_only" / CHECKPOINT

    def _replace(self, name: str, text: str) -> None:
        """Replaces a file atomically."""
        with writing(self.path):
            write_whole(self.path / name, text.encode())

    def note_resumption(self, round_number: int) -> None:
        """Records in resumed.json that the run is resumed after the given round.

        Raises:
            OutputError: the file cannot be written.
            PrivacyError: the file is damaged.
        """
        rounds = [*resumed_rounds(self.path), round_number]
        self._replace(RESUMED, json.dumps({"after_rounds": rounds}))

    def require_ledgers(self, names: Sequence[str]) -> None:
        """Checks that the run's ledgers exist.

        If a ledger is missing, the run must not be resumed: a new ledger would not contain the
        privacy budget that is already spent.

        Raises:
            OutputError: a ledger is missing. The message names its file.
        """
        for name in names:
            file = self.path / "ledger" / f"{name}.jsonl"
            if not file.is_file():
                raise OutputError(
                    f"cannot resume the run: ledger {file} is missing. Restore it from a backup"
                ).with_code("files.finished")

    @property
    def has_rounds(self) -> bool:
        """True if at least one round of the run has ended.

        It is known from the files that are written after a round's checkpoint.
        """
        file = self.path / METRICS
        return (file.exists() and file.stat().st_size > 0) or any(resumed_rounds(self.path))

    def rewrite_metrics(self, rows: Sequence[Disclosed]) -> None:
        """Rewrites the metrics files without an unfinished round's metrics."""
        texts = {METRICS: "", HIDDEN: ""}
        for row in rows:
            for name, line in _lines(row).items():
                texts[name] += line
        for name, text in texts.items():
            if text or (self.path / name).exists():
                self._replace(name, text)

    def write_config(self, toml: str) -> None:
        self._replace(CONFIG, toml)

    def write_sources(self, files: Iterable[OwnCode]) -> None:
        """Copies the user's code into the run folder, as executed."""
        for file in files:
            with writing(self.path):
                (self.path / "sources").mkdir(exist_ok=True)
            self._replace(f"sources/{file.file}", file.text)

    def write_private_start(self, start: Start) -> None:
        text = json.dumps(start.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
        self._replace(PRIVATE_START, f"{text}\n")

    @property
    def has_begun(self) -> bool:
        """True if the run is private and has written its initial state, privacy_start.json."""
        return (self.path / PRIVATE_START).exists()

    def append_metrics(self, row: Disclosed) -> None:
        """Appends a finished round's metrics to the metrics files."""
        for name, line in _lines(row).items():
            with writing(self.path), (self.path / name).open("a", encoding="utf-8") as file:
                file.write(line)

    def write_partition(self, counts_KC: npt.NDArray[np.int64]) -> None:
        """Writes the class distribution of each client.

        Args:
            counts_KC: the number of examples of each client and class.
        """
        folder = self.path / "simulation_only"
        with writing(folder):
            folder.mkdir(exist_ok=True)
            (folder / "README.txt").write_text(SIMULATION_ONLY_NOTE, encoding="utf-8")
            (folder / "partition.txt").write_text(picture.partition_table(counts_KC), "utf-8")
            picture.partition_png(counts_KC, self.path / PARTITION)

    def write_synthetic(self, sets: Sets, spec: DatasetSpec) -> None:
        """Writes the last round's synthetic images and their labels.

        Args:
            sets: the sets that the clients sent, or that the server made (client `SERVER`). The
                images are normalised, or uint8 pixels. Soft labels are written only if all sets
                have them.
            spec: the specification of the data set.
        """
        images, labels = _joined(sets)
        pixels = BYTES if images.dtype == torch.uint8 else NORMALISED
        rows = [s[3].cpu() for s in sets if s[3] is not None]
        soft_labels = torch.cat(rows) if rows and len(rows) == len(sets) else None
        clients = torch.cat([torch.full((len(s[2]),), s[0]) for s in sets])
        with writing(self.path):
            write_set(
                self.path / TENSORS,
                images,
                labels,
                spec,
                pixels=pixels,
                clients=clients,
                soft_labels=soft_labels,
            )

    def draw_synthetic(self, sets: Sets, spec: DatasetSpec, name: str) -> None:
        """Draws the images from `write_synthetic` as one picture, with a row for each class.

        Draws nothing for data that are not grey or colour images.
        """
        images, labels = _joined(sets)
        if not len(images) or not spec.can_be_drawn:
            return
        largest = int(torch.bincount(labels).max())
        columns = min(largest, GRID_COLUMNS, max(1, GRID_LIMIT // len(labels.unique())))
        if images.dtype != torch.uint8:
            images = denormalise(images, spec)
        if images.is_floating_point():
            images = (images * 255).round().to(torch.uint8)
        rows, names = picture.by_class(images, labels, spec.class_names, columns)
        with writing(self.path):
            (self.path / name).parent.mkdir(exist_ok=True)
            picture.image_grid_png(rows, self.path / name, columns, names)

    def write_artefacts(self, matrices: Tensors) -> None:
        """Writes the server's matrices, if there are any."""
        if matrices:
            with writing(self.path):
                save_tensors(matrices, self.path / ARTEFACTS, {})

    def write_summary(self, summary: Disclosed) -> None:
        public = {**summary.public, "folder": str(self._home / self.final.name)}
        self._replace(SUMMARY, json.dumps(public, indent=2, allow_nan=False) + "\n")

    def discard(self) -> None:
        """Deletes the folder of a run that has released nothing."""
        self.release()
        with writing(self.path):
            shutil.rmtree(self.path)

    def finish(self) -> Path:
        """Renames an ended run's folder, and returns the new path."""
        with writing(self.path):
            _sync_all(self.path)
            if sys.platform == "win32":  # a folder with an open file cannot be renamed
                self.release()
            self.path.rename(self.final)
            (self.final / LOCK).unlink(missing_ok=True)
            sync_folder(self.final.parent)
        self.path = self.final
        # not earlier: without its checkpoint, a run that is killed here would start again
        for checkpoint in (self.checkpoints, self.path / CHECKPOINT):
            shutil.rmtree(checkpoint, ignore_errors=True)
        return self.final


def _joined(sets: Sets) -> tuple[Tensor, Tensor]:
    """Concatenates the images and the labels of several sets. The results are on the CPU."""
    return torch.cat([s[1].cpu() for s in sets]), torch.cat([s[2].cpu() for s in sets])


def _lines(row: Disclosed) -> dict[str, str]:
    """Formats a round's metrics as one line of JSON for each metrics file."""
    rows = {METRICS: row.public}
    if row.simulation_only:
        rows[HIDDEN] = {"round": row.public["round"], **row.simulation_only}
    return {name: json.dumps(values, allow_nan=False) + "\n" for name, values in rows.items()}


def private_start(folder: Path) -> Start:
    """Reads privacy_start.json, written at a private run's start.

    Raises:
        PrivacyError: privacy_start.json is missing or damaged.
    """
    return read_part(folder / PRIVATE_START, "start of a private run", Start)


def resumed_rounds(folder: Path) -> list[int]:
    """Returns the rounds after which a run was resumed, in ascending order.

    Raises:
        PrivacyError: resumed.json is damaged or cannot be read.
    """
    if not (folder / RESUMED).exists():
        return []
    rounds = read_part(folder / RESUMED, "list of resumptions", Resumptions).after_rounds
    if rounds != sorted(rounds):
        text = f"{RESUMED} is damaged: round numbers decrease in {rounds}"
        raise PrivacyError(text).with_code(f"files.{RESUMED}")
    return rounds


def _fresh(base: Path, name: str) -> tuple[Path, Path]:
    """Creates the folder of a new run, whose name ends in `.incomplete`.

    Runs that begin in the same second are numbered. Returns the path that the folder will have
    after the run, and its current path.
    """
    number = 1
    while True:
        suffix = f"-{number}" if number > 1 else ""
        final = base / f"{name}{suffix}"
        path = base / f"{name}{suffix}{INCOMPLETE}"
        with suppress(FileExistsError):
            path.mkdir()
            # checked only now, because a run of the same second may have ended just before
            if not final.exists():
                return final, path
            path.rmdir()
        number += 1


def _sync_all(folder: Path) -> None:
    """Flushes a folder's files and entries to disk."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            # Windows writes only files to the disk that are open for writing
            with open_regular(Path(parent) / name, writing=sys.platform == "win32") as file:
                os.fsync(file.fileno())
        sync_folder(Path(parent))


def require_unfinished(path: Path) -> Path:
    """Checks that a folder is that of an unfinished run, and returns its resolved path.

    Raises:
        OutputError: the folder is no run folder, or the run has finished, perhaps since the name
            of the folder was printed. The message states where the finished run is.
    """
    path = place = path.resolve()
    if path.suffix == INCOMPLETE and not path.exists():
        place = path.with_suffix("")
    if not (place / CONFIG).is_file():
        raise OutputError(f"{path} contains no {CONFIG}. Name a run folder")
    if place.suffix != INCOMPLETE:
        raise OutputError(
            f"the run in {place} cannot be resumed, because it has finished. Start a new run"
        ).with_code("files.finished")
    return path
