"""`baton fetch`: a job's outputs, each complete and verified or not there; or what there is of them so far."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from baton.contract.artifacts import StoredArtifact
from baton.contract.jobs import Artifact, JobState, JobView
from gpu_client.cli.core.errors import CliError, ExitCode
from gpu_client.cli.core.formats import count, size
from gpu_client.cli.core.session import SHOWN_ID_CHARACTERS, AsJson, JobIdArgument, find_job, session_of
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.api.objects import Wanted
from gpu_client.transport.net.cancellation import CancelEvent
from gpu_client.transport.net.digests import hash_file
from gpu_client.transport.net.files import local_errors, safe_destination
from gpu_client.transport.transfer.manager import Progress

_HASHERS = 4
_PER_PAGE = 500
_LEFTOVER = re.compile(r"\.[0-9a-f]{16}\.part")
"""How the transport names a file that it has not finished."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("fetch")(fetch)


def fetch(
    context: typer.Context,
    job_id: JobIdArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Made if it is not there.", show_default=False)],
    *,
    so_far: Annotated[
        bool, typer.Option("--so-far", help="Also of a job that is not complete: what it has stored until now.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that have other bytes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Download a complete job's outputs, verified.

    Interrupted, the same command fetches the rest. No file that has other bytes is replaced unless --force says so.
    """
    session = session_of(context)
    with session.client() as client:
        job = find_job(client, job_id)
        if so_far:
            job = outputs_so_far(client, job)
        else:
            _require_outputs(job)
        have, missing, total_bytes = fetch_outputs(
            client, job, directory, session.cancel, force=force, bar=session.screen.bytes_bar
        )
    unverified = [artifact.path for artifact in missing if artifact.crc64nvme is None and artifact.blake3 is None]
    if job.state is not JobState.COMPLETE:
        session.screen.say(f"The job is {job.state.value}: none of this is an output before it is complete.")
    elif unverified:
        session.screen.say(f"Without a checksum to verify, for the job declared none: {', '.join(unverified)}")
    if as_json:
        files = [
            {"path": one.path, "size_bytes": one.size_bytes, "fetched": one.path not in have} for one in job.artifacts
        ]
        session.screen.json({"id": job.id, "directory": str(directory), "files": files, "bytes": total_bytes})
    else:
        session.screen.line(
            f"{count(len(missing), 'file')} ({size(total_bytes)}) fetched into {directory}, "
            f"{count(len(have), 'file')} there already"
        )


class Fetched(NamedTuple):
    """Paths that were there already, outputs that were not, and their bytes."""

    have: set[str]
    missing: list[Artifact]
    total_bytes: int


def fetch_outputs(
    client: BatonClient,
    job: JobView,
    directory: Path,
    cancel: CancelEvent,
    *,
    force: bool = False,
    bar: Callable[[str, int], AbstractContextManager[Progress | None]] = lambda title, total_bytes: nullcontext(),
) -> Fetched:
    """Download what is not there yet, verified. `bar` shows it to a person. Raises CliError, as `present` does."""
    with _alone(directory):
        have = present(job.artifacts, directory, cancel, force=force)
        missing = [artifact for artifact in job.artifacts if artifact.path not in have]
        total_bytes = sum(artifact.size_bytes or 0 for artifact in missing)
        with bar("downloading", total_bytes) as moved:
            client.fetch_objects([_wanted(one, directory) for one in missing], cancel=cancel, progress=moved)
    return Fetched(have, missing, total_bytes)


def _require_outputs(job: JobView) -> None:
    if job.state is not JobState.COMPLETE:
        short = job.id[:SHOWN_ID_CHARACTERS]
        remedy = f"Run it again: baton retry {short}" if job.state.terminal else f"Wait for it: baton watch {short}"
        raise CliError(
            f"job {job.id} is {job.state.value}; outputs exist once a job is complete",
            remedy,
            exit_code=ExitCode.FAILED,
        )
    if not job.artifacts:
        raise CliError(f"job {job.id} declared no outputs", "Name them in 'outputs' when submitting.")


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """The directory, to this process alone; what a killed fetch left half-written in it is removed. Raises CliError."""
    if directory.exists() and not directory.is_dir():
        raise CliError(f"{directory} is not a directory", "Name another one.")
    with local_errors(f"making {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CliError(f"another fetch into {directory} is under way", "Wait for it to end.") from None
        yield
    finally:
        os.close(descriptor)


def present(artifacts: Sequence[Artifact], directory: Path, cancel: CancelEvent, *, force: bool) -> set[str]:
    """Which outputs are there already, byte for byte. Raises CliError for files that would be overwritten."""
    for folder in {safe_destination(directory, artifact.path).parent for artifact in artifacts}:
        for leftover in (path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name)):
            leftover.unlink(missing_ok=True)
    there = [artifact for artifact in artifacts if safe_destination(directory, artifact.path).exists()]
    with ThreadPoolExecutor(_HASHERS, thread_name_prefix="hash") as pool:
        same = list(pool.map(partial(_same, directory=directory, cancel=cancel), there))
    other = [artifact.path for artifact, equal in zip(there, same, strict=True) if not equal]
    if other and not force:
        raise CliError(
            f"{', '.join(other[:3])}{', ...' if len(other) > 3 else ''} in {directory} would be overwritten",
            "Choose another directory, or replace them with --force.",
        )
    return {artifact.path for artifact, equal in zip(there, same, strict=True) if equal}


def _same(artifact: Artifact, *, directory: Path, cancel: CancelEvent) -> bool:
    """Whether the file has the declared bytes. Where no checksum is declared its size must do: it came complete."""
    path = directory / artifact.path
    if artifact.size_bytes not in (None, path.stat().st_size):
        return False
    if artifact.blake3 is None and artifact.crc64nvme is None:
        return True
    found = hash_file(path, cancel=cancel)
    return artifact.blake3 in (None, found.blake3) and artifact.crc64nvme in (None, found.crc64nvme)


def _wanted(artifact: Artifact, directory: Path) -> Wanted:
    return Wanted(
        bucket=artifact.bucket,
        key=artifact.key,
        root=directory,
        path=artifact.path,
        size_bytes=artifact.size_bytes,
        blake3=artifact.blake3,
        crc64nvme=artifact.crc64nvme,
    )


class Stored:
    """Everything that is stored of a job's outputs, each path as the last attempt stored it."""

    def __init__(self, client: BatonClient, job_id: str) -> None:
        """Raises what a call raises."""
        self.by_path: dict[str, StoredArtifact] = {}
        self.expires_in_s = 0
        """How long the links can be used."""
        for page in pages(lambda cursor: client.artifacts(job_id, limit=_PER_PAGE, cursor=cursor)):
            self.expires_in_s = page.expires_in_s
            for one in page.artifacts:
                other = self.by_path.get(one.path)
                if other is None or other.epoch <= one.epoch:
                    self.by_path[one.path] = one


def outputs_so_far(client: BatonClient, job: JobView) -> JobView:
    """The job with what it has stored so far in the place of its outputs; a complete one as it is."""
    if job.state is JobState.COMPLETE:
        return job
    so_far = [
        {"path": one.path, "bucket": one.bucket, "key": one.key, "size_bytes": one.size_bytes}
        for one in Stored(client, job.id).by_path.values()
    ]
    return JobView.model_validate({**job.model_dump(), "artifacts": so_far})
