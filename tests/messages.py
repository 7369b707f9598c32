"""Every message that a person may read, as the key it has in a catalogue. `python tests/messages.py` prints
the entries to be filled in and added to `language/zh.po`; with `--tidy` it first removes those that nothing uses any more.

Found are: what `t` and `message` are given, the sentences of errors, the help of the command line, and `t(...)` in templates.
An f-string is a template whose fields have no name: f"Rank {rank} failed." is `Rank {} failed.`
"""

from __future__ import annotations

import ast
import copy
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "mindspeed_dryrun"
MARKS = {"t", "message"}
ERRORS = {"DryRunError", "UsageError", "DriftError", "Busy", "ValueError"}
TABLES = ("VERBS", "_HEAD", "_SENTENCES")
SHOWN = {
    "say": (0,),
    "phase": (0,),
    "columns": (0,),
    "table": (0,),
    "pipe_table": (0,),
    "Table": (0,),
    "Headline": (0, 2),
}
KEPT = re.compile(r"^_?((\w+_)?notes?|not_counted|(\w+_)?problems?|reason|warnings|head|header|unknown_workspace)$")
WORD = re.compile("[A-Za-z]{2}")
HELP = {"help", "description", "epilog"}
DOCSTRING_IS_HELP = re.compile(r"commands/(?!__init__|activated|help)\w+\.py$")


@dataclass(frozen=True)
class Message:
    """`key` as in the catalogue, and where it was found. `fragments`: words that a field may be filled with, by its place."""

    key: str
    where: str
    fragments: tuple[tuple[int, str], ...] = ()


def messages() -> list[Message]:
    """All of the package, in the order of its files."""
    found: list[Message] = []
    for file in sorted(PACKAGE.rglob("*.py")):
        found += of_module(file.read_text(encoding="utf-8"), str(file.relative_to(PACKAGE)))
    for file in sorted([*PACKAGE.rglob("*.html"), *PACKAGE.rglob("*.js")]):
        found += of_template(file.read_text(encoding="utf-8"), str(file.relative_to(PACKAGE)))
    return found


def of_module(source: str, where: str) -> list[Message]:
    """The messages of a Python module."""
    tree = ast.parse(source)
    found = []
    if DOCSTRING_IS_HELP.search(where) and (help_text := ast.get_docstring(tree, clean=False)):
        found.append(Message(escaped(help_text), f"{where}:1"))
    for node, is_format, scope in _said(tree, with_help=where.startswith("commands/")):
        for choice in scope.choices(node):
            if message := _message(choice, is_format, f"{where}:{node.lineno}", scope):
                found.append(message)
    return found


def of_template(source: str, where: str) -> list[Message]:
    """`t("…")` in a jinja2 template or a script."""
    calls = re.finditer(r"""\bt\(\s*("(?:[^"\\\n]|\\.)*")""", source)
    return [Message(json.loads(call[1]), f"{where}:{source.count(chr(10), 0, call.start()) + 1}") for call in calls]


