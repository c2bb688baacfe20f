"""S3 of ministack, made whole against `kill -9`.

Left alone, ministack writes an object's bytes and then its description (content type, ETag, checksums) as two renames
and answers afterwards; killed between them, a later start shows the new bytes with the old description, or with none.
It only logs a failure to write, and it remembers empty buckets and bucket settings at a graceful end only. Here:

- an object is stored with an intent: both files are written aside, one small file naming them is renamed into place
  (from then on the object exists), and only then are they moved; a start finishes what an intent promises and clears
  away what never got one;
- bucket creation, deletion and settings are saved before they are answered;
- a write that the disk refuses ends the process instead of being acknowledged.

Multipart uploads under way live in memory and are gone after a restart, graceful or not (`NoSuchUpload`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from .tables import Response, stop_at_once


class Objects:
    """The patched s3 module, for a process that was started with S3_PERSIST=1 and PERSIST_STATE=1."""

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
        """Replace how one object is stored, and save the buckets after each request that is not about an object."""
        self._intents.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle_request = self._s3.handle_request

        async def saved_request(
            method: str, path: str, headers: dict[str, str], body: bytes, query_params: dict[str, Any], **more: Any
        ) -> Response:
            response: Response = await handle_request(method, path, headers, body, query_params, **more)
            about_a_bucket = "/" not in path.strip("/")
            if about_a_bucket and method in ("PUT", "POST", "DELETE") and response[0] < 300:
                self._save_buckets()
            return response

        self._s3.handle_request = saved_request
        self._s3._persist_object = self.persist

    def persist(self, bucket: str, key: str, obj: dict[str, Any]) -> None:
        """Store an object's bytes and description together or not at all; its body leaves the memory."""
        s3 = self._s3
        place = s3._object_disk_path(bucket, key)
        description = {**s3._object_meta_from_record(obj), **s3._key_history_meta(bucket, key), "key": key}
        try:
            Path(place).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            moves = [self._aside(json.dumps(description).encode(), place + ".meta.json")]
            if obj.get("body") is not None:
                moves.insert(0, self._aside(obj["body"], place))
            intent = self._intents / f"{next(self._numbers)}.json"
            intent.with_suffix(".tmp").write_text(json.dumps(moves))
            intent.with_suffix(".tmp").replace(intent)
            _carry_out(intent)
            base = str(Path(s3.DATA_DIR, s3.get_account_id(), bucket))
            s3._remove_key_files(s3._other_key_disk_path(base, key, place))
        except OSError as error:
            self._stop(f"object {bucket}/{key} could not be saved ({error}); stopping so that nothing is lost")
        obj["body"] = None

    def _save_buckets(self) -> None:
        """Write what ministack itself writes at a graceful end and reads at a start, in its format."""
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

    def _aside(self, data: bytes, place: str) -> tuple[str, str]:
        path = self._intents / f"{next(self._numbers)}.data"
        path.write_bytes(data)
        return str(path), place


def finish_intents(intents: Path) -> int:
    """Carry out every intent found in the folder and clear away the rest; the number carried out.

    Called before ministack reads its objects. The order does not matter: two intents for one object cannot both be
    left, since each is carried out before the next request.
    """
    if not intents.is_dir():
        return 0
    found = sorted(intents.glob("*.json"))
    for intent in found:
        _carry_out(intent)
    for leftover in intents.iterdir():
        leftover.unlink()
    return len(found)


def _carry_out(intent: Path) -> None:
    for source, place in json.loads(intent.read_text()):
        if Path(source).exists():
            Path(source).replace(place)
    intent.unlink()
