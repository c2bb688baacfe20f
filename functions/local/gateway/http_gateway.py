"""HTTP gateway in front of the deployed Lambda handlers, in place of API Gateway.

The gateway matches a request with the route table, invokes the authorizer if the route is guarded, and invokes the
handler of the route with a payload 2.0 event. Handlers are thread-safe functions and run in a pool of threads.
`object_proxy.py` transfers the bytes of uploads and downloads.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import IO, Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from baton.contract.errors import ErrorCode
from functions.api.http.dispatch import sent_by_original
from functions.api.http.errors import build_error_response
from functions.domain.errors import Refusal
from functions.local.gateway.lambda_events import (
    BadAnswerError,
    HttpRequest,
    HttpResponse,
    RoutePattern,
    authorizer_event,
    common_fields,
    decode_path,
    function_event,
    http_response,
)
from functions.local.gateway.object_proxy import PUT_PART, ObjectProxy, StreamedResponse, plan_transfer
from functions.local.lambda_context import LambdaHandler, LocalContext, new_request_id
from functions.local.lifecycle import HOST, Lifecycle, bind_socket

logger = logging.getLogger(__name__)

BODY_LIMIT_BYTES = 10 * 1024 * 1024
# The gateway reads an oversized body up to this limit, so that the sender receives the 413 and no broken connection.
DRAIN_LIMIT_BYTES = 8 * BODY_LIMIT_BYTES
SPOOLED_BYTES = 1024 * 1024
"""Size in bytes up to which a request body stays in memory; a larger body is on disk."""
HANDLER_THREADS = 64
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 10.0
IDENTITY_HEADER = "x-api-key"


@dataclass(frozen=True)
class GatewayRoute:
    """A route; a `guarded` route requires the header x-api-key and passes the authorizer."""

    method: str
    path: str
    handler: LambdaHandler
    guarded: bool

    @property
    def key(self) -> str:
        """Route key of API Gateway, such as `POST /job/{id}/stop`."""
        return f"{self.method} {self.path}"


def build_gateway(routes: Sequence[GatewayRoute], authorizer: LambdaHandler) -> Starlette:
    """Build the ASGI application. Raises ValueError for a malformed or repeated route."""
    gateway = _Gateway(routes, authorizer)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        gateway.close()

    application = Starlette(lifespan=lifespan)
    # Starlette's router decodes paths before it matches; API Gateway decodes by other rules (`lambda_events.py`).
    application.router.default = gateway
    return application


class _Gateway:
    def __init__(self, routes: Sequence[GatewayRoute], authorizer: LambdaHandler) -> None:
        keys = [route.key for route in routes]
        if len(set(keys)) != len(keys):
            raise ValueError(f"repeated routes: {sorted({key for key in keys if keys.count(key) > 1})}")
        parsed = [(route, RoutePattern.parse(route.path)) for route in routes]
        # The most specific matching route wins, independent of the order of declaration.
        self._routes = sorted(parsed, key=lambda entry: entry[1].rank, reverse=True)
        self._authorizer = authorizer
        self._threads = ThreadPoolExecutor(HANDLER_THREADS, thread_name_prefix="handler")
        self._proxy = ObjectProxy()

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._proxy.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request_id = new_request_id()
        try:
            answer = await self._answer(Request(scope, receive), request_id)
        except ClientDisconnect:
            return
        response: Response
        if isinstance(answer, StreamedResponse):
            response = StreamingResponse(answer.pieces)
        else:
            response = Response(answer.body, answer.status)
        # A list of pairs, since set-cookie repeats; Starlette sets content-length.
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
        response.raw_headers = [
            *(pair for pair in headers if pair[0] != b"content-length" or isinstance(answer, StreamedResponse)),
            *(pair for pair in response.raw_headers if pair[0] == b"content-length"),
            (b"apigw-requestid", request_id.encode()),
        ]
        await response(scope, receive, send)

    async def _answer(self, request: Request, request_id: str) -> HttpResponse | StreamedResponse:
        incoming = _http_request(request)
        path = decode_path(incoming.raw_path)
        found = self._match(incoming.method, path)
        with tempfile.SpooledTemporaryFile(SPOOLED_BYTES) as body:
            if not await _read(request, body, limited=found is None or found[0].key != PUT_PART):
                message = f"The body is larger than {BODY_LIMIT_BYTES} bytes."
                return _refused(Refusal(ErrorCode.PAYLOAD_TOO_LARGE, message), request_id)
            if found is None:
                return _refused(Refusal(ErrorCode.NOT_FOUND, f"No route {incoming.method} {path}."), request_id)
            route, parameters = found
            size_bytes = body.tell()
            body.seek(0)
            transfer = plan_transfer(incoming, route.key, size_bytes)
            forwarded = replace(incoming, body=body.read()) if transfer is None else transfer.request
            key = route.key if transfer is None else transfer.route_key
            fields = common_fields(forwarded, key, path, parameters, request_id=request_id, now_s=time.time())
            context = await self._authorized(fields) if route.guarded else None
            if isinstance(context, HttpResponse):
                return context
            event = function_event(fields, forwarded.body, context)
            answer = await self._invoke(route, event)
            if transfer is None or answer.status != 200:
                return answer
            try:
                return await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._proxy.transfer, transfer, answer, body, size_bytes
                )
            except Refusal as refusal:
                return _refused(refusal, request_id, original=sent_by_original(event))

    async def _authorized(self, fields: dict[str, Any]) -> dict[str, Any] | HttpResponse:
        """Return the authorizer's context of the caller, or the answer that ends the call."""
        identity = fields["headers"].get(IDENTITY_HEADER, "")
        if not identity:
            refusal = Refusal(ErrorCode.UNAUTHORIZED, field=IDENTITY_HEADER)
            return _refused(refusal, fields["requestContext"]["requestId"])
        decision = await self._run(self._authorizer, authorizer_event(fields, identity), "authorizer")
        if not isinstance(decision, dict):
            return _gateway_error(500, "Internal Server Error")
        if decision.get("isAuthorized") is not True:
            return _gateway_error(403, "Forbidden")
        return decision.get("context") or {}

    def _match(self, method: str, path: str) -> tuple[GatewayRoute, dict[str, str]] | None:
        for route, pattern in self._routes:
            if route.method == method:
                parameters = pattern.match(path)
                if parameters is not None:
                    return route, parameters
        return None

    async def _invoke(self, route: GatewayRoute, event: dict[str, Any]) -> HttpResponse:
        answer = await self._run(route.handler, event, route.key)
        if isinstance(answer, BaseException):
            return _gateway_error(500, "Internal Server Error")
        try:
            return http_response(answer)
        except BadAnswerError:
            logger.exception("%s returned an answer that API Gateway refuses", route.key)
            return _gateway_error(500, "Internal Server Error")

    async def _run(self, handler: LambdaHandler, event: dict[str, Any], name: str) -> Any:
        """Return the answer of the handler, or log and return its exception, which must not reach the server."""
        function = getattr(handler, "__name__", type(handler).__name__)
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, handler, event, LocalContext(function)
            )
        except Exception as error:  # the boundary at which Lambda reports a failed invocation
            logger.error("%s failed", name, exc_info=error)
            return error


