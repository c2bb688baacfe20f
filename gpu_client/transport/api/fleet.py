"""Call the API about fleets, and as the worker on a rented machine."""

from __future__ import annotations

from baton.contract.fleets.fleet import (
    EnrollAnswer,
    EnrollRequest,
    FleetEventPage,
    FleetEventView,
    FleetPage,
    FleetSpec,
    FleetView,
    MachineHeartbeat,
    MachineLog,
    MachineOrders,
    MachinePage,
    MachineShell,
    MachineView,
    PreflightDownload,
)
from baton.contract.fleets.job_machines import JobMachines
from baton.contract.fleets.plan import FleetPlan, OfferPage, OffersRequest, PlanRequest
from gpu_client.transport.api.calls import ApiCalls, segment


class FleetCalls(ApiCalls):
    """Calls of users about fleets. All are idempotent."""

    def put_fleet(self, spec: FleetSpec) -> FleetView:
        """Store a fleet in place of an earlier document of the same name; a stopped fleet rents again."""
        return self._read(FleetView, "put_fleet", "PUT", _fleet(spec.name), body=spec)

    def fleets(self) -> FleetPage:
        """Return all fleets by name, and a line for each whose records cannot be read."""
        return self._read(FleetPage, "fleets", "GET", "/fleets")

    def fleet(self, name: str) -> FleetView:
        """Return a fleet with its money and its machines."""
        return self._read(FleetView, "fleet", "GET", _fleet(name))

    def stop_fleet(self, name: str) -> FleetView:
        """Stop a fleet: its machines save their jobs and are given back."""
        return self._read(FleetView, "stop_fleet", "POST", f"{_fleet(name)}/stop")

    def ended_machines(self, name: str, *, limit: int = 1000) -> list[MachineView]:
        """Return the newest ended machines of a fleet with their receipts, the newest first."""
        path = f"{_fleet(name)}/machines"
        return self._read(MachinePage, "ended_machines", "GET", path, query={"limit": limit}).machines

    def fleet_events(self, name: str, *, limit: int = 100) -> list[FleetEventView]:
        """Return the newest events of a fleet, the newest first."""
        path = f"{_fleet(name)}/events"
        return self._read(FleetEventPage, "fleet_events", "GET", path, query={"limit": limit}).events

    def job_machines(self, job_id: str) -> JobMachines:
        """Return the fleets that serve a job's queue, and the rented machines of its attempts with their cost."""
        return self._read(JobMachines, "job_machines", "GET", f"/job/{segment(job_id)}/machines")

    def machine_log(self, fleet: str, machine: str) -> MachineLog:
        """Return the last output of a machine, as its provider has it."""
        return self._read(MachineLog, "machine_log", "GET", f"{_machine(fleet, machine)}/logs")

    def machine_shell(self, fleet: str, machine: str) -> MachineShell:
        """Return the address of a machine's shell. Raises Conflict for a machine without a shell."""
        return self._read(MachineShell, "machine_shell", "GET", f"{_machine(fleet, machine)}/shell")

    def plan_fleet(self, request: PlanRequest) -> FleetPlan:
        """Return what a fleet with this document would rent now. Nothing is stored."""
        return self._read(FleetPlan, "plan_fleet", "POST", f"{_fleet(request.fleet.name)}/plan", body=request)

    def offers(self, request: OffersRequest) -> OfferPage:
        """Return the providers' offers of the moment by expected total."""
        return self._read(OfferPage, "offers", "POST", "/offers", body=request)


class MachineCalls(ApiCalls):
    """Calls of the worker on a rented machine."""

    def preflight(self) -> PreflightDownload:
        """Return the object whose download the machine times before it enrols, with its enrolment token as API key."""
        return self._read(PreflightDownload, "preflight", "POST", "/machines/preflight")

    def enroll(self, request: EnrollRequest) -> EnrollAnswer:
        """Enrol the machine with its enrolment token as API key; valid once. Raises Conflict, NotFound, Unauthorized.

        If the answer of an earlier try is lost, the retry raises Conflict, because the token is used up.
        """
        return self._read(EnrollAnswer, "enroll", "POST", "/machines/enroll", body=request)

    def machine_heartbeat(self, request: MachineHeartbeat) -> MachineOrders:
        """Report the job that the worker holds; return orders. Raises NotFound for a machine that was given back."""
        return self._read(MachineOrders, "machine_heartbeat", "POST", "/machines/heartbeat", body=request)


def _fleet(name: str) -> str:
    return f"/fleets/{segment(name)}"


def _machine(fleet: str, machine: str) -> str:
    return f"{_fleet(fleet)}/machines/{segment(machine)}"
