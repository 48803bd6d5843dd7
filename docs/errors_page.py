"""Writes errors.md, the list of all error messages, from the source: `python docs/errors_page.py`.

It finds each place that creates a `FedsynthError` or a `Problem`, and reads the code and the message
from the syntax tree. A message is followed through local variables, constants, and the arguments of
helpers that return an error. Other values are shown by their names in braces.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from generate.markdown import code, plain, table

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PAGE = DOCS / "errors.md"
MOST = 6  # alternatives of one message
INTRODUCTION = """# Error messages

Each error has a code, which stays the same when its message changes: `error.code` in Python,
`{"error": {"code": …}}` with `--json`. Names in braces stand for values. The remedy is part of the
message, unless many messages share it. `python docs/errors_page.py` writes this page from the
source."""

Node = ast.AST
Function = ast.FunctionDef | ast.AsyncFunctionDef
# What a call such as `short_repr(value)` shows: its first argument.
SHOWS_ARGUMENT = {
    "short_repr",
    "one_line",
    "str",
    "len",
    "sorted",
    "list",
    "short_key",
    "max",
    "min",
}
VERBS = (
    "Add|Ask|Call|Change|Charge|Check|Choose|Clip|Close|Complete|Compute|Continue|Convert|Copy|Correct|Create|Declare|"
    "Define|Divide|Download|Enlarge|Enter|Export|Fill|Follow|Get|Increase|Inherit|Install|Keep|Let|Load|"
    "Lower|Make|Move|Name|Override|Pass|Plan|Put|Raise|Read|Reduce|Remove|Rename|Repair|Repeat|Replace|"
    "Rescale|Resize|Restart|Restore|Return|Resume|Run|Sample|Save|Select|Send|Set|Shorten|Split|Start|Train|"
    "Try|Unpack|Update|Use|Verify|Wait|Write"
)
IMPERATIVE = re.compile(
    rf"((To|For|If|With|In|On) [^.]*?, )?({VERBS}|{VERBS.lower()})\b|pip install|did you mean"
)
# The remedies that many messages share, which they do not repeat, and the reason. The first pattern
# counts that matches "code: message". All other messages must have a remedy of their own.
SHARED = {
    # what the other side of a network sent: its operator must act, who does not read the message
    r"upload\.": "Update fedsynth at the client, whose upload was left out.",
    r"(message|request|sums)\.": "Use one version of fedsynth on all machines, and start again. If "
    "it fails again, ask the other side's operator.",
    r"flower\.": "Correct the cause in the message or the log, and start the process again.",
    # findings of `fedsynth privacy verify`, which are listed together
    r"(audit|config\.toml|metrics\.jsonl|noise_multiplier|privacy_start|provenance|report|resumed|"
    r"rounds_done|schema|sources|summary\.json|ledger|privacy\.refused|records|files:|"
    r"files\.(resumed|\{)|\{name\})": "Restore the folder or the ledger from a backup. Do not rely "
    "on a report that fails.",
    # the operating system's reason
    r"(checkpoint|data\.(damaged|missing|unlistable|unreadable_images)|files|the file)\b": "Correct "
    "the path or its permissions, or restore the file from its source.",
    # another message or library's reason
    r".*\{(error|reason|fault|faults|finding|findings|text|name|settings|place|cause|why|rule|"
    r"deviations|advice|value|outcome)\}\W*$": "Follow the reason at the end of the message.",
    # a method's or a feature map's code
    r"(mechanism|release|dimension|function|image_shape|blocks|network|teacher|\{key\})\b": "Correct "
    "the named function or class.",
    # the expected values are the remedy
    r".*\b(must|needs?|requires?) .*\b(got|is|has|does)\b": "Use an expected value.",
}


@dataclass(frozen=True)
class Message:
    """A code, and a message with values in braces."""

    code: str
    text: str


@dataclass(eq=False)
class Module:
    """A source file and what its names mean."""

    tree: ast.Module
    parents: dict[Node, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node

    def function_of(self, node: Node | None) -> Function | None:
        while node is not None and not isinstance(node, Function):
            node = self.parents.get(node)
        return node

    def ancestors(self, node: Node) -> set[Node]:
        found = {node}
        while (parent := self.parents.get(node)) is not None:
            found.add(node := parent)
        return found

    @cached_property
    def constants(self) -> dict[str, ast.expr]:
        assignments = (node for node in self.tree.body if isinstance(node, ast.Assign))
        return {
            target.id: node.value
            for node in assignments
            for target in node.targets
            if isinstance(target, ast.Name)
        }


@dataclass(frozen=True)
class Scope:
    """Where an expression stands, and the arguments of the call that leads there."""

    module: Module
    site: Node
    arguments: Mapping[str, tuple[ast.expr, Scope]] = field(default_factory=dict)


class Sources:
    """All modules of the package."""

    def __init__(self, folders: tuple[str, ...] = ("fedsynth", "privacy", "cli")) -> None:
        paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
        self.modules = [Module(ast.parse(path.read_text("utf-8"))) for path in paths]
        self.classes = {"FedsynthError": ("FedsynthError", "error.unspecified")}
        named = [item for m in self.modules for item in m.constants.items()]
        names = Counter(name for name, _ in named)
        self.constants = {name: value for name, value in named if names[name] == 1}
        definitions = [
            node
            for m in self.modules
            for node in ast.walk(m.tree)
            if isinstance(node, ast.ClassDef)
        ]
        for _ in range(4):  # levels of inheritance
            for node in definitions:
                for base in (b.id for b in node.bases if isinstance(b, ast.Name)):
                    if base in self.classes:
                        codes = [
                            ast.literal_eval(k.value) for k in node.keywords if k.arg == "code"
                        ]
                        code = codes[0] if codes else self.classes[base][1]
                        self.classes.setdefault(node.name, (base, code))

    @cached_property
    def calls(self) -> dict[str, list[tuple[Module, ast.Call]]]:
        """The calls of each function or class, by its name."""
        found: dict[str, list[tuple[Module, ast.Call]]] = {}
        for module in self.modules:
            for node in module.parents:
                if isinstance(node, ast.Call):
                    found.setdefault(name_of(node), []).append((module, node))
        return found

    # --------------------------------------------------------------------------- texts
    def texts(self, node: Node | None, scope: Scope, depth: int = 0) -> list[str]:
        """Returns the texts that an expression may have, with values in braces."""
        if depth > 8 or node is None:
            return ["{" + shown(node) + "}"]
        match node:
            case ast.Constant(value=value):
                return [str(value)]
            case ast.FormattedValue(value=value):
                return self.texts(value, scope, depth + 1)
            case ast.JoinedStr(values=values):
                parts = [self.texts(value, scope, depth + 1) for value in values]
                return ["".join(p) for p in itertools.islice(itertools.product(*parts), MOST)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                pairs = itertools.product(
                    self.texts(left, scope, depth + 1), self.texts(right, scope, depth + 1)
                )
                return [a + b for a, b in itertools.islice(pairs, MOST)]
            case ast.IfExp(body=body, orelse=other):
                return self.texts(body, scope, depth + 1) + self.texts(other, scope, depth + 1)
            case ast.NamedExpr(value=value):
                return self.texts(value, scope, depth + 1)
            case ast.Name():
                return self.name(node, scope, depth)
        return ["{" + shown(node) + "}"]

    def name(self, node: ast.Name, scope: Scope, depth: int) -> list[str]:
        if node.id in scope.arguments:
            value, caller = scope.arguments[node.id]
            return self.texts(value, caller, depth + 1)
        values = assigned(node, scope)
        if not values and (constant := scope.module.constants.get(node.id)):
            values = [constant]
        if not values and node.id.isupper() and node.id in self.constants:
            values = [self.constants[node.id]]
        found = [text for value in values for text in self.texts(value, scope, depth + 1)]
        literal = [text for text in found if re.search(r"\w", re.sub(r"\{[^}]*\}", "", text))]
        return literal[:MOST] or ["{" + shown(node) + "}"]

    # --------------------------------------------------------------------------- messages
    def messages(self) -> list[Message]:
        """Returns all messages, sorted by code."""
        found = set()
        for name in (*self.classes, "Problem"):
            for module, call in self.calls.get(name, []):
                for scope in self.scopes(module, call):
                    for bound in in_loops(scope):
                        found |= self.of_call(call, bound)
        wrappers = ("{code}", "metrics.jsonl: ", "privacy_start.json: ")  # a place, without a fault
        found = {m for m in found if m.code and not m.code.startswith(wrappers)}
        found = {m for m in found if not IMPERATIVE.match(m.text.removeprefix(f"{m.code} "))}
        return sorted(found, key=lambda message: (message.code, message.text))

    def scopes(self, module: Module, call: ast.Call) -> list[Scope]:
        """Returns the scope of a call, or one for each caller of the helper that it is in."""
        function = module.function_of(call)
        plain = [Scope(module, call)]
        if function is None or not self.is_template(function, call, module):
            return plain
        names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        scopes = []
        for other, caller in self.calls.get(function.name, []):
            if other.function_of(caller) is function:
                continue
            start = 1 if names[:1] in (["self"], ["cls"]) else 0
            values = dict(zip(names[start:], caller.args, strict=False))
            values |= {k.arg: k.value for k in caller.keywords if k.arg}
            if not any(isinstance(value, ast.Starred) for value in values.values()):
                here = Scope(other, caller)
                scopes.append(Scope(module, call, {k: (v, here) for k, v in values.items()}))
        return scopes or plain

    def is_template(self, function: Function, call: ast.Call, module: Module) -> bool:
        """Returns whether a helper makes errors for its callers."""
        names = {a.arg for a in (*function.args.args, *function.args.kwonlyargs)}
        returned = any(isinstance(a, ast.Return) for a in module.ancestors(call))
        message = call.args[-1] if call.args else None
        given = isinstance(message, ast.Name) and message.id in names
        return bool(names) and (returned or given)

    def of_call(self, call: ast.Call, scope: Scope) -> set[Message]:
        kind = name_of(call)
        args: list[ast.expr | None] = [*call.args, *(k.value for k in call.keywords)]
        if isinstance(args[0], ast.Starred):  # a section and a key
            args[:1] = [ast.Constant("{section}"), ast.Constant("{key}")]
        args += [None] * 4
        base, code = self.classes.get(kind, ("", ""))

        def text(node: ast.expr | None) -> list[str]:
            return self.texts(node, scope)

        if "SettingError" in (kind, base):
            names = [joined(a, b) for a in text(args[0]) for b in text(args[1])]
            pairs = [(n, f"{n} {reason}") for n in names[:MOST] for reason in text(args[2])]
        elif kind == "UploadRejectedError":
            pairs = [(f"upload.{f}", f"{f} {r}") for f in text(args[0]) for r in text(args[1])]
        elif kind == "Problem":
            pairs = [(c, r) for c in text(args[0]) for r in text(args[1])]
        elif kind == "UnknownNameError" and args[2] is not None:
            pairs = [
                (joined(a, b), t)
                for a in text(args[1])
                for b in text(args[2])
                for t in text(args[0])
            ]
        else:
            pairs = [(code, reason) for reason in text(args[0])]
        if code := self.own_code(call, scope):
            pairs = [(code, reason) for _, reason in pairs]
        return {Message(c, " ".join(t.split())) for c, t in pairs}

    def own_code(self, call: ast.Call, scope: Scope) -> str:
        """Returns the code of a following `with_code`, or an empty string."""
        attribute = scope.module.parents.get(call)
        if isinstance(attribute, ast.Attribute) and attribute.attr == "with_code":
            outer = scope.module.parents[attribute]
            if isinstance(outer, ast.Call):
                return self.texts(outer.args[0], scope)[0]
        return ""


def joined(section: str, key: str) -> str:
    return key if section == "None" else f"{section}.{key}"


def name_of(call: ast.Call) -> str:
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def shown(node: Node | None) -> str:
    """Returns the name that stands for an expression's value."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_").lower()
        case ast.Call(func=ast.Attribute(attr="join"), args=[value]):
            return shown(value)
        case ast.Call(func=ast.Attribute(value=value, attr=attr)):
            return shown(value) if isinstance(value, ast.Name | ast.Attribute) else attr
        case ast.Call(func=ast.Name(id=name), args=[value, *_]) if name in SHOWS_ARGUMENT:
            return shown(value)
        case ast.Call(func=ast.Name(id=name)):
            return name.strip("_")
        case (
            ast.Subscript(value=value) | ast.Starred(value=value) | ast.FormattedValue(value=value)
        ):
            return shown(value)
        case ast.GeneratorExp(generators=[first, *_]) | ast.ListComp(generators=[first, *_]):
            return shown(first.iter)
        case ast.BinOp(left=left, right=right):
            return shown(left) if not isinstance(left, ast.Constant) else shown(right)
        case ast.BoolOp(values=[value, *_]):
            return shown(value)
    return "value"


