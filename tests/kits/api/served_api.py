"""API of a test behind the local gateway on the emulated cloud, for clients that speak HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from functions.api.http.authorizer import authorize
from functions.api.http.dispatch import dispatch
from functions.api.http.route import Route, all_routes
from functions.local.emulator import Emulator
from functions.local.gateway.http_gateway import GatewayRoute, GatewayServer, build_gateway
from gpu_client.ring.store.control_plane import ControlPlaneStore
from gpu_client.ring.store.uri import ControlPlaneAccess
from gpu_client.transport.retry import RetryPolicy
from tests.kits.api.harness import Api, emulated_api

QUICK = RetryPolicy(max_tries=3, budget_s=5.0, first_delay_s=0.01, max_delay_s=0.05)


@dataclass
class ServedApi:
    """API and its URL. `calls`: called routes. `lost`: routes whose next answer does not arrive."""

    api: Api
    url: str
    calls: list[str]
    lost: list[str]

    def access(self, key: str = "submit") -> ControlPlaneAccess:
        """Make the access of a client; `key`: a name in `api.keys`, or a whole key or token."""
        return ControlPlaneAccess(self.url, self.api.keys.get(key, key))

    def store(self, name: str, key: str = "submit") -> ControlPlaneStore:
        """Open a ring's store as another process would."""
        return ControlPlaneStore(name, self.access(key), policy=QUICK)


@contextmanager
def served_api(emulator: Emulator) -> Iterator[ServedApi]:
    """Serve an API with tables and buckets of its own."""
    api, calls, lost = emulated_api(emulator), list[str](), list[str]()

    def front_route(route: Route) -> GatewayRoute:
        def handler(event: dict[str, Any], _: Any) -> dict[str, Any]:
            calls.append(route.route_key)
            answer = dispatch(event, api.context, route.function)
            if route.route_key in lost:
                lost.remove(route.route_key)
                raise ConnectionAbortedError("after everything was done")
            return answer

        return GatewayRoute(route.method, route.path, handler, bool(route.scopes))

    def authorizer(event: dict[str, Any], _: Any) -> dict[str, Any]:
        return authorize(event, api.context.tokens, api.clock.now(), api.context.leases)

    with GatewayServer(build_gateway([front_route(route) for route in all_routes()], authorizer)) as server:
        yield ServedApi(api, server.url, calls, lost)
