"""The training session: progress, directives, atomic checkpoints and exact resume for any training loop.

A script that uses it can be killed at any moment and continued elsewhere with bit-identical results::

    with Session.start() as session:
        done = session.resume(model=model, optimizer=optimizer, batches=batches)
        for step, batch in zip(range(done + 1, total + 1), batches):
            loss = train_step(batch)
            session.report(step, total, loss=loss)
            if session.checkpoint_due(step, every=100):
                session.checkpoint(step, model=model, optimizer=optimizer, batches=batches)
            if session.should_stop:
                break

It works the same without Baton: see `Session.start`.
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
from gpu_client.training.channel import Channel
from gpu_client.training.checkpoint import checkpoint_directory, state_files
from gpu_client.training.checkpoint.checkpoint_writer import Writer
from gpu_client.training.checkpoint.random_state import capture_random, restore_random
from gpu_client.training.checkpoint.shared_memory import Arena
from gpu_client.training.distributed.process_group import Ranks
from gpu_client.training.errors import CheckpointMismatchError, SessionError
from gpu_client.training.protocol import Directive
from gpu_client.training.session import environment
from gpu_client.training.session.data_sources import Sources
from gpu_client.training.session.profiler import StepProfiler
from gpu_client.training.session.stop_requests import Directives

STEERING = "steering"
"""Of a checkpoint's states the one that is the session's own: counters of rules, where there are any."""


def whole(name: str, value: int) -> int:
    """`value` as Python's own whole number: what JSON and file names are made of."""
    try:
        return index(value)
    except TypeError as error:
        raise SessionError(f"{name} is {value!r}", "Pass a whole number") from error


def require_free(stateful: Mapping[str, object]) -> None:
    if STEERING in stateful:
        raise SessionError(f"the state {STEERING!r} is the session's own", "Choose another keyword for yours")


def require_same(directory: Path, stored: Mapping[str, object], asked: Mapping[str, object]) -> None:
    """Raises CheckpointMismatchError where a checkpoint has other states than are asked for."""
    if stored.keys() != asked.keys():
        raise CheckpointMismatchError(
            f"{directory} holds {names(stored)}, but resume() asks for {names(asked)}",
            "Name the same states in checkpoint() and resume(), or start a new job for the changed script",
        )


def names(named: Mapping[str, object]) -> str:
    return ", ".join(sorted(named)) or "nothing"


KEEP_LAST = 2

log = logging.getLogger("baton.training")


