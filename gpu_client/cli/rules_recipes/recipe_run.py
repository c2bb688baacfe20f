"""Run a recipe on this machine: a temporary control plane, one worker, one job, its outputs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from baton.contract.errors import Fault
from baton.contract.jobs.job import InputRef, JobState, JobSubmit, JobView
from baton.contract.jobs.policy import Policy, Requirements
from baton.contract.names import DATA_BUCKET
from baton.contract.recipes.model import Recipe
from baton.contract.recipes.rendering import parameter_faults, plan_of
from gpu_client.cli.admin.local import read_built_in_recipe, require_local_stack
from gpu_client.cli.core.errors import CliError, ExitCode
from gpu_client.cli.core.session import RETRY_POLICY, CliSession
from gpu_client.cli.data.fetch import fetch_outputs
from gpu_client.cli.data.push import list_local_files
from gpu_client.cli.jobs.submit import parse_setting
from gpu_client.transport.api.client import BatonClient

POLL_S = 0.3
END_S = 20.0
"""Seconds between SIGTERM and SIGKILL."""
_HEARTBEAT_S = 2
_LINES = 1000


class LocalRun:
    """Run of one recipe. The constructor raises CliError for invalid parameters, inputs and output paths."""

    def __init__(
        self,
        session: CliSession,
        recipe: Recipe,
        document: str,
        *,
        settings: Sequence[str],
        inputs: Sequence[str],
        out: Path | None,
        force: bool,
    ) -> None:
        require_local_stack()
        self._session = session
        self._recipe = recipe
        self._document = document
        self._out = out or Path(f"{recipe.name}-output")
        self._force = force
        self._parameters = dict(map(parse_setting, settings))
        self._inputs: list[InputRef] = []
        self._files: dict[str, Path] = {}
        problems = [_format_parameter_fault(fault) for fault in parameter_faults(recipe, self._parameters)]
        for number, text in enumerate(inputs):
            folder, _, into = text.partition(":")
            prefix = f"input-{number}/"
            try:
                self._inputs.append(InputRef(prefix=prefix, into=into))
                self._files |= list_local_files(Path(folder), prefix)
            except (CliError, ValidationError) as error:
                problems.append(f"--input {text}: {_format_error(error)}")
        given = {text.partition(":")[2] for text in inputs}
        problems += [
            f"--input DIR{':' + one.into if one.into else ''} is missing: {one.description}"
            for one in recipe.inputs
            if one.required and one.into not in given
        ]
        if problems:
            _refuse(problems)
        self._require_free_paths(given)

    def _require_free_paths(self, given: Collection[str]) -> None:
        """Raise CliError if an output path is occupied, before the run spends hours."""
        if self._out.exists() and not self._out.is_dir():
            raise CliError(f"{self._out} is not a directory", "Give another path with --out.")
        plan, _ = plan_of(self._recipe, self._parameters, given)
        if plan is None or self._force:
            return  # The control plane reports the faults of a plan.
        paths = [one.path for one in (*plan.outputs, *plan.optional_outputs)] + [one.path for one in plan.shared]
        there = sorted({path for path in paths if _is_occupied(self._out, path)})
        if there:
            raise CliError(
                f"{', '.join(there[:3])}{', ...' if len(there) > 3 else ''} in {self._out} would be overwritten",
                "Give another directory with --out, or replace the files with --force.",
            )

    def run(self, *, note: Callable[[str], None], line: Callable[[str], None]) -> JobView:
        """Run the recipe and return the ended job. `note` receives progress messages, `line` the job's output."""
        with tempfile.TemporaryDirectory(prefix="baton-run-") as folder, _started_stack() as stack:
            url, keys = str(stack["url"]), stack["keys"]
            assert isinstance(keys, dict)
            with BatonClient(url, keys["admin"], policy=RETRY_POLICY) as client:
                if read_built_in_recipe(self._recipe.id) != self._document:  # The local stack has the built-in recipes.
                    client.push_recipe(self._document)
                if self._files:
                    client.upload_files(DATA_BUCKET, self._files, cancel=self._session.cancel)
                job = client.submit(self._job())
                note(f"job {job.id} runs {self._recipe.id} on this machine")
                with _started_agent(url, keys["worker"], Path(folder)) as agent:
                    job = self._print_until_end(client, job.id, agent, line)
                note(f"the job is {job.state.value}{f': {job.reason.message}' if job.reason else ''}")
                if job.state is JobState.COMPLETE and job.artifacts:
                    fetched = fetch_outputs(client, job, self._out, self._session.cancel, force=self._force)
                    note(f"{len(fetched.missing)} outputs are in {self._out}")
        return job

    def _job(self) -> JobSubmit:
        # The user selected this machine, therefore explicit values override the recipe's requirements.
        none = Requirements(**Requirements().model_dump())
        return JobSubmit(
            recipe=self._recipe.id,
            parameters=self._parameters,
            inputs=self._inputs,
            requirements=none,
            policy=Policy(max_failures=1, max_node_faults=1, heartbeat_interval_s=_HEARTBEAT_S),
        )

    def _print_until_end(
        self, client: BatonClient, job_id: str, agent: subprocess.Popen[bytes], line: Callable[[str], None]
    ) -> JobView:
        """Print the output until the job ends. Raises CliError if the worker ends first."""
        cursor: str | None = None
        while True:
            # The log of an ended job is complete, therefore the state is requested before the lines.
            gone = agent.poll() is not None
            job = client.get_job(job_id)
            while (page := client.logs(job_id, limit=_LINES, cursor=cursor)).lines:
                for found in page.lines:
                    line(found.text)
                cursor = page.next_cursor or cursor
            if job.state.terminal:
                return job
            if gone:
                raise CliError(
                    f"the worker ended (exit code {agent.returncode}) before the job did",
                    "See the worker's messages above.",
                    exit_code=ExitCode.FAILED,
                )
            self._session.sleep(POLL_S)


