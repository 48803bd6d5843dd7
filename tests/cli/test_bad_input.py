"""User errors print one line on stderr, with the setting's key in a config file, exit with code 2
and leave no run folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedsynth.methods import METHODS
from tests.cli.conftest import Call

CELL = "fedprox:synthetic --dataset 'synthetic(0,0)' --cell '90 %' --method fedprox"
LINES = (
    ("feddm --method feddmm", "unknown method 'feddmm'; did you mean feddm"),
    ("feddm --dataset mnits", "unknown data set 'mnits'; did you mean mnist"),
    ("feddm --set icp=3", "unknown setting of feddm 'icp'; did you mean ipc"),
    ("fedavg --set projection=8", "unknown setting of fedavg 'projection'"),
    ("feddm --set ipc", "--set must be KEY=VALUE or SECTION.KEY=VALUE, got 'ipc'"),
    ("feddm --bogus 3", "No such option: --bogus"),  # errors of the parser
    ("feddm --dp-sigma big", "'--dp-sigma'"),
    ("feddm surplus", "surplus"),
    ("feddm --rounds 0", "run.rounds must be at least 1, got 0"),
    ("fedavg --client-models cnn1", "model.clients cannot be used with fedavg"),
    ("feddm --dataset mnist", "data.data_root"),
    ("feddm --dataset mnist --data-root {tmp}", "Use --download"),
    ("feddm --output {tmp}/file/runs", "cannot write {tmp}/file/runs"),
    ("feddm --dp-sigma 1 --dp-ledger {tmp}/file", "cannot use ledger folder {tmp}/file"),
    ("feddm --config {tmp}/absent.toml", "cannot read the config file {tmp}/absent.toml"),
    ("fedavg --preset feddm:table2 --config c.toml", "use either --preset or --config"),
    ("feddm --resume {tmp}", "--method cannot be used with --resume"),
    ("methods show fedpro", "did you mean fedprox"),
    ("privacy plan", "set --epsilon to compute"),
    (f"privacy audit --dp-sigma 1 --canaries {10**30}", "canaries must be at most 1e+07"),
    ("privacy audit --dp-sigma 1 --confidence 1e-320", "confidence must be in [0.5, 1)"),
    ("privacy audit --rounds 1", "Set --dp-sigma, --dp-epsilon, or --run"),
    ("server --insecure --port 99999", "'--port': Input should be less than or equal to"),
    ("sweep {tmp}/none.toml", "cannot read the config file {tmp}/none.toml"),
    ("distill --models ,", "files must name at least one model file"),
    ("distill --models a --method feddm", "run.method=feddm cannot distil without data"),
    ("reproduce", "name a table, such as feddm:table2. Use --list to show all tables"),
    ("reproduce feddm:table9", "unknown preset 'feddm:table9'; did you mean"),
    ("reproduce feddm:table2 --alpha 0.5", "no results for alpha 0.5. Use 0.1, 0.01"),
    (f"reproduce {CELL} --time-budget soon", "--time-budget must be a duration"),
    (f"reproduce {CELL} --scale 2", "scale must be above 0 and below 1, got 2.0"),
    (f"reproduce {CELL} --set method.nu=1", "unknown setting of fedprox 'nu'"),
    ("runs {tmp}", "there is no finished run in {tmp}"),
    ("privacy report {tmp}", "cannot read the privacy report"),
    ("privacy sign {tmp} --key {tmp}/key", "cannot use {tmp}/key"),
)


@pytest.mark.parametrize(("line", "text"), LINES)
def test_user_errors_print_one_line(
    train: Call, fedsynth: Call, tmp_path: Path, line: str, text: str
) -> None:
    (tmp_path / "file").write_text("a file, and no folder")
    run = (train if line.split()[0] in METHODS else fedsynth)(line.format(tmp=tmp_path))
    run.assert_refused(text.format(tmp=tmp_path))
    assert not run.output.exists() or not list(run.output.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_missing_cuda_is_rejected(train: Call) -> None:
    train("feddm --device cuda").assert_refused("finds no CUDA device")


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        (b"[run\n", "is not valid TOML"),
        (b"rounds = 3\n", "must be in a section such as [run]"),
        (b"[metod]\nipc = 1\n", "unknown section 'metod'; did you mean method"),
        (b"[run]\nround = 1\n", "unknown setting of run 'round'; did you mean rounds"),
        (b"[partition]\nalpha = [1]\n", "partition.alpha must be a number, got [1]"),
    ],
)
def test_invalid_configs_are_rejected(train: Call, tmp_path: Path, toml: bytes, text: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(toml)
    train(f"feddm --config {path}").assert_refused(text)


def test_errors_of_all_settings_are_in_one_message(train: Call) -> None:
    """Regression: each error hides the next one until it is corrected."""
    run = train(
        "feddm --set ipcs=2 --set iterations=x --set model.depth=0 --set partition.alpha=-1"
    )
    for text in ("unknown setting of feddm 'ipcs'", "method.iterations", "model.depth"):
        run.assert_refused(text)
    run.assert_refused("fedsynth: error: partition.alpha must be")
    text = "method.image_lr must be at least 0, got -1.0. Also: method.image_momentum must be"
    train("feddm --set image_lr=-1 --set image_momentum=2").assert_refused(text)
