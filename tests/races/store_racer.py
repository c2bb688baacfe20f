"""Run one process of a race on the emulated cloud: `python -m tests.races.store_racer` with a JSON order on stdin.

It says `ready` on stdout, waits for one more line on stdin, races with `threads` threads, and writes a JSON answer.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

from baton.contract.checkpoints.manifest import Pack
from baton.contract.worker.calls import WorkQuery
from functions.api.worker.job_claim import claim_next
from functions.domain.checkpoints.packs import CondemnPack, PackSnapshot
from functions.domain.errors import WriteConflict
from functions.domain.jobs.job_selection import ClaimWindow
from functions.domain.jobs.transaction import Transaction
from functions.domain.records import PackRecord
from functions.storage.clients import dynamodb_client
from functions.storage.dynamodb.jobs import DynamoJobStore
from functions.storage.dynamodb.packs import DynamoPackStore
from functions.storage.dynamodb.tokens import DynamoTokenStore
from tests.conformance.store_kit import NOW, TENANT
from tests.kits.api.fakes import SeededRandomness
from tests.kits.clouds.emulator import CREDENTIALS


class CountingJobs(DynamoJobStore):
    """Counts the lost races of one claimer."""

    conflicts = 0

    def apply(self, change: Transaction) -> None:
        try:
            super().apply(change)
        except WriteConflict:
            self.conflicts += 1
            raise


def claim_all(client: Any, order: dict[str, Any], number: int) -> dict[str, Any]:
    """Claim until nothing is ready: what one worker got, and how often it was too late."""
    jobs = CountingJobs(client, order["prefix"])
    random = SeededRandomness(order["seed"] * 1000 + number)
    window = ClaimWindow()
    got: list[list[Any]] = []
    while True:
        claimed = claim_next(
            jobs,
            WorkQuery(machine_id=f"m-{order['seed']}-{number}"),
            tenant=TENANT,
            tags={},
            key_id="k",
            token_sha256=random.token(),
            shards=order["shards"],
            now=NOW,
            random=random,
            window=window,
        )
        if claimed is not None:
            got.append([claimed.job.id, claimed.job.epoch, claimed.attempt.machine_id])
        elif not any(jobs.ready(TENANT, "default", shard, limit=1).items for shard in range(order["shards"])):
            return {"claimed": got, "conflicts": jobs.conflicts}


def redeem_all(client: Any, order: dict[str, Any], number: int) -> dict[str, Any]:
    """Try to redeem every token once, each worker in another order."""
    tokens = DynamoTokenStore(client, order["prefix"])
    names = order["tokens"]
    mine = names[number:] + names[:number]
    return {"redeemed": [name for name in mine if tokens.redeem(name, NOW) is not None]}


def take_packs(client: Any, order: dict[str, Any], number: int) -> dict[str, Any]:
    """Condemn a job's own packs as the first worker, or hold the packs for another job as any other worker."""
    packs = DynamoPackStore(client, order["prefix"])
    declared = [Pack.model_validate(pack) for pack in order["packs"]]
    seen = {record["blake3"]: PackRecord.model_validate(record) for record in order["seen"]}
    me = f"job-{order['seed']}-{number}"
    done: list[str] = []
    condemning = (order["seed"], number) == (0, 0)
    # From the other end, so that they meet.
    for pack in reversed(declared) if condemning else declared:
        if not condemning:
            if packs.add_references(TENANT, me, [PackSnapshot(pack, seen[pack.blake3])]):
                done.append(pack.blake3)
            continue
        if not packs.remove_references(
            TENANT, order["job_id"], [CondemnPack(pack=pack, seen=seen[pack.blake3], at=NOW)]
        ):
            done.append(pack.blake3)
    return {"job": None if condemning else me, "done": done}


RACES: dict[str, Callable[[Any, dict[str, Any], int], dict[str, Any]]] = {
    "claim": claim_all,
    "redeem": redeem_all,
    "packs": take_packs,
}


def main() -> None:
    """Run one order."""
    order = json.loads(sys.stdin.readline())
    client = dynamodb_client(order["endpoint_url"], **CREDENTIALS)
    answers: list[dict[str, Any]] = []
    start = threading.Barrier(order["threads"] + 1)

    def work(number: int) -> None:
        start.wait()
        answers.append(RACES[order["race"]](client, order, number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(order["threads"])]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    sys.stdin.readline()
    start.wait()
    for thread in threads:
        thread.join()
    if len(answers) != len(threads):
        sys.exit("a thread failed")
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
