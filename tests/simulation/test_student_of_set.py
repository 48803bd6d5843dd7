"""Tests of exported sets, with and without the run's model, and of networks trained on them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fedsynth as fs
from fedsynth import errors
from fedsynth.data.files import read_tensors
from fedsynth.data.images import normalise
from fedsynth.features import register_features, register_file, registry
from fedsynth.own_code import load_own
from fedsynth.results.saved_model import Architecture, write_model
from fedsynth.sharing.student import Student, real_images
from tests.quick_runs import folder_of, quick_sections
from tests.raising import raises

BRIEF = fs.StudentSettings(steps=3, views=1)
LINEAR = fs.ModelSettings("linear")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fs.RunResult:
    method = fs.FedStats(ipc=2, drawn_ipc=20)
    settings = fs.RunSettings(method, rounds=3, privacy=fs.PrivacySettings(epsilon=20.0))
    return fs.simulate(settings, output=tmp_path_factory.mktemp("runs"), quiet=True)


@pytest.fixture(scope="module")
def share(run: fs.RunResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "share"
    return fs.export_run(str(run.folder), folder, with_model=True)


@pytest.fixture
def bare(run: fs.RunResult, tmp_path: Path) -> Path:
    return fs.export_run(str(run.folder), tmp_path / "bare")


def changed(file: Path, to: Path, shift: float = 0.0, **stated: str) -> Path:
    weights, facts = read_tensors(file)
    save_file({k: w + shift for k, w in weights.items()}, to, metadata={**facts, **stated})
    return to


def test_exported_models_give_the_logits_of_the_run(
    run: fs.RunResult, share: Path, bare: Path, tmp_path: Path
) -> None:
    test = fs.load_dataset("digits")[1]
    images = normalise(test.images[:20], test.spec)
    exported = fs.load_model(share)
    assert not exported.training
    with torch.no_grad():
        torch.testing.assert_close(exported(images), run.model.eval()(images))
    assert "model.safetensors" in (share / "SHA256SUMS").read_text()
    stated = json.loads(read_tensors(share / "model.safetensors")[1]["settings"])
    assert sorted(stated) == ["method", "model", "run"]
    assert stated["run"] == {"method": "fedstats"}
    # sections of a file on data or privacy have no effect on this machine
    stated |= {"run": {**stated["run"], "rounds": 10**9}, "data": {"folder": "/x"}}
    text = json.dumps({**stated, "privacy": {"epsilon": -1}})
    fs.load_model(changed(share / "model.safetensors", tmp_path / "m", settings=text))
    with raises(errors.OutputError, "files.model"):
        fs.load_model(bare)
    save_file({"weight": torch.zeros(1)}, tmp_path / "plain")
    with raises(errors.OutputError, "files.output"):
        fs.load_model(tmp_path / "plain")
    shutil.copytree(share, tmp_path / "copy")
    changed(share / "model.safetensors", tmp_path / "copy" / "model.safetensors", shift=1)
    with raises(errors.DataFilesCorruptError, "data.damaged"):
        fs.load_model(tmp_path / "copy")


def test_hostile_model_files_raise_one_line_errors(share: Path, tmp_path: Path) -> None:
    file = share / "model.safetensors"
    spec = json.loads(read_tensors(file)[1]["spec"])
    linear = '{"model": {"name": "linear"}}'
    huge = json.dumps({**spec, "width": 100_000, "height": 100_000})  # in a file of a kilobyte
    for stated, message in (
        ({"settings": '{"run": {"method": "nosuch"}}'}, "cannot be used"),
        ({"settings": '{"method": {"features": "nosuch"}}'}, "cannot be used"),
        ({"settings": "{"}, "cannot be used"),
        ({"spec": '{"name": [1]}'}, "cannot be used"),
        ({"spec": huge, "settings": linear}, "exceed the limit"),
        ({"spec": json.dumps({**spec, "width": 20_000}), "settings": linear}, "parameters"),
        ({"logits": '"x"'}, "cannot be used"),
    ):
        with pytest.raises(errors.OutputError, match=message):
            fs.load_model(changed(file, tmp_path / "model.safetensors", **stated))


ENCODER = """
import torch
from fedsynth.features import measured_map

def encoder(image_shape):
    weight = torch.randn(64, 12, generator=torch.Generator().manual_seed({seed}))
    return measured_map("mine", image_shape, lambda x: (x.flatten(1) @ weight).tanh())
