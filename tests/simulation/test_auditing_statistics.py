"""The canary audit through each release of FedStats, with most of the budget in that release."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsynth.config.resolve import resolve
from fedsynth.errors import SettingError
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import GaussianSums
from fedsynth.privacy.products import Outer
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release
from fedsynth.simulation.audit.auditing import AuditResult, audit_run
from fedsynth.simulation.audit.canaries import Canaries

PHASES = {
    "centre": {"centre_share": 0.9, "moment_share": 0.05},
    "moments": {"centre_share": 0.01, "moment_share": 0.97},
    "steps": {"centre_share": 0.01, "moment_share": 0.01},
    "pictures": {
        "centre_share": 0.01,
        "moment_share": 0.01,
        "pixel_share": 0.9,
        "ipc": 1,
        "image_steps": 1,
    },
    "covariances": {
        "centre_share": 0.01,
        "moment_share": 0.01,
        "covariance_share": 0.9,
        "whitening": "yes",
    },
}
SCATTERED = ("centre", "covariances")
SIGMA = 1.37  # ε = 3 at δ = 1e-5
SIGMA_OF_ONE = 3.74  # ε = 1


def audited(phase: str, sigma: float = SIGMA, **options: Any) -> AuditResult:
    """Features of 324 coordinates for the centre, where 64 have no room for many canaries, and for
    covariances, which pixels have none of."""
    features = "scattering" if phase in SCATTERED else "pixels"
    settings = resolve(
        {
            "run": {"method": "fedstats", "rounds": 3, "device": "cpu"},
            "partition": {"clients": 1},
            "method": {"features": features, "second_moments": "yes", **PHASES[phase]},
            "privacy": {"nominal_size": 100, "noise_multiplier": sigma},
        }
    )
    return audit_run(settings, test_only=np.random.default_rng(0), **options)


@pytest.mark.parametrize("phase", ["moments", "covariances"])
def test_an_honest_phase_is_not_refuted_and_the_audit_has_power(phase: str) -> None:
    found = audited(phase)
    assert 0.2 < found.epsilon_lower_bound < found.epsilon < 3.1


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("kind", ["images", "vectors"])
def test_products_enter_a_watched_sum_as_they_enter_any_other(
    kind: str, clips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: an audit that writes products out and clips them itself, so that products without a
    clip look sound."""
    if not clips:
        monkeypatch.setattr(Outer, "_clipped", lambda self: (self.left, self.right))
    left = 100 * torch.eye(3, dtype=torch.float64)[:2]
    right = torch.ones(2, 2).double()
    products = Outer(left, right, 1.0)
    row = Release(1, "x", "audit", "rows", 1e-9, 1.0, 1.0, "full", 1, 6)
    released = []
    for canaries in (
        None,
        Canaries(kind, torch.tensor([0]), torch.tensor([True]), 1, torch.Generator()),
    ):
        guard = Guard(Ledger("c"), 1e-5, None)
        made = GaussianSums(row, 1, guard, SecretGenerator())
        if canaries is not None:
            made = canaries.series(row, 1, Guard(Ledger("d"), 1e-5, None), SecretGenerator())
        made.sample(2)
        made.add_products(products)
        released.append(made.release()[0].double())
    plain, watched = released
    first = products.part(slice(0, 1)).sums()  # the record beside the canary
    if kind == "images":
        torch.testing.assert_close(watched, plain, rtol=1e-5, atol=1e-5)
    else:  # the canary's is another, and clipped
        assert float((watched - first).norm()) == pytest.approx(1.0, rel=1e-4)
    assert (float(watched.norm()) > 50) is not clips


@pytest.mark.parametrize("phase", PHASES)
def test_a_quarter_of_the_noise_shows_in_each_phase(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SecretGenerator.normal

    def quarter(
        self: SecretGenerator, shape: tuple[int, ...], deviation: float, device: Any = "cpu"
    ) -> Tensor:
        return original(self, shape, deviation / 4, device)

    monkeypatch.setattr(SecretGenerator, "normal", quarter)
    assert audited(phase, SIGMA_OF_ONE, canaries=320 if phase in SCATTERED else 1000).fault


def test_a_single_upload_of_a_secure_sum_cannot_be_audited() -> None:
    settings = resolve(
        {
            "run": {"method": "fedstats", "rounds": 1, "device": "cpu"},
            "partition": {"clients": 3},
            "method": {"features": "pixels", "aggregation": "secure"},
            "privacy": {"noise_multiplier": 1.0},
        }
    )
    with pytest.raises(SettingError, match="aggregation"):
        audit_run(settings, canaries=50)
