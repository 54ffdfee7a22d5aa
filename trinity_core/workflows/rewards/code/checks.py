"""Prepares Python tests to be run: finds what they check, and makes them count it, so that tests which check nothing
are an error instead of a pass.

`tests_side.Checks` holds the functions that the prepared source calls: `__checked__(value)` at everything that can
fail (`assert`, `assertEqual(…)`, `with raises(…)`, an `if` that raises, a comparison that stands alone),
`__caught__(is_strict)` where the tests swallow an exception, `__ran__(name)` in test functions, `@__fixture__`, and
`__sized__(allclose)`.
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from trinity_core.base.errors import DataError
from trinity_core.workflows.rewards.code.sandbox_rpc import Unjudged

VERDICTS = {"all", "any", "isinstance", "isclose", "allclose", "array_equal"}
"""Functions whose value is a verdict, where it stands alone as a statement."""
CLOSE = {"allclose", "assert_allclose", "assert_almost_equal", "assert_array_almost_equal"}
"""NumPy's comparisons that nothing at all passes: `allclose([], 3)`."""
EXPECTATIONS = {"raises", "warns"}
FAILURES = {"fail", "exit", "quit"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
FIXTURE = re.compile(r"(pytest\.)?fixture\b")
ANSWER_MODULE = "solution"
"""The module that `from solution import f` in tests means: the answer."""


class NothingChecked(DataError):
    """A row's tests check nothing: any program would pass them."""


@lru_cache(64)
def prepared(source: str, name: str = "") -> dict[str, Any]:
    """Return one test as source to run, the names that it uses and the answer defines, and its beginning, for messages.

    `name` is the function under test, which a function `check` gets, and tests may call `candidate`; the name that it
    begins with is then the `entry`.
    Raises NothingChecked for a test without an assertion or that never uses the answer, DataError if it needs a `name`,
    and `Unjudged` for invalid Python.
    """
    try:
        source = source.replace("\r\n", "\n").replace("\r", "\n")
        tree, free = ast.parse(source), _free(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unjudged(f"a test is not valid Python: {error}: {_quoted(source)}") from None
    nodes = [node for statement in tree.body if not _is_data(statement) for node in ast.walk(statement)]
    if apart := next(filter(None, map(_apart, nodes)), ""):
        raise Unjudged(f"the tests use '{apart}', but the answer has a process of its own: {_quoted(source)}")
    called = {_name(node) for node in nodes if isinstance(node, ast.Call)}
    is_check_uncalled = "check" not in called and any(map(_is_check, tree.body))
    if is_check_uncalled or "candidate" in free:
        if not name:
            raise DataError("code_reward needs the name of the function that 'check' gets: entry_point")
        called_source = f"{source}\ncheck({name})" if is_check_uncalled else f"candidate = {name}\n{source}"
        return prepared(called_source, name) | {"entry": entry_of(name)}
    rewriter = _Rewriter()
    rewriter.visit(tree)
    asserted = {_name(part) for node in tree.body if isinstance(node, ast.Assert) for part in ast.walk(node.test)}
    names = free - set(dir(builtins)) | free & {name} or free & asserted  # an answer may be called `sum`
    if not rewriter.checks:
        raise NothingChecked(f"code_reward finds no assertion in the row's tests: {_quoted(source)}")
    if not names and not any(map(_imports_answer, nodes)):
        raise NothingChecked(f"the row's tests for code_reward never use the answer: {_quoted(source)}")
    first = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    statements = first + [node for node in tree.body if node not in first]
    lines = [line.encode() for line in source.split("\n")]
    texts = [_written(lines, node) if _is_data(node) else _text(node) for node in statements]
    return {"python": "\n".join(texts), "names": sorted(names), "quoted": _quoted(source)}


def entry_of(name: str) -> str:
    """Return the name that an answer defines: `Solution` for `Solution().f`."""
    return re.split(r"\W", name, maxsplit=1)[0]


def checks_something(source: str) -> bool:
    """True for Python that is more than definitions and has an assertion, and for what is not Python."""
    try:
        tree, rewriter = ast.parse(source), _Rewriter()
        if all(isinstance(node, DEFINITIONS) and not _is_test(node) for node in tree.body):
            return False
        rewriter.visit(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError, Unjudged):
        return True
    return rewriter.checks > 0


def needs_earlier(tests: Sequence[str]) -> bool:
    """True if one of these tests uses a name that only an earlier one with an assertion defines."""
    defined: set[str] = set()
    for test in tests:
        try:
            top = symtable.symtable(test, "test", "exec")
            if defined & _free(test):
                return True
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False  # reported by `prepared`
        if checks_something(test):
            defined |= {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned()}
    return False


def _quoted(source: str) -> str:
    return repr(source.strip()[:160])


def _is_data(node: ast.AST) -> bool:
    """True for a name that is given a literal. It may be a megabyte, so nothing but Python's parser reads it."""
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Tuple | ast.Dict | ast.Constant)


def _written(lines: Sequence[bytes], node: ast.stmt) -> str:
    """Return a statement as it is written (`ast.get_source_segment` takes seconds for a long one)."""
    last = (node.end_lineno or node.lineno) - 1
    text = b"\n".join([*lines[node.lineno - 1 : last], lines[last][: node.end_col_offset]])
    return text[node.col_offset :].decode()


def _text(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node))


