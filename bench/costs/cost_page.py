"""Write docs/costs.md from the list prices and the billed units of a recorded run.

make costs                                    # records anew, writes the page
.venv/bin/python -m bench.costs.cost_page   # only the page
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template

from baton.contract.worker.output import LONGEST_LOG_WAIT_S
from bench.costs import call_costs, prices
from bench.costs.call_costs import RECORDED
from bench.costs.cost_model import (
    ACCESS_LOG_BYTES,
    ALL_NEW_PACKS,
    ATTEMPT_H,
    BOUND_CONTROL,
    BOUND_KELPIE,
    BOUND_ORIGINAL,
    CHECKPOINT_S,
    CONSOLE_H,
    CONSOLE_JOBS,
    CONSOLE_POLL_S,
    DAY_H,
    DURATION_MS,
    FLEET,
    HEARTBEAT_S,
    HOUR_S,
    MONTH_H,
    MOST_LISTED_JOBS,
    OWN_LOG_BYTES,
    PACK_BYTES,
    PAGE_POLL_S,
    PART_POLL_S,
    PLATFORM_LOG_BYTES,
    POLL_S,
    PROBING,
    SWEEPING,
    VIEWS,
    Costs,
    K,
    Row,
    billed_usd,
    call_usd,
    kelpie_usd,
    most_packs,
    original_usd,
    smallest_fleet,
)
from bench.costs.elastic_calls import NODES
from bench.costs.units import Billed
from bench.harness.plane import Plane
from cdk.resources.api import AUTHORIZER_CACHE_S
from cdk.resources.functions import MEMORY_MIB
from functions.api.machines.machine_calls import PROBE_BYTES
from functions.local.emulator import Emulator
from gpu_client.elastic.engines.relay.relay_connection import LARGEST_BYTES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "costs.md"
TEMPLATE = Path(__file__).with_name("costs_template.md")


def recorded() -> dict[str, Billed]:
    """Load the recorded run."""
    found: dict[str, Billed] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


def page(billed: Mapping[str, Billed]) -> str:
    """Format the page."""
    costs, alone, most = Costs(billed), Costs(billed, fleet=1), most_packs(billed)
    chunk = billed["log chunk"]
    often = Costs({**billed, "log chunk": {name: value * LONGEST_LOG_WAIT_S / 5 for name, value in chunk.items()}})
    values: dict[str, object] = {
        "region": prices.REGION,
        "as_of": prices.AS_OF,
        "hours": f"{K:,}",
        "heartbeat_s": HEARTBEAT_S,
        "checkpoint_min": CHECKPOINT_S // 60,
        "attempt_h": ATTEMPT_H,
        "fleet": FLEET,
        "table": _table(costs.rows),
        "bounds": _bounds(billed, sorted({1, most, ALL_NEW_PACKS})),
        "besides": f"{costs.control_besides_checkpoints * K:.3f}",
        "bound_control": BOUND_CONTROL,
        "pack_mib": PACK_BYTES // 2**20,
        "all_new": ALL_NEW_PACKS,
        "dearer_job": f"{2 * HOUR_S / CHECKPOINT_S * prices.WRITE.usd * K:.4f}",
        "most_packs": most,
        "most_mb": most * PACK_BYTES // 10**6,
        "pack_writes": f"{billed['pack']['write']:g}",
        "pack_reads": f"{billed['pack']['read']:g}",
        "pack_usd": f"{billed_usd(billed['pack']) * prices.MILLION:.1f}",
        "alone": f"{alone.control * K:.3f}",
        "control": f"{costs.control * K:.3f}",
        "cache_s": AUTHORIZER_CACHE_S,
        "sweeping": f"{(_difference(alone, costs, SWEEPING) + _difference(alone, costs, PROBING)) * K:.3f}",
        "looking_up": f"{_difference(alone, costs, 'authorizer') * K:.3f}",
        "smallest_fleet": smallest_fleet(billed),
        "webhook": f"{costs.webhook.total * K:.3f}",
        "webhook_control": f"{costs.webhook.control * K:.3f}",
        "console": f"{costs.console_day:.4f}",
        "console_h": CONSOLE_H,
        "console_jobs": CONSOLE_JOBS,
        "console_poll_s": CONSOLE_POLL_S,
        "job_page": f"{costs.job_page_day:.4f}",
        "views": _views(costs),
        "page_poll_s": PAGE_POLL_S,
        "part_poll_s": PART_POLL_S,
        "most_listed": MOST_LISTED_JOBS,
        "watching": f"{costs.watching * K:.3f}",
        "wait_min": f"{LONGEST_LOG_WAIT_S / 60:.0f}",
        "often": f"{often.control * K:.2f}",
        "s3_often": f"{_s3(often) * K:.2f}",
        "s3": f"{_s3(costs) * K:.2f}",
        "egress": f"{prices.EGRESS_GB.usd:.2f}",
        "preflight": f"{PROBE_BYTES / 1e9 * prices.EGRESS_GB.usd:.4f}",
        "hundred": f"{costs.control * 100:.3f}",
        "resumes": f"{prices.EGRESS_GB.usd / ATTEMPT_H * K:.2f}",
        "storage": prices.STORAGE_GB_MONTH.usd,
        "poll_s": POLL_S,
        "polling": f"{costs.polling.total * MONTH_H:.2f}",
        "idle": _lines(costs.idle_month),
        "waiting": f"{MONTH_H * 60 * 0.1 * MEMORY_MIB / 1024 * prices.LAMBDA_GB_S.usd:.2f}",
        "machine_table": _table(costs.machine_rows),
        "world_table": _table([costs.node_heartbeats, *costs.world_rows], DAY_H),
        "relay_table": _table(costs.relay_rows, DAY_H),
        "nodes": NODES,
        "world": f"{sum(row.total for row in costs.world_rows) * DAY_H:.2f}",
        "relayed_pair": f"{sum(row.total for row in costs.relay_rows) * DAY_H:.2f}",
        "object_mb": f"{LARGEST_BYTES / 2**20:.0f}",
        "relayed_gb": f"{1e9 / LARGEST_BYTES * costs.relayed_object_usd:.3f}",
        "tick_idle": f"{costs.tick_usd('idle tick') * prices.MILLION:.1f}",
        "tick_fleet": f"{costs.tick_usd('fleet tick') * prices.MILLION:.1f}",
        "memory_mib": MEMORY_MIB,
        "duration_share": f"{_duration_share(costs):.0%}",
        "platform_bytes": PLATFORM_LOG_BYTES,
        "access_bytes": ACCESS_LOG_BYTES,
        "own_bytes": OWN_LOG_BYTES,
        "durations": _rows({name: (ms,) for name, ms in DURATION_MS.items()}),
        "prices": _rows({price.unit: (_plain(price.usd), price.source) for price in prices.PRICES}),
    }
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(values)


def _bounds(billed: Mapping[str, Billed], new_packs: Sequence[int]) -> str:
    """Compare each bound with the cost of checkpoints of a given number of new packs."""
    lines = []
    for packs in new_packs:
        costs = Costs(billed, new_packs=packs)
        found = (
            (costs.control * K, BOUND_CONTROL),
            (costs.with_s3 / kelpie_usd(), BOUND_KELPIE),
            (costs.with_s3 / original_usd(), BOUND_ORIGINAL),
        )
        cells = (f"{value:.3f}" + (", above" if value > allowed else "") for value, allowed in found)
        lines.append(f"| {packs} | {' | '.join(cells)} |")
    allowed = f"| allowed | {BOUND_CONTROL} | {BOUND_KELPIE} | {BOUND_ORIGINAL} |"
    head = (
        f"| new packs | API, Lambda, DynamoDB | with S3, in Kelpie's {kelpie_usd() * K:.2f} "
        f"| with S3, in the original's {original_usd() * K:.2f} |"
    )
    return "\n".join((head, "|---|---:|---:|---:|", *lines, allowed))


def _rows(cells: Mapping[str, Sequence[object]]) -> str:
    return "\n".join(f"| {' | '.join([name, *map(str, more)])} |" for name, more in cells.items())


def _s3(costs: Costs) -> float:
    return costs.sum(lambda row: row.s3)


def _difference(alone: Costs, fleet: Costs, activity: str) -> float:
    """Compute the surcharge that a single GPU pays."""
    dearer, cheaper = (next(row for row in costs.rows if row.activity == activity) for costs in (alone, fleet))
    return dearer.control - cheaper.control


def _table(rows: Sequence[Row], day_h: int = 0) -> str:
    """Format the costs of 1,000 hours with the calls of an hour, or all of a day of `day_h` hours."""
    hours, counted_h = (day_h, day_h) if day_h else (K, 1)
    columns: Sequence[tuple[str, Callable[[Row], float]]] = (
        ("API", lambda row: row.api),
        ("Lambda", lambda row: row.functions),
        ("DynamoDB", lambda row: row.dynamodb),
        ("S3", lambda row: row.s3),
        ("events", lambda row: row.events),
        ("logs", lambda row: row.logs),
        ("total", lambda row: row.total),
    )
    lines = [
        f"| | {'a day' if day_h else 'an hour'} | {' | '.join(name for name, _ in columns)} |",
        f"|---|---:|{'---:|' * len(columns)}",
    ]
    lines += [
        f"| {row.activity} | {_number(row.per_hour * counted_h)} | "
        f"{' | '.join(_amount(of(row) * hours) for _, of in columns)} |"
        for row in rows
    ]
    sums = (f"**{sum(map(of, rows)) * hours:.3f}**" for _, of in columns)
    lines.append(f"| **together** | | {' | '.join(sums)} |")
    return "\n".join(lines)


def _views(costs: Costs) -> str:
    """Format the calls of each view of the console: interval, read units, size of the answer."""
    lines = [
        "| view | a request | every | read units | answer up to | USD a day |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for view, calls in VIEWS.items():
        name, usd = view, f"{costs.view_day(view):.4f}"
        for call, poll_s in calls.items():
            billed = costs.billed[call]
            kilobytes = f"{billed['answer_kb']:g} kB" if "answer_kb" in billed else "1 kB"
            lines.append(f"| {name} | {call} | {poll_s:g} s | {billed.get('read', 0):g} | {kilobytes} | {usd} |")
            name = usd = ""
    return "\n".join(lines)


def _lines(amounts: Mapping[str, float]) -> str:
    return "\n".join(f"| {activity} | {usd:.2f} |" for activity, usd in amounts.items())


def _number(count: float) -> str:
    return f"{count:,.0f}" if count >= 1000 else f"{count:.4g}"


def _amount(usd: float) -> str:
    return f"{usd:.3f}" if usd else ""


def _plain(usd: float) -> str:
    return f"{usd * prices.MILLION:g} per million" if usd < 1e-4 else f"{usd:g}"


def _duration_share(costs: Costs) -> float:
    """Compute the effect of doubled durations on the control plane's cost."""
    requests = sum(
        row.functions / call_usd(name) * prices.LAMBDA_REQUEST.usd
        for row, name in zip(
            costs.rows,
            (
                "heartbeat",
                "heartbeat",
                "authorizer",
                "checkpoint",
                "checkpoint",
                "log chunk",
                "claim",
                "end",
                "sweep",
                "probe",
                "sweep",
                "publish",
            ),
            strict=True,
        )
    )
    return (costs.sum(lambda row: row.functions) - requests) / costs.control


def main() -> None:
    """Write the page; `--record` records a new run first."""
    parser = argparse.ArgumentParser(prog="python -m bench.costs.cost_page", description="What it costs.")
    parser.add_argument("--record", action="store_true", help="count requests and units anew, on the emulated cloud")
    if parser.parse_args().record:
        with Emulator() as emulator:
            found = call_costs.record(Plane(emulator.endpoint_url, "costs-"))
        RECORDED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(recorded()), encoding="utf-8")


if __name__ == "__main__":
    main()
