"""Compute USD per GPU-hour from list prices and billed units. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from baton.contract.elastic.relay import MAX_DOWNLOADS
from baton.contract.worker.output import LONGEST_LOG_WAIT_S
from bench.costs import prices
from bench.costs.elastic_calls import NODES
from bench.costs.units import Billed
from cdk.resources.api import AUTHORIZER_CACHE_S
from cdk.resources.functions import MEMORY_MIB
from functions.domain.access.sessions import TOKEN_LIFE_S
from functions.domain.table_keys import DUE_BUCKET_S
from functions.fleet.accounts import RELOAD_S
from gpu_client.checkpoints.format.packing import PackCutter
from gpu_client.elastic.data.leased_shards import LEAD_S
from gpu_client.elastic.engines.relay.relay_connection import LONGEST_POLL_S
from gpu_client.elastic.engines.relay.relay_connection import POLL_S as POLL_S_OF_OBJECTS
from gpu_client.elastic.engines.relay.relay_port import IDLE_POLL_S
from gpu_client.elastic.engines.wire.mesh import LONGEST_CALM_S
from gpu_client.elastic.rounds.epoch_protocol import RoundTiming

HOUR_S = 3600
DAY_H = 24
MONTH_H = 730
K = 1000
"""GPU-hours that the tables are for."""

HEARTBEAT_S = 30
CHECKPOINT_S = 600
CHECKPOINT_BYTES = 10**9
PACK_BYTES = PackCutter(CHECKPOINT_BYTES).min_bytes * 46 // 32
"""Mean bytes of a pack: a content-defined cut follows 32 MiB after about 14 MiB more (`format/packing.py`)."""
ALL_NEW_PACKS = -(-CHECKPOINT_BYTES // PACK_BYTES)
"""Packs of a checkpoint in the worst case: no chunk is stored already, and no codec makes the checkpoint smaller."""
ATTEMPT_H = 4
"""Hours of one attempt; each attempt has one claim and one end."""
FLEET = 100
"""GPUs that share a key and a sweeper."""
POLL_S = 15
"""Mean of the agent's pause while there is no work, 0 to 30 s."""
DATA_LANES = 2
"""Connections for data from one member to another, beside the control lane (WireEngine)."""
SWEPT_SHARE = 1 - 90 / DUE_BUCKET_S
"""Share of the live leases that the index `due` returns to a sweep, for leases of 90 s."""
SWEPT_READS = 0.5
"""Read units for each of these leases, read with eventual consistency."""
ALARMS = 62
"""Approximate number of alarms: two for each function, table and index, and some more."""
POLLS_AT_ONCE, POLL_LASTS_S = 5, 20
"""Assumption: concurrent polls of an empty queue by Lambda, and their duration in seconds."""
LOOKUP_INTERVAL_S = 60
"""Seconds between two reads of a tenant's webhooks by the publisher (functions/webhooks/event_queue.py)."""
CONSOLE_H, CONSOLE_JOBS, CONSOLE_POLL_S = 8, 50, 30
"""A working day of the console in front, with a list of running jobs, and its poll at this length (job-list.js)."""
CONSOLE_COUNTS_S = 60
"""Shortest time between two counts of jobs by state while none of the listed jobs changes its state (job-list.js)."""
PAGE_POLL_S = 10
"""Mean of the polls of a job's page, 5 to 15 s (polling.js); its curves are read with each chunk of an old attempt."""
FLEET_POLL_S, HISTORY_READ_S, RING_POLL_S, PART_POLL_S = 15, 190, 12, 30
"""Polls of fleets, whose data change with a tick's stored costs, every five minutes; readings of a fleet's history,
every five minutes and after each of 7 transitions an hour; polls of rings, and of a job's World and Machines
(polling.js)."""
WAITING_PARTS = 3
"""Answers for which the page of a waiting job without a fleet asks in turn, one every PART_POLL_S: rented machines,
waiting jobs, running jobs (queue-feed.js)."""
HEADER_BYTES = 500
"""Assumption: the headers of an answer."""
VIEWED_FLEETS, VIEWED_MACHINES, VIEWED_RINGS, VIEWED_WRITERS, VIEWED_READERS = 3, 4, 3, 4, 2
"""Fleets and rings of the recorded views, and the machines, generators and trainings of each."""
LISTED_JOBS, MOST_LISTED_JOBS = 10, 40
"""Running jobs of the recorded list, and most jobs of a list on the page of a waiting job (queue-feed.js)."""
CONSOLE_POLL_BYTES = 6000
"""Assumption: compressed answer with 50 jobs, and its headers; 50 equal jobs have half as many bytes."""
DURATION_MS = {
    "heartbeat": 10,
    "watched heartbeat": 25,
    "watched look": 15,
    "authorizer": 8,
    "claim": 30,
    "end": 30,
    "asked in vain": 20,
    "checkpoint": 60,
    "log chunk": 25,
    "sweep": 60,
    "tick": 15,
    "machine in a tick": 3,
    "machine heartbeat": 12,
    "preflight": 30,
    "enrolment": 30,
    "probe": 7,
    "publish": 20,
    "delivery": 200,
    "world poll": 20,
    "world report": 30,
    "shard lease": 30,
    "relay call": 15,
    "list of jobs": 60,
    "job": 15,
    "curves": 250,
    "world": 25,
    "machines of a job": 30,
    "list of fleets": 30,
    "fleet": 20,
    "history of a fleet": 40,
    "list of rings": 30,
    "ring": 30,
    "session token": 12,
    "authorizer of a token": 15,
}
"""Billed per call. Assumed: nothing measured here is AWS's. A heartbeat takes 1.5 ms of CPU on the bench's machine; a
function of 512 MiB has 0.29 of a processor, and DynamoDB answers in some 4 ms."""
FUNCTIONS = {
    "heartbeat in a new bucket": "heartbeat",
    "idle sweep": "sweep",
    "idle tick": "tick",
    "fleet tick": "tick",
    "node heartbeat": "heartbeat",
    "relay upload": "relay call",
    "relay download": "relay call",
    "relay question": "relay call",
}
"""Entry of DURATION_MS for calls without one of their own."""
PLATFORM_LOG_BYTES, OWN_LOG_BYTES, ACCESS_LOG_BYTES = 400, 350, 300
"""Lambda's three lines of a call, our own (none for a heartbeat), the API's."""

