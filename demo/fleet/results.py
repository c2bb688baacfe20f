"""Measurements and claims of the scenario: the offer, the lost answer, the lost host, the money, what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from baton.contract.fleets.fleet import MachineState as State
from baton.contract.fleets.fleet import MachineView
from baton.contract.fleets.plan import OfferView
from baton.contract.jobs.history import AttemptView
from demo.fleet.provider import Bill
from demo.fleet.timeline import FleetHistory
from demo.runner import Claim

DEFINITIONS = {
    "minutes": "times are minutes of the fleets' clock, which runs 60 times as fast, since the job was submitted",
    "killed_at_step": "the last step that the killed attempt reported; it may have done a few more",
    "processes_killed": "processes of the machine; SIGKILL goes to its group",
    "steps_repeated": "steps between the checkpoint that the next machine resumed and killed_at_step",
    "spent_usd": "the price of each machine over its life, summed by the control plane",
    "charged_usd": "the meters of the providers",
    "most_committed_usd": "the most that was spent and reserved together at any moment",
    "processes_left": "processes on machines after the fleet had given them back",
}


def quoted_usd_per_hour(machine: MachineView) -> float:
    """Return the price of the offer; the last list of a provider may name no price of a machine that has stopped."""
    return machine.receipt.quoted_usd_per_hour if machine.receipt else machine.usd_per_hour


@dataclass(frozen=True)
class LostHost:
    """The kill of a machine, at a time of the fleets' clock."""

    machine: str
    at: int
    step: int
    checkpoint_step: int
    processes: int


@dataclass(frozen=True)
class Leftovers:
    """Remainder at the providers in the end. `bills`, `later_bills`: their meters, and again some minutes later."""

    listed: int
    processes: int
    bills: list[Bill]
    later_bills: list[Bill]

    def failure(self) -> str:
        """Return what is left; "" if nothing is."""
        if self.processes:
            return f"{self.processes} processes of machines still run"
        if self.listed or not all(bill.ended for bill in self.bills):
            return f"machines are left at the providers: {self.listed} exist, bills {self.bills}"
        if self.bills != self.later_bills:
            return "the meter of a provider still runs"
        return ""


