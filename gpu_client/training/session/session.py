"""The training session: progress, directives, atomic checkpoints and exact resume for any training loop.

A script with a session can be killed at any moment and continued elsewhere with bit-identical results::

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
from typing import Any, Self

from gpu_client.controller.steering import Steering
from gpu_client.training.channel import AgentChannel
from gpu_client.training.checkpoint import checkpoint_directory, state_files
from gpu_client.training.checkpoint.checkpoint_writer import CheckpointWriter
from gpu_client.training.checkpoint.random_state import capture_random, restore_random
from gpu_client.training.checkpoint.shared_memory import Arena
from gpu_client.training.distributed.process_group import Ranks
from gpu_client.training.errors import CheckpointMismatchError, SessionError
from gpu_client.training.protocol import TrainerDirective
from gpu_client.training.session import environment
from gpu_client.training.session.data_sources import DataSources
from gpu_client.training.session.loop_requests import LoopRequests
from gpu_client.training.session.profiler import StepProfiler

STEERING = "steering"
"""Name of the session's own state in checkpoints: the counters of rules, if there are any."""


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
    """An attempt at one job, inside the training process. Made by `Session.start`.

    job_id and epoch are "" and 0 without Baton. params is the job's parameters. In a run of several processes every
    rank makes a session, and calls `checkpoint_due`, `checkpoint` and `resume` at the same steps.
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
    ) -> None:
        """Prefer `Session.start`."""
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
        # Under an agent this directory dies with the machine; only the agent's uploads survive.
        self._durable = channel_path is None
        output_dir.mkdir(parents=True, exist_ok=True)
        if ranks.first:
            checkpoint_directory.clear_leftovers(output_dir)
        self._loop_requests = LoopRequests(ranks)
        self.steering = Steering(self._loop_requests, ranks)
        """Rules and commands: the capabilities of this loop, and requests to the loop."""
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
            None if arena is None else Arena(arena),
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
        """Start a session. The agent's environment variables (BATON_*) win over the arguments.

        output_dir, data_dir, params: for runs without Baton.
        resume: without Baton, continue from the newest complete checkpoint in the output directory. (Under Baton the
            agent names the checkpoint.)
        keep_last: number of checkpoints that stay in the output directory, at least 1. Older ones are deleted once
            the agent knows of their successors.
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
        )

    # --- the environment ---------------------------------------------------------------------------------------------

    @property
    def data_dir(self) -> Path:
        """Directory of the job's inputs. Raises SessionError if there is none."""
        if self._data_dir is None:
            raise SessionError("no data directory is known", "Pass Session.start(data_dir=...) or set BATON_DATA_DIR")
        return self._data_dir

    def report(self, step: int, total: int, **metrics: object) -> None:
        """Report progress: `step` of `total` (0 if unknown) is done, with numbers (or tensors of one element).

        Cheap enough for every step: at most one report per 0.2 s is read and sent. Raises SessionError for a fraction.
        """
        self.report_new(step, total, metrics, shown=metrics)

    def report_new(
        self, step: int, total: int, new: Mapping[str, object], *, shown: Mapping[str, object], event: str = ""
    ) -> None:
        """Report metrics; `shown` also has older ones for display. event: `step`, `log`, or `none` if rules get
        nothing.
        """
        # The values stay unread until the next report, because reading (or detaching) them would dominate the cost;
        # after backward() a loss holds no activations.
        if type(step) is not int or type(total) is not int:
            step, total = require_whole("step", step), require_whole("total", total)
        self._last_report = (step, total, shown)
        new, shown = self.sources.merge_metrics(new, shown)
        if self._writer.skipped_steps:
            shown = {"checkpoints_skipped": len(self._writer.skipped_steps), **shown}
        self._channel.report(step, total, shown, new=new)
        if self.steering.live and event != "none":
            self.steering.report_step(step, new, last=step >= total > 0, event=event)

    @property
    def alone(self) -> bool:
        """True if this is the only process of the training."""
        return self._ranks.size == 1

    def phase(self, name: str, done: int, total: int) -> None:
        """Report progress between steps, for example `done` of `total` images encoded.

        name: the name of a metric, such as `cached_latents`. `baton watch` shows the phase, and a change of `done`
            counts as progress for `no_progress_timeout_s`. As cheap as `report`.
        """
        step, total_steps, metrics = self._last_report
        done, total = require_whole("done", done), require_whole("total", total)
        progress = {name: done, f"{name}_total": total}
        # The phase comes first, because the agent drops metrics beyond its limit.
        self._channel.report(step, total_steps, {**progress, **metrics, **progress}, phase=(name, done, total), new={})

    def artifact(self, path: str | Path) -> None:
        """Show a finished file of the output directory in `baton watch` now, not only at the job's end.

        path: absolute, or relative to the output directory. A name like `step-500.png` contains its step. The file must
            not change any more; after a rewrite, call artifact() again. At most 64 MiB.

        The call costs one message: the agent uploads the file in the background. The file belongs to the job's outputs
        only if those name the file or its directory. Raises SessionError if there is no such file.
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
        """True if the loop should leave now. Cheap; read at every step.

        A stop with a checkpoint becomes visible after `checkpoint_due` has requested that checkpoint, in scripts that
        call `checkpoint_due`; otherwise at once. With several processes every rank sees the stop after the same
        `checkpoint_due`.
        """
        return self._loop_requests.should_stop

    @property
    def stop_reason(self) -> str | None:
        """Reason of the stop: "cancel", "pause", "release", "lease_lost", "rule", "signal" (SIGTERM); None without."""
        return self._loop_requests.stop_reason

    @property
    def finishing(self) -> bool:
        """True if a rule or command ended the training early, as complete: leave the loop and write the outputs."""
        return self.steering.finishing

    def checkpoint_due(self, step: int, every: int | None = None) -> bool:
        """Tell if a checkpoint is due after `step`: each `every` steps, on request, and before a stop.

        Call once after every step; with several processes all ranks agree here. A checkpoint that is due while the last
        one is being stored is skipped; the first step afterwards is due instead.
        """
        if every is not None and every < 1:
            raise SessionError(f"a checkpoint every {every} steps is not possible", "every is at least 1, or None")
        on_interval = every is not None and step % every == 0
        due = self._loop_requests.due(step, on_interval, self._writer.busy, last=self._is_last(step))
        if on_interval and self._loop_requests.postponed:
            self._writer.skip(step)
        return due

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def skipped_checkpoints(self) -> list[int]:
        """The steps whose checkpoints were skipped because the previous one was still being stored."""
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
        """Take the checkpoint of `step`; return its path, or None if it is skipped for a later one.

        stateful: everything that the loop changes: objects with state_dict() and load_state_dict() (model, optimizer,
            scheduler, sampler, scaler, ...), an accelerate Accelerator, a torch.Generator. The random states of
            Python, numpy, torch and CUDA are added automatically.
        metrics: numbers to keep with the checkpoint; by default those reported for this step.
        must: never skip the checkpoint. A checkpoint before a stop or after the last reported step is never skipped.
        overlap: copy the parameters and state of the optimizers among `stateful` in the background; an optimizer waits
            for the copy before its next step. Only for loops that change both nowhere but in optimizer.step().

        Afterwards either the whole checkpoint exists or nothing of it. Raises CheckpointWriteError.
        """
        step = require_whole("step", step)
        if self._last_committed is not None and self._last_committed[0] == step:
            tag = self._loop_requests.tag
            self._loop_requests.starting_checkpoint()
            self._loop_requests.checkpoint_written()
            if tag:  # a tag requested after the write belongs to the next checkpoint
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
        """Tell if `step` is the last one, as far as reported."""
        reported, total, _ = self._last_report
        return reported == step and step >= total > 0

    def mark_complete(
        self, step: int, metrics: Mapping[str, object] | None = None, *, staged: Path | None = None
    ) -> Path:
        """Commit a `<output>/checkpoint-<step>/` that another library has finished writing (see BatonCallback).

        staged: another directory of the output directory in which the checkpoint was written; it is renamed now, and
            deleted after newer checkpoints, as the session's own are.

        That library resumes the checkpoint, not `resume`.
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
        """Restore everything from the checkpoint to resume; return its step, 0 for a fresh start.

        Name the same states as for `checkpoint`. Random states are restored too, so create models and data order before
        this call and draw nothing in between. Raises CheckpointDamagedError or CheckpointMismatchError; after either,
        the objects may be partly restored and must not be trained.
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
        randoms = state_files.load_states(directory, marker.states, stateful)
        self._last_report = marker.step, 0, {}
        self.restore_randoms(randoms)
        self.sources.follow(stateful)
        log.info("resumed from %s", directory)
        self.steering.resume(marker.step, stateful.values())
        return marker.step

    def gather_randoms(self) -> list[dict[str, Any]] | None:
        """Gather the random states of all ranks for another library's checkpoint; None except on the first rank.

        Every rank calls this at the same moment.
        """
        return self._ranks.gather(capture_random())

    def restore_randoms(self, randoms: Sequence[Mapping[str, Any]]) -> None:
        """Restore this rank's generators, if the number of ranks is unchanged."""
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
