"""FedStats beside published results of private images, in README.md and docs/results.md."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping

from library.pages import markdown, sentence, table
from library.rows import NOTHING, STATISTICS_SEEDS, by_seed, lines, value_of

DOCUMENT = "docs/results.md"
DATASETS = {"MNIST": "mnist", "Fashion-MNIST": "fashion-mnist", "CIFAR-10": "cifar10"}
SEEDS = range(5)
STUDENTS, CLASSIFIERS = "fedstats_students", "fedstats_table"
# They end the keys of rows of `STUDENTS`. Older code made those of `NETWORK` without it.
NETWORK = " images=2000 student=convnet features=whitened-scattering"
WIDE = NETWORK.replace("convnet", "convnet-64")
DESKEWED = f"{WIDE} map=deskewed-scattering+random-process"
LONG = f"{WIDE} steps=20000"

# Published accuracies at ε = 1 / ε = 10 of central methods. FETA-Pro's are in its repository
# (2019ChenGong/Feta-Pro, commit fc161aa), the lower ones at ε = 1 in plot/plot_eps_changes.py. The
# higher ones are the best settings of plot/plot_heatmap.py. The others of images are in
# DPImageBench's README (commit 565f8d7).
BENCHMARK = "[DPImageBench](https://github.com/2019ChenGong/DPImageBench)"
FETA_PRO = "[FETA-Pro](https://arxiv.org/abs/2601.06368)"
DP_FETA = f"DP-FETA ({BENCHMARK})"
PUBLISHED_IMAGES = {
    FETA_PRO: ("97.1–97.3 / 98.6", "82.3–83.4 / 88.3", NOTHING),
    DP_FETA: ("95.6 / 98.1", "81.7 / 87.3", "35.1 / 43.3"),
    "DP-Kernel": ("94.0 / 93.6", "68.4 / 70.0", "26.4 / 25.1"),
    "PrivImage": ("94.0 / 97.8", "79.9 / 87.1", "74.5 / 78.4"),
}
PUBLISHED_CLASSIFIERS = {
    "[DP-RandP](https://arxiv.org/abs/2306.06076)": (NOTHING, NOTHING, f"72.3 / {NOTHING}"),
    "[scattering, linear](https://arxiv.org/abs/2011.11660)": (
        "98.1 (ε = 1.2)",
        "89.5 (ε = 2.7)",
        NOTHING,
    ),
}
PUBLIC = {"PrivImage": "ImageNet"}
OWN, AGGREGATED = "own", "aggregated"
NOISE = {OWN: "own", AGGREGATED: "secure"}
NARROW = dict.fromkeys(DATASETS.values(), NETWORK)
# The rows of width 64. Held-out training images chose deskewing, and long training on CIFAR-10 (by
# 12,000 steps with aggregated noise), after test images had shown less than expected.
BEST = {"mnist": DESKEWED, "fashion-mnist": WIDE, "cifar10": LONG}


def _measured(
    rows: str,
    data: str,
    value: str,
    factor: float = 100,
    networks: Mapping[str, str] = NARROW,
) -> list[str]:
    """Returns the cells of FedStats: means at ε = 1 / ε = 10.

    `networks` has the end of the rows' keys for each data set.
    """
    cells = []
    for dataset in DATASETS.values():
        if dataset not in networks:
            cells.append(NOTHING)
            continue
        keys = [f"{dataset} eps={e} {NOISE[data]}" for e in (1, 10)]
        texts = [_mean(rows, key, value, factor, networks[dataset]) for key in keys]
        cells.append(NOTHING if set(texts) == {NOTHING} else " / ".join(texts))
    return cells


def _mean(rows: str, key: str, value: str, factor: float, network: str) -> str:
    """Returns a mean over seeds, and their number in parentheses, if seeds are missing."""
    key += " alpha=0.5 K=10"
    seeds = SEEDS if rows == STUDENTS else STATISTICS_SEEDS
    runs = by_seed(rows, key + network, seeds)
    if not runs and network == NETWORK:
        runs = by_seed(rows, key, seeds)
    field = value.partition(".")[0]
    values = [factor * value_of(run, value) for run in runs.values() if field in run]
    if not values:
        return NOTHING
    missing = f" ({len(values)})" if len(values) < len(SEEDS) else ""
    return f"{statistics.mean(values):.1f}{missing}"


def _central(published: dict[str, tuple[str, str, str]]) -> list[list[str]]:
    rows = published.items()
    return [[name, "central", PUBLIC.get(name, NOTHING), *cells] for name, cells in rows]


@table("private-images")
def _private_images() -> str:
    images, classifiers = [], []
    for data in NOISE:
        images.append(["FedStats", data, NOTHING, *_measured(STUDENTS, data, "student_taught")])
        cells = _measured(CLASSIFIERS, data, "accuracy")
        classifiers.append(["FedStats", data, NOTHING, *cells])
    for data in NOISE:
        cells = _measured(STUDENTS, data, "student_taught", networks=BEST)
        images.append(["FedStats, width 64", data, NOTHING, *cells])
        cells = _measured(STUDENTS, data, "accuracy", networks={"mnist": DESKEWED})
        classifiers.append(["FedStats, deskewed", data, NOTHING, *cells])
    images, classifiers = (
        [row for row in rows if set(row[3:]) != {NOTHING}] for rows in (images, classifiers)
    )
    for data in NOISE:
        hard = _measured(STUDENTS, data, "student_hard")
        images.append(["FedStats, hard labels", data, NOTHING, *hard])
    body = [
        ["*networks trained on released images*", *[""] * 5],
        *images,
        *_central(PUBLISHED_IMAGES),
        ["*classifiers*", *[""] * 5],
        *classifiers,
        *_central(PUBLISHED_CLASSIFIERS),
    ]
    return markdown(["method", "noise", "public data", *DATASETS], body)


@sentence(DOCUMENT, "the others' recipe reaches {:.1f} on MNIST and {:.1f} on CIFAR-10.")
def _wide_alike() -> list[float]:
    """Means of width 64 with own noise at ε = 1, without deskewing and long training."""
    keys = [f"{dataset} eps=1 own alpha=0.5 K=10{WIDE}" for dataset in ("mnist", "cifar10")]
    rows = [by_seed(STUDENTS, key, SEEDS).values() for key in keys]
    return [statistics.mean(100 * row["student_taught"] for row in runs) for runs in rows]


@table("private-images-short")
def _private_images_short() -> str:
    body = [["FedStats", data, *_measured(STUDENTS, data, "student_taught")] for data in NOISE]
    for data in NOISE:
        cells = _measured(STUDENTS, data, "student_taught", networks=BEST)
        body.append(["FedStats, width 64", data, *cells])
    body += [[name, "central", *PUBLISHED_IMAGES[name]] for name in (FETA_PRO, DP_FETA)]
    return markdown(["", "noise", *DATASETS], body)


@table("private-images-fid")
def _fid() -> str:
    titles = {"released": "released images", "real": "as many training images"}
    body = []
    for images, title in titles.items():
        body.append([title, *_measured(STUDENTS, OWN, f"fid.{images}", 1)])
    return markdown(["FID", *DATASETS], body)


@sentence(
    DOCUMENT,
    "CIFAR-10's classifier reaches {:.1f} % with own noise and {:.1f} % with aggregated noise. "
    "With the noise divided by 1.33, it reaches {:.1f} and {:.1f} %, and without noise {:.1f} %. "
    "Other steps or budget shares gain at most {:.1f} points, and the true covariance {:.1f}",
)
def _classifier_trials() -> list[float]:
    """Means over seeds on held-out images (benchmarks/grids/classifier_trials.py)."""
    values = defaultdict(list)
    for row in lines("classifier_trials"):
        values[row["key"].rpartition(" seed=")[0]].append(100 * row["accuracy"])
    means = {key: statistics.mean(accuracies) for key, accuracies in values.items()}
    default = {noise: means[f"none eps=1 {noise}"] for noise in NOISE.values()}
    less = [means[f"noise / 1.33 eps=1 {noise}"] for noise in NOISE.values()]
    true_gains, gains = [], []
    for key, mean in means.items():
        gain = mean - default[key.rpartition(" ")[2]]
        if "true" in key:
            true_gains.append(gain)
        elif not key.startswith(("no", "product", "dictionary")):
            gains.append(gain)
    return [*default.values(), *less, means["no noise eps=1 own"], max(gains), max(true_gains)]
