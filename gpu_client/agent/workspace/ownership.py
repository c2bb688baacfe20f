"""For whom the things in a slot were made: jobs of another tenant must not find them.

A mark in the slot says it: a keyed digest of the control plane's address and the API key's id, under a key of its own
that says nothing. The API key's secret is not in it. Which tenant a key belongs to is not told to workers, so a rotated
key counts as another one; what that costs is a cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import uuid
from pathlib import Path

from baton.contract.names import KEY_ID_PATTERN
from gpu_client.agent.workspace.arena import remove_arena
from gpu_client.agent.workspace.safe_delete import empty_trash, ensure_directory, make_accessible
from gpu_client.transport.net.files import sync_directory

MARK = "owner.json"
_MARK_MAX_BYTES = 4096


def owner_id(api_url: str, api_key: str) -> str:
    """Who an agent works for, without the secret; something new each time for a key that is not one of ours."""
    parts = api_key.split("_", 2)
    key_id = parts[1] if len(parts) == 3 and re.fullmatch(KEY_ID_PATTERN, parts[1]) else uuid.uuid4().hex
    return f"{api_url.rstrip('/')}\n{key_id}"


def is_owned_by(slot: Path, owner: str) -> bool:
    """True if the things in the slot were made for this owner; False also if that cannot be told."""
    try:
        descriptor = os.open(slot / MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            mark = json.loads(os.read(descriptor, _MARK_MAX_BYTES))
        finally:
            os.close(descriptor)
        return bool(mark["digest"] == _digest(bytes.fromhex(mark["key"]), owner))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def write_mark(slot: Path, owner: str) -> None:
    """Note, atomically, whose things will be in the slot. Raises OSError."""
    key = secrets.token_bytes(16)
    temporary = slot / f".{MARK}.{uuid.uuid4().hex}"
    temporary.write_text(json.dumps({"key": key.hex(), "digest": _digest(key, owner)}), encoding="utf-8")
    temporary.chmod(0o600)
    temporary.replace(slot / MARK)


def clear_slot(slot: Path) -> tuple[Path, ...]:
    """Remove all that was left in a slot, its mark and its shared memory included; gives what is still there.

    Symbolic links are removed, never followed. Raises OSError if something cannot even be moved.
    """
    make_accessible(slot)
    remains = [] if remove_arena(slot) else [slot / "arena"]
    trash = slot / "trash"
    ensure_directory(trash)
    for entry in slot.iterdir():
        if entry not in (trash, *remains):
            make_accessible(entry)
            entry.rename(trash / uuid.uuid4().hex)
    remains += empty_trash(trash)
    # The new mark must not be on the disk before the old things are off it.
    sync_directory(slot)
    return tuple(remains)


def _digest(key: bytes, owner: str) -> str:
    return hashlib.blake2b(owner.encode(), key=key, digest_size=32).hexdigest()
