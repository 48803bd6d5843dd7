"""examples/surrogate_1d.py: it runs, and what its docstring says of slope, curvature and labels is
so."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
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
