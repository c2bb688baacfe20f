"""Compare what a machine measures before its enrolment with the least values of its fleet. Pure."""

from __future__ import annotations

from baton.contract.fleets.fleet import FleetSpec, MachineMeasurements

DRIVER_OF_CUDA = {11: 450, 12: 525, 13: 580}
"""Oldest branch of the NVIDIA driver by major version of CUDA (release notes of CUDA, minor version compatibility)."""


def driver_branch(version: str) -> int:
    """Return the branch of an NVIDIA driver: the number before the first point."""
    return int(version.partition(".")[0])


def find_shortfall(measured: MachineMeasurements | None, spec: FleetSpec) -> str:
    """Return which least value the machine does not reach, as the rest of a sentence about the machine; empty for none.

    measured: None for a machine whose agent measures nothing, against which nothing is known then.
    """
    if measured is None:
        return ""
    needed, told = spec.min_driver, f"min_driver is {spec.min_driver}"
    if needed is None and measured.cuda and measured.driver:
        needed = DRIVER_OF_CUDA.get(driver_branch(measured.cuda))
        told = f"CUDA {measured.cuda} of the image needs {needed}"
    if needed and driver_branch(measured.driver or "0") < needed:
        return f"has {f'the NVIDIA driver {measured.driver}' if measured.driver else 'no NVIDIA driver'}, {told}"
    if measured.disk_write_mb_s < spec.min_disk_write_mb_s:
        least = f"min_disk_write_mb_s is {spec.min_disk_write_mb_s:g}"
        return f"writes {measured.disk_write_mb_s:g} MB/s to its disk, {least}"
    if measured.download_mbit_s < spec.min_download_mbit_s:
        return f"downloads {measured.download_mbit_s:g} Mbit/s, min_download_mbit_s is {spec.min_download_mbit_s:g}"
    return ""
