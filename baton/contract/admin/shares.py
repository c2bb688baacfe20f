"""Links that show one job to bearers without a key of their own."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from baton.contract.admin.keys import KeyCreated
from baton.contract.base import WireModel


class ShareRequest(WireModel):
    """Body of `POST /job/{id}/share`. Example: `{"expires_in_s": 86400}`"""

    expires_in_s: Annotated[int, Field(ge=60, le=30 * 86_400)] = 7 * 86_400


class ShareCreated(KeyCreated):
    """The only answer that shows the link and its key. `DELETE /keys/{id}` ends both, also by a submitter.

    Example: `{"url": "https://abc.example.com/console#share=baton_k3f9a0b1_...&job=146683a1-...", "id": "k3f9a0b1",
    "key": "baton_k3f9a0b1_...", "scopes": ["view"], "job": "146683a1-...", ...}`
    """

    url: str
