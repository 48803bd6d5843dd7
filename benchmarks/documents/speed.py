"""Speed: condensation, private steps, the server's and local training."""

from __future__ import annotations

import statistics
from typing import Any

from library.pages import markdown, pivot, sentence, table
from library.rows import Row, case, differences, each, lines, percents

DOCUMENT = "docs/speed.md"
ENGINES = {
    "plain loop": "reference",
    "fp32": "engine fp32",
    "fp32, `--compile on`": "engine fp32 compiled",
    "bf16": "engine bf16",
    "bf16, `--compile on`": "engine bf16 compiled",
}
ALLOCATOR = "--keep-allocations"


@table("condense")
def _condense() -> str:
    shapes = {"1×28×28": "mnist", "3×32×32": "cifar10"}

    def cell(row: Row, engine: str) -> str:
        text = f"{row['seconds per step'][engine]:.2f}"
        ratio = row["ratio to reference"][engine]
        return text if engine == "reference" else f"{text} ({ratio:.1f}×)"

    rows = {shape: case("condense", name, _complete) for shape, name in shapes.items()}
    return pivot("", rows, ENGINES, cell)


def _complete(row: Row) -> bool:
    """Returns True for a timing of every engine, with the default allocator."""
    every = set(ENGINES.values()) == set(row["seconds per step"])
    return every and ALLOCATOR not in row["command"]


@table("ranks")
def _ranks() -> str:
    """Seconds, times one thread's speed, and memory; pfl-research has no second thread."""
    rows = {row["case"]: row for row in lines("ranks")}
    body = []
    for title in dict.fromkeys(name.split(";")[0] for name in rows):
        one, two = (rows[f"{title}; {ranks} × 1"] for ranks in (1, 2))
        threads = rows.get(f"{title}; 1 × 2")
        seconds = [row and row["seconds a round"] for row in (one, threads, two)]
        cells = ["–" if value is None else f"{value:.2f}" for value in seconds]
        memory = ", ".join(f"{peak:,.0f}" for peak in two["peak_mib"])
        ratio = f"{one['seconds a round'] / two['seconds a round']:.2f}×"
        body.append([title, *cells, ratio, f"{one['peak_mib'][0]:,.0f}; {memory}"])
    head = ["a round", "one thread", "two threads", "two ranks", "ratio", "MiB: one; ranks"]
    return markdown(head, body)


@sentence(
    DOCUMENT, "the loop takes {:.1f} seconds and the ratios are {:.1f}, {:.1f}, {:.1f} and {:.1f}."
)
def _with_allocator() -> list[float]:
    row = case(
        "condense",
        "mnist",
        lambda row: ALLOCATOR in row["command"] and "reference" in row["seconds per step"],
    )
    times = [row["seconds per step"][engine] for engine in ENGINES.values()]
    return [times[0], *(times[0] / time for time in times[1:])]


def _without_loop() -> Any:
    return case("condense", "mnist", lambda row: "--no-reference" in row["command"])


@sentence(DOCUMENT, "convolutions took {:.1f} times fp32's time.")
def _bfloat16_convolutions() -> list[float]:
    """In bf16 without AMX."""
    peaks = _without_loop()["convolution peak GFLOP/s"]
    return [peaks["fp32"] / peaks["bf16"]]


@sentence(
    DOCUMENT,
    "FedDM reaches {:.2f} ± {:.2f} in bf16 and {:.2f} ± {:.2f} in fp32 on the setting of "
    "[Fashion-MNIST's table](results.md).",
)
def _feddm_precision() -> list[float]:
    numbers = []
    for precision in ("bf16", "fp32"):
        accuracy = percents("precision", f"FedDM {precision}", range(3))
        numbers += [statistics.mean(accuracy), statistics.stdev(accuracy)]
    return numbers


