"""Speed: condensation, private steps, the server's and local training."""

from __future__ import annotations

from collections.abc import Iterable

from library.pivot import Axis, Cell, Table, axis
from library.rows import Row, RowsError, apart, case, lines, number, percents, spread

ENGINES = {
    "reference": "plain loop",
    "engine fp32": "fp32",
    "engine fp32 compiled": "fp32, `--compile`",
    "engine bf16": "bf16",
    "engine bf16 compiled": "bf16, `--compile`",
}
KEPT = "--keep-allocations"


def _full(row: Row) -> bool:
    """A condensation timing of every engine, with the allocator as it is."""
    return KEPT not in row["command"] and set(ENGINES) == set(row["seconds per step"])


def _shapes() -> Axis:
    shapes = (("mnist", "1×28×28"), ("cifar10", "3×32×32"))
    return [(shape, {"records": [case("condense", name, _full)]}) for name, shape in shapes]


def _step(cell: Cell) -> str:
    (row,) = cell.records
    engine = cell["engine"]
    seconds = f"{row['seconds per step'][engine]:.2f}"
    ratio = row["ratio to reference"][engine]
    return seconds if engine == "reference" else f"{seconds} ({ratio:.1f}×)"


def _numbers(values: Iterable[float], form: str = ".1f") -> list[str]:
    return [number(value, form) for value in values]


def _ratios(name: str, *cases: str) -> list[float]:
    return [case(name, one)["ratio"] for one in cases]


def _floor() -> list[str]:
    row = case("condense", "mnist", _full)
    return _numbers([row["floor"][kind] for kind in ("fp32", "bf16")], ".2f")


def _kept_allocations() -> list[str]:
    row = case("condense", "mnist", lambda row: KEPT in row["command"])
    ratios = [row["ratio to reference"][engine] for engine in list(ENGINES)[1:]]
    return _numbers([row["seconds per step"]["reference"], *ratios])


def _growth() -> list[str]:
    rows = [row for row in lines("condense") if row["case"].startswith("growth")]
    free = [r["microseconds per real image"] for r in rows if r["memory bound GB"] is None]
    return _numbers([min(free), max(free)], ".0f")


def _pairs(method: str, seeds: int) -> tuple[list[float], list[float]]:
    """Accuracies of a method in bf16 and in fp32."""
    half, full = (
        percents("precision", f"{method} {kind}", range(seeds)) for kind in ("bf16", "fp32")
    )
    if not len(half) == len(full) == seeds:
        raise RowsError(f"results/precision.jsonl has no row of {method} for every seed")
    return half, full


def _precision() -> list[str]:
    half, full = _pairs("FedDM", 3)
    found = [part for values in (half, full) for part in spread(values, 3).split(" ± ")]
    return found + _numbers([a - b for a, b in zip(half, full, strict=True)], "+.2f")


def _precision_apart() -> list[str]:
    """bf16 less fp32 of FedKF and of FedHydra."""
    found = []
    for method, seeds in (("FedKF", 3), ("FedHydra", 5)):
        differences = [a - b for a, b in zip(*_pairs(method, seeds), strict=True)]
        found += apart(differences, seeds).replace("*", "").split(" ± ")
    return found


def _private_steps() -> list[str]:
    residual = case("dp_step", "residual")["residual over non-private"]
    return _numbers([residual["fp32"], residual["bf16"]], ".2f")


def _speedups() -> Axis:
    """Each optimisation and its cases, with the ratio in each case."""
    gradient = case("dp_step", "gradient")["ratio to the loop"]
    networks = [case("layout", name)["ratio"] for name in ("cnn1", "cnn2", "lenet5")]
    statistics = [row["ratio"] for row in lines("batch_statistics")]
    generators = (
        "a client's step, CNN1",
        "a generator's step, one teacher",
        "a generator's and a student's step, five teachers",
    )
    real, server = (
        _ratios("mixed_precision", *(f"{step}, ConvNet-{width}" for width in (128, 64, 32, 16)))
        for step in ("a pass of real images", "the server's step")
    )
    found = {
        ("`gradient` in batches, compared with a loop over examples", "fp32, bf16"): [
            gradient["gradient"],
            gradient["gradient bf16"],
        ],
        (
            "generators: fused upsampling and convolution",
            "LeNet-5 on letters, ResNet-8 on CIFAR-10",
        ): _ratios("generator_step", "emnist-letters", "cifar10"),
        ("channels-last on a CPU, training", "CNN1, CNN2, LeNet-5"): [
            ratio["train"] for ratio in networks
        ],
        ("channels-last on a CPU, evaluation", "CNN1, CNN2, LeNet-5"): [
            ratio["evaluate"] for ratio in networks
        ],
        ("`--compile`, passes of synthetic images", "ConvNet-128, ConvNet-16"): _ratios(
            "synthetic_pass", "ConvNet-128", "ConvNet-16"
        ),
        (
            "bf16, training",
            "CNN1; generators of FedKF, and of FedHydra and DENSE",
        ): _ratios("mixed_precision", *generators),
        ("bf16, real images", "ConvNet-128, -64, -32, -16"): real,
        ("bf16, FedDM's server", "ConvNet-128, -64, -32, -16"): server,
        ("batch-norm statistics, compared with `torch.var_mean`", "slowest, fastest"): [
            min(statistics),
            max(statistics),
        ],
    }
    return [(labels, {"ratios": ratios}) for labels, ratios in found.items()]


TABLES = {
    "condense": Table(_shapes, axis("engine", ENGINES), {"show": _step}),
    "speedups": Table(
        _speedups,
        [("times as fast", {"show": lambda cell: ", ".join(_numbers(cell["ratios"]))})],
        corner=("optimisation", "cases"),
    ),
}
SENTENCES = [
    (
        "docs/speed.md",
        "a lower bound of {} for the first row in fp32, and {} with bf16 real passes",
        _floor,
    ),
    (
        "docs/speed.md",
        "the loop takes {} seconds and the ratios are {}, {}, {} and {}.",
        _kept_allocations,
    ),
    ("docs/speed.md", "classes (10, 100): {} to {} microseconds a real image at width 32", _growth),
    (
        "docs/speed.md",
        "FedDM reaches {} ± {} in bf16 and {} ± {} in fp32 on the setting of [Fashion-MNIST's "
        "table](results.md), with differences of {}, {} and {} by seed.",
        _precision,
    ),
    (
        "docs/speed.md",
        "FedKF's accuracy differs by {} ± {} points (three seeds), FedHydra's by {} ± {} (five)",
        _precision_apart,
    ),
    (
        "docs/speed.md",
        "`residual` takes {} times the non-private step ({} in bf16).",
        _private_steps,
    ),
]
