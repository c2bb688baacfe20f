"""Test the steps of an attempt: order, retries, timeouts, checks, and the records between them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.contract.base import MAX_STEP
from baton.contract.jobs.job import FailureClass
from baton.contract.recipes.plan import RunPlan
from gpu_client.agent.attempt import job_run
from gpu_client.agent.attempt import steps as steps_module
from gpu_client.agent.attempt.attempt_reporter import AttemptOutcome
from gpu_client.agent.io import artifact_shipper
from gpu_client.agent.io.checkpoint_collector import CheckpointCollector
from gpu_client.agent.process.failures import ExitStatus
from gpu_client.checkpoints.restore.checkpoint_restore import Restored
from gpu_client.transport.errors import Unreachable
from tests.unit.agent.job_kit import CLEAN, Stage, Trainer, checkpoint, exited

Act = Callable[[Trainer, int], object]


def plan(*steps: dict[str, Any], **more: Any) -> RunPlan:
    return RunPlan.model_validate(
        {"steps": [{"command": [step["name"]], "retry_wait_s": 0, **step} for step in steps], **more}
    )


def acts(stage: Stage, *in_turn: Act) -> None:
    """Script the trainers, one after the other."""

    def act(trainer: Trainer, looks: int) -> None:
        in_turn[stage.trainers.index(trainer)](trainer, looks)

    stage.act = act


def ends(status: ExitStatus = CLEAN, **files: str) -> Act:
    def act(trainer: Trainer, _looks: int) -> None:
        for name, text in files.items():
            (trainer.directory / name).write_text(text)
        trainer.ends(status)

    return act


def log(stage: Stage) -> list[str]:
    return [line for kind, chunk in stage.client.said if kind == "logs" for line in chunk.lines]


def in_prepared(stage: Stage, fill: Callable[[Any], object]) -> None:
    """Put files into the attempt's directories when they are made."""
    prepare = stage.workspace.prepare

    def prepared(job_id: str, epoch: int) -> Any:
        made = prepare(job_id, epoch)
        fill(made)
        return made

    stage.workspace.prepare = prepared  # type: ignore[method-assign]


TWO = ({"name": "first"}, {"name": "second"})


def test_steps_run_in_order_and_the_job_is_complete_with_what_all_of_them_left(stage: Stage) -> None:
    def second(trainer: Trainer, looks: int) -> None:
        if looks > 1:
            # the agent has heard of it, and counts as the job does
            return trainer.ends(CLEAN) if run._scheduler.last_step == 11 else None
        assert (trainer.directory / "a").read_text() == "1", "it finds what the first left"
        assert not list(trainer.directory.glob("checkpoint-*"))
        assert trainer.env["BATON_RESUME_FROM"] == ""
        assert trainer.env["BATON_ARENA"] == "", "what lies in shared memory could not be added to"
        checkpoint(trainer, 5)
        return trainer.connect().report(6, 6, {"loss": 0.5})

    def first(trainer: Trainer, _looks: int) -> None:
        assert trainer.env["BATON_ARENA"]
        trainer.connect().report(3, 3, {})
        checkpoint(trainer, 3)
        ends(a="1")(trainer, 1)

    acts(stage, first, second)
    stage.workspace._arenas = stage.workspace.slot.parent
    run = stage.make(plan=plan(*TWO), outputs=["a"])
    assert run.run() is AttemptOutcome.COMPLETE
    assert stage.committed[-2:] == [4, 10], "the record of the first step, then the second's checkpoint behind it"
    assert stage.last_report().step == 11 and stage.last_report().metrics == {"loss": 0.5}
    assert [line for line in log(stage) if line.startswith("[baton]")] == [
        "[baton] step first (1 of 2)",
        "[baton] step first (1 of 2) is finished",
        "[baton] step second (2 of 2)",
    ]
    assert stage.phases == ["restoring", "fetching", "training", "uploading"]


def test_a_step_with_the_largest_number_that_there_is_is_none_larger_in_the_job(stage: Stage) -> None:
    """The largest step number stays the largest in a recipe's later step; a sum above it ended the attempt."""

    def second(trainer: Trainer, looks: int) -> None:
        if looks > 3:
            return trainer.ends(CLEAN)
        return trainer.connect().report(MAX_STEP, MAX_STEP, {"loss": 0.5})

    acts(stage, ends(a="1"), second)
    run = stage.make(plan=plan(*TWO))
    assert run.run() is AttemptOutcome.COMPLETE
    assert stage.last_report().step == MAX_STEP


