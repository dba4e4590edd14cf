"""Expressions that select trajectories: ``"return > 5 and end == 'terminated'"``. Pure.

`ast.parse` parses the text, after a tokenizer has bounded its size and depth and rejected
everything except names, numbers, quoted strings and a few operators. Nothing is ever executed: an
evaluator applies a whitelist of nodes to NumPy arrays and rejects all others.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from tallyroll.storage.errors import InvalidExpression
from tallyroll.storage.package.near_names import did_you_mean, in_words

MOST_LETTERS: Final = 10_000
"""Maximum length of an expression in characters."""
MOST_DEEP: Final = 50
"""Maximum nesting depth of parentheses and operations."""
_MOST_NUMBER: Final = 40
_SHOWN: Final = 100
_MOST_NAMES: Final = 8
_CONTEXT: Final = 60

_TOKEN: Final = re.compile(
    r"""(?P<space>\s+)|(?P<name>[^\W\d]\w*)|(?P<number>(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"""
    r"""|(?P<text>'[^']*'|"[^"]*")|(?P<sign>[<>=!]=|//|[<>()\[\],.+\-*/%])""",
)
_KEYWORDS: Final = frozenset({"and", "or", "not", "in", "True", "False"})
_STANDS_IN: Final = "RETURN"
"""Placeholder for ``return``, which is a Python keyword and which `ast` would reject.

It has the same length, so that positions stay correct. The original text shows which of the two
was written.
"""


@dataclass(frozen=True, slots=True)
class Words:
    """A categorical column."""

    codes: np.ndarray
    """The index into `names` for each line [lines]."""
    names: tuple[str, ...]


Column: TypeAlias = np.ndarray | Words
"""One number or flag per line [lines], several numbers per line [lines, values], or words."""
Columns: TypeAlias = Mapping[str, Column]


class Expression:
    """Condition on named columns.

    It supports numbers, numeric columns and ``+ - * / // %``; the comparisons
    ``== != < <= > >=``, also chained; ``in`` and ``not in`` with a tuple or list of values;
    quoted strings; ``and``, ``or``, ``not`` and parentheses. ``name[i]`` is the i-th value of a
    column with several values per line.

    Args:
        text: the expression.

    Raises:
        InvalidExpression: the text is not a valid expression. The message shows the position.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"expression: expected a string, got {type(text).__name__}.")
        self.text = text
        self._fault = _Fault(text)
        self._body = _parsed(text, self._fault)

    def select(self, columns: Columns, lines: int) -> np.ndarray:
        """Evaluate the condition for each line; return bool [lines].

        Args:
            columns: the columns by name, each with ``lines`` lines. Only the columns that the
                expression names are read.
            lines: the number of lines.

        Raises:
            InvalidExpression: a name is unknown, or values cannot be compared.
        """
        with np.errstate(all="ignore"):
            found = _Evaluation(self._fault, columns).of(self._body)
        if found.kind != "flag":
            raise self._fault.at(
                self._body, f"expected a condition, such as {_EXAMPLE}, got {_a(found.kind)}"
            )
        return np.broadcast_to(np.asarray(found.value, np.bool_), lines).copy()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r})"


_EXAMPLE: Final = "return > 5"


class _Fault:
    """Factory of errors that show a position in a text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.begin = 0
        """The number of leading characters that were not passed to the parser."""

    def at(self, place: ast.AST | int, message: str) -> InvalidExpression:
        """Return the error for a node or a character index."""
        if isinstance(place, ast.AST):
            place = self.start_of(place)
        begin = max(0, place - _CONTEXT)
        part, before = self._text[begin : place + _CONTEXT], place - begin
        shown = "".join(each if each.isprintable() else " " for each in part)
        if begin:
            shown, before = f"...{shown}", before + 3
        if len(self._text) > place + _CONTEXT:
            shown += "..."
        end = "" if message.endswith("?") else "."
        return InvalidExpression(f"{message}{end}\n    {shown}\n    {' ' * before}^")

    def start_of(self, node: Any) -> int:
        """Return the character index of the start of a node, whose offset `ast` counts in bytes."""
        before = self._text[self.begin :].encode()[: node.col_offset]
        return self.begin + len(before.decode())

    def word_at(self, node: ast.Name) -> str:
        """Return a name as it is spelled in the text."""
        found = _TOKEN.match(self._text, self.start_of(node))
        return found[0] if found else node.id


def _parsed(text: str, fault: _Fault) -> ast.expr:
    if len(text) > MOST_LETTERS:
        raise fault.at(
            MOST_LETTERS,
            f"expected at most {MOST_LETTERS:,} characters in an expression, got {len(text):,}. "
            "Select by ranges of values, or in several steps",
        )
    plain = "".join(_looked_through(text, fault))
    if not (stripped := plain.lstrip()):
        raise fault.at(0, f"expected a condition, such as {_EXAMPLE}, got nothing")
    fault.begin = begin = len(plain) - len(stripped)
    try:
        parsed = ast.parse(stripped, "", "eval")
    except SyntaxError as error:
        # The offset counts characters from 1; for an incomplete text it may be past the end.
        place = begin + _place_of(error, stripped)
        raise fault.at(place, f"this is not a condition, such as {_EXAMPLE}") from error
    except (ValueError, MemoryError, RecursionError) as error:
        raise fault.at(
            begin, "this expression cannot be parsed. Simplify the expression"
        ) from error
    body: ast.expr = parsed.body
    deepest, node = max(_levels(body), key=lambda found: found[0])
    if deepest > MOST_DEEP:
        raise fault.at(node, _TOO_DEEP)
    return body


_TOO_DEEP: Final = (
    f"operations and parentheses are nested more than {MOST_DEEP} levels deep. Select in several "
    "steps"
)


def _place_of(error: SyntaxError, text: str) -> int:
    end = len(text.rstrip())
    if error.lineno != 1 or not error.offset:
        return end  # the text is incomplete
    return min(max(0, error.offset - 1), end)


def _looked_through(text: str, fault: _Fault) -> Iterator[str]:
    """Yield the tokens of a text that `ast` may parse, and raise an error for any other.

    String prefixes, escapes, comments, calls and deep nesting therefore never reach `ast`.
    """
    at, depth, run, before = 0, 0, 0, ""
    while at < len(text):
        found = _TOKEN.match(text, at)
        kind = found.lastgroup if found else None
        word = found[0] if found else text[at]
        if kind is None or "\\" in word or not (kind == "space" or word.isprintable()):
            raise fault.at(at, f"{word[:_SHOWN]!r} cannot be part of an expression{_instead(word)}")
        if kind == before == "text" or (kind == "text" and before == "name" and _glued(text, at)):
            raise fault.at(at, "expected an operator before this string")
        if kind == "number" and (
            len(word) > _MOST_NUMBER or re.match(r"\w", text[at + len(word) :])
        ):
            raise fault.at(at, "expected a number, such as 5, -0.5 or 1e6")
        if word == "*" and text.startswith("**", at):
            raise fault.at(
                at, "powers cannot be part of an expression. Multiply, or compare with 1e6"
            )
        opens, closes = word in ("(", "["), word in (")", "]")
        depth += opens - closes
        run = run + 1 if word in ("not", "+", "-") else run if kind == "space" else 0
        if depth + run > MOST_DEEP:
            raise fault.at(at, _TOO_DEEP)
        if kind == "space":
            yield " " * len(word)
        else:
            yield _STANDS_IN if word == "return" else word
            before = kind if word not in _KEYWORDS else "sign"
        at += len(word)


def _glued(text: str, at: int) -> bool:
    return at > 0 and not text[at - 1].isspace()


def _instead(word: str) -> str:
    return {
        "=": ". Compare with ==",
        "&": ". Write and",
        "|": ". Write or",
        "!": ". Write not, or !=",
        "~": ". Write not",
        "'": ": the string has no closing quote",
        '"': ": the string has no closing quote",
    }.get(word, "")


def _levels(body: ast.expr) -> Iterator[tuple[int, ast.AST]]:
    """Yield nodes with their depth, without recursion; skip the children of nodes too deep."""
    left: list[tuple[int, ast.AST]] = [(1, body)]
    while left:
        depth, node = left.pop()
        yield depth, node
        if depth <= MOST_DEEP:
            inner = (each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr))
            left.extend((depth + 1, each) for each in inner)


