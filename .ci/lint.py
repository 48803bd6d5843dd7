"""Checks the text of code and documents: `python .ci/lint.py` prints `file:line: rule: text`.

Its lists are in lint.toml.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LISTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("lint.toml").read_text("utf-8"))
Problem = tuple[int, str, str]  # line, rule, text


def line_of(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start()) + 1


# ------------------------------------------------------------------------------------------- code
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def bound_name(node: ast.AST) -> str | None:
    """Returns the name that a node binds: a variable, an attribute, an argument, a definition."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case ast.arg(arg=name) | ast.alias(asname=str(name)):
            return name
    return node.name if isinstance(node, DEFINITIONS) else None


def refused_name(name: str) -> str | None:
    """Returns the reason why a name is refused, or None."""
    if name in LISTS["replaced"]:
        return f"`{name}`: use `{LISTS['replaced'][name]}`"
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).strip("_").lower()
    if words and set(words.split("_")) <= set(LISTS["vague_words"].split()):
        return f"`{name}`: name the thing that it holds or does"
    if re.search(rf"(?<![a-z])({LISTS['words']})(?![a-z])", words):
        return f"`{name}`: use a term of docs/glossary.md"
    return None


def code(path: str, text: str) -> Iterator[Problem]:
    for node in ast.walk(ast.parse(text)):
        if (name := bound_name(node)) and (reason := refused_name(name)):
            yield getattr(node, "lineno", 1), "name", reason
        doc = isinstance(node, (ast.Module, *DEFINITIONS)) and ast.get_docstring(node)
        if doc and (start := re.match(rf"({LISTS['docstring_starts']})\s", doc)):
            line = getattr(node, "lineno", 1)
            yield line, "docstring", f"begin with a verb or a noun, not {start[1]!r}"
        if doc and (item := re.search(r"[^.]\. +([a-z_]+(?:, [a-z_]+)*): ", doc)):
            line = getattr(node, "lineno", 1)
            yield line, "docstring", f"begin a line with the item `{item[1]}`"
    for option in re.finditer(r'"--([a-z][a-z-]+)"', text) if path.startswith("cli/") else ():
        if reason := refused_name(option[1].replace("-", "_")):
            yield line_of(text, option), "option", reason
    yield from imports(path, text)


def imports(path: str, text: str) -> Iterator[Problem]:
    """Refuses imports of the packages above, or beside, the file's own."""
    layers = LISTS["layers"]
    package = next((part for part in path.split("/")[:-1] if part in layers), None)
    if package is None:
        return
    beside = [other for one, other in LISTS["siblings"] if one == package]
    for match in re.finditer(r"^\s*(?:from|import) fedsynth\.(\w+)", text, re.MULTILINE):
        target = match[1]
        if target in beside or target in layers[layers.index(package) + 1 :]:
            yield line_of(text, match), "layer", f"`{package}` imports `{target}`"


def benchmark(text: str) -> Iterator[Problem]:
    for match in re.finditer(r"^\s*from (\w+) import", text, re.MULTILINE):
        if (ROOT / f"benchmarks/{match[1]}.py").exists():
            yield line_of(text, match), "layer", f"imports the script `{match[1]}`"


def rows() -> Iterator[Problem]:
    """Counts the cells of each benchmark's grid that have a row with the hash of their settings."""
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    from library.grid import Rows
    from library.machine import rows_file

    for name, expected in LISTS["rows"].items():
        grid = importlib.import_module(f"grids.{name}").GRID
        file = Rows(rows_file(name, False), only="no row is missing")
        cells = grid.cells(grid.axes, device="auto", quick=False, cache=Path())
        count = sum(grid.make(cell, file) is not None for cell in cells)
        if count != expected:
            yield 1, "rows", f"{count} cells of {name} have rows, not {expected}: repeat the others"


def language() -> Iterator[Problem]:
    """Limits what has to be read twice, per 1,000 sentences of docstrings and messages."""
    sys.path.insert(0, str(ROOT / ".ci"))
    from language import measure

    found = measure("fedsynth", [ROOT / name for name in ("fedsynth", "privacy", "cli")])
    for kind, limit in LISTS["language"].items():
        if found[kind] > limit:
            yield 1, "language", f"{kind}: {found[kind]} in 1,000 sentences, more than {limit}"


