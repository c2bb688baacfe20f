"""Define the status that the members of an epoch exchange in lockstep, and its encoding."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from baton.contract.elastic.data import DataProgress
from baton.contract.elastic.world import Round, WorldEpoch
from gpu_client.elastic.parameters import MAX_BUCKETS

PROTOCOL = 3
"""Version of the statuses and of the decisions on them; all nodes of a world have the same version."""
Weight = Annotated[int, Field(ge=0, le=10**13)]
"""Tokens of one node in one round. The sum of all nodes fits into a report."""


@dataclass(frozen=True)
class AttemptStatus:
    """Averages of an uncommitted round at one member.

    round: number of the round that a commit would complete. epoch: epoch of the newest reduce that this member began.
    members: members that took part in this reduce. weights: tokens of its contributors. tags: by bucket, the epoch in
    which this member's average became final; 0 for none. Equal tags mean identical bytes.
    """

    round: Round
    epoch: WorldEpoch
    members: tuple[str, ...]
    weights: Mapping[str, Weight]
    tags: tuple[int, ...]


@dataclass(frozen=True)
class MemberStatus:
    """State of one member at one exchange; every member decides from the statuses of all members.

    round, state_hash: committed outer state. synced_epoch: newest epoch in which the member had the group's state; 0
    after an exclusion. complete: False while the state mixes buckets of two rounds. behind: the member leaves the
    group, whose state has not arrived in time. ready: the member has a delta, or has refused its delta. weight: tokens
    of the delta. step_s: duration of the member's inner steps. next_epoch: newer epoch that the member knows of.
    leaving: the member leaves, after the round that includes its delta if it is ready, and has asked for that round
    for leaving_for_s. joining: a node is fetching the outer state.
    cut_off: the control plane has not answered the member lately. grace_s: patience with late members.
    metrics: newest metrics of the member, with its contribution. orders: for all members, by rules and commands.
    committed: orders of the committed round, in the first statuses of an epoch.
    data: shards that the delta has trained. idle: the member has no data at present.
    done: hash of the state that a commit would produce, once this member holds all averages. hashes: `done` by bucket.
    """

    node: str
    round: Round
    state_hash: int
    synced_epoch: WorldEpoch = 0
    complete: bool = True
    behind: bool = False
    ready: bool = False
    weight: Weight = 0
    ready_for_s: float = 0.0
    step_s: float = 0.0
    leaving: bool = False
    leaving_for_s: float = 0.0
    next_epoch: WorldEpoch = 0
    joining: bool = False
    cut_off: bool = False
    grace_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    orders: tuple[Mapping[str, Any], ...] = ()
    committed: tuple[Mapping[str, Any], ...] = ()
    data: DataProgress | None = None
    idle: bool = False
    attempt: AttemptStatus | None = None
    done: int | None = None
    hashes: tuple[int, ...] = ()

    @property
    def state(self) -> tuple[int, int]:
        """Return round and hash of the committed outer state."""
        return self.round, self.state_hash

    def encode(self) -> bytes:
        """Return the status as JSON, with hashes as base64 and tags as one bitmap for each epoch."""
        fields: dict[str, Any] = {**vars(self), "hashes": _encode_words(self.hashes)}
        if self.data is not None:
            fields["data"] = self.data.model_dump()
        if self.attempt is not None:
            fields["attempt"] = {**vars(self.attempt), "tags": _encode_tags(self.attempt.tags)}
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, payload: bytes) -> MemberStatus:
        """Read a status. Raises ValueError for any other payload."""
        try:
            fields = json.loads(payload)
            attempt = fields["attempt"]
            if attempt is not None:
                fields["attempt"] = {**attempt, "tags": _decode_tags(attempt["tags"])}
            cls(**fields)  # Refuses unknown fields.
            return _STATUSES.validate_python({**fields, "hashes": _decode_words(fields["hashes"])})
        except (LookupError, TypeError, AttributeError, RecursionError, struct.error) as error:
            raise ValueError(f"no status of a member: {error!r}") from error
        except ValidationError as error:
            problems = error.errors(include_url=False, include_input=False, include_context=False)
            raise ValueError(f"no status of a member: {problems[0]['loc']}: {problems[0]['msg']}") from error


_STATUSES = TypeAdapter(MemberStatus)


def _encode_words(words: Sequence[int]) -> str:
    return base64.b64encode(struct.pack(f"<{len(words)}Q", *words)).decode()


def _decode_words(text: str) -> tuple[int, ...]:
    packed = base64.b64decode(text, validate=True)
    return struct.unpack(f"<{len(packed) // 8}Q", packed)


def _encode_tags(tags: Sequence[int]) -> list[object]:
    bitmaps = {tag: sum(1 << place for place, one in enumerate(tags) if one == tag) for tag in set(tags) - {0}}
    return [len(tags), {str(tag): f"{bitmap:x}" for tag, bitmap in bitmaps.items()}]


def _decode_tags(encoded: list[Any]) -> tuple[int, ...]:
    if not 0 <= encoded[0] <= MAX_BUCKETS:
        raise ValueError(f"a status has {encoded[0]} buckets")
    tags = [0] * encoded[0]
    for tag, bitmap in encoded[1].items():
        bits = int(bitmap, 16)
        for place in range(bits.bit_length()):
            if bits >> place & 1:
                tags[place] = int(tag)
    return tuple(tags)
