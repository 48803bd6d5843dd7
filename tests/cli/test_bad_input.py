"""Every mistake of a user is one line on stderr and exit code 2, and leaves nothing that looks like
a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

DP = ("--dp-sigma", "1")

# method, options, what the line must say
CASES: list[tuple[str, tuple[str, ...], str]] = [
    ("feddm", ("--method", "feddmm"), "unknown method 'feddmm'; did you mean feddm"),
    ("feddm", ("--dataset", "mnits"), "unknown data set 'mnits'; did you mean mnist"),
    ("feddm", ("--partition", "iidd"), "--partition cannot be 'iidd'; did you mean iid"),
    ("feddm", ("--device", "cpuu"), "--device cannot be 'cpuu'; did you mean cpu"),
    ("feddm", ("--model", "convent"), "unknown model 'convent'; did you mean convnet"),
    (
        "feddm",
        ("--norm", "instanse"),
        "--norm cannot be 'instanse' for convnet; did you mean instance",
    ),
    (
        "feddm",
        (*DP, "--dp-mechanism", "residue"),
        "--dp-mechanism cannot be 'residue' for feddm; did you mean residual?",
    ),
    ("feddm", (*DP, "--dp-mechanism", "dp-sgd"), "known: features, gradient, paper, residual"),
    ("fedavg", (*DP, "--dp-mechanism", "residual"), "known: dp-sgd"),
    ("feddm", ("--set", "icp=3"), "unknown setting of feddm 'icp'; did you mean ipc"),
    (
        "feddm",
        ("--set", "ipc"),
        "KEY=VALUE of the method, or SECTION.KEY=VALUE of method, run, data, partition, model, "
        "privacy, report; got 'ipc'",
    ),
    ("feddm", ("--set", "=3"), "got '=3'"),
    ("feddm", ("--set", "batch=ten"), "--set method.batch must be a whole number, got 'ten'"),
    ("feddm", ("--set", "batch=1.5"), "--set method.batch must be a whole number, got '1.5'"),
    ("feddm", ("--set", "ipc=3"), "ipc is given twice"),
    ("feddm", ("--matching", "gausian"), "--matching cannot be 'gausian'; did you mean gaussian"),
    ("fedaf", ("--matching", "energy", "--dp-epsilon", "8"), "needs each example's features"),
    ("feddm", ("--partition", "domain", "--clients", "4"), "does not say which domain"),
    ("feddm", ("--set", "augment=flip"), "--set method.augment cannot be 'flip'"),
    ("fedavg", ("--ipc", "3"), "unknown setting of fedavg 'ipc'"),
    # the parser's own complaints
    ("feddm", ("--bogus", "3"), "No such option: --bogus"),
    ("feddm", ("--dp-sigma", "big"), "'--dp-sigma'"),
    ("feddm", ("--rounds",), "--rounds"),
    ("feddm", ("surplus",), "surplus"),
    # numbers outside their range
    ("feddm", ("--dp-sigma", "-1"), "--dp-sigma must be a positive number, got -1"),
    ("feddm", ("--dp-sigma", "0"), "--dp-sigma must be a positive number, got 0"),
    ("feddm", ("--dp-sigma", "nan"), "must be a finite number"),
    ("feddm", ("--dp-epsilon", "0"), "--dp-epsilon must be a positive number"),
    ("feddm", (*DP, "--dp-clip", "0"), "--dp-clip must be a positive number"),
    ("feddm", (*DP, "--dp-delta", "0"), "--dp-delta must be in (0, 1), got 0"),
    ("feddm", (*DP, "--dp-delta", "1"), "--dp-delta must be in (0, 1), got 1"),
    ("feddm", (*DP, "--dp-delta", "2"), "--dp-delta must be in (0, 1), got 2"),
    ("feddm", (*DP, "--dp-delta", "1e-3"), "--dp-delta must be at most 1 / --dp-max-records"),
    (
        "feddm",
        (*DP, "--dp-max-records", "1000000"),
        "--dp-delta must be at most 1 / --dp-max-records",
    ),
    ("feddm", (*DP, "--dp-sample-rate", "1.5"), "--dp-sample-rate must be in (0, 1]"),
    (
        "feddm",
        ("--dp-delta", "1e-5"),
        "--dp-sigma or a budget, --dp-epsilon, must be given",
    ),
    (
        "feddm",
        ("--dp-epsilon", "3", "--dp-mechanism", "paper"),
        "no differential privacy guarantee",
    ),
    ("feddm", ("--ipc", "0"), "--ipc must be at least 1, got 0"),
    ("feddm", ("--rounds", "0"), "--rounds must be at least 1, got 0"),
    ("feddm", ("--clients", "0"), "--clients must be at least 1, got 0"),
    ("feddm", ("--clients", "5000"), "5000 clients are more than the 1438 examples"),
    ("feddm", ("--alpha", "0"), "--alpha must be a positive number"),
    ("feddm", ("--depth", "9"), "--depth 9 halves a 8×8 image to nothing"),
    # what cannot go together
    ("feddm", (*DP, "--dp-epsilon", "0.001"), "above the cap 0.001"),
    ("real", DP, "real cannot run with differential privacy: it sends clients' own images"),
    ("fedavg", (*DP, "--norm", "batch"), "'features.1' is BatchNorm2d"),
    ("feddm", (*DP, "--norm", "batch"), "'features.1' is BatchNorm2d"),
    ("feddm", ("--memory-gb", "0"), "--memory-gb must be above 0"),
    # files
    ("feddm", ("--dataset", "mnist"), "no data folder was given"),
    (
        "feddm",
        ("--dataset", "mnist", "--data-root", "{tmp}"),
        "no MNIST/raw/train-images-idx3-ubyte in {tmp}",
    ),
    ("feddm", ("--output", "{tmp}/file/runs"), "cannot write the run folder {tmp}/file/runs"),
    ("feddm", (*DP, "--dp-ledger", "{tmp}/file"), "cannot use ledger folder {tmp}/file"),
    ("feddm", ("--config", "{tmp}/absent.toml"), "cannot read the config {tmp}/absent.toml"),
    ("feddm", ("--config", "{tmp}"), "cannot read the config {tmp}"),
]


def assert_one_line(run: Any, text: str) -> None:
    assert run.code == 2, run.stdout + run.stderr
    assert run.stderr.startswith("fedsynth: error: ")
    assert run.stderr.endswith("\n")
    assert run.stderr.count("\n") == 1
    assert text in run.stderr
    assert run.stdout == ""
    assert not run.output.exists() or not list(run.output.iterdir())


@pytest.mark.parametrize(
    ("method", "options", "text"),
    CASES,
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_one_line(
    train: Callable[..., Any], tmp_path: Path, method: str, options: tuple[str, ...], text: str
) -> None:
    (tmp_path / "file").write_text("a file, and no folder")
    run = train(method, *(option.format(tmp=tmp_path) for option in options))
    assert_one_line(run, text.format(tmp=tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_no_cuda(train: Callable[..., Any]) -> None:
    assert_one_line(train("feddm", "--device", "cuda"), "--device cuda was asked for")


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        ("[run\n", "is not valid TOML"),
        ("rounds = 3\n", "'rounds' stands outside every section"),
        ("[metod]\nipc = 1\n", "unknown section 'metod'; did you mean method"),
        ("[run]\nround = 1\n", "unknown setting of run 'round'; did you mean rounds"),
        ("[data]\nroot = 'x'\n", "unknown setting of data 'root'; did you mean data_root"),
        ("[model]\nwidht = 8\n", "unknown setting of model 'widht'; did you mean width"),
        ("[partition]\nalpha = [1]\n", "--alpha must be a number, got [1]"),
        ("[privacy]\nsigma = 1\n", "unknown setting of privacy 'sigma'"),
    ],
)
def test_a_bad_config(train: Callable[..., Any], tmp_path: Path, toml: str, text: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(toml)
    assert_one_line(train("feddm", "--config", str(path)), text)


def test_a_config_that_is_no_text(train: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(b"\xff\xfe")
    assert_one_line(train("feddm", "--config", str(path)), "is not valid TOML")


def idx(shape: tuple[int, ...], content: bytes) -> bytes:
    """An idx file of bytes that announces `shape`."""
    return bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape) + content


@pytest.mark.parametrize(
    ("images", "text"),
    [
        (idx((20, 28, 28), bytes(20 * 28 * 28 - 5)), "train-images-idx3-ubyte is truncated"),
        (b"<html>not found</html>", "train-images-idx3-ubyte is no idx file"),
        (b"", "train-images-idx3-ubyte"),
        (idx((20, 14, 14), bytes(20 * 14 * 14)), "images must have shape [N, 1, 28, 28]"),
        (idx((19, 28, 28), bytes(19 * 28 * 28)), "19 images"),
    ],
    ids=["truncated", "another file", "empty", "other shape", "other number"],
)
def test_damaged_files(train: Callable[..., Any], tmp_path: Path, images: bytes, text: str) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split in ("train", "t10k"):
        (raw / f"{split}-images-idx3-ubyte").write_bytes(idx((20, 28, 28), bytes(20 * 28 * 28)))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(
            idx((20,), bytes(i % 10 for i in range(20)))
        )
    (raw / "train-images-idx3-ubyte").write_bytes(images)
    assert_one_line(train("feddm", "--dataset", "mnist", "--data-root", str(tmp_path)), text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--dataset", "digit"), "unknown data set 'digit'; did you mean digits"),
        (("--partition", "dirichle"), "did you mean dirichlet"),
        (("--clients", "5000"), "5000 clients are more than the 1438 examples"),
        (("--picture", "{tmp}/absent/who.png"), "cannot write {tmp}/absent/who.png"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_partition(
    fedsynth: Callable[..., Any], tmp_path: Path, options: tuple[str, ...], text: str
) -> None:
    run = fedsynth("partition", *(option.format(tmp=tmp_path) for option in options))
    assert run.code == 2
    assert run.stderr.startswith("fedsynth: error: ")
    assert run.stderr.count("\n") == 1
    assert text.format(tmp=tmp_path) in run.stderr
