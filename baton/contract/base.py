"""Building blocks of the wire models: the strict base class and the bounded types.

Pydantic builds a model at its first use (`defer_build`), because a function that starts cold needs few models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from baton.contract.names import FLEET_NAME_PATTERN

MAX_KEY_BYTES = 900
"""Longest object key that a user may choose. S3 allows 1,024 bytes; our own prefixes take the rest."""

MAX_PATH_BYTES = 800
"""Longest path below a directory. The key of an output is the job's prefix and this path."""

MAX_STEP = 10**12
MAX_OBJECT_BYTES = 5 * 1024**3
"""Largest object of a single S3 PUT."""

MAX_PARAMETERS_BYTES = 32 * 1024
MAX_PARAMETERS_DEPTH = 32
"""Deepest nesting of lists and objects. Our JSON reader fails at a depth of 200, counted over the whole stored job."""


class WireModel(BaseModel):
    """Base of every request. Refuses unknown fields; its values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class AnswerModel(BaseModel):
    """Base of every answer. Clients ignore unknown fields, so that the API can grow."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)


def path_problem(path: str, *, max_bytes: int = MAX_KEY_BYTES) -> str | None:
    """Return the reason why `path` is not a valid object key or path inside a checkpoint; None if `path` is valid."""
    try:
        size_bytes = len(path.encode("utf-8"))
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if not 1 <= size_bytes <= max_bytes:
        return f"has {size_bytes} bytes; 1 to {max_bytes} are allowed"
    if any(ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 for char in path):
        return "contains a control character"
    if "\\" in path:
        return "contains a backslash"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "has an empty, '.' or '..' part"
    return None


def checked_path(path: str, *, max_bytes: int = MAX_KEY_BYTES) -> str:
    """Return a valid `path` unchanged. Raises a validation error of type `invalid_key` for an invalid one."""
    problem = path_problem(path, max_bytes=max_bytes)
    if problem:
        raise PydanticCustomError("invalid_key", "{path} {problem}", {"path": ascii(path[:80]), "problem": problem})
    return path


def _checked_relative_path(path: str) -> str:
    return checked_path(path, max_bytes=MAX_PATH_BYTES)


def _checked_prefix(prefix: str) -> str:
    return prefix if prefix == "" else checked_path(prefix.removesuffix("/")) + "/" * prefix.endswith("/")


ObjectKey = Annotated[
    str,
    AfterValidator(checked_path),
    Field(min_length=1, max_length=MAX_KEY_BYTES, description="Object key: '/'-separated UTF-8, no '..'"),
]
KeyPrefix = Annotated[
    str, AfterValidator(_checked_prefix), Field(max_length=MAX_KEY_BYTES, description="Prefix of object keys")
]
RelativePath = Annotated[
    str,
    AfterValidator(_checked_relative_path),
    Field(min_length=1, max_length=MAX_PATH_BYTES, description="Path inside a directory, '/'-separated, no '..'"),
]
JOB_ID_PATTERN = r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
JobId = Annotated[
    str,
    Field(
        pattern=JOB_ID_PATTERN,
        description="Job id, a lower-case UUID",
        examples=["146683a1-cb76-4702-9fef-fcccd32594f1"],
    ),
]
QueueName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$", description="Queue name", examples=["default"])]
FleetName = Annotated[str, Field(pattern=FLEET_NAME_PATTERN)]
TagName = Annotated[str, Field(min_length=1, max_length=64)]
TagValue = Annotated[str, Field(max_length=256)]
Step = Annotated[int, Field(ge=0, le=MAX_STEP, description="Training step, counted from 0")]
Epoch = Annotated[int, Field(ge=0, le=10**9, description="Number of the attempt; rises with every claim")]
EpochSeconds = Annotated[int, Field(ge=0, le=10**11, description="Instant in seconds since 1970, server clock")]
SizeBytes = Annotated[int, Field(ge=0, le=MAX_OBJECT_BYTES, description="Size in bytes")]
Blake3 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="BLAKE3-256, lower-case hex")]
Crc64 = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9+/]{10}[AEIMQUYcgkosw048]=$", description="CRC-64/NVME, big-endian, base64"),
]
Identity = Annotated[str, Field(max_length=128, pattern=r"^[\x21-\x7e]*$", description="Provider-given id")]
MetricName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_./-]{0,63}$")]
MetricValue = Annotated[float, Field(allow_inf_nan=False)]
Metrics = Annotated[
    dict[MetricName, MetricValue], Field(max_length=64, description="Named numbers reported by the training")
]
NonFinite = Literal["nan", "inf", "-inf"]
"""Name of a float that JSON cannot represent."""
JsonObject = dict[str, Any]


def depth_of(value: object) -> int:
    """Return the depth of nested lists and objects; 0 for a plain value."""
    depth, level = 0, [value]
    while containers := [item for item in level if isinstance(item, (dict, list))]:
        depth += 1
        level = [
            item
            for container in containers
            for item in (container.values() if isinstance(container, dict) else container)
        ]
    return depth


Cursor = Annotated[str, Field(min_length=1, max_length=2048, description="From `next_cursor` of the page before")]
PageLimit = Annotated[int, Field(ge=1, le=1000, description="Items per page")]
