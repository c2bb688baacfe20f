"""Define the frames of the wire: a header of fixed length, then the payload.

A reader knows each frame's longest payload before the header arrives, and reads the payload into memory that it has.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from gpu_client.elastic.errors import ElasticError

MAGIC = b"BTN1"
FIELDS = struct.Struct("!4sB3x6I")
CHECKSUM = struct.Struct("!I")
HEADER_BYTES = FIELDS.size + CHECKSUM.size

Payload = bytes | memoryview


class FrameKind(IntEnum):
    """Kinds of frames. Kinds from `REQUESTS` on belong to the handlers of requests."""

    HELLO = 1
    """Opens a lane of an epoch. part: lane. bucket: 1 if the caller sends frames on this lane. Payload: node id."""
    WELCOME = 2
    REFUSED = 3
    """Payload: the reason; the connection then ends."""
    PING = 4
    EXCHANGE = 5
    """call: number of the exchange. Payload: the member's payload."""
    LOST = 6
    """Payload: cause, a space, and the ids of lost nodes."""
    GOODBYE = 7
    """The sender leaves the epoch in order."""
    CONTRIBUTION = 8
    """call: number of the reduction. Payload: part of the encoded values of the receiver's slice of the bucket."""
    AVERAGE = 9
    """call: number of the reduction. Payload: part of the encoded average of the sender's slice of the bucket."""
    REQUESTS = 64


class FrameError(ElasticError):
    """Report a frame that the protocol does not permit."""


class Header(NamedTuple):
    """Header without magic and checksum."""

    kind: int
    length: int = 0
    epoch: int = 0
    call: int = 0
    round: int = 0
    bucket: int = 0
    part: int = 0


@dataclass(frozen=True)
class WireFrame:
    """Complete frame with a short payload."""

    header: Header
    payload: bytes


def pack_header(header: Header, payload: Payload) -> bytes:
    """Return the header's bytes with the checksum of header and payload."""
    kind, length, *numbers = header
    fields = FIELDS.pack(MAGIC, kind, *numbers, length)
    return fields + CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(fields)))


def parse_header(data: bytes) -> Header:
    """Read the header from HEADER_BYTES bytes. Raises FrameError."""
    fields: tuple[Any, ...] = FIELDS.unpack_from(data)
    magic, kind, *numbers, length = fields
    if magic != MAGIC:
        raise FrameError(f"a frame begins with {MAGIC!r}, not with {magic!r}")
    return Header(kind, length, *numbers)


def check_payload(header_data: bytes, payload: Payload) -> None:
    """Compare the checksum. Raises FrameError."""
    (expected,) = CHECKSUM.unpack_from(header_data, FIELDS.size)
    if zlib.crc32(payload, zlib.crc32(header_data[: FIELDS.size])) != expected:
        raise FrameError("the checksum differs")
