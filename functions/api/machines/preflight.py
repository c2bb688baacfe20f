"""Compare the hardware of a machine with the offer by which the machine was rented. Pure."""

from __future__ import annotations

from baton.contract.fleets.fleet import EnrollRequest, FleetSpec
from functions.domain.jobs.job_selection import names_model
from functions.fleet.records import Offer

VRAM_SHARE = 0.93
"""Least share of the offered VRAM: with error correction an A40 reports 45 of its 48 GiB."""
DISK_SHARE = 0.9
"""Least share of the rented disk that must be free: the file system and the image need a part."""


def find_problem(found: EnrollRequest, offer: Offer, spec: FleetSpec) -> str:
    """Return how the machine falls short of its offer; empty for a machine as offered."""
    if offer.gpu_model:
        if not (found.gpu_model and names_model(offer.gpu_model, found.gpu_model)):
            return f"the offer names the GPU {offer.gpu_model}, the machine has {found.gpu_model or 'none'}"
        if found.gpus < offer.gpus:
            return f"the offer names {offer.gpus} GPUs, the machine has {found.gpus}"
    if found.vram_gib < VRAM_SHARE * offer.vram_gib:
        return f"the offer names {offer.vram_gib:g} GiB VRAM, the machine has {found.vram_gib:g}"
    disk_gib = rented_disk_gib(offer, spec)
    if found.disk_gib < DISK_SHARE * disk_gib:
        return f"the offer names {disk_gib:g} GiB disk, the machine has {found.disk_gib:g} free"
    return ""


def rented_disk_gib(offer: Offer, spec: FleetSpec) -> float:
    """Return the disk in GiB that the fleet rents of the offer."""
    return min(offer.disk_gib, spec.disk_gib)
