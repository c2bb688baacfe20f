"""Test the metrics of a real training, through a kill, in the command line's table and page."""

from __future__ import annotations

import csv
import io
import math
import random
from pathlib import Path

import pytest
from PIL import Image

from baton.contract.jobs.job import JobState
from gpu_client.cli.core.session import CliSession
from gpu_client.cli.insight.metric_history import load_history
from gpu_client.cli.main import main
from tests.kits.stack.workshop import Workshop
from tests.kits.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.emulator]

STEPS = 3000


def test_what_a_killed_and_resumed_training_saw(
    shop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack, client, rng = shop.stack, shop.stack.client, random.Random(7)
    for label in range(3):
        for index in range(10):
            image = Image.frombytes("L", (8, 8), rng.randbytes(64))
            image.save(file := io.BytesIO(), "PNG")
            stack.write(f"{shop.queue}/{label}/{index}.png", file.getvalue(), bucket="training-data")
    gate = shop.gate(1000)
    job_id = shop.submit(
        "",
        {"steps": STEPS, "checkpoint_every": 50, "batch_size": 16, "hidden": 24},
        command=["python", "-m", "gpu_client.training.digits"],
        outputs=("model.safetensors", "predictions.json"),
        inputs=(f"{shop.queue}/",),
        environment=gate.of_sessions,
    )
    agent = shop.agent("w1")
    until(lambda: next(client.metric_points(job_id), None), what="the first points")
    stack.wait_for_commit(job_id)
    shop.lose(agent, job_id)
    gate.open()
    shop.agent("w2")
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED, timeout_s=240)
    assert job.state is JobState.COMPLETE, job.reason

    points = list(client.metric_points(job_id))
    assert {point.epoch for point in points} == {1, 2}
    history = load_history(client, job_id)
    steps = [point.step for point in history.kept]
    assert steps == sorted(set(steps)), "each step once"
    assert steps[-1] == STEPS, "the last flush has lost nothing"
    assert len(history.kept) + len(history.void) == len(points)
    resumed = stack.attempts(job_id)[1].resumed_step
    assert resumed
    assert all(point.step <= resumed for point in history.kept if point.epoch == 1)
    assert all(point.step > resumed for point in history.kept if point.epoch == 2)
    assert all(point.metrics.keys() == {"loss", "learning_rate"} for point in history.kept)
    times = [point.at for point in points]
    assert times == sorted(times)
    assert job.created_at - 2 <= times[0] <= times[-1] <= job.updated_at + 2

    session = CliSession(environ={"BATON_API_URL": stack.url, "BATON_API_KEY": stack.keys["submit"]})
    assert main(["metrics", job_id, "--csv"], session) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [int(row["step"]) for row in rows] == steps
    assert all(math.isfinite(float(row["loss"])) for row in rows)
    page = tmp_path / "report.html"
    assert main(["report", job_id, "--output", str(page)], session) == 0
    text = page.read_text()
    assert "attempt 2" in text
    assert text.count('class="ckpt"') >= 2
    assert len(text) < 500_000
