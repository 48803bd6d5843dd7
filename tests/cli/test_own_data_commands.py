"""`--data`, `data describe`, `synthesize`, `export` and `runs --output` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsynth import FedAvg, ModelSettings, PrivacySettings, RunSettings, load_synthetic, simulate
from fedsynth.federation.protocol import Observer
from fedsynth.privacy.report.formatting import format_epsilon
from tests.cli.conftest import Call
from tests.image_folders import make_image_folder, write_image
from tests.interruption import interrupt_in_round

SHORT = (
    "--rounds 1 --width 4 --depth 2 --ipc 1 --device cpu --set iterations=1 --set server_epochs=1 "
    "--set min_examples=1"
)


def test_folder_becomes_exported_set(tmp_path: Path, fedsynth: Call) -> None:
    """The steps of the documentation: describe, sign, synthesize, load."""
    folder = make_image_folder(tmp_path / "scans")
    share = tmp_path / "share"
    runs = f"--output {tmp_path / 'runs'}"
    synthesize = f"synthesize --data {folder} --dp-epsilon 8 --out {share} {SHORT} {runs}"
    fedsynth(synthesize).assert_refused(f"Run fedsynth data describe {folder}, then")

    described = fedsynth(f"data describe {folder}")
    assert described.code == 0, described.stderr
    assert "sites 0: north, 1: south" in described.stdout
    toml = folder / "fedsynth.toml"
    assert f"written: {toml}" in described.stdout
    assert fedsynth(f"data describe {folder}").code == 0  # replaces the unsigned draft

    assert "is not signed. " in fedsynth(synthesize).stderr
    toml.write_text(
        toml.read_text().replace('by = ""', 'by = "me"').replace('date = ""', 'date = "2026-11-23"')
    )
    assert "is signed" in fedsynth(f"data describe {folder}").stderr
    result = fedsynth(f"{synthesize} --responsible 'Klinikum Mitte'")
    assert result.code == 0, result.stderr
    assert "Klinikum Mitte" in (share / "privacy_report.md").read_text()
    assert f"you may share the folder {share}" in result.stderr
    synthetic = load_synthetic(share)
    assert synthetic.epsilon <= 8
    fedsynth(f"privacy verify {share}").assert_refused("Verify the run folder")

    (run_folder,) = (tmp_path / "runs").iterdir()
    exported = fedsynth(f"export {run_folder} --out {tmp_path / 'again'}")
    assert exported.code == 0, exported.stderr
    second = load_synthetic(tmp_path / "again")
    assert second.images.equal(synthetic.images)
    assert (second.epsilon, second.spec) == (synthetic.epsilon, synthetic.spec)


def test_train_prints_names_of_damaged_files(tmp_path: Path, fedsynth: Call) -> None:
    folder = make_image_folder(tmp_path / "scans")
    (folder / "north" / "ill" / "00.png").write_bytes(b"x")
    write_image(folder / "north" / "ill" / "big.png", 1, (20, 20))
    line = f"train --data {folder} --output {tmp_path / 'out'} {SHORT}"
    fedsynth(f"{line} --image-size 16").assert_refused("--skip-corrupt (data.skip_corrupt=True)")
    assert "such as data.image_size=64" in fedsynth(f"{line} --skip-corrupt").stderr
    result = fedsynth(f"{line} --image-size 16 --skip-corrupt")
    assert result.code == 0, result.stderr
    assert "  north/ill/00.png (the file is not a JPEG, PNG, BMP, WEBP, TIFF file)" in result.stderr
    for path in result.folder.rglob("*"):  # file names are only printed
        assert path.is_dir() or b"00.png" not in path.read_bytes()


# ------------------------------------------------------------------------------------ the library


def quick(**run: Any) -> RunSettings:
    method = FedAvg(local_steps=1)
    return RunSettings(method, model=ModelSettings("linear"), **{"rounds": 2, **run})


def test_simulate_prints_progress_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    simulate(quick())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "round 2/2" in captured.err
    simulate(quick(), quiet=True)
    simulate(quick(), observer=Observer())
    assert capsys.readouterr() == ("", "")


def test_early_ends_print_epsilon_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both a reached cap and an error print ε and the folder."""
    private = PrivacySettings(noise_multiplier=3.0)
    single: Any = simulate(quick(rounds=1, privacy=private), quiet=True).privacy
    cap = 1.2 * single["guarantee"]["epsilon"]
    capped = quick(privacy=PrivacySettings(noise_multiplier=3.0, epsilon=cap))
    result = simulate(capped, output=tmp_path / "capped")
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("ended after 1 of 2 rounds: client")
    spent = format_epsilon(result.summary["differential_privacy"]["epsilon"])
    assert f". Spent: ε = {spent} at δ" in line
    assert line.endswith(f". The results are in {result.folder}")

    with interrupt_in_round(2, monkeypatch), pytest.raises(KeyboardInterrupt):
        simulate(quick(privacy=private), output=tmp_path / "cut")
    line = capsys.readouterr().err.splitlines()[-1]
    (folder,) = (tmp_path / "cut").iterdir()
    assert "after 1 of 2 rounds. Spent: ε = " in line
    assert line.endswith(f"--resume {folder}")
