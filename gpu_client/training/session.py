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
import shutil
from collections.abc import Callable, Mapping
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gpu_client.training import commit, environment, states
from gpu_client.training.channel import Channel
from gpu_client.training.directives import Directives
from gpu_client.training.errors import CheckpointMismatchError, CheckpointWriteError, SessionError
from gpu_client.training.ranks import Ranks

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
        keep_last: int,
        ranks: Ranks,
    ) -> None:
        """Prefer `Session.start`."""
        self.output_dir = output_dir
        self.params = params
        self.job_id = job_id
        self.epoch = epoch
        self.resume_from = resume_from
        self._data_dir = data_dir
        self._keep_last = keep_last
        self._ranks = ranks
        self._last_report: tuple[int, Mapping[str, object]] = (0, {})
        self._last_committed: int | None = None
        # Under an agent this directory dies with the machine: what counts is what the agent has stored elsewhere.
        self._durable = channel_path is None
        output_dir.mkdir(parents=True, exist_ok=True)
        if ranks.first:
            commit.clear_leftovers(output_dir)
        self._directives = Directives(ranks)
        self._channel = Channel(channel_path if ranks.first else None, self._directives.receive)
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
        variables: Mapping[str, str] = os.environ,
    ) -> Self:
        """Begin. What the agent sets in the environment (BATON_*) wins over the arguments.

        output_dir, data_dir, params: for runs without Baton.
        resume: without Baton, continue from the newest complete checkpoint in the output directory. (Under Baton the
            agent says where to continue.)
        keep_last: how many checkpoints stay in the output directory, at least 1. Older ones are deleted once
            the agent knows of their successors.

        Raises SessionError when no output directory is known, the parameters cannot be read, or a fresh run would mix
        with the checkpoints of an earlier one.
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
            keep_last=keep_last,
            ranks=Ranks(variables),
        )

    # --- the environment ---------------------------------------------------------------------------------------------

    @property
    def data_dir(self) -> Path:
        """Where the job's inputs lie. Raises SessionError when no data directory was given."""
        if self._data_dir is None:
            raise SessionError("no data directory is known", "Pass Session.start(data_dir=...) or set BATON_DATA_DIR")
        return self._data_dir

    def report(self, step: int, total: int, **metrics: object) -> None:
        """Say how far training is: `step` of `total` done, with numbers (tensors of one element are welcome).

        Cheap enough for every step: at most one report per 0.2 s is read and sent. numpy's and torch's whole numbers
        are steps too. Raises SessionError for a fraction.
        """
        # Kept as they are until the next report: reading (or detaching) each would cost more than all the rest, and
        # once backward() has run, a loss holds no activations.
        step, total = _whole("step", step), _whole("total", total)
        self._last_report = (step, metrics)
        self._channel.report(step, total, metrics)

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
        """Why to stop: "cancel", "pause", "release", "lease_lost" or "signal" (SIGTERM); None while training."""
        return self._directives.stop_reason

    def checkpoint_due(self, step: int, every: int | None = None) -> bool:
        """Whether to write a checkpoint after `step`: each `every` steps, when asked to, and before stopping.

        Ask once after every step; with several processes this is where all ranks agree.
        """
        if every is not None and every < 1:
            raise SessionError(f"a checkpoint every {every} steps is not possible", "every is at least 1, or None")
        on_interval = every is not None and step % every == 0
        return self._directives.due(step, on_interval)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoint(self, step: int, metrics: Mapping[str, object] | None = None, **stateful: Any) -> Path:
        """Write and commit the checkpoint of `step`; returns its directory.

        stateful: everything the loop changes: objects with state_dict() and load_state_dict() (model, optimizer,
            scheduler, sampler, scaler, ...), an accelerate Accelerator, a torch.Generator. The random states of
            Python, numpy, torch and CUDA are added by themselves.
        metrics: numbers to keep with it; without them, those reported for this step.

        Either the whole directory exists afterwards or nothing of it. Raises CheckpointWriteError.
        """
        step = _whole("step", step)
        final = commit.checkpoint_path(self.output_dir, step)
        self._directives.starting_checkpoint()
        if self._last_committed != step:
            if metrics is None:
                reported_step, reported = self._last_report
                metrics = reported if reported_step == step else {}
            numbers = self._channel.clean_metrics(metrics)
            self._write_on_all_ranks(step, final, numbers, stateful)
            self._last_committed = step
            if self._ranks.first:
                self._channel.checkpoint_written(step, str(final), numbers)
                self._rotate()
        self._directives.checkpoint_written()
        return final

    def mark_complete(self, step: int, metrics: Mapping[str, object] | None = None) -> Path:
        """Commit a `<output>/checkpoint-<step>/` that another library has finished writing (see BatonCallback).

        It is not resumed by `resume` but by that library.
        """
        step = _whole("step", step)
        final = commit.checkpoint_path(self.output_dir, step)
        self._directives.starting_checkpoint()
        self._last_committed = step
        self._directives.checkpoint_written()
        if not self._ranks.first:
            return final
        if not final.is_dir():
            raise CheckpointWriteError(f"{final} does not exist", "Write checkpoints into the session's output_dir")
        numbers = self._channel.clean_metrics(metrics or {})
        try:
            commit.write_marker(final, step, numbers, "script", {}, durable=self._durable)
        except OSError as error:
            raise self._explain(step, error) from error
        self._channel.checkpoint_written(step, str(final), numbers)
        return final

    def resume(self, **stateful: Any) -> int:
        """Restore everything from the checkpoint to continue from; returns its step, 0 for a fresh start.

        Name the same states as for `checkpoint`. Random states come back too, so create models and data order
        before this call and draw nothing in between. Raises CheckpointDamagedError or CheckpointMismatchError; after
        either, the objects may be partly restored and must not be trained.
        """
        directory = self.resume_from
        if directory is None:
            return 0
        marker = commit.verify(directory)
        if not marker.states:
            raise CheckpointMismatchError(
                f"{directory} was not written by session.checkpoint ({marker.created_by})",
                "Resume it with the library that wrote it; for the Hugging Face Trainer see BatonCallback",
            )
        missing, extra = stateful.keys() - marker.states.keys(), marker.states.keys() - stateful.keys()
        if missing or extra:
            raise CheckpointMismatchError(
                f"{directory} holds {_names(marker.states)}, but resume() asks for {_names(stateful)}",
                "Name the same states in checkpoint() and resume(), or start a new job for the changed script",
            )
        randoms = states.load_states(directory, marker.states, stateful)
        if len(randoms) == self._ranks.size:
            states.restore_random(randoms[self._ranks.rank])
        else:
            log.warning(
                "the checkpoint was written by %d processes, now there are %d: random numbers will differ from an "
                "uninterrupted run",
                len(randoms),
                self._ranks.size,
            )
        log.info("resumed from %s", directory)
        return marker.step

    def _write_on_all_ranks(
        self, step: int, final: Path, metrics: Mapping[str, float], stateful: Mapping[str, Any]
    ) -> None:
        """All ranks write, or none commits; one that fails takes the others along instead of leaving them waiting."""
        staged = commit.staging_path(self.output_dir, step)
        captured: dict[str, Any] = {}
        forms: dict[str, str] = {}

        def prepare() -> None:
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir()

        def publish() -> None:
            commit.write_marker(staged, step, metrics, "session", forms, durable=self._durable)
            commit.publish(staged, final, durable=self._durable)

        try:
            self._phase(step, lambda: captured.update(states.capture_random()))
            randoms = self._ranks.gather(captured)
            self._phase(step, prepare if self._ranks.first else None)
            self._phase(step, lambda: forms.update(states.save_states(staged, stateful, randoms)))
            self._phase(step, publish if self._ranks.first else None)
        except SessionError:
            if self._ranks.first:
                shutil.rmtree(staged, ignore_errors=True)
            raise

    def _phase(self, step: int, action: Callable[[], None] | None) -> None:
        """One part of a checkpoint; it is over when every rank has done its share, and fails on all when on one."""
        failure: Exception | None = None
        try:
            if action is not None:
                action()
        except (SessionError, *states.WRITE_ERRORS) as error:
            failure = error
        if self._ranks.agree(int(failure is not None))[0]:
            raise self._explain(step, failure) from failure

    def _explain(self, step: int, failure: Exception | None) -> SessionError:
        if isinstance(failure, SessionError):
            return failure
        if failure is None:
            return CheckpointWriteError(f"another process could not write its part of step {step}", "See its log")
        free_bytes = shutil.disk_usage(self.output_dir).free
        return CheckpointWriteError(
            f"the checkpoint of step {step} could not be written ({failure}); "
            f"{free_bytes} bytes are free in {self.output_dir}",
            "Check that the directory can be written; ask for more disk, or keep fewer checkpoints (keep_last=1)",
        )

    def _rotate(self) -> None:
        """Delete old session checkpoints, but never one that the agent may not know of, nor the one resumed from."""
        own = [
            (step, path)
            for step, path in commit.complete_checkpoints(self.output_dir)
            if commit.created_by_session(path)
        ]
        newest_untold = any(not self._channel.told(step) for step, _ in own[-self._keep_last :])
        for step, path in own[: -self._keep_last]:
            if newest_untold or not self._channel.told(step):
                continue
            if self.resume_from is not None and self.job_id and path == self.resume_from:
                continue
            # Renamed first: a directory that is being deleted must not look like a checkpoint.
            doomed = path.with_name(f".{path.name}.old")
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def close(self) -> None:
        """Send the last progress, hang up, give SIGTERM back. Happens by itself at exit; may be called twice."""
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


def _whole(name: str, value: int) -> int:
    """`value` as Python's own whole number: what JSON and file names are made of."""
    try:
        return index(value)
    except TypeError as error:
        raise SessionError(f"{name} is {value!r}", "Pass a whole number") from error


def _names(named: Mapping[str, object]) -> str:
    return ", ".join(sorted(named)) or "nothing"
