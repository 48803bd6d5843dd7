"""The run folder: finished runs and half-written ones can be told apart, and bad input leaves
neither."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fedsynth.config.resolve import resolve
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.load import load_dataset
from fedsynth.data.registry import DatasetSpec, dataset_spec
from fedsynth.data.shared_set import FORMAT, NORMALISED
from fedsynth.errors import DataError, OutputError
from fedsynth.privacy.errors import BudgetExceededError, PrivacyError
from fedsynth.privacy.settings import NO_LEDGER
from fedsynth.results.disclosed import Disclosed
from fedsynth.results.run_folder import RunFolder, resumed_rounds
from fedsynth.simulation.simulate import simulate
from tests.special import special_file

SPEC = dataclasses.replace(
    dataset_spec("digits"),
    name="ours",
    classes=3,
    class_names=("cat", "dog", "owl"),
    train_size=60,
    test_size=60,
)
TINY = {
    "run": {"method": "real", "rounds": 1, "device": "cpu"},
    "partition": {"kind": "iid", "clients": 2},
    "model": {"width": 4, "depth": 1},
    "method": {"server_epochs": 1, "ipc": 1, "min_examples": 1},
}


def examples(spec: DatasetSpec = SPEC, labels: Any = None) -> ImageData:
    y = np.arange(60) % spec.classes if labels is None else labels
    return from_arrays(
        np.random.default_rng(0).random((len(y), *spec.image_shape), dtype=np.float32), y, spec
    )


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_folder_is_incomplete_until_it_is_finished(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "feddm-digits")
    assert folder.path.name.endswith("-feddm-digits.incomplete")
    finished = folder.finish(Disclosed({"rounds": 1}))
    assert names(tmp_path) == {finished.name}
    assert f"{finished.name}.incomplete" not in names(tmp_path)
    assert json.loads((finished / "summary.json").read_text()) == {
        "rounds": 1,
        "folder": str(finished),
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [("resumed.json", "pipe"), ("metrics.jsonl", "link"), ("checkpoint/state-1", "device")],
)
def test_a_folder_with_special_files_is_not_resumed(tmp_path: Path, name: str, kind: str) -> None:
    """A pipe was waited for; a link let a stranger's folder have another file written."""
    folder = RunFolder(tmp_path, "a")
    folder.write_config("")
    folder.release()
    file = folder.path / name
    file.parent.mkdir(exist_ok=True)
    if kind == "link":
        file.symlink_to(tmp_path / "elsewhere")
    else:
        special_file(file, kind)
    with pytest.raises(OutputError, match=f"{name} is neither a plain file nor a folder"):
        RunFolder.reopen(folder.path)
    if kind == "pipe" and name == "resumed.json":
        with pytest.raises(PrivacyError, match="regular file"):
            resumed_rounds(folder.path)


def test_runs_of_the_same_second_do_not_share_a_folder(tmp_path: Path) -> None:
    folders = [RunFolder(tmp_path, "a") for _ in range(3)]
    first = folders[0].finish(Disclosed({}))
    folders += [RunFolder(tmp_path, "a") for _ in range(2)]
    assert len({folder.path for folder in folders}) == 5
    assert len({first, *(folder.finish(Disclosed({})) for folder in folders[1:])}) == 5


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("feddm-a/b", "feddm-a_b"),
        ("feddm-" + "é" * 190, "feddm-" + "é" * 54),
        ("feddm-x.incomplete", "feddm-x"),
        ("feddm-synthetic(1,0.5)", "feddm-synthetic(1,0.5)"),
    ],
)
def test_a_data_set_with_any_name_has_a_folder(tmp_path: Path, name: str, ending: str) -> None:
    """Catches: a slash that is taken for a folder, and a name that no file can have."""
    finished = RunFolder(tmp_path, name).finish(Disclosed({}))
    assert finished.parent == tmp_path
    assert finished.name[16:] == ending
    assert names(tmp_path) == {finished.name}


def test_a_folder_that_vanishes_is_one_clear_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "a")
    shutil.rmtree(folder.path)
    writes = (
        lambda: folder.write_config(""),
        lambda: folder.append_metrics(Disclosed({"round": 1})),
        lambda: folder.write_partition(np.ones((2, 3), dtype=np.int64)),
        lambda: folder.write_model({"w": torch.zeros(2)}),
        lambda: folder.write_synthetic([(0, torch.zeros(1, 1, 8, 8), torch.zeros(1).long())], SPEC),
        lambda: folder.finish(Disclosed({})),
    )
    for write in writes:
        with pytest.raises(OutputError, match="cannot write into the run folder"):
            write()
    assert names(tmp_path) == set()


def test_synthetic_images_are_stored_as_sent(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "a")
    sets = [(k, torch.randn(n, 1, 8, 8), torch.arange(n)) for k, n in ((0, 3), (1, 0), (4, 2))]
    folder.write_synthetic(sets, SPEC)
    folder.draw_synthetic(sets, SPEC)
    path = folder.path / "synthetic.safetensors"
    tensors = load_file(path)
    assert tensors["images"].equal(torch.cat([images for _, images, _ in sets]))
    assert tensors["labels"].tolist() == [0, 1, 2, 0, 1]
    assert tensors["client"].tolist() == [0, 0, 0, 4, 4]
    with safe_open(path, "pt") as file:
        assert file.metadata() == {
            "format": FORMAT,
            "pixels": NORMALISED,
            "data_set": "ours",
            "mean": json.dumps(SPEC.mean),
            "std": json.dumps(SPEC.std),
            "class_names": json.dumps(SPEC.class_names),
        }
    assert (folder.path / "synthetic.png").is_file()


def test_an_absent_class_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    data = examples(labels=np.arange(60) % 2)
    with pytest.raises(DataError, match=r"ours has no example of 1 classes, such as owl"):
        simulate(resolve(TINY), data=(data, examples()), output=tmp_path / "out")
    assert names(tmp_path) == set()


def test_an_absent_class_is_not_shown_with_privacy(tmp_path: Path) -> None:
    sections = {
        **TINY,
        "run": {**TINY["run"], "method": "feddm"},
        "method": {"iterations": 1, "server_epochs": 1, "ipc": 1},
    }
    result = simulate(
        resolve({**sections, "privacy": {"noise_multiplier": 1, "ledger": NO_LEDGER}}),
        data=(examples(labels=np.arange(60) % 2), examples()),
    )
    assert all(
        sorted(set(upload.labels.tolist())) == [0, 1, 2] for upload in result.uploads.values()
    )  # type: ignore[attr-defined]


def test_a_cap_that_allows_no_round_leaves_nothing(tmp_path: Path) -> None:
    settings = resolve(
        {
            "run": {"method": "feddm", "device": "cpu"},
            "model": {"width": 4},
            "privacy": {"noise_multiplier": 1, "epsilon": 1e-3},
        }
    )
    with pytest.raises(BudgetExceededError, match=r"above the cap 0\.001"):
        simulate(settings, data=load_dataset("digits"), output=tmp_path / "out")
    assert names(tmp_path) == set()