def packages() -> Iterator[Problem]:
    """Requires each folder of fedsynth/ among the layers."""
    folders = {path.parent.name for path in (ROOT / "fedsynth").glob("*/__init__.py")}
    for name in folders ^ set(LISTS["layers"]):
        yield 1, "layer", f"`{name}` is either no package or in no layer"


# -------------------------------------------------------------------------------------- documents
BLOCK = re.compile(r"^(```+|:::+).*?^\1", re.DOTALL | re.MULTILINE)
NOT_WRAPPED = re.compile(r"\s*([|#>]|<\w|!?\[[^\]]*\]\(\S+\)\W*$)")
CELL = re.compile(r"^```\{code-cell\} ipython3\n(.*?)^```", re.DOTALL | re.MULTILINE)
LOCAL = re.compile(
    r"(?<![\w.$}*~])/(home|root|work|tmp|Users|mnt)/|https?://|--download|FEDSYNTH_DATA"
)


def document(path: str, text: str) -> Iterator[Problem]:
    prose = BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    for number, line in enumerate(prose.split("\n"), 1):
        if len(line) > 100 and " " in line.strip()[:100] and not NOT_WRAPPED.match(line):
            yield number, "wrap", "longer than 100 columns"
        for link in re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", line)):
            target = ((ROOT / path).parent / link.partition("#")[0]).resolve()
            generated = ROOT / "docs/generated" in target.parents
            if generated and not path.startswith(("docs/tutorials", "docs/index.md")):
                yield number, "link", f"GitHub has no generated page {link}"
            elif not (re.match(r"\w+:", link) or generated or target.exists()):
                yield number, "link", f"no file {link}"
    if path.startswith("docs/tutorials/"):
        yield from tutorial(text)
    yield from calls(text)


def tutorial(text: str) -> Iterator[Problem]:
    """Requires plain text and cells that run on every machine, without a network."""
    if not text.startswith("---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n"):
        yield 1, "tutorial", "the header of MyST notebooks is missing"
    cells = [*CELL.finditer(text)]
    if len(cells) < 6 or "{code-cell-output}" in text:
        yield 1, "tutorial", "a tutorial has at least 6 cells, and no output"
    for cell in cells:
        if local := LOCAL.search(cell[1]):
            yield line_of(text, cell), "tutorial", f"needs one machine or a network: {local[0]}"


