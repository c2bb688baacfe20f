"""Claim a job, run it, repeat."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from baton.contract.worker.calls import AGENT_CRASHED, ReleaseRequest, WorkItem, WorkQuery
from gpu_client.agent.app.machine_heartbeats import MachineHeartbeats
from gpu_client.agent.app.settings import AgentSettings
from gpu_client.agent.app.shutdown import ShutdownRequest
from gpu_client.agent.attempt.attempt_reporter import AttemptOutcome
from gpu_client.agent.attempt.job_run import JobRun
from gpu_client.agent.attempt.lease import is_key_refused
from gpu_client.agent.health import LivenessFile
from gpu_client.agent.retry_pauses import backoff_s
from gpu_client.agent.workspace.slots import Workspace
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import BatonError, Unauthorized
from gpu_client.transport.transfer.manager import Transfer

logger = logging.getLogger("baton.agent")

EXIT_DONE = 0
EXIT_KEY_REFUSED = 2
FAULT_PAUSE_S = 10.0
FAULT_PAUSE_MAX_S = 600.0
"""Bounds of the pause before a claim, after this machine has failed several jobs in a row."""

CLEARING_S = 600.0
"""Seconds without a heartbeat at the end of a job, while the agent clears the workspace."""

CLAIM_BUDGET_S = 30.0
"""Seconds for one claim with its retries; between two claims the agent checks for a stop request."""


class WorkerLoop:
    """Loop that claims and runs jobs until a stop request, `max_jobs` or `exit_when_idle_s` ends the loop.

    `machine`: receives the jobs that a rented machine holds. `queues`: in the order of their claims; None for the queue
    of the settings.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        client: BatonClient,
        transfer: Transfer,
        workspace: Workspace,
        stop: ShutdownRequest,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        liveness: LivenessFile | None = None,
        machine: MachineHeartbeats | None = None,
        queues: Sequence[str] | None = None,
    ) -> None:
        self._machine = machine
        self._queues = queues or [settings.queue]
        self._settings = settings
        self._client = client
        self._transfer = transfer
        self._workspace = workspace
        self._stop = stop
        self._clock = clock
        self._claims = client.within(CLAIM_BUDGET_S)
        self._writing_stats = threading.Lock()
        self._liveness = liveness or LivenessFile(None)
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._introduced = False
        self.outcomes: list[AttemptOutcome] = []

    def run(self) -> int:
        """Run the loop. Returns the exit code."""
        self._liveness.beat(CLAIM_BUDGET_S)
        self._recover()
        empty_polls = faults = 0
        idle_since = self._clock()
        while not self._stop.is_set():
            claimed_at = self._clock()
            self._liveness.beat(CLAIM_BUDGET_S + self._settings.poll_max_s)
            try:
                item = self._claim(idle_since)
            except Unauthorized as error:
                logger.error("the API key is refused: %s", error)
                return EXIT_KEY_REFUSED
            if item is None:
                if self._idle_for_too_long(idle_since):
                    return EXIT_DONE
                self._stop.wait(self.pause_s(empty_polls))
                empty_polls += 1
                continue
            run = JobRun(
                item,
                client=self._client,
                transfer=self._transfer,
                settings=self._settings,
                workspace=self._workspace,
                stop=self._stop,
                claimed_at=claimed_at,
                on_progress=self._write_stats,
                on_alive=lambda within_s: self._liveness.beat(max(within_s, CLEARING_S)),
                on_renewed=self._machine.renew if self._machine else lambda lease_s: None,
            )
            with self._machine.holding(item.id, item.lease_duration_s) if self._machine else nullcontext():
                self.outcomes.append(run.run())
            self._write_stats()
            if self._settings.max_jobs is not None and len(self.outcomes) >= self._settings.max_jobs:
                return EXIT_DONE
            faults = faults + 1 if run.failure and run.failure.failure_class.node_fault else 0
            if faults > 1:
                # A single failure may be the job's fault. A full disk or a broken driver would fail every job of the
                # queue in turn, therefore the agent pauses after the second failure.
                pause_s = backoff_s(FAULT_PAUSE_S, faults - 1, FAULT_PAUSE_MAX_S)
                logger.warning("this machine failed %d jobs in a row: no claim for %.0f s", faults, pause_s)
                self._liveness.beat(pause_s)
                self._stop.wait(pause_s)
            empty_polls = 0
            idle_since = self._clock()
        return EXIT_DONE

    def _claim(self, idle_since: float) -> WorkItem | None:
        """Claim a job. Returns None without a job or an answer. Raises Unauthorized if the key is refused."""
        try:
            for queue in self._queues:
                query = self._settings.work_query(queue)
                if not self._introduced:
                    self._introduced = True
                    self._log_introduction(query)
                item = self._claims.claim(query)
                if item is not None:
                    return item
            return None
        except (BatonError, OSError) as error:
            if isinstance(error, Unauthorized) and is_key_refused(error):
                raise
            self._log_claim_failure(error, idle_since)
            return None

    def _log_introduction(self, query: WorkQuery) -> None:
        """Log the query once, because the log stays empty while no job fits."""
        gpus = query.gpus or 0
        memory = f" with {query.vram_gib:g} GiB{' each' if gpus > 1 else ''}" if query.vram_gib else ""
        logger.info(
            "worker %s asks %s for jobs of queue %s: %d GPU%s%s, %g GiB of disk",
            query.worker_id,
            self._settings.api_url,
            ", ".join(self._queues),
            gpus,
            "" if gpus == 1 else "s",
            memory,
            query.disk_gib or 0,
        )

    def pause_s(self, empty_polls: int) -> float:
        """Return the seconds to wait after `empty_polls` claims without a job: exponential, with full jitter."""
        ceiling_s = backoff_s(self._settings.poll_min_s, empty_polls, self._settings.poll_max_s)
        return self._rng.uniform(self._settings.poll_min_s / 2, ceiling_s)

    def _idle_for_too_long(self, idle_since: float) -> bool:
        limit_s = self._settings.exit_when_idle_s
        if limit_s is None or self._clock() - idle_since < limit_s:
            return False
        logger.info("no work for %g s: leaving", limit_s)
        return True

    def _log_claim_failure(self, error: Exception, idle_since: float) -> None:
        patient = self._clock() - idle_since < self._settings.startup_grace_s
        logger.log(logging.INFO if patient else logging.WARNING, "no work from the control plane: %s", error)

    def _recover(self) -> None:
        """Release the job of a crashed agent with this worker id; the guardian has killed the job's trainer."""
        previous = self._workspace.take_previous_state()
        if previous is None:
            return
        logger.warning(
            "job %s, attempt %d was interrupted while %s: this agent had crashed",
            previous.job_id,
            previous.epoch,
            previous.phase,
        )
        if not previous.lease_token or previous.agent_id != self._settings.worker_id:
            return
        request = ReleaseRequest(**self._settings.identity().model_dump(), job_id=previous.job_id, reason=AGENT_CRASHED)
        try:
            self._claims.release(previous.lease_token, request)
        except BatonError as error:
            logger.info("the job of the crashed agent could not be released: %s", error)

    def _write_stats(self) -> None:
        """Write the counts of calls and bytes to `BATON_STATS_FILE`, with each heartbeat."""
        path = self._settings.stats_file
        if path is None:
            return
        stats = {"calls": self._client.stats.as_dict(), "transfer": self._transfer.stats.as_dict()}
        temporary = Path(f"{path}.tmp")
        with self._writing_stats:
            try:
                temporary.write_text(json.dumps(stats), encoding="utf-8")
                temporary.replace(path)
            except OSError as error:
                logger.warning("BATON_STATS_FILE=%s cannot be written: %s", path, error)