def _is_occupied(directory: Path, path: str) -> bool:
    """Return True if an output path has a file, or a parent of the path is a file."""
    place = directory / path
    if place.is_dir():
        return any(found.is_file() for found in place.rglob("*"))
    folders = place.relative_to(directory).parents
    return os.path.lexists(place) or any((directory / folder).is_file() for folder in folders)


def _refuse(problems: list[str]) -> NoReturn:
    if len(problems) == 1:
        raise CliError(problems[0])
    raise CliError(f"{len(problems)} problems", problems=problems)


def _format_parameter_fault(fault: Fault) -> str:
    return f"{fault.field}: {fault.reason}. {fault.remedy}".rstrip()


def _format_error(error: CliError | ValidationError) -> str:
    if isinstance(error, CliError):
        return str(error)
    return "; ".join(one["msg"].removeprefix("Value error, ") for one in error.errors(include_url=False))


@contextmanager
def _started_stack() -> Iterator[Mapping[str, object]]:
    """Start a local stack; yield its address and keys."""
    command = [sys.executable, "-m", "functions.local", "--forget", "--port", "0", "--json", "--sweep-interval-s", "2"]
    with _terminated(
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    ) as (process):
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise CliError("the local stack did not start", exit_code=ExitCode.FAILED)
        yield json.loads(line)


@contextmanager
def _started_agent(url: str, key: str, workspace: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a worker for one job."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    settings = {
        "BATON_API_URL": url,
        "BATON_API_KEY": key,
        "BATON_WORKSPACE": str(workspace),
        "BATON_MAX_JOBS": "1",
        "BATON_STABLE_S": "1",
        "BATON_POLL_MAX_S": "1",
        "BATON_LOG_LEVEL": "WARNING",
    }
    command = [sys.executable, "-m", "gpu_client.agent"]
    with _terminated(
        subprocess.Popen(command, env={**inherited, **settings}, stdin=subprocess.DEVNULL, start_new_session=True)
    ) as process:
        yield process


@contextmanager
def _terminated(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Yield the process; afterwards end it and its process group."""
    try:
        with process:
            try:
                yield process
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
    finally:
        process.wait()
