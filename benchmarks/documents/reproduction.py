"""docs/reproduction.md, from the rows of results/reproduction/*.jsonl."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

from fedsynth.experiments.comparison import (
    Line,
    changed_settings,
    format_number,
    interval,
    judgements,
    lines,
)
from fedsynth.experiments.presets import cell_words, preset
from fedsynth.experiments.runner import rows_by_hash
from library import RESULTS
from library.pages import markdown, sentence, table
from library.rows import NOTHING, READ, REPRODUCTION, Row, by_key, case, percents
from library.rows import lines as rows_of

DOCUMENT = "docs/reproduction.md"
MARKS = {"above": " ↑", "below": " ↓"}
MODELS = ("aca", "oca")
# Changes of FedDM's small edition that give it what FedAF has.
FEDAF_IMAGES = {"image_dtype": "uint8", "image_lr": "0.2"}
# The methods of benchmarks/fedhydra_student.py.
STUDENTS = {
    **{"fedavg": "FedAvg", "dense": "DENSE", "literal": "literal loop", "pool": "pool"},
    **{"floor 0.001": "floor 0.001", "rate 0.01": "rate 0.01"},
}
SMALL = ("feddm:table2", "fedaf:table1", "fedkf:table5", "fedhydra:table1", "fedhydra:table2")

# The network and the loop of FedHydra's rows at full size, which were the defaults.
EARLIER = {
    "model": {"name": "cnn1"},
    "method": {
        **{"student_images": "all", "replay": "false", "generator_reset": "false"},
        **{"server_momentum": "0.0", "stratification_lr": "0.01", "stratification_floor": "0.001"},
    },
}


def _rows() -> dict[str, dict[str, Any]]:
    """Returns all rows by their hash."""
    READ.append(REPRODUCTION)
    return rows_by_hash(RESULTS / "reproduction")


def _shortened(data: str) -> str:
    return data.replace("2 classes per client", "2c/c")


def _as_published(name: str) -> list[Row]:
    """Returns the rows with the settings of a preset."""
    return [row for row in _rows().values() if row["preset"] == name and not row["changes"]]


def _finished(name: str) -> list[Line]:
    """Returns the lines of a preset's published numbers with finished runs, also of the paper's
    other presets with the same settings."""
    paper = name.partition(":")[0]
    rows = {key: row for key, row in _rows().items() if row["preset"].startswith(f"{paper}:")}
    seeds = sorted({row["seed"] for row in rows.values()})
    finished = []
    for text in sorted({json.dumps(row["changes"], sort_keys=True) for row in rows.values()}):
        changes = json.loads(text)
        # other methods may not have the changed setting
        ran = [row["cell"]["method"] for row in rows.values() if row["changes"] == changes]
        cells = [cell for cell in preset(name).cells if not changes or cell.method in ran]
        finished += lines(preset(name), cells, seeds, rows, changes=changes)
    return [line for line in finished if line.runs and line.number.value is not None]


@table("reproduction-fedhydra")
def _fedhydra() -> str:
    """FedHydra's Tables 1 and 2: accuracies of each seed here and, in parentheses, in the paper.

    The rows have earlier settings of the preset.
    """
    texts: dict[str, dict[str, str]] = {}
    for name in ("fedhydra:table1", "fedhydra:table2"):
        for cell in preset(name).cells:
            values = {
                row["seed"]: f"{100 * row['curve']['test_accuracy'][-1]:.1f}"
                for row in _rows().values()
                if (row["preset"], row["cell"]) == (name, cell.columns())
                and row["changes"] in (EARLIER, {"model": EARLIER["model"]})
                and ("method" in row["changes"]) == (cell.method == "fedhydra")
            }
            if values:
                seeds = ", ".join(values[seed] for seed in sorted(values))
                place = _shortened(f"{cell.dataset}, {cell.partition}")
                published = cell.numbers[0].value
                texts.setdefault(place, {})[cell.method] = f"{seeds} ({published:.1f})"
    methods = ("fedavg", "feddf", "dense", "fedhydra")
    body = [[place, *map(row.__getitem__, methods)] for place, row in texts.items()]
    return markdown(["data", *methods], body)


@sentence(
    DOCUMENT,
    "the only client with a class has at least {:.2f} % of its weight in Ū_r, and P, asked for an "
    "image's class, is right on {:.1f} % of test images",
)
def _stratification() -> list[float]:
    """The matrices of MNIST's clients, of which each class has one owner."""
    row = by_key("fedhydra_matrices")["mnist 2 classes per client seed=0"]
    shares = [
        share
        for shares, counts in zip(
            row["clients_for_class"], zip(*row["class_counts"], strict=True), strict=True
        )
        for share, count in zip(shares, counts, strict=True)
        if count
    ]
    return [100 * min(shares), 100 * row["right"]]