"""


def test_changed_encoders_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_CUSTOM", {})
    file = tmp_path / "enc.py"
    file.write_text(ENCODER.format(seed=0))
    name = register_file(f"{file}:encoder")
    method = fs.FedStats(features=name, drawn_ipc=2)
    settings = fs.RunSettings(method, rounds=2, privacy=fs.PrivacySettings(epsilon=20.0))
    result = fs.simulate(settings, output=tmp_path / "runs", quiet=True)
    share = fs.export_run(str(result.folder), tmp_path / "share", with_model=True)
    text = (share / "README.md").read_text()
    assert 'load_model("THIS_FOLDER", features="PATH/enc.py:encoder")' in text
    assert fs.load_model(share, features=f"{file}:encoder") is not None
    file.write_text(ENCODER.format(seed=1))
    other, _ = load_own("method", "features", f"{file}:encoder")
    register_features(name, other)  # like a file that loads changed weights
    with raises(errors.OutputError, "files.model"):
        fs.load_model(share)
    del registry._CUSTOM[name]
    with raises(errors.OutputError, "files.output"):
        fs.load_model(share)


def test_soft_labels_and_a_teacher_are_default(run: fs.RunResult, share: Path, bare: Path) -> None:
    default = fs.student_of_set(share, LINEAR, BRIEF)
    plain = fs.student_of_set(share, LINEAR, BRIEF, labels="hard", teacher="none")
    of_run = fs.student_of_set(bare, LINEAR, BRIEF, teacher=str(run.folder))
    assert (default.labels, default.taught) == ("soft", True)
    assert (plain.labels, plain.taught) == ("hard", False)
    assert of_run.taught
    for name, value in default.network.state_dict().items():
        torch.testing.assert_close(value, of_run.network.state_dict()[name])
        assert not torch.equal(value, plain.network.state_dict()[name])


def test_students_learn_from_the_set_and_are_saved(share: Path, tmp_path: Path) -> None:
    """Regression: a student learns wrong labels, or its file has another network."""
    model = fs.ModelSettings(width=8, depth=2)
    trained = fs.student_of_set(share, model, fs.StudentSettings(300, views=2))
    test = real_images(trained.synthetic.spec, {}, "digits")
    assert test is not None
    assert test.spec.mean == trained.synthetic.spec.mean  # normalised as the student's images were
    assert trained.measures_on(test)["accuracy"] > 0.4  # chance is 0.1; releases give about 0.73
    trained.save(tmp_path / "deep" / "student.safetensors")
    loaded = fs.load_model(tmp_path / "deep" / "student.safetensors")
    images = trained.synthetic.normalised()[:5]
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), trained.network(images))
    for name in ("student.safetensors", "synthetic.safetensors", "images/student.safetensors"):
        with pytest.raises(errors.OutputError, match="inside a synthetic set"):
            trained.save(share / name)
    with pytest.raises(errors.OutputError, match="is a folder"):
        trained.save(tmp_path)


def test_teachers_of_other_images_are_refused(share: Path, tmp_path: Path) -> None:
    """Regression: a model of garments of the same shape labels digits."""
    digits = fs.load_synthetic(share).spec
    teacher = tmp_path / "teacher.safetensors"

    def student(**other: Any) -> Student:
        architecture = Architecture(replace(digits, name="others", **other), LINEAR)
        write_model(teacher, architecture.network(), architecture)
        return fs.student_of_set(share, LINEAR, BRIEF, teacher=teacher)

    assert student().taught
    with pytest.raises(errors.SettingError, match=r"must map .* images to"):
        fs.student_of_set(share, LINEAR, BRIEF, teacher=torch.nn.Flatten())
    for other in (
        {"width": 16}, {"class_names": tuple("abcdefghij")}, {"std": (0.1,)}, {"slice": 0},
        {"window": (40.0, 400.0)}, {"bounds": (-1.0, 1.0)}, {"encoder": "other"},
    ):  # fmt: skip
        with pytest.raises(errors.SettingError, match="that of others"):
            student(**other)


def custom(image_shape: tuple[int, int, int], classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(prod(image_shape), classes))


def test_other_private_inputs_end_guarantee(run: fs.RunResult, share: Path, tmp_path: Path) -> None:
    """Regression: a network claims the set's ε after learning from private models or weights."""
    settings = fs.RunSettings(fs.FedStats(drawn_ipc=2), rounds=1)
    folder = folder_of(fs.simulate(settings, output=tmp_path / "open", quiet=True))
    open_set = fs.export_run(folder, tmp_path / "other", unprotected=True, with_model=True)
    no_copies = fs.StudentSettings(steps=2, views=0)
    for teacher, model, training, holds in (
        ("auto", LINEAR, BRIEF, True),
        ("none", LINEAR, BRIEF, True),
        (str(run.folder), LINEAR, BRIEF, False),
        (str(folder), LINEAR, BRIEF, False),
        (str(open_set), LINEAR, BRIEF, False),
        (str(share), LINEAR, BRIEF, True),
        (f"{share}/model.safetensors", LINEAR, BRIEF, True),
        (fs.load_model(folder), LINEAR, BRIEF, False),
        (str(folder), LINEAR, no_copies, True),  # it has nothing to label
        ("auto", custom, BRIEF, True),
        ("auto", custom((1, 8, 8), 10), BRIEF, False),
    ):
        trained = fs.student_of_set(share, model, training, teacher=teacher)
        assert trained.guaranteed is holds, (teacher, model)
        assert trained.taught is (teacher != "none" and training is BRIEF)
        if model is not LINEAR:
            assert isinstance(trained.network, torch.nn.Sequential)
            continue
        trained.save(tmp_path / "made.safetensors")
        stated = json.loads(read_tensors(tmp_path / "made.safetensors")[1]["epsilon"])
        assert stated == (trained.synthetic.epsilon if holds else None)


def test_sets_without_soft_labels_give_hard_label_students(tmp_path: Path) -> None:
    sections = quick_sections("feddm", privacy={"epsilon": 8.0})
    out = tmp_path / "share"
    fs.synthesize(fs.owner_settings(sections), out, runs=tmp_path / "runs", with_model=True)
    trained = fs.student_of_set(out, LINEAR, BRIEF)
    assert (trained.labels, trained.taught) == ("hard", False)  # its model has seen these images
    with raises(errors.SettingError, "labels"):
        fs.student_of_set(out, LINEAR, BRIEF, labels="soft")
