"""The privacy report for people: Markdown, and the short table for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedsynth.privacy.figures import printable, up
from fedsynth.privacy.first_page import first_page

__all__ = ["printable", "render_markdown", "rounds_text", "summary_rows", "up"]

DATASHEET = "Datasheet"
"""The heading under which the details stand."""


def _harmless(value: Any) -> Any:
    """A report with every text printable, and `<` escaped, which in Markdown would begin HTML."""
    if isinstance(value, str):
        return printable(value).replace("<", "\\<")
    if isinstance(value, Mapping):
        return {_harmless(key): _harmless(inner) for key, inner in value.items()}
    return [_harmless(inner) for inner in value] if isinstance(value, list | tuple) else value


def rounds_text(rounds: Sequence[int]) -> str:
    """[0, 1, 2, 5, 5] → "0–2, 5 (twice or more)"."""
    parts: list[str] = []
    numbers = sorted(set(rounds))
    start = 0
    for i, number in enumerate(numbers):
        if i + 1 < len(numbers) and numbers[i + 1] == number + 1:
            continue
        parts.append(f"{numbers[start]}" if start == i else f"{numbers[start]}–{number}")
        start = i + 1
    again = sorted({n for n in numbers if rounds.count(n) > 1})
    return ", ".join(parts) + (
        f"; charged more than once: {', '.join(map(str, again))}" if again else ""
    )


def _distinct(values: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(values)) or "—"


def _sampling(row: Mapping[str, Any]) -> str:
    if row.get("unaccounted"):
        return "not as the mechanism needs it: unaccounted"
    return (
        "all data at every step"
        if row["sampler"] == "full"
        else f"Poisson, q = {row['sample_rate']:g}"
    )


def summary_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The short table on the terminal: ε first, then δ, and what they rest on; without a guarantee,
    the reasons."""
    verdict = report["verdict"]
    promise = report["guarantee"]
    ledger = report["ledger"]
    table = [("verdict", verdict["text"])] if promise is None else []
    table += [("why", reason) for reason in verdict["reasons"]]
    if promise is not None:
        table += [
            ("ε (worst client)", up(promise["epsilon"])),
            ("δ", f"{promise['delta']:g}"),
            ("verdict", verdict["text"]),
        ]
    table += [
        ("mechanism", report["mechanism"]),
        ("protects", report["unit"]["protects"]),
        ("adjacency", report["adjacency"]),
        ("sampling", _distinct(map(_sampling, ledger))),
        ("noise multiplier σ", _sigmas(ledger)),
        ("clip", _distinct(f"{row['sensitivity']:g} ({row['clipped']})" for row in ledger)),
        ("steps a round", _distinct(str(row["steps"]) for row in ledger)),
    ]
    if promise is not None:
        clients = promise["clients"]
        cap = report["budget"]["epsilon_cap"]
        table += [
            (
                "ε over clients",
                f"min {up(clients['epsilon_min'])}, median {up(clients['epsilon_median'])}",
            ),
            (
                "budget",
                "no cap"
                if cap is None
                else f"cap {cap:g}, left {report['budget']['epsilon_left']:.4g}",
            ),
        ]
    return [*table, *(("warning", text) for text in verdict["warnings"])]


def _sigmas(ledger: Sequence[Mapping[str, Any]]) -> str:
    """σ of the releases; where they have several, what each is of."""
    quantities: dict[str, list[str]] = {}
    for row in ledger:
        of = quantities.setdefault(f"{row['noise_multiplier']:.4g}", [])
        if row["quantity"] not in of:
            of.append(row["quantity"])
    if len(quantities) < 2:
        return "".join(quantities)
    return "; ".join(f"{sigma} ({', '.join(of)})" for sigma, of in quantities.items())


def render_markdown(report: Mapping[str, Any]) -> str:
    """The whole report as Markdown: the first page, then the datasheet, ε before everything else;
    whatever its texts say, they stay text.
    """
    report = _harmless(report)
    lines = [*first_page(report), f"# {DATASHEET}", ""]
    lines += _headline(report)
    lines += _promise(report)
    unit = report["unit"]
    trust = report["trust_model"]
    lines += _section("Who is protected", [*_bullets(unit), f"- adjacency: {report['adjacency']}"])
    lines += _section("Trust model", _bullets(trust))
    lines += _section(
        "Public items (fixed before the data are read)", _bullets(report["public_items"])
    )
    scope = [[s["access"], s["status"], s["note"]] for s in report["scope"]]
    lines += _section("Every access to private data", _table(["access", "status", "note"], scope))
    lines += _section("Ledger", [*_ledger(report["ledger"]), "", _heads(report["ledger_heads"])])
    lines += _section("Accountant", _accountant(report["accountant"]))
    if report["budget"] is not None:
        lines += _section("Budget", _bullets(report["budget"]))
    if report["published"]:
        keys = list(report["published"][0])
        figures = [[row.get(key, "") for key in keys] for row in report["published"]]
        lines += _section("Published figures beside ours", _table(keys, figures))
    lines += _section("Randomness", [report["randomness"]])
    lines += _section("Deviations", [f"- {text}" for text in report["deviations"]])
    lines += _section("Not covered", _bullets(report["not_covered"]))
    lines += _section("Audit", _audit(report))
    lines += _section(
        "Provenance",
        [*_bullets(report["provenance"]), f"- report schema: {report['schema_version']}"],
    )
    return "\n".join(lines).rstrip() + "\n"


