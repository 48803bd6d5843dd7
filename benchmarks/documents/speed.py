"""Speed: condensation, private steps, the server's and local training."""

from __future__ import annotations

from collections.abc import Iterable

from library.pivot import Axis, Cell, Table, axis
from library.rows import Row, case, number, paired, percents, spread

ENGINES = {
    "reference": "plain loop",
    "engine fp32": "fp32",
    "engine fp32 compiled": "fp32, `--compile on`",
    "engine bf16": "bf16",
    "engine bf16 compiled": "bf16, `--compile on`",
}
ALLOCATOR = "--keep-allocations"
WIDTHS = (128, 64, 32, 16)


def _complete(row: Row) -> bool:
    """Returns True for a condensation timing of every engine, with the default allocator."""
    return ALLOCATOR not in row["command"] and set(ENGINES) == set(row["seconds per step"])


def _shapes() -> Axis:
    shapes = (("mnist", "1×28×28"), ("cifar10", "3×32×32"))
    return [(shape, {"records": [case("condense", name, _complete)]}) for name, shape in shapes]


def _step(cell: Cell) -> str:
    (row,) = cell.records
    engine = cell["engine"]
    seconds = f"{row['seconds per step'][engine]:.2f}"
    ratio = row["ratio to reference"][engine]
    return seconds if engine == "reference" else f"{seconds} ({ratio:.1f}×)"


def _numbers(values: Iterable[float], form: str = ".1f") -> list[str]:
    return [number(value, form) for value in values]


def _compared_with_allocator(row: Row) -> bool:
    return ALLOCATOR in row["command"] and row["ratio to reference"] is not None


def _without_loop() -> Row:
    row: Row = case("condense", "mnist", lambda row: "--no-reference" in row["command"])
    return row


def _share_of_peak() -> list[str]:
    """Returns which share of the speed of convolutions condensation reaches, in percent."""
    shares = _without_loop()["share of the floor"]
    engines = ("engine fp32 compiled", "engine bf16 compiled")
    return _numbers([100 * shares[engine] for engine in engines], ".0f")


def _bfloat16_convolutions() -> list[str]:
    """Returns how many times as long as in fp32 a convolution takes in bf16 without AMX."""
    peaks = _without_loop()["convolution peak GFLOP/s"]
    return [number(peaks["fp32"] / peaks["bf16"], ".1f")]


def _with_allocator() -> list[str]:
    row = case("condense", "mnist", _compared_with_allocator)
    ratios = [row["ratio to reference"][engine] for engine in list(ENGINES)[1:]]
    return _numbers([row["seconds per step"]["reference"], *ratios])


def _precision(method: str, seeds: int) -> tuple[list[float], list[float], list[float]]:
    """Returns the accuracies of a method in bf16 and in fp32, and their differences."""
    bf16 = percents("precision", f"{method} bf16", range(seeds))
    fp32 = percents("precision", f"{method} fp32", range(seeds))
    return bf16, fp32, [a - b for a, b in zip(bf16, fp32, strict=True)]


def _feddm_precision() -> list[str]:
    bf16, fp32, _ = _precision("FedDM", 3)
    return f"{spread(bf16, 3)} ± {spread(fp32, 3)}".split(" ± ")


def _precision_differences() -> list[str]:
    """Returns bf16 less fp32 of FedKF and of FedHydra."""
    texts = (paired(_precision(name, n)[2], n) for name, n in (("FedKF", 3), ("FedHydra", 5)))
    return " ± ".join(texts).replace("*", "").split(" ± ")


def _private_steps() -> list[str]:
    residual = case("dp_step", "residual")["residual over non-private"]
    return _numbers([residual["fp32"], residual["bf16"]], ".2f")


def _ratios(name: str, *cases: str) -> list[float]:
    return [case(name, title)["ratio"] for title in cases]


