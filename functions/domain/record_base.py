"""Define the bases of stored values, from which a store takes key, attributes and condition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from functions.domain.table_keys import Key

Attribute = str | int | bool
"""Value stored beside a document, for conditions and indexes."""


class Record(BaseModel):
    """Base of stored values."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    BESIDE: ClassVar[frozenset[str]] = frozenset()
    """Fields that are stored as attributes only and can be written without the document."""


class TableRecord(Record):
    """A record with an item of its own in the jobs table.

    A new kind of record needs only a class: the stores take key, attributes and condition from the class.
    """

    PARTITION: ClassVar[str] = "JOB#"
    KIND: ClassVar[str]
    """Sort key, or its prefix if NUMBER follows."""
    NUMBER: ClassVar[str | None] = None
    """Field that distinguishes the records of one kind and partition; None for a single record."""
    DIGITS: ClassVar[int] = 10
    """Digits of NUMBER in the sort key."""
    NEWEST_FIRST: ClassVar[bool] = False
    """Lists begin with the highest NUMBER."""
    VERSION: ClassVar[str | None] = None
    """Field that rises by one with each write: a write requires the version before. None: writes are unconditional."""

    @classmethod
    def key(cls, owner: str, number: int = 0) -> Key:
        """Return the key of a record. `owner`: name of the partition, the job's id for nearly all kinds."""
        return Key(f"{cls.PARTITION}{owner}", f"{cls.KIND}{number:0{cls.DIGITS}d}" if cls.NUMBER else cls.KIND)

    def attributes(self) -> Mapping[str, Attribute]:
        """Return the attributes, besides VERSION, that conditions and indexes read."""
        return {}
