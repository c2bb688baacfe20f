"""Command group `baton data`: upload new and changed files, list stored objects."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from baton.contract.base import path_problem
from baton.contract.names import DATA_BUCKET, RINGS_PREFIX
from baton.contract.objects.dataset_manifest import is_manifest
from baton.contract.objects.parts import MAX_PARTED_BYTES, count_parts, part_bytes_of
from baton.contract.objects.transfers import ObjectView
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import count, moment, size
from gpu_client.cli.core.output import FOLDED, TableColumn
from gpu_client.cli.core.session import AsJson, session_of
from gpu_client.cli.data.dataset_manifest import PushManifests, require_manifest_capacity
from gpu_client.cli.data.prefetch import prefetch
from gpu_client.cli.data.validate import Captions, MinSide, has_image_name, require_valid_images, validate
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.api.objects import files_below
from gpu_client.transport.errors import TransferError
from gpu_client.transport.net.cancellation import CancelEvent, stop_if_set
from gpu_client.transport.net.digests import FileDigest
from gpu_client.transport.net.files import local_errors

if TYPE_CHECKING:
    from hashlib import _Hash as Digest

_READ_BYTES = 1024 * 1024
_HASHERS = 4
_SHOWN_EXTRA = 3
"""Number of extra stored files that a message lists by name."""

data = typer.Typer(help="Upload, check and list the files that jobs read.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the command group."""
    data.command("validate")(validate)
    data.command("prefetch")(prefetch)
    app.add_typer(data, name="data")


@dataclass(frozen=True)
class PushPlan:
    """Files to upload by key, and the number of unchanged stored files."""

    send: dict[str, Path]
    send_bytes: int
    unchanged: int


