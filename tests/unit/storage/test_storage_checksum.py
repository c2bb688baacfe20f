"""The plain CRC-64/NVME against the library that the agent uses."""

from __future__ import annotations

import base64

from awscrt.checksums import crc64nvme as fast_crc64nvme
from hypothesis import given
from hypothesis import strategies as st

from functions.storage.s3.crc64 import crc64nvme, joined


def test_check_value() -> None:
    assert base64.b64decode(crc64nvme(b"123456789")).hex() == "ae8b14860a799888"


@given(st.binary(max_size=300))
def test_equal_to_the_library(data: bytes) -> None:
    assert crc64nvme(data) == base64.b64encode(fast_crc64nvme(data).to_bytes(8, "big")).decode()


@given(st.lists(st.binary(max_size=200), max_size=6))
def test_checksums_of_pieces_make_that_of_the_whole(pieces: list[bytes]) -> None:
    assert joined((crc64nvme(piece), len(piece)) for piece in pieces) == crc64nvme(b"".join(pieces))