def test_a_finished_step_is_not_run_again_and_the_next_one_resumes(stage: Stage) -> None:
    def restored(made: Any) -> None:
        path = made.output / "checkpoint-12"
        (path / ".baton/kept").mkdir(parents=True)
        (path / ".baton/kept/a").write_text("1")
        (path / "weights").write_text("w")
        (path / ".baton/steps.json").write_text(json.dumps({"format": 1, "finished": ["first"], "base": 5}))
        stage.restored = Restored(12, 2, path, 1)

    in_prepared(stage, restored)

    def second(trainer: Trainer, _looks: int) -> None:
        resumed = Path(trainer.env["BATON_RESUME_FROM"])
        assert resumed == trainer.directory / "checkpoint-7" and [p.name for p in resumed.iterdir()] == ["weights"]
        assert (trainer.directory / "a").read_text() == "1"
        checkpoint(trainer, 9)
        trainer.ends(CLEAN)

    acts(stage, second)
    assert stage.run(plan=plan(*TWO), outputs=["a"]) is AttemptOutcome.COMPLETE
    assert stage.committed == [14]
    assert len(stage.trainers) == 1


def test_only_the_step_that_was_interrupted_resumes(stage: Stage) -> None:
    def restored(made: Any) -> None:
        (made.output / "checkpoint-12").mkdir()
        (made.output / "checkpoint-12/weights").write_text("w")
        stage.restored = Restored(12, 2, made.output / "checkpoint-12", 1)

    in_prepared(stage, restored)
    resumed: list[str] = []

    def act(trainer: Trainer, _looks: int) -> None:
        resumed.append(Path(trainer.env["BATON_RESUME_FROM"]).name)
        trainer.ends(CLEAN)

    acts(stage, act, act)
    assert stage.run(plan=plan(*TWO)) is AttemptOutcome.COMPLETE
    assert resumed == ["checkpoint-12", ""]


def test_a_failed_step_ends_the_attempt_and_the_ones_behind_it_do_not_run(stage: Stage) -> None:
    acts(stage, ends(exited(3)))
    assert stage.run(plan=plan(*TWO)) is AttemptOutcome.FAILED
    assert stage.last_report().failure_class is FailureClass.SCRIPT_ERROR and stage.last_report().exit_code == 3
    assert stage.committed == []


def test_a_failed_step_is_tried_again_from_what_is_stored_here(stage: Stage) -> None:
    def breaks(trainer: Trainer, looks: int) -> None:
        if looks == 1:
            checkpoint(trainer, 4)
            (trainer.directory / "checkpoint-6").mkdir()
            (trainer.directory / "checkpoint-6/half").write_text("cut off")
        elif 4 in stage.committed:
            trainer.print("ValueError: the first time")
            trainer.ends(exited(1))

    def again(trainer: Trainer, _looks: int) -> None:
        resumed = Path(trainer.env["BATON_RESUME_FROM"])
        assert resumed == trainer.directory / "checkpoint-4"
        assert (resumed / "weights").read_text() == "4"
        assert [path.name for path in trainer.directory.glob("checkpoint-*")] == ["checkpoint-4"]
        trainer.ends(CLEAN)

    acts(stage, breaks, again)
    assert stage.run(plan=plan({"name": "only", "retries": 1})) is AttemptOutcome.COMPLETE
    assert "[baton] step only (1 of 1), try 2" in log(stage)


@pytest.mark.parametrize(("retries", "tries"), [(0, 1), (2, 3)])
def test_a_step_is_tried_so_often_and_then_fails(stage: Stage, retries: int, tries: int) -> None:
    stage.act = ends(exited(1))
    assert stage.run(plan=plan({"name": "only", "retries": retries})) is AttemptOutcome.FAILED
    assert len(stage.trainers) == tries


def test_a_machines_fault_is_not_tried_again_on_it(stage: Stage) -> None:
    def act(trainer: Trainer, _looks: int) -> None:
        trainer.print("RuntimeError: No CUDA GPUs are available")
        trainer.ends(exited(1))

    stage.act = act
    assert stage.run(plan=plan({"name": "only", "retries": 3})) is AttemptOutcome.FAILED
    assert len(stage.trainers) == 1 and stage.last_report().failure_class is FailureClass.NODE_FAULT


def test_a_step_that_runs_too_long_is_ended_and_fails_with_its_own_class(stage: Stage) -> None:
    stage.act = lambda trainer, looks: None
    assert stage.run(plan=plan({"name": "slow", "timeout_s": 0})) is AttemptOutcome.FAILED
    assert stage.trainer.stops[0] == 8, "it gets the job's grace"
    assert stage.last_report().failure_class is FailureClass.STEP_TIMEOUT
    assert "step slow ran longer than its 0 s" in stage.last_report().message