@sentence(
    DOCUMENT,
    "FedKF's accuracy differs by {:+.1f} ± {:.1f} points (three seeds), FedHydra's "
    "(literal loop) by {:+.1f} ± "
    "{:.1f} (five)",
)
def _precision_differences() -> list[float]:
    """In bf16, less fp32."""
    numbers = []
    for name, seeds in (("FedKF", 3), ("FedHydra", 5)):
        ahead = differences("precision", f"{name} bf16", f"{name} fp32", range(seeds))
        numbers += [statistics.mean(ahead), statistics.stdev(ahead)]
    return numbers


@sentence(
    DOCUMENT,
    "takes {:.3f} seconds in the plain loop, {:.3f} in fp32 and {:.3f} in bf16 with `--compile "
    "on`.",
)
def _on_gpu() -> list[float]:
    row = case("condense", "mnist", machine="NVIDIA")
    engines = ("reference", "engine fp32", "engine bf16 compiled")
    return [row["seconds per step"][engine] for engine in engines]


@table("speedups")
def _speedups() -> str:
    """Each optimisation and its cases, with the ratio in each case."""
    gradient = case("dp_step", "gradient")["ratio to the loop"]
    generators = (
        "a client's step, CNN1",
        "a generator's step, one teacher",
        "a generator's and a student's step, five teachers",
    )
    real = [f"a pass of real images, ConvNet-{width}" for width in (128, 64, 32, 16)]
    rows = (
        (
            "`gradient`, compared with a loop over 64 examples of a class",
            "fp32, bf16",
            [gradient["gradient"], gradient["gradient bf16"]],
        ),
        (
            "generators: fused upsampling and convolution",
            "LeNet-5 on letters, ResNet-8 on CIFAR-10",
            _ratios("generator_step", "emnist-letters", "cifar10"),
        ),
        (
            "`--compile on`, passes of synthetic images",
            "ConvNet-128, ConvNet-16",
            _ratios("synthetic_pass", "ConvNet-128", "ConvNet-16"),
        ),
        (
            "bf16, training",
            "CNN1; generators of FedKF, and of FedHydra and DENSE",
            _ratios("mixed_precision", *generators),
        ),
        ("bf16, real images", "ConvNet-128, -64, -32, -16", _ratios("mixed_precision", *real)),
    )
    body = [[title, cases, each(ratios, ".1f")] for title, cases, ratios in rows]
    return markdown(["optimisation", "cases", "times as fast"], body)


def _ratios(name: str, *cases: str) -> list[float]:
    return [case(name, title)["ratio"] for title in cases]


@table("dp-sgd")
def _dp_sgd() -> str:
    """Milliseconds and megabytes of a step."""
    convolutional = ("ConvNet-128, 64", "ConvNet-128, 256", "CNN1, 256", "LeNet-5, 64")
    networks = ("ResNet-18, 32", "ResNet-18, 64×64, 32", *convolutional, "linear, 64")
    runs = {"fedsynth": "fedsynth", "Opacus": "opacus hooks", "ghost clipping": "opacus ghost"}

    def cell(network: str, run: str) -> str:
        model, _, batch = network.rpartition(", ")
        row = case("peers", f"dp-sgd {model} b{batch}")
        milliseconds = row["milliseconds"][run]
        digits = 0 if milliseconds > 100 else 1
        return f"{milliseconds:,.{digits}f}; {row['megabytes'][run]:,}"

    return pivot("network, batch", {name: name for name in networks}, runs, cell)


@sentence(
    DOCUMENT,
    "A round of FedAvg on LeNet-5 (10, 100, 1,000 clients of 20 images) takes {:.2f}, {:.2f} and "
    "{:.2f} times a plain loop's CPU time.",
)
def _rounds() -> list[float]:
    rows = [case("peers", f"{clients} clients")["ratio"] for clients in (10, 100, 1000)]
    return [row["plain loop"] for row in rows]


@sentence(
    DOCUMENT,
    "FedStats on Fashion-MNIST takes {:.0f} CPU seconds, {:.0f} with `--encoder-cache`.",
)
def _commands() -> list[float]:
    return list(case("commands", "FedStats on Fashion-MNIST")["CPU seconds"].values())
