"""Tables and sentences on speed: condensation, private steps, the server's and local training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from library.rows import RowsError, apart, by_key, case, lines, percents, spread, table

SEEDS = range(3)
ENGINES = {
    "reference": "plain loop",
    "engine fp32": "fp32",
    "engine fp32 compiled": "fp32, `--compile`",
    "engine bf16": "bf16",
    "engine bf16 compiled": "bf16, `--compile`",
}
KEPT = "--keep-allocations"


def _full(row: Mapping[str, Any]) -> bool:
    """A condensation timing of every engine, with the allocator as it is."""
    return KEPT not in row["command"] and set(ENGINES) == set(row["seconds per step"])


def _condense() -> str:
    body = []
    for name, shape in (("mnist", "1×28×28"), ("cifar10", "3×32×32")):
        row = case("condense", name, _full)
        cells = [shape]
        for engine in ENGINES:
            seconds = row["seconds per step"][engine]
            ratio = row["ratio to reference"][engine]
            times = "" if engine == "reference" else f" ({ratio:.1f}×)"
            cells.append(f"{seconds:.2f}{times}")
        body.append(cells)
    return table(["", *ENGINES.values()], body)


def _floor() -> list[str]:
    row = case("condense", "mnist", _full)
    return [f"{row['floor'][kind]:.2f}" for kind in ("fp32", "bf16")]


def _kept_allocations() -> list[str]:
    row = case("condense", "mnist", lambda row: KEPT in row["command"])
    ratios = [row["ratio to reference"][engine] for engine in list(ENGINES)[1:]]
    return [f"{row['seconds per step']['reference']:.1f}", *(f"{r:.1f}" for r in ratios)]


def _growth() -> list[str]:
    rows = [row for row in lines("condense") if row["case"].startswith("growth")]
    free = [r["microseconds per real image"] for r in rows if r["memory bound GB"] is None]
    return [f"{min(free):.0f}", f"{max(free):.0f}"]


def _precision() -> list[str]:
    rows = by_key("precision")
    half, full = (percents(rows, f"FedDM {kind}", SEEDS) for kind in ("bf16", "fp32"))
    if len(half) < len(SEEDS) or len(full) < len(SEEDS):
        raise RowsError("results/precision.jsonl has no row of FedDM for every seed")
    found = []
    for values in (half, full):
        found += spread(values, 3).split(" ± ")
    return [*found, *(f"{a - b:+.2f}".replace("-", "−") for a, b in zip(half, full, strict=True))]


def _precision_apart() -> list[str]:
    """bf16 less fp32 of FedKF and of FedHydra."""
    rows = by_key("precision")
    found = []
    for method, seeds in (("FedKF", 3), ("FedHydra", 5)):
        half, full = (percents(rows, f"{method} {kind}", range(seeds)) for kind in ("bf16", "fp32"))
        found += apart(half, full, seeds).replace("*", "").split(" ± ")
    return found


def _private_steps() -> list[str]:
    residual = case("dp_step", "residual")["residual over non-private"]
    gradient = case("dp_step", "gradient")["ratio to the loop"]
    found = [residual["fp32"], residual["bf16"]]
    return [
        *(f"{value:.2f}" for value in found),
        *(f"{gradient[kind]:.1f}" for kind in ("gradient", "gradient bf16")),
    ]


def _server() -> list[str]:
    rows = [case("server_step", name) for name in ("mnist", "cifar10")]
    shares = sorted(100 * row["share of the floor"] for row in rows)
    slower = sorted(
        100 * (row["seconds per epoch"]["engine"] / row["seconds per epoch"]["reference"] - 1)
        for row in rows
    )
    return [f"{value:.0f}" for value in (*shares, *slower)]


def _generator() -> list[str]:
    return [
        f"{case('generator_step', name)['ratio']:.1f}" for name in ("emnist-letters", "cifar10")
    ]


def _layout() -> list[str]:
    return [
        f"{case('layout', name)['ratio'][what]:.1f}"
        for name in ("cnn1", "cnn2", "lenet5")
        for what in ("train", "evaluate")
    ]


def _mixed_precision() -> list[str]:
    client, one, five = (
        case("mixed_precision", name)["ratio"]
        for name in (
            "a client's step, CNN1",
            "a generator's step, one teacher",
            "a generator's and a student's step, five teachers",
        )
    )
    return [f"{ratio:.1f}" for ratio in (client, min(one, five), max(one, five))]


def _mixed_precision_by_width() -> list[str]:
    """Of ConvNets: real passes, and the server's steps, from wide to narrow."""
    return [
        f"{case('mixed_precision', f'{what}, ConvNet-{width}')['ratio']:.1f}"
        for what in ("a pass of real images", "the server's step")
        for width in (128, 64, 32, 16)
    ]


def _synthetic_pass() -> list[str]:
    return [f"{case('synthetic_pass', f'ConvNet-{width}')['ratio']:.1f}" for width in (128, 16)]


def _statistics() -> list[str]:
    ratios = [row["ratio"] for row in lines("batch_statistics")]
    return [f"{min(ratios):.0f}", f"{max(ratios):.0f}"]


def _fixed_passes() -> str:
    """The newest row of each case."""
    newest = {row["case"]: row["constant over as the sample"] for row in lines("fixed_passes")}
    body = [[case_, f"{ratio:.2f}"] for case_, ratio in newest.items()]
    return table(["private step", "time over passes as long as the sample"], body)


def _local_training() -> str:
    """How many times as fast clients are trained together, and whether the rule takes it."""
    body = [
        [
            row["case"],
            str(row["batch"]),
            f"{row['ratio']:.1f}",
            "yes" if row["used together"] else "no",
        ]
        for row in lines("local_training")
        if row["machine"].startswith("CPU")
    ]
    return table(["clients and network", "batch", "times as fast", "together"], body)


TABLES: dict[str, Callable[[], str]] = {
    "local-training": _local_training,
    "fixed-passes": _fixed_passes,
    "condense": _condense,
}
SENTENCES: list[tuple[str, str, Callable[[], list[str]]]] = [
    (
        "docs/speed.md",
        "the floor of the first row at {} in fp32 and {} with bf16 real passes",
        _floor,
    ),
    (
        "docs/speed.md",
        "the loop takes {} and the ratios are {}, {}, {} and {}.",
        _kept_allocations,
    ),
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
        "fast "
        "as a loop over examples, {} with bf16",
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
