"""Measurements and claims of the scenario: the kill, both trainings' time and checkpoints, the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from baton.contract.jobs.goodput import Goodput
from demo.cluster import Traffic, size_text
from demo.digits import Readings
from demo.jobs import JobRecord, TrainedStep
from demo.runner import Claim

LEAST_ACCURACY = 0.97
DEFINITIONS = {
    "killed_at_step": "the last step that the killed attempt reported; it may have done a few more",
    "processes_killed": "processes of worker 1; SIGKILL goes to its group, the training dies with its agent",
    "steps_repeated": "steps between the checkpoint that worker 2 resumed and killed_at_step",
    "steps_trained": "steps_wanted + steps_repeated: all steps of both attempts together",
    "kill_to_first_new_step_s": "from the SIGKILL until the next attempt reported its first step",
    "kill_to_lost_ground_regained_s": "from the SIGKILL until a step beyond killed_at_step was reported",
    "accuracy": "share of held-out digits read correctly by the fetched weights, measured by the demo",
    "bit_identical": "whether every tensor has the same bytes as after the undisturbed run",
    "control_plane_calls": "HTTP requests by kind, retries included, of the submitter and all workers; of the killed "
    "worker until its last heartbeat",
    "bytes_uploaded": "payload bytes of objects put into storage, counted like the calls",
    "goodput": "by attempt, until its last report: seconds by activity, and the share of new steps",
    "checkpoints_stored": "of both jobs together, like all following numbers",
    "checkpoint_stall_s": "mean time for which the training stood still for a checkpoint",
    "checkpoint_bytes": "size of the checkpoints' files",
    "bytes_saved_by_addressing": "of checkpoint_bytes: stored before, by an earlier checkpoint or by the other job",
    "bytes_saved_by_codec": "of checkpoint_bytes: saved by encoding",
    "checkpoint_bytes_sent": "of checkpoint_bytes: the uploaded rest",
}


@dataclass(frozen=True)
class Interruption:
    """Step at which the worker was killed, and time after which the job continued."""

    killed_at_step: int
    resumed_from_step: int
    processes_killed: int
    first_new_step_s: float
    regained_s: float

    @property
    def steps_repeated(self) -> int:
        """Return the number of steps that were trained twice."""
        return max(self.killed_at_step - self.resumed_from_step, 0)


@dataclass(frozen=True)
class TakeoverResults:
    """Both jobs, and what the demo measured on them."""

    interrupted: JobRecord
    undisturbed: JobRecord
    steps_wanted: int
    interruption: Interruption
    readings: Readings
    different_tensors: list[str]
    weights_blake3: str
    undisturbed_weights_blake3: str
    traffic: Mapping[str, Traffic]

    @property
    def goodputs(self) -> dict[str, Goodput]:
        """Return the goodput of each attempt that reported one, by the attempt's name."""
        named = [(f"attempt {one.epoch}", one) for one in self.interrupted.attempts]
        named += [("undisturbed", one) for one in self.undisturbed.attempts]
        return {name: one.progress.goodput for name, one in named if one.progress and one.progress.goodput}

    @cached_property
    def total(self) -> Goodput:
        """Add up the goodput of all attempts."""
        whole = self.goodputs.values()
        return Goodput(**{name: sum(getattr(one, name) for one in whole) for name in Goodput.model_fields})

    @property
    def stall_s(self) -> float:
        """Return the mean seconds for which a checkpoint stopped the training."""
        return self.total.stalled_s / max(self.total.checkpoints_committed, 1)

    @property
    def bytes_by_addressing(self) -> int:
        """Return the bytes that were not sent, because the store had them."""
        return self.total.reused_bytes + self.total.encoded_bytes - self.total.uploaded_bytes

    @property
    def bytes_by_codec(self) -> int:
        """Return the bytes that encoding saved."""
        return self.total.raw_bytes - self.total.reused_bytes - self.total.encoded_bytes

    @property
    def all_traffic(self) -> Traffic:
        """Add up the traffic of all clients; the most frequent calls come first."""
        every = self.traffic.values()
        calls = sum((Counter(one.calls) for one in every), Counter[str]()).most_common()
        return Traffic(
            dict(calls), sum(one.uploaded_bytes for one in every), sum(one.downloaded_bytes for one in every)
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `summary.json`."""
        cut, sent = self.interruption, self.all_traffic
        return {
            "attempts": len(self.interrupted.attempts),
            "steps_wanted": self.steps_wanted,
            "steps_trained": self.steps_wanted + cut.steps_repeated,
            "steps_repeated": cut.steps_repeated,
            "killed_at_step": cut.killed_at_step,
            "resumed_from_step": cut.resumed_from_step,
            "processes_killed": cut.processes_killed,
            "kill_to_first_new_step_s": cut.first_new_step_s,
            "kill_to_lost_ground_regained_s": cut.regained_s,
            "accuracy": round(self.readings.accuracy, 6),
            "held_out": len(self.readings.predicted),
            "bit_identical": not self.different_tensors,
            "different_tensors": self.different_tensors,
            "weights_blake3": self.weights_blake3,
            "undisturbed_weights_blake3": self.undisturbed_weights_blake3,
            "bytes_uploaded": sent.uploaded_bytes,
            "bytes_downloaded": sent.downloaded_bytes,
            "goodput": {
                name: {**seconds_of(one), "share": round(share_of(one), 4)} for name, one in self.goodputs.items()
            },
            "checkpoints_stored": self.total.checkpoints_committed,
            "checkpoint_stall_s": round(self.stall_s, 4),
            "checkpoint_bytes": self.total.raw_bytes,
            "bytes_saved_by_addressing": self.bytes_by_addressing,
            "bytes_saved_by_codec": self.bytes_by_codec,
            "checkpoint_bytes_sent": self.total.uploaded_bytes,
            "control_plane_calls": {"total": sum(sent.calls.values()), "by_kind": sent.calls},
            "callers": {name: asdict(one) for name, one in self.traffic.items()},
            "attempt_history": [
                attempt.model_dump(mode="json", exclude={"log_tail"}, exclude_none=True)
                for attempt in self.interrupted.attempts
            ],
            "job_id": self.interrupted.job.id,
            "undisturbed_job_id": self.undisturbed.job.id,
            "definitions": DEFINITIONS,
        }

    def claims(self) -> list[Claim]:
        """Return the claims: another worker took over, the model is good, the kill changed no bit, at what cost."""
        cut, total, sent = self.interruption, self.total, self.all_traffic
        readings, whole = self.readings, len(self.readings.predicted)
        backwards = not 0 < cut.resumed_from_step <= cut.killed_at_step
        inaccurate, different = readings.accuracy < LEAST_ACCURACY, ", ".join(self.different_tensors)
        shares = ", ".join(
            f"{name} {100 * share_of(one):.0f} % of {sum(seconds_of(one).values()):.0f} s"
            for name, one in self.goodputs.items()
        )
        return [
            Claim(
                f"Worker 1 was killed at step {cut.killed_at_step} of {self.steps_wanted} "
                f"({100 * cut.killed_at_step / self.steps_wanted:.0f} %): SIGKILL to its process group. All "
                f"{cut.processes_killed} processes of the worker were gone and could save nothing."
            ),
            Claim(
                f"Its lease ran out. Worker 2, on another machine, took the job over from the checkpoint of step "
                f"{cut.resumed_from_step}; its first new step came {cut.first_new_step_s:.1f} s after the kill. "
                f"{cut.steps_repeated} steps were done twice, nothing else was lost.",
                f"worker 2 resumed from step {cut.resumed_from_step}, but worker 1 was killed at step "
                f"{cut.killed_at_step}" if backwards else "",
            ),
            Claim(
                f"The fetched model reads {whole - len(readings.wrong)} of {whole} held-out digits correctly: "
                f"{100 * readings.accuracy:.1f} %.",
                f"the fetched model reads only {100 * readings.accuracy:.1f} % of the held-out digits correctly, not "
                f"{100 * LEAST_ACCURACY:g} %" if inaccurate else "",
            ),
            Claim(
                "The same job, undisturbed, ended in exactly the same weights, bit for bit "
                f"(BLAKE3 {self.weights_blake3[:12]}...).",
                f"interrupted and undisturbed training ended in different weights: {different}" if different else "",
            ),
            Claim(
                f"Goodput, the share of time that went into new steps: {shares}. {total.repeated_s:.1f} s went into "
                f"repeated steps, {total.transferring_s:.0f} s into waiting for bytes, {total.idle_s:.0f} s into "
                "starting and ending."
            ),
            Claim(
                f"The training stood still for {1000 * self.stall_s:.1f} ms for each of {total.checkpoints_committed} "
                f"checkpoints. Of their {size_text(total.raw_bytes)}, {size_text(self.bytes_by_addressing)} were "
                f"stored already and not sent again, codecs saved {size_text(self.bytes_by_codec)}, and "
                f"{size_text(total.uploaded_bytes)} went up."
            ),
            Claim(
                f"The demo made {sum(sent.calls.values())} calls to the control plane, "
                f"{sent.calls.get('attempts', 0) + sent.calls.get('get_job', 0)} of them only to watch the jobs. "
                f"{size_text(sent.uploaded_bytes)} went up and {size_text(sent.downloaded_bytes)} came down, directly "
                "to and from storage."
            ),
        ]  # fmt: skip


def equal_losses(steps: Iterable[TrainedStep], others: Iterable[TrainedStep]) -> tuple[int, int]:
    """Compare two runs of a job: at how many steps both have exactly the same loss, of how many that both reported.

    A step that a run repeated counts once, and as equal only if each repetition is equal.
    """
    expected = {other.step: other.loss for other in others}
    equal: dict[int, bool] = {}
    for one in steps:
        if one.step in expected:
            equal[one.step] = equal.get(one.step, True) and one.loss == expected[one.step]
    return sum(equal.values()), len(equal)


def seconds_of(goodput: Goodput) -> dict[str, float]:
    """Return the seconds of an attempt by activity."""
    return {name: value for name, value in goodput.model_dump().items() if name.endswith("_s")}


def share_of(goodput: Goodput) -> float:
    """Return the share of time that went into new steps, from 0 to 1."""
    return goodput.productive_s / max(sum(seconds_of(goodput).values()), 0.001)
