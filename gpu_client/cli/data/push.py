"""`baton data`: files up, only what is new; and what is there."""

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
from baton.contract.datasets import is_manifest
from baton.contract.names import DATA_BUCKET, RINGS_PREFIX
from baton.contract.parts import MAX_PARTED_BYTES, count_parts, part_bytes_of
from baton.contract.transfers import ObjectView
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import count, moment, size
from gpu_client.cli.core.output import FOLDED, Column
from gpu_client.cli.core.session import AsJson, session_of
from gpu_client.cli.data.dataset_manifest import Manifests, require_room
from gpu_client.cli.data.validate import Captions, MinSide, named_as_image, require_sound, validate
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
_NAMED = 3
"""Of the files that are stored and not in the directory so many are told by name."""

data = typer.Typer(help="Files that jobs read.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the group."""
    data.command("validate")(validate)
    app.add_typer(data, name="data")


@dataclass(frozen=True)
class PushPlan:
    """What a push has to send: keys and files. `unchanged` files are stored already."""

    send: dict[str, Path]
    send_bytes: int
    unchanged: int


@data.command("push")
def push(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="All files below it.", show_default=False)],
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Where to: PREFIX/...", show_default=False)],
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent, and send nothing.")] = False,
    check: Annotated[
        bool, typer.Option(help="Look at new images and masks, and all captions, before anything is sent.")
    ] = True,
    captions: Captions = False,
    min_side: MinSide = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete what is stored below PREFIX/ and is not in DIR, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Upload what is new or changed below DIR.

    Where there are images, those that are new or changed are looked at first, and masks, and all captions, as
    `baton data validate` does: with a fault nothing is sent. Copies are sought among the new ones only.

    What is stored below PREFIX/ and is no file of DIR stays there, and in the data set, unless --delete says otherwise:
    it is told how many files that are.

    Interrupted, the same command sends the rest; until then workers refuse the folder. They verify what they fetch by
    the digests that it writes last.
    """
    if not check and (captions or min_side is not None):
        raise CliError("--no-check looks at nothing, and --captions and --min-side ask for a look", "Leave one out.")
    session = session_of(context)
    files = local_files(directory, prefix)
    require_room(len(files))
    with session.client() as client:
        stored = _listed(client, DATA_BUCKET, _folder(prefix))
        plan = plan_push(files, stored, lambda path, parts: etag_of(path, parts, session.cancel))
        extra = not_among(files, stored)
        if check and plan.send and any(map(named_as_image, files.values())):
            require_sound(session.screen, directory, plan.send.values(), captions=captions, min_side=min_side)
        if not dry_run:
            removed = extra if delete else []
            manifests = Manifests(client, _folder(prefix), files, stored=stored, removed=removed, cancel=session.cancel)
            sent: dict[str, FileDigest] = {}
            manifests.begin(plan.send)
            if plan.send:
                with session.screen.bytes_bar("uploading", plan.send_bytes) as moved:
                    sent = client.upload_files(DATA_BUCKET, plan.send, cancel=session.cancel, progress=moved)
            client.delete_objects(DATA_BUCKET, removed, cancel=session.cancel)
            manifests.finish(sent)
    if as_json:
        session.screen.json(
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
        session.screen.line(
            f"{count(len(plan.send), 'file')} ({size(plan.send_bytes)}) {verb} to {_folder(prefix)}, "
            f"{count(plan.unchanged, 'file')} there already"
        )
    if extra:
        session.screen.say(_told(extra, directory, prefix, delete=delete, dry_run=dry_run))


def not_among(files: Mapping[str, Path], stored: Mapping[str, ObjectView]) -> list[str]:
    """Keys of what is stored beside the files of a push. Manifests are no files, and what rings store is theirs."""
    return sorted(
        key for key in stored if key not in files and not is_manifest(key) and not key.startswith(RINGS_PREFIX)
    )


def _told(extra: Sequence[str], directory: Path, prefix: str, *, delete: bool, dry_run: bool) -> str:
    """What became of the files that are stored and not in the directory."""
    first = [key.removeprefix(_folder(prefix)) for key in extra[:_NAMED]]
    named = ", ".join(first) + (", ..." if len(extra) > _NAMED else "")
    what = f"{count(len(extra), 'stored file')} below {_folder(prefix)}"
    if delete:
        return f"{'Would delete' if dry_run else 'Deleted'} {what}, not in {directory}: {named}"
    return f"{what}, not in {directory} but still of the data set: {named}; --delete removes what is not there"


@data.command("ls")
def ls(
    context: typer.Context,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only keys that begin with it.")] = "",
    bucket: Annotated[str, typer.Option(help="As the API names it.")] = DATA_BUCKET,
    as_json: AsJson = False,
) -> None:
    """List stored objects by key."""
    session = session_of(context)
    with session.client() as client:
        found = sorted(_listed(client, bucket, prefix).values(), key=lambda item: item.key)
    if as_json:
        session.screen.json(found)
        return
    columns = (Column("size", right=True), "changed", Column("key", FOLDED))
    session.screen.table(columns, ([size(item.size_bytes), moment(item.modified_at), item.key] for item in found))
    session.screen.say(f"{count(len(found), 'object')}, {size(sum(item.size_bytes for item in found))}")


def local_files(directory: Path, prefix: str) -> dict[str, Path]:
    """Keys and files of a push. Raises CliError for what cannot be stored, before anything is sent."""
    problem = path_problem(prefix.rstrip("/")) if prefix else "is empty"
    if problem:
        raise CliError(f"the prefix {prefix[:80]!r} {problem}", "Use a name like digits or sets/digits.")
    if not directory.is_dir():
        raise CliError(f"{directory} is not a directory")
    try:
        files = files_below(directory, prefix=_folder(prefix))
        files = {key: path for key, path in files.items() if not is_manifest(key)}
    except TransferError as error:
        raise CliError(str(error), "Move it elsewhere: only files can be stored.") from error
    if not files:
        raise CliError(f"{directory} has no files")
    for key, path in files.items():
        problem = path_problem(key)
        if not problem and path.stat().st_size > MAX_PARTED_BYTES:
            problem = f"has more than {size(MAX_PARTED_BYTES)}, the largest object"
        if problem:
            raise CliError(f"{str(path)!a} cannot be stored: its key {problem}", "Rename, move or split it.")
    return files


def plan_push(
    files: Mapping[str, Path], stored: Mapping[str, ObjectView], etag_of: Callable[[Path, int], str]
) -> PushPlan:
    """Leave out what is stored with the same size and etag. `etag_of`: a path, uploaded in so many parts or 0.

    An etag that S3 has not made from MD5s (of an object encrypted with a key of one's own, say) is no file's: such
    files are sent, unless the control plane knows them by their checksum.
    """
    sizes = {key: path.stat().st_size for key, path in files.items()}
    alike = [key for key in files if key in stored and stored[key].size_bytes == sizes[key]]
    with ThreadPoolExecutor(_HASHERS, thread_name_prefix="md5") as pool:
        etags = pool.map(lambda key: etag_of(files[key], _parts_of(stored[key].etag)), alike)
        same = {key for key, etag in zip(alike, etags, strict=True) if stored[key].etag.strip('"') == etag}
    send = {key: path for key, path in files.items() if key not in same}
    return PushPlan(send, sum(sizes[key] for key in send), len(same))


def etag_of(path: Path, parts: int, cancel: CancelEvent) -> str:
    """The etag that S3 gives to a file: its MD5, or uploaded in parts the MD5 of theirs, and how many there are.

    Empty if our uploads of this file have not so many parts. Raises TransferError, TransferCanceled.
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
    """Of the next bytes of a file: so many, or all."""
    digest = hashlib.md5(usedforsecurity=False)
    left = most_bytes
    while piece := file.read(_READ_BYTES if left is None else min(left, _READ_BYTES)):
        stop_if_set(cancel)
        digest.update(piece)
        left = None if left is None else left - len(piece)
    return digest


def _parts_of(etag: str) -> int:
    """How many parts S3 says an object was uploaded in; 0 for one that was not."""
    count = etag.strip('"').partition("-")[2]
    return int(count) if count.isdecimal() else 0


def _folder(prefix: str) -> str:
    return prefix.rstrip("/") + "/"


def _listed(client: BatonClient, bucket: str, prefix: str) -> dict[str, ObjectView]:
    listed = pages(lambda cursor: client.list_objects(bucket, prefix=prefix, cursor=cursor))
    return {item.key: item for page in listed for item in page.objects}
