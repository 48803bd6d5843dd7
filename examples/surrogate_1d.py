"""Plots FedDM's surrogate in one dimension, as in Appendix A and Figure 1 of the paper (arXiv
2207.09653).

    python examples/surrogate_1d.py surrogate.png

A client's objective f(w) is a mean over its examples. A gradient gives the server the tangent of f
at the current w. FedDM's synthetic examples give it a whole curve, the surrogate. Here, n = 100
numbers x ~ N(0, 1) have labels y. The model predicts sigmoid(w·x), f is the mean cross-entropy (Eq.
18), and the current w is 0. There are n' = 20 synthetic numbers, which start at random. Two details
of the paper need an explanation.

Labels. As printed, Eq. 17 gives y = 1 if (x ≥ 0 and p ≥ 0.9) or (x < 0 and p < 0.1), with p
uniform. Then a tenth of *both* halves has y = 1, so y does not depend on x, and f is smallest near
w = 0. It must be a misprint for "p < 0.9". With this correction, y is the sign of x, and a tenth of
the labels are flipped. The example uses the correction by default; `printed=True` uses the printed
formula.

Matching. With a scalar input and no hidden layer, the embedding in Eq. 9 is h = x, and the logit is
z = w·x. As soon as the class means of x agree, both means agree for every w. Eq. 9 therefore only
shifts the numbers of a class, and does not change their spread. This fixes the slope at 0, because
f'(0) = mean(x·(1/2 − y)) depends only on the class means. It does not fix the curvature f''(0) =
mean(x²)/4, which is about 1.3 times too large with numbers that start from N(0, 1). The minimum of
the surrogate is then too close to 0.

Eq. 9 approximates Eq. 7, which compares the losses themselves at random w near 0, here for each
class. With Eq. 7, the surrogate follows f closely, even further from 0, as the paper states of its
Figure 1. The plot shows both surrogates.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth.methods.kit import torch_generator

RADIUS = 5.0  # ρ: matching draws w from N(0, 1), clipped to |w| ≤ ρ
W = torch.linspace(-RADIUS, RADIUS, 1001, dtype=torch.float64)


def make_data(n: int = 100, *, seed: int = 0, printed: bool = False) -> tuple[Tensor, Tensor]:
    """Returns x and y, both float64 [n] (Eq. 17; the module docstring explains `printed`)."""
    rng = torch_generator(seed, "surrogate-data")
    x = torch.randn(n, generator=rng, dtype=torch.float64)
    p = torch.rand(n, generator=rng, dtype=torch.float64)
    upper = p >= 0.9 if printed else p < 0.9
    return x, torch.where(x >= 0, upper, p < 0.1).double()


def class_loss(w: Tensor, x: Tensor, y: int) -> Tensor:
    """Computes the mean cross-entropy of sigmoid(w·x) for each w [M] on examples x [m] that all
    have the label y (Eq. 18).
    """
    z = w[:, None] * x
    return (F.softplus(z) - y * z).mean(1)


def logit_and_embedding(w: Tensor, x: Tensor, y: int) -> Tensor:
    """Computes the two means in Eq. 9, of h = x and of z = w·x, for each w, [M, 2]."""
    return torch.stack([x.mean().expand(len(w)), (w[:, None] * x).mean(1)], dim=1)


def match(
    x: Tensor, y: Tensor, means: Callable[[Tensor, Tensor, int], Tensor], *, seed: int = 0
) -> Tensor:
    """Returns synthetic examples [2 classes, 10] whose `means` match those of the real examples for
    w near 0.
    """
    rng = torch_generator(seed, "surrogate-matching")
    synthetic = torch.randn(2, 10, generator=rng, dtype=torch.float64).requires_grad_()
    optimiser = torch.optim.Adam([synthetic], lr=0.02)
    for _ in range(1500):
        w = torch.randn(16, generator=rng, dtype=torch.float64).clamp(-RADIUS, RADIUS)
        gaps = [means(w, synthetic[c], c) - means(w, x[y == c], c) for c in (0, 1)]
        optimiser.zero_grad()
        torch.cat(gaps).square().sum().backward()
        optimiser.step()
    return synthetic.detach()


def curves(seed: int = 0, *, printed: bool = False) -> dict[str, Tensor]:
    """Computes f, the two surrogates, and the tangent at w = 0, each at the points `W`."""
    x, y = make_data(seed=seed, printed=printed)
    # of class 1; the classes' losses are weighted by their real shares, as in Eq. 10
    share = y.mean()

    def objective(zeros: Tensor, ones: Tensor) -> Tensor:
        return (1 - share) * class_loss(W, zeros, 0) + share * class_loss(W, ones, 1)

    return {
        "objective f": objective(x[y == 0], x[y == 1]),
        "surrogate, Eq. 9 (means)": objective(*match(x, y, logit_and_embedding, seed=seed)),
        "surrogate, Eq. 7 (losses)": objective(*match(x, y, class_loss, seed=seed)),
        "tangent at w = 0": math.log(2) + W * (x * (0.5 - y)).mean(),
    }


def new_figure() -> Any:
    """Returns an empty matplotlib figure that needs no display."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit(
            "this example draws with matplotlib, which is not installed: pip install "
            "'fedsynth[plots]'"
        )
    return Figure(figsize=(7, 4.5), layout="constrained")


def main(out: Path) -> dict[str, Tensor]:
    """Draws the curves into the PNG file `out`, and returns them.

    The function also prints the largest distance of each curve to f, and its minimiser over |w| ≤
    5.
    """
    figure = new_figure()
    lines = curves()
    axes = figure.subplots()
    for (name, values), style in zip(lines.items(), ("k-", "C1-", "C0--", "C2:"), strict=True):
        axes.plot(W, values, style, label=name)
        gap = (values - lines["objective f"]).abs()
        near = gap[W.abs() <= 2].max()
        minimiser = W[values.argmin()]
        print(
            f"{name:26} largest gap to f {gap.max():.3f} ({near:.3f} for |w| ≤ 2), smallest at w "
            f"= {minimiser:.2f}"
        )
    axes.set(
        xlabel="w",
        ylabel="loss",
        title="A client's objective and what the server can know of it",
        ylim=(0, None),
    )
    axes.legend()
    figure.savefig(out, dpi=120)
    print(f"picture: {out}")
    return lines


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "surrogate_1d.png"))
