"""The run folder: all files that a run writes.

While the run lasts, the folder's name ends in `.incomplete`; the last step renames it, once all
files are on the disk. A folder without that suffix is complete, even after a power cut.

    config.toml          the resolved settings; reuse them with --config
    metrics.jsonl        a line for each round
    summary.json         what `--json` prints
    model.safetensors    the global model
    synthetic.safetensors, synthetic.png    the last round's uploads, if the method has images,
                         or the images that the server made (client −1)
    synthetic_by_round/  a picture of each round's images
    artefacts.json, NAME.png    what the server measured, for methods that do (FedHydra's
                         stratification)
    privacy_report.json, .md, .html, ledger/    with differential privacy
    privacy_start.json   with differential privacy, too: the public facts fixed at the start, from
                         which the report of a killed run is built
    sources/             the custom code files of the method and the model
    run.json             of a run over nodes: its name, which it keeps when it is resumed
    resumed.json         the rounds after which the run was resumed, if it was
    simulation_only/     what only a simulation may show: exact functions of private data, outside
                         the guarantee; until the run ends also its checkpoint
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedsynth.data.files import save_tensors
from fedsynth.data.images import denormalise
from fedsynth.data.picture import (
    by_class,
    image_grid_png,
    partition_png,
    partition_table,
    shares_png,
)
from fedsynth.data.registry import DatasetSpec
from fedsynth.data.shared_set import BYTES, NORMALISED, TENSORS, write_set
from fedsynth.errors import OutputError
from fedsynth.own_code import OwnCode
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.files import open_regular, plain_files, sync_folder, write_whole
from fedsynth.privacy.report.figures import Resumptions, Start
from fedsynth.privacy.report.file import read_part
from fedsynth.results.disclosed import Disclosed, finite

SIMULATION_ONLY_NOTE = """\
Everything in this folder is an exact function of the clients' data. A simulation may show it, but
no privacy guarantee covers it. In a deployment it would not exist.
"""
PRIVATE_START = "privacy_start.json"
RESUMED = "resumed.json"
SERVED = "run.json"
"""The file with the name and the agreed terms of a run over nodes."""
ARTEFACTS = "artefacts.json"
MODEL = "model.safetensors"
CONFIG = "config.toml"
SUMMARY = "summary.json"
INCOMPLETE = ".incomplete"
LOCK = ".lock"
NAME_LIMIT = 60  # with two bytes a letter, far below the 255 that file systems take
SERVER = -1
"""Client index of images that the server made."""
GRID_LIMIT = 400  # images in the picture; all are in synthetic.safetensors
GRID_COLUMNS = 20
COUNTS = "partition.json"
ROUNDS = "synthetic_by_round"
METRICS = "metrics.jsonl"
HIDDEN = "simulation_only/rounds.jsonl"


class RunFolder:
    """A folder being written; `finish` renames it to its final name.

    Args:
        base: the parent folder.
        name: of method and data set; characters that file names cannot have are replaced by `_`.

    Attributes:
        path: its current path.
        final: its path once the run has ended.

    `fedsynth.results.disclosed` decides which part of a row may be outside `simulation_only`.

    Raises:
        OutputError: the folder cannot be made or written.
    """

    def __init__(self, base: Path, name: str) -> None:
        with _writing(base):
            base.mkdir(parents=True, exist_ok=True)
            plain = re.sub(r"[^\w(),.+=-]", "_", name)[:NAME_LIMIT].removesuffix(INCOMPLETE)
            self.final, self.path = _fresh(base, f"{datetime.now():%Y%m%d-%H%M%S}-{plain}")
        self._claim()

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """Opens the folder of an unfinished run, to resume it.

        Raises:
            OutputError: there is no such folder, the run has finished, or a process is still
                writing it.
        """
        path = path.resolve()
        if not (path / CONFIG).is_file():
            raise OutputError(f"{path} is not a run folder: it has no {CONFIG}")
        if path.suffix != INCOMPLETE:
            raise OutputError(f"the run in {path} has finished: there is nothing to resume")
        try:
            plain_files(path)  # a pipe, or a link to another file, is neither read nor written
        except OSError as error:
            raise OutputError(f"cannot resume the run in {path}: {error.strerror}") from None
        folder = cls.__new__(cls)
        folder.path = path
        folder.final = path.with_suffix("")
        folder._claim()
        return folder

    def _claim(self) -> None:
        """Locks the folder until this process ends or calls `finish`, so that two processes never
        write one run.
        """
        with _writing(self.path):
            self._lock = open_regular(self.path / LOCK, writing=True, create=True)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.close()
                raise OutputError(f"another process is still writing {self.path}") from None

    def release(self) -> None:
        """Unlocks the folder; nothing more is written."""
        self._lock.close()

    @property
    def checkpoints(self) -> Path:
        """The path of the run's checkpoint, while the run lasts."""
        return self.path / "simulation_only" / "checkpoint"

    def _replace(self, name: str, text: str) -> None:
        """Replaces a file atomically."""
        with _writing(self.path):
            write_whole(self.path / name, text.encode())

    def note_resumption(self, round_number: int) -> None:
        """Records that the run is resumed after this round.

        Raises:
            OutputError: the file cannot be written.
            PrivacyError: it is damaged.
        """
        rounds = [*resumed_rounds(self.path), round_number]
        self._replace(RESUMED, json.dumps({"after_rounds": rounds}))

    def require_ledgers(self, names: Sequence[str]) -> None:
        """Refuses a run whose ledgers are missing: fresh ones would lose the record of the spent
        budget.

        Raises:
            OutputError: names the first missing ledger.
        """
        for name in names:
            file = self.path / "ledger" / f"{name}.jsonl"
            if not file.is_file():
                raise OutputError(f"{file} is missing, and with it the record of the run's costs")

    @property
    def has_rounds(self) -> bool:
        """Returns whether a round has ended, according to files that are written after its
        checkpoint.
        """
        file = self.path / METRICS
        return (file.exists() and file.stat().st_size > 0) or any(resumed_rounds(self.path))

    def rewrite_metrics(self, rows: Sequence[Disclosed]) -> None:
        """Replaces all rows with these; rows of an unfinished round are dropped."""
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
        """Writes the texts of custom code files, by name, as they were executed."""
        for file in files:
            with _writing(self.path):
                (self.path / "sources").mkdir(exist_ok=True)
            self._replace(f"sources/{file.file}", file.text)

    def write_private_start(self, start: Start) -> None:
        text = json.dumps(start.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
        self._replace(PRIVATE_START, f"{text}\n")

    @property
    def has_begun(self) -> bool:
        """Returns whether the folder records the initial state of a private run."""
        return (self.path / PRIVATE_START).exists()

    def append_metrics(self, row: Disclosed) -> None:
        """Appends a round's row."""
        for name, line in _lines(row).items():
            with _writing(self.path), (self.path / name).open("a", encoding="utf-8") as file:
                file.write(line)

    def write_partition(
        self, counts_KC: npt.NDArray[np.int64], class_names: Sequence[str] = ()
    ) -> None:
        """Writes the class distribution of each client, once: true counts, so into
        `simulation_only`.
        """
        folder = self.path / "simulation_only"
        if (folder / "partition.png").exists():
            return
        counts = {"class_names": list(class_names), "counts": counts_KC.tolist()}
        with _writing(folder):
            folder.mkdir(exist_ok=True)
            (folder / "README.txt").write_text(SIMULATION_ONLY_NOTE, encoding="utf-8")
            (folder / "partition.txt").write_text(partition_table(counts_KC), encoding="utf-8")
            (folder / COUNTS).write_text(json.dumps(counts), encoding="utf-8")
            partition_png(counts_KC, folder / "partial.png", class_names)
            (folder / "partial.png").rename(folder / "partition.png")

    def write_model(self, parameters: Mapping[str, Tensor]) -> None:
        with _writing(self.path):
            save_tensors(parameters, self.path / MODEL, {})

    def write_synthetic(
        self,
        sets: Sequence[tuple[int, Tensor, Tensor]],
        spec: DatasetSpec,
        soft: Sequence[Tensor | None] = (),
    ) -> None:
        """Writes (client, images [N, C, H, W], normalised or uint8 pixels, labels [N]) of the last
        round: exactly what was sent, or what the server (`SERVER`) made; and soft labels [N,
        classes] if all have them.
        """
        images, labels = _joined(sets)
        pixels = NORMALISED
        if images.dtype == torch.uint8:
            pixels = BYTES
        rows = [tensor.cpu() for tensor in soft if tensor is not None]
        soft_labels = None
        if rows and len(rows) == len(sets):
            soft_labels = torch.cat(rows)
        clients = torch.cat([torch.full((len(s[2]),), s[0]) for s in sets])
        with _writing(self.path):
            write_set(
                self.path / TENSORS,
                images,
                labels,
                spec,
                pixels=pixels,
                clients=clients,
                soft_labels=soft_labels,
            )

    def draw_synthetic(
        self,
        sets: Sequence[tuple[int, Tensor, Tensor]],
        spec: DatasetSpec,
        name: str = "synthetic.png",
    ) -> None:
        """Draws what `write_synthetic` wrote, a row for each class, if the images are in colour or
        grey.
        """
        images, labels = _joined(sets)
        if not len(images) or spec.channels not in (1, 3):
            return
        largest = int(torch.bincount(labels).max())
        columns = min(largest, GRID_COLUMNS, max(1, GRID_LIMIT // len(labels.unique())))
        if images.dtype != torch.uint8:
            images = denormalise(images, spec)
        rows, names = by_class(images, labels, spec.class_names, columns)
        with _writing(self.path):
            (self.path / name).parent.mkdir(exist_ok=True)
            image_grid_png(rows, self.path / name, columns, names)

    def draw_round(
        self, number: int, sets: Sequence[tuple[int, Tensor, Tensor]], spec: DatasetSpec
    ) -> None:
        """Draws the images of one round, like `draw_synthetic`."""
        self.draw_synthetic(sets, spec, f"{ROUNDS}/round-{number:05d}.png")

    def write_artefacts(self, matrices: Mapping[str, Tensor]) -> None:
        """Writes the matrices [classes, clients] that a server computed, as artefacts.json."""
        if not matrices:
            return
        values = {name: finite(matrix.cpu().tolist()) for name, matrix in matrices.items()}
        self._replace(ARTEFACTS, json.dumps(values, indent=1, allow_nan=False))

    def draw_artefacts(
        self, matrices: Mapping[str, Tensor], class_names: Sequence[str] = ()
    ) -> None:
        """Draws each of these matrices."""
        with _writing(self.path):
            for name, matrix in matrices.items():
                values = matrix.cpu().double().numpy()
                title = name.replace("_", " ")
                shares_png(values, self.path / f"{name}.png", title, class_names)

    def finish(self, summary: Disclosed) -> Path:
        """Writes the summary, gives the folder its final name and returns it."""
        public = {**summary.public, "folder": str(self.final)}
        self._replace(SUMMARY, json.dumps(public, indent=2, allow_nan=False) + "\n")
        with _writing(self.path):
            _sync_all(self.path)
            self.path.rename(self.final)
            (self.final / LOCK).unlink(missing_ok=True)
            sync_folder(self.final.parent)
        self.path = self.final
        return self.final


def _joined(sets: Sequence[tuple[int, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Returns all images and all labels, on the CPU."""
    return torch.cat([s[1].cpu() for s in sets]), torch.cat([s[2].cpu() for s in sets])


def _lines(row: Disclosed) -> dict[str, str]:
    """Returns the line of a row for each file that gets one."""
    rows = {METRICS: row.public}
    if row.simulation_only:
        rows[HIDDEN] = {"round": row.public["round"], **row.simulation_only}
    return {name: json.dumps(values, allow_nan=False) + "\n" for name, values in rows.items()}


def private_start(folder: Path) -> Start:
    """Returns the facts that a private run wrote when it began.

    Raises:
        PrivacyError: privacy_start.json is missing or damaged.
    """
    return read_part(folder / PRIVATE_START, "start of a private run", Start)


def resumed_rounds(folder: Path) -> list[int]:
    """Returns the rounds after which a run was resumed, in ascending order.

    Raises:
        PrivacyError: the file is damaged or cannot be read.
    """
    if not (folder / RESUMED).exists():
        return []
    rounds = read_part(folder / RESUMED, "list of resumptions", Resumptions).after_rounds
    if rounds != sorted(rounds):
        raise PrivacyError(f"{RESUMED}: its rounds must not decrease")
    return rounds


def _fresh(base: Path, name: str) -> tuple[Path, Path]:
    """Creates the `.incomplete` folder, and returns the unused final path and the `.incomplete`
    one; runs of the same second are numbered.
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
    """Flushes everything in a folder to the disk: first the files, then the folder entries."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            with open_regular(Path(parent) / name) as file:
                os.fsync(file.fileno())
        sync_folder(Path(parent))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raises an error of the operating system (no rights, no space, no folder) as an
    OutputError.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"cannot write the run folder {path}: {reason}") from None
