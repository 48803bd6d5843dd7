"""`fedsynth privacy audit`: a lower bound on ε beside the claimed one, for a run's settings."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsynth.cli import options as given
from fedsynth.cli.errors import OptionError
from fedsynth.cli.generated_options import takes_settings
from fedsynth.cli.own_code_options import with_own_code
from fedsynth.cli.paths import path_option
from fedsynth.cli.settings_options import Sections, from_preset, merged, read_config

if TYPE_CHECKING:
    from fedsynth.federation.audit.auditing import AuditResult
    from fedsynth.federation.terms.settings import RunSettings

AUDIT = "Audit"


def _audit(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=AUDIT)


@takes_settings(
    "run", "data.folder", "data.declaration", "data.dataset", "data.data_root", "partition",
    "model", "method", "privacy",
)  # fmt: skip
def audit(
    chosen: Sections,
    canaries: Annotated[
        int, _audit(help="Artificial records, each in one client's data by a fair coin.")
    ] = 1000,
    canaries_as: Annotated[
        str,
        _audit(
            help="vectors (of their own direction, put in just before the clip; the higher bound) "
            "or images (random pixels, through network, augmentation and all)."
        ),
    ] = "vectors",
    guesses: Annotated[
        int | None,
        _audit(help="Guesses, an even number, chosen before the run; default: two fifths."),
    ] = None,
    confidence: Annotated[
        float, _audit(help="That the bound is not above the true ε, of this one audit.")
    ] = 0.999,
    run: Annotated[
        Path | None,
        path_option(
            "Audit this run folder's settings, and put the result into its privacy report.",
            panel=AUDIT,
        ),
    ] = None,
    config: given.Config = None,
    as_json: given.AsJson = False,
) -> None:
    """Attack a run's own releases: a lower bound on ε beside the claim; exit code 1 if above.

    It takes the options of `fedsynth train` and makes that run on random
    images of the data set's shape, with real ledgers, masks, clipping and
    noise. It reads no record and charges no kept ledger. An audit can find
    a fault; it cannot prove privacy.

    Examples: `fedsynth privacy audit --method feddm --dp-sigma 3`,
    `fedsynth privacy audit --run runs/… --canaries 1000`.
    """
    chosen = {name: values for name, values in with_own_code(chosen).items() if values}
    numbers = {"canaries": canaries, "canaries_as": canaries_as, "confidence": confidence}
    if guesses is not None:
        numbers["guesses"] = guesses
    if run is None:
        found, command = _audit_options(config, chosen, numbers)
    else:
        found, command = _audit_folder(run, config, chosen, numbers)
    _show(found, command, as_json)


def _audit_options(
    config: Path | None, chosen: Sections, numbers: dict[str, Any]
) -> tuple[AuditResult, str]:
    """The audit of the given options, and the command as it was typed."""
    from fedsynth.federation.terms.resolve import resolve

    chosen = {"run": {}, "data": {}, **chosen}
    sections = merged(read_config(config), chosen, lambda text: print(text, file=sys.stderr))
    settings = resolve(sections)
    if settings.privacy is None:
        raise OptionError(
            "an audit tests a claim of differential privacy: give --dp-sigma or --dp-epsilon, or "
            "--run FOLDER of a private run"
        )
    changed = from_preset(sections)
    first = (
        f"preset of {settings.dataset}, where nothing else is given: {changed}" if changed else ""
    )
    return _audited(settings, numbers, first), shlex.join(["fedsynth", *sys.argv[1:]])


def _audit_folder(
    run: Path,
    config: Path | None,
    chosen: Sections,
    numbers: dict[str, Any],
) -> tuple[AuditResult, str]:
    """The audit of a finished run's settings, which goes into its report, and what repeats it."""
    from fedsynth.federation.audit.auditing import settings_of_run, write_audit
    from fedsynth.federation.terms.resolve import resolve

    if config is not None:
        raise OptionError("--run audits the run's own config.toml: leave --config out")
    sections = read_config(run / "config.toml")
    settings = resolve(sections)
    _same(settings, resolve(merged(sections, {"run": {}, **chosen})), run)
    found = _audited(settings_of_run(run, settings), numbers, f"settings of {run}")
    said = {"--run": run.resolve().name, "--canaries": found.canaries, "--guesses": found.guesses}
    said |= {"--canaries-as": numbers["canaries_as"], "--confidence": found.confidence}
    words = [str(word) for option in said.items() for word in option]
    command = shlex.join(["fedsynth", "privacy", "audit", *words])
    write_audit(run, settings, found.entry(command))
    return found, command


def _same(settings: RunSettings, wanted: RunSettings, run: Path) -> None:
    """Refuses options that say something else than the run's config."""
    ours = wanted.to_mapping()
    theirs = settings.to_mapping()
    differ = [
        f"{section}.{key}"
        for section in {**ours, **theirs}
        for key in {**ours.get(section, {}), **theirs.get(section, {})}
        if ours.get(section, {}).get(key) != theirs.get(section, {}).get(key)
    ]
    if differ:
        raise OptionError(
            f"the run in {run} has other settings ({', '.join(differ)}): --run audits its own; "
            "leave out these options, or --run"
        )


def _audited(settings: RunSettings, numbers: dict[str, Any], first: str) -> AuditResult:
    from fedsynth.cli.memory import keep_large_allocations
    from fedsynth.cli.progress import make_observer
    from fedsynth.federation.audit.auditing import audit_run

    keep_large_allocations()
    with make_observer(settings, first) as observer:
        return audit_run(settings, observer=observer, **numbers)


def _show(found: AuditResult, command: str, as_json: bool) -> None:
    from fedsynth.privacy.audit import CAVEAT, down
    from fedsynth.privacy.formatting import format_epsilon

    if as_json:
        facts = {**found.entry(command), "epsilon": found.epsilon, "fault": found.fault}
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        print(
            f"ε = {format_epsilon(found.epsilon)} claimed (δ = {found.delta:g}) · audited lower "
            f"bound {down(found.epsilon_lower_bound)} at {100 * found.confidence:g} % confidence from "
            f"{found.canaries} canaries, {found.guesses} guesses, {found.correct} right"
        )
        print(
            f"({CAVEAT}; the canaries are artificial and no record was read: no privacy was spent)"
        )
    if found.fault:
        print("the claim is refuted: the lower bound is above it", file=sys.stderr)
        raise typer.Exit(1)
