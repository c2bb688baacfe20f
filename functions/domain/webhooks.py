"""Check addresses of webhooks, sign deliveries, and schedule retries."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from baton.contract.admin.webhooks import DeliveryState
from baton.contract.errors import ErrorCode
from baton.contract.fleets.events import FleetEventType
from baton.contract.jobs.history import EventType
from functions.domain.errors import Refusal
from functions.domain.record_base import Record

GIVE_UP_AFTER_S = 86_400
BACKOFF_S = (5, 15, 60, 300, 900, 1800, 3600)
"""Retry delays after the first, second, ... failed attempt; the last delay repeats."""

METADATA = frozenset(map(ipaddress.ip_address, ("169.254.169.254", "168.63.129.16", "100.100.100.200")))
"""Metadata addresses of clouds, including public addresses."""

_NETWORKS = (
    ("0.0.0.0/32", "an unspecified address"),
    ("127.0.0.0/8", "a loopback address"),
    ("169.254.0.0/16", "a link-local address"),
    ("224.0.0.0/4", "a multicast address"),
    ("240.0.0.0/4", "a reserved address"),
    ("0.0.0.0/8", "a private address"),
    ("10.0.0.0/8", "a private address"),
    ("100.64.0.0/10", "a private address"),
    ("172.16.0.0/12", "a private address"),
    ("192.0.0.0/24", "a private address"),
    ("192.0.2.0/24", "a private address"),
    ("192.88.99.0/24", "a private address"),
    ("192.168.0.0/16", "a private address"),
    ("198.18.0.0/15", "a private address"),
    ("198.51.100.0/24", "a private address"),
    ("203.0.113.0/24", "a private address"),
    ("::/128", "an unspecified address"),
    ("::1/128", "a loopback address"),
    ("::/96", "an IPv4 address in disguise"),
    ("::ffff:0:0/96", "an IPv4 address in disguise"),
    ("64:ff9b::/96", "an IPv4 address in disguise"),
    ("64:ff9b:1::/48", "an IPv4 address in disguise"),
    ("2001::/32", "an IPv4 address in disguise"),
    ("2002::/16", "an IPv4 address in disguise"),
    ("fe80::/10", "a link-local address"),
    ("fec0::/10", "a local address"),
    ("ff00::/8", "a multicast address"),
    ("2001::/23", "a private address"),
    ("2001:db8::/32", "a private address"),
    ("3fff::/20", "a private address"),
    ("fc00::/7", "a private address"),
)
_REFUSED = tuple((ipaddress.ip_network(network), kind) for network, kind in _NETWORKS)
"""IANA's special-purpose registries, written out: `ipaddress.is_global` has other entries in each version of Python.

The guard also refuses the globally reachable assignments within 192.0.0.0/24 and 2001::/23. The anycast addresses among
these assignments lead to a translator of the function's own network; no web server has such an address.
"""

_UNICAST = ipaddress.ip_network("2000::/3")
"""The only part of IPv6 from which IANA has assigned public addresses."""

MAX_NAME = 253
_NAME = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_NUMBER = re.compile(r"(.*\.)?([0-9]+|0x[0-9a-f]*)")
"""Host that ends in a number, and is therefore an IPv4 address in decimal, octal or hexadecimal notation."""


class Webhook(Record):
    """Address that receives events. `types` empty: all types of events of jobs. `secret`: signs each delivery."""

    id: str
    tenant: str
    url: str
    secret: str
    types: list[EventType | FleetEventType] = []
    every_job: bool = True
    created_at: int

    def wants(self, type_: str, named: str | None) -> bool:
        """Return True if the webhook receives an event of a job that named the webhook `named`."""
        return (self.every_job or self.id == named) and (not self.types or type_ in self.types)

    def wants_of_fleets(self, type_: str) -> bool:
        """Return True if the webhook names the type of an event of fleets; most receivers know events of jobs only."""
        return self.every_job and type_ in self.types


class Delivery(Record):
    """State of the delivery of one event to one webhook."""

    webhook_id: str
    job_id: str
    """Subject of the event: the job's id, or `fleet/<name>`."""
    seq: int
    type: EventType | FleetEventType
    at: int
    """Instant of the event, by which the delivery log is sorted."""
    state: DeliveryState
    attempts: int
    last_at: int
    status: int | None = None
    problem: str = ""

    @property
    def place(self) -> tuple[int, str, int]:
        """Return the position in the webhook's delivery log."""
        return self.at, self.job_id, self.seq


@dataclass(frozen=True)
class WebhookTarget:
    """Parsed address of a webhook. `trusted`: the origin that a test configures and no rule refuses."""

    host: str
    port: int
    path: str
    secure: bool
    trusted: bool = False

    @property
    def host_header(self) -> str:
        """Return the Host header, with the port unless the port is the default."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == (443 if self.secure else 80) else f"{name}:{self.port}"


def parse_target(url: str, test_origin: str | None = None) -> WebhookTarget:
    """Parse the address of a webhook.

    Raises Refusal(INVALID_VALUE) unless the address is https without user and fragment and its host is permitted.
    """
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").removesuffix("."), parts.port
    except ValueError as error:
        raise _refused(f"is no address: {error}") from error
    if any(not "!" <= char <= "~" for char in url) or "\\" in url:
        raise _refused("has characters that an address has not: write others than ASCII as %XX, hosts as xn--")
    trusted = test_origin is not None and f"{parts.scheme}://{parts.netloc}" == test_origin
    if parts.scheme != "https" and not trusted:
        raise _refused("is not https")
    if "@" in parts.netloc or parts.fragment:
        raise _refused("has a user, a password or a fragment")
    if not host or port == 0:
        raise _refused("names no host")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    secure = parts.scheme == "https"
    if not trusted and (host == "localhost" or host.endswith((".localhost", ".local", ".internal"))):
        raise _refused(f"leads to {host}, a host of the control plane's network")
    if not trusted:
        _check_host(host)
    return WebhookTarget(host, port or (443 if secure else 80), path, secure, trusted)


def address_problem(address: str) -> str | None:
    """Return why an IP address is refused; None for a public address."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return "which is no address"
    if ip in METADATA:
        return "where a cloud tells about its machines"
    for network, kind in _REFUSED:
        if ip in network:
            return kind
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.scope_id is not None:
            return "a local address"
        if ip not in _UNICAST:
            return "a reserved address"
    return None


def signature(secret: str, at: int, body: bytes) -> str:
    """Return the header `baton-signature`: HMAC-SHA256 over `<at>.<body>`."""
    digest = hmac.new(secret.encode(), b"%d." % at + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


def backoff_s(attempts: int) -> int:
    """Return the retry delay in seconds after `attempts` failures."""
    return BACKOFF_S[min(attempts, len(BACKOFF_S)) - 1]


def _check_host(host: str) -> None:
    """Refuse a host that is neither a public address nor a name. Delivery checks the addresses of a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if len(host) > MAX_NAME or not _NAME.fullmatch(host):
            raise _refused("names no host that there could be") from None
        if _NUMBER.fullmatch(host):
            raise _refused("writes an IPv4 address otherwise than as four decimal numbers") from None
        return
    problem = address_problem(host)
    if problem:
        raise _refused(f"leads to {host}, {problem}")


def _refused(why: str) -> Refusal:
    return Refusal(ErrorCode.INVALID_VALUE, f"The address {why}.", field="url")
