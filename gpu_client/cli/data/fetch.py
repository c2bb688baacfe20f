"""Command `baton fetch`: download and verify a job's outputs, complete or so far."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from baton.contract.checkpoints.calls import BlobUrls, CheckpointRef
from baton.contract.jobs.job import Artifact, JobState, JobView
from baton.contract.objects.artifacts import StoredArtifact
from gpu_client.cli.core.errors import CliError, ExitCode
from gpu_client.cli.core.formats import count, size
from gpu_client.cli.core.session import SHOWN_ID_CHARACTERS, AsJson, CliSession, JobIdArgument, find_job, session_of
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.api.objects import Wanted
from gpu_client.transport.net.cancellation import CancelEvent
from gpu_client.transport.net.digests import hash_file
from gpu_client.transport.net.files import TEMPORARY_NAME, local_errors, safe_destination
from gpu_client.transport.transfer.manager import Progress

_HASHERS = 4
_PER_PAGE = 500


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("fetch")(fetch)


def fetch(
    context: typer.Context,
    job_id: JobIdArgument,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Target directory; created if missing.", show_default=False)
    ],
    *,
    so_far: Annotated[
        bool, typer.Option("--so-far", help="Fetch the files stored so far, also of a job that is not complete.")
    ] = False,
    checkpoint: Annotated[
        int | None,
        typer.Option(
            "--checkpoint", metavar="STEP", min=0, help="Fetch the checkpoint of this step into DIR/checkpoint-STEP."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files with different content.")] = False,
    as_json: AsJson = False,
) -> None:
    """Download and verify the outputs of a job, or one checkpoint.

    After an interruption, repeat the command: it fetches the remaining files. An existing file with different content
    is an error unless --force is given.
    """
    session = session_of(context)
    if checkpoint is not None and so_far:
        raise CliError("--checkpoint and --so-far exclude each other", "Give one of them.")
    with session.client() as client:
        job = find_job(client, job_id)
        if checkpoint is not None:
            _fetch_checkpoint(session, client, job, checkpoint, directory, force=force, as_json=as_json)
            return
        if so_far:
            job = with_stored_outputs(client, job)
        else:
            _require_outputs(job)
        have, missing, total_bytes = fetch_outputs(
            client, job, directory, session.cancel, force=force, bar=session.output.bytes_bar
        )
    unverified = [artifact.path for artifact in missing if artifact.crc64nvme is None and artifact.blake3 is None]
    if job.state is not JobState.COMPLETE:
        session.output.note(f"The job is {job.state.value}: its files become outputs when the job is complete.")
    elif unverified:
        session.output.note(f"Not verified, because the job declared no checksum: {', '.join(unverified)}")
    if as_json:
        files = [
            {"path": one.path, "size_bytes": one.size_bytes, "fetched": one.path not in have} for one in job.artifacts
        ]
        session.output.json({"id": job.id, "directory": str(directory), "files": files, "bytes": total_bytes})
    else:
        session.output.line(
            f"{count(len(missing), 'file')} ({size(total_bytes)}) fetched into {directory}, "
            f"{count(len(have), 'file')} unchanged"
        )


@dataclass(frozen=True)
class _ChosenCheckpoint:
    """A checkpoint that a user reads, in place of a claim."""

    id: str
    resume: Sequence[CheckpointRef]
    lease_token: str = ""

    @property
    def checkpoint_job(self) -> str:
        return self.id


class _CheckpointReader:
    """Calls of a restore with a user's key, which can report no damage."""

    def __init__(self, client: BatonClient) -> None:
        self._client = client

    def blob_urls(self, job_id: str, step: int, blake3: Sequence[str], *, lease_token: str | None = None) -> BlobUrls:
        """Return presigned URLs of packs."""
        return self._client.blob_urls(job_id, step, blake3)

    def report_damaged(self, job_id: str, step: int, lease_token: str, *, epoch: int, message: str) -> None:
        """Raise CliError with the damaged step and the remedy."""
        raise CliError(
            f"the checkpoint of step {step} is damaged: {message}",
            f"Choose another step: baton show {job_id[:SHOWN_ID_CHARACTERS]}",
            exit_code=ExitCode.FAILED,
        )


def _fetch_checkpoint(
    session: CliSession, client: BatonClient, job: JobView, step: int, directory: Path, *, force: bool, as_json: bool
) -> None:
    # Numpy and the codecs take some 100 ms to load, which no other command needs.
    from gpu_client.checkpoints.restore.checkpoint_restore import restore

    with lock_directory(directory):
        place = directory / f"checkpoint-{step}"
        if place.exists() and not force:
            raise CliError(f"{place} exists", "Remove the directory, or give --force to replace it.")
        ref = client.blob_urls(job.id, step, []).checkpoint
        if ref is None:
            raise CliError("this control plane is older and names no manifest", "Update the control plane.")
        with session.output.bytes_bar("downloading", ref.total_bytes) as moved:
            restored = restore(
                _CheckpointReader(client),
                client.transfer,
                _ChosenCheckpoint(job.id, [ref]),
                directory,
                cancel=session.cancel,
                progress=moved,
            )
        assert restored is not None, "a checkpoint is restored, or an error says why not"
    if as_json:
        session.output.json({"id": job.id, "directory": str(place), "step": step, "bytes": restored.total_bytes})
    else:
        session.output.line(f"checkpoint of step {step} ({size(restored.total_bytes)}) fetched into {place}")


