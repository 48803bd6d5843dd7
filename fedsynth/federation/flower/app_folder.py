"""A Flower app folder of a run: what `flwr run` takes, and `fedsynth deploy init` writes.

The app is the package's own; the folder names it and holds the run's settings. A data owner's node
needs none of it (`fedsynth client` answers with what is installed there).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsynth.config_file import to_toml
from fedsynth.errors import OutputError
from fedsynth.federation.nodes.proposal import Proposal, own_name, shared_sections
from fedsynth.version import __version__

SERVER = "fedsynth.federation.flower.server_app:app"
CLIENT = "fedsynth.federation.flower.client_app:app"
NAME = "fedsynth-run"


def write_app(folder: Path, proposal: Proposal, options: Mapping[str, Any]) -> None:
    """Writes the folder.

    Args:
        folder: made if it is not there.
        proposal: the run.
        options: what a start says beside it: `output`, `resume`, `numbers`, `join`, `answer`, and
            for trials `home`.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pyproject.toml").write_text(_project(proposal, options), encoding="utf-8")
        package = folder / NAME.replace("-", "_")
        package.mkdir(exist_ok=True)
        for module, named in (("server", SERVER), ("client", CLIENT)):
            where, _, what = named.partition(":")
            text = (
                '"""The app is fedsynth\'s."""\n\n'
                f'from {where} import {what}\n\n__all__ = ["app"]\n'
            )
            (package / f"{module}.py").write_text(text, encoding="utf-8")
        (package / "__init__.py").write_text('"""A run of fedsynth."""\n', encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}") from None


def configuration(proposal: Proposal, options: Mapping[str, Any]) -> dict[str, Any]:
    """What `server_app` and `client_app` read of a run's configuration."""
    own = own_name(proposal.spec) is not None
    return {
        "settings": json.dumps(shared_sections(proposal.settings.to_mapping())),
        "spec": json.dumps(proposal.to_json()["spec"]) if own else "",
        "output": "runs",
        "resume": "",
        "numbers": "{}",
        "token": "run",
        "join": 600.0,
        "answer": 3600.0,
        "home": "",
        **options,
    }


def _project(proposal: Proposal, options: Mapping[str, Any]) -> str:
    module = NAME.replace("-", "_")
    return "\n".join(
        [
            "[build-system]",
            'requires = ["hatchling"]',
            'build-backend = "hatchling.build"',
            "",
            "[project]",
            f'name = "{NAME}"',
            'version = "1.0.0"',
            f'description = "A run of fedsynth {__version__}"',
            'license = "Apache-2.0"',
            f'dependencies = ["fedsynth[flower]=={__version__}"]',
            "",
            "[tool.hatch.build.targets.wheel]",
            f'packages = ["{module}"]',
            "",
            "[tool.flwr.app]",
            'publisher = "fedsynth"',
            "",
            "[tool.flwr.app.components]",
            f'serverapp = "{module}.server:app"',
            f'clientapp = "{module}.client:app"',
            "",
            to_toml({"tool.flwr.app.config": configuration(proposal, options)}),
        ]
    )
