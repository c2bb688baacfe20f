"""Command group `baton ring`: create, inspect, repair, measure and delete rings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count as counting
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpu_client.cli.core.errors import CliError, ExitCode
from gpu_client.cli.core.formats import count, moment
from gpu_client.cli.core.output import CommandOutput
from gpu_client.cli.core.session import AsJson, CliSession, session_of
from gpu_client.transport.api.calls import pages

if TYPE_CHECKING:
    from gpu_client.ring.tools.status import RingStatus


ring_app = typer.Typer(no_args_is_help=True, help="Manage rings: circular caches of generated samples.")

Place = Annotated[
    str, typer.Argument(metavar="RING", help="Directory, s3://BUCKET/PREFIX or baton:NAME.", show_default=False)
]


def register(app: typer.Typer) -> None:
    """Add the group `ring` to the program."""
    app.add_typer(ring_app, name="ring")


@ring_app.command()
def make(
    context: typer.Context,
    place: Place,
    *,
    setting: Annotated[
        list[str],
        typer.Option("--set", metavar="NAME=VALUE", help="Setting, see docs/ring.md; repeatable; cap is required."),
    ],
    as_json: AsJson = False,
) -> None:
    """Create a ring, or check that an existing ring has these settings."""
    session = session_of(context)
    with ring_errors():
        from pydantic import ValidationError

        from gpu_client.ring.core.ring import make_ring
        from gpu_client.ring.settings import RingSettings

        given = dict(_parse_setting(one) for one in setting)
        try:
            settings = RingSettings.model_validate_strings(given)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, one['loc'])) or 'settings'}: {one['msg']}" for one in error.errors()]
            raise CliError("invalid ring settings", problems=problems) from error
        ring = make_ring(place, settings)
    if as_json:
        session.output.json(ring.settings.model_dump(mode="json"))
        return
    session.output.note(f"{place} is a ring of {count(ring.settings.cap, 'sample')}, {ring.settings.mode}")


@ring_app.command()
def status(context: typer.Context, place: Place, *, as_json: AsJson = False) -> None:
    """Show fill level, sample age, writers and readers of a ring."""
    session = session_of(context)
    with ring_errors():
        from gpu_client.ring.core.ring import open_ring
        from gpu_client.ring.tools.status import read_status

        found = read_status(open_ring(place))
    if as_json:
        session.output.json({**asdict(found), "reuse": found.reuse})
    else:
        show_status(session.output, found, None)


@ring_app.command()
def watch(
    context: typer.Context,
    place: Place,
    *,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
    limit: Annotated[
        int | None, typer.Option("--looks", min=1, help="Number of updates. Default: until Ctrl-C.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the status of a ring repeatedly, with rates.

    --json: one line per update.
    """
    session = session_of(context)
    with ring_errors(), _open_display(session.output, place, as_json=as_json) as shown:
        from gpu_client.ring.core.ring import open_ring
        from gpu_client.ring.errors import RingError
        from gpu_client.ring.tools.status import read_status

        ring = open_ring(place)
        shown(read_status(ring))
        silent = False
        for number in counting(1):
            if number == limit or session.cancel.wait(every):
                return
            try:
                shown(read_status(ring))
                silent = False
            except (RingError, OSError) as error:
                if not silent:
                    session.output.note(f"{error}. Retrying; Ctrl-C ends the command.")
                silent = True