class FetchResult(NamedTuple):
    """Existing paths, downloaded outputs, and the downloaded bytes."""

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
) -> FetchResult:
    """Download and verify the missing outputs. `bar` shows the progress. Raises CliError, see `find_present`."""
    with lock_directory(directory):
        have = find_present(job.artifacts, directory, cancel, force=force)
        missing = [artifact for artifact in job.artifacts if artifact.path not in have]
        total_bytes = sum(artifact.size_bytes or 0 for artifact in missing)
        with bar("downloading", total_bytes) as moved:
            client.fetch_objects([_download_request(one, directory) for one in missing], cancel=cancel, progress=moved)
    return FetchResult(have, missing, total_bytes)


def _require_outputs(job: JobView) -> None:
    if job.state is not JobState.COMPLETE:
        short = job.id[:SHOWN_ID_CHARACTERS]
        remedy = (
            f"Run the job again: baton retry {short}"
            if job.state.terminal
            else f"Wait for the job: baton watch {short}"
        )
        raise CliError(
            f"job {job.id} is {job.state.value}; outputs exist once a job is complete",
            remedy,
            exit_code=ExitCode.FAILED,
        )
    if not job.artifacts:
        raise CliError(f"job {job.id} declared no outputs", "Declare outputs in the field 'outputs' of the job file.")


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Create and lock the directory for this process. Raises CliError."""
    if directory.exists() and not directory.is_dir():
        raise CliError(f"{directory} is not a directory", "Give another path.")
    with local_errors(f"making {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CliError(f"another fetch into {directory} is running", "Wait until it ends.") from None
        yield
    finally:
        os.close(descriptor)


def find_present(artifacts: Sequence[Artifact], directory: Path, cancel: CancelEvent, *, force: bool) -> set[str]:
    """Return the paths of outputs that exist with the declared content; delete leftovers of a killed fetch.

    Raises CliError for files that would be overwritten.
    """
    for folder in {safe_destination(directory, artifact.path).parent for artifact in artifacts}:
        for leftover in (path for path in folder.iterdir() if TEMPORARY_NAME.fullmatch(path.name)):
            leftover.unlink(missing_ok=True)
    there = [artifact for artifact in artifacts if safe_destination(directory, artifact.path).exists()]
    with ThreadPoolExecutor(_HASHERS, thread_name_prefix="hash") as pool:
        same = list(pool.map(partial(_matches, directory=directory, cancel=cancel), there))
    other = [artifact.path for artifact, equal in zip(there, same, strict=True) if not equal]
    if other and not force:
        raise CliError(
            f"{', '.join(other[:3])}{', ...' if len(other) > 3 else ''} in {directory} would be overwritten",
            "Give another directory, or replace the files with --force.",
        )
    return {artifact.path for artifact, equal in zip(there, same, strict=True) if equal}


def _matches(artifact: Artifact, *, directory: Path, cancel: CancelEvent) -> bool:
    """Compare a file with its declared checksum, or with its size if no checksum is declared."""
    path = directory / artifact.path
    if artifact.size_bytes not in (None, path.stat().st_size):
        return False
    if artifact.blake3 is None and artifact.crc64nvme is None:
        return True
    found = hash_file(path, cancel=cancel)
    return artifact.blake3 in (None, found.blake3) and artifact.crc64nvme in (None, found.crc64nvme)


def _download_request(artifact: Artifact, directory: Path) -> Wanted:
    return Wanted(
        bucket=artifact.bucket,
        key=artifact.key,
        root=directory,
        path=artifact.path,
        size_bytes=artifact.size_bytes,
        blake3=artifact.blake3,
        crc64nvme=artifact.crc64nvme,
    )


class StoredOutputs:
    """Stored outputs of a job's last attempt, by path."""

    def __init__(self, client: BatonClient, job_id: str) -> None:
        """List the outputs. Raises ApiError, Unreachable, UnexpectedAnswer."""
        self.by_path: dict[str, StoredArtifact] = {}
        self.expires_in_s = 0
        """Lifetime of the presigned URLs in seconds."""
        for page in pages(lambda cursor: client.artifacts(job_id, limit=_PER_PAGE, cursor=cursor)):
            self.expires_in_s = page.expires_in_s
            for one in page.artifacts:
                other = self.by_path.get(one.path)
                if other is None or other.epoch <= one.epoch:
                    self.by_path[one.path] = one


def with_stored_outputs(client: BatonClient, job: JobView) -> JobView:
    """Return the job with its stored files as outputs; return a complete job unchanged."""
    if job.state is JobState.COMPLETE:
        return job
    so_far = [
        {"path": one.path, "bucket": one.bucket, "key": one.key, "size_bytes": one.size_bytes}
        for one in StoredOutputs(client, job.id).by_path.values()
    ]
    return JobView.model_validate({**job.model_dump(), "artifacts": so_far})
