"""A page for each registered method, from its class, its messages and the published tables."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from inspect import getdoc
from typing import Any

from fedsynth.cli.share_commands import ROBUST, explaining
from fedsynth.core.messages import Message, privacy_of_fields
from fedsynth.core.method import Method
from fedsynth.methods import METHODS, method_class
from fedsynth.privacy.disclosure import mechanism_facts
from fedsynth.reproduction.preset_files import preset, preset_names
from fedsynth.reproduction.presets import Preset
from generate.markdown import arguments, code, example, fence, plain, prose, table


def pages() -> dict[str, str]:
    """`methods/NAME.md` for each registered method, and their list."""
    named = sorted(METHODS)
    made = {f"methods/{name}.md": page(name) for name in named}
    return {**made, "methods/index.md": _list(named)}


def _list(names: list[str]) -> str:
    rows = []
    for name in names:
        cls = method_class(name)
        private = ", ".join(map(code, cls.dp_mechanisms)) if cls.dp_mechanisms else "refused"
        rows.append([f"[{name}]({name}.md)", plain(cls.summary), private])
    entries = "\n".join(names)
    return f"""# All methods

A page for each method of the registry: what it is, its settings, what clients send, and whether it
runs with differential privacy.

{table(["method", "in a line", "with differential privacy"], rows)}

```{{toctree}}
:hidden:

{entries}
```
"""


def page(name: str) -> str:
    """The page of one method."""
    cls = method_class(name)
    parts = [
        f"# {name}",
        f"`fedsynth.{cls.__name__}`: {plain(cls.summary)}.",
        f"**Paper:** {_linked(cls.reference)}",
        "## The method",
        prose(sys.modules[cls.__module__].__doc__ or ""),
        "## Running it",
        fence("sh", "\n".join(_run_lines(name, cls))),
        _python(cls),
        "## Settings",
        prose(getdoc(cls) or ""),
        "`--set KEY=VALUE` changes one, or `FIELD=VALUE` in Python.",
        table(["setting", "default", "type", "what"], _settings(cls)),
        _presets(cls),
        "## What each client sends",
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
    """A reference whose arXiv numbers are links."""
    return re.sub(
        r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", plain(reference)
    )


def _run_lines(name: str, cls: type[Method]) -> Iterator[str]:
    yield f"fedsynth train --method {name}"
    if any(mechanism_facts(each).guaranteed for each in cls.dp_mechanisms):
        yield f"fedsynth train --method {name} --dp-epsilon 8"
    yield f"fedsynth methods show {name}"


def _python(cls: type[Method]) -> str:
    made = example(getdoc(cls) or "")
    return f"In Python:\n\n{made}" if made else ""


def _settings(cls: type[Method]) -> Iterator[list[str]]:
    texts = [arguments(getdoc(one) or "") for one in (cls, *explaining(cls))]
    for one in fields(cls):
        said = [text[one.name] for text in texts if one.name in text]
        said.sort(key=lambda text: text.startswith("see `"))  # who explains comes before who refers
        yield [code(one.name), _default(one), _type(one), plain(said[0] if said else "")]


def _default(one: Field[Any]) -> str:
    if one.default is not MISSING:
        return code(str(one.default) if one.default != "" else '""')
    if one.default_factory is not MISSING:
        return code(str(one.default_factory()))
    return "required"


def _type(one: Field[Any]) -> str:
    return code(one.type if isinstance(one.type, str) else getattr(one.type, "__name__", ""))


def _presets(cls: type[Method]) -> str:
    """What data sets change of the defaults, the class's own over its bases'."""
    changes: dict[str, dict[str, Any]] = {}
    for base in reversed(cls.__mro__):
        for dataset, values in vars(base).get("presets", {}).items():
            changes.setdefault(dataset, {}).update(values)
    if not changes:
        return ""
    known = {one.name for one in fields(cls)}
    rows = [
        [code(dataset), ", ".join(code(f"{k}={v}") for k, v in values.items() if k in known)]
        for dataset, values in sorted(changes.items())
    ]
    return "Data sets with a preset change defaults:\n\n" + table(["data set", "settings"], rows)


def _uploads(cls: type[Method]) -> Iterator[str]:
    """The declared messages, first exchange first."""
    if cls.first_upload is not None:
        yield f"In a first exchange of the round, `{cls.first_upload.__name__}`:"
        yield _fields_of(cls.first_upload)
    yield f"In the round's main exchange, `{cls.upload.__name__}`:"
    yield _fields_of(cls.upload)


def _fields_of(message: type[Message]) -> str:
    said = arguments(getdoc(message) or "")
    rows = [
        [code(key), kind, plain(". ".join(filter(None, [said.get(key, ""), reason])))]
        for key, (kind, reason) in privacy_of_fields(message).items()
    ]
    if not rows:
        return "An empty message: nothing is sent."
    first = prose(getdoc(message) or "").split("\n\n")[0]
    return f"{first}\n\n" + table(["field", "with differential privacy", "what, and why"], rows)


def _privacy(cls: type[Method]) -> str:
    if not cls.dp_mechanisms:
        return f"Refused: {plain(cls.refusal)}. See [what is guaranteed](../../privacy.md)."
    rows = []
    for number, mechanism in enumerate(cls.dp_mechanisms):
        facts = mechanism_facts(mechanism)
        what = "ε by the ledger's accountant" if facts.guaranteed else "**guarantees nothing**"
        rows.append([code(mechanism), what, "default" if number == 0 else ""])
    words = "[The theorem](../../privacy-proofs.md) says what each mechanism releases and is charged for."
    return table(["mechanism (`--dp-mechanism`)", "guarantee", ""], rows) + f"\n\n{words}"


@functools.cache
def _cells_of() -> dict[str, list[tuple[Preset, int]]]:
    """A method's name: the published tables that have runnable cells of it, and how many."""
    found: dict[str, list[tuple[Preset, int]]] = {}
    for name in preset_names():
        one = preset(name)
        counts: dict[str, int] = {}
        for cell in one.cells:
            if not one.refusal(cell):
                here = str(one.sections(cell)["run"].get("method", ""))
                counts[here] = counts.get(here, 0) + 1
        for here, count in counts.items():
            found.setdefault(here, []).append((one, count))
    return found


def _tables(name: str) -> str:
    rows = [
        [code(one.name), plain(one.title), str(count), code(f"fedsynth reproduce {one.name}")]
        for one, count in _cells_of().get(name, [])
    ]
    if not rows:
        return "No published table has a preset with cells of this method."
    text = "Their settings are presets ([the papers' tables](../../reproduction.md)):\n\n"
    return text + table(["table", "what it shows", "cells of this method", "command"], rows)
