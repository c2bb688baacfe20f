"""The demo in the console: the link that a demo prints at its start signs in, and its jobs are shown live."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from playwright.sync_api import expect
from rich.console import Console

from baton.contract.jobs.job import JobSubmit
from demo.cluster import LocalCluster
from demo.failure import Interrupts
from demo.processes import ManagedProcesses
from demo.runner import Stage
from demo.screen import Screen
from tests.e2e.console.desk import Desk


def test_the_link_of_a_demo_shows_its_jobs_while_it_runs(browser: Any, tmp_path: Path) -> None:
    written = io.StringIO()
    with ManagedProcesses(tmp_path / "logs", tmp_path, Interrupts()) as processes:
        stage = Stage(processes, Screen(Console(file=written, width=60)), tmp_path, tmp_path)
        cluster = LocalCluster(stage)
        link = re.search(r"^http://\S+/console#code=\S+$", written.getvalue(), re.MULTILINE)
        assert link is not None, written.getvalue()
        desk = Desk(browser, SimpleNamespace(url=link[0].partition("/console")[0]))  # type: ignore[arg-type]
        page = desk.open(link[0])
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("heading", name="Jobs", exact=True)).to_be_visible()
        with cluster.user() as user:
            job_id = user.submit(JobSubmit(command=["python", "train.py"], name="digits", outputs=[])).id
            row = page.get_by_role("row").filter(has_text=job_id[:8])
            expect(row).to_contain_text("Waiting")
            user.stop(job_id)
            expect(row).to_contain_text("Stopped")
        desk.close()
        assert desk.faults == []