def _headline(report: Mapping[str, Any]) -> list[str]:
    verdict = report["verdict"]
    promise = report["guarantee"]
    lines = [f"**Verdict: {verdict['text']}.**", ""]
    if promise is not None:
        lines = [
            f"**ε = {up(promise['epsilon'])} at δ = {promise['delta']:g}** (worst client), for "
            f"{report['unit']['one']}.",
            "",
            *lines,
        ]
    lines += [f"> **Warning.** {text}\n" for text in verdict["warnings"]]
    if verdict["reasons"]:
        lines += ["Why:", "", *(f"- {reason}" for reason in verdict["reasons"]), ""]
        lines += ["No privacy loss figure is given, since none would be true.", ""]
    if verdict["assumptions"]:
        lines += ["It holds if:", "", *(f"- {text}" for text in verdict["assumptions"]), ""]
    return [*lines, f"Method: {report['method']}; mechanism: {report['mechanism']}.", ""]


def _promise(report: Mapping[str, Any]) -> list[str]:
    promise = report["guarantee"]
    if promise is None:
        return []
    clients = promise["clients"]
    spread = (
        f"Over {clients['number']} clients: smallest ε {up(clients['epsilon_min'])}, median "
        f"{up(clients['epsilon_median'])}, largest {up(clients['epsilon_max'])} (client "
        f"{promise['worst_client']})."
    )
    attacks = [
        f"- at a false-positive rate of {100 * a['false_positive_rate']:g} %, no membership test "
        "finds more than "
        f"{up(100 * a['true_positive_rate_at_most'], 3)} % of the members"
        for a in promise["attack_success"]
    ]
    groups = [
        f"- {g['units']} {report['unit']['several']} together: "
        + (
            g["note"]
            if g["epsilon"] is None
            else f"ε = {up(g['epsilon'])} at the same δ ({g['note']})"
        )
        for g in promise["groups"]
    ]
    curve = [[f"{p['delta']:g}", up(p["epsilon"])] for p in promise["epsilon_of_delta"]]
    rounds = [[str(p["round"]), up(p["epsilon"])] for p in promise["epsilon_by_round_worst_client"]]
    return [
        *_section("The guarantee", [spread]),
        *_section("What an attacker can gain (worst client)", attacks),
        *_section(f"Groups of {report['unit']['several']}", groups),
        *_section("ε for other δ (worst client)", _table(["δ", "ε"], curve)),
        *_section(
            "ε after each round (worst client)",
            [
                *_table(["round", "ε"], rounds),
                "",
                "If the ledger holds several runs, equal round numbers count as one.",
            ],
        ),
    ]


def _ledger(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    head = [
        "rounds",
        "clients",
        "release",
        "mechanism",
        "clipped",
        "sensitivity",
        "σ relative",
        "σ absolute",
        "sampling",
        "steps a round",
        "dimension",
        "unaccounted",
    ]
    body = []
    for row in rows:
        who = (
            ", ".join(row["clients"])
            if len(row["clients"]) <= 3
            else f"{len(row['clients'])} clients"
        )
        body.append(
            [
                rounds_text(row["rounds"]),
                who,
                row["quantity"],
                row["mechanism"],
                row["clipped"],
                f"{row['sensitivity']:g}",
                f"{row['noise_multiplier']:.4g}",
                f"{row['noise_standard_deviation']:.4g}",
                _sampling(row),
                str(row["steps"]),
                str(row["dimension"]),
                row["unaccounted"] or "",
            ]
        )
    return _table(head, body)


def _heads(heads: Mapping[str, Mapping[str, Any]]) -> str:
    rows = sum(head["rows"] for head in heads.values())
    before = sum(head["rows_before"] for head in heads.values())
    return (
        f"Ledgers: {len(heads)}, with {rows} rows, {before} of them from before this run; "
        "privacy_report.json has each one's chain hash, "
        "which names its rows."
    )


def _accountant(facts: Mapping[str, Any]) -> list[str]:
    plain = {key: value for key, value in facts.items() if key != "cross_check"}
    if plain["discretisation_interval"] is None:
        plain["discretisation_interval"] = "none"
    lines = _bullets(plain)
    if "cross_check" in facts:
        check = facts["cross_check"]
        figure = "no finite figure" if check["epsilon"] is None else f"ε ≤ {up(check['epsilon'])}"
        lines.append(f"- cross-check: {check['name']}: {figure} ({check['note']})")
    return lines


def _audit(report: Mapping[str, Any]) -> list[str]:
    """What a canary audit found (`fedsynth privacy audit --run`), or that none was made."""
    found = report["audit"]
    promise = report["guarantee"]
    if isinstance(found, str):
        return [found]
    lines = [found["text"], "", f"- command: {found['command']}"]
    if promise is not None and found["epsilon_lower_bound"] > promise["epsilon"]:
        lines = ["**The audit refutes this report's ε.**", "", *lines]
    return lines


def _section(title: str, body: list[str]) -> list[str]:
    return [f"## {title}", "", *(body or ["none"]), ""]


def _bullets(items: Mapping[str, Any]) -> list[str]:
    return [f"- {key.replace('_', ' ')}: {_plain(value)}" for key, value in items.items()]


def _plain(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    if not body:
        return []
    rows = [list(head), ["---"] * len(head), *body]
    return [
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
        for row in rows
    ]
