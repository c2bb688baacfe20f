"""The scenario: rent at three providers, lose an answer, lose the host, resume at another provider, give all back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.markup import escape

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.plan import FleetPlan, PlanRequest
from demo.cluster import LocalCluster
from demo.fleet.provider import DemoProviders
from demo.fleet.results import FleetResults, Leftovers, LostHost
from demo.fleet.timeline import FleetHistory
from demo.fleet.watch import FleetStatus, FleetWatch
from demo.processes import ROOT
from demo.runner import Stage
from demo.screen import Phase
from gpu_client.cli.core.output import CommandOutput
from gpu_client.cli.fleet.plan_view import plan_page
from gpu_client.cli.fleet.view import RECEIPTS, receipt_rows
from gpu_client.cli.jobs.submit import SubmitOptions, build_job, parse_job_file
from gpu_client.transport.api.client import BatonClient

SPEED = 60
"""Speed of the fleets' clock: a second is a minute, and a minute costs an hour of rent."""
FLEET = "demo"
FOLDER = Path(__file__).parent.relative_to(ROOT)
STEPS = 240
KILL_AT = 150
"""Between two checkpoints, so that the next machine repeats steps."""
RENT_S = 240.0
"""Deadline from the submission of the job until a machine holds it."""
TRAIN_S = 600.0
"""Deadline of each part of the training."""
TAKEOVER_S = 240.0
"""Deadline from the kill to the first step on the next machine."""
RETURN_S = 240.0
"""Deadline from the end of the job to the end of all machines."""
METER_AGAIN_S = 180
"""Time by the fleets' clock between two looks at the provider's meter."""


def play(stage: Stage) -> FleetResults:
    """Run the scenario. Raises DemoError for a step that failed, BatonError for a failed call."""
    cluster = LocalCluster(stage, "--fleet-clock-speed", str(SPEED))
    with DemoProviders(stage.scratch, stage.processes.logs, SPEED) as providers, cluster.user() as user:
        cluster.push_digits(user)
        _store_accounts(cluster, providers)
        spec = _apply(cluster, user)
        providers.clock.align(user.fleet(FLEET).at)
        plan = _plan(cluster, user, spec)
        providers.lose_next_answer()
        history = FleetHistory(user.fleet(FLEET).at)
        job_id = _submit(cluster)

        def tell(at: int, sentence: str) -> None:
            stage.screen.print_line(f"{(at - history.began_at) // 60:>6} min  {escape(sentence)}")

        watch = FleetWatch(user, FLEET, job_id, history, tell)
        lost = _train_with_a_loss(stage, watch, providers)
        _give_back(stage, watch)
        left = _look_for_leftovers(stage, watch, providers)
        machines = {one.id: one for one in user.ended_machines(FLEET)}
        (bound,) = user.fleet(FLEET).bounds
        attempts = user.attempts(job_id).attempts
    stage.screen.print_line(f"\n$ baton fleet receipts {FLEET}")
    CommandOutput().table(RECEIPTS, receipt_rows(list(machines.values())))
    stage.screen.print_line(f"\nSpent: {bound.spent_usd:.2f} of {bound.cap_usd:.2f} USD.\n")
    return FleetResults(
        offers=plan.offers,
        history=history,
        budget_usd=bound.cap_usd,
        spent_usd=bound.spent_usd,
        machines=[machines[machine] for machine in history.machines],
        attempts=attempts,
        idle_timeout_s=spec.idle_timeout_s,
        lost=lost,
        left=left,
    )


def _store_accounts(cluster: LocalCluster, providers: DemoProviders) -> None:
    with cluster.screen.phase("accounts", "Store the accounts of two providers") as phase, cluster.admin() as admin:
        views = [
            admin.put_provider("vast", providers.vast_account()),
            admin.put_provider("salad", providers.salad_account()),
        ]
        phase.ends_with(", ".join(f"{one.provider}: {one.account}" for one in views))


