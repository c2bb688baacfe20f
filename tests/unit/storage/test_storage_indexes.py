"""The in-memory index against a plain sort."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.twins.sorted_index import SortedIndex

members = st.sampled_from("abcdefgh")
moves = st.lists(st.tuples(members, st.sampled_from(["p", "q", None]), st.integers(0, 5)), max_size=60)


@given(moves, st.integers(0, 5), st.integers(1, 9))
def test_equal_to_sorting(steps: list[tuple[str, str | None, int]], bound: int, limit: int) -> None:
    index: SortedIndex[int] = SortedIndex()
    plain: dict[str, tuple[str, int]] = {}
    for member, partition, sort in steps:
        if partition is None:
            index.discard(member)
            plain.pop(member, None)
        else:
            index.put(member, partition, sort)
            plain[member] = (partition, sort)
    assert index.members() == set(plain)
    for partition in ("p", "q"):
        entries = sorted((sort, member) for member, (of, sort) in plain.items() if of == partition)
        assert list(index.after(partition, None, limit)) == entries[:limit]
        behind = [entry for entry in entries if entry > (bound, "d")]
        assert list(index.after(partition, (bound, "d"), limit)) == behind[:limit]
        assert list(index.before(partition, None, limit)) == entries[::-1][:limit]
        ahead = [entry for entry in entries if entry < (bound, "d")]
        assert list(index.before(partition, (bound, "d"), limit)) == ahead[::-1][:limit]
        assert list(index.up_to(partition, bound, limit)) == [e for e in entries if e[0] <= bound][:limit]
