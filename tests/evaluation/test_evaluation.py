"""Measures of classifiers, generated images and clients, FID and KID, against NumPy and SciPy."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from scipy.stats import mannwhitneyu

from fedsynth import ModelSettings, fidelity_of_set, load_dataset, load_synthetic, resolve, simulate
from fedsynth.data.images import ImageData, normalise, to_stored
from fedsynth.data.shared_set import TENSORS, UNITS, write_hashes, write_set
from fedsynth.errors import DataError, SettingError, UnknownNameError
from fedsynth.evaluation import classification
from fedsynth.evaluation.accuracy import domain_masks, local_metrics
from fedsynth.evaluation.fidelity import fidelity
from fedsynth.evaluation.generated import average, describe, tally
from fedsynth.features.pretrained import PretrainedNetwork
from fedsynth.models.registry import build_network
from tests.quick_runs import quick_sections
from tests.raising import raises


def draw(examples: int = 300, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits and labels; no example has the last class."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, classes - 1, (examples,), generator=generator)
    logits = torch.randn(examples, classes, generator=generator)
    logits[torch.arange(examples), labels] += 0.7
    logits[:20] = logits[20:40]  # ties between examples
    return logits, labels


def area_under_curve(scores: np.ndarray, positive: np.ndarray) -> float:
    """Returns the probability that a positive example has a higher score than a negative one."""
    pairs = positive.sum() * (~positive).sum()
    return float(mannwhitneyu(scores[positive], scores[~positive]).statistic / pairs)


def test_measures_equal_their_definitions() -> None:
    logits, labels = draw()
    p = logits.double().softmax(dim=1).numpy()
    y, predicted = labels.numpy(), p.argmax(axis=1)
    recall = [np.mean(predicted[y == c] == c) for c in range(3)]
    auroc = [area_under_curve(p[:, c], y == c) for c in range(3)]
    both = [np.sum((predicted == c) & (y == c)) for c in range(4)]
    f1 = [2 * both[c] / (np.sum(predicted == c) + np.sum(y == c)) for c in range(4)]
    confidence = p.max(axis=1)
    bins = np.ceil(confidence * classification.CALIBRATION_BINS)
    error = 0.0
    for number in np.unique(bins):
        inside = bins == number
        gap = np.mean(predicted[inside] == y[inside]) - np.mean(confidence[inside])
        error += np.mean(inside) * abs(gap)
    expected = [np.mean(recall), np.mean(auroc), np.mean(f1), error]
    measures = classification.classification_measures(logits, labels)
    assert tuple(measures) == classification.MEASURES
    assert list(measures.values()) == pytest.approx(expected, rel=1e-5)
    matrix = [[np.sum((y == r) & (predicted == c)) for c in range(4)] for r in range(4)]
    assert classification.confusion_matrix(logits, labels) == matrix


def test_measures_of_perfect_classifiers_are_at_most_one() -> None:
    """Regression: averages in float32 gave an F1 of 1.0000001, which a private run refuses."""
    for classes in range(2, 50):
        labels = torch.arange(5 * classes) % classes
        measures = classification.classification_measures(3.0 * torch.eye(classes)[labels], labels)
        assert measures["balanced_accuracy"] == measures["f1"] == 1.0
        assert 1 - 1e-6 < measures["auroc"] <= 1.0


def test_calibration_error_bins_have_their_upper_bound() -> None:
    """Guo et al., Eq. 3: a bin is (lower, upper]. One prediction of the last bin is wrong, so its gap
    is |1 - (1 + 0.95)| / 2; 0.8 and 0.75 share the bin up to 12/15, with the gap |1 - 1.55| / 2."""
    for values, expected in (((1.0, 0.95), 0.475), ((0.8, 0.75), 0.275)):
        confidence = torch.tensor(values, dtype=torch.float64)
        logits = torch.stack([confidence, 1 - confidence], dim=1).log().clamp_min(-800)
        labels = torch.tensor([1, 0])
        measures = classification.classification_measures(logits, labels)
        assert measures["calibration_error"] == pytest.approx(expected)


def test_undefined_measures_are_null() -> None:
    logits, labels = draw()
    one_class = torch.zeros_like(labels)
    single = classification.classification_measures(logits, one_class)
    assert single["auroc"] is None
    share = (logits.argmax(dim=1) == 0).double().mean()
    assert single["balanced_accuracy"] == pytest.approx(float(share))
    logits[0, 0] = math.nan
    for measures in (
        classification.classification_measures(logits, labels),
        classification.classification_measures(torch.zeros(3, 1), one_class[:3]),
    ):
        assert measures["auroc"] is measures["calibration_error"] is None
        assert measures["f1"] is not None


def test_summary_has_measures_of_common_model() -> None:
    result = simulate(resolve(quick_sections("fedavg")))
    summary, last = result.summary, result.metrics[-1]
    assert all(summary[name] == last[name] for name in classification.MEASURES)
    matrix = np.array(summary["confusion_matrix"])
    assert np.trace(matrix) / matrix.sum() == result.accuracy
    personal = simulate(resolve(quick_sections("fedbn")))
    assert "common_model_accuracy" in personal.summary
    assert personal.summary["test_accuracy"] is None
    keys = personal.summary.keys() | personal.metrics[-1].keys()
    assert not {*classification.MEASURES, "confusion_matrix"} & keys


def test_domains_without_images_have_no_mask() -> None:
    """Images of domain 1 have one class, and no image is of domain 2."""
    _, labels = draw()
    origins = (labels == 2).long()
    _, digits = load_dataset("digits")
    spec = replace(digits.spec, domains=("a", "b", "c"))
    data = ImageData(digits.images[:300], labels, spec, domains=origins)
    masks = domain_masks(data)
    assert list(masks) == ["a", "b"]
    assert torch.equal(masks["a"], labels != 2)
    assert torch.equal(masks["b"], labels == 2)


def _scores(labels: list[int], classes: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(labels), classes).float() * 3 - 1


def test_tally_and_facts_of_a_batch() -> None:
    counts = tally(_scores([0, 0, 0, 1, 1, 3], 4), torch.tensor([0, 1, 0, 1, 3, 2]))
    assert counts.tolist() == [[3, 2, 0, 1], [2, 1, 0, 0]]
    facts = describe(counts)
    entropy = -(0.5 * math.log(0.5) + math.log(1 / 3) / 3 + math.log(1 / 6) / 6)
    assert facts["agreement"] == 0.5
    assert facts["class_entropy"] == pytest.approx(entropy)
    assert facts["class_entropy_share"] == pytest.approx(entropy / math.log(4))
    assert facts["classes"] == 3
    # nearly uniform predictions have a mean of entropy log C, but all images have one class
    scores = torch.full((16, 10), 0.1)
    scores[:, 4] += 1e-3
    assert describe(tally(scores))["class_entropy"] == 0.0
    collapsed = [describe(tally(_scores([c] * 4, 3))) for c in range(3)]
    assert "agreement" not in collapsed[0]
    averaged = average(collapsed)  # generators are not pooled
    assert (averaged["class_entropy"], averaged["classes"], average([])) == (0.0, 1.0, {})
    # student and teacher agree on three of four images; the target class is ignored
    eye = torch.eye(3)
    facts = describe(tally(eye[[0, 1, 2, 2]], torch.tensor([1, 1, 1, 1]), eye[[0, 1, 2, 0]]))
    assert (facts["student"], facts["agreement"]) == (0.75, 0.25)


def test_local_metrics_equal_fedkf_table_2() -> None:
    for percent, fm, wlp in (((60, 70, 80), 0.00667, 0.6), ((65, 65, 80), 0.005, 0.65)):
        metrics: Any = local_metrics(percent, tested=[100] * 3, sizes=[1, 1, 1])
        assert metrics["amp"] == pytest.approx(0.7)
        assert metrics["fm"] == pytest.approx(fm, abs=5e-6)
        assert metrics["wlp"] == wlp
    # clients without test records are excluded
    metrics = local_metrics(right=[2, 0, 1], tested=[3, 0, 2], sizes=[10, 5, 30])
    assert metrics["client_accuracy"] == [pytest.approx(2 / 3), None, 0.5]
    assert metrics["amp"] == pytest.approx((2 / 3 * 10 + 0.5 * 30) / 40)
    assert metrics["fm"] == pytest.approx(np.var([2 / 3, 0.5]))
    assert metrics["wlp"] == 0.5
    assert local_metrics(right=[0], tested=[0], sizes=[10]) is None


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    covariances = [np.cov(x, rowvar=False) for x in (a, b)]
    mixed = sqrtm(covariances[0] @ covariances[1]).real
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(sum(covariances) - 2 * mixed))


def kernel(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the unbiased estimate of the squared maximum mean discrepancy."""
    within = 0.0
    for x in (a, b):
        products = (x @ x.T / x.shape[1] + 1) ** 3
        within += (products.sum() - np.trace(products)) / (len(x) * (len(x) - 1))
    return float(within - 2 * ((a @ b.T / a.shape[1] + 1) ** 3).mean())


