"""Test the record of finished steps, and its reader in the next attempt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.contract.recipes.plan import StepOrder
from gpu_client.agent.io.step_ledger import RECORD, StepLedger
from gpu_client.agent.workspace.slots import JobDirectories
from gpu_client.checkpoints.local.directory_files import BadDirectory
from gpu_client.checkpoints.restore.checkpoint_restore import Restored, RestoreFailed

ORDERS = [StepOrder(name=name, command=[name]) for name in ("first", "second", "third")]


def directories(root: Path) -> JobDirectories:
    made = JobDirectories(root, root / "data", root / "output", root / "staging", root / "params.json")
    for place in (made.data, made.output, made.staging):
        place.mkdir(parents=True)
    return made


@pytest.fixture
def here(tmp_path: Path) -> JobDirectories:
    return directories(tmp_path / "here")


def restored(place: JobDirectories, step: int, files: dict[str, str]) -> Restored:
    path = place.output / f"checkpoint-{step}"
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return Restored(step, 1, path, 0)


def files_in(directory: Path) -> dict[str, str]:
    return {p.relative_to(directory).as_posix(): p.read_text() for p in sorted(directory.rglob("*")) if p.is_file()}


def as_restored(place: JobDirectories, directory: Path, step: int) -> Restored:
    """Return a committed checkpoint as another machine restores it."""
    return restored(place, step, files_in(directory))


def test_a_fresh_job_has_all_steps_left(here: JobDirectories) -> None:
    ledger = StepLedger(ORDERS, here)
    assert ledger.resume(None) is None
    assert [order.name for order in ledger.remaining_steps()] == ["first", "second", "third"]
    assert (ledger.base, ledger.finished) == (0, [])
    assert ledger.describe(ORDERS[1]) == "step second (2 of 3)"


def test_a_finished_step_and_what_it_left_are_found_by_the_next_machine(here: JobDirectories, tmp_path: Path) -> None:
    for name in ("a.txt", "deep/b.txt", "checkpoint-5/weights", ".cache/x"):
        (here.output / name).parent.mkdir(parents=True, exist_ok=True)
        (here.output / name).write_text(name)
    ledger = StepLedger(ORDERS, here)
    step, directory = ledger.finish(ORDERS[0], 5)
    assert (step, ledger.base, ledger.finished) == (6, 7, ["first"])
    assert not (here.output / "checkpoint-5").exists(), "the next step finds none of another"
    assert set(files_in(directory)) == {".baton/steps.json", ".baton/kept/a.txt", ".baton/kept/deep/b.txt"}

    there = directories(tmp_path / "there")
    next_one = StepLedger(ORDERS, there)
    assert next_one.resume(as_restored(there, directory, step)) is None, "the second step begins"
    assert [order.name for order in next_one.remaining_steps()] == ["second", "third"]
    assert (next_one.base, files_in(there.output)) == (7, {"a.txt": "a.txt", "deep/b.txt": "deep/b.txt"})


def test_a_later_checkpoint_says_it_again_and_the_script_sees_its_own_numbers(
    here: JobDirectories, tmp_path: Path
) -> None:
    (here.output / "a.txt").write_text("of the first")
    ledger = StepLedger(ORDERS, here)
    ledger.finish(ORDERS[0], 5)
    (here.output / "a.txt").write_text("changed by the second")
    own = here.staging / "checkpoint-10-x"
    own.mkdir()
    (own / "weights").write_text("w")
    assert ledger.attach_record(own) is True

    there = directories(tmp_path / "there")
    next_one = StepLedger(ORDERS, there)
    path = next_one.resume(as_restored(there, own, 17))
    assert path == there.output / "checkpoint-10"
    assert files_in(there.output) == {"checkpoint-10/weights": "w", "a.txt": "of the first"}, "as the step began"
    again = there.staging / "again"
    again.mkdir()
    next_one.attach_record(again)
    assert files_in(again) == {k: v for k, v in files_in(own).items() if k.startswith(".baton")}


def test_what_the_script_calls_the_record_is_replaced(here: JobDirectories) -> None:
    ledger = StepLedger(ORDERS, here)
    ledger.finish(ORDERS[0], 0)
    for number, make in enumerate((lambda p: p.write_text("x"), lambda p: p.symlink_to("/etc"), lambda p: p.mkdir())):
        taken = here.staging / str(number)
        taken.mkdir()
        make(taken / RECORD)
        ledger.attach_record(taken)
        assert json.loads((taken / RECORD / "steps.json").read_text())["finished"] == ["first"]
    assert Path("/etc").is_dir()


def test_before_a_step_is_finished_nothing_is_added(here: JobDirectories) -> None:
    taken = here.staging / "one"
    taken.mkdir()
    assert StepLedger(ORDERS, here).attach_record(taken) is False
    assert list(taken.iterdir()) == []


def test_a_bare_command_is_not_looked_into(here: JobDirectories) -> None:
    found = restored(here, 4, {".baton/steps.json": "its own business"})
    ledger = StepLedger(ORDERS[:1], here)
    assert ledger.resume(found) == found.path
    assert (found.path / ".baton/steps.json").exists() and ledger.base == 0


def test_only_what_a_step_keeps_is_kept_with_what_was_kept_before(here: JobDirectories) -> None:
    orders = [ORDERS[0].model_copy(update={"keeps": ["x", "y.txt"]}), ORDERS[1].model_copy(update={"keeps": ["z"]})]
    ledger = StepLedger([*orders, ORDERS[2]], here)
    for name in ("x/1", "x/2", "y.txt", "y.txt2", "z"):
        (here.output / name).parent.mkdir(exist_ok=True)
        (here.output / name).write_text(name)
    _, directory = ledger.finish(orders[0], 0)
    assert {path.name for path in (directory / RECORD / "kept").rglob("*") if path.is_file()} == {"1", "2", "y.txt"}
    _, directory = ledger.finish(orders[1], ledger.base)
    assert {path.name for path in (directory / RECORD / "kept").rglob("*") if path.is_file()} == {
        "1",
        "2",
        "y.txt",
        "z",
    }


def test_numbers_rise_through_all_steps(here: JobDirectories) -> None:
    ledger = StepLedger(ORDERS, here)
    first, _ = ledger.finish(ORDERS[0], 0)
    second, _ = ledger.finish(ORDERS[1], ledger.base + 100)
    assert (first, second, ledger.base) == (1, 103, 104)
    assert [order.name for order in ledger.remaining_steps()] == ["third"]


def test_a_link_out_of_the_output_directory_is_not_followed(here: JobDirectories, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    (here.output / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(BadDirectory, match="outside"):
        StepLedger(ORDERS, here).finish(ORDERS[0], 0)


@pytest.mark.parametrize(
    "record",
    [
        "{",
        "[]",
        '{"format": 1}',
        '{"format": 2, "finished": ["first"], "base": 1}',
        '{"format": 1, "finished": ["second"], "base": 1}',
        '{"format": 1, "finished": ["first", "second", "third"], "base": 1}',
        '{"format": 1, "finished": ["first"], "base": 99}',
        '{"format": 1, "finished": ["first"], "base": -1}',
        '{"format": 1, "finished": 5, "base": 1}',
    ],
)
def test_a_record_that_does_not_fit_starts_nothing(here: JobDirectories, record: str) -> None:
    with pytest.raises(RestoreFailed):
        StepLedger(ORDERS, here).resume(restored(here, 7, {".baton/steps.json": record, "w": "w"}))
