"""Provide the training session: progress, directives, atomic checkpoints and exact resume for any training loop.

A script with a session can be killed at any time and continued elsewhere with bit-identical results::

    with Session.start() as session:
        done = session.resume(model=model, optimizer=optimizer, batches=batches)
        for step, batch in zip(range(done + 1, total + 1), batches):
            loss = train_step(batch)
            session.report(step, total, loss=loss)
            if session.checkpoint_due(step, every=100):
                session.checkpoint(step, model=model, optimizer=optimizer, batches=batches)
            if session.should_stop:
                break

The script also runs without Baton; see `Session.start`.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Mapping, Sequence
from operator import index
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from gpu_client.controller.steering import Steering
from gpu_client.training.channel import AgentChannel
from gpu_client.training.checkpoint import checkpoint_directory
from gpu_client.training.checkpoint.checkpoint_writer import CheckpointWriter
from gpu_client.training.distributed.process_group import Ranks
from gpu_client.training.errors import CheckpointMismatchError, SessionError
from gpu_client.training.protocol import TrainerDirective
from gpu_client.training.session import environment
from gpu_client.training.session.data_sources import DataSources
from gpu_client.training.session.loop_requests import LoopRequests
from gpu_client.training.session.profiler import StepProfiler

if TYPE_CHECKING:
    import torch

    from gpu_client.elastic.data.leased_shards import LeasedShards
    from gpu_client.elastic.data.local_shards import LocalShards
    from gpu_client.elastic.data.shard_plan import Source
    from gpu_client.elastic.machine.machine_shards import MachineShards
    from gpu_client.elastic.node import OuterLoop

STEERING = "steering"
"""Name of the session's own state in checkpoints, which contains the counters of rules."""


def require_whole(name: str, value: int) -> int:
    """Convert `value` to Python's own int, for JSON and file names. Raises SessionError."""
    try:
        return index(value)
    except TypeError as error:
        raise SessionError(f"{name} is {value!r}", "Pass a whole number") from error


def require_free(stateful: Mapping[str, object]) -> None:
    if STEERING in stateful:
        raise SessionError(f"the state {STEERING!r} is the session's own", "Choose another keyword for yours")


def require_same(directory: Path, stored: Mapping[str, object], asked: Mapping[str, object]) -> None:
    """Compare the names of stored and requested states. Raises CheckpointMismatchError."""
    if stored.keys() != asked.keys():
        raise CheckpointMismatchError(
            f"{directory} holds {join_names(stored)}, but resume() asks for {join_names(asked)}",
            "Name the same states in checkpoint() and resume(), or start a new job for the changed script",
        )


def join_names(named: Mapping[str, object]) -> str:
    return ", ".join(sorted(named)) or "nothing"


KEEP_LAST = 2

log = logging.getLogger("baton.training")


