"""Compare expressions with plain Python, line by line.

Also test the positions that errors report, and hostile texts.
"""

from __future__ import annotations

import contextlib
import math
import operator
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallyroll.storage.errors import InvalidExpression, StorageError
from tallyroll.storage.ext.views.expression import MOST_LETTERS, Expression, Words

ENDS = ("open", "terminated", "truncated", "cut")
LINES: list[dict[str, Any]] = [
    {
        "return": returned,
        "length": length,
        "lane": length % 3,
        "end": ENDS[(at + length) % 4],
        "whole": at % 3 > 0,
        "context.gravity": float(at),
        "shares": [returned, -returned],
    }
    for at, (returned, length) in enumerate(
        zip([1.5, -2.0, math.nan, 0.0, 7.0, 1e300, -0.5], [1, 7, 2**40, 3, 3, 9, 2], strict=True)
    )
]
COLUMNS: dict[str, Any] = {
    "return": np.array([line["return"] for line in LINES]),
    "length": np.array([line["length"] for line in LINES]),
    "lane": np.array([line["lane"] for line in LINES], np.int32),
    "end": Words(np.array([ENDS.index(line["end"]) for line in LINES], np.int8), ENDS),
    "whole": np.array([line["whole"] for line in LINES]),
    "context.gravity": np.array([line["context.gravity"] for line in LINES], np.float32),
    "shares": np.array([line["shares"] for line in LINES]),
}


def select(text: str) -> list[bool]:
    found = Expression(text).select(COLUMNS, len(LINES))
    assert found.dtype == np.bool_
    return found.tolist()  # type: ignore[no-any-return]


# An expression is drawn as its text and the equivalent Python function of a line.
Drawn = tuple[str, Callable[[dict[str, Any]], Any]]
COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
COMPUTED: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
DIVIDED: dict[str, Callable[[Any, Any], Any]] = {
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}


def column(name: str) -> Drawn:
    return name, lambda line: line[name]


def constant(value: float) -> Drawn:
    return repr(value), lambda line: value


def joined(left: Drawn, sign: str, join: Callable[[Any, Any], Any], right: Drawn) -> Drawn:
    return (
        f"({left[0]} {sign} {right[0]})",
        lambda line: join(left[1](line), right[1](line)),
    )


def flags(inner: st.SearchStrategy[Drawn]) -> st.SearchStrategy[Drawn]:
    numbers = st.recursive(
        st.sampled_from([*map(column, ("return", "length", "lane", "context.gravity"))])
        | st.sampled_from([0, 1, 3, -2, 7, 0.5, 1e6]).map(constant)
        | st.just(("shares[1]", lambda line: line["shares"][1])),
        lambda inner: (
            st.builds(
                lambda left, sign, right: joined(left, sign, COMPUTED[sign], right),
                inner,
                st.sampled_from([*COMPUTED]),
                inner,
            )
            | st.builds(
                lambda left, sign, right: joined(left, sign, DIVIDED[sign], constant(right)),
                inner,
                st.sampled_from([*DIVIDED]),
                st.sampled_from([2, -3, 0.5]),
            )
            | inner.map(lambda it: (f"(-{it[0]})", lambda line: -it[1](line)))
        ),
        max_leaves=4,
    )
    words = st.sampled_from(ENDS)
    return (
        st.builds(
            lambda left, sign, right: joined(left, sign, COMPARED[sign], right),
            numbers,
            st.sampled_from([*COMPARED]),
            numbers,
        )
        | st.builds(
            lambda a, one, b, other, c: (
                f"({a[0]} {one} {b[0]} {other} {c[0]})",
                lambda line: (
                    COMPARED[one](a[1](line), b[1](line))
                    and COMPARED[other](b[1](line), c[1](line))
                ),
            ),
            numbers,
            st.sampled_from([*COMPARED]),
            numbers,
            st.sampled_from([*COMPARED]),
            numbers,
        )
        | words.map(lambda it: (f"end == '{it}'", lambda line: line["end"] == it))
        | words.map(lambda it: (f'"{it}" != end', lambda line: line["end"] != it))
        | st.lists(words, min_size=1, max_size=3).map(
            lambda some: (f"end not in {some}", lambda line: line["end"] not in some)
        )
        | st.lists(st.sampled_from([0, 1, -2, 3, 9]), min_size=1, max_size=3).map(
            lambda some: (f"(lane in {(*some,)})", lambda line: line["lane"] in some)
        )
        | st.just(column("whole"))
        | st.just(("True", lambda line: True))
        | st.just(("whole == False", lambda line: not line["whole"]))
    )


