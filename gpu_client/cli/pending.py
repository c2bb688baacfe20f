"""Submissions that may have arrived: repeated, they are the same job again.

A submission's idempotency key is written down before it is sent and forgotten once its outcome is known and shown. If
the command is interrupted, or no answer came, the next submission of exactly the same job uses the same key.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu_client.cli.errors import CliError, ExitCode
from gpu_client.transport.errors import ApiError

FORGOTTEN_AFTER_S = 24 * 3600
"""The same job a day later is meant as another one."""


@contextmanager
def idempotency_key(directory: Path, *asked: str) -> Iterator[str]:
    """The key for submitting what `asked` describes; kept if the block ends without an answer.

    Raises CliError if it cannot be written down. Two processes that submit the same at once get two keys.
    """
    path = directory / hashlib.sha256("\n".join(asked).encode()).hexdigest()
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CliError(
            f"the submission's key cannot be written to {directory}: {error.strerror}",
            "Set XDG_STATE_HOME to a directory that can be.",
            exit_code=ExitCode.FAILED,
        ) from error
    with os.fdopen(descriptor, "r+") as file:
        if not _ours(descriptor):
            yield uuid.uuid4().hex
            return
        key = file.read(64).strip()
        too_old = time.time() - os.fstat(descriptor).st_mtime > FORGOTTEN_AFTER_S
        if too_old or not re.fullmatch("[0-9a-f]{32}", key):
            key = uuid.uuid4().hex
            file.seek(0)
            file.truncate()
            file.write(key)
            file.flush()
        try:
            yield key
        except ApiError:
            path.unlink(missing_ok=True)
            raise
        path.unlink(missing_ok=True)


def _ours(descriptor: int) -> bool:
    """Whether no other process is submitting the same: neither still, nor just now while we waited."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(descriptor).st_nlink > 0
