"""The preflight check of a rented machine: the values that it measures, and the judgement of the control plane."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import MachineState
from baton.contract.names import CHECKPOINTS_BUCKET, Scope
from functions.api.machines.machine_calls import PROBE_BYTES, PROBE_KEY
from functions.fleet.offers.reputation import QUARANTINE_S
from tests.functional.api.test_machines import enroll, events, prepare
from tests.kits.api.fleets import DOCUMENT, machine_of, make_machine, put_machine
from tests.kits.api.harness import TENANT, Api

MEASURED = {"driver": "570.86.15", "cuda": "12.8.1", "disk_write_mb_s": 850.5, "download_mbit_s": 412.3}


def hosts(api: Api) -> dict[str, int]:
    """Return the seconds for which each host is not rented."""
    assert api.context.fleet is not None
    return {host: one.until - api.clock.now() for host, one in api.context.fleet.quarantined(0).items()}


def test_a_machine_times_the_download_of_an_object_that_is_stored_once(api: Api) -> None:
    token = prepare(api)
    assert api.context.objects.head(TENANT, CHECKPOINTS_BUCKET, PROBE_KEY) is None
    first = api.post("/machines/preflight", key=token).ok()["url"]
    stored = api.context.objects.head(TENANT, CHECKPOINTS_BUCKET, PROBE_KEY)
    assert stored is not None and stored.size_bytes == PROBE_BYTES and PROBE_KEY in first
    worker = api.issue(TENANT, Scope.WORKER, machine="nights/m1")
    with api.unchanged():
        assert PROBE_KEY in api.post("/machines/preflight", key=token).ok()["url"]
        api.post("/machines/preflight", key=worker).refused(ErrorCode.WRONG_SCOPE, "x-api-key")
    put_machine(api, make_machine("m1", MachineState.TERMINATING, version=2, reason="the fleet is stopped"))
    with api.unchanged():
        api.post("/machines/preflight", key=token).refused(ErrorCode.MACHINE_UNKNOWN, "x-api-key")


def test_the_values_of_a_machine_are_kept_and_shown(api: Api) -> None:
    enroll(api, prepare(api), measured=MEASURED).ok()
    (shown,) = api.get("/fleets/nights").ok()["machines"]
    assert shown["measured"] == MEASURED == machine_of(api, "m1").model_dump()["measured"]


@pytest.mark.parametrize(
    ("least", "measured", "problem"),
    [
        ({"min_driver": 575}, {}, "has the NVIDIA driver 570.86.15, min_driver is 575"),
        ({"min_driver": 525}, {"driver": None}, "has no NVIDIA driver, min_driver is 525"),
        ({}, {"cuda": "13.0.1"}, "has the NVIDIA driver 570.86.15, CUDA 13.0.1 of the image needs 580"),
        ({}, {"disk_write_mb_s": 19.9}, "writes 19.9 MB/s to its disk, min_disk_write_mb_s is 20"),
        ({"min_disk_write_mb_s": 900}, {}, "writes 850.5 MB/s to its disk, min_disk_write_mb_s is 900"),
        ({}, {"download_mbit_s": 3.2}, "downloads 3.2 Mbit/s, min_download_mbit_s is 20"),
        ({"min_download_mbit_s": 500}, {}, "downloads 412.3 Mbit/s, min_download_mbit_s is 500"),
    ],
    ids=["driver", "no-driver", "cuda", "disk", "fleets-disk", "download", "fleets-download"],
)
def test_a_machine_below_a_least_value_is_given_back(
    api: Api, least: dict[str, Any], measured: dict[str, Any], problem: str
) -> None:
    token = prepare(api)
    api.call("PUT", "/fleets/nights", {**DOCUMENT, **least}).ok()
    error = enroll(api, token, measured={**MEASURED, **measured}).refused(ErrorCode.PREFLIGHT_FAILED)
    assert f"the machine {problem}" in error["message"]
    stored = machine_of(api, "m1")
    assert (stored.state, stored.worker_key) == (MachineState.TERMINATING, None)
    assert stored.measured is not None and problem in stored.reason
    assert [type_ for type_, _ in events(api)] == ["machine.registered", "machine.terminating"]
    assert hosts(api) == {"loopback:h1": QUARANTINE_S["shortfall"]}


@pytest.mark.parametrize(
    ("least", "measured"),
    [
        ({"min_driver": 570, "min_disk_write_mb_s": 850.5, "min_download_mbit_s": 412.3}, {}),
        ({"min_disk_write_mb_s": 0, "min_download_mbit_s": 0}, {"disk_write_mb_s": 0, "download_mbit_s": 0}),
        # The document replaces what the image needs: a machine may have CUDA's packages for compatibility.
        ({"min_driver": 550}, {"cuda": "13.0.1"}),
        # A machine without a GPU runs images with CUDA; a CUDA to come needs what nobody knows yet.
        ({}, {"driver": None}),
        ({}, {"cuda": "14.0"}),
        ({}, {"cuda": None, "driver": "390.157"}),
    ],
    ids=["equal", "none", "document-first", "no-gpu", "unknown-cuda", "no-cuda"],
)
def test_a_machine_that_reaches_the_least_values_works(
    api: Api, least: dict[str, Any], measured: dict[str, Any]
) -> None:
    token = prepare(api)
    api.call("PUT", "/fleets/nights", {**DOCUMENT, **least}).ok()
    enroll(api, token, measured={**MEASURED, **measured}).ok()
    assert machine_of(api, "m1").state is MachineState.READY
    assert hosts(api) == {}


def test_an_agent_that_measures_nothing_is_not_judged(api: Api) -> None:
    enroll(api, prepare(api)).ok()
    assert machine_of(api, "m1").measured is None


@pytest.mark.parametrize("value", [{"driver": "R570"}, {"disk_write_mb_s": -1}, {"download_mbit_s": "NaN"}])
def test_values_that_no_machine_has_are_refused(api: Api, value: dict[str, Any]) -> None:
    token = prepare(api)
    with api.unchanged():
        enroll(api, token, measured={**MEASURED, **value}).refused(
            ErrorCode.INVALID_VALUE, f"measured.{next(iter(value))}"
        )


def test_each_failure_of_a_host_doubles_its_quarantine(api: Api) -> None:
    token = prepare(api)
    for failures in range(6):
        if failures:
            put_machine(api, make_machine(f"m{failures}x", MachineState.BOOTING))
            token = api.issue(TENANT, Scope.ENROLL, machine=f"nights/m{failures}x")
        enroll(api, token, measured={**MEASURED, "download_mbit_s": 1}).refused(ErrorCode.PREFLIGHT_FAILED)
        assert hosts(api)["loopback:h1"] == min(6 * 3600 * 2**failures, 7 * 86_400)
