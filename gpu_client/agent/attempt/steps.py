"""The steps of one attempt, in order: each run, watched, tried again, looked at behind, and recorded as finished."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from baton.contract.jobs import FailureClass
from baton.contract.recipes.plan import CommandOrder, StepOrder
from baton.contract.work import WorkItem
from gpu_client.agent.app.shutdown import StopRequest
from gpu_client.agent.attempt.checkpoint_scheduler import Pace
from gpu_client.agent.attempt.required_outputs import changed_inputs, failed_outputs, look_at_inputs
from gpu_client.agent.attempt.trainer_run import TrainerEnd, TrainerRun
from gpu_client.agent.control.channel_messages import Progress
from gpu_client.agent.control.channel_server import ChannelServer, StopReason
from gpu_client.agent.control.control_relay import SteeringRelay
from gpu_client.agent.io.checkpoint_collector import Harvest
from gpu_client.agent.io.committer import Committer, Staged
from gpu_client.agent.io.step_ledger import RECORD, StepLedger, plan_of
from gpu_client.agent.polled_event import Condition
from gpu_client.agent.process.environment import expanded, trainer_environment
from gpu_client.agent.process.failures import ExitStatus, Failure, classify, start_failure
from gpu_client.agent.process.output import TrainerOutput
from gpu_client.agent.process.supervisor import TrainerProcess
from gpu_client.agent.workspace.slots import JobDirectories
from gpu_client.checkpoints.local.chunk_cache import LocalStore
from gpu_client.transport.net.cancellation import CancelEvent

logger = logging.getLogger("baton.job")

RECORD_WAIT_S = 60.0
"""A finished step is recorded before the next one begins; where nothing can be, the next one begins after this time."""
COMMAND_TIMEOUT_S = 60
"""Of a health check or a cleanup that says none."""
HURRIED_S = 5.0
"""A cleanup gets no longer than this when the machine is to be left."""
ASIDE_GRACE_S = 2.0
_FINAL = frozenset({FailureClass.STOPPED_BY_RULE})
"""Nobody's mishap: no try more would change it."""


class Start(Protocol):
    """Starts a trainer, as `start_trainer` does."""

    def __call__(
        self, command: list[str], env: Mapping[str, str], cwd: Path, output: TrainerOutput | None = None
    ) -> TrainerProcess: ...


