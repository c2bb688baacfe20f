"""The outputs of a finished training: found, hashed, declared, uploaded. Only then may the job be called complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from contract.base import MAX_PATH_BYTES
from contract.parts import MAX_PARTED_BYTES
from contract.work import MAX_ARTIFACT_PATHS_BYTES, MAX_ARTIFACTS, ArtifactsAnswer, DeclaredArtifact, WorkItem
from gpu_client.checkpoints.errors import BadDirectory, MissingOutput
from gpu_client.checkpoints.hashing import FileDigest, hash_files
from gpu_client.checkpoints.tree import files_of, inside, require_storable
from gpu_client.transport.cancel import CancelEvent
from gpu_client.transport.rounds import LocalFile, Missing, Target, upload_in_rounds
from gpu_client.transport.transfer import Progress, Transfer

__all__ = ["MissingOutput", "collect_outputs", "upload_artifacts"]


class ArtifactsApi(Protocol):
    """The one call that is needed; BatonClient has it."""

    def declare_artifacts(
        self, job_id: str, lease_token: str, artifacts: Sequence[DeclaredArtifact]
    ) -> ArtifactsAnswer:
        """Say what will be uploaded."""
        ...


def collect_outputs(output_dir: Path, outputs: Sequence[str], shared: Sequence[str] = ()) -> dict[str, Path]:
    """The files of the declared outputs by path below `output_dir`; an output that is a directory stands for its files.

    Besides, those of the files for later jobs (`shared`) that are there.

    Raises MissingOutput naming all outputs that do not exist (an empty directory counts as missing), BadDirectory for
    links that lead outside, and for more or larger files or longer paths than a job may declare.
    """
    root = output_dir.resolve()
    files: dict[str, Path] = {}
    missing: list[str] = []
    for output in outputs:
        place = root / output
        if not place.exists():
            missing.append(output)
            continue
        place = inside(root, place, output)
        if place.is_dir():
            found = {f"{output}/{path}": file for path, file in files_of(place, within=root).items()}
        elif place.is_file():
            found = {output: place}
        else:
            raise BadDirectory(f"output {output!r} is neither a file nor a directory")
        if not found:
            missing.append(output)
        files |= found
    for path in shared:
        if (root / path).is_file() and len(files) < MAX_ARTIFACTS:
            files[path] = inside(root, root / path, path)
    if missing:
        raise MissingOutput(missing, str(output_dir))
    if len(files) > MAX_ARTIFACTS:
        raise BadDirectory(f"the outputs are {len(files)} files; at most {MAX_ARTIFACTS} are allowed")
    size_bytes = sum(len(path.encode()) for path in files)
    if size_bytes > MAX_ARTIFACT_PATHS_BYTES:
        raise BadDirectory(
            f"the paths of the outputs have {size_bytes} bytes; at most {MAX_ARTIFACT_PATHS_BYTES} are allowed"
        )
    require_storable(files, max_path_bytes=MAX_PATH_BYTES, max_bytes=MAX_PARTED_BYTES)
    return dict(sorted(files.items()))


def upload_artifacts(
    client: ArtifactsApi,
    transfer: Transfer,
    item: WorkItem,
    files: Mapping[str, Path],
    *,
    cancel: CancelEvent | None = None,
    progress: Progress | None = None,
) -> list[DeclaredArtifact]:
    """Upload the files (from `collect_outputs`) and return what `complete` has to declare; none are fine too.

    One API call for small files, one more for those that go up in parts, and more if URLs run out. Raises what hashing
    and the transfer raise, and ApiError, above all LeaseLost.
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
    # only where there are any: an older control plane refuses fields that it does not know
    return artifact if digest.parts is None else artifact.model_copy(update={"parts": digest.parts})
