"""The names of a job's inputs for a client of the original orchestrator, which hears them all in one answer."""

from __future__ import annotations

import json
from collections.abc import Iterator

from baton.contract.datasets import is_manifest
from baton.contract.names import DATA_BUCKET
from functions.api.context import Call, Context
from functions.api.paging import every_item, sent_bytes
from functions.domain.records import Job

MAX_KEYS_BYTES = 5_000_000
"""Of all names as Lambda sends them, whose answers end at 6 MB; the job's other columns take less than the rest."""


class TooManyNames(Exception):  # noqa: N818 - no error of ours: the job is none for this client
    """No answer could hold the names of this job's inputs. Half a list would be trained on as if it were the whole."""

    def __init__(self, prefix: str) -> None:
        super().__init__(
            f"the names of its inputs, as below {prefix[:200]}, take more than the {MAX_KEYS_BYTES:,} bytes that a "
            "client of the original orchestrator can be told at once: let Baton's agent (python -m gpu_client.agent) "
            "take this job, or split the data"
        )


def input_keys(context: Context, call: Call, job: Job) -> dict[str, list[str]]:
    """The keys of each input by the name it is known under, `instance` and `class`. Raises TooManyNames."""
    keys: dict[str, list[str]] = {}
    room_bytes = MAX_KEYS_BYTES
    for ref in job.spec.inputs:
        known = keys.setdefault(ref.into, [])
        for key in _below(context, call, ref.prefix):
            room_bytes -= sent_bytes(json.dumps(key)) + 2  # a comma and a space
            if room_bytes < 0:
                raise TooManyNames(ref.prefix)
            known.append(key)
    return keys


def _below(context: Context, call: Call, prefix: str) -> Iterator[str]:
    pages = every_item(lambda cursor: context.objects.list(call.tenant, DATA_BUCKET, prefix, limit=1000, cursor=cursor))
    # A manifest they would take for an image.
    return (entry.key for entry in pages if not is_manifest(entry.key))