def _speedups() -> Axis:
    """Returns each optimisation and its cases, with the ratio in each case."""
    gradient = case("dp_step", "gradient")["ratio to the loop"]
    generators = (
        "a client's step, CNN1",
        "a generator's step, one teacher",
        "a generator's and a student's step, five teachers",
    )
    real = [f"a pass of real images, ConvNet-{width}" for width in WIDTHS]
    bf16 = "CNN1; generators of FedKF, and of FedHydra and DENSE"
    loop = [gradient["gradient"], gradient["gradient bf16"]]
    upsampling = _ratios("generator_step", "emnist-letters", "cifar10")
    compiled = _ratios("synthetic_pass", "ConvNet-128", "ConvNet-16")
    rows = (
        ("`gradient`, compared with a loop over 64 examples of a class", "fp32, bf16", loop),
        (
            "generators: fused upsampling and convolution",
            "LeNet-5 on letters, ResNet-8 on CIFAR-10",
            upsampling,
        ),
        ("`--compile on`, passes of synthetic images", "ConvNet-128, ConvNet-16", compiled),
        ("bf16, training", bf16, _ratios("mixed_precision", *generators)),
        ("bf16, real images", "ConvNet-128, -64, -32, -16", _ratios("mixed_precision", *real)),
    )
    return [((title, cases), {"ratios": ratios}) for title, cases, ratios in rows]


DP_SGD = {
    "ConvNet-128, 64": "dp-sgd ConvNet-128 b64",
    "ConvNet-128, 256": "dp-sgd ConvNet-128 b256",
    "CNN1, 256": "dp-sgd CNN1 b256",
    "LeNet-5, 64": "dp-sgd LeNet-5 b64",
    "linear, 64": "dp-sgd linear b64",
}
RUNS = {
    "fedsynth": "fedsynth",
    "Opacus": "opacus hooks",
    "ghost clipping": "opacus ghost",
}


def _dp_sgd() -> Axis:
    return [(label, {"records": [case("peers", name)]}) for label, name in DP_SGD.items()]


def _dp_sgd_step(cell: Cell) -> str:
    """Returns milliseconds and megabytes."""
    (row,) = cell.records
    run = cell["run"]
    milliseconds = row["milliseconds"][run]
    digits = 0 if milliseconds > 100 else 1
    return f"{milliseconds:,.{digits}f}; {row['megabytes'][run]:,}"


def _rounds() -> list[str]:
    """Returns fedsynth's ratios to the plain loop, and to the loop with fedsynth's network."""
    rows = [case("peers", f"{clients} clients")["ratio"] for clients in (10, 100, 1000)]
    loops = ("plain loop", "plain loop, fedsynth's LeNet-5")
    return _numbers((row[loop] for loop in loops for row in rows), ".2f")


def _commands() -> list[str]:
    fedstats = case("commands", "FedStats on Fashion-MNIST")["CPU seconds"].values()
    methods = case("commands", "start")["CPU seconds"]["methods"]
    return [*_numbers(fedstats, ".0f"), number(methods, ".1f")]


TABLES = {
    "dp-sgd": Table(
        _dp_sgd,
        [(title, {"run": run}) for title, run in RUNS.items()],
        {"show": _dp_sgd_step},
        corner="network, batch",
    ),
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
        "A round of FedAvg on LeNet-5 (10, 100, 1,000 clients of 20 images) takes {}, {} and {} "
        "times a plain loop's CPU time, or {}, {} and {} with fedsynth's network in both.",
        _rounds,
    ),
    (
        "docs/speed.md",
        "FedStats on Fashion-MNIST takes {} CPU seconds, {} with `--encoder-cache`. `fedsynth "
        "methods` takes {}.",
        _commands,
    ),
    (
        "docs/speed.md",
        "Compiled steps reach {} % of the speed of convolutions, in bf16 {} %.",
        _share_of_peak,
    ),
    (
        "docs/speed.md",
        "convolutions took {} times fp32's time.",
        _bfloat16_convolutions,
    ),
    (
        "docs/speed.md",
        "the loop takes {} seconds and the ratios are {}, {}, {} and {}.",
        _with_allocator,
    ),
    (
        "docs/speed.md",
        "FedDM reaches {} ± {} in bf16 and {} ± {} in fp32 on the setting of [Fashion-MNIST's "
        "table](results.md).",
        _feddm_precision,
    ),
    (
        "docs/speed.md",
        "FedKF's accuracy differs by {} ± {} points (three seeds), FedHydra's by {} ± {} (five)",
        _precision_differences,
    ),
    (
        "docs/speed.md",
        "`residual` takes {} times the non-private step ({} in bf16).",
        _private_steps,
    ),
]
