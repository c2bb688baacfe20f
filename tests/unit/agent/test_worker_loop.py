"""Test the agent between jobs: claims, backoff, end, and the state after a crash."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.contract.jobs.job import FailureClass
from baton.contract.worker.calls import ReleaseRequest, WorkItem, WorkQuery
from gpu_client.agent.app import worker_loop
from gpu_client.agent.app.machine_heartbeats import MachineHeartbeats
from gpu_client.agent.app.settings import AgentSettings
from gpu_client.agent.app.shutdown import ShutdownRequest
from gpu_client.agent.app.worker_loop import EXIT_DONE, EXIT_KEY_REFUSED, FAULT_PAUSE_MAX_S, WorkerLoop
from gpu_client.agent.attempt.attempt_reporter import AttemptOutcome
from gpu_client.agent.process.failures import AttemptFailure
from gpu_client.agent.workspace.slots import Workspace, WorkspaceError
from gpu_client.transport.errors import UnexpectedAnswer, Unreachable
from gpu_client.transport.limits.stats import CallStats, TransferStats
from tests.kits.clock import Clock
from tests.unit.agent.agent_kit import JOB_ID, make_item, orders, refusal


class Stop(ShutdownRequest):
    """Stop request whose waits move the clock instead of sleeping."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock_of_test = clock
        self.pauses: list[float] = []
        self.end_after = 1000

    def wait(self, timeout_s: float | None = None) -> bool:
        assert timeout_s is not None
        self.pauses.append(timeout_s)
        self.clock_of_test.now += timeout_s
        if len(self.pauses) >= self.end_after:
            self.request("the test is over")
        return self.is_set()


class Client:
    """Answers claims with the next answer, then with no job forever."""

    def __init__(self, *answers: WorkItem | Exception | None) -> None:
        self.answers = list(answers)
        self.queries: list[WorkQuery] = []
        self.released: list[tuple[str, ReleaseRequest]] = []
        self.release_error: Exception | None = None
        self.stats = CallStats()

    def within(self, budget_s: float) -> Client:
        assert budget_s > 0
        return self

    def claim(self, query: WorkQuery) -> WorkItem | None:
        self.queries.append(query)
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def release(self, token: str, request: ReleaseRequest) -> None:
        if self.release_error:
            raise self.release_error
        self.released.append((token, request))


class Transfer:
    stats = TransferStats()


