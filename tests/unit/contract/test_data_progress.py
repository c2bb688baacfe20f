"""The trained part of the data: what its operations mean for single shards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from baton.contract.elastic.data import DataProgress
from baton.contract.elastic.spans import has_number, list_numbers, make_spans, merge_spans, subtract_spans, take_free

SHARDS, DONE = 12, 9
NUMBERS = st.frozensets(st.integers(0, SHARDS - 1))
STATES = st.lists(st.integers(0, DONE), min_size=SHARDS, max_size=SHARDS)
"""By position, the trained offset; DONE for a finished shard."""


def progress(state: list[int]) -> DataProgress:
    finished = make_spans(position for position, offset in enumerate(state) if offset == DONE)
    return DataProgress(finished=finished, offsets=[[one, at] for one, at in enumerate(state) if 0 < at < DONE])


@given(NUMBERS, NUMBERS, st.none() | st.integers(0, SHARDS), st.integers(0, 5))
def test_spans_are_sets_of_numbers(one: frozenset[int], other: frozenset[int], below: int | None, count: int) -> None:
    spans, others = make_spans(one), make_spans(other)
    assert set(list_numbers(merge_spans(spans, others))) == one | other
    left = subtract_spans(spans, others)
    assert set(list_numbers(left)) == one - other and merge_spans(left) == left
    assert {number for number in range(SHARDS) if has_number(spans, number)} == one
    free = [number for number in range(99 if below is None else below) if number not in one]
    assert list(list_numbers(take_free(spans, below, count))) == free[:count]


@given(STATES, STATES)
def test_progress_is_an_offset_for_each_shard(one: list[int], other: list[int]) -> None:
    first, second = progress(one), progress(other)
    assert first.merge(second) == progress([max(pair) for pair in zip(one, other, strict=True)])
    new = [mine if mine > theirs else 0 for mine, theirs in zip(one, other, strict=True)]
    assert first.without(second) == progress(new)
    assert first.covers(SHARDS) == (one == [DONE] * SHARDS) and not first.covers(None)


@pytest.mark.parametrize(
    "fields",
    [
        {"finished": [[0, 1], [1, 2]]},
        {"finished": [[3, 3]]},
        {"finished": [[2, 4], [0, 1]]},
        {"offsets": [[1, 2], [1, 3]]},
    ],
)
def test_other_orders_are_refused(fields: dict[str, list[list[int]]]) -> None:
    with pytest.raises(ValidationError, match="ascending"):
        DataProgress.model_validate(fields)
