"""Tests of the evidence pack: copies and owners' marks are found, new images are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import fedsynth as fs
from fedsynth.cli.app import app
from fedsynth.data.shared_set import check_hashes
from fedsynth.errors import SettingError, UnknownNameError
from fedsynth.evaluation import evidence as attacks
from fedsynth.evaluation.evidence import Evidence, Membership, membership, site_inference
from fedsynth.sharing.export import export_run
from fedsynth.simulation.simulate import images_of_run, simulate, synthesize
from tests.quick_runs import folder_of, quick_sections
from tests.raising import raises
from tests.user_files import make_image_folder, write_declaration

SECTIONS = {
    "run": {"rounds": 1, "device": "cpu"},
    "method": {"ipc": 2, "iterations": 2, "server_epochs": 1},
    "model": {"width": 4, "depth": 2},
    "privacy": {"epsilon": 8.0},
}
REPEATS = 40


def flagged(result: Membership | attacks.SiteInference | None) -> bool:
    assert result is not None
    return result.low > result.chance


def drawn(seed: int, sizes: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    """Draws sets of the same distribution: for each set, its number of images of each class."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(size=(len(sizes[0]), 6))
    sets = []
    for counts in sizes:
        labels = np.repeat(np.arange(len(counts)), counts)
        images = centres[labels] + rng.normal(size=(len(labels), 6))
        sets.append((torch.tensor(images), torch.tensor(labels)))
    return sets


def test_distances_and_share_follow_from_all_pairs() -> None:
    (released, _), training, held_out = drawn(3, [[9, 8], [30, 20], [10, 25]])
    released[0] = training[0][7]
    found = membership(released, training, held_out)
    pairs = [
        np.linalg.norm(released[:, None] - real[0][None], axis=2) for real in (training, held_out)
    ]
    assert np.allclose(found.nearest_training, pairs[0].min(1), atol=1e-6)
    assert np.allclose(found.nearest_held_out, pairs[1].min(1), atol=1e-6)
    assert found.rate == pytest.approx((pairs[0].min(1) < pairs[1].min(1)).mean())
    labels = torch.cat([training[1], held_out[1]])[np.hstack(pairs).argmin(1)]
    assert found.chance == pytest.approx(np.where(labels == 0, 30 / 40, 20 / 45).mean())


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_copies_are_found(noise: float) -> None:
    training, held_out = drawn(1, [[100, 100], [60, 60]])
    released = training[0][::4] + noise * torch.randn(50, 6, generator=torch.Generator())
    found = membership(released, training, held_out)
    assert found.rate > 0.99
    assert flagged(found)


def test_equally_near_images_count_by_their_share() -> None:
    (training,) = drawn(1, [[20, 20]])
    assert membership(training[0], training, training).rate == 0.5
    copies = tuple(part.repeat_interleave(9, dim=0) for part in training)
    found = membership(
        1e4 + training[0], (1e4 + training[0], training[1]), (1e4 + copies[0], copies[1])
    )
    assert found.rate == pytest.approx(0.1)
    assert not flagged(found)


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_copies_divided_at_random_are_not_flagged(share: float) -> None:
    """Regression: copies on both sides counted one half, whatever their numbers were."""
    flags = 0
    for seed in range(REPEATS):
        (images,) = drawn(seed, [[30]])
        is_training = torch.tensor(np.random.default_rng(seed).random(300) < share)
        features, labels = images[0].repeat(10, 1), images[1].repeat(10)
        training = features[is_training], labels[is_training]
        held_out = features[~is_training], labels[~is_training]
        flags += flagged(membership(images[0], training, held_out))
    assert flags <= 3


def flags_of_new_images(sizes: list[list[int]], copies: int = 1) -> int:
    """Returns how many of 40 sets of new images are flagged. Each image is released several times."""
    found = []
    for seed in range(REPEATS):
        (released, _), *real = drawn(seed, sizes)
        found.append(flagged(membership(released.repeat(copies, 1), *real)))
    return sum(found)


MANY = [[40, 40], [120, 100], [60, 70]]
SKEWED = [[40, 40], [300, 10], [10, 300]]
FEW = [[4, 4], [120, 100], [60, 70]]