def assigned(name: ast.Name, scope: Scope) -> list[ast.expr]:
    """Returns the values that a local variable may have where it is used."""
    module = scope.module
    function = module.function_of(scope.site)
    if function is None:
        return []
    before = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.NamedExpr)
        and node.lineno <= getattr(scope.site, "lineno", 0)
        and module.function_of(node) is function
    ]
    above = module.ancestors(scope.site)
    values: list[ast.expr] = []
    for node in sorted(before, key=lambda node: getattr(node, "lineno", 0)):
        match node:
            case ast.NamedExpr(target=ast.Name(id=name.id), value=value):
                values = [value]
            case ast.Assign(targets=[target], value=value):
                new = [value] if getattr(target, "id", "") == name.id else []
                sure = module.parents[node] in above
                values = new if new and sure else values + new
            case ast.AugAssign(target=ast.Name(id=target_name), value=value):
                if target_name == name.id:
                    longer: list[ast.expr] = [ast.BinOp(v, ast.Add(), value) for v in values]
                    values = longer if module.parents[node] in above else values + longer
    return values


def in_loops(scope: Scope) -> list[Scope]:
    """Returns a scope for each item of the literals over which the loops around the site run."""
    scopes = [scope]
    for loop in scope.module.ancestors(scope.site):
        if isinstance(loop, ast.For) and (items := literal_items(loop.iter)):
            targets = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            scopes = [
                replace(
                    s,
                    arguments={
                        **s.arguments,
                        **{n: (v, s) for n, v in zip(names, item, strict=False)},
                    },
                )
                for s in scopes
                for item in items
            ]
    return scopes