@dataclass(frozen=True, slots=True)
class _Value:
    """Numbers, flags or words: one value for all lines, or one per line."""

    value: Any
    kind: str
    """One of ``"number"``, ``"flag"`` and ``"text"``."""
    names: tuple[str, ...] = ()
    """All possible words if `value` contains indices into them."""


def _a(kind: str) -> str:
    return {"number": "a number", "flag": "a condition", "text": "a string"}[kind]


_COMPARED: Final[Mapping[type[ast.cmpop], tuple[Callable[..., Any], str]]] = {
    ast.Eq: (operator.eq, "=="),
    ast.NotEq: (operator.ne, "!="),
    ast.Lt: (operator.lt, "<"),
    ast.LtE: (operator.le, "<="),
    ast.Gt: (operator.gt, ">"),
    ast.GtE: (operator.ge, ">="),
}
_COMPUTED: Final[Mapping[type[ast.operator], Callable[..., Any]]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.true_divide,
    ast.FloorDiv: np.floor_divide,
    ast.Mod: np.remainder,
}


class _Evaluation:
    """Evaluator of the nodes of one expression on columns."""

    def __init__(self, fault: _Fault, columns: Columns) -> None:
        self._fault, self._columns = fault, columns

    def of(self, node: ast.expr) -> _Value:
        """Evaluate a node."""
        match node:
            case ast.Constant(value=bool(value)):
                return _Value(value, "flag")
            case ast.Constant(value=int(value)) if abs(value) < 2**63:
                return _Value(np.int64(value), "number")
            case ast.Constant(value=int()):
                raise self._fault.at(
                    node,
                    "whole numbers must be below 2**63. Write a larger number as a float, "
                    "such as 1e30",
                )
            case ast.Constant(value=float(value)):
                return _Value(np.float64(value), "number")
            case ast.Constant(value=str(value)):
                return _Value(value, "text")
            case ast.Name() | ast.Attribute():
                return self._single(node, self._column(node))
            case ast.Subscript(value=ast.Name() | ast.Attribute() as of, slice=at):
                return self._one_of_several(of, at)
            case ast.UnaryOp(op=ast.Not(), operand=of):
                return _Value(np.logical_not(self._want(of, "flag").value), "flag")
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=of):
                value = self._want(of, "number").value
                return _Value(-value if isinstance(sign, ast.USub) else value, "number")
            case ast.BoolOp(op=op, values=parts):
                join = np.logical_and if isinstance(op, ast.And) else np.logical_or
                value = self._want(parts[0], "flag").value
                for part in parts[1:]:
                    value = join(value, self._want(part, "flag").value)
                return _Value(value, "flag")
            case ast.BinOp() if type(node.op) in _COMPUTED:
                return self._computed(node)
            case ast.Compare():
                return self._compared(node)
        raise self._fault.at(
            node,
            "expected a column, a number, a string, or a comparison of them, got something else",
        )

    def _want(self, node: ast.expr, kind: str) -> _Value:
        found = self.of(node)
        if found.kind != kind:
            more = f", such as {_EXAMPLE}" if kind == "flag" else ""
            raise self._fault.at(node, f"expected {_a(kind)}{more}, got {_a(found.kind)}")
        return found

    # --- columns ----------------------------------------------------------------------------------

    def _column(self, node: ast.expr) -> Column:
        name = self._name_of(node)
        try:
            return self._columns[name]
        except KeyError:
            known = [*self._columns]
            ending = [each for each in known if each.endswith(f".{name}")]
            near = f"; did you mean {in_words(ending)}?" if ending else did_you_mean(name, known)
            said = (
                f"there is no column {name[:_CONTEXT]}{near or '.'} The columns are "
                f"{', '.join(known)}"
            )
            raise self._fault.at(node, said) from None

    def _name_of(self, node: ast.expr) -> str:
        match node:
            case ast.Name():
                return self._fault.word_at(node)
            case ast.Attribute(value=ast.Name() | ast.Attribute() as of, attr=name):
                last = "return" if name == _STANDS_IN else name
                return f"{self._name_of(of)}.{last}"
        raise self._fault.at(node, "expected the name of a column")

    def _single(self, node: ast.expr, column: Column) -> _Value:
        if isinstance(column, Words):
            return _Value(column.codes, "text", column.names)
        if column.ndim > 1:
            name, several = self._name_of(node), column.shape[1]
            raise self._fault.at(
                node,
                f"{name} has {several} values per trajectory, one for each agent or objective. "
                f"Write {name}[0]" + (f" to {name}[{several - 1}]" if several > 1 else ""),
            )
        return _value_of(column)

    def _one_of_several(self, of: ast.expr, at: ast.expr) -> _Value:
        column, name = self._column(of), self._name_of(of)
        if isinstance(column, Words) or column.ndim == 1:
            raise self._fault.at(
                of, f"{name} has one value per trajectory. Write {name} without an index"
            )
        several = column.shape[1]
        match at:
            case ast.Constant(value=int(place)) if 0 <= place < several and place is not True:
                return _value_of(column[:, place])
        raise self._fault.at(
            at, f"expected one of the values of {name}, {name}[0] to {name}[{several - 1}]"
        )

    # --- operations -------------------------------------------------------------------------------

    def _computed(self, node: ast.BinOp) -> _Value:
        left = self._want(node.left, "number").value
        right = self._want(node.right, "number").value
        compute = _COMPUTED[type(node.op)]
        if isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod)) and np.any(right == 0):
            raise self._fault.at(
                node.right, "this is 0 for some trajectories, and division by 0 is not allowed"
            )
        value = compute(left, right)
        if np.asarray(value).dtype.kind == "i":
            exact = compute(np.asarray(left, np.float64), right)
            if np.any(np.abs(exact) >= 2.0**63):
                raise self._fault.at(
                    node, "the result exceeds 2**63. Write one number as a float, such as 1.0"
                )
        return _Value(value, "number")

    def _compared(self, node: ast.Compare) -> _Value:
        value: Any = True
        left_node, left = node.left, self.of(node.left)
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, (ast.In, ast.NotIn)):
                found = self._among(left, right_node)
                if isinstance(op, ast.NotIn):
                    found = np.logical_not(found)
                right = left
            else:
                right = self.of(right_node)
                found = self._pair(op, left_node, left, right_node, right)
            value = np.logical_and(value, found)
            left_node, left = right_node, right
        return _Value(value, "flag")

    def _pair(
        self, op: ast.cmpop, left_node: ast.expr, left: _Value, right_node: ast.expr, right: _Value
    ) -> Any:
        if type(op) not in _COMPARED:
            raise self._fault.at(left_node, "expected a comparison by == != < <= > >= or in")
        compare, sign = _COMPARED[type(op)]
        if left.kind != right.kind:
            raise self._fault.at(
                right_node,
                f"{_a(left.kind)} and {_a(right.kind)} cannot be compared: expected "
                f"{_a(left.kind)} after {sign}",
            )
        if left.kind == "number":
            return compare(left.value, right.value)
        if sign not in ("==", "!="):
            raise self._fault.at(
                right_node, f"expected == or != between {left.kind} values, got {sign}"
            )
        if left.names and right.names:
            return compare(_spelled(left), _spelled(right))
        if left.names:
            return compare(left.value, self._place(left.names, right_node, right.value))
        if right.names:
            return compare(self._place(right.names, left_node, left.value), right.value)
        return compare(left.value, right.value)

    def _among(self, left: _Value, node: ast.expr) -> Any:
        if not isinstance(node, (ast.Tuple, ast.List)) or not node.elts:
            raise self._fault.at(
                node, "expected values after in, such as (1, 2) or ['cut', 'open']"
            )
        values = [self._literal(each) for each in node.elts]
        for each, found in zip(node.elts, values, strict=True):
            if found.kind != left.kind:
                raise self._fault.at(
                    each,
                    f"expected {_a(left.kind)}, as on the left side, got {_a(found.kind)}",
                )
        if left.names:
            pairs = zip(node.elts, values, strict=True)
            chosen = [self._place(left.names, each, found.value) for each, found in pairs]
            return np.isin(left.value, chosen)
        return np.isin(left.value, [each.value for each in values])

    def _literal(self, node: ast.expr) -> _Value:
        inner = node.operand if isinstance(node, ast.UnaryOp) else node
        if not isinstance(inner, ast.Constant):
            raise self._fault.at(
                node, "expected a number or a string: values after in must be literals"
            )
        return self.of(node)

    def _place(self, names: tuple[str, ...], node: ast.expr, word: str) -> int:
        """Return the index of a word among those that a column may contain."""
        if word not in names:
            several = [*map(repr, names)]
            if len(several) > _MOST_NAMES:
                several[_MOST_NAMES:] = [f"one of {len(names) - _MOST_NAMES:,} others"]
            known, near = in_words(several), did_you_mean(word, names)
            raise self._fault.at(node, f"expected {known}, got {word!r}{near}")
        return names.index(word)


def _value_of(column: np.ndarray) -> _Value:
    if column.dtype.kind == "b":
        return _Value(column, "flag")
    is_whole = np.can_cast(column.dtype, np.int64)
    return _Value(column.astype(np.int64 if is_whole else np.float64, copy=False), "number")


def _spelled(words: _Value) -> np.ndarray:
    found: np.ndarray = np.array(words.names)[words.value]
    return found
