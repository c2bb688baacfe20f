"""Run the steps of one attempt in order: start, watch, retry, check the outputs, record the end."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from baton.contract.jobs.job import FailureClass
from baton.contract.recipes.plan import CommandOrder, StepOrder
from baton.contract.worker.calls import WorkItem
from gpu_client.agent.app.shutdown import ShutdownRequest
from gpu_client.agent.attempt.checkpoint_scheduler import CheckpointScheduler
from gpu_client.agent.attempt.required_outputs import check_inputs, check_outputs, snapshot_inputs
from gpu_client.agent.attempt.trainer_run import TrainerResult, TrainerRun
from gpu_client.agent.control.channel_messages import TrainingProgress
from gpu_client.agent.control.channel_server import ChannelServer, StopReason
from gpu_client.agent.control.control_relay import ControlRelay
from gpu_client.agent.io.checkpoint_collector import CheckpointCollector
from gpu_client.agent.io.committer import Committer, StagedCheckpoint
from gpu_client.agent.io.step_ledger import RECORD, StepLedger, get_plan
from gpu_client.agent.polled_event import PolledEvent
from gpu_client.agent.process.environment import build_environment, expand_command
from gpu_client.agent.process.failures import AttemptFailure, ExitStatus, classify_exit, classify_start_error
from gpu_client.agent.process.output import TrainerOutput
from gpu_client.agent.process.supervisor import TrainerProcess
from gpu_client.agent.workspace.slots import JobDirectories
from gpu_client.checkpoints.local.chunk_cache import LocalChunkCache
from gpu_client.transport.net.cancellation import CancelEvent

logger = logging.getLogger("baton.job")

RECORD_WAIT_S = 60.0
"""Longest wait, in seconds, for the commit of a finished step's record; then the next step begins."""
COMMAND_TIMEOUT_S = 60
"""Default time limit of a health check or a cleanup, in seconds."""
HURRIED_S = 5.0
"""Time limit of a cleanup in seconds, after a stop request."""
COMMAND_GRACE_S = 2.0
SILENCE_S = 600.0
"""Silence in seconds from which a stuck training counts as stalled: an unreported evaluation may print."""
START_SILENCE_S = 3600.0
"""Silence in seconds from which a training that reports steps, but none so far, counts as stalled."""
_FINAL = frozenset({FailureClass.STOPPED_BY_RULE})
NOT_ELASTIC = (
    "the job has nodes, but the command never called session.elastic: each node would train a model of its own. "
    "Call session.elastic as in docs/elastic.md, or submit the job without nodes"
)
"""Failure classes after which a step is not retried."""


class StartTrainer(Protocol):
    """The signature of `start_trainer`."""

    def __call__(
        self, command: list[str], env: Mapping[str, str], cwd: Path, output: TrainerOutput | None = None
    ) -> TrainerProcess: ...


class StepsResult(NamedTuple):
    """Result of the steps. `done`: all steps succeeded. Otherwise `failure`; None if the agent releases the job."""

    done: bool
    status: ExitStatus | None = None
    failure: AttemptFailure | None = None


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """Callbacks and shared objects of the attempt.

    `lease_lost` is set when the lease is lost or the attempt is over; `stop_reason` returns the reason to release the
    job.
    """

    start: StartTrainer
    scheduler: CheckpointScheduler
    stop: ShutdownRequest
    lease_lost: CancelEvent
    canceled: Callable[[], bool]
    stop_reason: Callable[[], StopReason | None]
    control: ControlRelay
    api_url: str
    """Address of the control plane, passed to the processes of a job that names rings."""
    world: str = ""
    """BATON_WORLD of a node of an elastic training."""
    has_joined: Callable[[], bool] = lambda: True
    """Returns False while the process of such a node has not asked to join its world."""

    def interrupted(self) -> bool:
        """Return True once no process may start any more."""
        return self.lease_lost.is_set() or self.stop_reason() is not None


