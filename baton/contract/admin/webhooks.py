"""Webhooks: the URLs that receive a tenant's events, and the state of each delivery."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from baton.contract.base import AnswerModel, Cursor, EpochSeconds, FleetName, JobId, PageLimit, WireModel
from baton.contract.fleets.events import FleetEventType
from baton.contract.jobs.history import EventType

MAX_WEBHOOKS = 20
"""Largest number of webhooks of one tenant."""

WebhookId = Annotated[
    str, Field(pattern=r"^[a-z0-9]{8,32}$", description="From `id` of a webhook", examples=["9f2c41d07be83a5610cd"])
]


class WebhookCreate(WireModel):
    """A new webhook. Example: `{"url": "https://hooks.example.com/baton", "types": ["job.completed", "job.failed"]}`"""

    url: Annotated[
        str,
        Field(
            max_length=2048,
            pattern=r"^https?://[\x21-\x7e]+$",
            description="Where events are POSTed: https, and a public machine",
            examples=["https://hooks.example.com/baton"],
        ),
    ]
    types: Annotated[
        list[EventType | FleetEventType],
        Field(max_length=64, description="Only these; empty means all events of jobs, and none of fleets"),
    ] = []
    every_job: Annotated[
        bool, Field(description="False: only of jobs that name this webhook in `webhook` when they are submitted")
    ] = True


class WebhookView(AnswerModel):
    """A webhook without its secret.

    Example: `{"id": "9f2c41d07be83a5610cd", "url": "https://hooks.example.com/baton", "created_at": 1790000000, ...}`
    """

    id: WebhookId
    url: str
    types: list[EventType | FleetEventType] = []
    every_job: bool = True
    created_at: EpochSeconds


class WebhookCreated(WebhookView):
    """The only answer that shows the secret, with which deliveries are signed.

    Example: `{"id": "9f2c41d07be83a5610cd", "url": "https://hooks.example.com/baton", "created_at": 1790000000,
    "secret": "bGVh...", ...}`
    """

    secret: str


class WebhookList(AnswerModel):
    """All of a tenant's webhooks. Example: `{"webhooks": []}`"""

    webhooks: list[WebhookView]


class DeliveryState(StrEnum):
    """State of a delivery."""

    WAITING = "waiting"
    """The last attempt failed; another attempt follows."""
    DELIVERED = "delivered"
    FAILED = "failed"
    """No further attempt: all attempts failed for a day, or the last failure was permanent."""


class DeliveryView(AnswerModel):
    """Event for one webhook.

    Example: `{"event_id": "146683a1-cb76-4702-9fef-fcccd32594f1#3", "type": "job.completed", "state": "waiting",
    "attempts": 2, "last_at": 1790000100, "status": 503, "problem": "answered 503"}`
    """

    event_id: str
    type: EventType | FleetEventType
    state: DeliveryState
    attempts: int
    last_at: EpochSeconds
    status: int | None = Field(default=None, description="HTTP status of the last answer; null if there was none")
    problem: str = ""


class DeliveryQuery(WireModel):
    """Query of a webhook's deliveries. Example: `?limit=100`"""

    limit: PageLimit = 100
    cursor: Cursor | None = None


class DeliveryPage(AnswerModel):
    """Newest event first, of the last 30 days. Example: `{"deliveries": [], "next_cursor": null}`"""

    deliveries: list[DeliveryView]
    next_cursor: str | None = None


class ReplayRequest(WireModel):
    """Deliver a job's events again. Example: `{"job_id": "146683a1-cb76-4702-9fef-fcccd32594f1", "from_seq": 1}`"""

    job_id: JobId
    from_seq: Annotated[int, Field(ge=1, le=10**9, description="The first event that comes again")] = 1


class FleetReplayRequest(WireModel):
    """Deliver a fleet's events again. Example: `{"fleet": "nights", "from_at": 1790000000}`"""

    fleet: FleetName
    from_at: Annotated[EpochSeconds, Field(description="Time of the first event that comes again, by `at`")] = 0


class ReplayAnswer(AnswerModel):
    """Number of events that were queued. Example: `{"queued": 7, "next_seq": null, "next_at": null}`"""

    queued: int
    next_seq: int | None = Field(
        default=None, description="The job has more events than one call takes: ask again with this `from_seq`"
    )
    next_at: EpochSeconds | None = Field(
        default=None, description="The fleet has more events than one call takes: ask again with this `from_at`"
    )
