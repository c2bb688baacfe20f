"""Relay the world calls of an elastic training to the control plane, with the attempt's lease.

The training process has no API key. The process connects to a Unix socket (`BATON_WORLD` names its path), sends one
JSON line for each call, and reads one JSON line as the answer::

    -> {"call": "join", "body": {"node": "3.1.9f86d081", "round": 12, "program": {...}}}
    <- {"status": 200, "body": {"job": "146683a1-...", "epoch": 4, "nodes": [...]}}
    <- {"status": 409, "code": "world_changed", "message": "..."}
    <- {"status": 0, "code": "unreachable", "message": "..."}

Status 0: the control plane gave no answer, and the call may or may not have been executed. The process is a user's
program and is not trusted, therefore the relay checks each body against its model.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from baton.contract.elastic.data import DataGrant, DataRequest
from baton.contract.elastic.nodes import ELASTIC_PORT
from baton.contract.elastic.relay import RelayAnswer, RelayRequest
from baton.contract.elastic.world import EpochProposal, JoinRequest, WorldReport, WorldSeat, WorldView
from baton.contract.errors import ErrorCode
from gpu_client.agent.control.socket_directory import SocketDirectory
from gpu_client.transport.errors import ApiError, BatonError

MAX_CALL_BYTES = 256 * 1024
UNREACHABLE = "unreachable"
MAX_PORT = 65535
_PORT = re.compile(r":[0-9]+$")
_MAPPED = (
    ("PUBLIC_IPADDR", f"VAST_TCP_PORT_{ELASTIC_PORT}"),
    ("RUNPOD_PUBLIC_IP", f"RUNPOD_TCP_PORT_{ELASTIC_PORT}"),
)
"""Variables in which a provider tells its container the public address, and the port that leads to ELASTIC_PORT."""

_log = logging.getLogger("baton.job")


class WorldClient(Protocol):
    """Calls of `WorkerCalls` that the relay uses."""

    def world(self, job_id: str, lease_token: str) -> WorldView: ...

    def join_world(self, job_id: str, lease_token: str, request: JoinRequest) -> WorldView: ...

    def propose_epoch(self, job_id: str, lease_token: str, proposal: EpochProposal) -> WorldView: ...

    def report_world(self, job_id: str, lease_token: str, report: WorldReport) -> WorldView: ...

    def relay_world(self, job_id: str, lease_token: str, request: RelayRequest) -> RelayAnswer: ...

    def lease_shards(self, job_id: str, lease_token: str, request: DataRequest) -> DataGrant: ...


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 1024
    """Calls that wait for a busy agent: each relayed peer has a dozen of streams, and the kernel refuses the rest."""
    relay: WorldRelay


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        # The process may end at any moment, which resets the connection.
        with contextlib.suppress(OSError):
            while line := self.rfile.readline(MAX_CALL_BYTES + 1):
                if len(line) > MAX_CALL_BYTES:
                    answer = _refusal(f"a call has more than {MAX_CALL_BYTES} bytes")
                else:
                    answer = self.server.relay.answer(line)
                self.wfile.write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
                if len(line) > MAX_CALL_BYTES:
                    return


class WorldRelay:
    """Server of one attempt's world calls, from construction to `close`."""

    def __init__(self, client: WorldClient, job_id: str, lease_token: str) -> None:
        """`client` should have a short budget, because a member waits for the answer."""
        view = client.world
        self._calls: dict[str, tuple[type[BaseModel] | None, Callable[[Any], BaseModel]]] = {
            "view": (None, lambda _: view(job_id, lease_token)),
            "join": (JoinRequest, lambda body: client.join_world(job_id, lease_token, body)),
            "propose": (EpochProposal, lambda body: client.propose_epoch(job_id, lease_token, body)),
            "report": (WorldReport, lambda body: client.report_world(job_id, lease_token, body)),
            "lease": (DataRequest, lambda body: client.lease_shards(job_id, lease_token, body)),
            "relay": (RelayRequest, lambda body: client.relay_world(job_id, lease_token, body)),
        }
        self.has_joined = False
        """The process has asked to become a member, also if the control plane has refused or not answered."""
        self._directory = SocketDirectory()
        self.path = self._directory.path / "world"
        try:
            self._server = _Server(os.fspath(self.path), _Handler)
        except OSError:
            self._directory.remove()
            raise
        self._server.relay = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="world", daemon=True)
        self._thread.start()

    def answer(self, line: bytes) -> dict[str, Any]:
        """Send one call to the control plane. Returns the answer for the process; never raises."""
        try:
            message = json.loads(line)
            model, send = self._calls[message["call"]]
            body = None if model is None else model.model_validate(message.get("body"))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            known = ", ".join(sorted(self._calls))
            detail = _describe(error) if isinstance(error, ValidationError) else f"name one of {known}"
            return _refusal(f"the call is invalid: {detail}")
        self.has_joined = self.has_joined or message["call"] == "join"
        try:
            found = send(body)
        except ApiError as error:
            return {"status": error.status, "code": error.code, "message": error.message}
        except BatonError as error:
            _log.debug("world: %s: %s", message["call"], error)
            return {"status": 0, "code": UNREACHABLE, "message": str(error)}
        return {"status": int(HTTPStatus.OK), "body": found.model_dump(mode="json")}

    def close(self) -> None:
        """End the server and remove the socket."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._directory.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def describe_world(
    seat: WorldSeat,
    epoch: int,
    relay: WorldRelay,
    *,
    port: int,
    addresses: str,
    api_url: str,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return BATON_WORLD, the JSON that tells a training process its seat, its port and its addresses.

    epoch: the attempt at the seat. addresses: `host` or `host:port`, comma-separated; empty for the address that the
    provider maps to ELASTIC_PORT, as `environ` tells, else for the address from which this machine reaches `api_url`.
    An address without a port has port 0, for which the process puts in its own port.
    """
    mapped = find_mapped_address(environ) if not addresses and port in (0, ELASTIC_PORT) else ""
    if mapped:
        port, addresses = ELASTIC_PORT, mapped
    named = [one.strip() for one in addresses.split(",") if one.strip()] or [_find_own_host(api_url)]
    listed = [one if _PORT.search(one) else f"{one}:{port}" for one in named]
    return json.dumps(
        {**seat.model_dump(mode="json"), "attempt": epoch, "socket": str(relay.path), "port": port, "addresses": listed}
    )


def find_mapped_address(environ: Mapping[str, str]) -> str:
    """Return `host:port` that leads to ELASTIC_PORT of this container at Vast.ai or RunPod; empty elsewhere."""
    for host_name, port_name in _MAPPED:
        host, port = environ.get(host_name, "").strip(), environ.get(port_name, "").strip()
        if host and port.isdecimal() and 0 < int(port) <= MAX_PORT:
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return ""


def _find_own_host(api_url: str) -> str:
    """Return the address of the interface that routes to the control plane; no packet is sent."""
    parts = urlsplit(api_url)
    try:
        family, _, _, _, place = socket.getaddrinfo(parts.hostname, parts.port or 443, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            host = str(probe.getsockname()[0])
    except OSError as error:
        _log.warning("no address of this machine is known (%s): set BATON_ELASTIC_ADDRESSES", error)
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _refusal(message: str) -> dict[str, Any]:
    return {
        "status": int(HTTPStatus.UNPROCESSABLE_ENTITY),
        "code": ErrorCode.INVALID_VALUE.value,
        "message": message[:512],
    }


def _describe(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_input=False, include_context=False)[:3]
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in problems)
