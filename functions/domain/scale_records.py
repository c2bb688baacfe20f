"""What is stored of groups that rules scale."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import ClassVar

from functions.domain.stored import Attribute, Record, TableRecord


class ScaleOrder(Record):
    """What one rule has decided on one group. It stands with the rule's job until it is carried out: as often as
    somebody begins it anew, it names the same jobs."""

    number: str
    """Of the job: no other order of it ever has the same."""
    rule: str
    revision: int
    """Of the rules that this one is of."""
    step: int
    group: str
    source: str | None = None
    """The job that is copied, if one is."""
    copies: int = 0
    leaving: list[str] = []
    """The jobs that are taken out."""

    def copy_ids(self, job_id: str) -> list[str]:
        """Of the jobs that it makes. `job_id`: of the rule's job."""
        return [_uuid(f"{job_id}\n{self.number}\n{index}") for index in range(self.copies)]


def _uuid(name: str) -> str:
    """As RFC 9562 has it for names, of a version that is its user's own (8)."""
    digits = sha256(f"baton copy\n{name}".encode()).hexdigest()
    return f"{digits[:8]}-{digits[8:12]}-8{digits[13:16]}-8{digits[17:20]}-{digits[20:32]}"


class ScalingRecord(TableRecord):
    """What rules have decided on a group, so that those who decide at the same moment count each other's jobs.

    `version` rises by one with every write and is the condition of the next one.
    """

    PARTITION: ClassVar[str] = "SCALING#"
    KIND: ClassVar[str] = "SCALING"
    VERSION: ClassVar[str | None] = "version"

    version: int
    tenant: str
    group: str
    copies: list[str] = []
    """Jobs that may not be written yet, or not seen in an index, and had not ended when this was written."""
    leaving: list[str] = []
    """Jobs that are being taken out by orders that nobody has carried out to the end yet."""
    expires_at: int = 0

    @property
    def owner(self) -> str:
        """What the record's partition is named after."""
        return scaling_owner(self.tenant, self.group)

    def attributes(self) -> Mapping[str, Attribute]:
        """Return when the record may be deleted."""
        return {"ttl": self.expires_at}


def scaling_owner(tenant: str, group: str) -> str:
    """Return what the partition of a group's record is named after."""
    return f"{tenant}#{group}"