def test_a_step_without_its_outputs_fails(stage: Stage) -> None:
    stage.act = ends(a="1")
    two = {"name": "first", "outputs": [{"path": "a", "min_bytes": 2}, {"path": "b"}]}
    assert stage.run(plan=plan(two, {"name": "second"})) is AttemptOutcome.FAILED
    assert stage.last_report().failure_class is FailureClass.MISSING_OUTPUT
    assert "a has 1 bytes; at least 2 are expected; b is missing" in stage.last_report().message
    assert len(stage.trainers) == 1


def test_outputs_of_the_job_are_looked_at_before_they_are_uploaded(stage: Stage) -> None:
    stage.act = ends(model="{")
    checks = [{"path": "model", "format": "json"}]
    assert stage.run(plan=plan({"name": "only"}, outputs=checks), outputs=["model"]) is AttemptOutcome.FAILED
    assert "is not JSON" in stage.last_report().message and "uploading" not in stage.phases


def test_a_step_that_writes_to_the_inputs_is_caught(stage: Stage) -> None:
    in_prepared(stage, lambda made: (made.data / "a.png").write_text("a"))

    def act(trainer: Trainer, _looks: int) -> None:
        Path(trainer.env["BATON_DATA_DIR"], "a.png").write_text("cropped")
        trainer.ends(CLEAN)

    stage.act = act
    assert stage.run(plan=plan({"name": "only"})) is AttemptOutcome.FAILED
    assert "outside its directories" in stage.last_report().message and "a.png" in stage.last_report().message


def test_a_steps_environment_is_filled_in_and_the_jobs_wins(stage: Stage) -> None:
    seen: dict[str, str] = {}

    def act(trainer: Trainer, _looks: int) -> None:
        seen.update(trainer.env)
        trainer.ends(CLEAN)

    stage.act = act
    step = {"name": "only", "environment": {"CACHE": "${BATON_OUTPUT_DIR}/c", "MODE": "recipe", "BATON_EPOCH": "9"}}
    assert stage.run(plan=plan(step), environment={"MODE": "job"}) is AttemptOutcome.COMPLETE
    assert seen["CACHE"] == seen["BATON_OUTPUT_DIR"] + "/c" and seen["MODE"] == "job" and seen["BATON_EPOCH"] == "3"


def test_a_step_without_checkpoints_leaves_directories_of_that_name_alone(stage: Stage) -> None:
    def act(trainer: Trainer, looks: int) -> None:
        if looks == 1:
            assert trainer.env["BATON_ARENA"] == ""
            checkpoint(trainer, 5)
        trainer.ends(CLEAN)

    stage.act = act
    assert stage.run(plan=plan({"name": "only", "checkpoints": "none"})) is AttemptOutcome.COMPLETE
    assert stage.committed == []


def test_sigterm_between_steps_hands_the_job_back_with_the_record_stored(stage: Stage) -> None:
    def first(trainer: Trainer, _looks: int) -> None:
        ends(a="1")(trainer, 1)

    acts(stage, first)
    record = steps_module.StepRunner._record

    def recorded(steps: Any, order: Any) -> None:
        record(steps, order)
        stage.stop.request("SIGTERM")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps_module.StepRunner, "_record", recorded)
        assert stage.run(plan=plan(*TWO)) is AttemptOutcome.RELEASED
    assert stage.committed == [1] and len(stage.trainers) == 1


