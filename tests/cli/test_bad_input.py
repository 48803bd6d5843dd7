"""A mistake of a user is one line on stderr, which names the setting's key in a config file, and
exit code 2; it leaves nothing that looks like a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

TRAIN = (
    # names
    ("feddm --method feddmm", "unknown method 'feddmm'; did you mean feddm"),
    ("feddm --dataset mnits", "unknown data set 'mnits'; did you mean mnist"),
    ("feddm --partition iidd", "partition.kind cannot be 'iidd'; did you mean iid"),
    ("feddm --device cpuu", "run.device cannot be 'cpuu'; did you mean cpu"),
    ("feddm --model convent", "unknown model 'convent'; did you mean convnet"),
    ("feddm --norm instanse", "model.norm cannot be 'instanse' for convnet; did you mean instance"),
    (
        "feddm --dp-sigma 1 --dp-mechanism residue",
        "privacy.mechanism cannot be 'residue' for feddm; did you mean residual?",
    ),
    ("fedavg --dp-sigma 1 --dp-mechanism residual", "known: dp-sgd"),
    ("feddm --set icp=3", "unknown setting of feddm 'icp'; did you mean ipc"),
    ("fedavg --ipc 3", "unknown setting of fedavg 'ipc'"),
    ("fedavg --set projection=8", "is no setting of fedavg, but model.projection is one"),
    (
        "feddm --set ipc",
        "KEY=VALUE of the method, or SECTION.KEY=VALUE of method, run, data, partition, model, "
        "privacy, report; got 'ipc'",
    ),
    ("feddm --set ipc=3", "method.ipc is given twice"),
    # the parser's own complaints
    ("feddm --bogus 3", "No such option: --bogus"),
    ("feddm --dp-sigma big", "'--dp-sigma'"),
    ("feddm --rounds", "--rounds"),
    ("feddm surplus", "surplus"),
    # numbers
    ("feddm --set batch=1.5", "method.batch must be a whole number, got '1.5'"),
    ("feddm --rounds 0", "run.rounds must be at least 1, got 0"),
    ("feddm --seed -1", "run.seed must be at least 0, got -1"),
    ("feddm --memory-gb 0", "run.memory_gb must be above 0"),
    ("feddm --quorum 1.5", "run.quorum must be between 0 and 1, got 1.5"),
    ("feddm --clients 5000", "5000 clients are more than the 1438 examples"),
    ("feddm --alpha 0", "partition.alpha must be a positive number"),
    ("feddm --local-test 1", "partition.local_test must be in [0, 1), got 1.0"),
    ("feddm --depth 9", "model.depth=9 halves a 8×8 image to nothing"),
    ("feddm --model googlenet", "model.name=googlenet needs images of at least 15×15, got 8×8"),
    ("feddm --participation 0.01", "run.participation 0.01 of 2 clients is not one"),
    ("feddm --dp-sigma -1", "privacy.noise_multiplier must be a positive number, got -1"),
    ("feddm --dp-sigma nan", "must be a finite number"),
    ("feddm --dp-epsilon 0", "privacy.epsilon must be a positive number"),
    ("feddm --dp-sigma 1 --dp-clip 0", "privacy.clip must be a positive number"),
    ("feddm --dp-sigma 1 --dp-delta 1", "privacy.delta must be in (0, 1), got 1"),
    ("feddm --dp-sigma 1 --dp-delta 1e-3", "privacy.delta must be at most 1 / privacy.max_records"),
    ("feddm --dp-sigma 1 --dp-sample-rate 1.5", "privacy.sample_rate must be in (0, 1]"),
    # what cannot go together
    ("feddm --dp-delta 1e-5", "privacy.noise_multiplier or a budget, privacy.epsilon, must be"),
    ("feddm --dp-epsilon 3 --dp-mechanism paper", "no differential privacy guarantee"),
    ("feddm --dp-sigma 1 --dp-unit user", "privacy.unit=user needs privacy.nominal_size: "),
    ("feddm --dp-sigma 1 --dp-epsilon 0.001", "above the cap 0.001"),
    ("real --dp-sigma 1", "real cannot run with differential privacy: it sends clients' own"),
    ("fedavg --dp-sigma 1 --norm batch", "'features.1' is BatchNorm2d"),
    ("fedavg --client-models cnn1", "model.clients must be left out"),
    ("fedaf --matching energy --dp-epsilon 8", "needs each example's features"),
    ("feddm --partition domain --clients 4", "does not say which domain"),
    # files
    ("feddm --dataset mnist", "no data folder was given"),
    (
        "feddm --dataset mnist --data-root {tmp}",
        "no MNIST/raw/train-images-idx3-ubyte in {tmp}; fetch it with --download",
    ),
    ("feddm --output {tmp}/file/runs", "cannot write the run folder {tmp}/file/runs"),
    ("feddm --dp-sigma 1 --dp-ledger {tmp}/file", "cannot use ledger folder {tmp}/file"),
    ("feddm --config {tmp}/absent.toml", "cannot read the config {tmp}/absent.toml"),
)
OTHERS = (
    ("partition --dataset digit", "unknown data set 'digit'; did you mean digits"),
    ("partition --set run.rounds=0", "run.rounds must be at least 1, got 0"),
    ("privacy plan", "needs --epsilon"),
    ("privacy plan --epsilon 1 --n 0", "privacy.nominal_size must be a positive"),
    ("privacy plan --sigma 1 --steps 0", "method.iterations must be at least 1, got 0"),
    ("privacy plan --epsilon 1 --mechanism paper", "gives no guarantee"),
    ("privacy plan --epsilon 1 --method real --steps 5", "cannot run with differential privacy"),
    ("privacy plan --sigma 1 --adjacency swap", "adjacency must be one of"),
    ("privacy audit --dp-sigma 1 --canaries 1", "canaries must be at least 2, got 1"),
    (f"privacy audit --dp-sigma 1 --canaries {10**30}", "canaries must be at most 1e+07"),
    ("privacy audit --dp-sigma 1 --confidence 1e-320", "confidence must be in [0.5, 1)"),
    (f"reproduce feddm:table2 --seeds {10**9}", "'--seeds': Input should be less than or equal to"),
    ("server --insecure --port 99999", "'--port': Input should be less than or equal to"),
    ("client --server a:1 --number 9999999 --ledger l --trial", "'--number': Input should be less"),
    ("sweep {tmp}/none.toml", "cannot read the config {tmp}/none.toml"),
    ("privacy audit --rounds 1", "give --dp-sigma or --dp-epsilon, or --run FOLDER"),
    ("distill --models ,", "files must name at least one model file"),
    ("distill --models a --method feddm", "run.method=feddm does not distil without data"),
    ("distill --models {tmp}/none", "no model file"),
    ("reproduce", "name a table (feddm:table2), or list all tables with --list"),
    ("runs {tmp}", "no finished run in {tmp}"),
    ("privacy report {tmp}", "cannot read a privacy report"),
    ("privacy sign {tmp} --key {tmp}/key", "cannot read the key"),
    ("deploy keys {tmp}/keys --clients 100000000", "clients must be at most 200000"),
    ("deploy keys {tmp}/keys --clients 2 --days 1000000000", "days must be at most 36525"),
)


def assert_one_line(run: Any, text: str) -> None:
    assert run.code == 2, run.stdout + run.stderr
    assert run.stderr.startswith("fedsynth: error: ")
    assert (run.stderr[-1], run.stderr.count("\n")) == ("\n", 1)
    assert text in run.stderr
    assert run.stdout == ""
    assert not run.output.exists() or not list(run.output.iterdir())


@pytest.mark.parametrize(("line", "text"), TRAIN)
def test_one_line(train: Callable[..., Any], tmp_path: Path, line: str, text: str) -> None:
    (tmp_path / "file").write_text("a file, and no folder")
    assert_one_line(train(line.format(tmp=tmp_path)), text.format(tmp=tmp_path))


@pytest.mark.parametrize(("line", "text"), OTHERS)
def test_one_line_of_other_commands(
    fedsynth: Callable[..., Any], tmp_path: Path, line: str, text: str
) -> None:
    assert_one_line(fedsynth(line.format(tmp=tmp_path)), text.format(tmp=tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_no_cuda(train: Callable[..., Any]) -> None:
    assert_one_line(train("feddm --device cuda"), "run.device=cuda was asked for")


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        (b"[run\n", "is not valid TOML"),
        (b"\xff\xfe", "is not valid TOML"),
        (b"rounds = 3\n", "'rounds' stands outside every section"),
        (b"[metod]\nipc = 1\n", "unknown section 'metod'; did you mean method"),
        (b"[run]\nround = 1\n", "unknown setting of run 'round'; did you mean rounds"),
        (b"[data]\nroot = 'x'\n", "unknown setting of data 'root'; did you mean data_root"),
        (b"[partition]\nalpha = [1]\n", "partition.alpha must be a number, got [1]"),
        (b"[privacy]\nsigma = 1\n", "unknown setting of privacy 'sigma'"),
    ],
)
def test_a_bad_config(train: Callable[..., Any], tmp_path: Path, toml: bytes, text: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(toml)
    assert_one_line(train(f"feddm --config {path}"), text)


def idx(shape: tuple[int, ...], content: bytes) -> bytes:
    """An idx file of bytes that announces `shape`."""
    return bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape) + content


def test_a_damaged_file(train: Callable[..., Any], tmp_path: Path) -> None:
    """The kinds of damage are in tests/data; this is what the command line makes of one."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split in ("train", "t10k"):
        (raw / f"{split}-images-idx3-ubyte").write_bytes(idx((20, 28, 28), bytes(20 * 28 * 28)))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(idx((20,), bytes(2 * [*range(10)])))
    (raw / "train-images-idx3-ubyte").write_bytes(idx((20, 28, 28), bytes(20 * 28 * 28 - 5)))
    run = train(f"feddm --dataset mnist --data-root {tmp_path}")
    assert_one_line(run, "train-images-idx3-ubyte is truncated")