def test_new_images_are_not_flagged() -> None:
    assert flags_of_new_images(MANY) <= 3  # 2.5 % on one side
    assert flags_of_new_images(SKEWED) <= 3
    assert flags_of_new_images(FEW, copies=50) <= 3


def test_an_attack_that_counts_repeated_images_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    interval = attacks.interval
    monkeypatch.setattr(attacks, "interval", lambda share, _: interval(share, 400))
    assert flags_of_new_images(FEW, copies=50) > 6


def test_an_attack_that_ignores_classes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = attacks.membership

    def without_classes(released: Tensor, *real: tuple[Tensor, Tensor]) -> Membership:
        return measured(released, *[(images, labels * 0) for images, labels in real])

    released, *real = drawn(0, [[80, 0], [300, 10], [10, 300]])
    assert not flagged(measured(released[0], *real))
    assert flagged(without_classes(released[0], *real))


def test_a_watermark_of_owners_is_found() -> None:
    wrong = 0
    for seed in range(REPEATS):
        (images, labels), *_ = drawn(seed, [[45, 45]])
        owners = torch.randperm(90, generator=torch.Generator().manual_seed(seed)) % 3
        wrong += flagged(site_inference(images, owners, labels))
        marked = torch.cat([images, (owners == 1)[:, None], (owners == 2)[:, None]], dim=1)
        found = site_inference(marked, owners, labels)
        assert found is not None
        assert found.rate > 0.95
        assert flagged(found)
    assert wrong <= 3


def test_owners_that_only_differ_in_classes_are_not_flagged() -> None:
    (images, labels), *_ = drawn(0, [[40, 40]])
    found = site_inference(images + 9 * labels[:, None], labels, labels)
    assert found is not None
    assert (found.rate, found.chance) == (1.0, 1.0)
    assert not flagged(found)


