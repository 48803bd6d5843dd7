"""The run folder: everything a run leaves behind.

While the run lasts, the folder's name ends in `.incomplete`; the last step renames it, once all
files are on the disk. A folder without that ending is finished, also after a power cut.

    config.toml          the resolved settings; feed back with --config
    metrics.jsonl        a line for each round
    summary.json         what `--json` prints
    model.safetensors    the global model
    synthetic.safetensors, synthetic.png    the last round's uploads, where the method has images,
                         or those that the server made (client −1)
    synthetic_by_round/  a picture of each round's
    artefacts.json, NAME.png    what the server measured, for methods that do (FedHydra's
                         stratification)
    privacy_report.json, .md, .html, ledger/    with differential privacy
    privacy_start.json   then too: what was public and fixed when the run began, which the report
                         of a run that was killed needs
    sources/             the files of one's own that method and model were loaded from
    run.json             of a run over nodes: its name, which it keeps when it is resumed
    resumed.json         after which rounds a run was resumed, where it was
    simulation_only/     what only a simulation may show: exact functions of private data, outside
                         the guarantee; until the run ends also its checkpoint
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

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
from fedsynth.federation.outputs.checkpoint import write_whole
from fedsynth.federation.outputs.disclosed import Disclosed, finite
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.files import load_json, open_regular, plain_files, sync_folder
from fedsynth.privacy.report_figures import Start, schema_problems
from fedsynth.privacy.report_file import read_json

SIMULATION_ONLY_NOTE = (
    "Everything in this folder is an exact function of the clients' data. A simulation may show "
    "it; it is outside every privacy\n"
    "guarantee, and on a real network it would not exist.\n"
)
PRIVATE_START = "privacy_start.json"
RESUMED = "resumed.json"
SERVED = "run.json"
"""The name and the agreement of a run over nodes."""
MODEL = "model.safetensors"
CONFIG = "config.toml"
INCOMPLETE = ".incomplete"
LOCK = ".lock"
NAME_LIMIT = 60  # with two bytes a letter, far below the 255 that file systems take
SERVER = -1
"""In place of a client's number, of images that the server made."""
GRID_LIMIT = 400  # images of the picture; all are in synthetic.safetensors
GRID_COLUMNS = 20
COUNTS = "partition.json"
ROUNDS = "synthetic_by_round"
METRICS = "metrics.jsonl"
HIDDEN = "simulation_only/rounds.jsonl"