def test_while_nothing_can_be_recorded_the_next_step_begins_all_the_same(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its checkpoints tell of the first step too."""
    monkeypatch.setattr(steps_module, "RECORD_WAIT_S", 0.05)
    commits: list[tuple[int, bool]] = []

    def commit(_harvest: Any, _client: Any, _transfer: Any, staged: Any, _cancel: Any) -> None:
        if len(stage.trainers) < 2:
            raise Unreachable("no answer")
        commits.append((staged.step, (staged.path / ".baton/steps.json").is_file()))

    monkeypatch.setattr(CheckpointCollector, "commit", commit)

    def second(trainer: Trainer, looks: int) -> None:
        if looks == 1:
            checkpoint(trainer, 2)
        elif commits:
            trainer.ends(CLEAN)

    acts(stage, ends(a="1"), second)
    assert stage.run(plan=plan(*TWO)) is AttemptOutcome.COMPLETE
    assert commits[-1] == (4, True)


# Beside the steps


def test_a_machine_that_fails_the_health_check_is_at_fault(stage: Stage) -> None:
    def act(trainer: Trainer, _looks: int) -> None:
        trainer.print("no GPU")
        trainer.ends(exited(9))

    stage.act = act
    assert stage.run(plan=plan({"name": "only"}, check={"command": ["nvidia-smi"]})) is AttemptOutcome.FAILED
    said = stage.last_report()
    assert said.failure_class is FailureClass.NODE_FAULT
    assert "'nvidia-smi' failed: exit code 9" in said.message and "no GPU" in said.message
    assert len(stage.trainers) == 1


def test_a_health_check_that_hangs_fails(stage: Stage) -> None:
    stage.act = lambda trainer, looks: None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps_module, "COMMAND_TIMEOUT_S", 0)
        assert stage.run(plan=plan({"name": "only"}, check={"command": ["nvidia-smi"]})) is AttemptOutcome.FAILED
    assert "not done in 0 s" in stage.last_report().message


@pytest.mark.parametrize("status", [CLEAN, exited(1)], ids=["well", "badly"])
def test_cleanup_runs_once_however_it_went_and_changes_nothing(stage: Stage, status: ExitStatus) -> None:
    def cleanup(trainer: Trainer, _looks: int) -> None:
        trainer.print("cleaning")
        trainer.ends(exited(7))

    def work(trainer: Trainer, _looks: int) -> None:
        trainer.print("ValueError: the work" if status is not CLEAN else "fine")
        trainer.ends(status)

    acts(stage, ends(), work, cleanup, cleanup)
    made = plan(
        {"name": "only"}, check={"command": ["fit"]}, cleanup=[{"command": ["rm"]}, {"command": ["rm", "more"]}]
    )
    outcome = stage.run(plan=made)
    assert outcome is (AttemptOutcome.COMPLETE if status is CLEAN else AttemptOutcome.FAILED)
    assert len(stage.trainers) == 4
    assert "[baton] cleanup rm: exit code 7, signal None" in log(stage)
    if status is not CLEAN:
        assert "ValueError: the work" in stage.last_report().message
        assert "cleaning" not in stage.last_report().log_tail


def test_what_the_training_finishes_is_uploaded_while_it_trains(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, bytes]] = []

    def upload(_client: object, _transfer: object, _item: object, files: dict[str, Path], **_: object) -> list[Any]:
        sent.append({path: file.read_bytes() for path, file in files.items()})
        return []

    monkeypatch.setattr(job_run, "upload_artifacts", upload)
    monkeypatch.setattr(artifact_shipper, "GATHER_S", 0.0)

    def act(trainer: Trainer, looks: int) -> None:
        if looks == 1:
            for name in ("step-1.png", "elsewhere.png"):
                (trainer.directory / name).write_text("picture")
            (trainer.directory / "elsewhere.png").unlink()
            for name in ("step-1.png", "elsewhere.png"):
                trainer.connect().artifact_written(str(trainer.directory / name))
        elif sent:
            (trainer.directory / "model").write_text("weights")
            trainer.ends(CLEAN)

    stage.act = act
    checks: dict[str, Any] = {"optional_outputs": [{"path": "step-1.png"}, {"path": "absent"}]}
    assert stage.run(plan=plan({"name": "only"}, **checks), outputs=["model"]) is AttemptOutcome.COMPLETE
    early, final = sent
    assert early == {"step-1.png": b"picture"}
    assert final == {"model": b"weights", "step-1.png": b"picture"}, "what is there of the optional ones, too"
    assert "[baton] elsewhere.png is uploaded at the end only: does not exist" in log(stage)


def test_an_optional_output_is_looked_at_where_it_is_there(stage: Stage) -> None:
    stage.act = ends(grid="no picture")
    optional = {"optional_outputs": [{"path": "absent", "min_bytes": 9}, {"path": "grid", "format": "png"}]}
    assert stage.run(plan=plan({"name": "only"}, **optional)) is AttemptOutcome.FAILED
    assert stage.last_report().failure_class is FailureClass.MISSING_OUTPUT
    assert stage.last_report().message == "outputs: grid is not a PNG file"
    stage.client.said.clear()
    stage.trainers.clear()
    assert stage.run(plan=plan({"name": "only", **optional})) is AttemptOutcome.FAILED
    assert stage.last_report().message == "outputs: grid is not a PNG file"


def test_optional_outputs_for_which_there_is_no_room_are_left_out_and_that_is_said(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[str]] = []

    def upload(_client: object, _transfer: object, _item: object, files: dict[str, Path], **_: object) -> list[Any]:
        found.append(list(files))
        return []

    monkeypatch.setattr(job_run, "upload_artifacts", upload)

    def act(trainer: Trainer, _looks: int) -> None:
        for folder, count in (("many", 500), ("few", 3)):
            (trainer.directory / folder).mkdir()
            for number in range(count):
                (trainer.directory / folder / str(number)).write_text("x")
        ends(model="m")(trainer, 1)

    stage.act = act
    optional = {"optional_outputs": [{"path": "many"}, {"path": "few"}]}
    assert stage.run(plan=plan({"name": "only"}, **optional), outputs=["model"]) is AttemptOutcome.COMPLETE
    assert found == [["few/0", "few/1", "few/2", "model"]]
    assert "[baton] many is left out: the outputs are 501 files; at most 500 are allowed" in log(stage)
