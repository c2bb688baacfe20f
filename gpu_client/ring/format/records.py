"""Define the keys of stored records, and encode records as checksummed JSON.

ring.json              the settings (`RingSettings`)
schema.json            structure, dtypes and shapes of the samples
samples/<writer>/...   sample objects (`objects.py`)
inbox/...              claims of writers: objects that wait to be published (`manifest.py`)
manifests/<number>     the samples that can be read, as of one publication (`manifest.py`)
pointer                number of the newest manifest (`core/ring.py`)
writers/ readers/      leases of living processes (`core/liveness.py`)
publisher              lease of the process that publishes and collects (`core/maintenance.py`)
watched                seconds since the last renewal of each lease (`core/liveness.py`)
pins/ groups/          manifests that trainings need, and their shared decisions (`reading/batch_stream.py`)
quarantine/            notes of damaged objects (`core/damage_report.py`)
read                   samples read by departed readers (`core/garbage_collector.py`)
room                   bytes stored and granted, under `max_bytes` (`core/storage_quota.py`)
generators/ copies/    samples put under a name (`generating/named_counter.py`)
seeds                  the next unused seed (`generating/seeds.py`)
swaps                  times at which generations became readable (`tools/wirehead.py`)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import xxhash

SETTINGS = "ring.json"
SCHEMA = "schema.json"
SAMPLES = "samples/"
INBOX = "inbox/"
MANIFESTS = "manifests/"
POINTER = "pointer"
WRITERS = "writers/"
READERS = "readers/"
PUBLISHER = "publisher"
WATCHED = "watched"
PINS = "pins/"
GROUPS = "groups/"
QUARANTINE = "quarantine/"
READ_BEFORE = "read"
ROOM = "room"
GENERATORS = "generators/"
"""Prefix of counts under names that a later process may continue."""
COPIES = "copies/"
"""Prefix of counts under names that no later process continues."""
SEEDS = "seeds"
SWAPS = "swaps"

_CHECKSUM = re.compile(rb',"digest":"([0-9a-f]{32})"\}')
_CHECKSUM_BYTES = 45
_DIGEST = re.compile(r"[0-9a-f]{32}")


class Versioned(NamedTuple):
    """Content and version of a record. Each content that a record ever has gets a version of its own."""

    data: bytes
    version: str


def encode_checksummed(content: Mapping[str, Any]) -> bytes:
    """Encode a non-empty document as JSON with its XXH3-128 digest as the last member."""
    data = json.dumps(content, separators=(",", ":")).encode()
    return data[:-1] + b',"digest":"%s"}' % xxhash.xxh3_128_hexdigest(data).encode()


def decode_checksummed(data: bytes | memoryview, known: Set[str] | None = None) -> dict[str, Any]:
    """Decode and verify a document. Raises ValueError for altered bytes.

    Old documents have no digest; `known` lists the members of such a document. None accepts any member that cannot be a
    damaged digest.
    """
    data = bytes(data)
    checksum = _CHECKSUM.fullmatch(data, max(len(data) - _CHECKSUM_BYTES, 0))
    if checksum is not None:
        data = data[:-_CHECKSUM_BYTES] + b"}"
        if xxhash.xxh3_128_hexdigest(data).encode() != checksum[1]:
            raise ValueError("the document was altered")
    content = json.loads(data)
    if not isinstance(content, dict):
        raise ValueError("the document is not a JSON object")
    if checksum is None and known is None and any(name == "digest" or _like_digest(content[name]) for name in content):
        raise ValueError("the digest was altered")
    if checksum is None and known is not None and content.keys() - known:
        raise ValueError(
            f"the document was altered, or is of another kind: unknown member {min(content.keys() - known)[:40]!r}"
        )
    return content


def decode_record(record: Versioned | None) -> dict[str, Any]:
    """Decode a record; empty for a missing, unreadable or altered record."""
    if record is None:
        return {}
    try:
        return decode_checksummed(record.data)
    except ValueError:
        return {}


def _like_digest(value: object) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None
