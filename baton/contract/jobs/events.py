"""The event that the control plane publishes when a job changes: the `detail` of an event on the bus."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from baton.contract.base import AnswerModel, Epoch, EpochSeconds, JobId, JsonObject
from baton.contract.jobs.history import EventType

EVENT_SOURCE = "baton"
"""`source` of every event. EventBridge rules match `source`, and the event's type as `detail-type`."""


class JobEvent(AnswerModel):
    """A transition of a job, published after its commit. docs/events.md specifies `data`.

    Example: `{"schema_version": 1, "id": "146683a1-cb76-4702-9fef-fcccd32594f1#3", "type": "checkpoint.committed",
    "job_id": "146683a1-cb76-4702-9fef-fcccd32594f1", "tenant": "default", "seq": 3, "epoch": 1, "at": 1790000000,
    "data": {"step": 100, "total_bytes": 5242880, "files": 4}, "data_omitted": false}`
    """

    schema_version: Literal[1] = 1
    """Increases when a field changes its meaning or disappears. New fields, types and data do not increase it."""
    id: str = Field(description="`<job>#<seq>`: the same for every delivery of the same event")
    type: EventType
    job_id: JobId
    tenant: str
    seq: int = Field(ge=1, description="Counts the job's events without a gap: their order")
    epoch: Epoch
    at: EpochSeconds
    data: JsonObject = {}
    data_omitted: bool = Field(
        default=False, description="True when `data` was too large to publish: GET /job/{id}/events has it"
    )

    @property
    def subject(self) -> str:
        """Return what the event is about; the events of one subject are delivered in their order."""
        return self.job_id


def event_id(job_id: str, seq: int) -> str:
    """Return the id of the event `seq` of a job."""
    return f"{job_id}#{seq}"