class StepsEnd(NamedTuple):
    """`done`: all ran well. Else why not; no failure where nothing failed, but the job is to be left."""

    done: bool
    status: ExitStatus | None = None
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What an attempt lends its steps. `over`: the lease is lost; `leaving` says why to hand the job back."""

    start: Start
    pace: Pace
    stop: StopRequest
    over: CancelEvent
    canceled: Callable[[], bool]
    leaving: Callable[[], StopReason | None]
    steering: SteeringRelay
    api_url: str
    """For processes of a job that names rings."""

    def interrupted(self) -> bool:
        """Nothing more is to be started."""
        return self.over.is_set() or self.leaving() is not None


class Steps:
    """Runs them. What others ask meanwhile (how far is it, what did it print) is of the present step."""

    def __init__(
        self,
        item: WorkItem,
        directories: JobDirectories,
        ledger: StepLedger,
        *,
        harvest: Harvest,
        committer: Committer,
        store: LocalStore,
        output: TrainerOutput,
        around: Surroundings,
        show: Callable[[Path], str | None],
    ) -> None:
        """`show` is offered each file that the training says is finished; it says why not, if it does not take it."""
        self._show = show
        self._item = item
        self._plan = plan_of(item)
        self._directories = directories
        self._ledger = ledger
        self._harvest = harvest
        self._committer = committer
        self._store = store
        self._around = around
        self._channel: ChannelServer | None = None
        self._run: TrainerRun | None = None
        self._highest = ledger.base
        self.output = output
        self._printed = False

    # What is asked meanwhile

    def progress(self) -> Progress | None:
        """How far the job is: steps are numbered through."""
        progress = self._channel.progress() if self._channel else None
        if progress is None or not self._ledger.base:
            return progress
        total = None if progress.total is None else self._ledger.counted(progress.total)
        step = self._ledger.counted(progress.step)
        return Progress(step, total, progress.metrics, nonfinite=progress.nonfinite)

    def request_checkpoint(self) -> bool:
        """Ask for one; False if nobody is connected who could hear it."""
        return self._channel is not None and self._channel.request_checkpoint() > 0

    @property
    def last_checkpoint_skipped(self) -> str:
        """Why there was no time for a last checkpoint, if so."""
        return self._run.last_checkpoint_skipped if self._run else ""

    # The course

    def run(self, resume_from: Path | None) -> StepsEnd:
        """All that are left; the first one resumes."""
        if self._plan.check is not None and (failure := self._unfit(self._plan.check)):
            return StepsEnd(False, failure=failure)
        for order in self._ledger.left():
            if self._around.interrupted():
                return StepsEnd(False)
            end = self._until_well(order, resume_from)
            if not end.done:
                return end
            resume_from = None
            if len(self._ledger.left()) > 1:
                self._record(order)
        return StepsEnd(True)

    def clean_up(self) -> None:
        """The recipe's cleanup. What goes wrong in it is said in the job's log, and changes nothing."""
        for order in [] if self._around.over.is_set() else self._plan.cleanup:
            limit_s = float(order.timeout_s or COMMAND_TIMEOUT_S)
            limit_s = min(limit_s, HURRIED_S) if self._around.leaving() else limit_s
            problem = self._aside(order, limit_s, self._around.over.is_set, self.output.followed())
            if problem:
                self._say(f"cleanup {order.command[0]}: {problem}")

    def _until_well(self, order: StepOrder, resume_from: Path | None) -> StepsEnd:
        tries = 0
        while True:
            if len(self._plan.steps) > 1 or tries:
                self._say(self._ledger.place(order) + (f", try {tries + 1}" if tries else ""))
            end = self._once(order, resume_from)
            # Without a failure a rule ended it, or others did: neither is to be tried again.
            final = end.failure is None or end.failure.failure_class in _FINAL or end.failure.failure_class.node_fault
            if final or self._around.interrupted() or tries >= order.retries:
                return end
            tries += 1
            logger.warning("job %s: step %s: %s", self._item.id, order.name, end.failure and end.failure.reason)
            self._drain(self._around.interrupted)
            if Condition(self._around.interrupted).wait(order.retry_wait_s):
                return StepsEnd(False, end.status)
            resume_from = self._newest()

    def _once(self, order: StepOrder, resume_from: Path | None) -> StepsEnd:
        """One run of one step."""
        inputs = look_at_inputs(self._directories.data) if self._item.plan else {}
        # A checkpoint in shared memory cannot have the record of finished steps added to it.
        arena = None if self._ledger.finished or order.checkpoints == "none" else self._directories.arena
        with ChannelServer(self._directories.output, arena=arena) as channel:
            self._channel = channel
            steering = self._around.steering
            steering.attach(
                channel,
                base=self._ledger.base,
                storing=lambda: self._committer.busy,
                say=self.output.spool.append,
                missed=lambda: self._harvest.missed,
            )
            try:
                steering.write_start(self._directories.control)
            except OSError as error:
                return StepsEnd(False, failure=start_failure(error))
            environment = trainer_environment(
                self._item,
                self._directories,
                str(channel.path),
                str(resume_from or ""),
                own=order.environment,
                use_arena=arena is not None,
                api_url=self._around.api_url,
            )
            # Looked at before the trainer starts: it may remove what it resumed from at once.
            self._harvest.begin(resume_from)
            try:
                trainer = self._around.start(
                    expanded(order.command, environment), environment, self._directories.root, self._next_output()
                )
            except (OSError, ValueError) as error:
                return StepsEnd(False, failure=start_failure(error))
            try:
                end = self._watch(order, trainer, channel)
            finally:
                trainer.stop(0)
                steering.detach()
                self._note_progress()
        return self._judged(order, end, inputs)

    def _watch(self, order: StepOrder, trainer: TrainerProcess, channel: ChannelServer) -> TrainerEnd:
        saves = order.checkpoints != "none"

        def gather(news: bool) -> None:
            self._hear(channel)
            if saves:
                self._harvest.gather(trainer, self._committer, now=news)

        self._run = TrainerRun(
            self._item,
            trainer,
            channel,
            pace=self._around.pace,
            stop=self._around.stop,
            over=self._around.over,
            canceled=self._around.canceled,
            leaving=self._around.leaving,
            gather=gather,
            base=self._ledger.base,
            timeout_s=order.timeout_s,
        )
        end = self._run.run()
        channel.settle()  # how the training is to be reported was the last that it said
        self._hear(channel)
        if saves:
            self._harvest.gather_rest(self._committer, clean_exit=end.status.code == 0)
        return end

    def _hear(self, channel: ChannelServer) -> None:
        """Take what the training has said since the last look."""
        self._around.steering.take()
        self._show_finished(channel)
        for point in channel.take_points():
            self.output.points.offer(self._ledger.counted(point.step), point.metrics)

    def _show_finished(self, channel: ChannelServer) -> None:
        """Hand over what the training has finished since the last look."""
        for path in channel.take_artifacts():
            problem = self._show(path)
            if problem:
                # Not through `_say`: the trainer is printing.
                self.output.spool.append(f"[baton] {path.name} is not shown before the end: {problem}")

    def _judged(self, order: StepOrder, end: TrainerEnd, inputs: Mapping[str, tuple[int, int]]) -> StepsEnd:
        status = end.status
        by_rule = self._around.steering.leaving
        leaving = self._around.leaving() is not None and end.silent_s is None and end.timeout_s is None
        # What the training has announced comes about, also where others want the machine back at the same moment and
        # did not let it end: the rule counts as fired in its checkpoints, and would not say so again.
        if by_rule is not None and (status.clean or leaving) and (by_rule.failed or by_rule.kind != "stop"):
            failure = Failure(FailureClass.STOPPED_BY_RULE, by_rule.reason) if by_rule.failed else None
            return StepsEnd(False, status, failure)
        finished = by_rule is not None and leaving
        if status.clean and (finished or not (status.stopped_by_us or self._left_early())):
            failure = changed_inputs(self._directories.data, dict(inputs)) or failed_outputs(
                self._directories.output, order.outputs, order.optional_outputs
            )
            if failure is None or not finished:
                return StepsEnd(failure is None, status, failure)
        if end.timeout_s is not None:
            reason = f"step {order.name} ran longer than its {end.timeout_s} s"
            return StepsEnd(False, status, Failure(FailureClass.STEP_TIMEOUT, reason))
        if self._around.leaving() and end.silent_s is None:
            return StepsEnd(False, status)
        return StepsEnd(False, status, classify(status, self.output.last_lines(), end.silent_s))

    def _left_early(self) -> bool:
        """True when a clean exit answers our request to leave rather than the end of the step."""
        if self._run is None or not self._run.asked_to_leave or self._channel is None:
            return False
        progress = self._channel.progress()
        return not (progress and progress.total is not None and progress.step >= progress.total)

    def _note_progress(self) -> None:
        progress = self.progress()
        self._highest = max(self._highest, self._harvest.highest, progress.step if progress else 0)

    def _record(self, order: StepOrder) -> None:
        """Commit that the step is finished, and what it left."""
        place = self._ledger.place(order)
        step, directory = self._ledger.finish(order, self._highest)
        self._highest = self._ledger.base
        self._committer.offer(Staged(step, directory, {}, "session"))
        if self._drain(self._around.over.is_set):
            self._say(f"{place} is finished")
            logger.info("job %s: %s is finished", self._item.id, place)

    def _drain(self, enough: Callable[[], bool]) -> bool:
        until = time.monotonic() + RECORD_WAIT_S
        return self._committer.drain(lambda: enough() or time.monotonic() > until)

    def _newest(self) -> Path | None:
        """What this step can resume from on this machine, put in its place; other checkpoints are taken away."""
        output = self._directories.output
        for path in output.glob("checkpoint-*"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
        found = self._store.newest()
        if found is None or found[0].step < self._ledger.base:
            return None
        manifest, files = found
        target = output / f"checkpoint-{manifest.step - self._ledger.base}"
        shutil.copytree(files, target, ignore=shutil.ignore_patterns(RECORD))
        return target

    # Commands beside the steps

    def _unfit(self, order: CommandOrder) -> Failure | None:
        """Why this machine should not run the job, by the recipe's health check."""
        limit_s = float(order.timeout_s or COMMAND_TIMEOUT_S)
        problem = self._aside(order, limit_s, self._around.interrupted, self._next_output())
        if problem is None or self._around.interrupted():
            return None
        last = next((line for line in reversed(self.output.last_lines()) if line.strip()), "")
        reason = f"the recipe's health check {order.command[0]!r} failed: {problem}{f': {last}' if last else ''}"
        return Failure(FailureClass.NODE_FAULT, reason)

    def _aside(
        self, order: CommandOrder, limit_s: float, enough: Callable[[], bool], output: TrainerOutput
    ) -> str | None:
        """Run a command beside the steps; what went wrong, None if nothing did."""
        environment = trainer_environment(
            self._item, self._directories, "", "", own=order.environment, api_url=self._around.api_url
        )
        try:
            process = self._around.start(
                expanded(order.command, environment), environment, self._directories.root, output
            )
        except (OSError, ValueError) as error:
            return str(error)
        until = time.monotonic() + limit_s
        try:
            Condition(lambda: process.poll() is not None or enough()).wait(limit_s)
            status = process.poll()
            if status is None:
                process.stop(ASIDE_GRACE_S)
                return f"not done in {limit_s:.0f} s" if time.monotonic() >= until else "cut short"
        finally:
            process.stop(0)
        if status.start_error is not None:
            return status.start_error
        return None if status.clean else f"exit code {status.code}, signal {status.signal}"

    def _next_output(self) -> TrainerOutput:
        """Of the process that is about to begin; its lines follow in the same log."""
        if self._printed:
            self.output = self.output.followed()
        self._printed = True
        return self.output

    def _say(self, line: str) -> None:
        """In the job's log."""
        self.output.feed(f"[baton] {line}\n".encode())
