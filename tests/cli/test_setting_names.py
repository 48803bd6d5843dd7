"""Settings in the library's texts are shown as options of the command that shows them, and none is
made up.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import fedsynth
from fedsynth import FolderSettings, ModelSettings, PartitionSettings, PrivacySettings
from fedsynth.cli.app import app
from fedsynth.cli.method_commands import method_settings_alone
from fedsynth.cli.option_names import OptionNames, option_names
from fedsynth.cli.privacy_commands import PLAN_NAMED
from fedsynth.cli.settings_options import set_options
from fedsynth.errors import Setting, Text
from fedsynth.federation.terms.settings import RUN_KINDS
from fedsynth.methods import METHODS, method_class

ROOT: Any = get_command(app)
NAMED_BY: dict[str, tuple[Any, OptionNames]] = {}
for words, named in (("train", None), ("partition", None), ("audit", None), ("plan", PLAN_NAMED)):
    group = ROOT.commands["privacy"] if words in ("audit", "plan") else ROOT
    command = group.commands[words]
    NAMED_BY[words] = (
        command,
        option_names(command) if named is None else option_names(command, named),
    )
METHOD_KEYS = sorted({f.name for name in METHODS for f in fields(method_class(name))})
SETTINGS = [
    *(("run", key) for key in ("method", *RUN_KINDS)),
    *(("data", key) for key in ("dataset", "data_root")),
    *(
        (cls.section, f.name)
        for cls in (PartitionSettings, ModelSettings, PrivacySettings, FolderSettings)
        for f in fields(cls)
    ),
    *(("method", key) for key in METHOD_KEYS),
]


@pytest.mark.parametrize("words", NAMED_BY)
def test_every_setting_is_named_by_something_that_the_command_takes(words: str) -> None:
    """Catches: an option in a message that the command does not have, or that sets another
    setting.
    """
    command, names = NAMED_BY[words]
    options = {option: p.name for p in command.params for option in p.opts}
    for section, key in SETTINGS:
        said = names(Setting(section, key))
        if said.startswith("--set "):
            assert "--set" in options
            assert set_options([f"{said.removeprefix('--set ')}=1"])[section] == {key: "1"}
        else:
            assert names.options[section, key] == said
            assert said in options, (words, section, key)


def test_the_commands_own_options() -> None:
    train, plan = NAMED_BY["train"][1], NAMED_BY["plan"][1]
    for names, setting, said in (
        (train, Setting("method", "ipc"), "--ipc"),
        (train, Setting("method", "lr"), "--set method.lr"),
        (train, Setting("method", "lr", "0.1"), "--set method.lr=0.1"),
        (train, Setting("privacy", "noise_multiplier"), "--dp-sigma"),
        (train, Setting("privacy", "epsilon", "8"), "--dp-epsilon 8"),
        (train, Setting("model", "clients"), "--client-models"),
        (train, Setting("partition", "kind", "natural"), "--partition natural"),
        (train, Setting("run", "compile"), "--compile"),
        (train, Setting("run", "compile", "false"), "--set run.compile=false"),
        (train, Setting(None, "download", "True"), "--download"),
        (train, Setting(None, "canaries_as", "vectors"), "canaries_as=vectors"),
        (plan, Setting("privacy", "noise_multiplier"), "--sigma"),
        (plan, Setting("privacy", "nominal_size"), "--n"),
        (plan, Setting("privacy", "clip"), "--set privacy.clip"),
        (plan, Setting("method", "iterations"), "--steps"),
        (plan, Setting("method", "local_epochs"), "--steps"),
        (NAMED_BY["audit"][1], Setting(None, "canaries_as", "vectors"), "--canaries-as vectors"),
        (NAMED_BY["audit"][1], Setting(None, "folder"), "--run"),
    ):
        assert names(setting) == said
    assert train.text("plain --text") == "plain --text"
    assert train.text(Text("a ", Setting("method", "ipc"), "…")) == "a --ipc…"


def test_distill_sets_nothing_but_its_method() -> None:
    names = method_settings_alone(ROOT.commands["distill"])
    assert names(Setting("method", "generator_lr")) == "--set method.generator_lr"
    assert names(Setting("privacy", "clip")) == "privacy.clip"
    assert names(Setting("model", "norm")) == "--norm"


def strings(tree: ast.AST) -> list[tuple[int, str]]:
    """The texts of a module that are no docstrings, with their lines."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bare = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    assert any(isinstance(node, documented) for node in ast.walk(tree))
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare
    ]


