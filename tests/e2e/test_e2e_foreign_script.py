"""A training script that knows nothing of us, under `command@1`: killed with its agent, killed alone, and completed."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from baton.contract.jobs.job import AttemptEnd, InputRef, JobState, JobSubmit
from baton.contract.jobs.policy import Policy
from tests.kits.stack.control_plane import TRAINERS
from tests.kits.stack.stack import clean_environment
from tests.kits.stack.workshop import Workshop
from tests.kits.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.emulator]

SCRIPT = TRAINERS / "foreign.py"
GATED = TRAINERS / "gated_foreign.py"
STEPS, EVERY = 120, 10
LIMIT_S = 300
ONE_THREAD = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
ACCELERATES_FILES = {"model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"}


def command(python: str, data_dir: str, output_dir: str, script: Path = SCRIPT) -> list[str]:
    """Return the command of the script's own documentation."""
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", "--num_machines=1"]
    return [
        python, *launch, "--mixed_precision=no", "--dynamo_backend=no", str(script),
        f"--train_data_dir={data_dir}",
        f"--output_dir={output_dir}",
        f"--max_train_steps={STEPS}",
        f"--checkpointing_steps={EVERY}",
        "--checkpoints_total_limit=2",
        "--resume_from_checkpoint=latest",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def digits() -> bytes:
    """The handwritten digits as the script reads them."""
    bunch = load_digits()
    stream = io.BytesIO()
    np.savez(stream, images=(bunch.images[:, None] / 16).astype(np.float32), labels=bunch.target)
    return stream.getvalue()


@pytest.fixture(scope="module")
def uninterrupted(digits: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run to which nothing happened, and of which we knew nothing."""
    place = tmp_path_factory.mktemp("uninterrupted")
    (place / "data").mkdir()
    (place / "data" / "digits.npz").write_bytes(digits)
    subprocess.run(
        command(sys.executable, str(place / "data"), str(place / "out")),
        env={**clean_environment(), **ONE_THREAD},
        check=True,
        timeout=LIMIT_S,
    )
    assert sorted(path.name for path in (place / "out").iterdir()) == [
        f"checkpoint-{STEPS - EVERY}", f"checkpoint-{STEPS}", "model.safetensors",
    ]  # fmt: skip
    return place / "out"


def test_a_script_of_others_is_killed_twice_and_ends_with_the_same_bits(
    shop: Workshop, digits: bytes, uninterrupted: Path
) -> None:
    assert not re.search(r"baton|gpu_client|baton.contract", SCRIPT.read_text(), re.IGNORECASE)
    stack = shop.stack
    stack.write(f"{shop.queue}/digits.npz", digits, bucket="training-data")
    gate = shop.gate(50)
    job_id = stack.client.submit(
        JobSubmit(
            recipe="command@1",
            parameters={"command": command("python", "$BATON_DATA_DIR", "$BATON_OUTPUT_DIR", GATED)},
            inputs=[InputRef(prefix=f"{shop.queue}/")],
            outputs=["model.safetensors"],
            queue=shop.queue,
            environment={**ONE_THREAD, **gate.environment},
            policy=Policy(heartbeat_interval_s=2, backoff_s=0, avoid_machine_s=0, max_failures=2),
        )
    ).id

    first = shop.agent("w1", stable_s=2)
    stack.wait_for_commit(job_id)
    shop.lose(first, job_id)
    until(lambda: not shop.trainers(), what="the trainer's end")
    after_first = committed(shop, job_id)

    gate.set(90)
    shop.agent("w2", stable_s=2)
    stack.wait_for_commit(job_id, after_first + 1)
    (trainer,) = shop.training(GATED.name)
    os.kill(trainer.pid, signal.SIGKILL)
    gate.open()
    until(lambda: len(stack.attempts(job_id)) == 3, what="the third attempt")
    after_second = committed(shop, job_id)

    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED, timeout_s=LIMIT_S)
    assert job.state is JobState.COMPLETE, job.reason
    assert job.recipe == "command@1"
    attempts = stack.attempts(job_id)
    assert [attempt.end for attempt in attempts] == [AttemptEnd.INTERRUPTED, AttemptEnd.FAILED, AttemptEnd.COMPLETE]
    assert (job.counters.interruptions, job.counters.failures) == (1, 1)
    begun = [line for line in stack.log_lines(job_id) if line.startswith(("Resuming from", "No checkpoint"))]
    assert begun[-2:] == [f"Resuming from checkpoint-{after_first}", f"Resuming from checkpoint-{after_second}"]
    assert EVERY <= after_first < after_second < STEPS
    # The script's last file and its last checkpoint equal the uninterrupted ones: optimizer, schedule, random states.
    assert stack.artifact(job_id, "model.safetensors") == (uninterrupted / "model.safetensors").read_bytes()
    last = stack.client.checkpoints(job_id).checkpoints[0]
    assert last.step == STEPS
    files = stack.files_of(stack.manifest(last.manifest_key))
    assert files.keys() == ACCELERATES_FILES
    for name, content in files.items():
        assert content == (uninterrupted / f"checkpoint-{STEPS}" / name).read_bytes(), name


@pytest.mark.parametrize("order", ["accelerate", "trainer"])
def test_a_script_that_keeps_one_checkpoint_for_half_a_second_loses_no_more_than_that(
    shop: Workshop, order: str
) -> None:
    """A script that deletes each checkpoint after half a second loses only the last one; it once lost all of them."""
    stack, steps = shop.stack, 12
    resume = "${BATON_RESUME_FROM:+--resume_from_checkpoint=$BATON_RESUME_FROM}"
    gate = shop.gate(6)
    job_id = stack.client.submit(
        JobSubmit(
            command=["python", str(TRAINERS / "rotating.py"), order, "$BATON_OUTPUT_DIR", str(steps), resume],
            outputs=["model.txt"],
            queue=shop.queue,
            environment={**ONE_THREAD, **gate.environment},
            policy=Policy(heartbeat_interval_s=2, backoff_s=0, avoid_machine_s=0),
        )
    ).id
    first = shop.agent("w1", stable_s=600)
    stack.wait_for_commit(job_id)
    first.kill_group()
    until(lambda: not shop.trainers(), what="the trainer's end")
    resumed_from = committed(shop, job_id)
    gate.open()
    shop.agent("w1", stable_s=600)
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED, timeout_s=LIMIT_S)
    assert job.state is JobState.COMPLETE, job.reason
    assert [line for line in stack.log_lines(job_id) if line.startswith("begins")][-1:] == [
        f"begins behind step {resumed_from}"
    ]
    assert stack.artifact(job_id, "model.txt").startswith(b"of 12 steps, %d of them" % (steps - resumed_from))
    last = stack.attempts(job_id)[-1]
    assert last.progress is not None and last.progress.total_steps == steps, "the script's own file tells it"
    assert last.progress.goodput is not None and last.progress.goodput.productive_s > 0


def committed(shop: Workshop, job_id: str) -> int:
    """Return the step from which the next attempt resumes, while no attempt trains."""
    return shop.stack.job(job_id).checkpoint_step or 0
