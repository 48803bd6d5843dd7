"""Measures on request (`run.measures`) against NumPy, and their absence from private runs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax

from fedsynth import ModelSettings, load_dataset, resolve, simulate
from fedsynth.data.images import normalise
from fedsynth.data.registry import dataset_spec
from fedsynth.deployment.proposal import Proposal, check_executable
from fedsynth.errors import SettingError, UnknownNameError
from fedsynth.evaluation import CLIENT_MODELS, DISSIMILARITY, OPTIONAL
from fedsynth.evaluation.optional import embeddings, nmi, silhouette
from fedsynth.federation.context import public_context
from fedsynth.models.registry import build_network
from fedsynth.privacy.ledger.folder import LedgerFolder
from tests.quick_runs import quick_sections, verified
from tests.raising import raises

RNG = np.random.default_rng(0)


def test_silhouette_equals_its_definition(device: torch.device) -> None:
    x, y = RNG.normal(size=(60, 3)), RNG.integers(0, 4, 60)
    x[7:9], y[0] = x[5], 9  # equal vectors, and a class of one example
    distances = np.linalg.norm(x[:, None] - x, axis=2)
    values = []
    for i, label in enumerate(y):
        means = {c: distances[i, (y == c) & (np.arange(60) != i)] for c in set(y)}
        if len(means[label]) == 0:
            values.append(0.0)
            continue
        a = means.pop(label).mean()
        b = min(others.mean() for others in means.values())
        values.append((b - a) / max(a, b))
    vectors, labels = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)
    assert silhouette(vectors, labels) == pytest.approx(np.mean(values))
    assert silhouette(vectors, labels * 0) is nmi(vectors, labels * 0, 0) is None
    assert silhouette(vectors * 0, labels) == 0.0


def test_nmi_is_that_of_the_clusters(device: torch.device) -> None:
    """The clusters are far apart, so k-means finds them. A fifth of the labels is wrong."""
    cluster, y = np.arange(100) % 4, np.arange(100) % 4
    y[::5] = RNG.integers(0, 4, 20)
    x = RNG.normal(size=(100, 5)) + 50 * np.eye(4, 5)[cluster]
    joint = np.histogram2d(y, cluster, bins=4)[0] / 100
    p, q = joint.sum(1), joint.sum(0)
    mutual = sum(v * np.log(v / (p[i] * q[j])) for (i, j), v in np.ndenumerate(joint) if v)
    expected = 2 * mutual / -(p @ np.log(p) + q @ np.log(q))
    vectors, labels = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)
    assert 0.3 < expected < 0.9
    assert nmi(vectors, labels, 0) == pytest.approx(expected)
    assert 0 <= nmi(vectors * 0, labels, 0) < 1e-9  # all in one cluster


@pytest.mark.parametrize("model", [{}, {"name": "mlp"}, {"name": "mlp", "features": "scattering"}])
def test_embeddings_are_those_of_the_network(model: dict[str, str]) -> None:
    test = load_dataset("digits")[1]
    settings = ModelSettings(**{"width": 8, "depth": 2, **model})
    network: Any = build_network(settings, test.spec, 0).eval()
    with torch.no_grad():
        expected = network.embed(normalise(test.images, test.spec))
    assert torch.allclose(embeddings(network, test), expected, atol=1e-5)
    assert not network.classifier._forward_pre_hooks


def test_run_measures_models_and_gradients(tmp_path: Path) -> None:
    """Softmax regression in NumPy: accuracies of the uploads, and the variance of the gradients of
    all clients, also of those that do not take part. The ledgers of all clients note the round."""
    train, test = load_dataset("digits")
    ends = (0, 50, 200, 600, 600)  # the last client has no records
    parts = [np.arange(a, b) for a, b in pairwise(ends)]
    run = {"method": "fedavg", "rounds": 1, "participation": 0.5, "seed": 1}
    run["measures"] = ",".join(OPTIONAL)
    sections = {"run": run, "model": {"name": "linear"}, "privacy": {"ledger": str(tmp_path)}}
    result = simulate(resolve(sections), data=(train, test), parts=parts)
    (row,) = result.metrics
    x, y = normalise(train.images, train.spec).flatten(1).double().numpy(), train.labels.numpy()
    w = result.model.state_dict()
    W, b = w["classifier.weight"].double().numpy(), w["classifier.bias"].double().numpy()
    gradients = []
    for part in parts[:3]:
        error = (softmax(x[part] @ W.T + b, axis=1) - np.eye(10)[y[part]]) / len(part)
        gradients.append(np.append(error.T @ x[part], error.sum(0)))
    n = np.diff(ends[:4]) / 600
    g, mean = np.stack(gradients), n @ np.stack(gradients)
    assert row[DISSIMILARITY] == pytest.approx(n @ np.square(g - mean).sum(1), rel=1e-4)
    x_test = normalise(test.images, test.spec).flatten(1)
    for client, accuracy in enumerate(row[CLIENT_MODELS]):
        if client not in row["participants"]:
            assert accuracy is None
            continue
        upload: Any = result.uploads[client]
        logits = torch.nn.functional.linear(x_test, *upload.parameters.values())
        right = (logits.argmax(1) == test.labels).double().mean()
        assert accuracy == pytest.approx(float(right))
    assert row["silhouette"] == pytest.approx(silhouette(x_test, test.labels), abs=1e-6)
    assert row["nmi"] == pytest.approx(nmi(x_test, test.labels, 1), abs=1e-6)
    histories = [ledger.history() for ledger in LedgerFolder(tmp_path).ledgers().values()]
    assert [len(history.releases) for history in histories] == [1] * 4


@pytest.mark.parametrize("name", OPTIONAL)
def test_private_runs_do_not_release_measures(name: str, tmp_path: Path) -> None:
    sections = quick_sections("fedavg", run={"measures": name}, privacy={"noise_multiplier": 2.0})
    if name == DISSIMILARITY:
        with raises(SettingError, "run.measures"):
            resolve(sections)
        return
    folder = verified(simulate(resolve(sections), output=tmp_path))
    hidden = (folder / "simulation_only" / "rounds.jsonl").read_text().splitlines()
    assert all(name in json.loads(row) for row in hidden)
    for file in folder.iterdir():
        if file.is_file() and file.name != "config.toml":
            assert name.encode() not in file.read_bytes(), file.name


@pytest.mark.parametrize(
    ("method", "measures", "error"),
    [
        ("fedavg", "nmi,silhuette", UnknownNameError),
        ("feddm", CLIENT_MODELS, SettingError),
    ],
)
def test_invalid_measures_are_refused(method: str, measures: str, error: type[Any]) -> None:
    with pytest.raises(error, match=r"run\.measures"):
        resolve(quick_sections(method, run={"measures": measures}))


@pytest.mark.parametrize("method", ["fedbn", "ccvr"])
def test_uploads_of_a_part_of_the_model_have_no_accuracy(method: str) -> None:
    result = simulate(resolve(quick_sections(method, run={"measures": CLIENT_MODELS})))
    assert result.metrics[-1][CLIENT_MODELS] == [None] * 3


def test_features_need_embeddings() -> None:
    sections = {"run": {"method": "fedavg", "measures": "nmi"}, "data": {"dataset": "shapes"}}
    with raises(SettingError, "model.name"):
        simulate(resolve(sections))


def test_deployments_refuse_gradients() -> None:
    settings = resolve(quick_sections("fedavg", run={"measures": DISSIMILARITY}))
    spec = dataset_spec("digits")
    context = public_context(settings, spec, torch.device("cpu"))
    with raises(SettingError, "run.measures"):
        check_executable(Proposal("0" * 16, settings, spec), context)
