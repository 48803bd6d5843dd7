"""γ-inexactness against NumPy on softmax regression."""

from __future__ import annotations

import numpy as np
import torch

from fedsynth.evaluation.accuracy import inexactness
from fedsynth.models.small import Linear


def test_gamma_equals_numpy_and_its_ends_are_0_and_1(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(7, 1, 2, 2)), rng.integers(0, 3, 7)
    model, start = Linear((1, 2, 2), 3).to(device), Linear((1, 2, 2), 3).to(device)
    images, labels = (
        torch.tensor(x, dtype=torch.float32, device=device),
        torch.tensor(y, device=device),
    )

    def gradient(net: Linear) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
        W, b = (
            p.detach().cpu().double().numpy() for p in (net.classifier.weight, net.classifier.bias)
        )
        z = x.reshape(7, 4) @ W.T + b
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True) - np.eye(3)[y]
        return np.concatenate([(p.T @ x.reshape(7, 4) / 7).ravel(), p.mean(0)]), np.concatenate(
            [W.ravel(), b]
        )

    (after, w), (before, w_t) = gradient(model), gradient(start)
    expected = np.linalg.norm(after + 0.3 * (w - w_t)) / np.linalg.norm(before)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    np.testing.assert_allclose(
        inexactness(model, start.state_dict(), images, labels, mu=0.3), expected, rtol=1e-4
    )
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert inexactness(start, start.state_dict(), images, labels, mu=0.3) == 1
    sgd = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(500):  # the strictly convex subproblem, to its end
        sgd.zero_grad()
        away = sum(
            ((p - q.detach()) ** 2).sum()
            for p, q in zip(model.parameters(), start.parameters(), strict=True)
        )
        (torch.nn.functional.cross_entropy(model(images), labels) + 0.15 * away).backward()  # type: ignore[no-untyped-call]
        sgd.step()
    assert inexactness(model, start.state_dict(), images, labels, mu=0.3) < 1e-3
