"""The calls of rings in the control plane: records in a table; samples and manifests as objects, by presigned URL."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from baton.contract.base import AnswerModel, Crc64, Cursor, EpochSeconds, PageLimit, SizeBytes, WireModel

MAX_RECORD_BYTES = 390_000
"""Largest record. A DynamoDB item has at most 400 KB, including its keys."""
MAX_READ = 10
"""Records that one call reads; ten of the largest records fit into an answer."""
MAX_PREFIXES = 4
"""Prefixes whose records one call reads."""
MAX_RECORDS_BYTES = 4_000_000
"""Base64 of the records of one answer; an answer of a Lambda function has at most 6 MB."""
MAX_LISTED = 50
"""Rings of a page that also has records of each ring."""
MAX_URLS = 500
MAX_DELETED = 1000

_SAMPLES = "samples/"
_OBJECTS = (_SAMPLES, "manifests/")
_SEGMENT = r"[A-Za-z0-9_-][A-Za-z0-9_.-]*"
_KEY = rf"{_SEGMENT}(/{_SEGMENT}){{0,4}}"
KEY_PATTERN = rf"^{_KEY}$"
VERSION_PATTERN = r"^[0-9a-f]{16,32}$"
_BASE64_PATTERN = r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"

RingKey = Annotated[str, Field(pattern=KEY_PATTERN, max_length=300, description="Key within a ring")]
Version = Annotated[
    str,
    Field(
        pattern=VERSION_PATTERN,
        description="Drawn by chance by whoever writes: the same write, sent again, has the same one",
    ),
]
RingId = Annotated[Version, Field(description="The ring that is meant: another one of the same name is refused")]


_PREFIX = rf"({_SEGMENT}/){{1,4}}"
RingKeys = Annotated[
    str,
    Field(pattern=rf"^{_KEY}(,{_KEY}){{0,{MAX_READ - 1}}}$", max_length=1000, description="Keys, separated by commas"),
]


def is_object(key: str) -> bool:
    """Return True for the key of an object, False for the key of a record."""
    return key.startswith(_OBJECTS)


def is_sample(key: str) -> bool:
    """Return True for the key of an object that holds samples."""
    return key.startswith(_SAMPLES)


class RecordWrite(WireModel):
    """Write a record if its version is still `seen`; without `seen`, if there is none.

    Example: `{"key": "pointer", "data": "eyJtYW5pZmVzdCI6IDJ9", "version": "9f2c41d07be83a56",
    "seen": "146683a1cb764702"}`
    """

    key: RingKey
    data: Annotated[str, Field(pattern=_BASE64_PATTERN, max_length=1024 * 1024, description="Base64")]
    version: Version
    seen: Version | None = None


class RecordsRequest(WireModel):
    """Write one record, then read some. Both, either, or neither.

    Example: `{"write": {"key": "inbox/w.00000001.0000000007.1.1790000000000", "data": "",
    "version": "9f2c41d07be83a56"}, "read": ["writers/w"]}`
    """

    of: RingId | None = None
    write: RecordWrite | None = None
    read: Annotated[list[RingKey], Field(max_length=MAX_READ)] = []


class RecordView(AnswerModel):
    """Example: `{"key": "pointer", "data": "eyJtYW5pZmVzdCI6IDJ9", "version": "9f2c41d07be83a56"}`"""

    key: str
    data: str
    """Base64."""
    version: str


class RecordsAnswer(AnswerModel):
    """`written`: whether the record was written; None if none was to be. `records`: those that are there.

    Example: `{"written": true, "records": []}`
    """

    written: bool | None = None
    records: list[RecordView] = []


class RingRecordsQuery(WireModel):
    """Records by key, and all records below some prefixes. Example: `?keys=pointer,publisher&prefixes=writers/`"""

    keys: RingKeys | None = None
    prefixes: (
        Annotated[
            str,
            Field(
                pattern=rf"^{_PREFIX}(,{_PREFIX}){{0,{MAX_PREFIXES - 1}}}$",
                max_length=400,
                description="Prefixes, separated by commas; each ends with '/'",
            ),
        ]
        | None
    ) = None
    of: RingId | None = None
    limit: PageLimit = 100
    """Records below each prefix."""


class RingRecordsView(AnswerModel):
    """Existing records, those of `keys` first. Example: `{"records": [], "incomplete": ["writers/"]}`"""

    records: list[RecordView] = []
    incomplete: list[str] = []
    """Prefixes that have more records, and keys whose records are too large for this answer."""


class DeclaredObject(WireModel):
    """An object whose bytes are known: the store takes no others.

    Example: `{"key": "samples/w/00000001-0000000007", "size_bytes": 33554432, "crc64nvme": "UvieJR3alJI="}`
    """

    key: RingKey
    size_bytes: SizeBytes
    crc64nvme: Crc64


class UrlsRequest(WireModel):
    """URLs to store objects that are not there yet, and to fetch objects: keys below `samples/` and `manifests/`.

    `put`: of any bytes; `declared`: of these.

    Example: `{"put": ["samples/w/00000001-0000000007"], "get": ["manifests/000000000002"]}`
    """

    of: RingId | None = None
    put: Annotated[list[RingKey], Field(max_length=MAX_URLS)] = []
    declared: Annotated[list[DeclaredObject], Field(max_length=MAX_URLS)] = []
    get: Annotated[list[RingKey], Field(max_length=MAX_URLS)] = []


class PutUrl(AnswerModel):
    """PUT with exactly these headers. 412: there is an object. Example: `{"key": "samples/w/...", "url": "..."}`"""

    key: str
    url: str
    headers: dict[str, str] = {}


class GetUrl(AnswerModel):
    """GET. Example: `{"key": "samples/w/...", "url": "https://..."}`"""

    key: str
    url: str


class UrlsAnswer(AnswerModel):
    """Good for `life_s` seconds. Example: `{"put": [], "get": [], "life_s": 3600}`"""

    put: list[PutUrl]
    get: list[GetUrl]
    life_s: int


class DeleteRequest(WireModel):
    """Forget records and objects; those that are not there are passed over.

    Example: `{"keys": ["inbox/w.00000001.0000000007.1.1790000000000"]}`
    """

    of: RingId | None = None
    keys: Annotated[list[RingKey], Field(min_length=1, max_length=MAX_DELETED)]


class RingKeysQuery(WireModel):
    """Keys below a prefix. Example: `?prefix=inbox/&limit=1000`"""

    prefix: Annotated[str, Field(pattern=rf"^{_PREFIX}$", max_length=300, description="Ends with '/'")]
    of: RingId | None = None
    limit: PageLimit = 1000
    cursor: Cursor | None = None


class RingKeysPage(AnswerModel):
    """In order. Example: `{"keys": ["inbox/w.00000001.0000000007.1.1790000000000"], "next_cursor": null}`"""

    keys: list[str]
    next_cursor: str | None = None


class RingsQuery(WireModel):
    """Query of a tenant's rings. Example: `?limit=100`"""

    limit: PageLimit = 100
    """With `records` at most 50 rings: the page costs a read for each ring."""
    cursor: Cursor | None = None
    records: RingKeys | None = None
    """Records of each ring that the page contains, too."""


class RingView(AnswerModel):
    """Example: `{"name": "shapes", "id": "9f2c41d07be83a56", "created_at": 1790000000, "removing": false}`"""

    name: str
    id: str
    created_at: EpochSeconds
    removing: bool = False
    """True while the ring is being removed; every use of the ring fails."""
    records: list[RecordView] = []
    """Existing records of `records` in the query."""


class RingsPage(AnswerModel):
    """By name. Example: `{"rings": [], "next_cursor": null}`"""

    rings: list[RingView]
    next_cursor: str | None = None


class RemovalAnswer(AnswerModel):
    """Samples that one call removed; repeat the call until `done`. Example: `{"removed": 1200, "done": false}`"""

    removed: int
    done: bool
