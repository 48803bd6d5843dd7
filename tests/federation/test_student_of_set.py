"""A set that was handed over, with the run's model and without, and a network trained on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    load_synthetic,
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
from fedsynth.features import register_features, register_file
from fedsynth.features.registry import _OWN
from fedsynth.federation.outputs.result import RunResult
from fedsynth.federation.outputs.saved_model import Architecture, images_of_model, write_model
from fedsynth.federation.student import network_for, real_images, student_of_set
from fedsynth.own_code import load_own
from tests.own_images import make_folder

BRIEF = StudentSettings(steps=3, views=1)
LINEAR = ModelSettings("linear")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Forgets maps that a test has registered."""
    before = dict(_OWN)
    yield
    _OWN.clear()
    _OWN.update(before)


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


def changed(share: Path, to: Path, **said: str) -> Path:
    """The set's model with other metadata."""
    file = copied(share, to)
    with safe_open(file, framework="pt") as opened:
        before = opened.metadata()
    save_file(load_file(file), file, metadata={**before, **said})
    return file


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("settings", '{"run": {"method": "nosuch"}}'),
        ("settings", '{"run": {"method": "fedstats"}, "method": {"features": "nosuch"}}'),
        ("settings", '{"run": "fedstats"}'),
        ("settings", '["run"]'),
        ("settings", '{"model": {"width": -1}}'),
        ("settings", '{"model": {"wide": 1}}'),
        ("settings", '{"model": 3}'),
        ("settings", "{"),
        ("spec", "[]"),
        ("spec", '{"name": [1]}'),
        ("logits", "[[0]]"),
        ("logits", '"x"'),
    ],
)
def test_a_hostile_file_is_an_error_of_one_line(
    key: str, text: str, share: Path, tmp_path: Path
) -> None:
    with pytest.raises(OutputError, match="cannot be used") as caught:
        load_model(changed(share, tmp_path / "copy", **{key: text}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [({"width": 100_000, "height": 100_000}, "too many"), ({"width": 20_000}, "parameters")],
)
def test_a_small_file_makes_no_large_network(
    wanted: dict[str, int], words: str, share: Path, tmp_path: Path
) -> None:
    """Catches: 80 GB for a file of a kilobyte."""
    with safe_open(share / "model.safetensors", framework="pt") as opened:
        spec = {**json.loads(opened.metadata()["spec"]), **wanted}
    said = {"spec": json.dumps(spec), "settings": '{"model": {"name": "linear"}}'}
    with pytest.raises(OutputError, match=words):
        load_model(changed(share, tmp_path / "copy", **said))


def test_other_settings_of_a_stranger_are_not_taken(share: Path, tmp_path: Path) -> None:
    """Catches: a file whose sections on data or privacy touch this machine."""
    with safe_open(share / "model.safetensors", framework="pt") as opened:
        settings = json.loads(opened.metadata()["settings"])
    settings["run"]["rounds"] = 10**9
    text = json.dumps({**settings, "data": {"folder": "/x"}, "privacy": {"epsilon": -1}})
    assert load_model(changed(share, tmp_path / "copy", settings=text)) is not None


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
    with pytest.raises(OutputError, match="is no folder of a finished run, no set"):
        student_of_set(share, LINEAR, BRIEF, teacher=tmp_path)


def test_a_teacher_of_other_images_is_refused(share: Path, tmp_path: Path) -> None:
    spec = replace(load_dataset("digits")[1].spec, width=16)
    wider = Architecture(spec, LINEAR)
    write_model(tmp_path / "other.safetensors", wider.network(), wider)
    with pytest.raises(SettingError, match="for other images"):
        student_of_set(share, LINEAR, BRIEF, teacher=tmp_path / "other.safetensors")
    with pytest.raises(SettingError, match="for other images"):
        student_of_set(share, LINEAR, BRIEF, teacher=torch.nn.Flatten())


@pytest.mark.parametrize(
    "other",
    [{"class_names": tuple("abcdefghij")}, {"mean": (0.1,)}, {"std": (0.1,)}],
    ids=["classes", "mean", "std"],
)
def test_a_teacher_of_other_classes_or_of_pixels_in_other_units_is_refused(
    other: dict[str, Any], share: Path, tmp_path: Path
) -> None:
    """Catches: labels of garments for digits, from a model that takes images of the same shape."""
    digits = load_dataset("digits")[1].spec
    for spec in (digits, replace(digits, name="others", **other)):
        of = Architecture(spec, LINEAR)
        write_model(tmp_path / f"{spec.name}.safetensors", of.network(), of)
    assert student_of_set(share, LINEAR, BRIEF, teacher=tmp_path / "digits.safetensors").taught
    with pytest.raises(SettingError, match="is for images of others, and the set's are of digits"):
        student_of_set(share, LINEAR, BRIEF, teacher=tmp_path / "others.safetensors")


def test_an_open_run_s_folder_says_which_images_its_model_is_for(tmp_path: Path) -> None:
    settings = RunSettings(FedStats(), rounds=1)
    result = simulate(settings, output=tmp_path, quiet=True)
    assert result.folder is not None
    told = images_of_model(result.folder)
    assert told is not None
    assert told.name == "digits"


def test_the_guarantee_is_the_set_s_where_nothing_else_went_in(
    run: RunResult, share: Path, tmp_path: Path
) -> None:
    """Catches: the set's ε claimed of a network that learned from an unprotected run's model."""
    settings = RunSettings(FedStats(drawn_ipc=2), rounds=1)
    unprotected = simulate(settings, output=tmp_path / "open", quiet=True)
    folder = unprotected.folder
    assert folder is not None
    set_too = export_run(folder, tmp_path / "other", unprotected=True, with_model=True)
    cases = {
        "auto": True,
        "none": True,
        str(run.folder): True,
        str(folder): False,
        str(set_too): False,
        str(share): True,
        f"{share}/model.safetensors": True,
    }
    for teacher, holds in cases.items():
        made = student_of_set(share, LINEAR, BRIEF, teacher=teacher)
        assert made.guaranteed is holds, teacher
        made.save(tmp_path / "made.safetensors")
        with safe_open(tmp_path / "made.safetensors", framework="pt") as file:
            said = file.metadata()
        assert json.loads(said["epsilon"]) == (made.found.epsilon if holds else None)
    assert not student_of_set(share, LINEAR, BRIEF, teacher=load_model(folder)).guaranteed
    no_copies = StudentSettings(steps=2, views=0)
    alone = student_of_set(share, LINEAR, no_copies, teacher=str(folder))
    assert (alone.taught, alone.guaranteed) == (False, True)


def test_no_network_is_written_into_a_set(share: Path, tmp_path: Path) -> None:
    """Catches: a set that nobody can read any more, for one file too many."""
    made = student_of_set(share, LINEAR, BRIEF, teacher="none")
    for name in ("student.safetensors", "synthetic.safetensors", "images/student.safetensors"):
        with pytest.raises(OutputError, match="in a synthetic set"):
            made.save(share / name)
    with pytest.raises(OutputError, match="is a folder"):
        made.save(tmp_path)
    assert load_synthetic(share).labels.shape == made.found.labels.shape


class Mine(torch.nn.Sequential):
    """A user's own network."""

    def __init__(self, image_shape: tuple[int, int, int], classes: int) -> None:
        size = image_shape[1] * image_shape[2]
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(size, classes))