def _apart(node: ast.AST) -> str:
    """Return what tests change or make for an answer that runs in their own process: it sees no patch and no file."""
    match node:
        case ast.Call(args=[ast.Constant(value=str(name)), *_]) if _name(node) == "patch":
            return "" if name == "sys.stdout" else name
        case ast.Attribute(value=ast.Name(id="patch") | ast.Attribute(attr="patch"), attr=name):
            return f"patch.{name}"
        case ast.Name(id="open" | "tempfile" | "globals" as name):
            return name
        case ast.Attribute(attr="environ" | "stdin" | "argv" | "__doc__" as name):
            return name
    return ""


def _imports_answer(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return any(alias.name == ANSWER_MODULE for alias in names)
        case ast.ImportFrom(module=module):
            return module == ANSWER_MODULE
    return False


def _free(source: str) -> set[str]:
    """Return the names that a module uses but does not define."""
    top = symtable.symtable(source, "tests", "exec")

    def symbols(table: symtable.SymbolTable) -> Iterator[tuple[bool, symtable.Symbol]]:
        for symbol in table.get_symbols():
            yield table is top, symbol
        for child in table.get_children():
            yield from symbols(child)

    used, bound = set(), set()
    for is_top, symbol in symbols(top):
        if is_top or symbol.is_global():
            used |= {symbol.get_name()} if symbol.is_referenced() else set()
            bound |= {symbol.get_name()} if symbol.is_assigned() or symbol.is_imported() else set()
    return used - bound


def _name(node: ast.AST) -> str:
    """Return the last part of a called function's name."""
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name
    return ""


def _is_verdict(node: ast.expr) -> bool:
    match node:
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.BoolOp(values=values):
            return all(map(_is_verdict, values))
    return _name(node) in VERDICTS


def _can_fail(statements: Iterable[ast.stmt]) -> bool:
    """True if statements raise, assert or exit."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    return any(isinstance(node, ast.Raise | ast.Assert) or _name(node) in FAILURES for node in nodes)


def _call(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), [*arguments], [])


class _Rewriter(ast.NodeTransformer):
    """Adds the calls that count checks."""

    def __init__(self) -> None:
        self.checks = 0

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        return node if _is_data(node) else self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        self.generic_visit(node)
        if any(isinstance(part, ast.Name) for part in ast.walk(node.test)):  # not `assert True`
            node.test = self._checked(node.test)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return self.visit(ast.Assert(node.value)) if _is_verdict(node.value) else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        is_check = _name(node).startswith("assert") or _name(node) in EXPECTATIONS
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(value=ast.Name(id="unittest" | "pytest"), attr="main"):
                return ast.Constant(0)  # `tests_side` runs test functions and classes
        if _name(node) in CLOSE:
            node.func = _call("__sized__", node.func)
        return self._checked(node) if is_check else node

    def visit_If(self, node: ast.If) -> ast.If:
        raises = any(map(_fails, [*node.body, *node.orelse]))
        self.generic_visit(node)
        if raises and not _is_main_guard(node.test):
            node.test = self._checked(node.test)
        return node

    def visit_Try(self, node: ast.Try) -> Sequence[ast.AST]:
        is_check = _can_fail([*node.body, *node.orelse])
        expects_error = any(map(_fails, [part for part in ast.walk(node) if isinstance(part, ast.stmt)]))
        swallowing = [handler for handler in node.handlers if not _can_fail(handler.body)]
        self.generic_visit(node)
        for handler in swallowing:
            is_strict = is_check and not expects_error and _catches_failures(handler)
            handler.body.insert(0, ast.Expr(_call("__caught__", ast.Constant(is_strict))))
        return [ast.Expr(self._checked(ast.Constant(True))), node] if is_check else [node]

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self.generic_visit(node)
        for index, decorator in enumerate(node.decorator_list):
            text = ast.unparse(decorator)
            if FIXTURE.match(text):
                if "autouse" in text or "params" in text:
                    raise Unjudged(f"the tests have a fixture that code_reward cannot provide: {text}")
                node.decorator_list[index] = ast.Name("__fixture__", ast.Load())
        if node.name.startswith("test"):
            node.body.insert(0, ast.Expr(_call("__ran__", ast.Constant(node.name))))
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def _checked(self, node: ast.expr) -> ast.Call:
        self.checks += 1
        return _call("__checked__", node)


def _is_check(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "check"


def _is_test(node: ast.AST) -> bool:
    """True for what is run although nobody calls it."""
    methods = node.body if isinstance(node, ast.ClassDef) else [node]
    names = [method.name for method in methods if isinstance(method, FUNCTIONS)]
    return any(name.startswith("test") or name == "check" for name in names)


def _fails(node: ast.stmt) -> bool:
    """True for `raise`, `assert False`, and a call such as `self.fail()` or `sys.exit(1)`."""
    match node:
        case ast.Raise() | ast.Assert(test=ast.Constant(value=False | 0)):
            return True
    return isinstance(node, ast.Expr) and _name(node.value) in FAILURES


def _catches_failures(handler: ast.ExceptHandler) -> bool:
    caught = [part.id for part in ast.walk(handler.type) if isinstance(part, ast.Name)] if handler.type else []
    return not handler.type or not {"Exception", "BaseException", "AssertionError"}.isdisjoint(caught)


def _is_main_guard(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node))