@data.command("push")
def push(
    context: typer.Context,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory to upload, with all subdirectories.", show_default=False)
    ],
    prefix: Annotated[
        str, typer.Argument(metavar="PREFIX", help="Key prefix of the uploaded files: PREFIX/...", show_default=False)
    ],
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the planned uploads without sending anything.")
    ] = False,
    check: Annotated[bool, typer.Option(help="Check new images, new masks and all captions before the upload.")] = True,
    captions: Captions = False,
    min_side: MinSide = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete stored files below PREFIX/ that are not in DIR.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Upload the new and changed files of a directory.

    If DIR contains images, the command first checks new and changed images, their masks and all captions, as `baton
    data validate` does. A fault prevents the upload. Duplicates are searched among the new images only.

    Stored files below PREFIX/ that are not in DIR stay part of the data set, unless --delete is given. The command
    prints their number.

    After an interruption, repeat the command: it uploads the remaining files. Until the push is complete, workers
    refuse the folder. The command finally writes the digest of each file; workers verify their inputs by these digests.
    """
    if not check and (captions or min_side is not None):
        raise CliError("--no-check excludes --captions and --min-side", "Remove one of these options.")
    session = session_of(context)
    files = list_local_files(directory, prefix)
    require_manifest_capacity(len(files))
    with session.client() as client:
        stored = _list_objects(client, DATA_BUCKET, _folder(prefix))
        plan = plan_push(files, stored, lambda path, parts: compute_etag(path, parts, session.cancel))
        extra = list_extra(files, stored)
        if check and plan.send and any(map(has_image_name, files.values())):
            require_valid_images(session.output, directory, plan.send.values(), captions=captions, min_side=min_side)
        if not dry_run:
            removed = extra if delete else []
            manifests = PushManifests(
                client, _folder(prefix), files, stored=stored, removed=removed, cancel=session.cancel
            )
            sent: dict[str, FileDigest] = {}
            manifests.begin(plan.send)
            if plan.send:
                with session.output.bytes_bar("uploading", plan.send_bytes) as moved:
                    sent = client.upload_files(DATA_BUCKET, plan.send, cancel=session.cancel, progress=moved)
            client.delete_objects(DATA_BUCKET, removed, cancel=session.cancel)
            manifests.finish(sent)
    if as_json:
        session.output.json(
            {
                "prefix": _folder(prefix),
                "sent": [] if dry_run else sorted(plan.send),
                "to_send": sorted(plan.send) if dry_run else [],
                "bytes": plan.send_bytes,
                "unchanged": plan.unchanged,
                "not_in_dir": extra,
                "deleted": extra if delete and not dry_run else [],
            }
        )
    else:
        verb = "would be sent" if dry_run else "sent"
        session.output.line(
            f"{count(len(plan.send), 'file')} ({size(plan.send_bytes)}) {verb} to {_folder(prefix)}, "
            f"{count(plan.unchanged, 'file')} unchanged"
        )
    if extra:
        session.output.note(_describe_extra(extra, directory, prefix, delete=delete, dry_run=dry_run))


def list_extra(files: Mapping[str, Path], stored: Mapping[str, ObjectView]) -> list[str]:
    """Return the stored keys that are not in the push, without manifests and objects of rings."""
    return sorted(
        key for key in stored if key not in files and not is_manifest(key) and not key.startswith(RINGS_PREFIX)
    )


def _describe_extra(extra: Sequence[str], directory: Path, prefix: str, *, delete: bool, dry_run: bool) -> str:
    """Describe the stored files that are not in the directory."""
    first = [key.removeprefix(_folder(prefix)) for key in extra[:_SHOWN_EXTRA]]
    named = ", ".join(first) + (", ..." if len(extra) > _SHOWN_EXTRA else "")
    extra_files = f"{count(len(extra), 'stored file')} below {_folder(prefix)}"
    if delete:
        return f"{'Would delete' if dry_run else 'Deleted'} {extra_files}, not in {directory}: {named}"
    return f"{extra_files}, not in {directory} but still in the data set: {named}; --delete removes them"


@data.command("ls")
def ls(
    context: typer.Context,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="List only keys with this prefix.")] = "",
    bucket: Annotated[str, typer.Option(help="Bucket name of the API.")] = DATA_BUCKET,
    as_json: AsJson = False,
) -> None:
    """List stored objects by key."""
    session = session_of(context)
    with session.client() as client:
        found = sorted(_list_objects(client, bucket, prefix).values(), key=lambda item: item.key)
    if as_json:
        session.output.json(found)
        return
    columns = (TableColumn("size", right=True), "changed", TableColumn("key", FOLDED))
    session.output.table(columns, ([size(item.size_bytes), moment(item.modified_at), item.key] for item in found))
    session.output.note(f"{count(len(found), 'object')}, {size(sum(item.size_bytes for item in found))}")


def list_local_files(directory: Path, prefix: str) -> dict[str, Path]:
    """Return the files of a push by key. Raises CliError for a file that cannot be stored."""
    problem = path_problem(prefix.rstrip("/")) if prefix else "is empty"
    if problem:
        raise CliError(f"the prefix {prefix[:80]!r} {problem}", "Use a name like digits or sets/digits.")
    if not directory.is_dir():
        raise CliError(f"{directory} is not a directory")
    try:
        files = files_below(directory, prefix=_folder(prefix))
        files = {key: path for key, path in files.items() if not is_manifest(key)}
    except TransferError as error:
        raise CliError(str(error), "Remove it from the directory: only regular files can be stored.") from error
    if not files:
        raise CliError(f"{directory} has no files")
    for key, path in files.items():
        problem = path_problem(key)
        if not problem and path.stat().st_size > MAX_PARTED_BYTES:
            problem = f"exceeds {size(MAX_PARTED_BYTES)}, the maximum object size"
        if problem:
            raise CliError(f"{str(path)!a} cannot be stored: its key {problem}", "Rename, move or split the file.")
    return files


def plan_push(
    files: Mapping[str, Path], stored: Mapping[str, ObjectView], compute_etag: Callable[[Path, int], str]
) -> PushPlan:
    """Exclude files that are stored with equal size and etag. `compute_etag(path, parts)`: parts is 0 for one upload.

    The etag of an object that S3 encrypts with a KMS key is not an MD5 and never matches. Therefore the push sends such
    a file again, unless the control plane recognizes the file by its checksum.
    """
    sizes = {key: path.stat().st_size for key, path in files.items()}
    alike = [key for key in files if key in stored and stored[key].size_bytes == sizes[key]]
    with ThreadPoolExecutor(_HASHERS, thread_name_prefix="md5") as pool:
        etags = pool.map(lambda key: compute_etag(files[key], _parts_of(stored[key].etag)), alike)
        same = {key for key, etag in zip(alike, etags, strict=True) if stored[key].etag.strip('"') == etag}
    send = {key: path for key, path in files.items() if key not in same}
    return PushPlan(send, sum(sizes[key] for key in send), len(same))


def compute_etag(path: Path, parts: int, cancel: CancelEvent) -> str:
    """Compute the S3 etag of a file: its MD5, or for a multipart upload the MD5 of the parts' MD5s and their number.

    Returns "" if this client would upload the file in another number of parts. Raises TransferError, TransferCanceled.
    """
    with local_errors(f"reading {path}"), path.open("rb") as file:
        if not parts:
            return _md5(file, None, cancel).hexdigest()
        size_bytes = os.fstat(file.fileno()).st_size
        part_bytes = part_bytes_of(size_bytes)
        if count_parts(size_bytes, part_bytes) != parts:
            return ""
        digests = b"".join(_md5(file, part_bytes, cancel).digest() for _ in range(parts))
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{parts}"


def _md5(file: BinaryIO, most_bytes: int | None, cancel: CancelEvent) -> Digest:
    """Hash the next `most_bytes` bytes of a file, or all remaining bytes."""
    digest = hashlib.md5(usedforsecurity=False)
    left = most_bytes
    while piece := file.read(_READ_BYTES if left is None else min(left, _READ_BYTES)):
        stop_if_set(cancel)
        digest.update(piece)
        left = None if left is None else left - len(piece)
    return digest


def _parts_of(etag: str) -> int:
    """Return the number of parts in an S3 etag; 0 for a single upload."""
    count = etag.strip('"').partition("-")[2]
    return int(count) if count.isdecimal() else 0


def _folder(prefix: str) -> str:
    return prefix.rstrip("/") + "/"


def _list_objects(client: BatonClient, bucket: str, prefix: str) -> dict[str, ObjectView]:
    listed = pages(lambda cursor: client.list_objects(bucket, prefix=prefix, cursor=cursor))
    return {item.key: item for page in listed for item in page.objects}
