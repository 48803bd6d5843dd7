"""examples/surrogate_1d.py: it runs, and what its docstring says of slope, curvature and labels is
so."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image
from torch import Tensor

SCRIPT = Path(__file__).parents[2] / "examples" / "surrogate_1d.py"
TRUE, EQ9, EQ7, TANGENT = (
    "objective f",
    "surrogate, Eq. 9 (means)",
    "surrogate, Eq. 7 (losses)",
    "tangent at w = 0",
)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("surrogate_1d", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(
    example: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Tensor], Path]:
    out = tmp_path_factory.mktemp("surrogate") / "picture.png"
    return example.main(out), out


def slope(values: Tensor, W: Tensor) -> float:
    i = len(W) // 2
    return float((values[i + 1] - values[i - 1]) / (W[i + 1] - W[i - 1]))


def curvature(values: Tensor, W: Tensor) -> float:
    i = len(W) // 2
    return float((values[i + 1] - 2 * values[i] + values[i - 1]) / (W[i + 1] - W[i]) ** 2)


def test_it_draws_a_picture(run: tuple[dict[str, Tensor], Path]) -> None:
    with Image.open(run[1]) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 300


def test_value_and_slope_at_zero_are_the_objectives(
    run: tuple[dict[str, Tensor], Path], example: ModuleType
) -> None:
    # At w = 0 every example's loss is log 2 and its derivative x·(1/2 − y), so f'(0) is the sum
    # over the classes of share × mean of x × (1/2 − y): equal class means, weighed by the real
    # shares, give an equal slope. Central differences with a step of 0.01 are off by f'''/6 · 1e-4,
    # and f'''(0) = 0 because softplus'''(0) = 0.
    x, y = example.make_data()
    exact = float((x * (0.5 - y)).mean())
    for name in (TRUE, EQ9, TANGENT):
        assert float(run[0][name][len(example.W) // 2]) == pytest.approx(
            0.6931471805599453, abs=1e-12
        )
        assert slope(run[0][name], example.W) == pytest.approx(exact, abs=1e-6), name
    # only implied by the losses near 0
    assert slope(run[0][EQ7], example.W) == pytest.approx(exact, abs=5e-3)


def test_means_leave_the_curvature_to_chance_and_losses_do_not(
    run: tuple[dict[str, Tensor], Path], example: ModuleType
) -> None:
    x, _ = example.make_data()
    exact = float(x.square().mean()) / 4
    assert curvature(run[0][TRUE], example.W) == pytest.approx(exact, rel=1e-3)
    assert curvature(run[0][EQ9], example.W) > 1.15 * exact
    assert curvature(run[0][EQ7], example.W) == pytest.approx(exact, rel=0.15)


def test_gaps_and_minimisers_are_in_the_order_the_docstring_tells(
    run: tuple[dict[str, Tensor], Path], example: ModuleType
) -> None:
    lines, W = run[0], example.W
    gaps = {name: float((values - lines[TRUE]).abs().max()) for name, values in lines.items()}
    assert gaps[EQ7] < 0.1 < gaps[EQ9] < gaps[TANGENT]
    best = {name: float(W[values.argmin()]) for name, values in lines.items()}
    assert 0 < best[EQ9] < best[TRUE] < best[TANGENT] == 5.0
    assert best[EQ7] == pytest.approx(best[TRUE], abs=0.4)


def test_matching_means_moves_a_class_as_one(example: ModuleType) -> None:
    x, y = example.make_data()
    synthetic = example.match(x, y, example.logit_and_embedding)
    means = torch.stack([x[y == 0].mean(), x[y == 1].mean()])
    torch.testing.assert_close(synthetic.mean(1), means, atol=1e-6, rtol=0)
    rng = example.torch_generator(0, "surrogate-matching")
    start = torch.randn(2, 10, generator=rng, dtype=torch.float64)
    torch.testing.assert_close(
        synthetic - synthetic.mean(1, keepdim=True), start - start.mean(1, keepdim=True)
    )


def test_equation_17_as_printed_has_labels_without_signal(example: ModuleType) -> None:
    x, y = example.make_data(100_000, printed=True)
    for half in (x >= 0, x < 0):
        # 4 standard errors of a share of 50,000
        assert float(y[half].mean()) == pytest.approx(0.1, abs=0.006)
    x, y = example.make_data(100_000)
    assert float(((x >= 0).double() == y).double().mean()) == pytest.approx(0.9, abs=0.004)


def test_without_matplotlib_one_line_says_what_to_install(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match=r"pip install 'fedsynth\[plots\]'"):
        example.main(tmp_path / "never.png")
    assert not (tmp_path / "never.png").exists()