def test_distances_match_scipy_and_numpy() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(40, 5)), 0.5 + rng.normal(size=(40, 5)) * 2
    measured = fidelity(torch.tensor(a), torch.tensor(b))
    assert measured.fid == pytest.approx(frechet(a, b), rel=1e-6)
    assert measured.kid == pytest.approx(kernel(b, a), rel=1e-6)
    assert measured.kid_std is None  # each subset has all 40 images
    more = fidelity(torch.tensor(a), torch.tensor(rng.normal(size=(90, 5))))
    assert (more.subset_size, more.synthetic, more.real, more.features) == (40, 40, 90, 5)
    assert abs(more.kid) < kernel(b, a) / 10
    assert more.kid_std is None
    many = fidelity(
        torch.tensor(rng.normal(size=(1100, 2))), torch.tensor(rng.normal(size=(1100, 2)))
    )
    assert (many.kid_std or 0) > 0
    with pytest.raises(DataError, match="need at least 2 real and 2 synthetic images"):
        fidelity(torch.tensor(a[:1]), torch.tensor(b))
    with pytest.raises(DataError, match="need finite features"):
        fidelity(torch.tensor(a) / 0, torch.tensor(b))


@pytest.fixture
def digits_set(tmp_path: Path) -> tuple[Path, ImageData]:
    """Returns a set whose images are 30 training digits outside [0, 1], and the test digits."""
    train, test = load_dataset("digits")
    images = train.images[:30].float() / 255 * 3 - 1
    write_set(tmp_path / TENSORS, images, train.labels[:30], train.spec, pixels=UNITS)
    write_hashes(tmp_path)
    return tmp_path, test


