"""Test the order of the test files, and their distribution from both ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.kits.runner.order import FIRST, TESTS, BothEnds, rank


class Worker:
    """The part of a worker of pytest-xdist that a scheduler sees."""

    shutting_down = False

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.sent: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduler(workers: list[Any], tests: list[str]) -> BothEnds:
    option = SimpleNamespace(loadscopereorder=False, maxprocesses=None)
    config: Any = SimpleNamespace(option=option, getvalue=lambda _name: [f"{len(workers)}*popen"])
    made = BothEnds(config)
    for worker in workers:
        made.add_node(worker)
        made.add_node_collection(worker, tests)
    made.schedule()
    return made


def test_the_last_worker_begins_at_the_end_and_each_test_runs_once() -> None:
    workers, tests = [Worker("gw0"), Worker("gw1"), Worker("gw2")], [f"test_{number}.py::test" for number in range(12)]
    made: Any = scheduler(workers, tests)
    assert [worker.sent[0] for worker in workers] == [0, 1, 11]
    done = 0
    while not made.tests_finished or made.has_pending:
        for worker in workers:
            if len(worker.sent) > (
                count := sum(made.assigned_work[worker][f"test_{n}.py"][tests[n]] for n in worker.sent)
            ):
                made.mark_test_complete(worker, worker.sent[count])
                done += 1
    assert sorted(workers[0].sent + workers[1].sent + workers[2].sent) == list(range(12)) and done == 12
    assert workers[2].sent == sorted(workers[2].sent, reverse=True)


def test_folders_that_wait_come_first_and_all_of_them_exist() -> None:
    assert all((TESTS / folder).is_dir() for folder in FIRST)
    names = ["unit/test_a.py", "functional/api/test_b.py", "conformance/test_c.py", "e2e/training/test_d.py"]
    assert sorted(names, key=lambda name: rank(TESTS / name)) == list(reversed(names))
