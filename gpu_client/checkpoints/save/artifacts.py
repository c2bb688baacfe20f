"""Collect, hash, declare and upload the outputs of a finished training; `complete` requires stored outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from baton.contract.base import MAX_PATH_BYTES
from baton.contract.objects.parts import MAX_PARTED_BYTES
from baton.contract.worker.calls import (
    MAX_ARTIFACT_PATHS_BYTES,
    MAX_ARTIFACTS,
    ArtifactsAnswer,
    DeclaredArtifact,
    WorkItem,
)
from gpu_client.checkpoints.local.directory_files import BadDirectory, require_storable, resolve_files, resolve_inside
from gpu_client.checkpoints.save.source_files import HASH_WORKERS
from gpu_client.transport.errors import BatonError
from gpu_client.transport.limits.thread_batch import run_batch
from gpu_client.transport.net.cancellation import CancelEvent, Flight
from gpu_client.transport.net.digests import FileDigest, hash_file
from gpu_client.transport.transfer.manager import Progress, Transfer
from gpu_client.transport.transfer.upload_rounds import LocalFile, Missing, Target, upload_in_rounds


class MissingOutput(BatonError):  # noqa: N818
    """Error of missing outputs. `paths`: the missing outputs, as declared."""

    def __init__(self, paths: Sequence[str], output_dir: str) -> None:
        self.paths = tuple(paths)
        super().__init__(f"the training left no {', '.join(self.paths)} in {output_dir}")


class ArtifactsApi(Protocol):
    """Control-plane API of an artifact upload, implemented by BatonClient."""

    def declare_artifacts(
        self, job_id: str, lease_token: str, artifacts: Sequence[DeclaredArtifact]
    ) -> ArtifactsAnswer:
        """Declare the artifacts. Returns the upload targets of the missing artifacts."""
        ...


def collect_outputs(
    output_dir: Path,
    outputs: Sequence[str],
    optional: Sequence[str] = (),
    *,
    on_left_out: Callable[[str], object] = lambda reason: None,
) -> dict[str, Path]:
    """Return the files of the declared outputs, by path below `output_dir`. A directory stands for its files.

    `optional` outputs may be missing. The function omits an optional output whose files exceed a job's limits of number
    or size as a whole, and passes the reason to `on_left_out`.

    Raises MissingOutput with all missing outputs (an empty directory counts as missing), BadDirectory for links that
    lead outside, and for files or paths that exceed a job's limits.
    """
    root = output_dir.resolve()
    files: dict[str, Path] = {}
    missing: list[str] = []
    for output in outputs:
        found = _files_of_output(root, output)
        if not found:
            missing.append(output)
        files |= found
    if missing:
        raise MissingOutput(missing, str(output_dir))
    _require_declarable(files)
    for output in optional:
        extended = files | _files_of_output(root, output)
        try:
            _require_declarable(extended)
        except BadDirectory as error:
            on_left_out(f"{output} is left out: {error}")
        else:
            files = extended
    return dict(sorted(files.items()))


def _files_of_output(root: Path, output: str) -> dict[str, Path]:
    """Return the files of one output; {} if the output does not exist or is an empty directory."""
    place = root / output
    if not place.exists():
        return {}
    place = resolve_inside(root, place, output)
    if place.is_dir():
        return {f"{output}/{path}": file for path, file in resolve_files(place, within=root).items()}
    if not place.is_file():
        raise BadDirectory(f"output {output!r} is neither a file nor a directory")
    return {output: place}


def _require_declarable(files: Mapping[str, Path]) -> None:
    if len(files) > MAX_ARTIFACTS:
        raise BadDirectory(f"the outputs are {len(files)} files; at most {MAX_ARTIFACTS} are allowed")
    size_bytes = sum(len(path.encode()) for path in files)
    if size_bytes > MAX_ARTIFACT_PATHS_BYTES:
        raise BadDirectory(
            f"the paths of the outputs have {size_bytes} bytes; at most {MAX_ARTIFACT_PATHS_BYTES} are allowed"
        )
    require_storable(files, max_path_bytes=MAX_PATH_BYTES, max_bytes=MAX_PARTED_BYTES)


def upload_artifacts(
    client: ArtifactsApi,
    transfer: Transfer,
    item: WorkItem,
    files: Mapping[str, Path],
    *,
    cancel: CancelEvent | None = None,
    progress: Progress | None = None,
) -> list[DeclaredArtifact]:
    """Upload the files from `collect_outputs`. Returns the artifacts for `complete`.

    The function makes one API call for small files, another for files in parts, and another for each expiry of URLs.
    Raises the errors of hashing and the transfer, and ApiError, such as LeaseLost.
    """
    if not files:
        return []
    digests = hash_files(files, cancel=cancel)
    artifacts = {
        path: DeclaredArtifact(
            path=path, size_bytes=digest.size_bytes, crc64nvme=digest.crc64nvme, blake3=digest.blake3
        )
        for path, digest in digests.items()
    }

    def missing(paths: Sequence[str]) -> Missing:
        declared = [_with_parts(artifacts[path], digests[path]) for path in paths]
        answer = client.declare_artifacts(item.id, item.lease_token, declared)
        targets = [
            Target(name=target.name, url=target.url, headers=target.headers, part=target.part)
            for target in answer.missing
        ]
        return Missing(targets, frozenset(answer.pending))

    upload_in_rounds(
        transfer,
        {path: LocalFile(files[path], digest) for path, digest in digests.items()},
        missing,
        traffic="artifact",
        cancel=cancel,
        progress=progress,
    )
    return list(artifacts.values())


def _with_parts(artifact: DeclaredArtifact, digest: FileDigest) -> DeclaredArtifact:
    # pydantic omits unset fields, therefore `parts` stays unset for small files.
    return artifact if digest.parts is None else artifact.model_copy(update={"parts": digest.parts})


def hash_files(files: Mapping[str, Path], *, cancel: CancelEvent | None = None) -> dict[str, FileDigest]:
    """Return the digest of each file by name, in the order of `files`. Raises the errors of `hash_file`."""
    digests: dict[str, FileDigest] = {}

    def work(entry: tuple[str, Path], flight: Flight) -> None:
        name, path = entry
        digests[name] = hash_file(path, cancel=flight)

    run_batch(list(files.items()), work, workers=HASH_WORKERS, cancel=cancel)
    return {name: digests[name] for name in files}
