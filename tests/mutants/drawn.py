# SPDX-License-Identifier: Apache-2.0

"""Mutants drawn at random from all lines of the product that the catalogue leaves alone.

A line is drawn first, then one change of it, so that long expressions are not favoured. Each change is one that a
person could have made by mistake: a negated condition, another comparison, a statement left out. Texts for people, log
events, annotations and declarations stay as they are. The same seed draws the same mutants from the same code.
"""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.mutants.mutant import DoesNotFit, Mutant

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("actors", "headgate", "protocol", "spark_bridge")
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
ARITHMETIC: dict[type[ast.operator], str] = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*"}
FOR_PEOPLE = ("log", "_log", "print", "add_argument")
"""Calls whose arguments are texts for people: `log.info(...)`, `context.log.warning(...)`."""
_UNDIVIDED = (
    ast.Name,
    ast.Constant,
    ast.Attribute,
    ast.Call,
    ast.Subscript,
    ast.JoinedStr,
    ast.List,
    ast.Dict,
    ast.Set,
)
NOT_DRAWN = ("__repr__", "__str__", "__reduce__")


@dataclass(frozen=True)
class Function:
    """A function. ``first_line``: that of its code, where its decorators begin. ``body``: the lines inside."""

    name: str
    first_line: int
    body: range


@dataclass(frozen=True)
class Drawn:
    """One change: ``new`` in place of the bytes from ``begin`` to ``end`` of a file."""

    path: str
    line: int
    begin: int
    end: int
    new: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.begin}:{self.kind}"

    def source(self) -> bytes:
        """The file with the change."""
        before = (ROOT / self.path).read_bytes()
        return before[: self.begin] + self.new.encode() + before[self.end :]

    def function(self) -> Function | None:
        """The outermost function whose body has the change; None if the import of the module executes the change."""
        text = (ROOT / self.path).read_bytes()
        place = text.count(b"\n", 0, self.begin) + 1, self.begin - text.rfind(b"\n", 0, self.begin) - 1
        scopes: list[ast.AST] = [ast.parse(text)]
        while scopes:
            for node in ast.iter_child_nodes(scopes.pop()):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    scopes.append(node)
                    continue
                assert node.end_lineno is not None
                assert node.end_col_offset is not None
                if (node.body[0].lineno, node.body[0].col_offset) <= place < (node.end_lineno, node.end_col_offset):
                    first = min(one.lineno for one in (node, *node.decorator_list))
                    return Function(node.name, first, range(node.body[0].lineno, node.end_lineno + 1))
        return None

    def diff(self) -> str:
        """The lines with the change, as they were and as they are."""
        before = (ROOT / self.path).read_bytes()
        first = before.rfind(b"\n", 0, self.begin) + 1
        last = before.find(b"\n", self.end)
        old = before[first:last].decode()
        new = (before[first : self.begin] + self.new.encode() + before[self.end : last]).decode()
        lines = [*(f"-{line}" for line in old.splitlines()), *(f"+{line}" for line in new.splitlines())]
        return "\n".join([f"{self.path}:{self.line} ({self.kind})", *lines])


def draw(count: int, seed: int, within: Iterable[str] = PACKAGES, *, besides: Iterable[Mutant] = ()) -> list[Drawn]:
    """Draw so many changes of the files below ``within``: at most one on a line, none where ``besides`` has one."""
    taken = defaultdict[str, set[int]](set)
    for mutant in besides:
        for path, lines in lines_of(mutant):
            taken[path].update(lines)
    by_line = defaultdict[tuple[str, int], list[Drawn]](list)
    folders = sorted({file for each in within for file in files(each)})
    for file in folders:
        for change in changes(file):
            if change.line not in taken[change.path]:
                by_line[change.path, change.line].append(change)
    random = Random(seed)
    places = random.sample(sorted(by_line), min(count, len(by_line)))
    return [random.choice(by_line[place]) for place in places]


