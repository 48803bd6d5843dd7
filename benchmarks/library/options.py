"""Options that the scripts share."""

from __future__ import annotations

import argparse
from pathlib import Path

from library import RESULTS

ONE_ROUND = "one round and few steps, to see that it runs"


def table_options(description: str | None, quick: str = ONE_ROUND) -> argparse.ArgumentParser:
    """Those of a script that makes a table: --quick, --json and --device.

    Args:
        description: the script's docstring.
        quick: what --quick does.
    """
    parser = plain_options(description)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--device", default="auto")
    return parser


def plain_options(description: str | None) -> argparse.ArgumentParser:
    """None yet; the description is shown as it stands."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def rows_file(name: str, options: argparse.Namespace) -> Path:
    """Where a script's rows stand; those of --quick apart."""
    return RESULTS / f"{name}{'_quick' if options.quick else ''}.jsonl"