def literal_items(source: ast.expr) -> list[tuple[ast.expr, ...]]:
    match source:
        case ast.Call(func=ast.Attribute(value=ast.Dict(keys=keys, values=values), attr="items")):
            return [(k, v) for k, v in zip(keys, values, strict=True) if k is not None]
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return [tuple(e.elts) if isinstance(e, ast.Tuple) else (e,) for e in elements]
    return []


def divided(message: Message) -> tuple[str, str]:
    """Returns a message's cause and its remedy, which may be empty."""
    sentences = re.split(r"(?<=[.;:?]) (?=[\w`-])", message.text)
    for number, sentence in enumerate(sentences):
        if number and IMPERATIVE.match(sentence):
            return " ".join(sentences[:number]).rstrip(".;:"), " ".join(sentences[number:])
    if message.text.endswith("{hint}"):
        return message.text.removesuffix("{hint}"), "Use one of the names that follow."
    return message.text, ""


def shared_remedy(message: Message) -> str | None:
    """Returns the pattern in `SHARED` that matches a message, or None."""
    line = f"{message.code}: {message.text}"
    return next((pattern for pattern in SHARED if re.match(pattern, line)), None)


def page(messages: list[Message]) -> str:
    """Returns the page's text."""
    areas: dict[str, list[list[str]]] = {}
    for message in messages:
        cause, remedy = divided(message)
        remedy = remedy or SHARED[shared_remedy(message) or ""]
        area = "Any setting or file" if "{" in message.code[:1] else message.code.split(".")[0]
        areas.setdefault(area, []).append([code(message.code), plain(cause), plain(remedy)])
    parts = [INTRODUCTION]
    for area, rows in areas.items():
        parts += [f"## {area}", table(["code", "message", "remedy"], rows)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(Sources().messages()), encoding="utf-8")