@sentence(
    DOCUMENT,
    "FedDM gains {:.1f} ± {:.1f} points by 8-bit pixels, which FedAF sends, or {:.1f} ± {:.1f} by "
    "FedAF's image rate of 0.2. FedAF's lead is then {:.1f} ± {:.1f} or {:.1f} ± {:.1f}",
)
def _feddm_as_fedaf() -> list[float]:
    """Means of paired differences in the small edition, and half their intervals."""
    best: dict[str, dict[int, float]] = {}
    for row in _rows().values():
        name = f"{row['cell']['method']} {json.dumps(row['changes'])}"
        if row["preset"] == "fedaf:table1-small" and name.startswith(("fedaf", "feddm")):
            accuracies = filter(None, row["curve"]["test_accuracy"])
            best.setdefault(name, {})[row["seed"]] = 100 * max(accuracies)
    default, fedaf = best["feddm {}"], best["fedaf {}"]
    changes = [json.dumps({"method": {key: value}}) for key, value in FEDAF_IMAGES.items()]
    changed = [best[f"feddm {text}"] for text in changes]
    numbers = []
    for first, second in [*((by, default) for by in changed), *((fedaf, by) for by in changed)]:
        low, high = interval([first[seed] - second[seed] for seed in sorted(default)])
        numbers += [(low + high) / 2, (high - low) / 2]
    return numbers


@sentence(DOCUMENT, "{:.2f} % after two of the paper's twenty rounds (paper: {:.2f} ± {:.2f})")
def _feddm() -> list[float]:
    [line] = [line for line in _finished("feddm:table2") if line.values]
    published = filter(None, (line.number.value, line.number.std))
    return [*line.values.values(), *published]


@table("reproduction-fedkf")
def _fedkf() -> str:
    """FedKF's Tables V and XII. Runs with changed settings have separate lines."""
    head = ["partition", "method", "AMP, paper", "here", "FM, paper", "here", "WLP, paper", "here"]
    texts: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name in ("fedkf:table5", "fedkf:table12"):
        cells = {cell_words(cell, preset(name)): cell for cell in preset(name).cells}
        for line in _finished(name):
            cell = cells[line.cell]
            settings = changed_settings(line.changes)
            changed = f" (`{settings}`)" if settings else ""
            labels = cell.partition, f"{cell.method}{changed}{line.reduced_precision}"
            published = format_number(line.number.value, line.number.std)
            here = f"{format_number(*line.spread)}{MARKS.get(line.verdict, '')}"
            texts.setdefault(labels, {})[line.number.label] = [published, here]
    metrics = ("amp_pct", "fm", "wlp_pct")
    partitions = [partition for partition, _ in texts]
    body = [
        [*labels, *(text for metric in metrics for text in row[metric])]
        for labels, row in sorted(texts.items(), key=lambda entry: partitions.index(entry[0][0]))
    ]
    return markdown(head, body)


@table("reproduction-office")
def _office() -> str:
    """FedBN's real-world experiment: accuracies here and, in parentheses, in the paper."""
    name = "fedbn:real-world"
    methods = {cell_words(cell, preset(name)): cell.method for cell in preset(name).cells}
    texts: dict[str, list[str]] = {}
    for line in _finished(name):
        text = f"{line.spread.mean:.1f} ({line.number.value:.1f})"
        texts.setdefault(methods[line.cell], []).append(text)
    head = ["method", "Amazon", "Caltech", "DSLR", "Webcam"]
    return markdown(head, [[method, *row] for method, row in texts.items()])


