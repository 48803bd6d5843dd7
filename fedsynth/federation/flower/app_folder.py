"""A Flower app folder of a run: what `flwr run` takes, and `fedsynth deploy init` writes.

The app is the package's own; the folder names it and holds the run's proposal. A data owner's node
needs none of it (`fedsynth client` answers with what is installed there).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsynth.config_file import to_toml
from fedsynth.errors import OutputError
from fedsynth.federation.nodes.proposal import Proposal
from fedsynth.version import __version__

PACKAGE = "fedsynth_run"
APPS = ("server", "client")
DEFAULTS: Mapping[str, Any] = {
    "output": "runs",
    "resume": "",
    "numbers": "{}",
    "token": "run",
    "join": 600.0,
    "answer": 3600.0,
    "home": "",
}
"""A run's configuration besides its proposal; `server_app` and `client_app` read it."""


def write_app(folder: Path, proposal: Proposal, options: Mapping[str, Any]) -> None:
    """Writes the folder.

    Args:
        folder: made if it is missing.
        proposal: the run.
        options: what differs from `DEFAULTS`.

    Raises:
        OutputError: it cannot be written.
    """
    package = folder / PACKAGE
    try:
        package.mkdir(parents=True, exist_ok=True)
        (folder / "pyproject.toml").write_text(_project(proposal, options), encoding="utf-8")
        (package / "__init__.py").write_text('"""A run of fedsynth."""\n', encoding="utf-8")
        for name in APPS:
            module = f"fedsynth.federation.flower.{name}_app"
            text = f'from {module} import app\n\n__all__ = ["app"]\n'  # Flower looks for a name
            (package / f"{name}.py").write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}") from None


def _project(proposal: Proposal, options: Mapping[str, Any]) -> str:
    return to_toml(
        {
            "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
            "project": {
                "name": PACKAGE.replace("_", "-"),
                "version": "1.0.0",
                "description": f"A run of fedsynth {__version__}",
                "license": "Apache-2.0",
                "dependencies": [f"fedsynth[flower]=={__version__}"],
            },
            "tool.hatch.build.targets.wheel": {"packages": [PACKAGE]},
            "tool.flwr.app": {"publisher": "fedsynth"},
            "tool.flwr.app.components": {f"{name}app": f"{PACKAGE}.{name}:app" for name in APPS},
            "tool.flwr.app.config": {
                "proposal": json.dumps(proposal.to_json()),
                **DEFAULTS,
                **options,
            },
        }
    )
