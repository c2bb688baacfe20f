"""Run one attempt at one job: restore, fetch, train, commit, report.

A lost lease, a cancel, a pause or a SIGTERM only sets a flag; the attempt's thread acts on the flag in every phase. The
attempt reports nothing as done before it is stored, and heartbeats continue until the report is accepted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from baton.contract.jobs.job import FailureClass
from baton.contract.worker.calls import HeartbeatAnswer, HeartbeatRequest, WorkItem
from baton.contract.worker.control import Directive
from baton.contract.worker.lease_grace import heartbeat_budget_s
from gpu_client.agent.app.settings import AgentSettings
from gpu_client.agent.app.shutdown import ShutdownLevel, ShutdownRequest
from gpu_client.agent.attempt.attempt_reporter import AttemptOutcome, AttemptReporter
from gpu_client.agent.attempt.checkpoint_scheduler import CheckpointScheduler
from gpu_client.agent.attempt.goodput import Activity
from gpu_client.agent.attempt.lease import LeaseKeeper, LeaseLoss, is_key_refused
from gpu_client.agent.attempt.outage_tolerance import CALL_BUDGET_S, HURRIED_BUDGET_S, LeasedCalls
from gpu_client.agent.attempt.required_outputs import check_outputs, collect_declared_outputs, deliver_until_stored
from gpu_client.agent.attempt.steps import StepContext, StepRunner, StepsResult
from gpu_client.agent.control.channel_messages import TrainingProgress
from gpu_client.agent.control.channel_server import StopReason
from gpu_client.agent.control.control_relay import ControlRelay, RuleExit
from gpu_client.agent.control.world_relay import WorldRelay, describe_world
from gpu_client.agent.io.artifact_shipper import ArtifactShipper
from gpu_client.agent.io.checkpoint_collector import CheckpointCollector
from gpu_client.agent.io.committer import Committer
from gpu_client.agent.io.inputs import fetch_inputs
from gpu_client.agent.io.log_shipper import LogShipper
from gpu_client.agent.io.metric_buffer import MetricBuffer
from gpu_client.agent.io.step_ledger import StepLedger, get_plan
from gpu_client.agent.polled_event import PolledEvent
from gpu_client.agent.process.failures import AttemptFailure, ExitStatus, classify_error, is_expected
from gpu_client.agent.process.output import TrainerOutput
from gpu_client.agent.process.supervisor import start_trainer
from gpu_client.agent.workspace.slots import JobDirectories, Workspace, WorkspaceError
from gpu_client.checkpoints.local.chunk_cache import LocalChunkCache
from gpu_client.checkpoints.restore.checkpoint_restore import restore
from gpu_client.checkpoints.save.artifacts import upload_artifacts
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import (
    BatonError,
    LeaseExpired,
    LeaseLost,
    RollbackRefused,
    TransferCanceled,
    Unauthorized,
)
from gpu_client.transport.transfer.manager import Transfer

logger = logging.getLogger("baton.job")

PATIENCE_S = 600.0
"""Seconds for the upload of the last checkpoint while the machine stays: after a pause, a failure, the end."""
ARTIFACT_PATIENCE_S = 20.0
"""Longest wait, in seconds, for the artifacts that the training showed last."""
LOG_BUDGET_S = 10.0
WORLD_BUDGET_S = 10.0
"""Time limit of a world call in seconds; the node repeats a call without an answer."""
_ACTIVITIES = {"training": Activity.TRAINING}
"""Activity of each phase. A phase that is missing here transfers bytes while the training waits."""


class JobRun:
    """Attempt at a job. `run` returns when no process and no file of the attempt is left on the machine."""

    def __init__(
        self,
        item: WorkItem,
        *,
        client: BatonClient,
        transfer: Transfer,
        settings: AgentSettings,
        workspace: Workspace,
        stop: ShutdownRequest,
        claimed_at: float,
        on_progress: Callable[[], None] = lambda: None,
        on_alive: Callable[[float], None] = lambda within_s: None,
        on_renewed: Callable[[float], None] = lambda lease_s: None,
    ) -> None:
        self._item = item
        self._client = client
        self._transfer = transfer
        self._settings = settings
        self._workspace = workspace
        self._stop = stop
        self._on_progress = on_progress
        self._on_renewed = on_renewed
        self._phase = "claimed"
        self._started_at = int(time.time())
        self._ended = threading.Event()
        """Event of a lost lease or the attempt's end; ends every transfer and wait."""
        self._lost: LeaseLoss | None = None
        self.failure: AttemptFailure | None = None
        """Reason of the failure; None without a failure."""
        self._pause_reason = ""
        self._checkpoint_asked = False
        self._scheduler = CheckpointScheduler(item)
        self._steps: StepRunner | None = None
        self._tail: list[str] = []
        """Last lines of the last step."""
        points = MetricBuffer(lambda: item.server_time + time.monotonic() - claimed_at)
        self._output = TrainerOutput(echo=lambda line: logger.debug("| %s", line), points=points)
        self._output.signals.set_rules(item.control.rules if item.control else None)
        self._shipper: LogShipper | None = None
        self._control = ControlRelay(item.control, attempt=item.epoch)
        heart = client.within(heartbeat_budget_s(item.heartbeat_interval_s))
        self._keeper = LeaseKeeper(
            item,
            lambda request: heart.heartbeat(item.id, item.lease_token, request),
            self._status,
            on_directive=self._on_directive,
            on_lost=self._on_lease_lost,
            on_pause=on_alive,
            on_answer=self._on_answer,
            claimed_at=claimed_at,
        )
        self._calls = LeasedCalls(client, self._keeper, given_up=self._out_of_time)
        self._reporter = AttemptReporter(
            item, settings.identity(), self._calls, self._flush_before_report, self._control
        )

    def run(self) -> AttemptOutcome:
        """Run the attempt. Raises WorkspaceError if the disk cannot be cleared for the next attempt."""
        item = self._item
        logger.info("job %s, attempt %d: claimed", item.id, item.epoch)
        self._keeper.start()
        try:
            outcome = self._run_guarded()
        finally:
            self._ended.set()
            self._keeper.close()
            self._output.finish()  # The supervisor does so at the end of a trainer, and no trainer may have started.
        if item.world is not None and self._lost is not None:
            self._send_last_decisions()
        self._workspace.clear_state()
        logger.info("job %s, attempt %d: %s", item.id, item.epoch, outcome)
        self._workspace.purge(
            finished=item.checkpoint_job if outcome in (AttemptOutcome.COMPLETE, AttemptOutcome.CANCELED) else None
        )
        return outcome

    def _run_guarded(self) -> AttemptOutcome:
        """Run the attempt and report every error as a failure, so that no error kills the agent.

        An error that killed the agent would also kill the next agent that claims the job, and no budget would count the
        error.
        """
        try:
            return self._attempt()
        except LeaseLost as error:
            self._on_lease_lost(LeaseLoss(error.code, error.message))
            return self._loss_outcome()
        except TransferCanceled:
            return self._loss_outcome() if self._ended.is_set() else self._release()
        except Exception as error:
            if isinstance(error, Unauthorized) and is_key_refused(error):
                self._on_lease_lost(LeaseLoss(error.code, error.message))
                return self._loss_outcome()
            if not is_expected(error):
                logger.exception("job %s: error in the agent while %s", self._item.id, self._phase)
            return self._fail(classify_error(error))

    # Callbacks of the heartbeat thread

    def _status(self) -> HeartbeatRequest:
        progress = self._progress()
        self._on_progress()
        metrics = self._output.signals.merge_with(progress.metrics if progress else {})
        return HeartbeatRequest(
            **self._settings.identity().model_dump(),
            phase=self._phase,
            step=progress.step if progress else self._scheduler.reported_step(needed=metrics is not None),
            total_steps=progress.total if progress else self._scheduler.total,
            metrics=metrics,
            goodput=self._scheduler.goodput(),
            control=self._control.report(progress),
        )

    def _on_answer(self, request: HeartbeatRequest, answer: HeartbeatAnswer) -> None:
        self._on_renewed(answer.lease_duration_s)
        if request.control is not None:
            self._control.acknowledge(request.control, answer)
            self._output.signals.set_rules(answer.rules)
        self._output.signals.acknowledge(request.metrics)

    def _on_directive(self, directive: Directive, reason: str) -> None:
        if directive is Directive.PAUSE:
            self._pause_reason = reason or "paused"
        elif directive is Directive.CHECKPOINT and self._steps and not self._checkpoint_asked:
            # The request reaches no process before the trainer has connected, therefore the next heartbeat repeats
            # the directive.
            self._checkpoint_asked = self._steps.request_checkpoint()

    def _on_lease_lost(self, lost: LeaseLoss) -> None:
        if self._lost is None:
            self._lost = lost
            logger.warning("job %s: %s (%s)", self._item.id, lost.message, lost.code)
        self._ended.set()

    def _stop_reason(self) -> StopReason | None:
        """Return the reason to hand the job back; None to go on."""
        if self._stop.is_set():
            return "release"
        return "pause" if self._pause_reason else None

    def _interrupted(self) -> bool:
        return self._ended.is_set() or self._stop_reason() is not None

    def _out_of_time(self) -> bool:
        return self._stop.out_of_time(float(self._item.stop_grace_s))

    def _progress(self) -> TrainingProgress | None:
        return self._steps.progress() if self._steps else None

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._scheduler.enter(_ACTIVITIES.get(phase, Activity.TRANSFERRING))
        item = self._item
        try:
            self._workspace.write_state(item.id, item.epoch, phase, self._started_at, lease_token=item.lease_token)
        except (WorkspaceError, OSError) as error:
            # Without the state file, a crash only delays the job until its lease expires.
            logger.warning("job %s: %s", item.id, error)
        logger.info("job %s: %s", item.id, phase)

    # The phases

    def _attempt(self) -> AttemptOutcome:
        item = self._item
        # The restore comes first, because the fetch of many inputs may outlast the checkpoint's presigned URLs in the
        # claim.
        self._enter("restoring")
        directories = self._workspace.prepare(item.id, item.epoch)
        directories.write_params(item.parameters)
        store = LocalChunkCache(self._workspace.stores, item.checkpoint_job)
        leave = PolledEvent(self._interrupted)
        calls = LeasedCalls(self._client, self._keeper, given_up=self._interrupted)
        ledger = StepLedger(get_plan(item).steps, directories)
        resume_from = ledger.resume(restore(calls, self._transfer, item, directories.output, store=store, cancel=leave))
        self._enter("fetching")
        fetch_inputs(
            calls, self._transfer, item, directories.data, require_free=self._workspace.require_free, cancel=leave
        )
        if self._interrupted():
            raise TransferCanceled("the attempt was interrupted before the training")
        with ExitStack() as opened:
            return self._train(opened, directories, store, ledger, resume_from)

    def _train(
        self,
        opened: ExitStack,
        directories: JobDirectories,
        store: LocalChunkCache,
        ledger: StepLedger,
        resume_from: Path | None,
    ) -> AttemptOutcome:
        """Run the steps, then conclude the attempt. `opened` ends each thread that starts here, also after an error."""
        item = self._item
        self._enter("training")
        relay = self._open_world()
        if relay is not None:
            opened.callback(relay.close)
        logs = self._client.within(LOG_BUDGET_S)
        ship = partial(logs.send_logs, item.id, item.lease_token)
        self._shipper = LogShipper(self._output.spool, ship, points=self._output.points)
        opened.callback(self._shipper.close)
        collector = CheckpointCollector(
            directories,
            item,
            self._settings.stable_s,
            store,
            on_committed=self._scheduler.record_commit,
            on_total=self._scheduler.set_total,
            ledger=ledger,
            log_line=self._output.spool.append,
        )
        committer = Committer(
            lambda staged, cancel: collector.commit(self._client, self._transfer, staged, cancel),
            self._keeper.prove,
            on_lost=lambda error: self._on_lease_lost(LeaseLoss(error.code, error.message)),
            over=self._ended,
            on_skipped=self._scheduler.record_skip,
        )
        opened.callback(committer.close)
        context = StepContext(
            start=start_trainer,
            scheduler=self._scheduler,
            stop=self._stop,
            lease_lost=self._ended,
            canceled=lambda: self._loss_outcome() is AttemptOutcome.CANCELED,
            stop_reason=self._stop_reason,
            control=self._control,
            api_url=self._settings.api_url,
            world=self._describe_world(relay),
            has_joined=lambda: relay is None or relay.has_joined,
        )
        artifacts = ArtifactShipper(
            directories.output,
            lambda files, cancel: upload_artifacts(logs, self._transfer, item, files, cancel=cancel),
            self._keeper.prove,
            over=self._ended,
        )
        opened.callback(artifacts.close)
        self._steps = StepRunner(
            item,
            directories,
            ledger,
            collector=collector,
            committer=committer,
            store=store,
            output=self._output,
            context=context,
            offer_artifact=artifacts.offer,
        )
        end = self._steps.run(resume_from)
        if end.done:
            artifacts.close()  # The outputs include every artifact that was not sent.
        self._tail = self._steps.output.last_lines()
        self._steps.clean_up()
        return self._conclude(end, committer, artifacts, directories)

    def _open_world(self) -> WorldRelay | None:
        """Open the relay of a node of an elastic training; None for a job of one machine."""
        item = self._item
        if item.world is None:
            return None
        return WorldRelay(self._client.within(WORLD_BUDGET_S), item.id, item.lease_token)

    def _describe_world(self, relay: WorldRelay | None) -> str:
        item, settings = self._item, self._settings
        if item.world is None or relay is None:
            return ""
        return describe_world(
            item.world,
            item.epoch,
            relay,
            port=settings.elastic_port,
            addresses=settings.elastic_addresses,
            api_url=settings.api_url,
            environ=os.environ,
        )

    # The end

    def _conclude(
        self, end: StepsResult, committer: Committer, artifacts: ArtifactShipper, directories: JobDirectories
    ) -> AttemptOutcome:
        if self._ended.is_set():
            return self._loss_outcome()
        if end.done:
            plan = get_plan(self._item)
            failure = check_outputs(directories.output, plan.outputs, plan.optional_outputs)
            if failure is None:
                self._enter("uploading")
                return self._complete(committer, directories)
            end = end._replace(failure=failure)
        self._enter("committing")
        self._drain(committer)
        # The next attempt may continue from parts of a shared file that this attempt has just shown.
        until = time.monotonic() + ARTIFACT_PATIENCE_S
        artifacts.drain(lambda: self._out_of_time() or time.monotonic() > until)
        if end.failure is not None:
            return self._fail(end.failure, end.status)
        rule_exit = self._control.rule_exit
        if rule_exit is None or rule_exit.kind == "stop":
            return self._release()
        return self._hand_back(rule_exit)

    def _drain(self, committer: Committer) -> None:
        """Wait for the commit of the last checkpoint, within the time that is left."""
        until = time.monotonic() + PATIENCE_S
        committer.drain(lambda: self._out_of_time() or time.monotonic() > until)

    def _complete(self, committer: Committer, directories: JobDirectories) -> AttemptOutcome:
        """Upload the outputs, then report."""
        try:
            files = collect_declared_outputs(self._item, directories, on_left_out=self._warn)
        except BatonError:
            self._drain(committer)
            raise
        cancel = PolledEvent(lambda: self._ended.is_set() or self._out_of_time())

        def deliver() -> None:
            artifacts = self._calls.call_with_retry(
                "artifacts",
                lambda _client: upload_artifacts(self._calls, self._transfer, self._item, files, cancel=cancel),
            )
            # A rerun or a branch of the job begins at the last checkpoint, therefore the commit precedes the report,
            # which ends the lease.
            self._drain(committer)
            self._reporter.complete(artifacts, self._progress(), self._scheduler.goodput())

        failure = deliver_until_stored(self._item, deliver, self._ended.wait)
        return AttemptOutcome.COMPLETE if failure is None else self._fail(failure)

    def _warn(self, text: str) -> None:
        """Warn in the agent's log and in the job's log."""
        logger.warning("job %s: %s", self._item.id, text)
        self._output.spool.append(f"[baton] {text}")

    def _fail(self, failure: AttemptFailure, status: ExitStatus | None = None) -> AttemptOutcome:
        self.failure = failure
        logger.warning("job %s failed: %s: %s", self._item.id, failure.failure_class, failure.reason)
        tail = self._tail or (self._steps.output.last_lines() if self._steps else [])
        return self._deliver_report(
            lambda: self._reporter.fail(failure, status, tail, self._scheduler.goodput()), AttemptOutcome.FAILED
        )

    def _release(self) -> AttemptOutcome:
        pause = self._stop_reason() == "pause"
        reason, message = ("pause", self._pause_reason) if pause else ("sigterm", self._stop.reason)
        skipped = self._steps.last_checkpoint_skipped if self._steps else ""
        if skipped:
            message = f"{message}; no last checkpoint: {skipped}"
        return self._deliver_report(
            lambda: self._reporter.release(reason, message, self._scheduler.goodput()), AttemptOutcome.RELEASED
        )

    def _hand_back(self, rule_exit: RuleExit) -> AttemptOutcome:
        """Release the job for a rule: to another machine, to a later time, or to an earlier checkpoint."""
        try:
            return self._deliver_report(
                lambda: self._reporter.leave_by_rule(rule_exit, self._scheduler.goodput()), AttemptOutcome.RELEASED
            )
        except RollbackRefused as error:
            return self._fail(AttemptFailure(FailureClass.STOPPED_BY_RULE, f"{rule_exit.reason}; {error.message}"))

    def _loss_outcome(self) -> AttemptOutcome:
        return AttemptOutcome.CANCELED if self._lost and self._lost.canceled else AttemptOutcome.LOST

    def _deliver_report(self, report: Callable[[], None], outcome: AttemptOutcome) -> AttemptOutcome:
        try:
            report()
        except LeaseLost as error:
            self._on_lease_lost(LeaseLoss(error.code, error.message))
            return self._loss_outcome()
        except RollbackRefused:
            raise
        except BatonError as error:
            # The control plane refused the report: the lease expires, and the job goes to another worker.
            logger.error("job %s: the control plane did not accept the attempt's report: %s", self._item.id, error)
            return self._loss_outcome()
        return outcome

    def _send_last_decisions(self) -> None:
        """Report the decisions that no heartbeat has carried: another node may have ended the job before this node."""
        # No later call repeats this one, therefore the call has more time than a heartbeat.
        client = self._client.within(HURRIED_BUDGET_S if self._stop.is_set() else CALL_BUDGET_S)
        while (report := self._control.report()).decisions:
            request = HeartbeatRequest(**self._settings.identity().model_dump(), control=report)
            try:
                client.heartbeat(self._item.id, self._item.lease_token, request)
            except (LeaseLost, LeaseExpired) as error:
                # The control plane keeps the decisions of a job that has ended, and needs no others.
                logger.debug("job %s: %s", self._item.id, error)
            except BatonError as error:
                lost = len(report.decisions)
                logger.warning("job %s: %d decisions of rules are lost: %s", self._item.id, lost, error)
                return
            self._control.acknowledge(report, None)

    def _flush_before_report(self) -> None:
        """Send the decisions that fit into no report, and the last log lines."""
        while (self._control.has_backlog or self._output.signals.has_unreported) and self._keeper.beat():
            pass
        if self._shipper is not None and self._stop.level is not ShutdownLevel.NOW:
            self._shipper.flush()
