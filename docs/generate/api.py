"""Generates the library's reference: all names that `fedsynth` and the other stable modules export,
in groups, for autodoc.
"""

from __future__ import annotations

from inspect import isroutine
from types import ModuleType

import fedsynth
from fedsynth import experiments, privacy, synthesizer
from fedsynth.methods import CLASSES, kit

GROUPS: dict[str, tuple[str, ...]] = {
    "Runs": (
        "simulate",
        "RunSettings",
        "resolve",
        "load_preset",
        "RunResult",
        "Observer",
        "export_run",
        "export_onnx",
    ),
    "Settings": ("PartitionSettings", "ModelSettings", "PrivacySettings"),
    "Data": (
        "load_dataset",
        "load_records",
        "FolderSettings",
        "EncoderSettings",
        "OwnerData",
        "from_arrays",
        "ImageData",
        "DatasetSpec",
    ),
    "Synthetic sets": (
        "synthesize",
        "owner_settings",
        "load_synthetic",
        "load_model",
        "SharedSet",
        "student_of_set",
        "train_student",
        "StudentSettings",
        "fidelity_of_set",
        "RealImages",
        "DataFreeDistiller",
    ),
    "Custom methods and models": (
        "Method",
        "TrainsLocally",
        "LocalObjective",
        "CondensingMethod",
        "Message",
        "ModelParameters",
        "ServerState",
        "RoundContext",
        "register_method",
        "register_model",
    ),
}
FUNCTIONS = "autofunction"
CLASS = "autoclass"
DATA = "autodata"


NAMESPACES = {
    "Kit for methods": kit,
    "Custom synthesis": synthesizer,
    "Privacy": privacy,
    "Sweeps": experiments,
}


def groups() -> dict[str, tuple[str, ...]]:
    """Returns the exported names by group. The last group has the methods."""
    exported = set(dir(fedsynth)) - {"__version__"}
    listed = {name for names in GROUPS.values() for name in names}
    rest = exported - listed - set(CLASSES)
    if rest or not listed <= exported:
        raise LookupError(
            f"docs/generate/api.py: GROUPS differs from the exported names: "
            f"{rest or listed - exported}"
        )
    return {**GROUPS, "Methods": tuple(sorted(CLASSES))}


def pages() -> dict[str, str]:
    """Returns the page `api/GROUP.md` of each group, and an index."""
    texts = {
        f"api/{_file(title)}.md": _page(title, names, fedsynth) for title, names in groups().items()
    }
    for title, module in NAMESPACES.items():
        texts[f"api/{_file(title)}.md"] = _page(title, tuple(dir(module)), module)
    entries = "\n".join(_file(title) for title in (*groups(), *NAMESPACES))
    texts["api/index.md"] = f"""# The library

The names that `fedsynth`, `fedsynth.methods.kit`, `fedsynth.synthesizer`, `fedsynth.privacy` and
`fedsynth.experiments` export are stable; other modules may move. Importing them imports neither
torch nor any method until a name is used.

```{{toctree}}
:maxdepth: 2

{entries}
```
"""
    return texts


def _file(title: str) -> str:
    return title.lower().replace(" ", "-")


def _page(title: str, names: tuple[str, ...], module: ModuleType) -> str:
    entries = [_directive(name, module) for name in names]
    return f"# {title}\n\n" + "\n\n".join(entries) + "\n"


def _directive(name: str, module: ModuleType) -> str:
    value = getattr(module, name)
    other = FUNCTIONS if isroutine(value) else DATA
    kind = CLASS if isinstance(value, type) else other
    options = "\n   :members:" if kind == CLASS and name not in CLASSES else ""
    others = {fedsynth: [], kit: [fedsynth, privacy]}.get(module, [fedsynth])
    if any(name in dir(other) for other in others):
        options += "\n   :no-index:"  # described on the page of the other module
    body = f".. {kind}:: {module.__name__}.{name}{options}"
    return f"## {name}\n\n```{{eval-rst}}\n{body}\n```"
