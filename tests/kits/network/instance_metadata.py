"""Metadata service of EC2, as far as preemption notices need the service."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

from tests.kits.network.http_server import HttpServer, QuietHandler


class MetadataService(HttpServer):
    """Metadata service that demands tokens as version 2 does.

    `date` None: the service's clock is right.
    """

    def __init__(self) -> None:
        self.status, self.body = 404, ""
        self.date: str | None = None
        self.token = "t1"
        self.asked: list[str] = []
        service = self

        class Handler(QuietHandler):
            def do_PUT(self) -> None:
                service.asked.append("token")
                fine = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                self.say(200 if fine else 400, service.token)

            def do_GET(self) -> None:
                service.asked.append(self.path)
                if self.headers["X-aws-ec2-metadata-token"] != service.token:
                    return self.say(401, "")
                return self.say(service.status, service.body)

            def say(self, status: int, body: str) -> None:
                self.send_response_only(status)
                self.send_header("Date", service.date or format_datetime(datetime.now(UTC), usegmt=True))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

        super().__init__(Handler)

    def announce(self, within_s: float) -> None:
        """Announce the end of the machine in `within_s` seconds."""
        at = datetime.now(UTC) + timedelta(seconds=within_s)
        self.body = json.dumps({"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")})
        self.status = 200
