"""docs/results.md, and the readings of FedDM's paper in docs/decisions/condensation.md."""

from __future__ import annotations

import statistics
from functools import partial
from itertools import product

from grids.compare import PERSONAL
from library.pages import markdown, pivot, sentence, table
from library.rows import (
    NOTHING,
    by_key,
    by_seed,
    differences,
    each,
    paired,
    percents,
    spread,
    spread_of,
)

DOCUMENT = "docs/results.md"
THREE, FIVE = range(3), range(5)  # seeds


@table("fashion")
def _fashion() -> str:
    accuracy = partial(percents, "fashion_table", seeds=THREE)
    ahead = partial(differences, "fashion_table", "feddm", seeds=THREE)
    floats = sorted(row["floats"] for row in by_seed("fashion_table", "feddm", THREE).values())
    network = by_seed("fashion_table", "fedavg", THREE)[0]["floats"]
    rows = [
        ("FedDM", accuracy("feddm"), f"{floats[0]:,} – {floats[-1]:,}"),
        ("REAL, FedDM's start images", accuracy("real"), "as FedDM"),
        ("FedAvg, lr 0.01", accuracy("fedavg"), f"{network:,}"),
    ]
    body = [[title, spread(values, 3), sent] for title, values, sent in rows]
    body.append(["FedDM − REAL", paired(ahead("real"), 3), ""])
    body.append(["FedDM − FedAvg", paired(ahead("fedavg"), 3), ""])
    return markdown(["method", "accuracy", "floats uploaded per round"], body)


@table("feddm-readings")
def _readings() -> str:
    names = dict.fromkeys(key.rsplit(" seed=")[0] for key in by_key("feddm_readings"))
    body = []
    for name in names:
        ahead = differences("feddm_readings", name, "defaults", THREE)
        accuracy = percents("feddm_readings", name, THREE)
        body.append([name, each(accuracy), "" if name == "defaults" else each(ahead, "+.2f")])
    return markdown(["variant", "held-out accuracy, each seed", "− defaults"], body)


@sentence(
    "docs/decisions/condensation.md",
    "by {:+.1f} ± {:.1f} points on MNIST at Dir(0.1), {:+.1f} ± {:.1f} at Dir(0.01) and "
    "{:+.1f} ± {:.1f} on Fashion-MNIST at Dir(0.1).",
)
def _pixels() -> list[float]:
    """Means and standard deviations of paired differences: 8-bit pixels less floats."""
    numbers = []
    for data in ("mnist dirichlet(0.1)", "mnist dirichlet(0.01)", "fashion-mnist dirichlet(0.1)"):
        gains = differences("feddm_pixels", f"{data} uint8", f"{data} float32", FIVE)
        numbers += [statistics.mean(gains), statistics.stdev(gains)]
    return numbers


@table("fedaf")
def _fedaf() -> str:
    body = []
    for name in ("FedDM", "FedAF", "FedAF, τ = 4", "without CDC", "without LGKM"):
        cells = ["FedAF (γ = 0.9, τ = 1)" if name == "FedAF" else name]
        for alpha in ("0.1", "0.02"):
            key, less = f"{name} alpha={alpha}", f"FedDM alpha={alpha}"
            ahead = [] if key == less else differences("fedaf_table", key, less, FIVE)
            cells += [spread_of("fedaf_table", key, FIVE), paired(ahead, 5)]
        body.append(cells)
    return markdown(["", "Dir(0.1)", "− FedDM", "Dir(0.02)", "− FedDM"], body)


@table("fedaf-full-size")
def _fedaf_full_size() -> str:
    body = []
    for key, row in by_key("fedaf_full_size").items():
        name = key.removesuffix(" seed=0").replace("without", "FedAF without")
        accuracies = [f"{100 * accuracy:.1f}" for accuracy in row["curve"]]
        body.append([name, *accuracies, *[NOTHING] * (6 - len(accuracies))])
    return markdown(["round", *"123456"], body)


# Changes, with the rows of FedDM and FedAF. FedAF's temperature is 4, unless a change states it, or
# LGKM, which alone uses it, is left out.
FEDAF_CHANGES = {
    "none (image rate 1)": ("feddm, rate 1.0", "fedaf, temperature 4"),
    "no condensation: REAL": ("real", None),
    "image rate 0.2": ("feddm, rate 0.2", "fedaf, rate 0.2, temperature 4"),
    "`image_dtype=uint8`": ("feddm, uint8 pixels", None),
    "running statistics": ("feddm, running statistics", "fedaf, temperature 4, running statistics"),
    "restarts": ("feddm, restarts", "fedaf, temperature 4, restarts"),
    "fresh networks": (None, "fedaf, temperature 4, fresh networks in round 1"),
    "knowledge from round 2": (None, "fedaf, temperature 4, knowledge from round 2"),
    "no collaborative term": (None, "fedaf, temperature 4, no collaborative term"),
    "no LGKM": (None, "fedaf, no knowledge matching"),
    "τ = 1": (None, "fedaf, rate 1.0"),
}


