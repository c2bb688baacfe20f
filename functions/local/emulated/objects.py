"""Durability of ministack's S3 against `kill -9`.

ministack writes the bytes of an object and then its description (content type, ETag, checksums) by two renames, and
answers afterwards. After a kill between the renames, the next start serves the new bytes with the old description or
with none. ministack only logs a failed write, and saves empty buckets and bucket settings at a graceful end only. This
module changes:

- Objects are stored with an intent. Both files are written aside; the rename of one small file that lists them commits
  the object; then both files move. A start completes the intents and removes files without an intent.
- Creation, deletion and settings of buckets are saved before the answer.
- A failed write ends the process instead of an acknowledgement.

Multipart uploads in progress are in memory, and lost after any restart (`NoSuchUpload`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from .tables import Response, stop_at_once


class DurableObjects:
    """Patch of the s3 module, for a process with S3_PERSIST=1 and PERSIST_STATE=1."""

    def __init__(
        self,
        s3: Any,
        persistence: Any,
        intents: Path,
        *,
        stop: Callable[[str], NoReturn] = stop_at_once,
    ) -> None:
        self._s3 = s3
        self._persistence = persistence
        self._intents = intents
        self._stop = stop
        self._numbers = itertools.count()

    def install(self) -> None:
        """Replace the storage of one object, and save the buckets after each request on a bucket."""
        self._intents.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle_request = self._s3.handle_request

        async def saved_request(
            method: str, path: str, headers: dict[str, str], body: bytes, query_params: dict[str, Any], **more: Any
        ) -> Response:
            response: Response = await handle_request(method, path, headers, body, query_params, **more)
            is_bucket_request = "/" not in path.strip("/")
            if is_bucket_request and method in ("PUT", "POST", "DELETE") and response[0] < 300:
                self._save_buckets()
            return response

        self._s3.handle_request = saved_request
        self._s3._persist_object = self.persist

    def persist(self, bucket: str, key: str, obj: dict[str, Any]) -> None:
        """Store bytes and description of an object atomically, and drop the body from memory."""
        s3 = self._s3
        place = s3._object_disk_path(bucket, key)
        description = {**s3._object_meta_from_record(obj), **s3._key_history_meta(bucket, key), "key": key}
        try:
            Path(place).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            moves = [self._write_aside(json.dumps(description).encode(), place + ".meta.json")]
            if obj.get("body") is not None:
                moves.insert(0, self._write_aside(obj["body"], place))
            intent = self._intents / f"{next(self._numbers)}.json"
            intent.with_suffix(".tmp").write_text(json.dumps(moves))
            intent.with_suffix(".tmp").replace(intent)
            _complete(intent)
            base = str(Path(s3.DATA_DIR, s3.get_account_id(), bucket))
            s3._remove_key_files(s3._other_key_disk_path(base, key, place))
        except OSError as error:
            self._stop(f"object {bucket}/{key} could not be saved ({error}); stopping so that nothing is lost")
        obj["body"] = None

    def _save_buckets(self) -> None:
        """Write the file that ministack writes at a graceful end and reads at a start."""
        content = {
            "__ministack_format__": self._persistence._state_format_version("s3"),
            "payload": self._s3.get_state(),
        }
        place = Path(self._persistence.STATE_DIR, "s3.json")
        temporary = place.with_suffix(".saving")
        try:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_text(json.dumps(content, default=self._persistence._json_default))
            temporary.replace(place)
        except OSError as error:
            self._stop(f"the buckets could not be saved ({error}); stopping so that nothing is lost")

    def _write_aside(self, data: bytes, place: str) -> tuple[str, str]:
        path = self._intents / f"{next(self._numbers)}.data"
        path.write_bytes(data)
        return str(path), place


def finish_intents(intents: Path) -> int:
    """Complete every intent in the folder and remove other files; return the number of completed intents.

    The caller runs this function before ministack reads its objects. The order is irrelevant: each intent is completed
    before the next request, so one object has at most one open intent.
    """
    if not intents.is_dir():
        return 0
    found = sorted(intents.glob("*.json"))
    for intent in found:
        _complete(intent)
    for leftover in intents.iterdir():
        leftover.unlink()
    return len(found)


def _complete(intent: Path) -> None:
    for source, place in json.loads(intent.read_text()):
        if Path(source).exists():
            Path(source).replace(place)
    intent.unlink()
