"""The numbers of a demo run: what they are, how they are computed, and how they are told."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from baton.contract.history import AttemptView
from demo import saving
from demo.saving import Saving, size_text

DEFINITIONS = {
    "killed_at_step": "the last step that the killed attempt reported; it may have done a few more",
    "processes_killed": "processes worker 1 had; SIGKILL goes to its group, the training dies with its agent",
    "steps_repeated": "steps between the checkpoint that was resumed and killed_at_step",
    "steps_trained": "steps_wanted + steps_repeated: all that the attempts together had to do",
    "kill_to_first_new_step_s": "from the SIGKILL until the next attempt reported its first step",
    "kill_to_lost_ground_regained_s": "from the SIGKILL until a step beyond killed_at_step was reported",
    "accuracy": "share of held-out digits read correctly by the fetched weights, measured by the demo",
    "bit_identical": "whether every tensor has the same bytes as after the run that nobody interrupted",
    "control_plane_calls": "HTTP requests by kind, retries included, of the submitter and all workers; of the killed "
    "worker as of its last heartbeat",
    "bytes_uploaded": "payload bytes of objects put into storage, counted like the calls",
    **saving.DEFINITIONS,
}


@dataclass(frozen=True)
class Caller:
    """What one party sent: requests by kind, and payload bytes of objects."""

    calls: dict[str, int] = field(default_factory=dict)
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0


@dataclass(frozen=True)
class Interruption:
    """When and where the worker was killed, and how the job came back."""

    killed_at_step: int
    resumed_from_step: int
    processes_killed: int
    first_new_step_s: float
    regained_s: float


@dataclass(frozen=True)
class Result:
    """Everything that a run found out."""

    job_id: str
    undisturbed_job_id: str
    steps_wanted: int
    interruption: Interruption
    attempts: list[AttemptView]
    undisturbed_attempts: list[AttemptView]
    accuracy: float
    held_out: int
    different_tensors: list[str]
    weights_blake3: str
    undisturbed_weights_blake3: str
    callers: dict[str, Caller]
    durations_s: dict[str, float]

    @property
    def bit_identical(self) -> bool:
        """Whether both runs ended in the same weights."""
        return not self.different_tensors

    @property
    def steps_repeated(self) -> int:
        """Steps that had to be done twice."""
        return max(self.interruption.killed_at_step - self.interruption.resumed_from_step, 0)

    @property
    def saving(self) -> Saving:
        """Time and bytes."""
        return Saving.of(self.attempts, self.undisturbed_attempts)

    @property
    def calls(self) -> dict[str, int]:
        """Requests to the control plane by kind, of all callers, most frequent first."""
        return dict(sum((Counter(caller.calls) for caller in self.callers.values()), Counter[str]()).most_common())

    @property
    def uploaded_bytes(self) -> int:
        """By all callers."""
        return sum(caller.uploaded_bytes for caller in self.callers.values())

    @property
    def downloaded_bytes(self) -> int:
        """By all callers."""
        return sum(caller.downloaded_bytes for caller in self.callers.values())

    def as_dict(self) -> dict[str, Any]:
        """What `summary.json` holds."""
        return {
            "attempts": len(self.attempts),
            "steps_wanted": self.steps_wanted,
            "steps_trained": self.steps_wanted + self.steps_repeated,
            "steps_repeated": self.steps_repeated,
            "killed_at_step": self.interruption.killed_at_step,
            "resumed_from_step": self.interruption.resumed_from_step,
            "processes_killed": self.interruption.processes_killed,
            "kill_to_first_new_step_s": self.interruption.first_new_step_s,
            "kill_to_lost_ground_regained_s": self.interruption.regained_s,
            "accuracy": round(self.accuracy, 6),
            "held_out": self.held_out,
            "bit_identical": self.bit_identical,
            "different_tensors": self.different_tensors,
            "weights_blake3": self.weights_blake3,
            "undisturbed_weights_blake3": self.undisturbed_weights_blake3,
            "bytes_uploaded": self.uploaded_bytes,
            "bytes_downloaded": self.downloaded_bytes,
            **self.saving.as_dict(),
            "control_plane_calls": {"total": sum(self.calls.values()), "by_kind": self.calls},
            "callers": {name: asdict(caller) for name, caller in self.callers.items()},
            "attempt_history": [
                attempt.model_dump(mode="json", exclude={"log_tail"}, exclude_none=True) for attempt in self.attempts
            ],
            "job_id": self.job_id,
            "undisturbed_job_id": self.undisturbed_job_id,
            "durations_s": self.durations_s,
            "definitions": DEFINITIONS,
        }

    def in_plain_words(self) -> list[str]:
        """What just happened, a sentence or two a line."""
        cut = self.interruption
        right = round(self.accuracy * self.held_out)
        share = 100 * cut.killed_at_step / self.steps_wanted
        return [
            f"Worker 1 was killed at step {cut.killed_at_step} of {self.steps_wanted} ({share:.0f} %): SIGKILL to its "
            f"process group. All {cut.processes_killed} of its processes were gone, unable to save or say anything.",
            f"Its lease ran out. Worker 2, on another machine, took the job over from the checkpoint of step "
            f"{cut.resumed_from_step}; its first new step came {cut.first_new_step_s:.1f} s after the kill. "
            f"{self.steps_repeated} steps were done twice, nothing else was lost.",
            f"The fetched model reads {right} of {self.held_out} digits that it had never seen correctly: "
            f"{100 * self.accuracy:.1f} %.",
            "The same job, undisturbed, ended in exactly the same weights, bit for bit "
            f"(BLAKE3 {self.weights_blake3[:12]}...).",
            *self.saving.in_plain_words(),
            f"All this took {sum(self.calls.values())} calls to the control plane, {self.calls.get('attempts', 0)} of "
            f"them only to draw the curve. {size_text(self.uploaded_bytes)} went up and "
            f"{size_text(self.downloaded_bytes)} came down, directly to and from storage.",
        ]


def worker_stats(path: Path) -> Caller:
    """What a worker wrote with its last heartbeat; nothing if it never sent one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Caller()
    return caller_of(found["calls"]["requests"], found["transfer"])


def caller_of(requests: Mapping[str, int], transfer: Mapping[str, int]) -> Caller:
    """From the counts of a client and of its transfers."""
    return Caller(dict(requests), transfer["uploaded_bytes"], transfer["downloaded_bytes"])
