"""From a socket into a file within the kernel: no byte passes through this process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse

from gpu_client.transport.files import local_errors

PIPE_BYTES = 1024 * 1024
_BUFFERED_BYTES = 64 * 1024
"""More than http.client reads ahead."""


class Pipe:
    """Between a socket and a file, as large as the system allows."""

    def __init__(self, source: int, end: int) -> None:
        self.source, self._end = source, end
        with contextlib.suppress(OSError):  # a user may have only so many large ones: smaller steps then
            fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def fill(self, response: HTTPResponse, wanted_bytes: int, stall_s: float) -> int:
        """Take the body's next bytes, at most so many. TimeoutError if none come.

        0 at the end of the connection, and where the kernel takes none from such a socket.
        """
        while True:
            try:
                got = os.splice(response.fileno(), self._end, min(wanted_bytes, PIPE_BYTES))
            except BlockingIOError:
                poller = select.poll()
                poller.register(response.fileno(), select.POLLIN)
                if not poller.poll(stall_s * 1000):
                    raise TimeoutError(f"no byte came for {stall_s:g} s") from None
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.ENOSYS):
                    return 0
                raise
            else:
                response.length = (response.length or 0) - got
                return got


def can_splice(response: HTTPResponse, url: str, body_bytes: int) -> bool:
    """Whether the body can be taken past this process: it is sent as it is, and is as long as it should be."""
    return hasattr(os, "splice") and url.startswith("http://") and response.length == body_bytes


def read_ahead(response: HTTPResponse) -> bytes:
    """What this process has of the body already, or gets with it; afterwards it has nothing."""
    return response.read1(_BUFFERED_BYTES)


@contextmanager
def pipe() -> Iterator[Pipe]:
    """For one body."""
    with local_errors("making a pipe"):
        source, end = os.pipe()
    try:
        yield Pipe(source, end)
    finally:
        os.close(source)
        os.close(end)
