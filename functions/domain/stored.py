"""What all stored values have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Base of stored values."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