def _plan(cluster: LocalCluster, user: BatonClient, spec: FleetSpec) -> FleetPlan:
    """Print what the fleet would rent, before any money is spent."""
    cluster.screen.print_line(f"\n$ baton fleet plan {FOLDER / 'fleet.yaml'} --job {FOLDER / 'job.yaml'} --hours 1")
    text = (ROOT / FOLDER / "job.yaml").read_text(encoding="utf-8")
    job = build_job(parse_job_file(text, "job.yaml"), SubmitOptions())
    plan = user.plan_fleet(PlanRequest(fleet=spec, job=job, hours=1))
    cluster.screen.print_page(plan_page(spec, plan))
    return plan


def _apply(cluster: LocalCluster, user: BatonClient) -> FleetSpec:
    cluster.screen.print_line(f"\n$ baton fleet apply {FOLDER / 'fleet.yaml'}")
    cluster.screen.print_line(cluster.run_command("fleet", "apply", str(FOLDER / "fleet.yaml")))
    return user.fleet(FLEET).spec


def _submit(cluster: LocalCluster) -> str:
    cluster.screen.print_line(f"\n$ baton submit {FOLDER / 'job.yaml'}")
    job_id = cluster.run_command("submit", str(FOLDER / "job.yaml"))
    cluster.screen.print_line(f"{job_id}\n\nFrom now on by the fleets' clock: a second is a minute.\n")
    return job_id


def _train_with_a_loss(stage: Stage, watch: FleetWatch, providers: DemoProviders) -> LostHost:
    """Train on a machine, kill it behind a checkpoint, train on the next one to the end."""
    with stage.screen.phase("rent", "Rent a machine") as phase:
        status = watch.until(lambda now: now.step > 0, "the first step on a machine", RENT_S)
        machine = status.attempts[0].machine_id or ""
        phase.ends_with("the job trains")
    with stage.screen.phase("train", "Train", STEPS) as phase:
        watch.until(lambda now: _has_passed(now, KILL_AT), f"step {KILL_AT}", TRAIN_S, _shown_in(phase))
        processes = providers.lose_host(machine)
        status = watch.look()
        lost = LostHost(machine, status.fleet.at, status.step, status.job.checkpoint_step or 0, processes)
        watch.tell(lost.at, f"the host vanishes at step {lost.step}: SIGKILL to all its {processes} processes")
        phase.ends_with(f"killed at step {lost.step}")
    with stage.screen.phase("takeover", "Continue elsewhere") as phase:
        status = watch.until(
            lambda now: len(now.attempts) > 1 and now.step > 0, "the first step on the next machine", TAKEOVER_S
        )
        phase.ends_with(f"from the checkpoint of step {status.attempts[-1].resumed_step}")
    with stage.screen.phase("complete", "Train on", STEPS) as phase:
        watch.until(lambda now: now.job.state.terminal, "the end of the job", TRAIN_S, _shown_in(phase))
        phase.at(STEPS)
        phase.ends_with("complete")
    return lost


def _has_passed(status: FleetStatus, step: int) -> bool:
    """Return True if the attempt has reported the step, and a checkpoint is committed."""
    return status.step >= step and status.job.checkpoint_step is not None


def _shown_in(phase: Phase) -> Callable[[FleetStatus], None]:
    return lambda status: phase.at(status.step, f"step {status.step}")


def _give_back(stage: Stage, watch: FleetWatch) -> None:
    with stage.screen.phase("return", "Give the machines back") as phase:
        watch.until(lambda now: not now.fleet.machines, "the end of all machines", RETURN_S)
        phase.ends_with("all are gone")


def _look_for_leftovers(stage: Stage, watch: FleetWatch, providers: DemoProviders) -> Leftovers:
    with stage.screen.phase("check", "Look for what is left") as phase:
        at = watch.look().fleet.at
        bills = providers.bills(at)
        later = watch.until(lambda now: now.fleet.at >= at + METER_AGAIN_S, "the second look", RETURN_S).fleet.at
        left = Leftovers(providers.listed(), len(providers.processes()), bills, providers.bills(later))
        phase.ends_with(left.failure() or "no process, no listed machine; the meter stands still")
    return left