def errors_without_words() -> list[str]:
    """Errors whose words are computed in a way that is not understood here, in a module that marks none with `message`."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if any(_called(node) == "message" for node in ast.walk(tree)):
            continue
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) in ERRORS and node.args]
        seen = {id(node): any(_template(one, scope) for one in scope.choices(node)) for node, _, scope in _said(tree)}
        unseen = [call.args[0] for call in calls if isinstance(call.args[0], ast.Call) and not seen[id(call.args[0])]]
        found += [f"{file.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}" for node in unseen]
    return found


class Scope:
    """What the names of a function stand for: its own assignments, then the module's, and what the module's functions return."""

    def __init__(self, tree: ast.Module) -> None:
        self.values: dict[str, list[ast.expr]] = {}
        self.returns: dict[str, list[ast.expr]] = {}
        self._assigned(tree.body)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                found = [part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value]
                self.returns.setdefault(node.name, []).extend(found)

    def _assigned(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.values.setdefault(node.targets[0].id, []).append(node.value)

    def inside(self, function: ast.AST) -> Scope:
        inner = copy.copy(self)
        inner.values = {name: values for name, values in self.values.items() if name.isupper()}
        inner._assigned(ast.walk(function))
        return inner

    def choices(self, node: ast.expr, depth: int = 0) -> list[ast.expr]:
        """What an expression may say: either side of `if` and `or`, the values of a name, what a function returns."""
        if isinstance(node, ast.IfExp):
            parts = [node.body, node.orelse]
        elif isinstance(node, ast.BoolOp):
            parts = node.values
        elif isinstance(node, ast.Name):
            parts = self.values.get(node.id, [])
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            parts = [value for table in self.values.get(node.value.id, []) for value in _parts(table)]
        elif isinstance(node, ast.Call) and _called(node) in self.returns:
            parts = self.returns[_called(node)]
        else:
            return [node]
        return [one for part in parts for one in self.choices(part, depth + 1)] if depth < 4 else []


def _parts(table: ast.expr) -> list[ast.expr]:
    return table.values if isinstance(table, ast.Dict) else getattr(table, "elts", [])  # type: ignore[return-value]


def escaped(text: str) -> str:
    """A text as a template without fields."""
    return text.replace("{", "{{").replace("}", "}}")


def _said(tree: ast.Module, with_help: bool = False) -> Iterator[tuple[ast.expr, bool, Scope]]:
    """Expressions that hold a message, whether it is a template for `format`, and the names they see."""
    module = Scope(tree)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inner = {id(part) for function in functions for part in ast.walk(function) if part is not function}
    outermost = [function for function in functions if id(function) not in inner]
    for function in outermost:
        scope = module.inside(function)
        yield from ((expression, is_format, scope) for expression, is_format in _said_in(ast.walk(function), with_help))
    outside = [node for node in ast.walk(tree) if id(node) not in inner]
    yield from ((expression, is_format, module) for expression, is_format in _said_in(outside, with_help))


def _said_in(nodes: Iterable[ast.AST], with_help: bool) -> Iterator[tuple[ast.expr, bool]]:
    for node in nodes:
        if isinstance(node, ast.Call):
            if _called(node) in MARKS and node.args:
                yield node.args[0], bool(node.keywords)
            elif _called(node) in ERRORS:
                yield from ((argument, False) for argument in node.args)
            if with_help:
                yield from ((word.value, False) for word in node.keywords if word.arg in HELP)
        yield from ((one, False) for value in _stored(node) for one in _inside(value))


def _stored(node: ast.AST) -> Iterator[ast.expr]:
    """What is kept to be shown later: tables of words, and what is called a note or a problem."""
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and (target.id.endswith(TABLES) if target.id.isupper() else KEPT.search(target.id)):
            yield node.value
    elif isinstance(node, ast.Call):
        yield from (word.value for word in node.keywords if KEPT.search(word.arg or ""))
        name = _called(node) or getattr(node.func, "attr", "")
        yield from (node.args[place] for place in SHOWN.get(name, ()) if place < len(node.args))
        yield from (word.value for word in node.keywords if name == "PageSection" and word.arg in ("title", "text"))
        if name == "_group" and ast.unparse(node.args[0]) == "Handling.REFUSED":  # why a flag is refused
            yield node.args[2]
        if name == "Check":  # a single word is a name
            shown = [word.value for word in node.keywords if word.arg != "state"]
            yield from (part for part in shown if _is_sentence(part) or isinstance(part, ast.Name))
        place = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "append" else None
        if isinstance(place, ast.Name) and KEPT.search(place.id):
            yield node.args[0]
    elif isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        yield from (value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "note" and _inside(value))
    elif isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
        yield from filter(_is_sentence, node.value.elts)
    elif isinstance(node, ast.FunctionDef) and KEPT.search(node.name):
        yield from (part.value for part in ast.walk(node) if isinstance(part, (ast.Return, ast.Yield)) and part.value)


def _is_sentence(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and " " in str(node.value))


def _inside(node: ast.expr) -> Iterator[ast.expr]:
    """The sentences in lists, mappings and choices."""
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        inner = list(node.elts)
    elif isinstance(node, ast.Dict):
        inner = list(node.values)
    elif isinstance(node, ast.Starred):
        inner = [node.value]
    elif isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        inner = [node.elt]
    elif isinstance(node, ast.IfExp):
        inner = [node.body, node.orelse]
    elif isinstance(node, ast.BoolOp):
        inner = node.values
    else:
        if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp, ast.Name)):
            yield node
        return
    for one in inner:
        yield from _inside(one)


def _called(node: ast.AST) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _message(node: ast.expr, is_format: bool, where: str, scope: Scope) -> Message | None:
    if (is_format and isinstance(node, ast.Constant)) or (isinstance(node, ast.Constant) and "{}" in str(node.value)):
        return Message(node.value, where)
    found = _template(node, scope)
    if found is None or not WORD.search(found[0].replace("{}", "")):
        return None
    return Message(found[0], where, tuple(found[1]))


def _template(node: ast.expr, scope: Scope) -> tuple[str, list[tuple[int, str]]] | None:
    """An expression as a key, with the words that its fields may hold; None where it has no words of its own."""
    if isinstance(node, ast.Constant):
        return (escaped(node.value), []) if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return _joined([part.value if isinstance(part, ast.FormattedValue) else part for part in node.values], scope)
    if (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add)
        and any(_template(side, scope) for side in (node.left, node.right))
    ):
        return _joined([node.left, node.right], scope)
    return None


def _joined(parts: list[ast.expr], scope: Scope) -> tuple[str, list[tuple[int, str]]]:
    key, words, place = "", [], 0
    for part in parts:
        inner = _template(part, scope)
        if inner:
            key += inner[0]
            words += [(place + number, word) for number, word in inner[1]]
            place += len(re.findall(r"(?<!\{)\{\}", inner[0]))
        else:
            key += "{}"
            words += [(place, word) for word in _fragments(part, scope)]
            place += 1
    return key, words


def _fragments(node: ast.expr, scope: Scope) -> Iterator[str]:
    """Words of ours that a field may be filled with: those with a space, since a single word is a name."""
    for choice in scope.choices(node):
        found = _template(choice, scope)
        if found and " " in found[0].strip() and WORD.search(found[0].replace("{}", "")):
            yield found[0]


def quoted(text: str) -> str:
    """A text in PO syntax: a long one over several lines."""
    lines = text.splitlines(keepends=True)
    if len(lines) < 2:
        return json.dumps(text, ensure_ascii=False)
    return "\n".join(['""', *(json.dumps(line, ensure_ascii=False) for line in lines)])


def missing() -> list[Message]:
    """Messages without Chinese, and words for a field that the Chinese uses; each once."""
    from mindspeed_dryrun.language import catalogue

    known = catalogue.read("zh").entries
    found = {}
    for message in messages():
        if message.key not in known:
            found[message.key] = message
            continue
        shown = shown_fields(message.key, known[message.key])
        for place, word in message.fragments:
            if place in shown and word not in known:
                found[word] = Message(word, message.where)
    return list(found.values())


def shown_fields(key: str, translation: str) -> set[int]:
    """The places of the key's fields that a translation shows."""
    from mindspeed_dryrun.language.catalogue import fields

    names, used = fields(key), fields(translation)
    if used and not any(used):
        return set(range(len(used)))
    return {int(name) if name.isdigit() else names.index(name) for name in used}


def used() -> set[str]:
    """Every key that a message, or a word in a field of one, has."""
    found = messages()
    return {one.key for one in found} | {word for one in found for _, word in one.fragments}


def tidied(po: str) -> str:
    """The catalogue without the entries that nothing uses any more."""
    from mindspeed_dryrun.language.catalogue import entries

    known, blocks = used(), po.rstrip("\n").split("\n\n")
    return "\n\n".join(block for block in blocks if not entries(block) or entries(block).keys() & known) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(PACKAGE.parent))
    file = PACKAGE / "language" / "zh.po"
    if sys.argv[1:] == ["--tidy"]:
        file.write_text(tidied(file.read_text(encoding="utf-8")), encoding="utf-8")
    for one in missing():
        print(f'#: {one.where.partition(":")[0]}\nmsgid {quoted(one.key)}\nmsgstr ""\n')
