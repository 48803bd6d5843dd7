"""`fedsynth student`: from a handed-over set to a network and its accuracy."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsynth import (
    FedStats,
    PrivacySettings,
    RunSettings,
    export_run,
    load_model,
    load_synthetic,
    simulate,
)
from fedsynth.cli.app import app
from fedsynth.privacy.figures import up


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("student")
    method = FedStats(ipc=2, drawn_ipc=4)
    settings = RunSettings(method, rounds=3, privacy=PrivacySettings(epsilon=20.0))
    run = simulate(settings, output=place / "runs", quiet=True)
    exported = ["export", str(run.folder), "--out", str(place / "share"), "--with-model"]
    assert app_exit(exported) == 0
    export_run(str(run.folder), place / "bare")
    return place / "share"


def app_exit(options: list[str]) -> int:
    try:
        app(options)
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


BRIEF = ("--model", "linear", "--steps", "20", "--copies", "1")


def test_it_says_what_it_learned_its_guarantee_and_its_accuracy(
    share: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "mine.safetensors"
    code = app_exit(["student", str(share), *BRIEF, "--dataset", "digits", "--output", str(made)])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "learned: 60 images, soft labels, and 1 changed copies of each that a model" in out
    epsilon = up(load_synthetic(share).epsilon or 0.0)
    assert f"guarantee: ε = {epsilon} at δ = 1e-05, the set's" in out
    assert " % of 359 real test images" in out
    assert "step 20 of 20" in err
    assert err.count("step ") == 10
    assert load_model(made) is not None


def test_without_the_model_nobody_labels_copies_and_without_test_images_nothing_is_claimed(
    share: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "mine.safetensors"
    code = app_exit(["student", str(share.parent / "bare"), *BRIEF, "--output", str(made)])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "learned: 60 images, soft labels, and 1 changed copies of each\n" in out
    assert "accuracy" not in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--output", "."), ". is a folder"),
        (("--model", "net.py"), "--model must be FILE.py:NAME, got net.py"),
        (("--labels", "sof"), "--labels cannot be 'sof'"),
        (("--steps", "0"), "--steps must be at least 1"),
        (("--copies", "-1"), "--copies must be at least 0"),
        (("--width", "0"), "--width must be at least 1"),
        (("--teacher", "nowhere"), "nowhere is no folder of a finished run"),
        (("--dataset", "synthetic(1,1)"), "--dataset synthetic(1,1) has other images"),
        (("--dataset", "digits", "--test-data", "x"), "--dataset is named beside --test-data"),
    ],
)
def test_mistakes_are_one_line_with_the_command_s_own_options(
    options: tuple[str, ...], words: str, share: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = app_exit(["student", str(share), *options])
    err = capsys.readouterr().err
    assert code == 2
    assert err.startswith("fedsynth: error: ")
    assert err.count("\n") == 1
    assert words in err


FEATURES = """
from fedsynth.features import FeatureMap

def rows(image_shape):
    return FeatureMap(
        "rows", image_shape, 8, 3.0, 3.0, "pixels are in [0, 1]", lambda x: x.mean(dim=(1, 3))
    )
"""


def test_a_teacher_on_somebody_s_own_features_needs_their_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a set whose model nobody else can use, or a traceback of who has not the file."""
    file = tmp_path / "enc.py"
    file.write_text(FEATURES)
    own = f"{file}:rows"
    made = ("--output", str(tmp_path / "made.safetensors"))
    train = ("train", "--method", "fedstats", "--rounds", "1", "--clients", "2")
    settings = ("--features", own, "--set", "drawn_ipc=4", "--dp-epsilon", "20")
    assert app_exit([*train, *settings, "--output", str(tmp_path / "runs")]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    share = str(tmp_path / "share")
    assert app_exit(["export", str(run), "--out", share, "--with-model", "--features", own]) == 0
    monkeypatch.setattr("fedsynth.features.registry._OWN", {})
    capsys.readouterr()
    assert app_exit(["student", share, *BRIEF, *made]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "enc.py:rows@" in err
    assert "--teacher none" in err
    assert app_exit(["student", share, *BRIEF, *made, "--teacher", "none"]) == 0
    assert app_exit(["student", share, *BRIEF, *made, "--features", own]) == 0
    assert "that a model labelled" in capsys.readouterr().out
