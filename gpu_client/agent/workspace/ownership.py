"""Mark each slot with its owner's API key, so that jobs of another tenant cannot read the slot's files.

The mark is a digest, under a random key, of the control plane's address and the API key's id, and does not contain the
API key's secret. Workers do not know the tenant of a key, therefore a rotated key counts as another owner; the price is
the loss of the caches.
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
    """Return the owner's name from address and key id, without the secret; a random name for a malformed key."""
    parts = api_key.split("_", 2)
    key_id = parts[1] if len(parts) == 3 and re.fullmatch(KEY_ID_PATTERN, parts[1]) else uuid.uuid4().hex
    return f"{api_url.rstrip('/')}\n{key_id}"


def is_owned_by(slot: Path, owner: str) -> bool:
    """Return True if the slot's files belong to this owner, False for another owner or an unreadable mark."""
    try:
        descriptor = os.open(slot / MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            mark = json.loads(os.read(descriptor, _MARK_MAX_BYTES))
        finally:
            os.close(descriptor)
        return bool(mark["digest"] == _compute_digest(bytes.fromhex(mark["key"]), owner))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def write_mark(slot: Path, owner: str) -> None:
    """Write, atomically, the owner of the slot's files. Raises OSError."""
    key = secrets.token_bytes(16)
    temporary = slot / f".{MARK}.{uuid.uuid4().hex}"
    temporary.write_text(json.dumps({"key": key.hex(), "digest": _compute_digest(key, owner)}), encoding="utf-8")
    temporary.chmod(0o600)
    temporary.replace(slot / MARK)


def clear_slot(slot: Path) -> tuple[Path, ...]:
    """Remove all files in a slot, with its mark and its shared memory; returns the files that stay.

    The removal never follows symbolic links. Raises OSError if an entry cannot be moved.
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
    # The disk must forget the old files before the caller writes the new mark.
    sync_directory(slot)
    return tuple(remains)


def _compute_digest(key: bytes, owner: str) -> str:
    return hashlib.blake2b(owner.encode(), key=key, digest_size=32).hexdigest()
