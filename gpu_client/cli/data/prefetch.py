"""Command `baton data prefetch`: fetch a rank's share of data sets before a training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from gpu_client.cli.core.errors import CliError, ExitCode
from gpu_client.cli.core.formats import count, size
from gpu_client.cli.core.output import FOLDED, TableColumn
from gpu_client.cli.core.session import AsJson, CliSession, connect, session_of
from gpu_client.cli.data.fetch import lock_directory
from gpu_client.datasets.prefetch.errors import PrefetchCode, PrefetchError
from gpu_client.datasets.prefetch.hub import DEFAULT_ENDPOINT, HUB_POLICY, HUB_PREFIX, HubDataSet, read_hub_token
from gpu_client.datasets.prefetch.prefetcher import Prefetcher, WantedFile
from gpu_client.datasets.prefetch.pushed import PushedDataSet
from gpu_client.datasets.prefetch.selection import (
    FileSource,
    ListedSource,
    PrefetchManifest,
    select_files,
    split_ratio,
)
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.net.connections import Connections
from gpu_client.transport.transfer.manager import Transfer

_EXIT_CODES = {
    PrefetchCode.INVALID_SOURCE: ExitCode.USAGE,
    PrefetchCode.NO_FILES: ExitCode.USAGE,
    PrefetchCode.SOURCE_MISSING: ExitCode.REFUSED,
    PrefetchCode.SOURCE_REFUSED: ExitCode.REFUSED,
}
"""Exit codes other than FAILED."""


def prefetch(
    context: typer.Context,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME[:RATIO]",
            help="Prefix of a pushed data set, or hf:ORG/NAME, hf:ORG/NAME@REVISION/FOLDER on the Hugging Face Hub.",
            show_default=False,
        ),
    ],
    *,
    rank: Annotated[int, typer.Option(min=0, help="Rank of this machine.")] = 0,
    world: Annotated[int, typer.Option(min=1, help="Number of ranks that share the files.")] = 1,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Maximum number of connections.")] = 8,
    filters: Annotated[
        list[str] | None,
        typer.Option("--filter", metavar="TEXT", help="Select files with TEXT in their path; repeatable: any TEXT."),
    ] = None,
    max_files: Annotated[int | None, typer.Option(min=1, help="Maximum number of files of all sources.")] = None,
    into: Annotated[Path, typer.Option(metavar="DIR", help="Target directory of this rank.")] = Path("datasets"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the files without fetching them.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch and verify this rank's share of data sets, and write DIR/prefetch.json.

    A rank takes every WORLD-th file of each source, by path. With ratios (hf:a/x:55 hf:b/y:10), the numbers of files
    are proportional to the ratios.

    After an interruption, repeat the command: partial files continue, finished files are verified and kept. The Hub's
    token comes from HF_TOKEN or from `hf auth login`.
    """
    session = session_of(context)
    if rank >= world:
        raise CliError(f"--rank is {rank}, with {world} ranks", f"Ranks are 0 to {world - 1}.")
    try:
        with ExitStack() as stack:
            listed, transfer = _list_sources(session, sources, threads, stack)
            selected = select_files(listed, rank=rank, world=world, filters=filters or (), max_files=max_files)
            manifest = PrefetchManifest(rank=rank, world=world, sources=selected)
            wanted = [
                WantedFile(one.source, file) for one, part in zip(listed, selected, strict=True) for file in part.files
            ]
            missing = wanted
            if not dry_run:
                stack.enter_context(lock_directory(into))
                prefetcher = Prefetcher(into, transfer, threads=threads, cancel=session.cancel)
                missing = _fetch(session, prefetcher, wanted, manifest)
    except PrefetchError as error:
        exit_code = _EXIT_CODES.get(error.code, ExitCode.FAILED)
        raise CliError(str(error), error.remedy, problems=error.problems, exit_code=exit_code) from error
    fetched_bytes = sum(one.file.size_bytes for one in missing)
    if as_json:
        fetched = {"files": len(missing), "bytes": fetched_bytes}
        counted = {"to_fetch" if dry_run else "fetched": fetched}
        session.output.json({"directory": str(into), **counted, **manifest.model_dump()})
        return
    if dry_run:
        columns = (TableColumn("size", right=True), TableColumn("file", FOLDED))
        session.output.table(columns, ([size(one.file.size_bytes), one.file.path] for one in wanted))
    verb = "would be fetched" if dry_run else "fetched"
    session.output.line(
        f"{count(len(missing), 'file')} ({size(fetched_bytes)}) {verb} into {into}, "
        f"{count(len(wanted) - len(missing), 'file')} unchanged"
    )


def _list_sources(
    session: CliSession, names: Sequence[str], threads: int, stack: ExitStack
) -> tuple[list[ListedSource], Transfer]:
    """List the files of the sources. Only a pushed data set needs a profile."""
    connections = Connections(max_idle=threads)
    transfer = Transfer(workers=threads, policy=HUB_POLICY, connections=connections)
    stack.callback(transfer.close)
    client: BatonClient | None = None
    listed = []
    for name, ratio in map(split_ratio, names):
        source: FileSource
        if name.startswith(HUB_PREFIX):
            endpoint = session.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT
            token = read_hub_token(session.environ)
            source = HubDataSet(name, token=token, endpoint=endpoint, connections=connections, policy=HUB_POLICY)
        else:
            client = client or stack.enter_context(connect(session.profile(), transfer=transfer))
            source = PushedDataSet(name, client)
        listed.append(ListedSource(source, ratio, *source.list_files(session.cancel)))
    return listed, transfer


def _fetch(
    session: CliSession, prefetcher: Prefetcher, wanted: Sequence[WantedFile], manifest: PrefetchManifest
) -> list[WantedFile]:
    """Fetch the missing files, write the manifest, and return the fetched files."""
    with session.output.bytes_bar("verifying", sum(one.file.size_bytes for one in wanted)) as verified:
        missing = prefetcher.find_missing(wanted, verified)
    if missing:
        with session.output.bytes_bar("downloading", sum(one.file.size_bytes for one in missing)) as moved:
            prefetcher.fetch(missing, moved)
    prefetcher.finish(manifest)
    return missing