class Session:
    """One attempt at one job, seen from inside the training process. Made by `Session.start`.

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
        self.sources = Sources(keep_last)
        # Under an agent this directory dies with the machine: what counts is what the agent has stored elsewhere.
        self._durable = channel_path is None
        output_dir.mkdir(parents=True, exist_ok=True)
        if ranks.first:
            checkpoint_directory.clear_leftovers(output_dir)
        self._directives = Directives(ranks)
        self.steering = Steering(self._directives, ranks)
        """Rules and commands: what they may do with this loop, and what they want of it."""
        self._directives.share_with(self.steering)
        self.steering.offer(profiler=StepProfiler(output_dir, self.artifact, first=ranks.first))
        listening, told = channel_path if ranks.first else None, self.steering
        self._channel = Channel(listening, self._directives.receive, on_steering=told.receive, signals=told.measured)
        known = checkpoint_directory.step_of(resume_from) if resume_from is not None else 0
        send = self._channel.tell if self._channel.connected else None
        self.steering.begin(control, send, self._channel.note, step=known)
        self._writer = Writer(
            output_dir,
            None if arena is None else Arena(arena),
            ranks,
            self._channel,
            durable=self._durable,
            keep_last=keep_last,
            keep=resume_from if job_id else None,
            on_lost=lambda: self._directives.receive(Directive("checkpoint")),
        )
        self._directives.install()
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
        """Begin. What the agent sets in the environment (BATON_*) wins over the arguments.

        output_dir, data_dir, params: for runs without Baton.
        resume: without Baton, continue from the newest complete checkpoint in the output directory. (Under Baton the
            agent says where to continue.)
        keep_last: how many checkpoints stay in the output directory, at least 1. Older ones are deleted once
            the agent knows of their successors.
        rules: without Baton, a file of rules (docs/rules.md). (Under Baton they are the job's.)

        Raises SessionError without output directory or readable parameters, or where checkpoints of two runs would mix.
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
        """Where the job's inputs lie. Raises SessionError when no data directory was given."""
        if self._data_dir is None:
            raise SessionError("no data directory is known", "Pass Session.start(data_dir=...) or set BATON_DATA_DIR")
        return self._data_dir

    def report(self, step: int, total: int, **metrics: object) -> None:
        """Say how far training is: `step` of `total` (0: nobody knows) done, with numbers (or tensors of one).

        Cheap enough for every step: at most one report per 0.2 s is read and sent. Raises SessionError for a fraction.
        """
        self.report_new(step, total, metrics, shown=metrics)

    def report_new(
        self, step: int, total: int, new: Mapping[str, object], *, shown: Mapping[str, object], event: str = ""
    ) -> None:
        """The same where `shown`, for people, has older numbers. event: `step`, `log`; `none` is no news for rules."""
        # Kept as they are until the next report: reading (or detaching) each would cost more than all the rest, and
        # once backward() has run, a loss holds no activations.
        if type(step) is not int or type(total) is not int:
            step, total = whole("step", step), whole("total", total)
        self._last_report = (step, total, shown)
        new, shown = self.sources.beside(new, shown)
        if self._writer.skipped_steps:
            shown = {"checkpoints_skipped": len(self._writer.skipped_steps), **shown}
        self._channel.report(step, total, shown, new=new)
        if self.steering.live and event != "none":
            self.steering.reported(step, new, last=step >= total > 0, event=event)

    @property
    def alone(self) -> bool:
        """Whether this is the only process of the training."""
        return self._ranks.size == 1

    def phase(self, name: str, done: int, total: int) -> None:
        """Say how far something is that comes between steps: `done` of `total` images are encoded, say.

        name: a metric's, `cached_latents`. Whoever watches the job sees it, and to the watch over jobs that make no
            progress (`no_progress_timeout_s`) it is some whenever `done` changes. As cheap as `report`.
        """
        step, total_steps, metrics = self._last_report
        done, total = whole("done", done), whole("total", total)
        told = {name: done, f"{name}_total": total}
        # First, for the agent leaves out what is too much.
        self._channel.report(step, total_steps, {**told, **metrics, **told}, phase=(name, done, total), new={})

    def artifact(self, path: str | Path) -> None:
        """Show a finished file of the output directory to whoever watches the job, now instead of at its end.

        path: absolute, or below the output directory. A name like `step-500.png` says of which step it is. It must not
            change any more; written anew, say so again. At most 64 MiB.

        Costs nothing but a message: the agent uploads it behind the training. It is among the job's outputs in the end
        only if those name it, or a directory that it lies in. Raises SessionError for what is no file there.
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
        """Whether to leave the training loop now. An attribute read: ask at every step.

        A stop that wants a checkpoint first becomes visible here when `checkpoint_due` has said so, in scripts that
        ask it; otherwise at once. With several processes every rank sees it after the same `checkpoint_due`.
        """
        return self._directives.should_stop

    @property
    def stop_reason(self) -> str | None:
        """Why: "cancel", "pause", "release", "lease_lost", "rule" or "signal" (SIGTERM); None while it goes on."""
        return self._directives.stop_reason

    @property
    def finishing(self) -> bool:
        """Whether a rule or command ended the training early, as complete: leave the loop and write the outputs."""
        return self.steering.finishing

    def checkpoint_due(self, step: int, every: int | None = None) -> bool:
        """Whether to write a checkpoint after `step`: each `every` steps, when asked to, and before stopping.

        Ask once after every step; with several processes this is where all ranks agree. One that is due while the last
        one is still being stored is skipped; the first step after that is due instead.
        """
        if every is not None and every < 1:
            raise SessionError(f"a checkpoint every {every} steps is not possible", "every is at least 1, or None")
        on_interval = every is not None and step % every == 0
        due = self._directives.due(step, on_interval, self._writer.busy, last=self._is_last(step))
        if on_interval and self._directives.put_off:
            self._writer.skip(step)
        return due

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def skipped_checkpoints(self) -> list[int]:
        """The steps whose checkpoints were skipped because the one before was still being stored."""
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
        """Take the checkpoint of `step`; returns where it lies, None if it is skipped for a newer one.

        stateful: everything the loop changes: objects with state_dict() and load_state_dict() (model, optimizer,
            scheduler, sampler, scaler, ...), an accelerate Accelerator, a torch.Generator. The random states of
            Python, numpy, torch and CUDA are added by themselves.
        metrics: numbers to keep with it; without them, those reported for this step.
        must: never skip it. So it is anyway before a stop, and after the last step reported.
        overlap: copy what an optimizer among `stateful` holds behind the training; it waits for that before its next
            step. Only for loops that change parameters and optimizer state nowhere but in optimizer.step().

        Either the whole checkpoint exists afterwards or nothing of it. Raises CheckpointWriteError.
        """
        step = whole("step", step)
        if self._last_committed is not None and self._last_committed[0] == step:
            tag = self._directives.tag
            self._directives.starting_checkpoint()
            self._directives.checkpoint_written()
            if tag:  # wanted after this one was written: the next one is to have it
                self._directives.tag = tag
                self._directives.checkpoint_skipped()
            return self._last_committed[1]
        self._directives.starting_checkpoint()
        if metrics is None:
            reported_step, _, reported = self._last_report
            metrics = reported if reported_step == step else {}
        numbers = self._channel.clean_metrics(metrics)
        must = must or self._directives.stopping or self._is_last(step)
        require_free(stateful)
        if self.steering.has_state:
            stateful[STEERING] = self.steering
        kept_as = self._directives.tag
        path = self._writer.write(step, numbers, stateful, must=must, overlap=overlap and not must, tag=kept_as)
        if path is None:
            self._directives.checkpoint_skipped()
            return None
        self._last_committed = step, path
        self.sources.saved(stateful)
        self._directives.checkpoint_written()
        self.steering.happened("save", step, {})
        return path

    def _is_last(self, step: int) -> bool:
        """Whether nothing comes after `step`, as far as was reported."""
        reported, total, _ = self._last_report
        return reported == step and step >= total > 0

    def mark_complete(
        self, step: int, metrics: Mapping[str, object] | None = None, *, staged: Path | None = None
    ) -> Path:
        """Commit a `<output>/checkpoint-<step>/` that another library has finished writing (see BatonCallback).

        staged: where it was written, if elsewhere in the output directory: it gets its name now, and goes when newer
            ones are there, as the session's own do.

        It is not resumed by `resume` but by that library.
        """
        step = whole("step", step)
        final = checkpoint_directory.checkpoint_path(self.output_dir, step)
        kept_as = self._directives.tag
        self._directives.starting_checkpoint()
        self._last_committed = step, final
        self._directives.checkpoint_written()
        if self._ranks.first:
            self._writer.adopt(step, self._channel.clean_metrics(metrics or {}), staged, kept_as)
        self.steering.happened("save", step, {})
        return final

    def resume(self, **stateful: Any) -> int:
        """Restore everything from the checkpoint to continue from; returns its step, 0 for a fresh start.

        Name the same states as for `checkpoint`. Random states come back too, so create models and data order
        before this call and draw nothing in between. Raises CheckpointDamagedError or CheckpointMismatchError; after
        either, the objects may be partly restored and must not be trained.
        """
        directory = self.resume_from
        if directory is None:
            self.sources.follow(stateful)
            self.steering.resumed(0, stateful.values())
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
        self.steering.resumed(marker.step, stateful.values())
        return marker.step

    def gather_randoms(self) -> list[dict[str, Any]] | None:
        """The random states of all processes, for another library's checkpoint; None but on the first one.

        Every rank calls it at the same moment.
        """
        return self._ranks.gather(capture_random())

    def restore_randoms(self, randoms: Sequence[Mapping[str, Any]]) -> None:
        """Put this process's generators where they were; if there were as many processes."""
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
        """Finish copying, send the last progress, hang up, give SIGTERM back. May be repeated; happens at exit, too."""
        self._writer.settle()
        self._directives.close()
        self.steering.close()
        self._channel.close()
        self._ranks.close()
        self._directives.uninstall()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
