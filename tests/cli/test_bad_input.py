"""A mistake of a user is one line on stderr, which names the setting's key in a config file, and
exit code 2; it leaves nothing that looks like a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsynth.methods import METHODS

TRAIN = (
    ("feddm --method feddmm", "unknown method 'feddmm'; did you mean feddm"),
    ("feddm --dataset mnits", "unknown data set 'mnits'; did you mean mnist"),
    ("feddm --set icp=3", "unknown setting of feddm 'icp'; did you mean ipc"),
    ("fedavg --set projection=8", "is not a setting of fedavg: use model.projection"),
    ("feddm --set ipc", "privacy, report, got 'ipc'"),
    ("feddm --bogus 3", "No such option: --bogus"),  # the parser's own complaints
    ("feddm --dp-sigma big", "'--dp-sigma'"),
    ("feddm surplus", "surplus"),
    ("feddm --rounds 0", "run.rounds must be at least 1, got 0"),
    ("fedavg --client-models cnn1", "model.clients must be left out"),
    ("feddm --dataset mnist", "data.data_root"),
    ("feddm --dataset mnist --data-root {tmp}", "download it with --download"),
    ("feddm --output {tmp}/file/runs", "cannot write into the run folder {tmp}/file/runs"),
    ("feddm --dp-sigma 1 --dp-ledger {tmp}/file", "cannot use ledger folder {tmp}/file"),
    ("feddm --config {tmp}/absent.toml", "cannot read the config {tmp}/absent.toml"),
)
OTHERS = (
    ("privacy plan", "either --epsilon"),
    (f"privacy audit --dp-sigma 1 --canaries {10**30}", "canaries must be at most 1e+07"),
    ("privacy audit --dp-sigma 1 --confidence 1e-320", "confidence must be in [0.5, 1)"),
    ("privacy audit --rounds 1", "set --dp-sigma, --dp-epsilon, or --run FOLDER"),
    ("server --insecure --port 99999", "'--port': Input should be less than or equal to"),
    ("sweep {tmp}/none.toml", "cannot read the config {tmp}/none.toml"),
    ("distill --models ,", "files must name at least one model file"),
    ("distill --models a --method feddm", "run.method=feddm cannot distil without data"),
    ("reproduce", "name a table, such as feddm:table2. Use --list to show all tables"),
    ("runs {tmp}", "there is no finished run in {tmp}"),
    ("privacy report {tmp}", "cannot read the privacy report"),
    ("privacy sign {tmp} --key {tmp}/key", "cannot read the key"),
    ("deploy keys {tmp}/keys --clients 100000000", "clients must be at most 200000"),
)


def assert_one_line(run: Any, text: str) -> None:
    assert run.code == 2, run.stdout + run.stderr
    assert run.stderr.startswith("fedsynth: error: ")
    assert (run.stderr[-1], run.stderr.count("\n")) == ("\n", 1)
    assert text in run.stderr
    assert run.stdout == ""
    assert not run.output.exists() or not list(run.output.iterdir())


@pytest.mark.parametrize(("line", "text"), [*TRAIN, *OTHERS])
def test_a_mistake_is_one_line(
    train: Callable[..., Any],
    fedsynth: Callable[..., Any],
    tmp_path: Path,
    line: str,
    text: str,
) -> None:
    (tmp_path / "file").write_text("a file, and no folder")
    run = (train if line.split()[0] in METHODS else fedsynth)(line.format(tmp=tmp_path))
    assert_one_line(run, text.format(tmp=tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_no_cuda(train: Callable[..., Any]) -> None:
    assert_one_line(train("feddm --device cuda"), "run.device=cuda: torch")


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        (b"[run\n", "is not valid TOML"),
        (b"rounds = 3\n", "'rounds' must be in a section"),
        (b"[metod]\nipc = 1\n", "unknown section 'metod'; did you mean method"),
        (b"[run]\nround = 1\n", "unknown setting of run 'round'; did you mean rounds"),
        (b"[partition]\nalpha = [1]\n", "partition.alpha must be a number, got [1]"),
    ],
)
def test_a_bad_config(train: Callable[..., Any], tmp_path: Path, toml: bytes, text: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(toml)
    assert_one_line(train(f"feddm --config {path}"), text)