WAITING = f"a waiting job, {LISTED_JOBS} jobs in its queue"
VIEWS: Mapping[str, Mapping[str, float]] = {
    f"World of a job with {NODES} nodes": {"job": PAGE_POLL_S, "world": PART_POLL_S},
    "Machines of a job": {"job": PAGE_POLL_S, "machines of a job": PART_POLL_S},
    WAITING: {
        "job": FLEET_POLL_S,
        "machines of a job": WAITING_PARTS * PART_POLL_S,
        "list of jobs": WAITING_PARTS / 2 * PART_POLL_S,
    },
    f"Fleets, {VIEWED_FLEETS} of {VIEWED_MACHINES} machines": {"list of fleets": FLEET_POLL_S},
    f"a fleet of {VIEWED_MACHINES} machines": {"fleet": FLEET_POLL_S, "history of a fleet": HISTORY_READ_S},
    f"Rings, {VIEWED_RINGS} of them": {"list of rings": RING_POLL_S},
    f"a ring with {VIEWED_WRITERS} writers and {VIEWED_READERS} readers": {"ring": RING_POLL_S},
}
"""Calls of the console's views beside Jobs and the curves of a job, each with the seconds between two of them."""

CHECKPOINTS, FURTHER_PACKS = "checkpoints, of one new pack", "their further packs"
SWEEPING = "sweeper, the fleet's share"
PROBING = "its probe of the API, the fleet's share"
QUEUE_REQUESTS = 3
"""Requests of one message: send, receive, delete."""

PEER_PART_BYTES = 10 * 2**20
"""Part size of Kelpie and the original; an upload takes two requests besides its parts."""
BOUND_CONTROL, BOUND_KELPIE, BOUND_ORIGINAL = 0.35, 0.35, 0.2


@dataclass(frozen=True, kw_only=True)
class Row:
    """Line of a cost table: USD per hour of one GPU, by service."""

    activity: str
    per_hour: float
    api: float = 0
    functions: float = 0
    dynamodb: float = 0
    s3: float = 0
    events: float = 0
    logs: float = 0

    @property
    def control(self) -> float:
        """Sum API, Lambda and DynamoDB."""
        return self.api + self.functions + self.dynamodb

    @property
    def total(self) -> float:
        """Sum all services."""
        return self.control + self.s3 + self.events + self.logs


