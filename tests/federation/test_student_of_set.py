"""A set that was handed over, with the run's model and without, and a network trained on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedsynth import (
    FedStats,
    ModelSettings,
    PrivacySettings,
    RunSettings,
    StudentSettings,
    export_run,
    load_dataset,
    load_model,
    simulate,
)
from fedsynth.data.images import normalise
from fedsynth.errors import (
    DataError,
    DataFilesCorruptError,
    OutputError,
    SettingError,
    UnknownNameError,
)
from fedsynth.federation.outputs.result import RunResult
from fedsynth.federation.student import network_for, real_images, student_of_set
from tests.own_images import make_folder

BRIEF = StudentSettings(steps=3, views=1)
LINEAR = ModelSettings("linear")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    method = FedStats(ipc=2, drawn_ipc=20)
    settings = RunSettings(method, rounds=3, privacy=PrivacySettings(epsilon=20.0))
    return simulate(settings, output=tmp_path_factory.mktemp("runs"), quiet=True)


@pytest.fixture(scope="module")
def share(run: RunResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("out") / "share"
    return export_run(str(run.folder), place, with_model=True)


def copied(share: Path, to: Path) -> Path:
    """The set, without its list of hashes' protection of the model."""
    to.mkdir()
    (to / "model.safetensors").write_bytes((share / "model.safetensors").read_bytes())
    return to / "model.safetensors"


def test_the_model_goes_with_the_set_and_gives_the_run_s_logits(
    run: RunResult, share: Path
) -> None:
    test = load_dataset("digits")[1]
    images = normalise(test.images[:20], test.spec)
    found = load_model(share)
    assert not found.training
    with torch.no_grad():
        torch.testing.assert_close(found(images), run.model.eval()(images))
    assert "model.safetensors" in (share / "SHA256SUMS").read_text()
    assert "`fedsynth.load_model" in (share / "README.md").read_text()


def test_with_the_model_go_what_its_network_follows_from_and_no_other_settings(share: Path) -> None:
    with safe_open(share / "model.safetensors", framework="pt") as file:
        said = json.loads(file.metadata()["settings"])
    assert sorted(said) == ["method", "model", "run"]
    assert said["run"] == {"method": "fedstats"}


def test_a_set_without_the_model_says_so(run: RunResult, tmp_path: Path) -> None:
    made = export_run(str(run.folder), tmp_path / "share")
    assert not (made / "model.safetensors").exists()
    assert "load_model" not in (made / "README.md").read_text()
    with pytest.raises(OutputError, match="without the run's model"):
        load_model(made)


def test_a_model_that_was_changed_on_the_way_is_refused(run: RunResult, tmp_path: Path) -> None:
    made = export_run(str(run.folder), tmp_path / "share", with_model=True)
    file = made / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        said = opened.metadata()
    save_file({name: value + 1 for name, value in load_file(file).items()}, file, metadata=said)
    with pytest.raises(DataFilesCorruptError, match="was changed"):
        load_model(made)


@pytest.mark.parametrize(
    "settings",
    [
        '{"run": {"method": "nosuch"}}',
        '{"run": {"method": "fedstats"}, "method": {"features": "nosuch"}}',
        '{"model": {"width": -1}}',
        '{"model": {"wide": 1}}',
        '{"model": 3}',
        "[]",
        "{",
    ],
)
def test_a_hostile_file_is_an_error_of_one_line(settings: str, share: Path, tmp_path: Path) -> None:
    file = copied(share, tmp_path / "copy")
    with safe_open(file, framework="pt") as opened:
        said = {**opened.metadata(), "settings": settings}
    save_file(load_file(file), file, metadata=said)
    with pytest.raises(OutputError, match="cannot be used") as caught:
        load_model(file)
    assert "\n" not in str(caught.value)


def test_a_file_of_bare_weights_does_not_say_what_it_is(run: RunResult) -> None:
    with pytest.raises(OutputError, match="does not say of which architecture"):
        load_model(f"{run.folder}/model.safetensors")


def test_soft_labels_and_the_set_s_own_teacher_are_what_is_taken(share: Path) -> None:
    made = student_of_set(share, LINEAR, BRIEF)
    assert (made.labels, made.taught) == ("soft", True)
    plain = student_of_set(share, LINEAR, BRIEF, labels="hard", teacher="none")
    assert (plain.labels, plain.taught) == ("hard", False)
    outcomes = [torch.cat([p.flatten() for p in one.network.parameters()]) for one in (made, plain)]
    assert not torch.equal(*outcomes)


