"""Why a model on the Hugging Face hub could not be had: the hub said no, or it could not be asked."""

from __future__ import annotations

from collections.abc import Iterator

from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import httpx  # type: ignore[attr-defined,unused-ignore]  # whichever the hub's library uses

_BUSY = frozenset((408, 425, 429))
"""Refusals that are none: the same request is answered later."""

LOADING_ERRORS = (OSError, ValueError, TypeError, RuntimeError, httpx.HTTPError)
"""What loading a model raises: from files that are not as they should be, and from the hub."""


def is_unreachable(error: BaseException) -> bool:
    """True if the hub could not be reached or could not answer, which says nothing of the model.

    diffusers wraps what the hub's library raised; of the errors in the chain the outermost that can tell counts.
    """
    found = False
    for one in _chain(error):
        if isinstance(one, HfHubHTTPError):
            status = one.response.status_code
            return status >= 500 or status in _BUSY
        if isinstance(one, (httpx.HTTPError, ConnectionError, TimeoutError)):
            return True
        # Raised where the hub could not be asked and the cache has nothing; and over some refusals, which follow.
        found = found or isinstance(one, LocalEntryNotFoundError)
    return found


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from or while handling, and so on."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__
