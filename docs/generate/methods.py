"""Generates a page for each registered method from its class, messages and published tables."""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import getdoc
from typing import Any

from fedsynth.cli.share_commands import ROBUST
from fedsynth.core.messages import Message, privacy_of_fields
from fedsynth.core.method import Method
from fedsynth.experiments.presets import Preset, preset, preset_names
from fedsynth.methods import METHODS, method_class
from fedsynth.privacy.disclosure import mechanism_facts
from generate.markdown import arguments, code, example, fence, plain, prose, table


def pages() -> dict[str, str]:
    """Returns the page `methods/NAME.md` of each registered method, and an index."""
    names = sorted(METHODS)
    texts = {f"methods/{name}.md": page(name) for name in names}
    return {**texts, "methods/index.md": _index(names)}


def _index(names: list[str]) -> str:
    rows = []
    for name in names:
        cls = method_class(name)
        private = ", ".join(map(code, cls.dp_mechanisms)) if cls.dp_mechanisms else "refused"
        rows.append([f"[{name}]({name}.md)", plain(cls.summary), private])
    entries = "\n".join(names)
    return f"""# All methods

The page of each method describes it, its settings, the clients' uploads, and whether it runs with
differential privacy.

{table(["method", "summary", "with differential privacy"], rows)}

```{{toctree}}
:hidden:

{entries}
```
"""


def page(name: str) -> str:
    """Returns the page of a method."""
    cls = method_class(name)
    parts = [
        f"# {name}",
        f"`fedsynth.{cls.__name__}`: {plain(cls.summary)}.",
        f"**Paper:** {_linked(cls.reference)}",
        "## The method",
        prose(sys.modules[cls.__module__].__doc__ or ""),
        "## Commands",
        fence("sh", "\n".join(_run_lines(name, cls))),
        _python(cls),
        "## Settings",
        prose(getdoc(cls) or ""),
        "`--set KEY=VALUE` changes a setting. In Python, pass `KEY=VALUE`.",
        table(["setting", "default", "type", "meaning"], _settings(cls)),
        _presets(cls),
        "## Uploads",
        *_uploads(cls),
        "## With differential privacy",
        _privacy(cls),
        "**Robust aggregation:** "
        + (f"refused: {plain(cls.robust_refusal)}." if cls.robust_refusal else f"{ROBUST}."),
        "## Published tables",
        _tables(name),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _linked(reference: str) -> str:
    """Returns a reference whose arXiv numbers are links."""
    return re.sub(
        r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", plain(reference)
    )


def _run_lines(name: str, cls: type[Method]) -> Iterator[str]:
    yield f"fedsynth train --method {name}"
    if any(mechanism_facts(mechanism).guaranteed for mechanism in cls.dp_mechanisms):
        yield f"fedsynth train --method {name} --dp-epsilon 8"
    yield f"fedsynth methods show {name}"


def _python(cls: type[Method]) -> str:
    code_block = example(getdoc(cls) or "")
    return f"In Python:\n\n{code_block}" if code_block else ""


def _settings(cls: type[Method]) -> Iterator[list[str]]:
    texts = [arguments(getdoc(source) or "") for source in filter(is_dataclass, cls.__mro__)]
    for setting in fields(cls):
        name = setting.name
        descriptions = [text[name] for text in texts if name in text]
        descriptions.sort(key=lambda text: text.startswith("see `"))  # references come last
        description = plain(next(iter(descriptions), ""))
        yield [code(name), _default(setting), _type(setting), description]


def _default(setting: Field[Any]) -> str:
    if setting.default is not MISSING:
        return code(str(setting.default) if setting.default != "" else '""')
    if setting.default_factory is not MISSING:
        return code(str(setting.default_factory()))
    return "required"


def _type(setting: Field[Any]) -> str:
    kind = setting.type
    return code(kind if isinstance(kind, str) else getattr(kind, "__name__", ""))


def _presets(cls: type[Method]) -> str:
    """Returns a table of the defaults that depend on the dataset. A class overrides its bases."""
    changes: dict[str, dict[str, Any]] = {}
    for base in reversed(cls.__mro__):
        for dataset, values in vars(base).get("presets", {}).items():
            changes.setdefault(dataset, {}).update(values)
    if not changes:
        return ""
    names = {setting.name for setting in fields(cls)}
    rows = [
        [code(dataset), ", ".join(code(f"{k}={v}") for k, v in values.items() if k in names)]
        for dataset, values in sorted(changes.items())
    ]
    return "These datasets have other defaults:\n\n" + table(["dataset", "settings"], rows)


def _uploads(cls: type[Method]) -> Iterator[str]:
    """Yields the tables of the declared messages, in the order of the exchanges."""
    if cls.first_upload is not None:
        yield f"In the first exchange of a round, `{cls.first_upload.__name__}`:"
        yield _fields_of(cls.first_upload)
    yield f"In the main exchange of a round, `{cls.upload.__name__}`:"
    yield _fields_of(cls.upload)


def _fields_of(message: type[Message]) -> str:
    descriptions = arguments(getdoc(message) or "")
    rows = [
        [code(key), kind, plain(". ".join(filter(None, [descriptions.get(key, ""), reason])))]
        for key, (kind, reason) in privacy_of_fields(message).items()
    ]
    if not rows:
        return "The message is empty."
    first = prose(getdoc(message) or "").split("\n\n")[0]
    return f"{first}\n\n" + table(
        ["field", "with differential privacy", "meaning and reason"], rows
    )


def _privacy(cls: type[Method]) -> str:
    if not cls.dp_mechanisms:
        return f"Refused: {plain(cls.refusal)}. See [guarantees](../../privacy.md)."
    rows = []
    for number, mechanism in enumerate(cls.dp_mechanisms):
        facts = mechanism_facts(mechanism)
        guarantee = "ε by the ledger's accountant" if facts.guaranteed else "**none**"
        rows.append([code(mechanism), guarantee, "default" if number == 0 else ""])
    proofs = "[Proofs](../../privacy-proofs.md) of what each mechanism releases and costs."
    return table(["mechanism (`--dp-mechanism`)", "guarantee", ""], rows) + f"\n\n{proofs}"


@functools.cache
def _cells_of() -> dict[str, list[tuple[Preset, int]]]:
    """Returns the published tables with runnable cells of each method, and their numbers."""
    tables: dict[str, list[tuple[Preset, int]]] = {}
    for name in preset_names():
        paper_table = preset(name)
        runnable = [cell for cell in paper_table.cells if not paper_table.refusal(cell)]
        methods = [paper_table.sections(cell)["run"].get("method", "") for cell in runnable]
        for method, count in Counter(methods).items():
            tables.setdefault(method, []).append((paper_table, count))
    return tables


def _tables(name: str) -> str:
    rows = [
        [code(paper.name), plain(paper.title), str(count), code(f"fedsynth reproduce {paper.name}")]
        for paper, count in _cells_of().get(name, [])
    ]
    if not rows:
        return "No preset reproduces a published result of this method."
    text = "Presets have the settings of these tables ([reproduction](../../reproduction.md)):\n\n"
    return text + table(["table", "content", "cells of this method", "command"], rows)