@dataclass(frozen=True)
class Costs:
    """Costs of one hour of one training GPU and of the services around it."""

    billed: Mapping[str, Billed]
    fleet: int = FLEET
    new_packs: int = ALL_NEW_PACKS
    """New packs of each checkpoint."""
    rows: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        heartbeats, moves = HOUR_S / HEARTBEAT_S, HOUR_S / DUE_BUCKET_S
        checkpoints, attempts = HOUR_S / CHECKPOINT_S, 1 / ATTEMPT_H
        rows = [
            self._row("heartbeats", "heartbeat", heartbeats - moves),
            self._row("heartbeats that move the lease's index", "heartbeat in a new bucket", moves),
            self._row("authorizer", "authorizer", HOUR_S / AUTHORIZER_CACHE_S / self.fleet),
            self._row(CHECKPOINTS, "checkpoint", checkpoints),
            self._row(FURTHER_PACKS, "pack", checkpoints * (self.new_packs - 1)),
            self._row("log chunks", "log chunk", HOUR_S / LONGEST_LOG_WAIT_S),
            self._row("claims", "claim", attempts),
            self._row("ends of attempts", "end", attempts),
            self._row(SWEEPING, "idle sweep", 60 / self.fleet),
            self._row(PROBING, "probe", 60 / self.fleet),
            Row(
                activity="sweeper, reading this lease",
                per_hour=60,
                dynamodb=60 * SWEPT_SHARE * SWEPT_READS * prices.READ.usd,
            ),
            self._published(_events_per_hour()),
        ]
        object.__setattr__(self, "rows", rows)

    def sum(self, of: Callable[[Row], float]) -> float:
        """USD per hour over all rows."""
        return sum(of(row) for row in self.rows)

    @property
    def control(self) -> float:
        """Compute USD per GPU-hour of API, Lambda and DynamoDB."""
        return self.sum(lambda row: row.control)

    @property
    def control_besides_checkpoints(self) -> float:
        """Compute the same without checkpoints."""
        return self.sum(lambda row: 0 if row.activity in (CHECKPOINTS, FURTHER_PACKS) else row.control)

    @property
    def with_s3(self) -> float:
        """Compute the same with S3's requests."""
        return self.control + self.sum(lambda row: row.s3)

    @property
    def within_bounds(self) -> bool:
        """Check the bound of the control plane and the bounds with S3's requests."""
        bound = min(BOUND_KELPIE * kelpie_usd(), BOUND_ORIGINAL * original_usd())
        return self.control * K <= BOUND_CONTROL and self.with_s3 <= bound

    @property
    def webhook(self) -> Row:
        """Compute an hour of events, each queued, delivered to one webhook, and recorded."""
        row = self._row("a webhook", "delivery", _events_per_hour())
        return replace(row, events=row.per_hour * QUEUE_REQUESTS * prices.QUEUE.usd)

    @property
    def watching(self) -> float:
        """Compute extra USD per hour of rules on the control plane: larger heartbeats, one evaluation a minute."""
        plain, watched, evaluation = (self.billed[call] for call in ("heartbeat", "watched heartbeat", "watched look"))
        heartbeat = billed_usd(watched) - billed_usd(plain) + call_usd("watched heartbeat") - call_usd("heartbeat")
        of_sweeper = billed_usd(evaluation) + call_usd("watched look") - prices.LAMBDA_REQUEST.usd
        return HOUR_S / HEARTBEAT_S * heartbeat + 60 * of_sweeper

    @property
    def console_day(self) -> float:
        """Compute USD of a working day of a console that lists running jobs."""
        per_poll = {**self.billed["list of jobs"]}
        per_poll["read"] *= CONSOLE_JOBS / LISTED_JOBS
        costs = replace(self, billed={**self.billed, "list of jobs": per_poll})
        polls = HOUR_S / CONSOLE_POLL_S
        rows = [
            costs._row("polls", "list of jobs", polls),
            costs._row("counts", "counts of jobs", HOUR_S / CONSOLE_COUNTS_S),
            costs._row("authorizer", "authorizer of a token", HOUR_S / AUTHORIZER_CACHE_S),
            costs._row("tokens", "session token", HOUR_S / TOKEN_LIFE_S),
        ]
        egress = polls * CONSOLE_POLL_BYTES / 1e9 * prices.EGRESS_GB.usd
        return CONSOLE_H * (sum(row.total for row in rows) + egress)

    @property
    def job_page_day(self) -> float:
        """Compute USD of a working day of the page of a running job, without the console's tokens."""
        rows = [
            self._row("polls", "job", HOUR_S / PAGE_POLL_S),
            self._row("curves", "curves", HOUR_S / LONGEST_LOG_WAIT_S),
        ]
        return CONSOLE_H * sum(row.total for row in rows)

    def view_day(self, view: str) -> float:
        """Compute USD of a working day of one of VIEWS, without the console's tokens."""
        usd = 0.0
        for call, poll_s in VIEWS[view].items():
            answer_bytes = self.billed[call].get("answer_kb", 1) * 1000 + HEADER_BYTES
            polls = HOUR_S / poll_s
            usd += self._row("polls", call, polls).total + polls * answer_bytes / 1e9 * prices.EGRESS_GB.usd
        return CONSOLE_H * usd

    @property
    def polling(self) -> Row:
        """Compute an hour of a worker that polls without work."""
        return self._row("asking for work", "asked in vain", HOUR_S / POLL_S)

    @property
    def machine_rows(self) -> list[Row]:
        """Compute the services around one hour of a rented machine, besides those around its trainings."""
        ticks = self._row("its share of the ticks", "machine in a tick", 60)
        lives = 1 / ATTEMPT_H
        return [
            # A tick has one call of Lambda for all machines; each machine makes the call last longer.
            replace(ticks, functions=60 * (call_usd("machine in a tick") - prices.LAMBDA_REQUEST.usd)),
            self._row("its worker's signs of life", "machine heartbeat", 60),
            self._row("authorizer of its key", "authorizer", HOUR_S / AUTHORIZER_CACHE_S),
            self._row("rent and end, each in a tick", "rent", 2 * lives),
            self._row("preflight", "preflight", lives),
            self._row("enrolment", "enrolment", lives),
            # After the submission or return of the job, the enrolment, and the ends of job and machine.
            self._row("ticks that follow at once", "fleet tick", 4 * lives),
        ]

    def tick_usd(self, call: str) -> float:
        """Compute USD of one tick of the fleets' controller that follows at once: `idle tick` or `fleet tick`."""
        row = self._row("a tick", call, 1)
        return row.control + row.logs

    @property
    def world_rows(self) -> list[Row]:
        """Compute an hour of an elastic job of 8 nodes: what its membership and its data cost besides one-node jobs."""
        timing = RoundTiming()
        sweeps = self._row("sweeper, reading the job and its seats", "elastic job in a sweep", 60)
        return [
            self._row("polls for joining nodes, by one node", "world poll", HOUR_S / timing.poll_s),
            self._row("reports of rounds, by one node", "world report", HOUR_S / timing.report_s),
            self._row("leases of shards, by each node", "shard lease", NODES * HOUR_S / (LEAD_S / 2)),
            sweeps,
        ]

    @property
    def node_heartbeats(self) -> Row:
        """Compute an hour of heartbeats of 8 nodes."""
        return self._row("heartbeats of 8 nodes", "node heartbeat", NODES * HOUR_S / HEARTBEAT_S)

    @property
    def relayed_object_usd(self) -> float:
        """Compute USD of one object that a relayed node stores for its peer and the peer reads."""
        stored, signed = self._row("", "relay upload", 1), self._row("", "relay download", 1 / MAX_DOWNLOADS)
        return stored.total + signed.total + prices.S3_GET.usd

    @property
    def relay_rows(self) -> list[Row]:
        """Compute an hour of two relayed nodes between rounds, each of which is a sender and a receiver."""
        exchanges = 2 * HOUR_S / LONGEST_CALM_S
        idle_gets = 2 * DATA_LANES * HOUR_S / LONGEST_POLL_S
        gets = exchanges * _gets_of_exchange() + idle_gets
        return [
            self._row("PUTs of statuses, and the calls that sign the PUTs", "relay upload", exchanges),
            Row(activity="GETs of the next objects", per_hour=gets, s3=gets * prices.S3_GET.usd),
            self._row("calls that sign the GETs, 16 each", "relay download", exchanges / MAX_DOWNLOADS),
            self._row("questions for new channels, each with a LIST", "relay question", 2 * HOUR_S / IDLE_POLL_S),
        ]

    @property
    def idle_month(self) -> dict[str, float]:
        """Compute USD a month of an unused deployment."""
        sweeps = self._row("sweeper", "idle sweep", 60)
        ticks = self._row("fleets' controller", "idle tick", 60)
        empty = self._row("fleets' controller", "fleet tick", 60)
        return {
            "the sweeper, once a minute": (sweeps.control + sweeps.logs) * MONTH_H,
            "the fleets' controller, once a minute, without a fleet": (ticks.control + ticks.logs) * MONTH_H,
            "the same with a fleet that rents nothing, instead": (empty.control + empty.logs) * MONTH_H,
            "the secret with accounts at providers, if one is stored": prices.SECRET_MONTH.usd,
            "its reads by the controller, with an active fleet": MONTH_H * HOUR_S / RELOAD_S * prices.SECRET_READ.usd,
            "Lambda's asking the webhooks' queue": MONTH_H * HOUR_S / POLL_LASTS_S * POLLS_AT_ONCE * prices.QUEUE.usd,
            f"some {ALARMS} alarms": ALARMS * prices.ALARM_MONTH.usd,
            "dashboard, if three others exist": prices.DASHBOARD_MONTH.usd,
            "our own metrics: none is written while nothing happens": 0.0,
        }

    def _row(self, activity: str, call: str, per_hour: float) -> Row:
        billed = self.billed[call]
        function = FUNCTIONS.get(call, call)
        calls, api = billed.get("lambda", 0), billed.get("api", 0)
        log_bytes = calls * PLATFORM_LOG_BYTES + api * ACCESS_LOG_BYTES
        if function not in ("heartbeat", "authorizer", "authorizer of a token", "sweep", "tick", "probe"):
            log_bytes += calls * OWN_LOG_BYTES
        return Row(
            activity=activity,
            per_hour=per_hour,
            api=per_hour * api * prices.API.usd,
            functions=per_hour * calls * call_usd(function) if calls else 0,
            dynamodb=per_hour * (billed.get("read", 0) * prices.READ.usd + billed.get("write", 0) * prices.WRITE.usd),
            s3=per_hour * (billed.get("s3_put", 0) * prices.S3_PUT.usd + billed.get("s3_get", 0) * prices.S3_GET.usd),
            logs=per_hour * log_bytes / 1e9 * prices.LOG_GB.usd,
        )

    def _published(self, per_hour: float) -> Row:
        return Row(
            activity="events on the bus",
            per_hour=per_hour,
            functions=per_hour * call_usd("publish"),
            dynamodb=min(per_hour, HOUR_S / LOOKUP_INTERVAL_S / self.fleet) * prices.READ.usd,
            events=per_hour * prices.EVENT.usd,
            logs=per_hour * PLATFORM_LOG_BYTES / 1e9 * prices.LOG_GB.usd,
        )


