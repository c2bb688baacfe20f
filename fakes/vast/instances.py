"""Instances of the fake: how they boot, which statuses bill what, and their row in the lists."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from fakes.meter import BilledSpan, BillingMeter
from fakes.vast.market import FakeAsk

Status = Literal["created", "loading", "running", "rebooting", "stopped", "frozen", "exited", "unknown", "offline"]
GPU_BILLED = ("running", "rebooting", "frozen")
DISK_FREE = ("offline",)
PROVISIONING_SHARE = 0.1
"""Part of the boot before the status changes from null to loading."""
NEVER = float("inf")
EXTENSION_S = 30 * 86_400
"""Time by which an accepted price increase extends a contract."""
OF_ASKS = ("ask_contract_id", "bundle_id", "rentable", "rented", "external", "gpu_total_ram", "time_remaining")
"""Columns that an ask has and an instance has not."""
OCI_ERROR = 'Error response from daemon: OCI runtime create failed: exec: "agent": executable file not found in $PATH'


@dataclass
class FakeInstance:
    """A contract. `boot_s`: time until the container runs; NEVER for one that stays in `loading`."""

    id: int
    ask: FakeAsk
    body: dict[str, Any]
    created_at: float
    gpu_usd_per_hour: float
    boot_s: float
    container_key: str
    end_date: float
    """End of the contract."""
    accepted_usd_per_hour: float | None = None
    """GPU price after `end_date`, by an accepted increase, which extends the contract."""
    forced: Status | None = None
    """Status that holds in place of the boot's."""
    state: str = "running"
    """`cur_state`, `intended_status` and `next_state`: stopped without a request means outbid."""
    message: str = ""
    log: str = "started\n"
    still_listed: int = 0
    """Polls of the list for which the instance is listed after its destroy."""
    destroyed: bool = False
    visible_at: float = 0.0
    """Time from which the lists show the instance."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment of the container, as its program sees the environment."""

    @property
    def handle(self) -> str:
        """Return the id as text, by which the meter counts."""
        return str(self.id)

    @property
    def disk_usd_per_hour(self) -> float:
        """Return the price of the disk."""
        return self.ask.storage_usd_per_hour(self.body["disk"])

    def status(self, now: float) -> Status | None:
        """Return `actual_status`."""
        age_s = now - self.created_at
        if self.forced is not None:
            return self.forced
        if age_s >= self.boot_s:
            return "running"
        boot_s = 600 if self.boot_s == NEVER else self.boot_s
        return None if age_s < PROVISIONING_SHARE * boot_s else "loading"

    def bill_boot(self, meter: BillingMeter) -> None:
        """Bill the disk from now on, and the GPU from the end of the boot on."""
        meter.rate(self.handle, "disk", self.disk_usd_per_hour)
        if self.boot_s != NEVER and self.forced is None:
            begin_at = self.created_at + self.boot_s
            meter.spans.append(BilledSpan(self.handle, "gpu", self.gpu_usd_per_hour, begin_at))

    def bill(self, meter: BillingMeter) -> None:
        """Bill by the present status from now on."""
        status = self.status(meter.now())
        meter.rate(self.handle, "gpu", self.gpu_usd_per_hour if status in GPU_BILLED else 0.0)
        meter.rate(self.handle, "disk", 0.0 if status in DISK_FREE else self.disk_usd_per_hour)

    def settle(self, meter: BillingMeter) -> None:
        """End the contract at its end, or extend the contract at the accepted price."""
        if self.destroyed or self.state == "stopped" or meter.now() < self.end_date:
            return
        for span in meter.spans:
            if (span.handle, span.kind, span.end_at) == (self.handle, "gpu", None):
                span.end_at = self.end_date
        if self.accepted_usd_per_hour is None:
            self.state, self.forced, self.message = "stopped", "stopped", "the contract has ended"
            return
        self.gpu_usd_per_hour, self.accepted_usd_per_hour = self.accepted_usd_per_hour, None
        meter.spans.append(BilledSpan(self.handle, "gpu", self.gpu_usd_per_hour, self.end_date))
        self.end_date += EXTENSION_S

    def row(self, now: float) -> dict[str, Any]:
        """Return the row of the lists."""
        status, body, ask = self.status(now), self.body, self.ask
        asked = ask.row(now, disk_gb=body["disk"], bid=body.get("price") is not None)
        return {
            **{name: value for name, value in asked.items() if name not in OF_ASKS},
            "gpu_totalram": asked["gpu_total_ram"],
            "id": self.id,
            "label": body.get("label"),
            "actual_status": status,
            "intended_status": self.state,
            "cur_state": self.state,
            "next_state": self.state,
            "status_msg": self.message or (f"success, running {body['image']}" if status == "running" else None),
            "image_uuid": body["image"],
            "image_runtype": body.get("runtype") or "ssh",
            "image_args": body.get("args") or [],
            "extra_env": [list(pair) for pair in body["env"].items()],
            "onstart": body.get("onstart"),
            "template_id": None,
            "template_hash_id": None,
            "template_name": None,
            "ssh_host": "ssh7.vast.ai",
            "ssh_port": 10_600,
            "ssh_idx": "7",
            "public_ipaddr": "198.51.100.7",
            "local_ipaddrs": "10.0.0.5 172.17.0.2",
            "ports": {},
            "direct_port_start": -1,
            "direct_port_end": -1,
            "start_date": self.created_at,
            "uptime_mins": None if status != "running" else (now - self.created_at - self.boot_s) / 60,
            "end_date": self.end_date,
            "duration": self.end_date - now,
            "dph_base": self.gpu_usd_per_hour,
            "dph_total": self.gpu_usd_per_hour + self.disk_usd_per_hour,
            "gpu_util": 0.0,
            "gpu_temp": 30.0,
            "cpu_util": 0.0,
            "disk_space": float(body["disk"]),
            "disk_usage": 1.0,
            "disk_util": -1,
            "mem_usage": 0.1,
            "mem_limit": 60.0,
            "inet_up_billed": None,
            "inet_down_billed": None,
        }