def test_sets_are_compared_as_stored_images(digits_set: tuple[Path, ImageData]) -> None:
    """Broken versions would compare unclipped values, or pixels that the network normalises."""
    folder, test = digits_set
    train, _ = load_dataset("digits")
    clipped = (train.images[:30].numpy() / 255 * 3 - 1).clip(0, 1).reshape(30, -1)
    rounded = np.rint(clipped * 255) / 255
    real = test.images.numpy().reshape(len(test.labels), -1) / 255
    expected = frechet(rounded, real)
    assert fidelity_of_set(folder, test, "pixels").fid == pytest.approx(expected, abs=0.05)
    model = build_network(ModelSettings(width=4, depth=1), test.spec, seed=0)
    with torch.no_grad():
        features = [
            model.embed(normalise(images, test.spec)).double()
            for images in (torch.tensor(rounded * 255).byte().view(30, 1, 8, 8), test.images)
        ]
    assert fidelity_of_set(folder, test, model) == fidelity(*features)


def test_networks_of_torchvision_get_images_at_their_size(
    digits_set: tuple[Path, ImageData], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, test = digits_set
    network = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten())
    half = (0.5,) * 3
    pretrained = PretrainedNetwork(network, 12, (16, 16), False, half, half, "bilinear", "")
    monkeypatch.setattr("fedsynth.sharing.fidelity.pretrained_network", lambda *_: pretrained)
    measured = fidelity_of_set(folder, test, "torchvision:resnet18")
    assert (measured.features, measured.real) == (12, len(test.labels))
    stored = to_stored(load_synthetic(folder).images, test.spec)
    pixels = [images.float() / 255 for images in (stored, test.images)]
    assert measured == fidelity(*map(pretrained.embed_pixels, pixels))
    with raises(UnknownNameError, "method.features"):
        fidelity_of_set(folder, test, "pixel")
    with raises(SettingError, "network"):
        fidelity_of_set(folder, test, torch.nn.Flatten())
