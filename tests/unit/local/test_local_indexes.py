"""Test a partition of an ordered index against a sorted list; tests/functional/local compares queries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from functions.local.emulated.indexes import Partition

MEMBERS = st.tuples(st.sampled_from("abcdef"), st.sampled_from("xyz"))
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), MEMBERS, st.integers(0, 3)),
        st.tuples(st.just("discard"), MEMBERS, st.just(0)),
        st.tuples(st.just("read"), MEMBERS, st.just(0)),
    )
)


@given(OPERATIONS)
def test_members_are_always_in_order(operations: list[tuple[str, tuple[str, str], int]]) -> None:
    partition = Partition()
    model: dict[tuple[str, str], tuple[int, str, str]] = {}
    for operation, member, value in operations:
        order = (value, *member)
        if operation == "add":
            partition.add(member, order)
            model[member] = order
        elif operation == "discard":
            partition.discard(member)
            model.pop(member, None)
        else:
            assert list(partition) == sorted(model, key=lambda key: model[key])
        assert len(partition) == len(model)
    assert list(partition) == sorted(model, key=lambda key: model[key])
    assert partition.entries() == sorted((order, member) for member, order in model.items())
