"""Generated pages: each method, command, option, exported name and example is included."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import fedsynth
from fedsynth.core.messages import privacy_of_fields
from fedsynth.methods import METHODS, method_class

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generate() -> Iterator[ModuleType]:
    """Yields the package docs/generate, as Sphinx imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        yield importlib.import_module("generate")


@pytest.fixture(scope="module")
def generated(generate: ModuleType) -> dict[str, str]:
    return generate.pages()  # type: ignore[no-any-return]


def test_method_pages_show_all_declarations(generated: dict[str, str]) -> None:
    for name in METHODS:
        page = generated[f"methods/{name}.md"]
        cls = method_class(name)
        for field in dataclasses.fields(cls):
            assert f"| `{field.name}` | `" in page
        for message in filter(None, (cls.first_upload, cls.upload)):
            for key, (kind, _) in privacy_of_fields(message).items():
                assert f"| `{key}` | {kind} |" in page
        for mechanism in cls.dp_mechanisms:
            assert f"| `{mechanism}` |" in page
        assert ("Refused: " in page) == (not cls.dp_mechanisms)
        assert "` |  |\n" not in page, "a setting without an explanation"
        assert name in generated["methods/index.md"].split("```{toctree}")[1].split()


def test_command_pages_show_all_options(generate: ModuleType, generated: dict[str, str]) -> None:
    commands = generate.commands.commands()
    assert len(commands) > 20
    for path, command in commands.items():
        if not path:
            continue
        page = generated[f"commands/{path.split(' ')[0]}.md"]
        assert f"# fedsynth {path}\n" in page
        assert f"[fedsynth {path}]" in generated["commands/index.md"]
        section = page.split(f"# fedsynth {path}\n")[1].split("\n## ")[0]
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert all(f"`{flag}`" in section for flag in parameter.opts)


def test_reference_includes_every_exported_name(
    generate: ModuleType, generated: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = "".join(text for name, text in generated.items() if name.startswith("api/"))
    for name in set(dir(fedsynth)) - {"__version__"}:
        assert f":: fedsynth.{name}\n" in pages + "\n"
    monkeypatch.delitem(generate.api.GROUPS, "Data")
    with pytest.raises(LookupError, match="ImageData"):
        generate.api.groups()


def test_every_example_has_page(generated: dict[str, str]) -> None:
    for path in (ROOT / "examples").glob("*.py"):
        assert path.read_text(encoding="utf-8").rstrip() in generated[f"examples/{path.stem}.md"]
