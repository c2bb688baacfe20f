"""One attempt at one job: fetch, restore, train, commit, report.

Whoever ends it early (a lost lease, a cancel, a pause, a SIGTERM) only leaves a note; this thread acts on it, in every
phase. Nothing is reported as done before it is stored, and the heartbeats go on until the report is accepted.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import TypeVar

from contract.jobs import FailureClass
from contract.work import (
    CompleteRequest,
    DeclaredArtifact,
    Directive,
    FailRequest,
    HeartbeatRequest,
    ReleaseRequest,
    WorkItem,
)
from gpu_client.agent.channel_server import ChannelServer, StopReason
from gpu_client.agent.committer import Committer, Staged
from gpu_client.agent.failures import ExitStatus, Failure, classify
from gpu_client.agent.inputs import fetch_inputs
from gpu_client.agent.lease import LeaseKeeper, Lost
from gpu_client.agent.log_shipper import LogShipper
from gpu_client.agent.settings import AgentSettings
from gpu_client.agent.signals import StopLevel, StopRequest
from gpu_client.agent.supervisor import Supervisor, TrainerProcess
from gpu_client.agent.trainer_environment import expanded, trainer_environment
from gpu_client.agent.trainer_output import TrainerOutput
from gpu_client.agent.workspace import DiskFullError, JobDirectories, Workspace
from gpu_client.checkpoints.artifacts import MissingOutput, collect_outputs, upload_artifacts
from gpu_client.checkpoints.restore import RestoreFailed, restore
from gpu_client.checkpoints.upload import commit_checkpoint
from gpu_client.checkpoints.watch import CheckpointWatcher, ReadyCheckpoint, StageError, stage
from gpu_client.transport.api import BatonClient
from gpu_client.transport.errors import (
    ApiError,
    DiskFull,
    LeaseExpired,
    LeaseLost,
    NotStoredYet,
    ObjectMissing,
    TransferCanceled,
    TransferError,
    Unreachable,
    UnsafePath,
)
from gpu_client.transport.transfer import Transfer

logger = logging.getLogger("baton.job")

T = TypeVar("T")

POLL_S = 0.1
WATCH_EVERY_S = 0.5
REPORT_RETRY_S = 2.0
LOST_GRACE_S = 5.0
"""A trainer whose lease is lost works for nothing: it gets only this long to end."""
MAX_LOG_TAIL = 50


class Outcome(StrEnum):
    """How an attempt ended, as the agent sees it."""

    COMPLETE = "complete"
    FAILED = "failed"
    RELEASED = "released"
    CANCELED = "canceled"
    LOST = "lost"


class JobRun:
    """One attempt. `run` does it all and returns when nothing of it is left on the machine."""

    def __init__(
        self,
        item: WorkItem,
        *,
        client: BatonClient,
        transfer: Transfer,
        settings: AgentSettings,
        workspace: Workspace,
        stop: StopRequest,
        claimed_at: float,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._item = item
        self._client = client
        self._transfer = transfer
        self._settings = settings
        self._workspace = workspace
        self._stop = stop
        self._on_progress = on_progress
        self._phase = "claimed"
        self._started_at = int(time.time())
        self._ended = threading.Event()
        """The lease is gone: every transfer and wait ends."""
        self._leave = threading.Event()
        """Ends transfers of phases that are not worth finishing before the job is handed back."""
        self._lost: Lost | None = None
        self._pause_reason = ""
        self._checkpoint_asked = False
        self._channel: ChannelServer | None = None
        # A heartbeat that takes longer than the interval is one that did not come.
        self._heart = client.within(max(float(item.heartbeat_interval_s), 2.0))
        self._keeper = LeaseKeeper(
            item,
            lambda request: self._heart.heartbeat(item.id, item.lease_token, request),
            self._status,
            on_directive=self._directed,
            on_lost=self._lease_lost,
            claimed_at=claimed_at,
        )

    def run(self) -> Outcome:
        """Do the attempt. Raises only what nobody expected; the lease then runs out by itself."""
        item = self._item
        logger.info("job %s, attempt %d: claimed", item.id, item.epoch)
        self._keeper.start()
        try:
            outcome = self._attempt()
        except LeaseLost as error:
            self._lease_lost(Lost(error.code, error.message))
            outcome = self._lost_outcome()
        except TransferCanceled:
            outcome = self._lost_outcome() if self._ended.is_set() else self._release()
        except (DiskFull, DiskFullError) as error:
            outcome = self._fail(Failure(FailureClass.DISK_FULL, str(error)))
        except (ObjectMissing, UnsafePath) as error:
            outcome = self._fail(Failure(FailureClass.BAD_INPUT, str(error)))
        except RestoreFailed as error:
            outcome = self._fail(Failure(FailureClass.RESTORE_FAILED, str(error)))
        except MissingOutput as error:
            outcome = self._fail(Failure(FailureClass.MISSING_OUTPUT, str(error)))
        except (TransferError, Unreachable) as error:
            outcome = self._fail(Failure(FailureClass.TRANSFER_FAILED, str(error)))
        finally:
            self._ended.set()
            self._keeper.close()
        self._workspace.purge()
        self._workspace.clear_state()
        logger.info("job %s, attempt %d: %s", item.id, item.epoch, outcome)
        return outcome

    # What others leave notes about

    def _status(self) -> HeartbeatRequest:
        progress = self._channel.progress() if self._channel else None
        identity = self._settings.identity().model_dump()
        self._on_progress()
        if progress is None:
            return HeartbeatRequest(**identity, phase=self._phase)
        return HeartbeatRequest(
            **identity,
            phase=self._phase,
            step=progress.step,
            total_steps=progress.total,
            metrics=progress.metrics or None,
        )

    def _directed(self, directive: Directive, reason: str) -> None:
        if directive is Directive.PAUSE:
            self._pause_reason = reason or "paused"
        elif directive is Directive.CHECKPOINT and self._channel and not self._checkpoint_asked:
            self._checkpoint_asked = True
            self._channel.request_checkpoint()

    def _lease_lost(self, lost: Lost) -> None:
        if self._lost is None:
            self._lost = lost
            logger.warning("job %s: %s (%s)", self._item.id, lost.message, lost.code)
        self._ended.set()

    def _leaving(self) -> StopReason | None:
        """Why the job is to be handed back, if it is."""
        if self._stop.is_set():
            return "release"
        return "pause" if self._pause_reason else None

    # The phases

    def _attempt(self) -> Outcome:
        item = self._item
        self._enter("fetching")
        directories = self._workspace.prepare(item.id, item.epoch)
        directories.params.write_text(json.dumps(item.parameters), encoding="utf-8")
        with _watching(self._interrupted, self._leave):
            fetch_inputs(
                self._client,
                self._transfer,
                item,
                directories.data,
                require_free=self._workspace.require_free,
                cancel=self._leave,
            )
            self._enter("restoring")
            restored = restore(self._client, self._transfer, item, directories.output, cancel=self._leave)
        resume_from = str(restored.path) if restored else ""
        if self._ended.is_set():
            return self._lost_outcome()
        if self._leaving():
            return self._release()
        self._enter("training")
        with ChannelServer(directories.output) as channel:
            self._channel = channel
            environment = trainer_environment(item, directories, str(channel.path), resume_from)
            output = TrainerOutput(echo=lambda line: logger.debug("| %s", line))
            trainer = Supervisor().start(expanded(item.command, environment), environment, directories.root, output)
            shipper = LogShipper(output.spool, lambda chunk: self._client.send_logs(item.id, item.lease_token, chunk))
            try:
                outcome = self._supervise(trainer, channel, directories, restored_path=resume_from)
            finally:
                trainer.stop(0)
                shipper.close()
        return outcome

    def _supervise(
        self, trainer: TrainerProcess, channel: ChannelServer, directories: JobDirectories, *, restored_path: str
    ) -> Outcome:
        watcher = CheckpointWatcher(
            directories.output, time.monotonic, trainer.files_open_for_writing, self._settings.stable_s
        )
        if restored_path:
            watcher.mark_seen(directories.output / restored_path.rsplit("/", 1)[-1])
        committer = Committer(
            self._commit,
            self._keeper.prove,
            on_lost=lambda error: self._lease_lost(Lost("lease_lost", str(error))),
            stopped=self._ended,
        )
        try:
            status, silent_s = self._train(trainer, channel, watcher, committer, directories)
            for ready in watcher.final_poll(clean_exit=status.code == 0):
                self._take(ready, committer, directories)
            return self._conclude(trainer, status, silent_s, committer, directories)
        finally:
            committer.close()

    def _train(
        self,
        trainer: TrainerProcess,
        channel: ChannelServer,
        watcher: CheckpointWatcher,
        committer: Committer,
        directories: JobDirectories,
    ) -> tuple[ExitStatus, int | None]:
        """Until the trainer has ended, by itself or because we ended it. Also says for how long it was silent."""
        started_at = time.monotonic()
        watched_at = 0.0
        while True:
            channel.wait(POLL_S)
            status = trainer.poll()
            now = time.monotonic()
            notices = channel.take_checkpoints()
            if notices or now - watched_at >= WATCH_EVERY_S:
                watched_at = now
                for ready in watcher.poll():
                    self._take(ready, committer, directories)
            if status is not None:
                return status, None
            if self._ended.is_set():
                return trainer.stop(LOST_GRACE_S), None
            reason = self._leaving()
            if reason:
                return self._ask_to_leave(trainer, channel, watcher, committer, directories, reason=reason), None
            limit_s = self._item.no_progress_timeout_s
            moved_at = max(channel.advanced_at() or started_at, started_at)
            if limit_s is not None and now - moved_at > limit_s:
                logger.warning("job %s: no progress for %d s", self._item.id, limit_s)
                return trainer.stop(self._item.stop_grace_s), limit_s

    def _ask_to_leave(
        self,
        trainer: TrainerProcess,
        channel: ChannelServer,
        watcher: CheckpointWatcher,
        committer: Committer,
        directories: JobDirectories,
        *,
        reason: StopReason,
    ) -> ExitStatus:
        """Ask for a last checkpoint, then for the end; a script without our session gets a SIGTERM at once."""
        grace_s = float(self._item.stop_grace_s)
        deadline = time.monotonic() + grace_s
        if channel.request_stop(reason, checkpoint=True):
            while trainer.poll() is None and time.monotonic() < deadline - grace_s / 4:
                if self._ended.is_set() or self._stop.level is StopLevel.NOW:
                    break
                channel.wait(POLL_S)
                for ready in watcher.poll():
                    self._take(ready, committer, directories)
        hurried = self._stop.level is StopLevel.NOW
        return trainer.stop(0 if hurried else max(deadline - time.monotonic(), 0), signal.SIGTERM)

    def _take(self, ready: ReadyCheckpoint, committer: Committer, directories: JobDirectories) -> None:
        """Take a complete checkpoint over from the trainer, so that its own rotation cannot pull it away."""
        try:
            path = stage(ready, directories.staging)
        except StageError as error:
            logger.warning("job %s: %s", self._item.id, error)
            return
        except OSError as error:
            logger.warning("job %s: checkpoint of step %d cannot be staged: %s", self._item.id, ready.step, error)
            return
        committer.offer(Staged(ready.step, path, ready.metrics, ready.created_by))

    def _commit(self, staged: Staged) -> None:
        result = commit_checkpoint(
            self._client,
            self._transfer,
            self._item,
            staged.path,
            step=staged.step,
            metrics=staged.metrics,
            created_by="session" if staged.created_by == "session" else "script",
            cancel=self._ended,
        )
        logger.info("job %s: checkpoint of step %d committed (%s)", self._item.id, staged.step, result)

    # The end

    def _conclude(
        self,
        trainer: TrainerProcess,
        status: ExitStatus,
        silent_s: int | None,
        committer: Committer,
        directories: JobDirectories,
    ) -> Outcome:
        if self._ended.is_set():
            return self._lost_outcome()
        reason = self._leaving()
        if reason and not (status.clean and not status.stopped_by_us and not self._asked(status)):
            self._enter("committing")
            committer.drain(float(self._item.stop_grace_s), lambda: self._stop.level is StopLevel.NOW)
            return self._release()
        if status.clean and not status.stopped_by_us:
            self._enter("uploading")
            return self._complete(committer, directories)
        self._enter("committing")
        committer.drain(60.0, lambda: self._stop.level is StopLevel.NOW)
        failure = classify(status, trainer.output.last_lines(), silent_s)
        return self._fail(failure, status, trainer.output.last_lines(MAX_LOG_TAIL))

    def _asked(self, status: ExitStatus) -> bool:
        """True when a clean exit answers our request to leave rather than the end of the training."""
        del status
        progress = self._channel.progress() if self._channel else None
        return not (progress and progress.total is not None and progress.step >= progress.total)

    def _complete(self, committer: Committer, directories: JobDirectories) -> Outcome:
        """Upload the outputs, then report; refused as not stored yet, upload again."""
        item = self._item
        files = collect_outputs(directories.output, item.outputs)
        while True:
            artifacts: list[DeclaredArtifact] = self._persist(
                lambda: upload_artifacts(self._client, self._transfer, item, files, cancel=self._ended) if files else []
            )
            progress = self._channel.progress() if self._channel else None
            request = CompleteRequest(
                **self._settings.identity().model_dump(),
                job_id=item.id,
                artifacts=artifacts,
                step=progress.step if progress else None,
                metrics=progress.metrics or None if progress else None,
            )
            try:
                self._persist(partial(self._client.complete, item.lease_token, request))
            except NotStoredYet as error:
                logger.warning("job %s: %s", item.id, error)
                continue
            return Outcome.COMPLETE

    def _fail(self, failure: Failure, status: ExitStatus | None = None, tail: list[str] | None = None) -> Outcome:
        logger.warning("job %s failed: %s: %s", self._item.id, failure.failure_class, failure.reason)
        request = FailRequest(
            **self._settings.identity().model_dump(),
            job_id=self._item.id,
            failure_class=failure.failure_class,
            exit_code=status.code if status else None,
            signal=status.signal if status else None,
            message=failure.reason[:1024],
            log_tail=[line[:2000] for line in tail or []],
        )
        return self._report(lambda: self._client.fail(self._item.lease_token, request), Outcome.FAILED)

    def _release(self) -> Outcome:
        reason = self._leaving() or "release"
        request = ReleaseRequest(
            **self._settings.identity().model_dump(),
            job_id=self._item.id,
            reason="pause" if reason == "pause" else "sigterm",
            message=self._pause_reason or self._stop.reason,
        )
        return self._report(lambda: self._client.release(self._item.lease_token, request), Outcome.RELEASED)

    def _lost_outcome(self) -> Outcome:
        return Outcome.CANCELED if self._lost and self._lost.directive is Directive.CANCEL else Outcome.LOST

    def _report(self, call: Callable[[], object], outcome: Outcome) -> Outcome:
        try:
            self._persist(call)
        except LeaseLost as error:
            self._lease_lost(Lost(error.code, error.message))
            return self._lost_outcome()
        except TransferCanceled:
            return self._lost_outcome()
        return outcome

    def _persist(self, call: Callable[[], T]) -> T:
        """Make a call that must arrive: again and again while the control plane is away, proving the lease first.

        Raises TransferCanceled when the lease is gone, or when we have to leave at once.
        """
        while True:
            if self._ended.is_set():
                raise TransferCanceled("the lease is gone")
            try:
                if self._keeper.prove():
                    return call()
            except LeaseExpired:
                self._keeper.beat()
            except Unreachable as error:
                logger.warning("job %s: %s; trying again", self._item.id, error)
            except ApiError as error:
                if error.status < 500:
                    raise
                logger.warning("job %s: %s; trying again", self._item.id, error)
            if self._stop.level is StopLevel.NOW:
                raise TransferCanceled("leaving at once")
            self._ended.wait(REPORT_RETRY_S)

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._workspace.write_state(
            self._item.id, self._item.epoch, phase, self._started_at, lease_token=self._item.lease_token
        )
        logger.info("job %s: %s", self._item.id, phase)

    def _interrupted(self) -> bool:
        return self._ended.is_set() or self._leaving() is not None


class _watching:  # noqa: N801 - reads as a statement
    """While inside, `event` is set as soon as `condition` holds."""

    def __init__(self, condition: Callable[[], bool], event: threading.Event) -> None:
        self._condition = condition
        self._event = event
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phase-watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(POLL_S):
            if self._condition():
                self._event.set()
                return
