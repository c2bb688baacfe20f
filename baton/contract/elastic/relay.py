"""Define the call by which two nodes exchange bytes through the object store, where neither reaches the other.

A channel is a pair of streams, one in each direction. A stream is a sequence of objects, numbered from 0, that its
sender creates once and its receiver reads once.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from baton.contract.base import AnswerModel, WireModel
from baton.contract.elastic.world import NodeId

MAX_RELAY_OBJECT_BYTES = 4 * 1024 * 1024
MAX_DOWNLOADS = 16
"""Objects whose URLs one call returns."""

Channel = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$", examples=["9f86d081"])]
"""Random name that the calling node has chosen."""
ObjectNumber = Annotated[int, Field(ge=0, le=10**8)]


class RelayUpload(WireModel):
    """Next object of a stream. Object 0 opens the channel.

    Example: `{"to": "1.1.ab34cd56", "channel": "9f86d081", "number": 0, "size_bytes": 812}`
    """

    to: NodeId
    channel: Channel
    number: ObjectNumber
    size_bytes: Annotated[int, Field(ge=1, le=MAX_RELAY_OBJECT_BYTES)]


class RelayDownload(WireModel):
    """Objects of a stream from `number` on; all objects before are deleted.

    Example: `{"source": "1.1.ab34cd56", "channel": "9f86d081", "number": 16}`
    """

    source: NodeId
    channel: Channel
    number: ObjectNumber


class RelayRequest(WireModel):
    """Body of `POST /job/{id}/world/relay`: sign URLs for one node, or show the channels that peers have opened to it.

    Example: `{"node": "0.1.9f86d081", "download": {"source": "1.1.ab34cd56", "channel": "9f86d081", "number": 0}}`
    """

    node: NodeId
    upload: RelayUpload | None = None
    download: RelayDownload | None = None
    calls: bool = False
    """True for the channels whose first object the node has not read yet."""


class RelayTarget(AnswerModel):
    """URL that accepts one PUT, with exactly these headers. 412: the object exists.

    Example: `{"url": "https://...", "headers": {"if-none-match": "*"}}`
    """

    url: str
    headers: dict[str, str]


class RelayCaller(AnswerModel):
    """Channel that a peer has opened. Example: `{"node": "1.1.ab34cd56", "channel": "9f86d081"}`"""

    node: NodeId
    channel: Channel


class RelayAnswer(AnswerModel):
    """Answer to `POST /job/{id}/world/relay`.

    Example: `{"downloads": ["https://..."], "life_s": 900}`
    """

    upload: RelayTarget | None = None
    downloads: list[str] = []
    """URLs of MAX_DOWNLOADS objects, which answer 404 until the sender has stored the object."""
    calls: list[RelayCaller] = []
    life_s: int
    """Seconds for which the URLs are valid."""
