"""From a text to its tree and back: what is printed reads as the same, and no text gets further than a fault."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.contract.rules.language.checker import check
from baton.contract.rules.language.faults import ExpressionError
from baton.contract.rules.language.parser import parse, tokenize
from baton.contract.rules.language.syntax_tree import (
    Binary,
    Comparison,
    FunctionCall,
    Logic,
    Name,
    Node,
    Number,
    Truth,
    Unary,
    format_node,
    get_children,
    measure_depth,
)
from baton.contract.rules.limits import Limits
from tests.properties.profiles import machine_settings

LEAF = st.one_of(
    st.builds(Number, st.floats(0, 1e300), st.sampled_from(["", "", "s", "m", "GiB"])),
    st.builds(Truth, st.booleans()),
    st.builds(Name, st.sampled_from(["loss", "eval.loss", "inf", "x_1", "gpu.mem", "min"])),
)


def inner(nodes: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    several = st.lists(nodes, min_size=2, max_size=3).map(tuple)
    comparison = several.flatmap(
        lambda operands: st.tuples(*[st.sampled_from(["<", "<=", ">", ">=", "==", "!="]) for _ in operands[1:]]).map(
            lambda operators: Comparison(operators, operands)
        )
    )
    return st.one_of(
        st.builds(Unary, st.sampled_from(["not", "-", "+"]), nodes),
        st.builds(Binary, st.sampled_from("+-*/%"), nodes, nodes),
        comparison,
        st.builds(Logic, st.sampled_from(["and", "or"]), several),
        st.builds(FunctionCall, st.sampled_from(["mean", "f", "abs"]), st.lists(nodes, max_size=3).map(tuple)),
    )


TREES = st.recursive(LEAF, inner, max_leaves=25)


@machine_settings(runs=150, steps=1)
@given(tree=TREES)
def test_what_is_printed_reads_as_the_same(tree: Node) -> None:
    text = format_node(tree)
    limits = Limits(text_chars=10**6, nodes=10**4, depth=200)
    again = parse(text, limits)
    assert format_node(again) == text
    assert without_places(again) == without_places(tree)
    assert measure_depth(again) == measure_depth(tree)


def without_places(node: Node) -> object:
    """The kinds and contents of all nodes."""
    inner = get_children(node)
    own = [part for part in node[:-1] if part is not inner and part not in inner]
    return (type(node).__name__, own, [without_places(child) for child in inner])


WORDS = (
    "loss", "mean", "(", ")", ",", "+", "-", "*", "/", "%", "<", "==", "and", "or", "not", "5", "1e9", "30s", "inf",
    ".", "_", "[", "'", "min", "true",
)  # fmt: skip


@machine_settings(runs=300, steps=1)
@given(text=st.text(max_size=60) | st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join))
def test_no_text_raises_anything_else(text: str) -> None:
    try:
        list(tokenize(text))
        tree = parse(text)
    except ExpressionError as error:
        assert 0 <= error.offset <= len(text)
        assert error.reason
        assert error.remedy
        assert check(text).typed is None
        return
    assert format_node(parse(format_node(tree))) == format_node(tree)
    checked = check(text)
    assert (checked.typed is None) == bool(checked.faults)
    assert all(0 <= error.offset <= len(text) for error in (*checked.faults, *checked.doubts))