@table("reproduction-fedfa")
def _fedfa() -> str:
    """FedFA+'s images: means over domains, in the paper and over the last ten evaluations."""
    kept = {"method": {"drop_last": "false"}}  # the earlier default
    rows = [row for row in _rows().values() if row["preset"] == "fedfa:images"]
    runs = {row["cell"]["method"]: row for row in rows if row["changes"] == kept}
    body = []
    for cell in preset("fedfa:images").cells:
        if cell.dataset != "office_caltech" or cell.method not in runs:
            continue
        domains = [
            [100 * value for value in curve if value is not None][-10:]
            for key, curve in runs[cell.method]["curve"].items()
            if key.startswith(("domain_accuracy.", "local.client."))
        ]
        means = list(map(statistics.mean, zip(*domains, strict=True)))
        [published] = [n.value for n in cell.numbers if n.label.endswith("(average)")]
        values = (published, statistics.mean(means), min(means))
        body.append([cell.method, *(f"{value:.1f}" for value in values)])
    return markdown(["method", "published", "here", "least"], body)


@sentence(
    DOCUMENT,
    "FedAvg has {:.1f} % (least since round 20: {:.1f}) and FedFA+ {:.1f} ({:.1f})",
)
def _without_last_batches() -> list[float]:
    """Means over domains at 64×64, as in the table: the last, and the least since round 20."""
    numbers = []
    for method in ("fedavg", "fedfa+"):
        row = by_key("fedfa_size")[f"{method}, 64x64, 60 rounds seed=0"]
        means = [100 * statistics.mean(domains.values()) for domains in row["domain_accuracy"]]
        numbers += [means[-1], min(means[row["round"].index(20) :])]
    return numbers


@table("reproduction-sizes")
def _sizes() -> str:
    """What is smaller in the small editions, and the hours that all runs took."""
    seconds: dict[str, float] = {}
    for row in _rows().values():
        if not row["changes"]:
            seconds[row["preset"]] = seconds.get(row["preset"], 0) + row["seconds"]
    body: list[list[str]] = []
    for name in SMALL:
        paper = preset(name).source.partition(" ")[0]
        title, hours = preset(name).editions["small"].title, seconds[f"{name}-small"] / 3600
        same = "as above" if body and body[-1][1] == title else title
        body.append([f"{paper}, {preset(name).table}", same, f"{hours:.1f}"])
    return markdown(["table", "size", "core hours"], body)


@table("reproduction-claims")
def _claims() -> str:
    """The verdicts on the core papers' claims, by the finished runs of the small editions."""
    body, before = [], ""
    for name in SMALL:
        table = preset(name).edition("small")
        averaged = judgements(table, _rows(), averaged=True)
        one_dataset = len({entry.data.split()[0] for entry in averaged}) == 1
        for entry, other in zip(judgements(table, _rows()), averaged, strict=True):
            counts = [len(values) for values in entry.differences.values()]
            if min(counts):
                stated = f"{entry.claim.text} ({entry.claim.source.rpartition(', ')[2]})"
                difference = entry.deciding_difference
                if min(counts) < table.seeds:
                    difference += f", {min(counts)} seeds"
                data = _shortened(entry.data)
                if one_dataset:  # which the table of sizes names
                    data = data.partition(" ")[2]
                texts = [data, entry.published_difference, difference, entry.verdict]
                own = ["", ""]
                if other.differences != entry.differences:
                    own = [other.deciding_difference, other.verdict]
                body.append(["" if stated == before else stated, *texts, *own])
                before = stated
    head = ["claim", "data", "paper", "here", "verdict"]
    return markdown([*head, "averaged students", "verdict"], body)


@table("reproduction-curves")
def _curves() -> str:
    """FedProx's data sets and shares of stragglers, of which the paper prints no numbers."""
    name = "fedprox:synthetic"
    rows = _as_published(name)
    texts: dict[str, dict[str, list[str]]] = {}
    for cell in preset(name).cells:
        if cell.note.startswith("50 %"):
            continue
        [row] = [row for row in rows if row["cell"] == cell.columns()]
        last = [100 * value for value in row["curve"]["test_accuracy"][-20:]]
        by_share = texts.setdefault(cell.dataset, {})
        by_share.setdefault(cell.note, []).append(f"{statistics.mean(last):.1f}")
    head = ["data", *next(iter(texts.values()))]
    body = [[data, *map("; ".join, shares.values())] for data, shares in texts.items()]
    return markdown(head, body)