class Session:
    """Attempt at one job, inside the training process. `Session.start` makes the session.

    job_id and epoch are "" and 0 without Baton. params: parameters of the job. In a run of several processes every rank
    makes a session, and calls `checkpoint_due`, `checkpoint` and `resume` at equal steps.
    """

    def __init__(
        self,
        *,
        output_dir: Path,
        data_dir: Path | None,
        params: dict[str, Any],
        job_id: str,
        epoch: int,
        resume_from: Path | None,
        channel_path: str | None,
        arena: Path | None,
        keep_last: int,
        ranks: Ranks,
        control: Mapping[str, Any],
        variables: Mapping[str, str],
    ) -> None:
        """Scripts call `Session.start` instead."""
        self._variables = variables
        self.output_dir = output_dir
        self.params = params
        self.job_id = job_id
        self.epoch = epoch
        self.resume_from = resume_from
        self._data_dir = data_dir
        self._ranks = ranks
        self._last_report: tuple[int, int, Mapping[str, object]] = (0, 0, {})
        self._last_committed: tuple[int, Path] | None = None
        self.sources = DataSources(keep_last)
        self._outer: OuterLoop | None = None
        # Under an agent the output directory is lost with the machine, therefore syncs to disk would be useless.
        self._durable = channel_path is None
        output_dir.mkdir(parents=True, exist_ok=True)
        if ranks.first:
            checkpoint_directory.clear_leftovers(output_dir)
        self._loop_requests = LoopRequests(ranks)
        self.steering = Steering(self._loop_requests, ranks, elastic=environment.is_node(variables))
        """Controller of rules and commands, with the capabilities of this loop."""
        self._loop_requests.attach(self.steering)
        self.steering.offer(profiler=StepProfiler(output_dir, self.artifact, first=ranks.first))
        path, steering = channel_path if ranks.first else None, self.steering
        self._channel = AgentChannel(
            path, self._loop_requests.receive, on_steering=steering.receive, signals=steering.measured
        )
        known = checkpoint_directory.parse_step(resume_from) if resume_from is not None else 0
        send = self._channel.send_steering if self._channel.connected else None
        self.steering.begin(control, send, self._channel.add_metrics, step=known)
        self._writer = CheckpointWriter(
            output_dir,
            arena,
            ranks,
            self._channel,
            durable=self._durable,
            keep_last=keep_last,
            keep=resume_from if job_id else None,
            on_lost=lambda: self._loop_requests.receive(TrainerDirective("checkpoint")),
        )
        self._loop_requests.install()
        atexit.register(self.close)

    @classmethod
    def start(
        cls,
        *,
        output_dir: str | Path | None = None,
        data_dir: str | Path | None = None,
        params: Mapping[str, Any] | None = None,
        resume: bool = False,
        keep_last: int = KEEP_LAST,
        rules: str | Path | None = None,
        variables: Mapping[str, str] = os.environ,
    ) -> Self:
        """Start a session. The agent's environment variables (BATON_*) take precedence over the arguments.

        output_dir, data_dir, params: for runs without Baton.
        resume: without Baton, continue from the newest complete checkpoint in the output directory. (Under Baton the
            agent names the checkpoint.)
        keep_last: number of checkpoints that stay in the output directory, at least 1. The session deletes older
            checkpoints once the agent knows of their successors.
        rules: without Baton, a file of rules (docs/rules.md). (Under Baton the job has its rules.)

        Raises SessionError without output directory or readable parameters, or if checkpoints of two runs would mix.
        """
        if keep_last < 1:
            raise SessionError(f"keep_last is {keep_last}", "Keep at least 1 checkpoint")
        output = environment.read_output_dir(variables, output_dir)
        return cls(
            output_dir=output,
            data_dir=environment.read_data_dir(variables, data_dir),
            params=environment.read_params(variables, params),
            job_id=variables.get("BATON_JOB_ID", ""),
            epoch=environment.read_epoch(variables),
            resume_from=environment.find_resume(variables, output, resume),
            channel_path=variables.get("BATON_CHANNEL"),
            arena=environment.read_arena(variables),
            keep_last=keep_last,
            ranks=Ranks(variables),
            control=environment.read_control(variables, rules),
            variables=variables,
        )

    # --- the environment ---------------------------------------------------------------------------------------------

    @property
    def data_dir(self) -> Path:
        """Return the directory of the job's inputs. Raises SessionError without a directory."""
        if self._data_dir is None:
            raise SessionError("no data directory is known", "Pass Session.start(data_dir=...) or set BATON_DATA_DIR")
        return self._data_dir

    def report(self, step: int, total: int, **metrics: object) -> None:
        """Report progress: the finished `step` of `total` (0 if unknown), with numbers or tensors of one element.

        The call is cheap enough for every step, because the session reads and sends at most one report per 0.2 s.
        Raises SessionError for a fraction.
        """
        self.report_new(step, total, metrics, shown=metrics)

    def report_new(
        self, step: int, total: int, new: Mapping[str, object], *, shown: Mapping[str, object], event: str = ""
    ) -> None:
        """Report metrics; `shown` also has older metrics for display.

        event: `step`, `log`, or `none` for a report without an evaluation of rules.
        """
        # Reading (or detaching) the values would dominate the cost, therefore the values stay unread until the next
        # report. After backward() a loss keeps no activations.
        if type(step) is not int or type(total) is not int:
            step, total = require_whole("step", step), require_whole("total", total)
        self._last_report = (step, total, shown)
        if self._outer is not None:
            self._outer.note_metrics(new)
        new, shown = self.sources.merge_metrics(new, shown)
        if self._writer.skipped_steps:
            shown = {"checkpoints_skipped": len(self._writer.skipped_steps), **shown}
        self._channel.report(step, total, shown, new=new)
        if self.steering.live and event != "none":
            self.steering.report_step(step, new, last=step >= total > 0, event=event)

    @property
    def alone(self) -> bool:
        """Return True in the only process of a training."""
        return self._ranks.size == 1

    def phase(self, name: str, done: int, total: int) -> None:
        """Report progress between steps, such as `done` of `total` encoded images.

        name: a valid metric name, such as `cached_latents`. `baton watch` shows the phase, and a change of `done`
            counts as progress for `no_progress_timeout_s`. The call is as cheap as `report`.
        """
        step, total_steps, metrics = self._last_report
        done, total = require_whole("done", done), require_whole("total", total)
        progress = {name: done, f"{name}_total": total}
        # The agent drops metrics beyond its limit, therefore the phase comes first.
        self._channel.report(step, total_steps, {**progress, **metrics, **progress}, phase=(name, done, total), new={})

    def artifact(self, path: str | Path) -> None:
        """Show a finished file of the output directory in `baton watch` before the job's end.

        path: absolute, or relative to the output directory. A name such as `step-500.png` contains its step. The file
            must not change any more; after a rewrite, call artifact() again. The size limit is 64 MiB.

        The call costs one message: the agent uploads the file in the background. The file belongs to the job's outputs
        only if the outputs name the file or its directory. Raises SessionError for a missing file.
        """
        file = (self.output_dir / path).resolve()
        if not file.is_relative_to(self.output_dir.resolve()) or not file.is_file():
            raise SessionError(
                f"{path} is no file in the output directory",
                "Write it completely, into session.output_dir, before calling artifact()",
            )
        if self._ranks.first:
            self._channel.artifact_written(str(file))

    # --- directives --------------------------------------------------------------------------------------------------

    @property
    def should_stop(self) -> bool:
        """Return True if the loop should leave after this step. Cheap enough for every step.

        In scripts that call `checkpoint_due`, a stop with a checkpoint becomes visible after `checkpoint_due` has
        requested the checkpoint; in other scripts at once. With several processes every rank learns of the stop after
        the same call of `checkpoint_due`.
        """
        return self._loop_requests.should_stop

    @property
    def stop_reason(self) -> str | None:
        """Return the stop's reason: "cancel", "pause", "release", "lease_lost", "rule", "signal" (SIGTERM), or None."""
        return self._loop_requests.stop_reason

    @property
    def finishing(self) -> bool:
        """Return True after a rule or command ended the training as complete: leave the loop, write the outputs."""
        return self.steering.finishing

    def checkpoint_due(self, step: int, every: int | None = None) -> bool:
        """Return True if a checkpoint is due after `step`: each `every` steps, on request, and before a stop.

        Call once after every step; with several processes all ranks agree in this call. During the upload of the last
        checkpoint the session skips due checkpoints; the first step afterwards is due instead.
        """
        if every is not None and every < 1:
            raise SessionError(f"a checkpoint every {every} steps is not possible", "every is at least 1, or None")
        on_interval = every is not None and step % every == 0
        due = self._loop_requests.due(step, on_interval, self._writer.busy, last=self._is_last(step))
        if on_interval and self._loop_requests.postponed:
            self._writer.skip(step)
        return due

    # --- elastic training --------------------------------------------------------------------------------------------

    def elastic(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, inner_steps: int = 100, **options: Any
    ) -> OuterLoop:
        """Return the outer loop of an elastic training: one model on all nodes of the job (docs/elastic.md).

        inner_steps: optimizer steps of each node between two rounds. options: see `gpu_client.elastic.node.open_outer`.
        In a job without `nodes`, and without Baton, the world has one node, and the loop is plain DiLoCo.

        Several processes of one machine (torchrun, accelerate launch) are one node: each of them makes all calls.

        Raises ElasticSetupError, and SessionError in a run on several machines.
        """
        from gpu_client.elastic.node import open_outer

        if not self._ranks.one_machine:
            problem = f"this run has {self._ranks.size} processes on several machines"
            raise SessionError(problem, "Let each machine be a node with a launcher of its own: torchrun --nnodes 1")
        outer = open_outer(
            model,
            optimizer,
            inner_steps=inner_steps,
            variables=self._variables,
            rank=self._ranks.rank,
            processes=self._ranks.size,
            # The processes learn of a stop in a call that all of them make.
            after_step=lambda: self._loop_requests.due(self._last_report[0], on_interval=False),
            observer=self.steering.world,
            is_stopping=lambda: self._loop_requests.is_asked_to_stop,
            grace_left_s=self._loop_requests.grace_left_s,
            **options,
        )
        self._outer = outer
        self.steering.note_metrics = outer.note_metrics
        self.sources.measure(outer)
        return outer

    def shards(
        self,
        data: Source | Mapping[str, Source],
        *,
        ratios: Mapping[str, float] | None = None,
        seed: int = 0,
        passes: int | None = 1,
    ) -> LeasedShards | LocalShards | MachineShards:
        """Return an iterable over shards of the data: in an elastic training, each shard goes to one node.

        data: the files of a data set, or the number of its shards; for a mixture, several of these by name. ratios: of
            the shards in a mixture. passes: over each data set; None for endless passes.

        Call after `elastic` and before `resume`. Without `elastic`, pass the result to `checkpoint` and `resume` as a
        state. Several processes of one node receive the same shards, and divide each batch themselves. Raises
        ElasticSetupError, and SessionError before `elastic` in a job with `nodes`.
        """
        from gpu_client.elastic.data.local_shards import LocalShards
        from gpu_client.elastic.data.shard_plan import ShardPlan

        plan = ShardPlan.make(data, ratios, seed, passes)
        if self._outer is None and not self._variables.get("BATON_WORLD"):
            return LocalShards(plan)
        if self._outer is None:
            raise SessionError(
                "this job has nodes, and no outer loop yet", "Call session.elastic before session.shards"
            )
        return self._outer.shards(plan)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def skipped_checkpoints(self) -> list[int]:
        """Return the steps whose checkpoints the session skipped during the upload of the previous checkpoint."""
        return list(self._writer.skipped_steps)

    def checkpoint(
        self,
        step: int,
        metrics: Mapping[str, object] | None = None,
        *,
        must: bool = False,
        overlap: bool = False,
        **stateful: Any,
    ) -> Path | None:
        """Write the checkpoint of `step`. Returns its path; None if the session skips it for a later checkpoint.

        stateful: all objects that the loop changes: objects with state_dict() and load_state_dict() (model, optimizer,
            scheduler, sampler, scaler, ...), an accelerate Accelerator, a torch.Generator. The session adds the random
            states of Python, numpy, torch and CUDA.
        metrics: numbers to keep with the checkpoint; by default the reported metrics of this step.
        must: never skip the checkpoint. A checkpoint before a stop or after the last reported step is never skipped.
        overlap: copy the parameters and state of the optimizers in `stateful` in the background; an optimizer waits for
            the copy before its next step. Only for loops that change parameters and state in optimizer.step() alone.

        The call is atomic: afterwards the whole checkpoint exists, or no part of it. Raises CheckpointWriteError.
        """
        step = require_whole("step", step)
        if self._last_committed is not None and self._last_committed[0] == step:
            tag = self._loop_requests.tag
            self._loop_requests.starting_checkpoint()
            self._loop_requests.checkpoint_written()
            if tag:  # A later tag belongs to the next checkpoint.
                self._loop_requests.tag = tag
                self._loop_requests.checkpoint_skipped()
            return self._last_committed[1]
        self._loop_requests.starting_checkpoint()
        if metrics is None:
            reported_step, _, reported = self._last_report
            metrics = reported if reported_step == step else {}
        numbers = self._channel.clean_metrics(metrics)
        must = must or self._loop_requests.stopping or self._is_last(step)
        require_free(stateful)
        if self.steering.has_state:
            stateful[STEERING] = self.steering
        tag = self._loop_requests.tag
        path = self._writer.write(step, numbers, stateful, must=must, overlap=overlap and not must, tag=tag)
        if path is None:
            self._loop_requests.checkpoint_skipped()
            return None
        self._last_committed = step, path
        self.sources.checkpoint_saved(stateful)
        self._loop_requests.checkpoint_written()
        self.steering.report_event("save", step, {})
        return path

    def _is_last(self, step: int) -> bool:
        """Return True if `step` is the last reported step of the training."""
        reported, total, _ = self._last_report
        return reported == step and step >= total > 0

    def mark_complete(
        self, step: int, metrics: Mapping[str, object] | None = None, *, staged: Path | None = None
    ) -> Path:
        """Commit a `<output>/checkpoint-<step>/` that another library has finished writing (see BatonCallback).

        staged: another directory of the output directory with the finished checkpoint. The session renames the
            directory, and deletes the checkpoint after newer ones, as for its own checkpoints.

        The other library resumes from the checkpoint; `resume` does not.
        """
        step = require_whole("step", step)
        final = checkpoint_directory.checkpoint_path(self.output_dir, step)
        tag = self._loop_requests.tag
        self._loop_requests.starting_checkpoint()
        self._last_committed = step, final
        self._loop_requests.checkpoint_written()
        if self._ranks.first:
            self._writer.adopt(step, self._channel.clean_metrics(metrics or {}), staged, tag)
        self.steering.report_event("save", step, {})
        return final

    def resume(self, **stateful: Any) -> int:
        """Restore all states from the checkpoint to resume. Returns the checkpoint's step; 0 for a fresh start.

        Pass the states of `checkpoint` under their names. The method also restores random states, therefore create
        models and data order before this call, and draw no random numbers in between. Raises CheckpointDamagedError or
        CheckpointMismatchError, after which the objects may be partly restored and must not be trained.
        """
        directory = self.resume_from
        if directory is None:
            self.sources.follow(stateful)
            self.steering.resume(0, stateful.values())
            return 0
        marker = checkpoint_directory.verify(directory)
        if not marker.states:
            raise CheckpointMismatchError(
                f"{directory} was not written by session.checkpoint ({marker.created_by})",
                "Resume it with the library that wrote it; for the Hugging Face Trainer see BatonCallback",
            )
        require_free(stateful)
        if STEERING in marker.states:
            stateful[STEERING] = self.steering
        require_same(directory, marker.states, stateful)
        from gpu_client.training.checkpoint import state_files

        randoms = state_files.load_states(directory, marker.states, stateful)
        self._last_report = marker.step, 0, {}
        self.restore_randoms(randoms)
        self.sources.follow(stateful)
        log.info("resumed from %s", directory)
        self.steering.resume(marker.step, stateful.values())
        return marker.step

    def gather_randoms(self) -> list[dict[str, Any]] | None:
        """Gather the random states of all ranks for another library's checkpoint; None except on the first rank.

        Collective: all ranks call this method together.
        """
        from gpu_client.training.checkpoint.random_state import capture_random

        return self._ranks.gather(capture_random())

    def restore_randoms(self, randoms: Sequence[Mapping[str, Any]]) -> None:
        """Restore this rank's generators, if the number of ranks is unchanged."""
        from gpu_client.training.checkpoint.random_state import restore_random

        if len(randoms) == self._ranks.size:
            restore_random(randoms[self._ranks.rank])
            return
        log.warning(
            "the checkpoint was written by %d processes, now there are %d: random numbers will differ from an "
            "uninterrupted run",
            len(randoms),
            self._ranks.size,
        )

    def close(self) -> None:
        """Finish copies, send the last progress, disconnect, uninstall the handler. Idempotent; also runs at exit."""
        self._writer.settle()
        self._loop_requests.close()
        self.steering.close()
        self._channel.close()
        self._ranks.close()
        self._loop_requests.uninstall()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
