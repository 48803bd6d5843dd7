"""The first page of a privacy report, in plain language, for who answers for data protection.

It says what was computed, on whose data, by whom and when, what ε means and whether it is strong,
what holds for a person with several examples, what may leave the house, and what is not covered.
All of it follows from the report; the datasheet below it has the details.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedsynth.privacy.figures import up
from fedsynth.privacy.report_schema import OF_EARLIER

BANDS: tuple[tuple[float, str, str], ...] = (
    (1.0, "ε up to 1", "strong"),
    (10.0, "ε above 1, up to 10", "reasonable"),
    (math.inf, "ε above 10", "weak, or none"),
)
BANDS_FROM = (
    "Ponomareva et al., How to DP-fy ML, Journal of Artificial Intelligence Research 77 (2023), "
    "section 5.2 (arXiv 2303.00654)"
)
MANY = 1e6
SITES = 12  # that are named
FILES = {
    "model.safetensors": "the trained model",
    "synthetic.safetensors": "the synthetic examples sent last",
    "artefacts.json": "what the server measured of the uploads",
    "metrics.jsonl": "figures of each round",
    "config.toml": "the settings",
}
"""Files of a run folder whose hashes a report holds, with what they are."""
NOT_IN_THE_GUARANTEE = {
    "tuning_and_selection": "choosing settings, methods or rounds by results on private data, "
    "which costs privacy that this report does not count",
    "public_data_and_pretraining": "what was declared public, such as weights trained before",
    "timing": "how long a computation takes, and so what its length tells of the data",
    "drop_outs": "whether a site answers at all",
    "simulation": "the folder `simulation_only`, which holds exact figures of the data",
}


def first_page(report: Mapping[str, Any]) -> list[str]:
    """The page as lines of Markdown; the report's texts are harmless ones."""
    return [
        "# Privacy report",
        "",
        *_in_short(report),
        *_section("What was computed, on whose data, by whom", _facts(report)),
        *(_meaning(report) if report["guarantee"] is not None else _no_meaning(report)),
        *_section("A person with several examples", _several(report)),
        *_section("What may leave the house", _handed_over(report)),
        *_section("What is not covered", _not_covered(report)),
    ]


def band(epsilon: float) -> str:
    """How strong a guarantee of this ε is called.

    >>> band(0.5), band(8.0), band(30.0)
    ('strong', 'reasonable', 'weak, or none')
    """
    return next(words for most, _, words in BANDS if epsilon <= most)


def odds_factor(epsilon: float) -> str:
    """e^ε, rounded up to three digits.

    >>> odds_factor(1.0), odds_factor(8.0), odds_factor(20.0)
    ('2.72', '2,990', 'more than 1,000,000')
    """
    if epsilon > math.log(MANY):
        return f"more than {MANY:,.0f}"
    factor = math.exp(epsilon)
    scale = 10.0 ** (2 - math.floor(math.log10(factor)))
    rounded = math.ceil(factor * scale * (1 - 1e-12)) / scale
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:.3g}"


def _in_short(report: Mapping[str, Any]) -> list[str]:
    promise = report["guarantee"]
    verdict = report["verdict"]
    if promise is None:
        return [f"> **In short: {verdict['text']}.** Nothing is promised to anybody.", ""]
    words = band(promise["epsilon"])
    return [
        f"> **In short: formal differential privacy, ε = {up(promise['epsilon'])} at δ = "
        f"{promise['delta']:g}, for {report['unit']['one']}.** By a common reading this guarantee "
        f"is **{words}**. It rests on the assumptions of the datasheet.",
        "",
        *[f"> **Warning.** {text}\n" for text in verdict["warnings"]],
    ]


def _facts(report: Mapping[str, Any]) -> list[str]:
    run = report["run"]
    rows = [
        ("run", run["id"] or "not stated: nothing was written"),
        ("began on", run["date"] or "not stated"),
        ("responsible", run["responsible"] or "not stated"),
        ("purpose", run["purpose"] or "not stated"),
        ("computed", _computed(report)),
        ("data", report["public_items"].get("data set", "not stated")),
        ("sites", _sites(report)),
        ("software", f"fedsynth {report['provenance'].get('fedsynth', '(version not stated)')}"),
    ]
    rows += [("not as planned", text) for text in report["deviations"]]
    return _table(("what", "which"), rows)


def _computed(report: Mapping[str, Any]) -> str:
    planned = report["budget"]["planned_rounds"] if report["budget"] else None
    done = "" if planned is None else f", {report['budget']['rounds_done']} of {planned} rounds"
    return f"a federation by method {report['method']}, mechanism {report['mechanism']}{done}"


def _sites(report: Mapping[str, Any]) -> str:
    clients = list(report["ledger_heads"])
    names = report["run"]["sites"]
    named = [f"{names[one]} ({one})" if one in names else one for one in clients]
    more = f" and {len(named) - SITES} more" if len(named) > SITES else ""
    if not named:
        return "not stated"
    return f"{len(named)}: {', '.join(named[:SITES])}{more}"