# --------------------------------------------------------- `fedsynth …` calls of documents
FENCE = re.compile(r"^```(?:sh|bash|\{code-cell\}[^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"(?<!`)`(fedsynth [^`]+)`(?!`)")


def commands(line: str) -> Iterator[list[str]]:
    """Yields the arguments of each `fedsynth` call in a shell line, without redirections."""
    lexer = shlex.shlex(
        re.sub(r"\d?>&\d|\d?>\s*[\w./$-]+", " ", line), posix=True, punctuation_chars=";|&<>"
    )
    lexer.whitespace_split = True
    lexer.commenters = "#"
    args: list[str] = []
    for word in [*lexer, ";"]:
        if not set(word) <= set(";|&<>"):
            args.append(word)
            continue
        starts = [n for n, arg in enumerate(args) if re.fullmatch(r"fedsynth(:\w+)?", arg)]
        prefix = args[: starts[0]] if starts else ["not called"]
        if prefix in ([], ["do"], ["time"]) or prefix[:2] == ["docker", "run"]:
            yield args[starts[-1] + 1 :]
        args = []


def parse_command(args: list[str]) -> tuple[Any, list[str]]:
    import typer.main

    sys.path.insert(0, str(ROOT))
    from fedsynth.cli.app import app

    command: Any = typer.main.get_command(app)
    while args and getattr(command, "commands", {}) and re.match(r"[a-z]", args[0]):
        names = args[0].split("|")  # `deploy keys|init` names two
        if missing := [name for name in names if name not in command.commands]:
            raise ValueError(f"there is no command {missing[0]!r}")
        command, args = command.commands[names[0]], args[1:]
    return command, args


def check_call(args: list[str]) -> None:
    """Raises a ValueError for a complete call that the command line would reject."""
    command, rest = parse_command([re.sub(r"\$\w+", "0", word) for word in args])
    if getattr(command, "commands", {}) and rest in ([], ["--help"], ["--version"]):
        return
    try:
        command.make_context(" ".join(args), [word for word in rest if word != "--help"])
    except Exception as error:  # the parser's, whose module depends on the version of typer
        missing = "Missing" in str(error) and "--help" in rest
        if type(error).__name__ != "Exit" and not missing:
            raise ValueError(f"{' '.join(args)!r}: {error!r}") from error


def check_names(span: str) -> None:
    """Raises a ValueError for an unknown command or option of an abbreviated call."""
    command, rest = parse_command(span.replace("'", "").split()[1:])
    opts = {"--help", *(o for p in command.params for o in (*p.opts, *p.secondary_opts))}
    names = {word.split("=")[0] for word in rest if re.match(r"--[a-z][\w-]*(=|$)", word)}
    if names - opts:
        raise ValueError(f"{span!r}: there is no option {', '.join(names - opts)}")


def calls(text: str) -> Iterator[Problem]:
    checks: list[tuple[int, Any, Any]] = []
    for block in FENCE.finditer(text):
        if block[0].startswith("```{") and not re.search(r"^%%bash", block[1], re.MULTILINE):
            continue
        body = re.sub(r"^(:[\w-]+:[^\n]*\n|%%bash[^\n]*\n)+", "", block[1])
        lines = body.replace("\\\n", " ").splitlines()
        place = line_of(text, block)
        checks += [(place, check_call, args) for line in lines for args in commands(line)]
    prose = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.S | re.M)
    checks += [(line_of(prose, span), check_names, span[1]) for span in SPAN.finditer(prose)]
    for place, check, argument in checks:
        try:
            check(argument)
        except ValueError as error:
            yield place, "command", str(error)


# ---------------------------------------------------------------------------------- project's files
def dockerfile(text: str) -> Iterator[Problem]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    visible = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    for match in re.finditer(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        for name in match[1].split()[:-1]:
            if not (ROOT / name).exists() or f"!{name}" not in visible:
                yield line_of(text, match), "docker", f"{name} is missing, or in .dockerignore"
    for match in re.finditer(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE):
        for extra in {*match[1].split(",")} - {*project["optional-dependencies"]}:
            yield line_of(text, match), "docker", f"there is no extra {extra}"


def citation(text: str) -> Iterator[Problem]:
    version = re.search(r'__version__ = "(.+)"', (ROOT / "fedsynth/version.py").read_text("utf-8"))
    if version is None or f"\nversion: {version[1]}\n" not in text:
        yield 1, "version", "not the version of fedsynth/version.py"


def terms(text: str) -> Iterator[Problem]:
    for match in re.finditer(rf"\b({LISTS['terms']})\b", text, re.IGNORECASE):
        yield line_of(text, match), "term", f"{match[0]!r}: use a term of docs/glossary.md"


def problems(path: str, text: str) -> Iterator[Problem]:
    if path.endswith(".md"):
        yield from document(path, text)
        yield from terms(text)
    elif path.startswith(("fedsynth/", "privacy/", "cli/")) and path.endswith(".py"):
        yield from code(path, text)
        yield from terms(text)
    elif path.startswith("benchmarks/") and path.endswith(".py"):
        yield from benchmark(text)
    elif path == ".ci/lint.toml":
        yield from packages()
        yield from language()
        yield from rows()
    elif path == "Dockerfile":
        yield from dockerfile(text)
    elif path == "CITATION.cff":
        yield from citation(text)


def main() -> int:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    count = 0
    for path in listed.stdout.splitlines():
        if (ROOT / path).is_file() and path.endswith((".md", ".py", ".cff", ".toml", "Dockerfile")):
            for line, rule, message in problems(path, (ROOT / path).read_text("utf-8")):
                print(f"{path}:{line}: {rule}: {message}")
                count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