def test_a_run_s_folder_can_be_the_teacher(run: RunResult, tmp_path: Path, share: Path) -> None:
    bare = export_run(str(run.folder), tmp_path / "share")
    made = student_of_set(bare, LINEAR, BRIEF, teacher=str(run.folder))
    same = student_of_set(share, LINEAR, BRIEF)
    assert made.taught
    for name, value in made.network.state_dict().items():
        torch.testing.assert_close(value, same.network.state_dict()[name])


def test_a_student_learns_from_the_set_and_is_read_back(share: Path, tmp_path: Path) -> None:
    """Catches: a student of wrong labels, or one whose file is another network's."""
    made = student_of_set(share, ModelSettings(width=8, depth=2), StudentSettings(300, views=2))
    test = real_images(made.found.spec, dataset="digits")
    assert test is not None
    assert made.accuracy_on(test) > 0.6  # a tenth by chance
    made.save(tmp_path / "deep" / "student.safetensors")
    again = load_model(tmp_path / "deep" / "student.safetensors")
    images = made.found.normalised()[:5]
    with torch.no_grad():
        torch.testing.assert_close(again(images), made.network(images))


def test_what_cannot_be_is_refused(share: Path, run: RunResult, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="labels"):
        student_of_set(share, LINEAR, BRIEF, labels="sof")
    with pytest.raises(OutputError, match="no folder of a finished run"):
        student_of_set(share, LINEAR, BRIEF, teacher=tmp_path)


def test_a_teacher_of_other_images_is_refused(share: Path, tmp_path: Path) -> None:
    made = student_of_set(share, ModelSettings("linear"), BRIEF)
    file = tmp_path / "other.safetensors"
    made.save(file)
    with safe_open(file, framework="pt") as opened:
        said = dict(opened.metadata())
    spec = json.loads(said["spec"])
    wider = {**spec, "width": 2 * spec["width"]}
    weights = load_file(file)
    weights = {
        name: torch.cat([value, value], dim=1) if value.dim() == 2 else value
        for name, value in weights.items()
    }
    save_file(weights, file, metadata={**said, "spec": json.dumps(wider)})
    with pytest.raises(SettingError, match="for other images"):
        student_of_set(share, LINEAR, BRIEF, teacher=file)


def test_real_images_come_from_a_folder_or_a_data_set(share: Path, tmp_path: Path) -> None:
    spec = student_of_set(share, LINEAR, BRIEF).found.spec
    assert real_images(spec) is None
    found = real_images(spec, dataset="digits")
    assert found is not None
    assert found.spec.mean == spec.mean  # normalised as the student's images were
    with pytest.raises(SettingError, match="other images or classes"):
        real_images(spec, dataset="synthetic(1,1)")
    with pytest.raises(SettingError, match="give one"):
        real_images(spec, dataset="digits", folder=tmp_path)
    with pytest.raises(DataError, match="does not have"):
        real_images(spec, folder=make_folder(tmp_path / "scans", ("a",), each=3))


def test_a_set_without_soft_labels_has_none_to_learn(tmp_path: Path) -> None:
    from fedsynth import owner_settings, synthesize

    tiny = {"ipc": 1, "iterations": 1, "server_epochs": 1}
    model = {"width": 4, "depth": 2}
    settings = owner_settings(
        {"run": {"rounds": 1}, "method": tiny, "model": model, "privacy": {"epsilon": 8.0}}
    )
    synthesize(settings, tmp_path / "share", runs=tmp_path / "runs", with_model=True)
    made = student_of_set(tmp_path / "share", LINEAR, BRIEF)
    assert made.labels == "hard"
    assert "labels the copies" not in (tmp_path / "share" / "README.md").read_text()
    with pytest.raises(SettingError, match="no soft labels"):
        student_of_set(tmp_path / "share", LINEAR, BRIEF, labels="soft")


def test_the_network_is_small_unless_another_is_asked_for() -> None:
    spec = load_dataset("digits")[1].spec
    assert (network_for(spec).width, network_for(spec).depth) == (32, 2)
    assert network_for(spec, width=8, name=None).width == 8