def test_a_network_of_one_s_own_learns_too(share: Path) -> None:
    made = student_of_set(share, Mine, BRIEF)
    assert isinstance(made.network, Mine)
    assert made.guaranteed


def test_weights_that_it_began_with_are_not_the_set_s(share: Path) -> None:
    """Catches: the set's ε claimed of a network that was trained on private data before."""
    made = student_of_set(share, Mine((1, 8, 8), 10), BRIEF)
    assert not made.guaranteed


ENCODER = """
import torch
from fedsynth.features import measured_map

def encoder(image_shape):
    weight = torch.randn(64, 12, generator=torch.Generator().manual_seed({seed}))
    return measured_map("mine", image_shape, lambda x: (x.flatten(1) @ weight).tanh())
"""


def test_an_encoder_with_other_weights_is_found_out(tmp_path: Path) -> None:
    """Catches: a model that loads without a word, and says something else of every image."""
    file = tmp_path / "enc.py"
    file.write_text(ENCODER.format(seed=0))
    name = register_file(f"{file}:encoder")
    method = FedStats(features=name, drawn_ipc=2)
    settings = RunSettings(method, rounds=2, privacy=PrivacySettings(epsilon=20.0))
    result = simulate(settings, output=tmp_path / "runs", quiet=True)
    share = export_run(str(result.folder), tmp_path / "share", with_model=True)
    readme = (share / "README.md").read_text()
    assert f"code that is not here: `{name}`" in readme
    assert 'load_model("THIS_FOLDER", features="PATH/enc.py:encoder")' in readme
    assert "`fedsynth student`, `PATH/enc.py:encoder` is the option of features" in readme
    assert load_model(share, features=f"{file}:encoder") is not None
    build = _OWN[name][0]
    file.write_text(ENCODER.format(seed=1))
    other, _ = load_own("method", "features", f"{file}:encoder")
    register_features(name, other)  # as a file does that loads weights which have changed
    with pytest.raises(OutputError, match=r"something else of public .*enc.py:encoder@"):
        load_model(share)
    register_features(name, build)
    assert load_model(share) is not None
    del _OWN[name]
    with pytest.raises(OutputError, match="give that file again"):
        load_model(share)


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
    assert (made.labels, made.taught) == ("hard", False)  # its model was trained on these images
    assert "labels the copies" not in (tmp_path / "share" / "README.md").read_text()
    with pytest.raises(SettingError, match="no soft labels"):
        student_of_set(tmp_path / "share", LINEAR, BRIEF, labels="soft")


def test_the_network_is_small_unless_another_is_asked_for() -> None:
    spec = load_dataset("digits")[1].spec
    assert (network_for(spec).width, network_for(spec).depth) == (32, 2)
    assert network_for(spec, width=8, name=None).width == 8