def test_the_library_names_no_option_of_the_command_line() -> None:
    """It is used from Python, too; the command line knows which option gives a setting."""
    commands = [ROOT, *ROOT.commands.values(), *ROOT.commands["privacy"].commands.values()]
    options = {o for c in commands for p in c.params for o in p.opts if o.startswith("--")}
    assert {"--dp-epsilon", "--set", "--canaries", "--n"} <= options
    package = Path(fedsynth.__file__).parent
    files = [p for p in package.rglob("*.py") if p.relative_to(package).parts[0] != "cli"]
    files += (package / "privacy").glob("*.py")  # a link, in a working tree
    assert len(files) > 100
    for file in files:
        if file.parent.name == "flower":  # Flower's own commands have options of these names
            continue
        for line, text in strings(ast.parse(file.read_text(encoding="utf-8"))):
            found = {word.strip("(),.;:'`\"") for word in text.replace("=", " ").split()}
            assert not found & options, f"{file}:{line}: {found & options}"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("train", "--set", "server_epochs=-1"), "--set method.server_epochs must be at least 0"),
        (("train", "--method", "dense", "--set", "crop=2"), "--set method.crop must be between"),
        (("train", "--method", "dense", "--set", "server_lr=-2"), "--set method.server_lr must"),
        (("train", "--local-test", "1"), "--local-test must be in [0, 1), got 1.0"),
        (
            ("train", "--dp-unit", "user", "--dp-sigma", "1"),
            "--dp-unit user needs --dp-nominal-size: ",
        ),
        (("train", "--method", "fedbn"), "--norm must be batch"),
        (
            ("train", "--method", "fedavg", "--client-models", "cnn1"),
            "--client-models must be left out",
        ),
        (("privacy", "plan", "--sigma", "-1"), "--sigma must be a positive number, got -1"),
        (
            ("privacy", "plan", "--sigma", "1", "--delta", "0.1"),
            "--delta must be at most 1 / --max-records = ",
        ),
        (
            ("privacy", "plan", "--sigma", "1", "--set", "privacy.clip=0"),
            "--set privacy.clip must be a positive",
        ),
        (("privacy", "plan", "--sigma", "1", "--steps", "0"), "--steps must be at least 1, got 0"),
        (("privacy", "plan", "--method", "real", "--sigma", "1"), "--method real cannot run with"),
        (
            ("privacy", "plan", "--sigma", "1", "--unit", "user"),
            "--unit user needs --n: the public number",
        ),
        (
            ("privacy", "audit", "--dp-sigma", "1", "--canaries", "1"),
            "--canaries must be at least 2, got 1",
        ),
        (("privacy", "audit", "--rounds", "1"), "give --dp-sigma or --dp-epsilon, or --run FOLDER"),
        (("partition", "--alpha", "-1"), "--alpha must be a positive number, got -1.0"),
        (("partition", "--set", "run.rounds=0"), "--set run.rounds must be at least 1, got 0"),
        (("distill", "--models", ","), "--models must name at least one model file"),
        (
            ("distill", "--models", "a", "--method", "feddm"),
            "--method feddm does not distil without data",
        ),
        (
            ("distill", "--models", "a", "--set", "crop=2"),
            "--set method.crop must be between 0 and 0.5",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_said_with_the_commands_option(
    fedsynth: Callable[..., Any], words: tuple[str, ...], text: str
) -> None:
    run = fedsynth(*words)
    assert run.code == 2
    assert run.stderr.count("\n") == 1
    assert text in run.stderr