class RunFolder:
    """A folder being written; `finish` gives it its name.

    Args:
        base: the folder that it goes into.
        name: of method and data set; what no file's name may have is written as `_`.

    What of a row may stand outside `simulation_only`, `federation.outputs.disclosed` decides.

    Raises:
        OutputError: the folder cannot be made or written.
    """

    def __init__(self, base: Path, name: str) -> None:
        with _writing(base):
            base.mkdir(parents=True, exist_ok=True)
            plain = re.sub(r"[^\w(),.+=-]", "_", name)[:NAME_LIMIT].removesuffix(INCOMPLETE)
            self._final, self.path = _fresh(base, f"{datetime.now():%Y%m%d-%H%M%S}-{plain}")
        self._claim()

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """The folder of a run that did not finish, to go on with.

        Raises:
            OutputError: there is none, the run has finished, or a process still writes it.
        """
        path = path.resolve()
        if not (path / CONFIG).is_file():
            raise OutputError(f"{path} is no run folder: it has no {CONFIG}")
        if path.suffix != INCOMPLETE:
            raise OutputError(f"the run in {path} has finished: there is nothing to resume")
        try:
            plain_files(path)  # a pipe, or a link to another file, is neither read nor written
        except OSError as error:
            raise OutputError(f"cannot resume the run in {path}: {error.strerror}") from None
        folder = cls.__new__(cls)
        folder.path = path
        folder._final = path.with_suffix("")
        folder._claim()
        return folder

    def _claim(self) -> None:
        """Holds the folder until this process ends or `finish`: two never write one run."""
        with _writing(self.path):
            self._lock = open_regular(self.path / LOCK, writing=True, create=True)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.close()
                raise OutputError(f"another process is still writing {self.path}") from None

    def release(self) -> None:
        """Lets go of the folder: nothing more is written."""
        self._lock.close()

    @property
    def final(self) -> Path:
        """What the folder is called once the run has ended."""
        return self._final

    @property
    def checkpoints(self) -> Path:
        """Where the run's checkpoint goes, while it lasts."""
        return self.path / "simulation_only" / "checkpoint"

    def _replace(self, name: str, text: str) -> None:
        """Replaces a file in one step."""
        with _writing(self.path):
            write_whole(self.path / name, text.encode())

    def resumed(self, after: int) -> list[int]:
        """Writes down that the run is resumed after this round; all such rounds so far.

        Raises:
            OutputError: it cannot be written, or what is there is damaged.
        """
        rounds = [*self.resumptions(), after]
        self._replace(RESUMED, json.dumps({"after_rounds": rounds}))
        return rounds

    def resumptions(self) -> list[int]:
        """After which rounds the run was resumed so far.

        Raises:
            OutputError: the file is damaged.
        """
        file = self.path / RESUMED
        with _writing(self.path):
            try:
                return resumed_rounds(file)
            except ValueError as error:
                raise OutputError(f"{file} is damaged: {error}") from None

    def require_ledgers(self, names: Sequence[str]) -> None:
        """Refuses a run whose ledgers are gone: fresh ones would forget what was spent.

        Raises:
            OutputError: names the first that is not there.
        """
        for name in names:
            file = self.path / "ledger" / f"{name}.jsonl"
            if not file.is_file():
                raise OutputError(f"{file} is gone, and with it what the run has spent")

    @property
    def has_rounds(self) -> bool:
        """Whether a round has ended, by what is written after its checkpoint."""
        file = self.path / METRICS
        return (file.exists() and file.stat().st_size > 0) or any(self.resumptions())

    def rewrite_metrics(self, rows: Sequence[Disclosed]) -> None:
        """Replaces all rows by these: those of a round that did not end are dropped."""
        for name, lines in ((METRICS, map(_shown, rows)), (HIDDEN, map(_hidden, rows))):
            text = "".join(lines)
            if text or (self.path / name).exists():
                self._replace(name, text)

    def write_config(self, toml: str) -> None:
        self._replace(CONFIG, toml)

    def write_sources(self, files: Sequence[tuple[str, str]]) -> None:
        """Writes the texts of the user's own files, by name, as they were executed."""
        for name, text in files:
            with _writing(self.path):
                (self.path / "sources").mkdir(exist_ok=True)
            self._replace(f"sources/{name}", text)

    def write_private_start(self, facts: Mapping[str, Any]) -> None:
        text = json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False)
        self._replace(PRIVATE_START, f"{text}\n")

    @property
    def name(self) -> str:
        """What the folder is called once the run has finished."""
        return self._final.name

    def private_start(self) -> dict[str, Any]:
        """Returns what the run wrote down when it began (`Start`).

        Raises:
            PrivacyError: privacy_start.json is missing or damaged.
        """
        start = read_json(self.path / PRIVATE_START, "start of a private run")
        problems = schema_problems(start, Start)
        if problems:
            raise PrivacyError(f"{PRIVATE_START}: {'; '.join(problems)}")
        return start

    @property
    def has_begun(self) -> bool:
        """Whether it says what a private run began with."""
        return (self.path / PRIVATE_START).exists()

    def append_metrics(self, row: Disclosed) -> None:
        """Appends a round's row."""
        for name, line in ((METRICS, _shown(row)), (HIDDEN, _hidden(row))):
            if line:
                with _writing(self.path), (self.path / name).open("a", encoding="utf-8") as file:
                    file.write(line)

    def write_partition(
        self, counts_KC: npt.NDArray[np.int64], class_names: Sequence[str] = ()
    ) -> None:
        """Who has what, once: true counts, so `simulation_only`."""
        folder = self.path / "simulation_only"
        if (folder / "partition.png").exists():
            return
        with _writing(folder):
            folder.mkdir(exist_ok=True)
            (folder / "README.txt").write_text(SIMULATION_ONLY_NOTE, encoding="utf-8")
            (folder / "partition.txt").write_text(partition_table(counts_KC), encoding="utf-8")
            counts = {"class_names": list(class_names), "counts": counts_KC.tolist()}
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
        """(client, images [N, C, H, W], normalised or uint8 pixels, labels [N]) of the last round:
        exactly what was sent, or what the server (`SERVER`) made; and where all have them, soft
        labels [N, classes]."""
        images, labels = _joined(sets)
        rows = [one.cpu() for one in soft if one is not None]
        with _writing(self.path):
            write_set(
                self.path / TENSORS,
                images,
                labels,
                spec,
                pixels=BYTES if images.dtype == torch.uint8 else NORMALISED,
                clients=torch.cat([torch.full((len(s[2]),), s[0]) for s in sets]),
                soft_labels=torch.cat(rows) if rows and len(rows) == len(sets) else None,
            )

    def draw_synthetic(
        self,
        sets: Sequence[tuple[int, Tensor, Tensor]],
        spec: DatasetSpec,
        name: str = "synthetic.png",
    ) -> None:
        """A picture of what `write_synthetic` wrote, a row for each class, where the images have
        colours or greys."""
        images, labels = _joined(sets)
        if not len(images) or spec.channels not in (1, 3):
            return
        most = int(torch.bincount(labels).max())
        columns = min(most, GRID_COLUMNS, max(1, GRID_LIMIT // len(labels.unique())))
        shown = images if images.dtype == torch.uint8 else denormalise(images, spec)
        rows, names = by_class(shown, labels, spec.class_names, columns)
        with _writing(self.path):
            (self.path / name).parent.mkdir(exist_ok=True)
            image_grid_png(rows, self.path / name, columns, names)

    def draw_round(
        self, number: int, sets: Sequence[tuple[int, Tensor, Tensor]], spec: DatasetSpec
    ) -> None:
        """The same of one round."""
        self.draw_synthetic(sets, spec, f"{ROUNDS}/round-{number:05d}.png")

    def write_artefacts(self, matrices: Mapping[str, Tensor]) -> None:
        """What a server made of [classes, clients], as artefacts.json."""
        if not matrices:
            return
        values = {name: finite(matrix.cpu().tolist()) for name, matrix in matrices.items()}
        self._replace("artefacts.json", json.dumps(values, indent=1, allow_nan=False))

    def draw_artefacts(
        self, matrices: Mapping[str, Tensor], class_names: Sequence[str] = ()
    ) -> None:
        """A picture of each of them."""
        with _writing(self.path):
            for name, matrix in matrices.items():
                values = matrix.cpu().double().numpy()
                title = name.replace("_", " ")
                shares_png(values, self.path / f"{name}.png", title, class_names)

    def finish(self, summary: Disclosed) -> Path:
        """Writes the summary, gives the folder its final name and returns it."""
        shown = {**summary.shown, "folder": str(self._final)}
        text = json.dumps(shown, indent=2, allow_nan=False) + "\n"
        with _writing(self.path):
            (self.path / "summary.json").write_text(text, encoding="utf-8")
            _sync_all(self.path)
            self.path.rename(self._final)
            (self._final / LOCK).unlink(missing_ok=True)
            sync_folder(self._final.parent)
        self.path = self._final
        return self._final


def _joined(sets: Sequence[tuple[int, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Returns all images and all labels, on the CPU."""
    return torch.cat([s[1].cpu() for s in sets]), torch.cat([s[2].cpu() for s in sets])


def _shown(row: Disclosed) -> str:
    return json.dumps(row.shown, allow_nan=False) + "\n"


def _hidden(row: Disclosed) -> str:
    """Returns the line of what only a simulation may show; empty: there is nothing."""
    if not row.hidden:
        return ""
    return json.dumps({"round": row.shown["round"], **row.hidden}, allow_nan=False) + "\n"


def resumed_rounds(file: Path) -> list[int]:
    """After which rounds a run was resumed, by its resumed.json; none without the file.

    Raises:
        ValueError: the file is damaged.
        OSError: it cannot be read.
    """
    if not file.exists():
        return []
    try:
        rounds = load_json(file)["after_rounds"]
        if not isinstance(rounds, list) or any(type(one) is not int or one < 0 for one in rounds):
            raise TypeError("it must list rounds")
    except (KeyError, TypeError) as error:
        raise ValueError(f"{error!r:.80}") from None
    if rounds != sorted(rounds):
        raise ValueError("its rounds must not fall")
    return rounds


def _fresh(base: Path, name: str) -> tuple[Path, Path]:
    """The folder's final path, which nobody has, and its `.incomplete` one, which is made; runs of
    the same second are numbered."""
    number = 1
    while True:
        final = base / (name if number == 1 else f"{name}-{number}")
        path = final.with_name(f"{final.name}{INCOMPLETE}")
        with suppress(FileExistsError):
            path.mkdir()
            # asked afterwards, as a run of the same second may have ended just before
            if not final.exists():
                return final, path
            path.rmdir()
        number += 1


def _sync_all(folder: Path) -> None:
    """Everything below a folder onto the disk: files, then the names that they have."""
    for where, _, names in os.walk(folder, topdown=False):
        for name in names:
            with open_regular(Path(where) / name) as file:
                os.fsync(file.fileno())
        sync_folder(Path(where))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """An operating system's refusal (no right, no place, no folder) as an OutputError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"cannot write the run folder {path}: {getattr(error, 'strerror', None) or error}"
        ) from None
