"""A store accepts each cursor that it issued, and refuses all others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functions.domain.errors import Refusal
from functions.storage.cursors import decode, encode

texts = st.text(min_size=1, max_size=50).filter(lambda text: not any(0xD800 <= ord(char) < 0xE000 for char in text))


@given(st.lists(texts, max_size=3), st.lists(st.one_of(texts, st.integers(0, 10**12)), max_size=3))
def test_round_trip(list_id: list[str], position: list[str | int]) -> None:
    cursor = encode(list_id, position)
    assert all(char.isascii() and (char.isalnum() or char in "-_") for char in cursor)
    assert decode(cursor, list_id, [type(value) for value in position]) == position
    with pytest.raises(Refusal):
        decode(cursor, [*list_id, "x"], [type(value) for value in position])
    with pytest.raises(Refusal):
        decode(cursor, list_id, [*(type(value) for value in position), str])


@given(st.text(max_size=200))
def test_anything_else_is_refused(cursor: str) -> None:
    with pytest.raises(Refusal):
        decode(cursor, ("events", "j"), (int,))