@sentence(
    DOCUMENT,
    "takes {:.1f} minutes in the literal loop, {:.1f} with M = 50 and {:.1f} with M = 20.",
)
def _networks_time() -> list[float]:
    """A client's round at the paper's size."""
    row = case("networks_time", "a client's round, MNIST, ConvNet-128")
    return [row["seconds a round"][name] / 60 for name in ("literal", "M = 50", "M = 20")]


@sentence(
    DOCUMENT,
    "M = 50 changes accuracy by {:+.2f} points on MNIST (paired standard error {:.2f}) and by "
    "{:+.2f} on Fashion-MNIST ({:.2f})",
)
def _fifty_networks() -> list[float]:
    """Compared with the literal loop on the same seeds."""
    values = []
    for dataset in ("mnist", "fashion-mnist"):
        few, literal = (
            percents("networks_per_round", f"{dataset} M={m}", range(5)) for m in (50, 0)
        )
        changes = [a - b for a, b in zip(few, literal, strict=True)]
        error = statistics.stdev(changes) / math.sqrt(len(changes))
        values += [statistics.mean(changes), error]
    return values


def _local(alpha: str, metric: str) -> dict[tuple[str, str], list[float]]:
    """Returns a metric of each round of FedKF's Table V, in %, by method and final model."""
    curves = {}
    for row in _as_published("fedkf:table5"):
        for model in MODELS:
            curve = row["curve"].get(f"models.{model}.local.{metric}")
            if curve and row["cell"]["partition"] == f"dirichlet({alpha})":
                curves[row["cell"]["method"], model] = [100 * value for value in curve]
    return curves


@sentence(
    DOCUMENT,
    "FedAvg's WLP varies from {:.0f} to {:.0f} over the last 20 rounds and is highest in the last "
    "one; over these rounds, FedKF's mean WLP is {:.0f} (ACA) and {:.0f} (OCA), FedAvg's {:.0f} "
    "and {:.0f}",
)
def _worst_local() -> list[float]:
    curves = _local("0.1", "wlp")
    swings = curves["fedavg", "aca"][-20:]
    # the cell that a run was made for names its row
    means = [
        statistics.mean(curves[method, model][-20:])
        for method in ("fedkf (oca)", "fedavg")
        for model in MODELS
    ]
    return [min(swings), max(swings), *means]


@sentence(DOCUMENT, "{:.0f} to {:.0f} points over FedAvg's last model")
def _gain_of_few() -> list[float]:
    """The least and the most of the AMP of FedKF⁻ and FedKF."""
    amp = {key: curve[-1] for key, curve in _local("0.01", "amp").items()}
    others = [value for (method, _), value in amp.items() if method != "fedavg"]
    return [bound(others) - amp["fedavg", "aca"] for bound in (min, max)]


@table("reproduction-student")
def _student() -> str:
    """FedHydra's student on held-out images: means over seeds of the last epoch's and of averaged
    weights."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for row in rows_of("fedhydra_student"):
        place, _, _ = row["key"].rpartition(" seed=")
        data, _, words = place.rpartition(", ")
        network, _, method = words.partition(" ")
        entries = [row["accuracy"]] if "accuracy" in row else [row["curve"][-1]]
        if "curve" in row:
            entries.append(row["average"])
        name = f"{_shortened(data)}, {network}"
        found.setdefault(name, {}).setdefault(method, []).append(entries)
    body = []
    for data, by in sorted(found.items()):
        texts = []
        for method in STUDENTS:
            means = [statistics.mean(values) for values in zip(*by.get(method, []), strict=True)]
            count = len(by.get(method, []))
            seeds = " (1)" if count == 1 else ""
            texts.append(" / ".join(f"{100 * mean:.1f}" for mean in means) + seeds or NOTHING)
        body.append([data, *texts])
    return markdown(["data, network", *STUDENTS.values()], body)
