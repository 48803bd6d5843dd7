"""The commands `fedsynth privacy …` that plan a privacy budget or change a ledger.

The commands for reports, signatures and audits are in `report_commands`.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsynth.cli import options as given
from fedsynth.cli.application import Application, OptionError, note, say
from fedsynth.cli.options import KEYS, path_argument, takes_settings
from fedsynth.cli.report_commands import audit, report, sign, verify
from fedsynth.cli.settings_options import Sections, with_own_code

if TYPE_CHECKING:
    from fedsynth.federation.costs import MechanismCosts

NAMES = {f"privacy.{key}": f"--{key.replace('_', '-')}" for key in KEYS["privacy"].split()} | {
    "privacy.noise_multiplier": "--sigma",
    "privacy.nominal_size": "--n",
}
"""The names of the options of `plan`."""
SIGNAL = (
    "S/N is the signal-to-noise ratio of the sum over all clients in the best case. It is lower on\n"
    "real data (docs/fedstats.md)"
)

privacy_app = Application(
    help="Plan a privacy budget, or show, verify, sign and audit a run's privacy report.",
    no_args_is_help=True,
)
for command in (report, verify, sign, audit):
    privacy_app.command()(command)


@privacy_app.command()
@takes_settings(
    "run.method", "run.rounds", "run.participation", "data.dataset", "partition.clients",
    "partition.subset", "partition.local_test", "privacy.epsilon", "privacy.noise_multiplier",
    "privacy.delta", "privacy.max_records", "privacy.mechanism", "privacy.sample_rate",
    "privacy.nominal_size", "privacy.adjacency", "privacy.unit", names=NAMES,
)  # fmt: skip
def plan(
    chosen: Sections,
    as_json: given.AsJson = False,
) -> None:
    """Show the noise that a privacy budget requires, or the ε that a σ costs.

    The plan uses only public numbers and reads no data. For fedstats, it also shows the
    signal-to-noise ratio that each release can have.

    Examples: `fedsynth privacy plan --epsilon 8 --rounds 5`, `fedsynth privacy plan --sigma 3
    --method fedavg --n 6000`.
    """
    from fedsynth.federation.costs import costs_by_mechanism

    chosen["data"].setdefault("dataset", "mnist")
    sections = with_own_code(chosen)
    if not sections["privacy"].keys() & {"epsilon", "noise_multiplier"}:
        raise OptionError("either --epsilon (to compute σ) or --sigma (to compute ε) is required")
    plans = costs_by_mechanism(sections)
    if as_json:
        print(json.dumps([vars(p) | {"epsilon": dict(p.epsilon)} for p in plans], indent=2))
    else:
        print_costs(plans)
        _warn(plans)


def _warn(plans: list[MechanismCosts]) -> None:
    """Prints a note for each plan that exceeds its budget, and a warning if ε is large."""
    for p in plans:
        rounds, limit = list(p.epsilon), (p.target or math.inf) * (1 + 1e-9)
        # ε never decreases, and each value takes a composition: a binary search
        first = bisect_left(rounds, True, key=lambda number: p.epsilon[number] > limit)
        if first < len(rounds):
            note(f"with this σ, {p.mechanism} exceeds ε = {p.target:g} in round {rounds[first]}")
    if max(p.epsilon[max(p.epsilon)] for p in plans) > 10:
        say("warning: an ε above 10 is a weak guarantee: use, for example, --epsilon 8")


def print_costs(plans: list[MechanismCosts]) -> None:
    """Prints the releases and the noise of each mechanism as a table, then ε after each round."""
    from rich.console import Console
    from rich.table import Table

    from fedsynth.privacy.report.formatting import format_epsilon

    console = Console()
    table = Table(title=f"plan, for one example of one client, δ = {plans[0].delta:g}")
    columns = ["mechanism", "ε", "releases", "σ", "clip", "q", "a round"]
    has_signal = any("signal_to_noise" in row for p in plans for row in p.rows)
    if has_signal:
        columns.append("S/N")
    for name in columns:
        table.add_column(name, no_wrap=name != "releases")  # numbers are not truncated
    for p in plans:
        for row in p.rows:
            cells = [p.mechanism, format_epsilon(p.epsilon[max(p.epsilon)]), row["quantity"]]
            for key in ("noise_multiplier", "clip", "sample_rate", "releases", "signal_to_noise"):
                if key in row:
                    cells.append(f"{row[key]:.10g}" if key == "releases" else f"{row[key]:.4g}")
            table.add_row(*cells)
    console.print(table)
    if has_signal:
        print(SIGNAL)
    by_round = Table("round", *(p.mechanism for p in plans), title="ε after round")
    rounds = sorted(plans[0].epsilon)
    for number in sorted({*rounds[:: max(1, len(rounds) // 10)], rounds[-1]}):
        by_round.add_row(str(number), *(format_epsilon(p.epsilon[number]) for p in plans))
    console.print(by_round)


@privacy_app.command(name="carry-over")
def carry_over(
    folder: Annotated[Path, path_argument("The ledger folder (--dp-ledger).", metavar="FOLDER")],
    client: Annotated[str, typer.Argument(help="The name of the client.")],
) -> None:
    """Allow a client to use changed data with its existing ledger.

    The next run may then use other records. The privacy budget that is already spent counts for all
    records of the client, also for new ones.
    """
    from fedsynth.privacy.ledger.folder import LedgerFolder

    rows = LedgerFolder(folder).carry_over(client)
    entries = f"The entries of the ledger ({rows}) count for all of them"
    print(f"the next run may use other records of {client}. {entries}")


@privacy_app.command()
def repair(
    ledger: Annotated[Path, path_argument("The ledger file, NAME.jsonl.", metavar="LEDGER")],
) -> None:
    """Repair a ledger whose last line is incomplete, for example after a power cut or a full disk.

    The incomplete line is removed, and a copy of the original file is kept. No release belongs to
    an incomplete line, because noise is drawn only after the whole line is on the disk. If the file
    was cut off in another way, for example by an interrupted copy, restore it from a backup
    instead.
    """
    from fedsynth.privacy.ledger.lines import repair_ledger

    result = repair_ledger(ledger)
    if result is None:
        print(f"nothing was changed, because {ledger} has no incomplete line")
        return
    outcome = "the line was removed, because nothing was released for it"
    if result.counts:
        outcome = "the line is complete and counts. Only its line break was missing and was added"
    print(f"last line: {result.line!r}\n  {outcome}")
    print(f"a copy of the ledger before the repair is in {result.copy}")
