"""LEAF's files of text, tokens as records, and runs of methods that train on them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedsynth as fs
from fedsynth.data.images import from_arrays, normalise, record_digests
from fedsynth.data.partition import partition
from fedsynth.data.registry import custom_spec, dataset_spec, spec_from_json
from fedsynth.data.text import GLOVE, LETTERS, leaf_form
from fedsynth.errors import (
    DataError,
    DataFilesCorruptError,
    DataFilesMissingError,
    PartitionError,
    SettingError,
)
from fedsynth.federation.context import public_context
from fedsynth.methods import METHODS, method_class
from fedsynth.models.registry import build_model
from tests.cli.conftest import call_train
from tests.models.test_text import twin_of
from tests.raising import raises

SPEC = custom_spec("tokens", (1, 1, 5), "abc", source="a test", vocabulary=7, train_size=20)
PASSAGES = "A\t" + "the cat sat on the mat. " * 4 + "\nB\t" + "no, it did not!\n".strip() * 7


def write(root: Path, place: str, content: object) -> Path:
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def tweets(*texts: str, y: object = 0) -> dict[str, Any]:
    return {"x": [["1", "day", "query", "me", text] for text in texts], "y": [y] * len(texts)}


def test_shakespeare_is_read_in_both_layouts(tmp_path: Path) -> None:
    content = leaf_form(PASSAGES)
    write(tmp_path, "shakespeare/all_data_niid_0.json", content)
    train, test = fs.load_dataset("shakespeare", tmp_path)
    assert content["num_samples"] == [16, 25]
    assert [s.groups.bincount().tolist() for s in (train, test)] == [[12, 20], [4, 5]]
    read = set()
    for data in (train, test):
        for tokens, y, group in zip(data.images[:, 0, 0], data.labels, data.groups, strict=True):
            read.add(("AB"[group], "".join(LETTERS[t] for t in tokens), LETTERS[y]))
    records = content["user_data"]
    assert read == {(u, x, y) for u in "AB" for x, y in zip(*records[u].values(), strict=True)}
    for split in ("train", "test"):
        write(tmp_path, f"shakespeare/{split}/all_data_0_{split}.json", content)
    assert [len(split) for split in fs.load_dataset("shakespeare", tmp_path)] == [41, 41]


LONG = {"x": ["a" * 80, "b" * 79], "y": ["a", "a"]}
WRONG = [
    ("shakespeare", LONG, "data.damaged", "user_data.w.x.1 is invalid"),
    ("shakespeare", {"x": ["é" * 80], "y": ["a"]}, "data.damaged", "user_data.w.x.0 is invalid"),
    ("shakespeare", {"x": ["a" * 80], "y": ["ab"]}, "data.damaged", "user_data.w.y.0 is invalid"),
    ("shakespeare", {"x": ["a" * 80], "y": []}, "data.leaf_labels", "user 'w' in"),
    ("sent140", {"x": [["1", "text"]], "y": [0]}, "data.damaged", "user_data.w.x.0 is invalid"),
    ("sent140", tweets("hi", y=2), "data.damaged", "user_data.w.y.0 is invalid"),
]


@pytest.mark.parametrize(("name", "records", "code", "place"), WRONG)
def test_wrong_records_are_named(
    name: str, records: Any, code: str, place: str, tmp_path: Path
) -> None:
    path = write(tmp_path, f"{name}/all_data.json", {"user_data": {"w": records}})
    with raises(DataFilesCorruptError, code) as error:
        fs.load_dataset(name, tmp_path)
    assert place in str(error.value)
    assert str(path) in str(error.value)


def test_sent140_is_hashed_or_embedded(tmp_path: Path) -> None:
    texts = ("Good day , good night !", "unknown " * 30)
    content = {"user_data": {"v": tweets(texts[0], y="4"), "w": tweets(texts[1])}}
    for split in ("train", "test"):
        write(tmp_path, f"sent140/{split}/a.json", content)
    train, _ = fs.load_dataset("sent140", tmp_path)
    tokens = train.images[:, 0, 0]
    assert train.labels.tolist() == [1, 0]
    assert (tokens > 0).sum(1).tolist() == [6, 25]
    assert len(tokens.unique()) == 8  # "Good" and "good" differ
    with raises(DataFilesMissingError, "data.missing"):
        fs.load_dataset("sent140-glove", tmp_path)
    vectors = {"good": np.linspace(-3, 3, 300), "day": np.full(300, 0.5)}
    lines = [" ".join([word, *map(str, vector)]) for word, vector in vectors.items()]
    (tmp_path / "sent140" / GLOVE).write_text("\n".join(lines))
    train, _ = fs.load_dataset("sent140-glove", tmp_path)
    x = normalise(train.images, train.spec)
    expected = torch.zeros(2, 300, 1, 25)
    expected[0, :, 0, 3], expected[0, :, 0, 1] = torch.from_numpy(np.stack(list(vectors.values())))
    torch.testing.assert_close(x, expected, atol=1e-6, rtol=0)
    (tmp_path / "sent140" / GLOVE).write_text(f"{lines[0]}\nday 1 2\n")
    with raises(DataFilesCorruptError, "data.vectors") as error:
        fs.load_dataset("sent140-glove", tmp_path)
    assert "line 2 of" in str(error.value)


def test_tokens_are_records() -> None:
    data = from_arrays(np.arange(10).reshape(2, 5) % 7, ["a", "c"], SPEC)
    assert (data.images.dtype, list(data.images.shape)) == (torch.uint8, [2, 1, 1, 5])
    assert normalise(data.images, SPEC).flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    assert spec_from_json(SPEC.to_json()) == SPEC
    assert "vocabulary" not in dataset_spec("digits").to_json()
    large = custom_spec("words", (1, 1, 5), "abc", source="a test", vocabulary=10**5)
    words = from_arrays(np.full((1, 5), 70_000), ["a"], large)
    assert (words.images.dtype, int(words.images.max())) == (torch.int32, 70_000)
    assert record_digests(words, np.arange(1), b"key").shape == (1, 16)
    for token in (7, -1):
        with raises(DataError, "data.label_range"):
            from_arrays(np.full((1, 5), token), ["a"], SPEC)
    with raises(DataError, "data.tokens"):
        fs.ImageData(torch.full((1, 1, 1, 5), 7, dtype=torch.uint8), torch.tensor([0]), SPEC)
    with raises(SettingError, "vocabulary"):
        custom_spec("tokens", (1, 5, 5), "abc", source="a test", vocabulary=7)


def test_small_groups_are_no_clients() -> None:
    groups = np.repeat([3, 5, 8], [2, 4, 6])
    rule = fs.PartitionSettings("natural", clients=2, min_group=4)
    parts = partition(np.zeros(12, np.int64), rule, 1, groups=groups)
    assert [part.tolist() for part in parts] == [[2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    with raises(PartitionError, "partition.groups"):
        partition(np.zeros(12, np.int64), replace(rule, clients=3), 1, groups=groups)


@pytest.mark.parametrize("name", METHODS)
def test_methods_on_images_refuse_tokens(name: str) -> None:
    sections = {"run": {"method": name}, "data": {"dataset": "plays"}}
    method = method_class(name)
    settings = fs.resolve(sections)
    if method.features_refusal:
        with raises(SettingError, "run.method") as error:
            public_context(settings, dataset_spec("plays"), torch.device("cpu"))
        for part in (name, "needs images", "token sequences", "Use fedavg, fedprox or qffl"):
            assert part in str(error.value)
    else:
        public_context(settings, dataset_spec("plays"), torch.device("cpu"))


METHODS_OF_ONE_STEP = [fs.FedAvg(), fs.FedProx(), fs.QFFL(q=0.0)]


@pytest.mark.parametrize("method", METHODS_OF_ONE_STEP, ids=lambda method: method.name)
def test_two_rounds_equal_gradient_descent(method: Any) -> None:
    """With one step on all records of equal clients, rounds are gradient descent, here of torch's
    LSTM. Its second bias stays zero."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 7, (12, 5)))
    y = torch.arange(12) % 3
    data = from_arrays(tokens, y, SPEC)
    run = fs.RunSettings(
        replace(method, local_epochs=1, batch=12, lr=0.5, momentum=0.0),
        rounds=2,
        partition=fs.PartitionSettings("iid", clients=2),
        model=fs.ModelSettings("lstm", width=6),
    )
    model: Any = build_model(run.model, SPEC, 3, run.seed)
    lstm = twin_of(model)
    trained = [*lstm.all_weights[0][:3], *lstm.all_weights[1][:3]]
    trained += [model.embedding.weight, *model.classifier.parameters()]
    for _ in range(2):
        last = lstm(model.embedding(tokens))[0][:, -1]
        nn.functional.cross_entropy(model.classifier(last), y).backward()
        for p in trained:
            p.data -= 0.5 * p.grad
            p.grad = None
    result: Any = fs.simulate(run, data=(data, data))
    moved = twin_of(result.model)
    for (name, p), expected in zip(moved.named_parameters(), lstm.parameters(), strict=True):
        torch.testing.assert_close(p, expected, atol=1e-6, rtol=0, msg=name)
    for name in ("embedding", "classifier"):
        pair = (getattr(net, name).weight for net in (result.model, model))
        torch.testing.assert_close(*pair, atol=1e-6, rtol=0)


def test_the_command_trains_on_files_of_leaf(tmp_path: Path) -> None:
    write(tmp_path, "shakespeare/all_data.json", leaf_form(PASSAGES))
    options = "--dataset shakespeare", "--data-root", str(tmp_path)
    out = call_train(tmp_path / "out", f"fedavg {options[0]}", *options[1:])
    assert "fedavg on shakespeare" in out.ok.stdout