class StepRunner:
    """Runner of an attempt's steps. Progress and output belong to the present step."""

    def __init__(
        self,
        item: WorkItem,
        directories: JobDirectories,
        ledger: StepLedger,
        *,
        collector: CheckpointCollector,
        committer: Committer,
        store: LocalChunkCache,
        output: TrainerOutput,
        context: StepContext,
        offer_artifact: Callable[[Path], str | None],
    ) -> None:
        """`offer_artifact` takes each file that the training shows, or returns the reason why the file is refused."""
        self._offer_artifact = offer_artifact
        self._item = item
        self._plan = get_plan(item)
        self._directories = directories
        self._ledger = ledger
        self._collector = collector
        self._committer = committer
        self._store = store
        self._context = context
        self._channel: ChannelServer | None = None
        self._run: TrainerRun | None = None
        self._highest = ledger.base
        self._patience_s = SILENCE_S
        """Duration of a stall that ends the training. It doubles with each stall, because a pause of a sound training
        recurs after its restart."""
        self.output = output
        self._printed = False

    # The state of the present step

    def progress(self) -> TrainingProgress | None:
        """Return the progress of the job: steps are numbered through."""
        progress = self._channel.progress() if self._channel else None
        if progress is None or not self._ledger.base:
            return progress
        total = None if progress.total is None else self._ledger.to_job_step(progress.total)
        step = self._ledger.to_job_step(progress.step)
        return TrainingProgress(step, total, progress.metrics, nonfinite=progress.nonfinite)

    def request_checkpoint(self) -> bool:
        """Ask the training for a checkpoint; returns False if no process is connected."""
        return self._channel is not None and self._channel.request_checkpoint() > 0

    @property
    def last_checkpoint_skipped(self) -> str:
        """Return the reason why no time was left for a last checkpoint; "" otherwise."""
        return self._run.last_checkpoint_skipped if self._run else ""

    # The steps

    def run(self, resume_from: Path | None) -> StepsResult:
        """Run the remaining steps; the first step resumes from `resume_from`."""
        if self._plan.check is not None and (failure := self._check_health(self._plan.check)):
            return StepsResult(False, failure=failure)
        for order in self._ledger.remaining_steps():
            if self._context.interrupted():
                return StepsResult(False)
            end = self._run_with_retries(order, resume_from)
            if not end.done:
                return end
            resume_from = None
            if len(self._ledger.remaining_steps()) > 1:
                self._record(order)
        return StepsResult(True)

    def clean_up(self) -> None:
        """Run the recipe's cleanup commands. A failed cleanup is logged in the job's log and ignored."""
        for order in [] if self._context.lease_lost.is_set() else self._plan.cleanup:
            limit_s = float(order.timeout_s or COMMAND_TIMEOUT_S)
            limit_s = min(limit_s, HURRIED_S) if self._context.stop_reason() else limit_s
            problem = self._run_beside(order, limit_s, self._context.lease_lost.is_set, self.output.successor())
            if problem:
                self._log_line(f"cleanup {order.command[0]}: {problem}")

    def _run_with_retries(self, order: StepOrder, resume_from: Path | None) -> StepsResult:
        tries = 0
        while True:
            if len(self._plan.steps) > 1 or tries:
                self._log_line(self._ledger.describe(order) + (f", try {tries + 1}" if tries else ""))
            end = self._run_once(order, resume_from)
            # No failure means that a rule or a stop request ended the step: no retry.
            final = end.failure is None or end.failure.failure_class in _FINAL or end.failure.failure_class.node_fault
            stalled = end.failure is not None and end.failure.failure_class is FailureClass.NO_PROGRESS
            # A stall often ends with its process. Another one is for another machine.
            retries = max(order.retries, 1) if stalled and self._item.restart_on_stall else order.retries
            if final or self._context.interrupted() or tries >= retries:
                return end
            tries += 1
            logger.warning("job %s: step %s: %s", self._item.id, order.name, end.failure and end.failure.reason)
            self._drain(self._context.interrupted)
            if PolledEvent(self._context.interrupted).wait(order.retry_wait_s):
                return StepsResult(False, end.status)
            resume_from = self._newest()

    def _run_once(self, order: StepOrder, resume_from: Path | None) -> StepsResult:
        """Run a step once."""
        inputs = snapshot_inputs(self._directories.data) if self._item.plan else {}
        # A checkpoint in shared memory cannot take the record of finished steps, therefore it goes to disk.
        arena = None if self._ledger.finished or order.checkpoints == "none" else self._directories.arena
        with ChannelServer(self._directories.output, arena=arena) as channel:
            self._channel = channel
            control = self._context.control
            control.attach(
                channel,
                base=self._ledger.base,
                storing=lambda: self._committer.busy,
                log_line=self.output.spool.append,
                missed=lambda: self._collector.missed,
            )
            try:
                control.write_start(self._directories.control)
            except OSError as error:
                return StepsResult(False, failure=classify_start_error(error))
            environment = build_environment(
                self._item,
                self._directories,
                str(channel.path),
                str(resume_from or ""),
                step_variables=order.environment,
                use_arena=arena is not None,
                api_url=self._context.api_url,
                world=self._context.world,
            )
            # Called before the trainer starts, because the trainer may remove its resume checkpoint at once.
            self._collector.begin(resume_from)
            try:
                trainer = self._context.start(
                    expand_command(order.command, environment), environment, self._directories.root, self._next_output()
                )
            except (OSError, ValueError) as error:
                return StepsResult(False, failure=classify_start_error(error))
            try:
                end = self._monitor(order, trainer, channel, resume_from)
            finally:
                trainer.stop(0)
                control.detach()
                self._update_highest()
        return self._evaluate_result(order, end, inputs)

    def _monitor(
        self, order: StepOrder, trainer: TrainerProcess, channel: ChannelServer, resume_from: Path | None
    ) -> TrainerResult:
        saves = order.checkpoints != "none"

        def collect(news: bool) -> None:
            self._drain_channel(channel)
            if saves and not is_refused():
                self._collector.collect(trainer, self._committer, now=news)

        def is_refused() -> bool:
            return self._trains_alone(channel, resume_from)

        self._run = TrainerRun(
            self._item,
            trainer,
            channel,
            scheduler=self._context.scheduler,
            stop=self._context.stop,
            lease_lost=self._context.lease_lost,
            canceled=self._context.canceled,
            stop_reason=self._context.stop_reason,
            collect=collect,
            is_refused=is_refused,
            stalled_s=self._find_stall_s,
            base=self._ledger.base,
            timeout_s=order.timeout_s,
        )
        end = self._run.run()
        channel.settle()  # The last message may contain the training's final report.
        self._drain_channel(channel)
        if is_refused():
            return end._replace(is_refused=True)
        if saves:
            self._collector.collect_rest(self._committer, clean_exit=end.status.code == 0)
        return end

    def _trains_alone(self, channel: ChannelServer, resume_from: Path | None) -> bool:
        """Return True if the last step of an elastic job trains, or saves, and has not joined the world."""
        if not self._has_never_joined():
            return False
        progress = channel.progress()
        # A phase repeats the step of the restored checkpoint.
        trained = progress is not None and progress.step > 0 and progress.phase is None
        return trained or any(one != resume_from for one in self._directories.output.glob("checkpoint-*"))

    def _has_never_joined(self) -> bool:
        """Return True if the last step of an elastic job has not joined; the steps before may prepare data."""
        is_last = len(self._ledger.remaining_steps()) == 1
        return is_last and not self._context.has_joined() and not self._context.interrupted()

    def _find_stall_s(self) -> float:
        """Return the seconds of a stall that ends the training: no progress and no output; 0.0 otherwise."""
        channel = self._channel
        if channel is None or not self._item.restart_on_stall:
            return 0.0
        stalled_s = time.monotonic() - self.output.fed_at
        if channel.advanced_at() is not None:
            stalled_s = min(stalled_s, self._context.control.stuck_s())
        # A script that never reports a step may be silent for hours.
        elif stalled_s <= START_SILENCE_S or not (channel.hellos() or self._item.last_step is not None):
            return 0.0
        if stalled_s <= self._patience_s:
            return 0.0
        self._patience_s = 2 * stalled_s
        return stalled_s

    def _drain_channel(self, channel: ChannelServer) -> None:
        """Process the training's messages since the last call."""
        self._context.control.poll()
        self._offer_artifacts(channel)
        for point in channel.take_points():
            self.output.points.append(self._ledger.to_job_step(point.step), point.metrics)

    def _offer_artifacts(self, channel: ChannelServer) -> None:
        """Offer the files that the training has shown since the last call."""
        for path in channel.take_artifacts():
            problem = self._offer_artifact(path)
            if problem:
                # The trainer prints at the same time, therefore the line goes to the spool and not to `_log_line`.
                self.output.spool.append(f"[baton] {path.name} is uploaded at the end only: {problem}")

    def _evaluate_result(
        self, order: StepOrder, end: TrainerResult, inputs: Mapping[str, tuple[int, int]]
    ) -> StepsResult:
        status = end.status
        if end.is_refused or (status.clean and self._has_never_joined()):
            return StepsResult(False, status, AttemptFailure(FailureClass.BAD_INPUT, NOT_ELASTIC))
        rule_exit = self._context.control.rule_exit
        stop_reason = self._context.stop_reason() is not None and end.silent_s is None and end.timeout_s is None
        # A stop request at the same moment may cut an announced rule exit short. The exit counts all the same, because
        # the checkpoints record the firing, therefore the rule would not fire again.
        if rule_exit is not None and (status.clean or stop_reason) and (rule_exit.failed or rule_exit.kind != "stop"):
            failure = AttemptFailure(FailureClass.STOPPED_BY_RULE, rule_exit.reason) if rule_exit.failed else None
            return StepsResult(False, status, failure)
        finished = rule_exit is not None and stop_reason
        if status.clean and (finished or not (status.stopped_by_us or self._has_exited_early())):
            failure = check_inputs(self._directories.data, dict(inputs)) or check_outputs(
                self._directories.output, order.outputs, order.optional_outputs
            )
            if failure is None or not finished:
                return StepsResult(failure is None, status, failure)
        if end.timeout_s is not None:
            reason = f"step {order.name} ran longer than its {end.timeout_s} s"
            return StepsResult(False, status, AttemptFailure(FailureClass.STEP_TIMEOUT, reason))
        if self._context.stop_reason() and end.silent_s is None:
            return StepsResult(False, status)
        return StepsResult(False, status, classify_exit(status, self.output.last_lines(), end.silent_s))

    def _has_exited_early(self) -> bool:
        """Return True if a clean exit answers the agent's stop request rather than the end of the step."""
        if self._run is None or not self._run.asked_to_leave or self._channel is None:
            return False
        progress = self._channel.progress()
        return not (progress and progress.total is not None and progress.step >= progress.total)

    def _update_highest(self) -> None:
        progress = self.progress()
        self._highest = max(self._highest, self._collector.highest, progress.step if progress else 0)

    def _record(self, order: StepOrder) -> None:
        """Commit the record of the finished step, with the files that the step keeps."""
        place = self._ledger.describe(order)
        step, directory = self._ledger.finish(order, self._highest)
        self._highest = self._ledger.base
        self._committer.offer(StagedCheckpoint(step, directory, {}, "session"))
        if self._drain(self._context.lease_lost.is_set):
            self._log_line(f"{place} is finished")
            logger.info("job %s: %s is finished", self._item.id, place)

    def _drain(self, enough: Callable[[], bool]) -> bool:
        until = time.monotonic() + RECORD_WAIT_S
        return self._committer.drain(lambda: enough() or time.monotonic() > until)

    def _newest(self) -> Path | None:
        """Move this step's newest local checkpoint to its place, delete the others, and return its path or None."""
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

    def _check_health(self, order: CommandOrder) -> AttemptFailure | None:
        """Return the failure of the recipe's health check; None if the machine is fit."""
        limit_s = float(order.timeout_s or COMMAND_TIMEOUT_S)
        problem = self._run_beside(order, limit_s, self._context.interrupted, self._next_output())
        if problem is None or self._context.interrupted():
            return None
        last = next((line for line in reversed(self.output.last_lines()) if line.strip()), "")
        reason = f"the recipe's health check {order.command[0]!r} failed: {problem}{f': {last}' if last else ''}"
        return AttemptFailure(FailureClass.NODE_FAULT, reason)

    def _run_beside(
        self, order: CommandOrder, limit_s: float, enough: Callable[[], bool], output: TrainerOutput
    ) -> str | None:
        """Run a command beside the steps. Returns the problem or None."""
        environment = build_environment(
            self._item, self._directories, "", "", step_variables=order.environment, api_url=self._context.api_url
        )
        try:
            process = self._context.start(
                expand_command(order.command, environment), environment, self._directories.root, output
            )
        except (OSError, ValueError) as error:
            return str(error)
        until = time.monotonic() + limit_s
        try:
            PolledEvent(lambda: process.poll() is not None or enough()).wait(limit_s)
            status = process.poll()
            if status is None:
                process.stop(COMMAND_GRACE_S)
                return f"not done in {limit_s:.0f} s" if time.monotonic() >= until else "cut short"
        finally:
            process.stop(0)
        if status.start_error is not None:
            return status.start_error
        return None if status.clean else f"exit code {status.code}, signal {status.signal}"

    def _next_output(self) -> TrainerOutput:
        """Return the output of the next process; all processes write into the same log."""
        if self._printed:
            self.output = self.output.successor()
        self._printed = True
        return self.output

    def _log_line(self, line: str) -> None:
        """Write a line into the job's log."""
        self.output.feed(f"[baton] {line}\n".encode())