def _gets_of_exchange() -> int:
    """Count the requests for one object of the control lane, which the peer stores after LONGEST_CALM_S."""
    waited_s, pause_s, gets = 0.0, POLL_S_OF_OBJECTS, 1
    while waited_s < LONGEST_CALM_S:
        waited_s, pause_s, gets = waited_s + pause_s, min(1.5 * pause_s, LONGEST_POLL_S), gets + 1
    return gets


def _events_per_hour() -> float:
    return HOUR_S / CHECKPOINT_S + 2 / ATTEMPT_H


def smallest_fleet(billed: Mapping[str, Billed]) -> int:
    """Compute the least number of GPUs that must share a key and a sweeper, checkpoints apart."""
    return next(
        fleet for fleet in count(1) if Costs(billed, fleet=fleet).control_besides_checkpoints * K <= BOUND_CONTROL
    )


def most_packs(billed: Mapping[str, Billed]) -> int:
    """Compute the largest number of packs per checkpoint within all bounds."""
    return next(packs for packs in count(1) if not Costs(billed, new_packs=packs + 1).within_bounds)


def billed_usd(billed: Billed) -> float:
    """Compute the share of DynamoDB and S3 in a call."""
    unit_prices = {"read": prices.READ, "write": prices.WRITE, "s3_put": prices.S3_PUT, "s3_get": prices.S3_GET}
    return sum(billed.get(unit, 0) * price.usd for unit, price in unit_prices.items())


def call_usd(function: str) -> float:
    gb_s = MEMORY_MIB / 1024 * DURATION_MS[function] / 1000
    return prices.LAMBDA_REQUEST.usd + gb_s * prices.LAMBDA_GB_S.usd


def kelpie_usd() -> float:
    """Compute Kelpie's GPU-hour: per heartbeat a request, a KV read, two rows; R2 for checkpoints."""
    heartbeat = prices.WORKERS_REQUEST.usd + prices.KV_READ.usd + 2 * prices.D1_ROW.usd
    return HOUR_S / HEARTBEAT_S * heartbeat + _peer_puts() * prices.R2_PUT.usd


def original_usd() -> float:
    """Compute the original's GPU-hour: request, KV read and five rows per heartbeat; request and KV read per part."""
    beat = prices.WORKERS_REQUEST.usd + prices.KV_READ.usd + 5 * prices.D1_ROW.usd
    part = prices.R2_PUT.usd + prices.WORKERS_REQUEST.usd + prices.KV_READ.usd
    return HOUR_S / HEARTBEAT_S * beat + _peer_puts() * part


def _peer_puts() -> float:
    return HOUR_S / CHECKPOINT_S * (-(-CHECKPOINT_BYTES // PEER_PART_BYTES) + 2)