class Desk:
    """Agent in a scripted world."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tmp_path = tmp_path
        self.clock = Clock()
        self.stop = Stop(self.clock)
        self.client = Client()
        self.runs: list[tuple[WorkItem, float]] = []
        self.failures: list[FailureClass | None] = []
        desk = self

        class Run:
            def __init__(self, item: WorkItem, *, claimed_at: float, **_: object) -> None:
                desk.runs.append((item, claimed_at))

            failure: AttemptFailure | None = None

            def run(self) -> AttemptOutcome:
                desk.clock.now += 500
                kind = desk.failures.pop(0) if desk.failures else None
                if kind is None:
                    return AttemptOutcome.COMPLETE
                self.failure = AttemptFailure(kind, "why")
                return AttemptOutcome.FAILED

        monkeypatch.setattr(worker_loop, "JobRun", Run)

    def agent(
        self, *, machine: MachineHeartbeats | None = None, queues: list[str] | None = None, **fields: Any
    ) -> WorkerLoop:
        settings = AgentSettings(
            api_url="http://control.plane",
            api_key="baton_id_secret",
            workspace=self.tmp_path,
            **{"gpus": 0, "vram_gib": 0, "worker_id": "w1", **fields},
        )
        self.workspace = Workspace.open(self.tmp_path, settings.worker_id)
        return WorkerLoop(
            settings,
            client=self.client,  # type: ignore[arg-type]
            transfer=Transfer(),  # type: ignore[arg-type]
            workspace=self.workspace,
            stop=self.stop,
            clock=self.clock,
            rng=random.Random(3),
            machine=machine,
            queues=queues,
        )


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    desk = Desk(tmp_path, monkeypatch)
    yield desk
    desk.workspace.close()


def test_pauses_without_work_grow_to_the_maximum_with_full_jitter(desk: Desk) -> None:
    agent = desk.agent(poll_min_s=1, poll_max_s=30)
    for polls, ceiling_s in enumerate([1, 2, 4, 8, 16, 30, 30, 30]):
        drawn = [agent.pause_s(polls) for _ in range(400)]
        assert min(drawn) >= 0.5
        assert max(drawn) <= ceiling_s
        assert max(drawn) > 0.9 * ceiling_s
        assert min(drawn) < 0.5 + 0.2 * ceiling_s, "full jitter: agents started together drift apart"
    assert agent.pause_s(10_000) <= 30


def test_it_backs_off_while_there_is_nothing_and_begins_anew_after_a_job(desk: Desk) -> None:
    desk.client = Client(None, None, None, None, None, make_item(), None)
    desk.stop.end_after = 6
    assert desk.agent(poll_min_s=1, poll_max_s=1000).run() == EXIT_DONE
    assert len(desk.runs) == 1
    assert len(desk.stop.pauses) == 6
    assert max(desk.stop.pauses[:5]) > 1
    assert desk.stop.pauses[5] <= 1


def test_a_machine_that_fails_one_job_after_another_asks_for_them_ever_more_slowly(desk: Desk) -> None:
    """A full disk or a broken driver failed every job of a queue within minutes, and used up all their budgets."""
    bad, jobs = FailureClass.NODE_FAULT, FailureClass.SCRIPT_ERROR
    desk.failures = [bad, jobs, bad, bad, FailureClass.DISK_FULL, FailureClass.TRANSFER_FAILED, *[bad] * 8, None, bad]
    desk.client.answers = [make_item() for _ in desk.failures]
    desk.stop.end_after = 12
    desk.agent(poll_max_s=1.0).run()
    assert [pause for pause in desk.stop.pauses if pause > 1] == [20, 40, 80, 160, 320, *[FAULT_PAUSE_MAX_S] * 6], (
        "one fault may be the job's after all; a job that succeeds proves the machine"
    )


def test_the_lease_counts_from_before_the_claim_was_sent(desk: Desk) -> None:
    desk.client = Client(make_item())

    def slow_claim(query: WorkQuery) -> WorkItem | None:
        desk.clock.now += 25
        return make_item()

    desk.client.claim = slow_claim  # type: ignore[method-assign]
    assert desk.agent(max_jobs=1).run() == EXIT_DONE
    assert desk.runs[0][1] == 1000.0


@pytest.mark.parametrize(
    "error",
    [
        Unreachable("down"),
        UnexpectedAnswer("?"),
        refusal("http_403", 403),
        refusal("not_found", 404),
        refusal("invalid_value", 422),
        OSError("disk_usage"),
    ],
    ids=str,
)
def test_trouble_with_a_claim_is_waited_for(desk: Desk, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    desk.client = Client(*[error] * 8, make_item())
    with caplog.at_level(logging.INFO):
        assert desk.agent(max_jobs=1, startup_grace_s=5, poll_max_s=8).run() == EXIT_DONE
    assert len(desk.runs) == 1
    levels = [record.levelno for record in caplog.records if "no work" in record.message]
    assert levels[0] == logging.INFO
    assert levels[-1] == logging.WARNING


@pytest.mark.parametrize("code", ["key_unknown", "key_revoked", "key_expired", "wrong_scope"])
def test_a_refused_key_ends_the_agent(desk: Desk, code: str) -> None:
    desk.client = Client(None, refusal(code, 403))
    assert desk.agent().run() == EXIT_KEY_REFUSED
    assert len(desk.client.queries) == 2


def test_it_ends_when_idle_for_long_enough_but_not_because_a_job_took_long(desk: Desk) -> None:
    desk.client = Client(None, make_item())
    assert desk.agent(exit_when_idle_s=100, poll_max_s=10).run() == EXIT_DONE
    assert len(desk.runs) == 1
    assert desk.clock.now >= 1000 + 500 + 100


def test_it_ends_after_so_many_jobs(desk: Desk) -> None:
    desk.client = Client(*[make_item()] * 5)
    agent = desk.agent(max_jobs=2)
    assert agent.run() == EXIT_DONE
    assert agent.outcomes == [AttemptOutcome.COMPLETE] * 2
    assert len(desk.client.queries) == 2


def test_asked_to_stop_it_claims_nothing(desk: Desk) -> None:
    desk.stop.request("SIGTERM")
    assert desk.agent().run() == EXIT_DONE
    assert desk.client.queries == []


def test_it_asks_the_queues_in_their_order_for_each_job(desk: Desk) -> None:
    desk.client = Client(None, make_item(), make_item())
    assert desk.agent(queues=["first", "second"], max_jobs=2).run() == EXIT_DONE
    assert [query.queue for query in desk.client.queries] == ["first", "second", "first"]


def test_a_rented_machine_holds_its_job_until_the_report(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = MachineHeartbeats(
        lambda beat: orders(), desk.stop, interval_s=60, give_back=lambda: None, clock=desk.clock
    )
    held: list[str | None] = []

    def run(self: object) -> AttemptOutcome:
        held.append(machine._job_id)
        raise WorkspaceError("the disk is gone")

    monkeypatch.setattr(worker_loop.JobRun, "run", run)
    desk.client = Client(make_item())
    with pytest.raises(WorkspaceError):
        desk.agent(machine=machine).run()
    assert (held, machine._job_id) == ([JOB_ID], None)


def crashed(tmp_path: Path, worker_id: str = "w1", token: str = "a-token") -> None:
    with Workspace.open(tmp_path, worker_id) as workspace:
        workspace.write_state(JOB_ID, 4, "training", 1_790_000_000, lease_token=token)


def test_the_job_of_a_crashed_agent_is_handed_back_before_anything_else(desk: Desk) -> None:
    crashed(desk.tmp_path)
    desk.client = Client(make_item())
    assert desk.agent(max_jobs=1, machine_id="m-1").run() == EXIT_DONE
    ((token, request),) = desk.client.released
    assert (token, request.job_id, request.reason, request.machine_id) == ("a-token", JOB_ID, "agent_crashed", "m-1")
    assert desk.workspace.take_previous_state() is None


def test_another_agent_s_job_is_left_to_it(desk: Desk) -> None:
    crashed(desk.tmp_path, worker_id="somebody-else")
    assert desk.agent(exit_when_idle_s=0).run() == EXIT_DONE
    assert desk.client.released == []


@pytest.mark.parametrize(
    "error", [Unreachable("down"), refusal("lease_expired"), refusal("job_finished"), UnexpectedAnswer("?")], ids=str
)
def test_a_job_that_cannot_be_handed_back_does_not_keep_the_agent_from_working(desk: Desk, error: Exception) -> None:
    crashed(desk.tmp_path)
    desk.client = Client(make_item())
    desk.client.release_error = error
    assert desk.agent(max_jobs=1).run() == EXIT_DONE
    assert len(desk.runs) == 1


def test_stats_are_written_whole_from_two_threads_at_once(desk: Desk) -> None:
    path = desk.tmp_path / "stats.json"
    agent = desk.agent(stats_file=path)
    errors: list[Exception] = []

    def write() -> None:
        try:
            for _ in range(100):
                agent._write_stats()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert set(json.loads(path.read_text())) == {"calls", "transfer"}


def test_stats_that_cannot_be_written_cost_nothing_else(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    agent = desk.agent(stats_file=desk.tmp_path / "no" / "such" / "directory.json")
    agent._write_stats()
    assert "BATON_STATS_FILE" in caplog.text


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        ({}, "0 GPUs"),
        ({"gpus": 1, "vram_gib": 24}, "1 GPU with 24 GiB"),
        ({"gpus": 2, "vram_gib": 80}, "2 GPUs with 80 GiB each"),
    ],
)
def test_it_says_once_what_it_asks_for(
    desk: Desk, gpu: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    desk.stop.end_after = 5
    assert desk.agent(disk_gib=7.5, **gpu).run() == EXIT_DONE
    assert len(desk.client.queries) == 5
    assert [record.getMessage() for record in caplog.records if "asks" in record.getMessage()] == [
        f"worker w1 asks http://control.plane for jobs of queue default: {said}, 7.5 GiB of disk"
    ]