@ring_app.command()
def verify(
    context: typer.Context,
    place: Place,
    *,
    repair: Annotated[
        bool, typer.Option("--repair", help="Point to the newest intact manifest and exclude damaged samples.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read and verify all readable objects.

    Exit code 1 if damage remains.
    """
    session = session_of(context)
    with ring_errors():
        from gpu_client.ring.core.repair import inspect_ring, repair_ring
        from gpu_client.ring.core.ring import open_ring

        ring = open_ring(place)
        found = repair_ring(ring) if repair else inspect_ring(ring)
        newest = ring.newest() if repair else None
    if as_json:
        result = {"objects": found.read, "damaged": found.damaged}
        session.output.json(
            result if newest is None else {**result, "manifest": newest.number, "readable": len(newest)}
        )
    else:
        for key, why in found.damaged.items():
            session.output.line(why if key in why else f"{key}: {why}")
        session.output.note(f"{count(found.read, 'object')} read, {len(found.damaged)} damaged")
        if newest is not None and found.damaged:
            session.output.note(f"repaired: {count(len(newest), 'sample')} readable in manifest {newest.number}")
        elif found.damaged:
            session.output.note("Exclude the damaged objects with: baton ring verify RING --repair")
    if found.damaged and not repair:
        raise typer.Exit(ExitCode.FAILED)


@ring_app.command()
def publish(context: typer.Context, place: Place, *, as_json: AsJson = False) -> None:
    """Publish all finished samples, even an incomplete generation."""
    session = session_of(context)
    with ring_errors():
        from gpu_client.ring.core.ring import open_ring

        ring = open_ring(place)
        while ring.publish(at_once=True) is not None:
            pass
        newest = ring.newest()
    if as_json:
        session.output.json({"manifest": newest.number, "readable": len(newest), "inserted": newest.inserted})
        return
    session.output.note(f"{count(len(newest), 'sample')} readable in manifest {newest.number}")


@ring_app.command(name="record")
def record_samples(
    context: typer.Context,
    place: Place,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory of the new data set.", show_default=False)
    ],
    *,
    samples: Annotated[int, typer.Option(min=1, help="Number of distinct samples to record; waits until they arrive.")],
    shard: Annotated[int, typer.Option(min=1, help="Samples per shard file.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the shuffle.")] = 0,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the next new sample before failing.")
    ] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Record samples of a ring as a permanent data set.

    The samples are shuffled and written in shards.
    """
    session = session_of(context)
    with ring_errors():
        from gpu_client.ring.core.ring import open_ring
        from gpu_client.ring.reading.reader import RingReader
        from gpu_client.ring.tools.recording import record

        with RingReader(open_ring(place), patience_s=patience) as reader:
            damaged = record(reader, directory, samples, shard=shard, seed=seed)
    if as_json:
        session.output.json({"samples": samples, "damaged": damaged})
        return
    session.output.note(f"{count(samples, 'sample')} recorded in {directory}, {damaged} damaged samples excluded")


@ring_app.command()
def bench(
    context: typer.Context,
    place: Place,
    *,
    size: Annotated[float, typer.Option(min=0.001, max=4096, help="Size of a sample in MiB.")] = 32.0,
    samples: Annotated[int, typer.Option(min=1, help="Samples per round.")] = 6,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds, after one warm-up round.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure put and get of samples against raw file or object access.

    Writes temporary objects beside the ring and removes them.
    """
    session = session_of(context)
    with ring_errors():
        from gpu_client.cli.ring.view import bench_document, show_bench
        from gpu_client.ring.tools.benchmark import measure_machine, run_benchmark

        size_bytes = int(size * 1024 * 1024)
        rates = run_benchmark(place, size_bytes=size_bytes, samples=samples, rounds=rounds)
        limits = measure_machine(size_bytes)
    if as_json:
        session.output.json(bench_document(rates, limits))
    else:
        show_bench(session.output, rates, limits)


def show_status(output: CommandOutput, found: RingStatus, rates: tuple[float, float] | None) -> None:
    """Print a status as fields and tables. `rates`: samples put and read per second."""
    age = "" if found.oldest_s is None or found.newest_s is None else f"{found.newest_s:.1f} to {found.oldest_s:.1f} s"
    reuse = "" if found.reuse is None else f"{found.reuse:.2f} reads per sample"
    fields = [
        ("readable", f"{found.readable} of {found.cap}, manifest {found.manifest} ({found.mode})"),
        ("waiting", f"{count(found.finished, 'finished sample')}"),
        ("so far", f"{found.inserted} put, {found.read} read{', ' if reuse else ''}{reuse}"),
        ("age", age),
        ("stored", f"{count(found.objects, 'object')}, {found.unlisted} of them unlisted"),
    ]
    if found.writers:
        silent = len(found.writers) - len(found.at_work)
        writers = f"{len(found.at_work)} active, which put {sum(row.put for row in found.at_work)}"
        fields.append(("writers", writers + (f"; {silent} inactive" if silent else "")))
    if rates is not None:
        fields.insert(2, ("per second", f"{rates[0]:.1f} put, {rates[1]:.1f} read"))
    if found.damaged:
        fields.append(("damaged", ", ".join(sorted(found.damaged)[:5])))
    output.fields([(name, value) for name, value in fields if value])
    if found.writers:
        rows = [(row.name, row.state, str(row.put), str(row.refused), f"{row.waited_s:.1f}") for row in found.writers]
        output.table(["writer", "", "put", "refused", "waited (s)"], rows)
    if found.readers:
        lines = [(row.name, str(row.read), str(row.damaged), f"{row.waited_s:.1f}") for row in found.readers]
        output.table(["reader", "read", "damaged", "waited (s)"], lines)


@contextmanager
def _open_display(output: CommandOutput, place: str, *, as_json: bool) -> Iterator[Callable[[RingStatus], None]]:
    """Yield a function that shows a status: as a JSON line, a live view on a terminal, or fields."""
    from gpu_client.cli.ring.view import render_status
    from gpu_client.ring.tools.status import RateTrend

    trend = RateTrend()
    if output.live and not as_json:
        with output.live_area() as draw:

            def draw_status(found: RingStatus) -> None:
                trend.add(found)
                lines, columns = output.terminal_size
                draw(render_status(place, found, trend, lines=lines, columns=columns, unicode=output.supports_unicode))

            yield draw_status
        return

    def print_status(found: RingStatus) -> None:
        trend.add(found)
        rates = trend.rates[-1] if trend.rates else None
        if as_json:
            put_per_s, get_per_s = rates or (None, None)
            output.json_line({**asdict(found), "put_per_s": put_per_s, "get_per_s": get_per_s})
        else:
            show_status(output, found, rates)

    yield print_status


def _package_error(error: ImportError) -> CliError:
    remedy = "Run in a checkout of Baton: pip install '.[ring]'"
    return CliError(f"rings need the package {error.name}", remedy)


@contextmanager
def ring_errors() -> Iterator[None]:
    """Convert errors of rings to CliError."""
    try:
        from gpu_client.ring.errors import RingError
    except ImportError as error:
        raise _package_error(error) from error
    try:
        yield
    except ImportError as error:
        raise _package_error(error) from error
    except RingError as error:
        raise CliError(error.problem, error.remedy, exit_code=ExitCode.FAILED) from error
    except OSError as error:
        raise CliError(f"the ring cannot be reached: {error.strerror or error}", exit_code=ExitCode.FAILED) from error


def _parse_setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise CliError(f"{text!r} is not NAME=VALUE", "Write a setting as: --set cap=1000")
    return name, value


@ring_app.callback()
def _with_profile(context: typer.Context) -> None:
    """Give ring addresses baton:NAME the profile of the session."""
    from gpu_client.ring.store.uri import set_access_source

    session = session_of(context)
    set_access_source(lambda: _choose_access(session))
    context.call_on_close(lambda: set_access_source(None))  # Tests run several commands per process.


@ring_app.command(name="list")
def list_rings(context: typer.Context, as_json: AsJson = False) -> None:
    """List the rings of the control plane, baton:NAME."""
    session = session_of(context)
    with session.client() as client:
        found = [ring for page in pages(lambda cursor: client.rings(cursor=cursor)) for ring in page.rings]
    if as_json:
        session.output.json({"rings": [ring.model_dump() for ring in found]})
        return
    if not found:
        session.output.note("No rings. Create one with: baton ring make baton:NAME --set cap=1000")
        return
    rows = [(f"baton:{ring.name}", moment(ring.created_at), "being removed" if ring.removing else "") for ring in found]
    session.output.table(["ring", "created", ""], rows)


@ring_app.command()
def remove(
    context: typer.Context,
    place: Place,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not prompt for confirmation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete a ring and all its samples.

    Stop the ring's writers and readers first. After an interruption, repeat the command.
    """
    session = session_of(context)
    if not yes and not as_json and not typer.confirm(f"Remove {place} and all its samples?", err=True):
        raise CliError(f"{place} was not removed")
    with ring_errors():
        from gpu_client.ring.core.ring import remove_ring

        removed = remove_ring(place)
    if as_json:
        session.output.json({"ring": place, "removed": removed})
        return
    session.output.note(f"removed {place} with {count(removed, 'object')}")


def _choose_access(session: CliSession) -> tuple[str, str] | None:
    from gpu_client.ring.store.uri import TOKEN

    if session.profile_name is None and session.environ.get(TOKEN):
        return None  # In a process of a job, the ring module authorizes by the job's token.
    profile = session.profile()
    return profile.url, profile.api_key