def test_site_inference_needs_two_images_of_two_owners() -> None:
    (images, labels), *_ = drawn(0, [[5, 5]])
    assert site_inference(images, labels * 0, labels) is None
    assert site_inference(images, torch.arange(10).clamp(max=1), labels) is None
    assert site_inference(images, torch.arange(10) // 8, labels) is not None


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("evidence")
    settings = fs.owner_settings(SECTIONS)
    synthesize(settings, out / "share", runs=out / "runs", evidence="pixels", simulation=True)
    return out / "share"


def test_a_share_has_the_pack_that_its_report_lists(share: Path) -> None:
    check_hashes(share)
    text = (share / "evidence.json").read_text()
    pack = Evidence.model_validate_json(text)
    synthetic = fs.load_synthetic(share)
    assert list(pack.label_counts.values()) == synthetic.labels.bincount().tolist()
    assert (pack.training_images, pack.held_out_images) == (1438, 359)
    assert len(pack.membership.nearest_training) == len(synthetic.labels)
    assert pack.fidelity == fs.fidelity_of_set(share, fs.load_dataset("digits")[1], "pixels")
    page = (share / "evidence.md").read_text()
    assert page.splitlines()[0] == pack.notice
    for sentence in (pack.membership.can_show, pack.membership.cannot_show, pack.fidelity_shows):
        assert sentence in page
    report = json.loads((share / "privacy_report.json").read_text())
    assert {"evidence.json", "evidence.md"} < report["files"].keys()
    (access,) = [row for row in report["scope"] if "evidence.json" in row["note"]]
    assert access["status"] == "simulation-only"
    assert access["note"] in (share / "privacy_report.md").read_text()
    assert "evidence.md" in (share / "README.md").read_text()


def test_without_a_request_there_is_no_pack(share: Path, tmp_path: Path) -> None:
    (run,) = (share.parent / "runs").iterdir()
    plain = export_run(run, tmp_path / "plain")
    assert not list(plain.glob("evidence*"))
    assert "evidence" not in (plain / "README.md").read_text()
    assert "evidence" not in (plain / "privacy_report.md").read_text()


def test_private_runs_without_the_statement_are_refused(share: Path, tmp_path: Path) -> None:
    settings = fs.owner_settings({**SECTIONS, "run": {"rounds": 1, "device": "cpu", "seed": 3}})
    with raises(SettingError, "simulation"):
        synthesize(settings, tmp_path / "share", runs=tmp_path / "runs", evidence="pixels")
    with raises(SettingError, "simulation"):
        fs.RealImages(*fs.load_dataset("digits"))
    (run,) = (share.parent / "runs").iterdir()
    shown = CliRunner().invoke(
        app, ["export", str(run), "--out", str(tmp_path / "share"), "--evidence", "pixels"]
    )
    assert shown.exit_code == 2
    assert "--simulation" in shown.output
    assert list(tmp_path.iterdir()) == []


def released(tmp_path: Path, name: str, /, **sections: dict[str, Any]) -> Evidence:
    """Exports the set of a federation of three clients, and returns its pack."""
    settings = fs.resolve(quick_sections(name, run={"rounds": 1}, **sections))
    result = simulate(settings, output=tmp_path, quiet=True)
    real = images_of_run(settings, "pixels", simulation=True)
    share = export_run(folder_of(result), tmp_path / "share", unprotected=True, real=real)
    return Evidence.model_validate_json((share / "evidence.json").read_text())


def test_a_method_that_releases_real_images_is_found(tmp_path: Path) -> None:
    pack = released(tmp_path, "real", method={"ipc": 5}, partition={"kind": "iid"})
    assert max(pack.membership.nearest_training) < 1e-6
    assert pack.membership.rate > 0.99
    assert flagged(pack.membership)
    assert pack.site_inference is not None
    assert pack.site_inference.owners == 3
    assert not flagged(pack.site_inference)


def test_local_test_splits_are_held_out(tmp_path: Path) -> None:
    pack = released(tmp_path, "feddm", partition={"local_test": 0.3})
    records = pack.training_images + pack.held_out_images
    assert records == pytest.approx(0.2 * 1438, abs=9)  # rounded in each class
    assert pack.held_out_images == pytest.approx(0.3 * records, abs=9)  # and at each client


def test_own_images_are_compared_with_a_test_folder(tmp_path: Path) -> None:
    folder = make_image_folder(tmp_path / "scans", sites=(), per_class=23)
    held_out = make_image_folder(tmp_path / "held", sites=(), per_class=3)
    write_declaration(folder, sites=())
    settings = fs.owner_settings({**SECTIONS, "data": {"folder": str(folder)}})
    share, runs = tmp_path / "share", tmp_path / "runs"
    with raises(SettingError, "data.test_folder"):
        synthesize(settings, share, runs=runs, evidence="pixels", simulation=True)
    with raises(UnknownNameError, "method.features"):
        images = {"folder": str(folder), "test_folder": str(held_out)}
        tested = fs.owner_settings({**SECTIONS, "data": images})
        synthesize(tested, share, runs=runs, evidence="pixel", simulation=True)
    assert not (folder / "fedsynth-ledger").exists()  # nothing was charged
    synthesize(settings, share, runs=runs)
    (run,) = runs.iterdir()
    options = f"--out {tmp_path}/again --evidence pixels --simulation --test-data {held_out}"
    shown = CliRunner().invoke(app, ["export", str(run), *options.split()])
    assert shown.exit_code == 0, shown.output
    pack = Evidence.model_validate_json((tmp_path / "again" / "evidence.json").read_text())
    assert (pack.training_images, pack.held_out_images) == (46, 6)


def test_evidence_needs_the_records_of_all_periods() -> None:
    settings = fs.resolve(quick_sections("fedstats", method={"periods": 3, "period": 2}))
    with raises(SettingError, "method.period"):
        images_of_run(settings, "pixels", simulation=True)


def test_images_of_other_shapes_are_refused(share: Path) -> None:
    train, _ = fs.load_dataset("digits")
    larger = fs.from_arrays(np.zeros((4, 9, 9), np.uint8), np.arange(4))
    with raises(SettingError, "held_out"):
        fs.RealImages(train, larger, simulation=True)
    with raises(SettingError, "synthetic"):
        fs.RealImages(larger, larger, simulation=True).evidence(fs.load_synthetic(share))
