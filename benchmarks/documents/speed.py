"""Speed: condensation, private steps, the server's and local training."""

from __future__ import annotations

from collections.abc import Iterable

from library.pivot import Axis, Cell, Table, axis, figure
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


def _passes() -> Axis:
    """The newest row of each case."""
    newest = {row["case"]: row for row in lines("fixed_passes")}
    return [(name, {"records": [row]}) for name, row in newest.items()]


TABLES = {
    "fixed-passes": Table(
        _passes,
        [("time over passes as long as the sample", figure("constant over as the sample", ".2f"))],
        corner="private step",
    ),
    "condense": Table(_shapes, axis("engine", ENGINES), {"show": _step}),
}


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
    gradient = case("dp_step", "gradient")["ratio to the loop"]
    return [
        *_numbers([residual["fp32"], residual["bf16"]], ".2f"),
        *_numbers([gradient["gradient"], gradient["gradient bf16"]]),
    ]


def _server() -> list[str]:
    rows = [case("server_step", name) for name in ("mnist", "cifar10")]
    seconds = [row["seconds per epoch"] for row in rows]
    shares = sorted(100 * row["share of the floor"] for row in rows)
    slower = sorted(100 * (one["engine"] / one["reference"] - 1) for one in seconds)
    return _numbers([*shares, *slower], ".0f")


def _generator() -> list[str]:
    return _numbers(_ratios("generator_step", "emnist-letters", "cifar10"))


def _layout() -> list[str]:
    ratios = [case("layout", name)["ratio"] for name in ("cnn1", "cnn2", "lenet5")]
    return _numbers([ratio[what] for ratio in ratios for what in ("train", "evaluate")])


def _mixed_precision() -> list[str]:
    client, *generator = _ratios(
        "mixed_precision",
        "a client's step, CNN1",
        "a generator's step, one teacher",
        "a generator's and a student's step, five teachers",
    )
    return _numbers([client, min(generator), max(generator)])


def _mixed_precision_by_width() -> list[str]:
    """Of ConvNets: real passes, and the server's steps, from wide to narrow."""
    steps = ("a pass of real images", "the server's step")
    cases = [f"{what}, ConvNet-{width}" for what in steps for width in (128, 64, 32, 16)]
    return _numbers(_ratios("mixed_precision", *cases))


def _synthetic_pass() -> list[str]:
    return _numbers(_ratios("synthetic_pass", "ConvNet-128", "ConvNet-16"))


def _statistics() -> list[str]:
    ratios = [row["ratio"] for row in lines("batch_statistics")]
    return _numbers([min(ratios), max(ratios)], ".0f")


SENTENCES = [
    (
        "docs/speed.md",
        "the floor of the first row at {} in fp32 and {} with bf16 real passes",
        _floor,
    ),
    ("docs/speed.md", "the loop takes {} and the ratios are {}, {}, {} and {}.", _kept_allocations),
    ("docs/speed.md", "classes (10, 100): {} to {} microseconds a real image at width 32", _growth),
    (
        "docs/speed.md",
        "{} ± {} against {} ± {} in fp32 on the setting of [Fashion-MNIST's table](results.md), "
        "by seed {}, {}, {}.",
        _precision,
    ),
    (
        "docs/speed.md",
        "seed, FedKF's accuracy in bf16 is {} ± {} points from that in fp32 (three seeds), "
        "FedHydra's {} ± {} (five)",
        _precision_apart,
    ),
    (
        "docs/speed.md",
        "`residual` takes {} times the non-private step ({} in bf16); `gradient` is {} times as "
        "fast as a loop over examples, {} with bf16",
        _private_steps,
    ),
    (
        "docs/speed.md",
        "({} to {} % of the floor) and {} to {} % slower than a DataLoader with torch's SGD",
        _server,
    ),
    (
        "docs/speed.md",
        "A generator's step (width 64, batch 64) is {} times as fast as with two layers where the "
        "teacher is LeNet-5 on letters, and {} times with ResNet-8 on CIFAR-10",
        _generator,
    ),
    (
        "docs/speed.md",
        "CNN1's training step is {} times as fast and its pass without graph {} times, CNN2's {} "
        "and {}, LeNet-5's {} and {}",
        _layout,
    ),
    (
        "docs/speed.md",
        "`--precision bf16` makes a client's step of CNN1 {} times as fast and a generator's step "
        "of FedKF and of FedHydra or DENSE {} to {} times.",
        _mixed_precision,
    ),
    (
        "docs/speed.md",
        "a pass of real images is {}, {}, {} and {} times as fast (widths 128, 64, 32, 16), and a "
        "step of FedDM's server {}, {}, {} and {} times",
        _mixed_precision_by_width,
    ),
    (
        "docs/speed.md",
        "Of synthetic images, `--compile` makes a pass forward and back {} times as fast with "
        "ConvNet-128 and {} times with ConvNet-16",
        _synthetic_pass,
    ),
    (
        "docs/speed.md",
        "with their gradient {} to {} times as fast as by `torch.var_mean`",
        _statistics,
    ),
]