def _meaning(report: Mapping[str, Any]) -> list[str]:
    promise = report["guarantee"]
    epsilon = promise["epsilon"]
    delta = promise["delta"]
    replaced = "replace" in report["adjacency"]
    case = "was this example used, or another one" if replaced else "was this example used or not"
    if report["unit"]["several"] == "users":
        case = case.replace("example", "person's data").replace("another one", "another person's")
    right = 100 * promise["best_guess_at_most"]
    lines = [
        f"{_who(report)}, may ask: {case}?",
        "",
        f"- **Odds.** No answer shifts the odds by more than a factor of e^ε = "
        f"**{odds_factor(epsilon)}**, but for a failure whose probability is of the size of δ = "
        f"{delta:g}.",
        f"- **Guessing.** Who holds both cases for equally likely is right with at most "
        f"**{_percent_up(right)} %** (a coin: 50 %).",
        *_attacks(promise),
    ]
    own = band(epsilon)
    bands = [
        f"**{name}: {word} (this run)**" if word == own else f"{name}: {word}"
        for _, name, word in BANDS
    ]
    strong = [f"{'; '.join(bands)}.", "", f"So {BANDS_FROM}: a convention of practice, no law."]
    return [*_section("What ε means", lines), *_section("Is that strong?", strong)]


def _who(report: Mapping[str, Any]) -> str:
    """Against whom ε holds."""
    aggregation = report["trust_model"]["secure_aggregation"]
    if aggregation == "none":
        return "Whoever sees everything that was released, and knows everything else"
    if aggregation.startswith(OF_EARLIER):
        return (
            "Whoever sees everything that this run released, and of earlier ones no more than "
            "their reports say, and knows everything else"
        )
    return (
        "Whoever sees the released sums over all sites, and **no site's own upload**, and knows "
        "everything but the noise of the sites that it is counted of"
    )


def _percent_up(value: float) -> str:
    """Rounded up to two decimals, and never to a certainty that is none."""
    rounded = math.ceil(value * 100 * (1 - 1e-12)) / 100
    return "99.99…" if rounded >= 100 > value else f"{rounded:.2f}"


def _attacks(promise: Mapping[str, Any]) -> list[str]:
    found = [one for one in promise["attack_success"] if one["false_positive_rate"] == 0.01]
    return [
        "- **Searching.** A test that wrongly accuses 1 of 100 examples that were not used finds "
        f"at most **{_percent_up(100 * one['true_positive_rate_at_most'])} of 100** that were."
        for one in found
    ]


def _no_meaning(report: Mapping[str, Any]) -> list[str]:
    reasons = [f"- {reason}" for reason in report["verdict"]["reasons"]]
    return _section(
        "Why nothing is guaranteed", [*reasons, "", "Without a guarantee no figure would be true."]
    )


def _several(report: Mapping[str, Any]) -> list[str]:
    promise = report["guarantee"]
    if promise is None:
        return ["Nobody is protected, with one example or with several."]
    by_user = report["unit"]["several"] == "users"
    lines = [
        "All examples of one person at one site count as one: ε above is that person's, however "
        "many they have there."
        if by_user
        else "ε above is for **one** example. A person, such as a patient, with several images at "
        "a site is protected less:"
    ]
    one = "persons together (such as a family)" if by_user else "examples of one person at one site"
    for group in promise["groups"]:
        figure = "no figure can be stated; it is at least about "
        figure += f"{group['units']} times ε"
        if group["epsilon"] is not None:
            factor = odds_factor(group["epsilon"])
            figure = f"ε = {up(group['epsilon'])}, a factor of {factor} on the odds"
            figure += f" ({band(group['epsilon'])})"
        lines.append(f"- {group['units']} {one}: {figure}")
    lines.append(
        "- one person at several sites: each site's figure holds for what is there; for "
        "all together no figure is stated"
    )
    return [lines[0], "", *lines[1:]]


def _handed_over(report: Mapping[str, Any]) -> list[str]:
    files = report["files"]
    lines: list[str] = []
    if report["guarantee"] is None:
        lines += [
            "**No file is protected by this report.** The hashes say which files it is about.",
            "",
        ]
    if files:
        rows = [
            (name, FILES.get(name, "a file of the run"), f"`{digest}`")
            for name, digest in files.items()
        ]
        lines += _table(("file", "what it is", "SHA-256"), rows)
    else:
        lines.append("The report names no file: the run left none, or did not finish.")
    return [
        *lines,
        "",
        "Beside these, this report and the run's ledgers, which are its evidence. **Never** the "
        "folder `simulation_only`, ledgers' `private` folders, or keys. `fedsynth privacy verify` "
        "compares the files with these hashes.",
    ]


def _not_covered(report: Mapping[str, Any]) -> list[str]:
    unit = report["unit"]
    return [
        f"- {unit['does_not_protect']}",
        *(f"- {NOT_IN_THE_GUARANTEE[key]}" for key in report["not_covered"]),
        "- that the noise was really drawn: this report is bookkeeping, which `fedsynth privacy "
        "verify` repeats; it attests no computation",
        *_of_ledgers(report),
    ]


def _of_ledgers(report: Mapping[str, Any]) -> list[str]:
    if report["ledger_kept"]:
        return []
    return ["- other runs on the same data, earlier or later: no ledger was kept over runs"]


def _section(title: str, body: list[str]) -> list[str]:
    return [f"## {title}", "", *body, ""]


def _table(head: tuple[str, ...], body: list[Any]) -> list[str]:
    rows = [head, ("---",) * len(head), *body]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