CONDITIONS = st.recursive(
    flags(st.nothing()),
    lambda inner: (
        st.builds(
            lambda left, right: (
                f"({left[0]} and {right[0]})",
                lambda line: left[1](line) and right[1](line),
            ),
            inner,
            inner,
        )
        | st.builds(
            lambda left, right: (
                f"({left[0]} or\n {right[0]})",
                lambda line: left[1](line) or right[1](line),
            ),
            inner,
            inner,
        )
        | inner.map(lambda it: (f"not({it[0]})", lambda line: not it[1](line)))
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(drawn=CONDITIONS)
def test_a_condition_means_what_python_means_by_it(drawn: Drawn) -> None:
    text, means = drawn
    try:
        wanted = [bool(means(line)) for line in LINES]
    except OverflowError:
        return
    with contextlib.suppress(InvalidExpression):
        assert select(f"  {text} ") == wanted
        return
    with pytest.raises(InvalidExpression, match=r"2\*\*63"):
        select(text)


def test_a_word_of_python_is_a_column() -> None:
    chosen = select("return > 1 and 'return' != 'x' and (return)<1e200")
    assert chosen == [line["return"] > 1 and line["return"] < 1e200 for line in LINES]


@pytest.mark.parametrize(
    ("text", "fault", "says"),
    [
        ("", "", "got nothing"),
        (" return > ", "", "not a condition"),
        ("(return > 1", "(", "not a condition"),
        ("retrun > 5", "retrun", "did you mean return?"),
        ("RETURN > 5", "RETURN", "there is no column RETURN"),
        ("  gravity > 1", "gravity", "did you mean context.gravity?"),
        ("lane.x > 1", "lane.x", "there is no column lane.x"),
        ("'é' != 'a' and retrun > 5", "retrun", "did you mean return?"),
        (
            "return > 'a'",
            "'a'",
            "a number and a string cannot be compared: expected a number after >",
        ),
        ("end == 5", "5", "expected a string after =="),
        ("end == 'terminted'", "'terminted'", "'open', 'terminated', 'truncated' or 'cut'"),
        ("end in ('cut', 'x')", "'x'", "got 'x'"),
        ("end > 'cut'", "'cut'", "expected == or != between text values"),
        ("end is 'cut'", "end", "a comparison by =="),
        ("whole > 1", "1", "expected a condition after >"),
        ("whole + 1 > 1", "whole", "expected a number, got a condition"),
        ("lane and whole", "lane", "expected a condition, such as return > 5, got a number"),
        ("length", "length", "got a number"),
        ("shares > 1", "shares", r"shares[0] to shares[1]"),
        ("shares[2] > 1", "2", r"shares[0] to shares[1]"),
        ("shares[True] > 1", "True", r"shares[0] to shares[1]"),
        ("lane[0] > 1", "lane", "one value per trajectory"),
        ("lane in 'abc'", "'abc'", "expected values after in"),
        ("lane in ()", "()", "expected values after in"),
        ("lane in (1, lane)", "lane)", "must be literals"),
        ("lane in (1, 'a')", "'a'", "expected a number, as on the left side"),
        ("return ** 2 > 1", "**", "powers"),
        ("lane = 3", "=", "Compare with =="),
        ("lane & whole", "&", "Write and"),
        ("lane > 1 # rest", "#", "cannot be part"),
        ("end == 'cut", "'cut", "no closing quote"),
        ("f'a' == end", "'a'", "expected an operator"),
        ("'a' 'b' == end", "'b'", "expected an operator"),
        (r"end == 'a\n'", r"'a\n'", "cannot be part"),
        ("lane > \x00", "\x00", "cannot be part"),
        ("lane / (lane - 1) > 1", "lane - 1", "division by 0"),
        ("length * 4611686018427387904 > 1", "length", "2**63"),
        ("9223372036854775808 > lane", "9223", "below 2**63"),
        ("5in lane", "5in", "expected a number"),
        ("__import__('os').x > 1", "__import__", "expected the name of a column"),
        ("whole if lane else whole", "whole", "something else"),
        ("[lane for lane in lane]", "[", "something else"),
        ("-whole", "whole", "expected a number"),
    ],
)
def test_a_fault_is_shown_at_its_place(text: str, fault: str, says: str) -> None:
    with pytest.raises(InvalidExpression) as error:
        select(text)
    message, shown, caret = str(error.value).rsplit("\n", 2)
    assert says in message
    assert caret.strip() == "^"
    assert shown == f"    {text.replace(chr(0), ' ')}"
    end = len(text.rstrip()) if text.strip() else 0
    assert len(caret) - 5 == (text.index(fault) if fault else end)


def test_the_error_is_a_wrong_value_and_one_of_storages() -> None:
    with pytest.raises(ValueError, match="there is no column nothing"):
        select("nothing > 1")
    assert issubclass(InvalidExpression, StorageError)
    with pytest.raises(TypeError, match="got int"):
        Expression(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "lane > 1 or " * 1_000_000,
        "(" * 10_000 + "lane > 1" + ")" * 10_000,
        "(" * 900 + "lane > 1" + ")" * 900,
        "[" * 900 + "]" * 900,
        "not " * 2_000 + "whole",
        "-" * 9_000 + "lane > 1",
        "+".join(["lane"] * 1_000) + " > 1",
        "lane" + "[0]" * 3_000,
        "lane" + ".x" * 4_000,
        "9" * 9_000 + " > lane",
        "1e" + "9" * 9_000 + " > lane",
        "'" + "a" * 9_990,
        "lane" + " < lane" * 2_000,
        "x" * MOST_LETTERS,
    ],
    ids=lambda text: f"{text[:12]}...{len(text)}",
)
def test_a_hostile_text_costs_little(text: str) -> None:
    begun = time.process_time()
    with pytest.raises(InvalidExpression) as error:
        select(text)
    assert len(str(error.value)) < 1_000
    assert time.process_time() - begun < 1


def test_many_parts_side_by_side_are_not_deep() -> None:
    assert select(" or ".join(f"lane == {n}" for n in range(600))) == [True] * len(LINES)
    many = ", ".join(map(str, range(1500)))
    assert select(f"length in ({many})") == [line["length"] < 1500 for line in LINES]
