"""Define what the three providers of the demo sell, so that price, boot time and interruptions pull apart. Pure."""

from __future__ import annotations

from fakes.salad.cloud import FakeGpuClass
from fakes.vast.market import FakeAsk
from functions.fleet.records import Offer

GPU = Offer(provider="", ref="", gpu_model="RTX 4090", gpus=1, vram_gib=24, usd_per_hour=0)
"""Hardware of every machine of the fake providers."""
CHEAP = {"usd_per_hour": 0.25, "boot_s": 1200, "interruptions_per_hour": 1.5}
DEAR = {"usd_per_hour": 0.90, "boot_s": 60}
HOSTS = {"cheap-1": CHEAP, "cheap-2": CHEAP, "dear-1": DEAR}


def local_offers() -> list[Offer]:
    """Return the offers of the loopback provider: cheap hosts that are often interrupted, and a dear one."""
    fixed = {"provider": "loopback", "gpus": 0, "disk_gib": 10, "usd_per_gb": 0.01}
    return [Offer.model_validate({**fixed, **kind, "ref": host, "machine_ref": host}) for host, kind in HOSTS.items()]


def vast_asks() -> list[FakeAsk]:
    """Return two reliable hosts of the fake Vast.ai."""
    return [
        FakeAsk(id=number, machine_id=number, usd_per_hour=price, min_bid=price, reliability=0.999, inet_down=2000)
        for number, price in ((101, 0.30), (102, 0.32))
    ]


def salad_classes() -> list[FakeGpuClass]:
    """Return the one GPU class of the fake SaladCloud."""
    prices = {"high": "0.360", "medium": "0.340", "low": "0.320", "batch": "0.300"}
    return [FakeGpuClass("RTX 4090 (24 GB)", prices, "44444444-4444-4444-8444-444444444444", nodes=4)]
