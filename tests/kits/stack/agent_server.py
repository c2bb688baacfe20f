"""Fork agents that are imported already: `agent_server.py SOCKET`, the descriptor over which requests arrive.

A request is the environment of an agent, with the descriptors of its link and of its log. The answer on the link is the
process id, then the exit code. As with `subprocess`, the process id is not used again until the link is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys

import gpu_client.agent.app.program  # noqa: F401 - the import that takes 0.7 s

MAX_REQUEST_BYTES = 1_000_000
PR_SET_PDEATHSIG = 1


def answer(link: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the test did not wait for the end
        os.write(link, number.to_bytes(4, "big", signed=True))


def serve(requests: socket.socket) -> bool:
    """Serve until the test run closes its end. Returns True in each child, which is to be the agent."""
    events = selectors.DefaultSelector()
    events.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in events.select():
            if key.fileobj is requests:
                request, descriptors, *_ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 2)
                if not request:
                    return False
                link, log = descriptors
                if (pid := os.fork()) == 0:
                    events.close()
                    requests.close()
                    become(json.loads(request), log)
                    return True
                os.close(log)
                answer(link, pid)
                events.register(os.pidfd_open(pid), selectors.EVENT_READ, ("ended", link))
                continue
            what, number = key.data
            events.unregister(key.fd)
            if what == "ended":
                end = os.waitid(os.P_PIDFD, key.fd, os.WEXITED | os.WNOWAIT)
                assert end is not None
                answer(number, end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)
                events.register(number, selectors.EVENT_READ, ("known", end.si_pid))
            else:
                os.waitpid(number, 0)
            os.close(key.fd)


def become(environment: dict[str, str], log: int) -> None:
    """Make this process the leader of a session with this environment, whose output is the log."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)


gc.freeze()
if serve(socket.socket(fileno=int(sys.argv[1]))):
    sys.argv = ["gpu_client.agent"]
    runpy.run_module("gpu_client.agent", run_name="__main__", alter_sys=True)