def files(place: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def lines_of(mutant: Mutant) -> Iterator[tuple[str, range]]:
    """The lines that the edits of a mutant of the catalogue change."""
    for edit in mutant.edits:
        try:
            function, source = edit.function(), edit.sources()[0]
        except DoesNotFit:  # another test says so
            continue
        if edit.is_java or not callable(function):  # nothing is drawn from there
            continue
        code = inspect.unwrap(function).__code__
        first = inspect.getsourcelines(function)[1] + source[: source.index(edit.old)].count("\n")
        yield str(Path(code.co_filename).relative_to(ROOT)), range(first, first + edit.old.count("\n") + 1)


def changes(file: Path) -> Iterator[Drawn]:
    """Yield every change of a file."""
    text = file.read_bytes()
    yield from _Changes(str(file.relative_to(ROOT)), text).of(ast.parse(text))


class _Changes:
    def __init__(self, path: str, text: bytes) -> None:
        self._path = path
        self._text = text
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def of(self, node: ast.AST) -> Iterator[Drawn]:
        """The changes of a node and of all below it."""
        yield from self._here(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not self._stays(child):
                    yield from self.of(child)

    def _stays(self, node: ast.AST) -> bool:
        """Whether nothing below a node is drawn: declarations, and what is only read by people."""
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                return name in NOT_DRAWN
            case ast.If(test=ast.Name("TYPE_CHECKING")) | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
                return True
            case ast.Assert():  # a check, which another value only makes fail
                return True
            case ast.Assign(targets=[ast.Name("__all__")]) | ast.AnnAssign(value=None):
                return True
            case ast.Call():
                return _is_for_people(node)
        return False

    def _here(self, node: ast.AST) -> Iterator[Drawn]:
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.comprehension(ifs=[test, *_]):
                if not (isinstance(test, ast.UnaryOp | ast.Constant)):
                    yield self._replace(test, f"not {self._text_of(test)}", "negated condition")
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
                new = f"{self._text_of(left)} {COMPARISONS[type(op)]} {self._text_of(right)}"
                yield self._replace(node, new, "another comparison")
            case ast.BoolOp(op=op, values=[first, *others]):
                word = " or " if isinstance(op, ast.And) else " and "
                parts = [self._text_of(value) for value in (first, *others)]
                yield self._replace(node, f"({word.join(parts)})", "and for or")
                yield self._replace(node, self._text_of(others[-1]), "first operand left out")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._replace(node, f" {self._text_of(operand)}", "not left out")
            case ast.Constant(value=bool() as value):
                yield self._replace(node, str(not value), "other constant")
            case ast.Constant(value=int() | float() as value):
                yield self._replace(node, f"({value!r} + 1)", "other constant")
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC and not _is_text(node):
                new = f"({self._text_of(left)} {ARITHMETIC[type(op)]} {self._text_of(right)})"
                yield self._replace(node, new, "other arithmetic")
            case ast.Expr(value=ast.Call() as call) if _is_for_people(call):
                pass
            case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
                yield self._replace(node, "pass", "statement left out")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield self._replace(node, "pass", "statement left out")
            case ast.Raise():
                yield self._replace(node, "pass", "error not raised")
            case ast.Return(value=value) if value is not None and not (
                isinstance(value, ast.Constant) and value.value is None
            ):
                yield self._replace(node, "return None", "nothing returned")
            case ast.Break():
                yield self._replace(node, "continue", "continue for break")
            case ast.Continue():
                yield self._replace(node, "break", "break for continue")
            case ast.Call(args=[first, second, *_]) if not {type(first), type(second)} & {ast.Starred, ast.YieldFrom}:
                begin, end = self._span(first)[0], self._span(second)[1]
                between = self._text[self._span(first)[1] : self._span(second)[0]].decode()
                new = f"{self._text_of(second)}{between}{self._text_of(first)}"
                if ast.dump(first) != ast.dump(second):
                    yield Drawn(self._path, first.lineno, begin, end, new, "arguments swapped")

    def _replace(self, node: ast.stmt | ast.expr, new: str, kind: str) -> Drawn:
        return Drawn(self._path, node.lineno, *self._span(node), new, kind)

    def _span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text_of(self, node: ast.expr) -> str:
        """The text of an expression, in parentheses if it might need some: those around it are not part of it."""
        begin, end = self._span(node)
        text = self._text[begin:end].decode()
        return text if isinstance(node, _UNDIVIDED) else f"({text})"


def _is_for_people(call: ast.Call) -> bool:
    function: ast.expr = call.func
    while isinstance(function, ast.Attribute):
        if function.attr in FOR_PEOPLE:
            return True
        function = function.value
    return isinstance(function, ast.Name) and function.id in FOR_PEOPLE


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in (node.left, node.right)
    )
