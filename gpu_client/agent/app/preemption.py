"""Poll EC2's instance metadata for the notice that a spot machine ends.

EC2 gives the notice two minutes ahead (docs.aws.amazon.com, "Spot Instance interruption notices") and recommends a poll
every five seconds. Salad and Vast.ai give no notice but SIGTERM.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal

import requests

from gpu_client.agent.app.shutdown import ShutdownRequest

logger = logging.getLogger("baton.spot")

EC2_METADATA = "http://169.254.169.254"
POLL_S = 5.0
TIMEOUT_S = 2.0
TOKEN_LIFE_S = 21_600
_VENDOR = Path("/sys/class/dmi/id/sys_vendor")


def is_ec2(vendor: Path = _VENDOR) -> bool:
    """Return True if the firmware of this machine names EC2. Uses no network."""
    try:
        return vendor.read_text(encoding="utf-8", errors="replace").strip() == "Amazon EC2"
    except OSError:
        return False


class Ec2Metadata:
    """Client of the metadata service. Methods raise requests.RequestException if the service does not answer."""

    def __init__(self, endpoint: str = EC2_METADATA) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._session = requests.Session()
        self._session.trust_env = False  # A proxy would return the metadata of another machine.
        self._token: str | None = None

    def leave_within_s(self) -> float | None:
        """Return the seconds until this machine is stopped or terminated; None without a notice."""
        answer = self._ask()
        if answer.status_code == requests.codes.unauthorized:
            self._token = None
            answer = self._ask()
        if answer.status_code == requests.codes.not_found:
            return None
        answer.raise_for_status()
        try:
            notice = answer.json()
            at = datetime.strptime(notice["time"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
            # The notice is compared with the service's own clock, because this machine's clock may be wrong.
            now = parsedate_to_datetime(answer.headers["Date"])
            return max((at - now).total_seconds(), 0.0)
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("unreadable preemption notice (%s): stopping at once", error)
            return 0.0

    def _ask(self) -> requests.Response:
        if self._token is None:
            answer = self._session.put(
                f"{self._endpoint}/latest/api/token",
                headers={"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_LIFE_S)},
                timeout=TIMEOUT_S,
            )
            answer.raise_for_status()
            self._token = answer.text
        return self._session.get(
            f"{self._endpoint}/latest/meta-data/spot/instance-action",
            headers={"X-aws-ec2-metadata-token": self._token},
            timeout=TIMEOUT_S,
        )


def monitor_preemption(mode: Literal["auto", "ec2", "off"], stop: ShutdownRequest) -> AbstractContextManager[object]:
    """Return a context that passes the cloud's notice on to `stop`; a null context on a cloud without notices."""
    if mode == "off" or (mode == "auto" and not is_ec2()):
        return nullcontext()
    # AWS's own clients read the same variable.
    notices = Ec2Metadata(os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or EC2_METADATA)
    return PreemptionMonitor(notices.leave_within_s, lambda within_s: stop.announce("spot notice", within_s))


class PreemptionMonitor:
    """A thread that polls until a notice comes, and calls back once. Use as a context manager."""

    def __init__(
        self, ask: Callable[[], float | None], on_notice: Callable[[float], object], poll_s: float = POLL_S
    ) -> None:
        self._ask = ask
        self._on_notice = on_notice
        self._poll_s = poll_s
        self._closed = threading.Event()
        self._silent = False
        self._thread = threading.Thread(target=self._run, name="spot-notice", daemon=True)

    def __enter__(self) -> PreemptionMonitor:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        self._thread.join(TIMEOUT_S)

    def _run(self) -> None:
        while True:
            within_s = self._poll()
            if within_s is not None:
                logger.warning("the provider ends this machine in %.0f s", within_s)
                self._on_notice(within_s)
                return
            if self._closed.wait(self._poll_s):
                return

    def _poll(self) -> float | None:
        try:
            within_s = self._ask()
        except requests.RequestException as error:
            if not self._silent:
                logger.info("no preemption notices: the metadata service does not answer: %s", error)
            self._silent = True
            return None
        self._silent = False
        return within_s