@dataclass(frozen=True)
class FleetResults:
    """The fleet, its job, and what the providers know. `machines`: the ended ones, in the order of their plans."""

    offers: Sequence[OfferView]
    """Offers of all providers before the first machine, in the order in which the fleet takes them."""
    history: FleetHistory
    budget_usd: float
    spent_usd: float
    machines: list[MachineView]
    attempts: list[AttemptView]
    idle_timeout_s: int
    lost: LostHost
    left: Leftovers

    @property
    def hosts(self) -> dict[str, str]:
        """Return the host of each machine, by id."""
        return {bill.token: bill.host for bill in self.left.bills}

    @property
    def charged_usd(self) -> float:
        """Return the sum of the providers' meters."""
        return sum(bill.charged_usd for bill in self.left.bills)

    @property
    def most_committed_usd(self) -> float:
        """Return the most money that was spent and reserved together."""
        return max(one.spent_usd + one.reserved_usd for one in self.history.money)

    @property
    def resumed_step(self) -> int:
        """Return the step of the checkpoint from which the last attempt continued."""
        return self.attempts[-1].resumed_step or 0

    @property
    def steps_repeated(self) -> int:
        """Return the number of steps that were trained twice."""
        return max(self.lost.step - self.resumed_step, 0)

    def minutes(self, at: int) -> float:
        """Return a time of the fleets' clock in minutes since the job was submitted."""
        return round((at - self.history.began_at) / 60, 2)

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `summary.json`."""
        return {
            "offers": [
                {
                    **one.model_dump(include={"provider", "ref", "usd_per_hour", "boot_s", "interruptions_per_hour"}),
                    "expected_usd": round(one.expected.total, 4),
                    "rejected": one.rejected,
                }
                for one in self.offers
            ],
            "machines": [
                {**one.model_dump(mode="json", exclude={"job_id", "gpu_model"}), "host": self.hosts.get(one.id)}
                for one in self.machines
            ],
            "events": [
                {**one.model_dump(mode="json", exclude={"at"}), "minutes": self.minutes(one.at)}
                for one in self.history.events
            ],
            "killed_at_minutes": self.minutes(self.lost.at),
            "killed_at_step": self.lost.step,
            "processes_killed": self.lost.processes,
            "resumed_from_step": self.resumed_step,
            "steps_repeated": self.steps_repeated,
            "budget_usd": self.budget_usd,
            "spent_usd": round(self.spent_usd, 4),
            "charged_usd": round(self.charged_usd, 4),
            "most_committed_usd": round(self.most_committed_usd, 4),
            "processes_left": self.left.processes,
            "provider": [asdict(bill) for bill in self.left.bills],
            "definitions": DEFINITIONS,
        }

    def claims(self) -> list[Claim]:
        """Return the claims: the right offer, one machine for a lost answer, no lost work, money, nothing left."""
        best, lost, left = self.offers[0], self.lost, self.left
        cheapest = min(self.offers, key=lambda one: one.usd_per_hour)
        first, last = self.machines[0], self.machines[-1]
        names = {one.id: self.history.name(one.id) for one in self.machines}
        return [
            Claim(
                f"The fleet asked {first.provider} first, for {quoted_usd_per_hour(first):.2f} USD an hour, although "
                f"{cheapest.provider} sells {cheapest.ref} for {cheapest.usd_per_hour:.2f}: with boot, disk, "
                f"traffic and interruptions an hour of work is expected to cost {best.expected.total:.2f} USD, not "
                f"{cheapest.expected.total:.2f}.",
                self._choice_failure(),
            ),
            Claim(
                f"The answer to the first create was lost, and {first.provider} did not list the machine. The fleet "
                f"rented another one; when {names[first.id]} appeared after all, the fleet gave it back. It has cost "
                f"{first.spent_usd:.2f} USD.",
                self._lost_answer_failure(),
            ),
            Claim(
                f"The host of {names[lost.machine]} vanished at step {lost.step}: SIGKILL to all {lost.processes} "
                f"processes. {names[last.id].capitalize()}, of {last.provider}, continued from the checkpoint of step "
                f"{self.resumed_step}; {self.steps_repeated} steps were done twice, and the job is complete.",
                self._resume_failure(),
            ),
            Claim(
                f"Spent: {self.spent_usd:.2f} of {self.budget_usd:.2f} USD. The providers' own meters say "
                f"{self.charged_usd:.2f} USD. Spent and reserved money together never exceeded "
                f"{self.most_committed_usd:.2f} USD.",
                self._money_failure(),
            ),
            Claim(
                f"After {self.idle_timeout_s // 60} min without a job the fleet gave {names[last.id]} back. No process "
                "of a machine runs, no provider has a machine, and their meters stand still.",
                left.failure() or self._return_failure(),
            ),
        ]

    def _choice_failure(self) -> str:
        best = min(one.expected.total for one in self.offers if not one.rejected)
        if self.offers[0].expected.total > best:
            return f"the plan begins with {self.offers[0].ref}, which has not the lowest expected total"
        first, wanted = self.machines[0], self.offers[0]
        if (first.provider, round(quoted_usd_per_hour(first), 4)) != (wanted.provider, round(wanted.usd_per_hour, 4)):
            return f"the fleet asked {first.provider} first, not {wanted.provider}"
        return ""

    def _lost_answer_failure(self) -> str:
        first = self.machines[0]
        states = [state for _, state in self.history.states(first.id)]
        if states[2:] != [State.AMBIGUOUS, State.FAILED, State.TERMINATING, State.GONE]:
            return f"the machine without an answer went through {', '.join(states)}"
        made, wanted = sorted(bill.token for bill in self.left.bills), sorted(one.id for one in self.machines)
        return f"the providers made {len(made)} machines, the fleet knows {len(wanted)}" if made != wanted else ""

    def _resume_failure(self) -> str:
        # On a loaded computer a machine may miss its boot, which takes 15 s at this speed, and be replaced.
        held = [one for one in self.machines if any(state == State.BUSY for _, state in self.history.states(one.id))]
        if len(held) != 2 or [one.machine_id for one in self.attempts] != [one.id for one in held]:
            return f"the job had {len(self.attempts)} attempts, and {len(held)} machines held it"
        first, second = held
        if second.provider == first.provider:
            return f"the job continued at {second.provider}, where it began"
        if not 0 < self.lost.checkpoint_step <= self.resumed_step:
            return f"the job continued from step {self.resumed_step}, not from {self.lost.checkpoint_step}"
        return ""

    def _return_failure(self) -> str:
        last = self.machines[-1]
        idle = last.reason == "no job for idle_timeout_s"
        return "" if idle else f"{self.history.name(last.id)} was given back: {last.reason}"

    def _money_failure(self) -> str:
        observed = sum(one.receipt.observed_usd for one in self.machines if one.receipt)
        if abs(observed - self.spent_usd) > 1e-4:
            return f"the receipts sum up to {observed:.4f} USD, the fleet says {self.spent_usd:.4f}"
        if self.most_committed_usd > self.budget_usd:
            return f"{self.most_committed_usd:.2f} USD were spent and reserved, the budget is {self.budget_usd:.2f}"
        if not 0 < self.charged_usd <= self.spent_usd:
            return f"the providers charged {self.charged_usd:.4f} USD, the fleet counted {self.spent_usd:.4f}"
        return ""