class GatewayServer(Lifecycle):
    """Server of an application: uvicorn in a thread, on 127.0.0.1. `port` 0 selects a free port."""

    def __init__(self, application: Starlette, *, port: int = 0) -> None:
        self._application = application
        self._port = port
        self._server: _UvicornServer | None = None
        self._thread: threading.Thread | None = None
        self._url = ""

    @property
    def url(self) -> str:
        """Base URL without a trailing slash. Raises RuntimeError if the gateway is not running."""
        if self._server is None:
            raise RuntimeError("the gateway is not running")
        return self._url

    def start(self) -> None:
        """Bind and serve; return once ready for requests. Raises OSError (port in use) or RuntimeError."""
        if self._server is not None:
            raise RuntimeError("the gateway is already running")
        listener = bind_socket(self._port)
        config = uvicorn.Config(
            self._application,
            log_config=None,
            access_log=False,
            server_header=False,
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="on",
            timeout_keep_alive=60,
            timeout_graceful_shutdown=int(STOP_TIMEOUT_S / 2),
        )
        server = _UvicornServer(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="gateway", daemon=True)
        thread.start()
        if not server.ready.wait(START_TIMEOUT_S):
            server.should_exit = True
            thread.join(STOP_TIMEOUT_S)
            listener.close()
            raise RuntimeError("the gateway did not start; see the log")
        self._server, self._thread = server, thread
        self._url = f"http://{HOST}:{listener.getsockname()[1]}"

    def stop(self) -> None:
        """Complete the open requests, then stop. Raises RuntimeError after a timeout. No effect if not running."""
        server, thread = self._server, self._thread
        self._server = self._thread = None
        if server is None or thread is None:
            return
        server.should_exit = True
        thread.join(STOP_TIMEOUT_S)
        if thread.is_alive():
            raise RuntimeError(f"the gateway did not stop within {STOP_TIMEOUT_S:.0f} s")


class _UvicornServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self.ready.set()


async def _read(request: Request, into: IO[bytes], *, limited: bool) -> bool:
    """Write the body to a file; False if the body exceeds the limit."""
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if not limited or size <= BODY_LIMIT_BYTES:
            into.write(piece)
        elif size > DRAIN_LIMIT_BYTES:
            break
    return not limited or size <= BODY_LIMIT_BYTES


def _http_request(request: Request) -> HttpRequest:
    scope = request.scope
    return HttpRequest(
        method=scope["method"],
        # Bytes that the client failed to escape are decoded as UTF-8, as escaped bytes are.
        raw_path=scope["raw_path"].decode("utf-8", "replace"),
        raw_query=scope["query_string"].decode("utf-8", "replace"),
        headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]],
        body=b"",
        source_ip=scope["client"][0] if scope.get("client") else HOST,
        protocol=f"HTTP/{scope['http_version']}",
    )


def _refused(refusal: Refusal, request_id: str, *, original: bool = False) -> HttpResponse:
    """Build the response to a refusal by the gateway, in the error format of the API."""
    return http_response(build_error_response(refusal, request_id=request_id, original=original))


def _gateway_error(status: int, message: str) -> HttpResponse:
    """Build an error in the format of API Gateway, for failures outside the handlers."""
    return HttpResponse(status, [("content-type", "application/json")], json.dumps({"message": message}).encode())