@table("fedaf-held-out")
def _fedaf_held_out() -> str:
    """The suspects for FedAF's order: the best accuracy on held-out images of three rounds."""
    body = []
    for change, names in FEDAF_CHANGES.items():
        cells = []
        for name in names:
            runs = {} if name is None else by_seed("condensation", name, THREE)
            best = [100 * max(row["curve"]) for row in runs.values()]
            cells.append(spread(best, 3, 1) if best else NOTHING)
        body.append([change, *cells])
    return markdown(["change", "FedDM", "FedAF"], body)


@sentence(
    DOCUMENT,
    "averages of ten give {:.1f} and {:.1f} %, and single images, the default, {:.1f} and {:.1f} %",
)
def _start_images() -> list[float]:
    keys = [f"round 1: FedAF{start}, Dir(0.02)" for start in ("", ", from single images")]
    return [accuracy for key in keys for accuracy in percents("fedaf_readings", key, range(2))]


ONE_SHOT = {
    "FedAvg": "clients",
    "FedDF": "FedDF",
    "DENSE": "DENSE",
    "FedHydra": "FedHydra",
    "FedHydra, AE": "FedHydra (AE)",
}


def _one_shot(corner: str, dataset: str) -> str:
    def cell(place: str, method: str) -> str:
        return spread_of("one_shot_table", f"{dataset}, {place}, {method},", FIVE)

    places = ["Dir(0.5)", "Dir(0.1)", "2c/c"]
    if dataset == "fashion-mnist":
        places.append("heterogeneous")
    return pivot(corner, dict(zip(places, places, strict=True)), ONE_SHOT, cell)


table("one-shot-fashion-mnist")(partial(_one_shot, "Fashion-MNIST", "fashion-mnist"))
table("one-shot-mnist")(partial(_one_shot, "MNIST", "mnist"))


@table("one-shot-variants")
def _one_shot_variants() -> str:
    default = "fashion-mnist, Dir(0.1), FedHydra,"
    body = [["default", spread_of("one_shot_table", default, FIVE), ""]]
    for name in ("raw Ū_c", "Ū_r alone"):
        key = default.replace("FedHydra", f"FedHydra ({name})")
        ahead = differences("one_shot_table", key, default, FIVE)
        body.append([name, spread_of("one_shot_table", key, FIVE), paired(ahead, 5)])
    return markdown(["FedHydra", "accuracy", "− default"], body)


@table("compare")
def _compare() -> str:
    """The methods with a global model, the best first."""
    names = dict.fromkeys(key.rsplit(" seed=")[0] for key in by_key("compare"))
    accuracy = {name: percents("compare", name, FIVE) for name in names if name not in PERSONAL}
    means = {name: statistics.mean(values) for name, values in accuracy.items() if values}
    body = []
    for name in sorted(means, key=lambda name: -means[name]):
        sent = statistics.mean(row["bytes"] for row in by_seed("compare", name, FIVE).values())
        body.append([name, spread(accuracy[name], 0), f"{sent / 1e6:.2f}"])
    return markdown(["method", "accuracy", "MB"], body)


@sentence(DOCUMENT, "an AMP of {:.2f} ± {:.2f} (SOLO) and {:.2f} ± {:.2f} (FedBN)")
def _personal() -> list[float]:
    amps = [percents("compare", name, FIVE, "local.amp") for name in ("solo", "fedbn")]
    return [of(amp) for amp in amps for of in (statistics.mean, statistics.stdev)]


MEDICAL = {
    "FedStats": "fedstats",
    "FedSum": "fedsum",
    "FedDM, `features`": "feddm",
    "DP-FedAvg, linear on features": "fedavg",
}
MEDICAL_IMAGES = {
    "FedStats, with images": "classifier",
    "networks on its images": "taught",
    "networks, stored labels": "stored",
}
SETS = {"chest": "pneumonia", "brain": "brain-mri"}
BUDGETS = {
    f"{title}, ε = {epsilon}": (dataset, epsilon)
    for (title, dataset), epsilon in product(SETS.items(), "138")
}


def _medical(rows: str, key: str, prefix: str = "") -> str:
    """Returns an AUROC and a mean balanced accuracy."""
    auroc, balanced = (
        percents(rows, key, FIVE, f"{prefix}{name}") for name in ("auroc", "balanced_accuracy")
    )
    if not auroc:
        return NOTHING
    return f"{spread(auroc, 5, 1)} / {statistics.mean(balanced):.1f}"


@table("medical")
def _medical_table() -> str:
    def measured(method: str, budget: tuple[str, str]) -> str:
        return _medical("medical", f"{budget[0]} {method} eps={budget[1]}")

    def of_images(network: str, budget: tuple[str, str]) -> str:
        key = f"{budget[0]} eps={budget[1]} pictures=auto each=1"
        return _medical("medical_students", key, f"{network}.")

    table_of_methods = pivot("AUROC / balanced accuracy", MEDICAL, BUDGETS, measured)
    released = pivot("", MEDICAL_IMAGES, BUDGETS, of_images)
    return "\n".join([table_of_methods, *released.splitlines()[2:]])
