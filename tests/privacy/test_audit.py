"""The canary audit: its bound by hand, and the real release path under it, white box and seeded,
with its broken twins."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth.core.client import PrivateClients
from fedsynth.data.images import denormalise, from_arrays
from fedsynth.data.registry import dataset_spec
from fedsynth.privacy.accounting import calibrate_noise_multiplier
from fedsynth.privacy.audit import (
    audit,
    epsilon_lower_bound,
    guesses_for,
    p_value,
    right_guesses,
)
from fedsynth.privacy.errors import PrivacySettingError
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import GaussianSums
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release

CANARIES, DELTA, CLIP = 1000, 1e-5, 3.0
SPEC = dataset_spec("digits")


def test_the_bound_by_hand() -> None:
    """r = 3 guesses, all right: P[W = 3] = p³; with δ the worst i is found by trying all."""
    p = math.e / (1 + math.e)
    assert p_value(3, 3, 10, 1.0, 0.0) == pytest.approx(p**3)
    pmf = [math.comb(3, k) * p**k * (1 - p) ** (3 - k) for k in range(4)]
    worst = max(sum(pmf[3 - i : 3]) / i for i in (1, 2, 3))
    assert p_value(3, 3, 10, 1.0, 1e-3) == pytest.approx(p**3 + 2 * 10 * 1e-3 * worst)
    bound = epsilon_lower_bound(100, 100, 1000, 0.0, 0.999)
    assert bound == pytest.approx(-math.log(0.001 ** (-1 / 100) - 1), abs=1e-3)  # p¹⁰⁰ = 0.001
    assert epsilon_lower_bound(50, 100, 1000, DELTA, 0.999) == 0
    with pytest.raises(PrivacySettingError):
        p_value(5, 4, 10, 1.0, 0.0)


def test_guesses_are_of_both_ends_and_their_number_is_fixed_beforehand() -> None:
    scores, included = np.array([0.3, -1.0, 2.0, 0.1, 5.0]), np.array([1, 1, 1, 0, 0], dtype=bool)
    assert right_guesses(scores, included, 2) == 0  # "in" for 5.0, "out" for −1.0
    assert right_guesses(scores, included, 4) == 2  # and "in" for 2.0, "out" for 0.1
    assert [guesses_for(m) for m in (2, 10, 1000, 1001, 5000)] == [2, 4, 400, 400, 2000]


def released_scores(
    sigma: float, seed: int, noise_factor: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Every canary's inner product with what `PrivateClients.class_sums` releases: canary i
    contributes 𝒞·e_i to its class's sum."""
    rng = np.random.default_rng(seed)
    included = rng.random(CANARIES) < 0.5
    pixels = np.zeros((CANARIES, 1, 8, 8), dtype=np.uint8)
    pixels[:, 0, 0, 0], pixels[:, 0, 0, 1] = np.arange(CANARIES) // 256, np.arange(CANARIES) % 256
    labels = np.arange(CANARIES) % 10
    data = from_arrays(pixels, labels, SPEC)

    class Noise(SecretGenerator):
        def normal(
            self,
            shape: tuple[int, ...],
            standard_deviation: float,
            device: torch.device | str = "cpu",
        ) -> Tensor:
            return super().normal(shape, standard_deviation * noise_factor, device)

    secret = Noise(test_only=np.random.default_rng(seed + 1))
    part = torch.from_numpy(np.flatnonzero(included))
    clients = PrivateClients([0], data, [part], [])
    row = Release(1, "x", "audit", "x", sigma, CLIP, 1.0, "full", 1, 10 * CANARIES)

    def unit_vectors(x_NCHW: Tensor, segment_N: Tensor) -> Tensor:
        back = denormalise(x_NCHW, SPEC).long()
        number = 256 * back[:, 0, 0, 0] + back[:, 0, 0, 1]
        return 10 * CLIP * torch.nn.functional.one_hot(number, CANARIES).float()  # clipped to 𝒞

    series = GaussianSums(row, 10, Guard(Ledger("0"), DELTA, None), secret)
    sums = clients.class_sums([series], unit_vectors)
    return sums[torch.from_numpy(labels), torch.arange(CANARIES)].double().numpy(), included


def sigma_for(epsilon: float) -> float:
    return calibrate_noise_multiplier(
        epsilon, DELTA, lambda s: [Release(1, "x", "m", "x", s, 1.0, 1.0, "full", 1, 1)]
    )


@pytest.mark.parametrize(("epsilon", "least"), [(1.0, 0.03), (3.0, 0.5)])
def test_an_honest_release_is_never_refuted_and_the_audit_has_power(
    epsilon: float, least: float
) -> None:
    """Twenty seeded runs: no bound above the true ε, and on average a bound that is far from
    nothing."""
    bounds = [audit(*released_scores(sigma_for(epsilon), seed), DELTA) for seed in range(20)]
    assert max(bounds) <= epsilon
    assert np.mean(bounds) > least


def test_noise_at_a_quarter_is_caught() -> None:
    bounds = [
        audit(*released_scores(sigma_for(1.0), seed, noise_factor=0.25), DELTA) for seed in range(5)
    ]
    assert min(bounds) > 1.0


def test_without_clipping_the_canaries_stand_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsynth.privacy.mechanisms.clip_rows", lambda rows, clip: rows.double())
    assert audit(*released_scores(sigma_for(1.0), 0), DELTA) > 1.0
