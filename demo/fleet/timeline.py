"""The history of a fleet and its job: what the demo says of each event, and the spans of the chart. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from baton.contract.fleets.fleet import FleetEventView
from baton.contract.fleets.fleet import MachineState as State
from baton.contract.jobs.history import AttemptView
from baton.contract.jobs.job import JobState, JobView
from functions.fleet.lifecycle import SILENCE_S

WORDS: dict[str, str] = {
    State.PLANNED: "the fleet reserves money for {machine}: its boot and an hour",
    State.REQUESTED: "the fleet writes down that it asks for {machine}, and asks the provider",
    State.AMBIGUOUS: "the answer is lost; {machine} may exist, therefore the fleet asks for no second one",
    State.BOOTING: "the provider lists {machine}; it boots",
    State.REGISTERED: "{machine} enrols with its single-use token",
    State.READY: "{machine} is ready for a job",
    State.BUSY: "{machine} holds the job",
    State.DRAINING: "{machine} gets the order to leave: {reason}",
    State.LOST: f"{{machine}} counts as lost: {{reason}}, and its worker was silent for {SILENCE_S // 60} min",
    State.TERMINATING: "the fleet gives {machine} back: {reason}",
    State.FAILED: "two complete lists lack {machine}: it was not made, the fleet asks for another one",
    State.GONE: "two complete lists of the provider lack {machine}: it is gone, and has cost {usd:.2f} USD",
    "overdue": "{machine} takes long: {reason}",
    "charge.differs": "{machine}: {reason}",
}
STATES = frozenset(State)


@dataclass(frozen=True)
class Money:
    """The money of a fleet at a time of the fleets' clock."""

    at: int
    spent_usd: float
    reserved_usd: float


@dataclass(frozen=True)
class JobMoment:
    """The job at a time of the fleets' clock. `epoch`: the attempt that holds the job, 0 for none."""

    at: int
    state: JobState
    epoch: int
    resumed_step: int | None
    checkpoint_step: int | None


@dataclass(frozen=True)
class StateSpan:
    """Time that a machine spent in a state, or the job with an attempt."""

    state: str
    begin: int
    end: int


@dataclass
class FleetHistory:
    """Observations of a fleet and its job, since `began_at` of the fleets' clock."""

    began_at: int
    events: list[FleetEventView] = field(default_factory=list)
    money: list[Money] = field(default_factory=list)
    job: list[JobMoment] = field(default_factory=list)

    @property
    def ended_at(self) -> int:
        """Return the time of the last observation."""
        return max([one.at for one in self.events] + [one.at for one in self.money])

    @property
    def machines(self) -> list[str]:
        """Return the ids of all machines in the order of their plans."""
        return list(dict.fromkeys(event.machine for event in self.events if event.machine))

    def name(self, machine: str | None) -> str:
        """Return how the demo calls a machine: `machine 1`."""
        return f"machine {self.machines.index(machine) + 1}" if machine else "the fleet"

    def states(self, machine: str) -> list[tuple[int, str]]:
        """Return each state of a machine with the time of its begin, in their order."""
        found = [(one.at, one.type.removeprefix("machine.")) for one in self.events if one.machine == machine]
        return [(at, state) for at, state in found if state in STATES]

    def machine_spans(self, machine: str) -> list[StateSpan]:
        """Return the states of a machine over time, those without a machine left out."""
        spans = _spans(self.states(machine), self.ended_at)
        return [span for span in spans if span.state not in (State.PLANNED, State.GONE, State.FAILED)]

    def attempt_spans(self) -> list[StateSpan]:
        """Return the attempts at the job over time, each until the job has ended or the control plane takes it back."""
        changes = [(one.at, f"attempt {one.epoch}" if one.epoch and not one.state.terminal else "") for one in self.job]
        return [span for span in _spans(changes, self.ended_at) if span.state]

    def checkpoints(self) -> list[tuple[int, int]]:
        """Return time and step of each checkpoint that was committed."""
        found: dict[int, int] = {}
        for one in self.job:
            if one.checkpoint_step:
                found.setdefault(one.checkpoint_step, one.at)
        return [(at, step) for step, at in found.items()]


def _spans(changes: Sequence[tuple[int, str]], end: int) -> list[StateSpan]:
    """Make spans of changes, each up to the next change; join equal neighbours, and leave out empty spans."""
    spans: list[StateSpan] = []
    for (at, state), (until, _) in zip(changes, [*changes[1:], (end, "")], strict=True):
        begin = spans.pop().begin if spans and spans[-1].state == state else at
        if until > begin:
            spans.append(StateSpan(state, begin, until))
    return spans


def cut(spans: Sequence[StateSpan], at: int, state: str, then: str) -> list[StateSpan]:
    """Return the spans with the one of `state` at this time cut in two; its second part is in state `then`."""
    found: list[StateSpan] = []
    for span in spans:
        if span.state == state and span.begin < at < span.end:
            found += [StateSpan(state, span.begin, at), StateSpan(then, at, span.end)]
        else:
            found.append(span)
    return found


def describe(event: FleetEventView, machine: str) -> str:
    """Describe a fleet event in one sentence. `machine`: display name of the machine."""
    words = WORDS.get(event.type.removeprefix("machine."), "{machine}: {type} {reason}")
    return words.format(machine=machine, reason=event.reason, usd=event.usd, type=event.type).rstrip()


def moment_of(at: int, job: JobView, attempts: Sequence[AttemptView]) -> JobMoment:
    """Return the job at a time of the fleets' clock."""
    holder = attempts[-1] if attempts and job.state is not JobState.PENDING else None
    return JobMoment(
        at, job.state, holder.epoch if holder else 0, holder.resumed_step if holder else None, job.checkpoint_step
    )


def describe_job(before: JobMoment | None, now: JobMoment, machines: Mapping[int, str]) -> Iterator[str]:
    """Describe the changes of the job. machines: display name of the machine of each attempt."""
    if before is None:
        yield "the job waits for a machine"
        return
    if now.state is JobState.PENDING and before.state is not JobState.PENDING:
        yield "the job's lease has run out; the job waits for another machine"
    if now.resumed_step and now.resumed_step != before.resumed_step:
        yield f"the job continues on {machines[now.epoch]} from the checkpoint of step {now.resumed_step}"
    if now.checkpoint_step and now.checkpoint_step != before.checkpoint_step:
        yield f"the checkpoint of step {now.checkpoint_step} is committed"
    if now.state.terminal and not before.state.terminal:
        yield f"the job is {now.state}"
